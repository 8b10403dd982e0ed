"""Headers of safetensors files, taken apart by hand."""

from __future__ import annotations

from fp4convert.storage.safetensors import read_header

BITS = {
    **{
        "F64": 64,
        "I64": 64,
        "U64": 64,
        "C64": 64,
        "F32": 32,
        "I32": 32,
        "U32": 32,
        "F16": 16,
        "BF16": 16,
        "I16": 16,
    },
    **{
        "U16": 16,
        "I8": 8,
        "U8": 8,
        "BOOL": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
    },
    **{"F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


def header_of(data: bytes):
    return read_header(
        "x.safetensors", len(data), lambda offset, length: data[offset : offset + length]
    )
