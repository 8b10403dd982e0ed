"""A small GGUF model, and a donor of its frame."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from checkpoints import LAYER, llama_shards, values_of
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    f"{LAYER}.input_layernorm": "blk.0.attn_norm",
    f"{LAYER}.self_attn.q_proj": "blk.0.attn_q",
    f"{LAYER}.self_attn.k_proj": "blk.0.attn_k",
    f"{LAYER}.self_attn.v_proj": "blk.0.attn_v",
    f"{LAYER}.self_attn.o_proj": "blk.0.attn_output",
    f"{LAYER}.mlp.gate_proj": "blk.0.ffn_gate",
    f"{LAYER}.mlp.up_proj": "blk.0.ffn_up",
    f"{LAYER}.mlp.down_proj": "blk.0.ffn_down",
}


HEADS = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}


NOT_MADE = ("NVFP4", "Q8_1")


Arrays = dict[str, np.ndarray]


def model() -> Arrays:
    """The model's tensors under llama.cpp's names, in the order of its own rows."""
    tensors = {name: tensor for shard in llama_shards().values() for name, tensor in shard.items()}
    arrays = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        arrays[f"{NAMES[module]}.{part}"] = values_of(tensor).astype(np.float32)
    return arrays


def write_donor(
    path: Path,
    arrays: Arrays,
    kind: str = "BF16",
    architecture: str = "llama",
    kinds: dict[str, str] | None = None,
    blocks: int = 1,
) -> Path:
    """kinds  types of single tensors; what the package cannot make is all zeros"""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    writer.add_head_count(HEADS["blk.0.attn_q.weight"])
    writer.add_head_count_kv(HEADS["blk.0.attn_k.weight"])
    for name, array in arrays.items():
        dtype = gguf.GGMLQuantizationType[
            (kinds or {}).get(name) or (kind if array.ndim > 1 else "F32")
        ]
        size, nbytes = gguf.GGML_QUANT_SIZES[dtype]
        zeros = np.zeros((*array.shape[:-1], array.shape[-1] // size * nbytes), np.uint8)
        writer.add_tensor(
            name, zeros if dtype.name in NOT_MADE else quantize(array, dtype), raw_dtype=dtype
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py does it: the two halves of every head take turns."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llamas(arrays: Arrays) -> Arrays:
    """With q and k in the order of llama.cpp's Llama."""
    return {
        name: permuted(array, HEADS[name]) if name in HEADS else array
        for name, array in arrays.items()
    }
