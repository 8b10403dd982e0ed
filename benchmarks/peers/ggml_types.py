"""Write a Llama as a GGUF file in one of llama.cpp's types, by ggml's quantizer, without data.

    python ggml_types.py SOURCE FILE.gguf Q4_0|IQ4_NL|Q4_K_M|Q8_0

Types of tensors are those that llama-quantize takes: the embedding in Q6_K beside four bits (Q4_0:
in Q4_0), v and down of some layers in Q6_K for Q4_K_M, and another type where the columns are no
multiple of 256. ggml is that of the package xllamacpp. Nothing of fp4convert is imported.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp.xllamacpp
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file

MIXED = "Q4_K_M"
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


def type_of(name: str, columns: int, kind: str, layers: int) -> Type:
    chosen = Type.Q4_K if kind == MIXED else Type[kind]
    if "embed" in name and kind in (MIXED, "IQ4_NL"):
        chosen = Type.Q6_K
    elif kind == MIXED:
        number = re.search(r"layers\.(\d+)\.", name)
        layer = int(number[1]) if number else 0
        edge = layers // 8
        is_finer = layer < edge or layer >= 7 * layers // 8 or (layer - edge) % 3 == 2
        if is_finer and re.search(r"v_proj|down_proj", name):
            chosen = Type.Q6_K
    return FALLBACK.get(chosen, chosen) if columns % 256 else chosen


def pack(x: NDArray[Any], chosen: Type) -> NDArray[Any]:
    """(rows, bytes) of a matrix."""
    ggml = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    quantize = ggml.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    block, nbytes = GGML_QUANT_SIZES[chosen]
    packed = np.empty((x.shape[0], x.shape[1] // block * nbytes), np.uint8)
    written = quantize(int(chosen), x.ctypes.data, packed.ctypes.data, 0, *x.shape, None)
    assert written == packed.nbytes, f"{written} bytes; expected {packed.nbytes}"
    return packed


def main(source: str, file: str, kind: str) -> None:
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        x = tensor.float().numpy()
        if count := heads.get(name.split(".")[-2]):  # as LlamaModel.permute of llama.cpp does
            halves = x.reshape(count, 2, x.shape[0] // count // 2, -1)
            x = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(x.shape))
        own = names.get_name(name, try_suffixes=(".weight",))
        if x.ndim == 1:
            writer.add_tensor(own, x)
        else:
            chosen = type_of(name, x.shape[1], kind, layers)
            writer.add_tensor(own, pack(x, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
