"""Tiny models as GGUF files, as llama.cpp's own converter would write them; what llama.cpp and
transformers answer.

torch, transformers and llama.cpp are imported where they are needed: collecting the tests stays
fast.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_models import (
    make_llama,
    make_mixtral,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
    read_json,
    read_tensors,
)

VOCABULARY = 320
PROMPT = [1, *range(260, 275)]
HEADS = {"q_proj": 4, "k_proj": 2}
FILE_TYPES = {"bf16": 32, "mxfp4": 38, "nvfp4": 39}  # LLAMA_FTYPE_MOSTLY_* of llama.h
NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight"
)
EXPERTS = {
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}
MAKERS = {
    "llama": make_llama,
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    # as published ones: llama.cpp reads no such key
    "qwen3moe": partial(make_qwen3_moe, norm_topk_prob=True),
    "mixtral": make_mixtral,
}
ARCHITECTURES = {"mixtral": "llama"}  # llama.cpp's, where it is not the name here
TURNED = ("llama", "mixtral")  # rows of q and k in another order than transformers has them


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of transformers; of an expert, the stack."""
    if expert := EXPERT.fullmatch(name):
        return f"blk.{expert[1]}.{EXPERTS[expert[3]]}.weight"
    module, _, part = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{part}"
    _, _, block, inner = module.split(".", 3)
    return f"blk.{block}.{NAMES[inner]}.{part}"


def permuted(name: str, rows: Any, kind: str) -> Any:
    """Rows in the order of llama.cpp, whose rotary embedding of Llama turns neighbours; of Qwen3,
    halves, as transformers.
    """
    heads = HEADS.get(name.split(".")[-2]) if kind in TURNED else None
    return (
        rows if heads is None else rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    )


def unpermuted(name: str, rows: Any, kind: str) -> Any:
    heads = HEADS.get(name.split(".")[-2]) if kind in TURNED else None
    return (
        rows if heads is None else rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    )


