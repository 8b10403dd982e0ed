"""Quantize one matrix in memory to FP8 or MXFP8, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import FP8, Format
from fp4convert.numerics.fp8_int import Grid, encode_e8m0, grid_shape
from fp4convert.numerics.fp8_rounding import find_scales
from fp4convert.numerics.matrices import InMemory
from fp4convert.recipes.options import one_of


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedFp8:
    """One matrix as E4M3 codes under scales of blocks.

    codes         (rows, columns) uint8
    block_scales  by block row and block column: float32 of fp8, E8M0 bytes of mxfp8
    block         rows and columns of a block; value = code * its scale
    """

    format: Format
    shape: tuple[int, int]
    codes: NDArray[np.uint8]
    block_scales: NDArray[Any]
    block: tuple[int, int]


def quantize(weights: InMemory, fmt: Format, rule: str, shared: str | None) -> QuantizedFp8:
    """Round a finite matrix on the CPU, as `quantize` rounds modules.

    shared  of fp8: what has one scale; None: a row
    """
    rows, columns = weights.shape
    blocks = {"row": (1, columns), "tensor": (rows, columns), "128x128": (128, 128)}
    if fmt is not FP8:
        blocks = {"linear": (1, fmt.block_size)}
    if shared not in (None, *blocks):
        detail = (
            f"scale_layout {shared!r:.60} is not one of {fmt.name}; expected {one_of([*blocks])}"
        )
        raise InputError("scale-layout", detail, "Choose one of these.")
    block = blocks[shared] if shared else next(iter(blocks.values()))
    scales = find_scales(weights, block, fmt, rule)
    codes = np.empty((rows, columns), np.uint8)
    for first, shape, panel, _ in Cpu().fp8_panels(weights, block, scales):
        codes[first : first + shape[0]] = np.frombuffer(panel, np.uint8).reshape(shape)
    stored = scales if fmt is FP8 else encode_e8m0(scales)
    return QuantizedFp8(fmt, (rows, columns), codes, stored, block)


def values_of(q: QuantizedFp8) -> Float32s:
    """Return (rows, columns) float32, exactly what engines compute.

    Raises  InputError where its fields do not fit together
    """
    _check_fields(q)
    scales = q.block_scales
    if q.format is not FP8:
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return Cpu().decode_fp8(q.codes.reshape(-1).data, q.shape, Grid(scales, q.block))


def _check_fields(q: QuantizedFp8) -> None:
    """Raise InputError unless shape, block, codes and scales fit together."""
    if not (isinstance(q.format, Format) and q.format.is_fp8):
        expected = "expected that of a QuantizedFp8, as quantize_tensor gives it"
        raise InputError("bad-quantized", f"format is {q.format!r:.60}; {expected}")
    for name in ("shape", "block"):
        pair = getattr(q, name)
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(type(n) is int and n > 0 for n in pair)
        ):
            detail = f"{name} is {pair!r:.60}; expected rows and columns, 1 or more"
            raise InputError("bad-quantized", detail)
    scales = (grid_shape(q.shape, q.block), np.float32 if q.format is FP8 else np.uint8)
    for name, (shape, dtype) in {"codes": (q.shape, np.uint8), "block_scales": scales}.items():
        part: Any = getattr(q, name)
        if not isinstance(part, np.ndarray) or (part.shape, part.dtype) != (shape, dtype):
            there = (
                f"{part.dtype} of the shape {part.shape}" if hasattr(part, "dtype") else type(part)
            )
            detail = f"{name} is {there}; expected a NumPy array, {np.dtype(dtype)} of the shape"
            raise InputError("bad-quantized", f"{detail} {shape}, for {q.format.name}")
