"""Read and write GGUF's own types of blocks, as llama.cpp's package does.

A tensor of such a type has its name as dtype, and a shape whose last part counts bytes.
Source: gguf-py, quants.py, the definition in NumPy that llama.cpp keeps beside its C.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import NumericError
from fp4convert.storage.gguf import gguf_package

Q8_0 = "Q8_0"
LARGEST = 127 * float(np.finfo(np.float16).max)  # of Q8_0: a code of seven bits, an fp16 scale

BLOCKS_AT_ONCE = 2048  # 256 KiB of float32, which stay in a cache
BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))  # added, then cut off: rounds halves up


class BlockType(NamedTuple):
    """So many weights in so many bytes."""

    block_size: int
    nbytes: int


BLOCK_TYPES = {  # that are read; MXFP4 and NVFP4 are the dialect's
    **{"Q4_0": BlockType(32, 18), "Q4_1": BlockType(32, 20)},
    **{"Q5_0": BlockType(32, 22), "Q5_1": BlockType(32, 24), Q8_0: BlockType(32, 34)},
    **{"Q2_K": BlockType(256, 84), "Q3_K": BlockType(256, 110), "Q4_K": BlockType(256, 144)},
    **{"Q5_K": BlockType(256, 176), "Q6_K": BlockType(256, 210)},
}


def shape_in_bytes(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of that type with so many weights."""
    *above, columns = shape
    kind = BLOCK_TYPES[dtype]
    return (*above, columns // kind.block_size * kind.nbytes)


def shape_in_weights(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many weights a tensor of that type holds."""
    *above, row_nbytes = shape
    kind = BLOCK_TYPES[dtype]
    return (*above, row_nbytes // kind.nbytes * kind.block_size)


def decode(stored: memoryview, dtype: str) -> NDArray[np.float32]:
    """Return the values of whole blocks."""
    from gguf import quants

    kind = gguf_package().GGMLQuantizationType[dtype]
    values: NDArray[np.float32] = quants.dequantize(np.frombuffer(stored, np.uint8), kind)
    return values


def encode_q8_0(values: NDArray[np.float32]) -> memoryview:
    """Round whole blocks of 32 to Q8_0.

    Formula  d = amax / 127 in float32; codes are x * (1 / d), halves away from 0; d in fp16
    Raises   NumericError for what it cannot say: NaN, or a value beyond its range
    """
    size, nbytes = BLOCK_TYPES[Q8_0]
    blocks = values.reshape(-1, size)
    stored = np.empty((len(blocks), nbytes), np.uint8)
    for first in range(0, len(blocks), BLOCKS_AT_ONCE):
        x, out = (all_[first : first + BLOCKS_AT_ONCE] for all_ in (blocks, stored))
        amax = np.abs(x).max(1, keepdims=True)
        largest = amax.max(initial=0)  # NaN where there is one
        if not largest <= LARGEST:
            detail = f"the value {largest:g} is beyond {LARGEST:g}, the largest of q8_0"
            raise NumericError("q8-overflow", detail, "Choose the dtype bf16.")
        scales = amax / np.float32(127)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            q = x * np.where(scales == 0, np.float32(0), 1 / scales)
            q += np.copysign(BELOW_HALF, q)
            out[:, 2:] = q.astype(np.int8).view(np.uint8)
        out[:, :2] = scales.astype(np.float16).view(np.uint8)
    return stored.reshape(-1).data
