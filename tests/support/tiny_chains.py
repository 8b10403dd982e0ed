"""Tiny random models of many families, with a tokenizer of 26 letters, for calibration; and text
for them.

torch and transformers are imported where they are needed: collecting the tests stays fast.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from built_once import built_once
from checkpoints import Outcome, run

LETTERS = string.ascii_lowercase
LENGTH, SAMPLES = 32, 6
TEXT = "".join(np.random.default_rng(5).choice(list(LETTERS), LENGTH * SAMPLES))
SIZES: dict[str, Any] = {
    **{
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **{
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
    },
    **{
        "topk_group": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
    },
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": 8},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {
        "sliding_window": 8,
        "layer_types": KINDS,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    },
    "Gemma3": {"sliding_window": 8, "layer_types": KINDS, "query_pre_attn_scalar": 16},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": FOUR,
    "DeepseekV3": LATENT,
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": KINDS,
    },
}
BERT = {
    **{
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 32,
    },
    **{"max_position_embeddings": 40, "pad_token_id": 0},
}


def make_model(folder: Path, name: str, dtype: str = "float32", **sizes: Any) -> Path:
    """The folder, now with a random model of that family and its tokenizer; Bert is an encoder
    without a head.
    """
    import torch
    import transformers

    def build(made: Path) -> None:
        config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
        own = {**BERT, **sizes} if name == "Bert" else {**SIZES, **MODELS[name], **sizes}
        config = getattr(transformers, config_name)(**own)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = getattr(transformers, "BertModel" if name == "Bert" else f"{name}ForCausalLM")(
                config
            )
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    torch.nn.init.normal_(tensor, 0.5 if tensor.dim() == 1 else 0.0, 0.2)
        model.to(getattr(torch, dtype)).save_pretrained(made)
        write_tokenizer(made)

    return built_once(f"{name} {dtype} {sorted(sizes.items())}", build, folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are letters: a is 3, b is 4; it knows spaces and capitals not, and
    adds nothing.
    """
    vocabulary = {
        "[PAD]": 0,
        "[UNK]": 1,
        "[EOS]": 2,
        **{letter: number for number, letter in enumerate(LETTERS, 3)},
    }
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    tokenizer = {
        **parts,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "model_max_length": 40,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokens_of(text: str) -> list[int]:
    """What that tokenizer makes of letters."""
    return [LETTERS.index(letter) + 3 for letter in text]


def calibrate(source: Path | str, output: Path, *options: object) -> Outcome:
    """The command, in this process, on samples of LENGTH."""
    return run("calibrate", source, "-o", output, "--sequence-length", LENGTH, *options, "--json")
