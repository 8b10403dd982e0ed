"""Tiny random checkpoints of every model type with folds, in float32, and what transformers
computes of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from families_dense import SIGLIP, SIZES
from families_experts import FOUR, LATENT
from family import Tensors, write_shards
from tiny_models import read_tensors

INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
BERT = {
    **{
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "vocab_size": 160,
    },
    **{"max_position_embeddings": 64, "type_vocab_size": 2},
}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "gemma": ("GemmaForCausalLM", SIZES),
    "gemma2": ("Gemma2ForCausalLM", SIZES),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": SIZES,
            "vision_config": SIGLIP,
            **{
                "mm_tokens_per_image": 4,
                "image_token_index": 150,
                "boi_token_index": 151,
                "eoi_token_index": 152,
            },
        },
    ),
    "phi": ("PhiForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "cohere": ("CohereForCausalLM", {**SIZES, "use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", SIZES),
    "olmo": ("OlmoForCausalLM", {**SIZES, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "bert": ("BertModel", BERT),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**SIZES, **FOUR, "shared_expert_intermediate_size": 112, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, **FOUR, "mlp_only_layers": [1]}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": None}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**LATENT, **INDEXER}),
}


def build(name: str, folder: Path) -> Path:
    """The folder, now with a checkpoint in three float32 shards: weights large enough to attend by,
    and biases that are not 0.
    """
    import torch
    import transformers

    kind, sizes = MODELS[name]
    model = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(model.config_class(**sizes)).float().save_pretrained(folder)
        tensors = read_tensors(folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        moved = {name: tensor + 0.2 * torch.randn(tensor.shape) for name, tensor in tensors.items()}
    write_shards(moved, folder)
    return folder


def write_as(source: Path, tensors: Tensors, folder: Path) -> Path:
    """Another folder with the same model and these tensors."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    write_shards(tensors, folder)
    return folder


def outputs(name: str, folder: Path) -> Any:
    """Logits, or hidden states, in float32; the test fails where a tensor of the model was missing
    or of another shape.
    """
    import torch
    import transformers

    kind = getattr(transformers, MODELS[name][0])
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        made = model.eval()(input_ids=torch.arange(1, 33).reshape(2, 16))
    return made.logits if "logits" in made else made.last_hidden_state