def write_gguf(checkpoint: Path, kind: str, path: Path, dtype: str = "BF16") -> Path:
    """The checkpoint as llama.cpp's own converter would write it: matrices and stacks of that type,
    norms and routers in float32.
    """
    import gguf
    import torch
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(kind, kind))
    _add_metadata(writer, kind, read_json(checkpoint / "config.json"))
    stacks: dict[str, list[Any]] = defaultdict(list)
    for name, tensor in sorted(
        read_tensors(checkpoint).items(), key=lambda item: _in_order(item[0])
    ):
        stacks[gguf_name(name)].append(permuted(name, tensor, kind).float())
    stored = gguf.GGMLQuantizationType[dtype]
    for name, parts in stacks.items():
        rows = (torch.stack(parts) if "_exps" in name else parts[0]).numpy()
        if rows.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, rows)
        else:
            writer.add_tensor(name, quantize(rows, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _in_order(name: str) -> tuple[str, int]:
    """Experts of a stack by their number, not as text."""
    expert = EXPERT.fullmatch(name)
    return (gguf_name(name), int(expert[2])) if expert else (gguf_name(name), 0)


def _add_metadata(writer: Any, kind: str, config: dict[str, Any]) -> None:
    writer.add_name(f"tiny {kind}")
    writer.add_file_type(FILE_TYPES["bf16"])
    writer.add_quantization_version(2)
    writer.add_context_length(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS["q_proj"])
    writer.add_head_count_kv(HEADS["k_proj"])
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(VOCABULARY)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if width := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(width)
    add_words(writer)


def add_words(writer: Any) -> None:
    writer.add_tokenizer_model("llama")
    # Words, and of bytes only a line's end: the server says nothing of a byte that is no character.
    words = [f"▁t{number}" for number in range(VOCABULARY - 4)]
    writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>", *words])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, 6, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def write_renamed(path: Path, output: Path, ending: str, instead: str) -> Path:
    """The same GGUF file, but for names that end so; by llama.cpp's own Python package."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
    for tensor in reader.tensors:
        name = tensor.name
        if name.endswith(ending):
            name = name.removesuffix(ending) + instead
        writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def write_gptoss(path: Path) -> Path:
    """A gpt-oss of one layer and random weights in bf16; biases, router and sinks in float32, as
    llama.cpp's own converter writes them.
    """
    import gguf
    import numpy as np
    from gguf.quants import quantize

    writer, random = gguf.GGUFWriter(path, "gpt-oss"), np.random.default_rng(0)
    config = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    rest = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 150000.0}}
    _add_metadata(writer, "gpt-oss", {**config, **experts, **rest})
    writer.add_sliding_window(128)
    wide, narrow = 32 * HEADS["q_proj"], 32 * HEADS["k_proj"]
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(["token_embd.weight", "output.weight"], (VOCABULARY, 64)),
        **{"output_norm.weight": (64,), "blk.0.attn_sinks.weight": (HEADS["q_proj"],)},
        **dict.fromkeys(["blk.0.attn_norm.weight", "blk.0.post_attention_norm.weight"], (64,)),
        **{"blk.0.attn_q.weight": (wide, 64), "blk.0.attn_q.bias": (wide,)},
        **{"blk.0.attn_k.weight": (narrow, 64), "blk.0.attn_k.bias": (narrow,)},
        **{"blk.0.attn_v.weight": (narrow, 64), "blk.0.attn_v.bias": (narrow,)},
        **{"blk.0.attn_output.weight": (64, wide), "blk.0.attn_output.bias": (64,)},
        **{"blk.0.ffn_gate_inp.weight": (4, 64), "blk.0.ffn_gate_inp.bias": (4,)},
    }
    for part in ("gate", "up", "down"):
        shapes |= {
            f"blk.0.ffn_{part}_exps.weight": (4, 64, 64),
            f"blk.0.ffn_{part}_exps.bias": (4, 64),
        }
    for name, shape in shapes.items():
        rows = random.normal(scale=0.1, size=shape).astype(np.float32)
        if len(shape) == 1 or "ffn_gate_inp" in name or name.endswith(".bias"):
            writer.add_tensor(name, rows)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def runs_llamacpp(path: Path) -> bool:
    """Whether llama.cpp answers, in a process of its own, which its assertions end."""
    code = "from llamacpp_models import run_llamacpp; from pathlib import Path;"
    code += f" assert len(run_llamacpp(Path({str(path)!r}))) == 20"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, env=environment, capture_output=True, timeout=300, check=False)
    return ended.returncode == 0


def read_gguf(path: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values_of_tensor(tensor: Any) -> Any:
    """Float32 of a GGUF tensor, of NVFP4 without its global scale, by llama.cpp's own Python
    package.
    """
    import torch
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def weights_of(path: Path, checkpoint: Path, kind: str) -> dict[str, Any]:
    """Name in transformers -> float32 tensor of a GGUF file, its rows back in the order of
    transformers; of each expert, its part of a stack, under its own scale.
    """
    tensors, weights = read_gguf(path), {}
    for name in read_tensors(checkpoint):
        stored = gguf_name(name)
        values = values_of_tensor(tensors[stored])
        scale = tensors.get(f"{stored.removesuffix('.weight')}.scale")
        scales = None if scale is None else values_of_tensor(scale)
        if expert := EXPERT.fullmatch(name):
            number = int(expert[2])
            values, scales = values[number], None if scales is None else scales[number]
        weights[name] = unpermuted(name, values if scales is None else values * scales, kind)
    return weights


def four_bit(path: Path) -> set[str]:
    return {
        name
        for name, tensor in read_gguf(path).items()
        if tensor.tensor_type.name in ("MXFP4", "NVFP4")
    }


def expected_by_transformers(checkpoint: Path, weights: dict[str, Any]) -> Any:
    """Log-probabilities of the next token, by transformers in float32, which stacks experts as it
    reads them.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as folder:
        shutil.copy(checkpoint / "config.json", folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            Path(folder) / "model.safetensors",
            metadata={"format": "pt"},
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)


def run_llamacpp(path: Path) -> dict[int, float]:
    """Token -> log-probability of the 20 likeliest next tokens, by llama.cpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_predict, params.cpuparams.n_threads, params.warmup = 64, 1, 2, False
    request = {
        "prompt": PROMPT,
        "n_predict": 1,
        "n_probs": 20,
        "temperature": 0,
        "cache_prompt": False,
    }
    answer = xllamacpp.Server(params).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in likeliest}


def distance(found: dict[int, float], expected: Any) -> float:
    return max(abs(value - expected[token].item()) for token, value in found.items())
