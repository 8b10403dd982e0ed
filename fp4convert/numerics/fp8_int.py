"""Reference arithmetic of FP8 and integer matrices under scales.

All arithmetic is IEEE float32, round to nearest even, one operation at a time, as in codec.py; the
kernels give these bytes. FP8: OCP 8-bit floating point v1.0 (e4m3fn, e5m2). Integers:
compressed-tensors 0.20, pack-quantized, of 4 and of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import Bytes, Float32s, Integers, as_floats, decode_e8m0
from fp4convert.numerics.formats import E4M3_MAX, MXFP8_STORED_MAX
from fp4convert.numerics.matrices import Matrix

Float64s = NDArray[np.float64]
f32 = np.float32
COST_LANES = 8

# safetensors' name of an FP8 dtype -> the NumPy dtype that holds its bits
FP8_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The scales of a matrix, or of some rows of it: one to a block.

    scales     float32, by block row and block column
    block      rows and columns of a block; those at the edges may be cut
    first_row  where the rows in question begin, counted from the first row that `scales` covers
    """

    scales: Float32s
    block: tuple[int, int]
    first_row: int = 0


def grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Count the blocks of a matrix, down and across."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def each_scale(grid: Grid, shape: tuple[int, int]) -> Float32s:
    """Return the scale of every element of `shape`."""
    return grid.scales[_places(shape, grid)]


def decode_fp8(
    codes: memoryview, shape: tuple[int, int], grid: Grid, dtype: str = "F8_E4M3"
) -> Float32s:
    """Return (rows, columns) float32 fl(code * scale); NaN stays NaN."""
    values = np.frombuffer(codes, FP8_DTYPES[dtype]).reshape(shape).astype(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values * each_scale(grid, shape)


def amax_fp8(
    codes: memoryview, shape: tuple[int, int], grid: Grid, dtype: str = "F8_E4M3"
) -> float:
    """Find the largest magnitude of decode_fp8's values, also Inf or NaN."""
    return float(np.abs(decode_fp8(codes, shape, grid, dtype)).max(initial=0))


def unpack_integers(packed: memoryview, shape: tuple[int, int], bits: int) -> Bytes:
    """Unpack (rows, columns) codes of int32 items, lowest bits first."""
    stored = np.frombuffer(packed, np.uint8).reshape(shape[0], -1)
    if bits == 4:
        stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(shape[0], -1)
    return stored[:, : shape[1]]


def decode_integers(
    packed: memoryview,
    shape: tuple[int, int],
    grid: Grid,
    bits: int = 4,
    zero_points: Float32s | None = None,
) -> Float32s:
    """Return (rows, columns) float32 values.

    fl((code - 2**(bits - 1) - zero_point) * scale)
    packed       rows of whole int32 items, which hold 32 / bits codes each; what a row has beyond
                 its columns is padding
    bits         4 or 8
    zero_points  whole numbers, one to a scale (`read_zero_points`); all 0 where the codes are
                 symmetric
    """
    integers = unpack_integers(packed, shape, bits).astype(np.float32) - f32(1 << bits - 1)
    if zero_points is not None:
        integers = integers - each_scale(Grid(zero_points, grid.block, grid.first_row), shape)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return integers * each_scale(grid, shape)


def read_zero_points(packed: memoryview, shape: tuple[int, int], bits: int = 4) -> Float32s:
    """Read (rows, groups) zero points, packed down the columns."""
    rows, groups = shape
    items = np.frombuffer(packed, "<i4").reshape(-1, groups)
    codes = unpack_integers(np.ascontiguousarray(items.T).view(np.uint8).data, (groups, rows), bits)
    return np.ascontiguousarray(codes.T).astype(np.float32) - f32(1 << bits - 1)


def grid_amax(x: Matrix, grid: Grid) -> None:
    """Raise scales to the largest magnitudes of blocks, also Inf or NaN."""
    np.maximum.at(grid.scales, _places(x.shape, grid), np.abs(as_floats(x)))


def _places(shape: tuple[int, int], grid: Grid) -> tuple[Integers, Integers]:
    """Return the block row of each row, and the block column of each column."""
    rows, columns = (np.arange(size) for size in shape)
    return (rows[:, None] + grid.first_row) // grid.block[0], columns // grid.block[1]


def fp8_scales_of(amax: Float32s) -> Float32s:
    """Compute the scales amax / 448, and 1 where that is 0."""
    with np.errstate(under="ignore"):
        quotients = np.asarray(amax, np.float32) / f32(E4M3_MAX)
    return np.where(quotients == 0, f32(1), quotients)


_MXFP8_EXPONENT: dict[str, Callable[[Integers], Integers]] = {
    "floor": lambda bits: (bits >> 23) - 8,
    "even": lambda bits: ((bits + 0x80000) >> 23) - 8,
    "ceil": lambda bits: (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000),
}


def mxfp8_scales_of(amax: Float32s, rule: str) -> Float32s:
    """Choose the power of two that one unit of MXFP8 is worth.

    rule     floor: 2^(floor(log2(amax)) - 8); even: of the amax rounded to E4M3's four digits;
             ceil: the least under which amax is at most 448
    Formula  OCP MX v1.0, section 6.3, for floor; even and ceil as torchao (EVEN, RCEIL) has them
    """
    bits = np.ascontiguousarray(amax, np.float32).view(np.uint32).astype(np.int64)
    exponents = np.clip(_MXFP8_EXPONENT[rule](bits), 0, MXFP8_STORED_MAX)
    return decode_e8m0(exponents.astype(np.uint8))


def encode_e8m0(scales: Float32s) -> Bytes:
    """Return E8M0 bytes of powers of two."""
    return scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


def quantize_fp8(x: Matrix, grid: Grid) -> Bytes:
    """Encode x / scale, finite, as (rows, columns) E4M3 codes.

    Half to even, saturating at 448, the sign kept, also of zero.
    """
    with np.errstate(over="ignore", under="ignore"):
        q = np.clip(as_floats(x) / each_scale(grid, x.shape), -f32(E4M3_MAX), f32(E4M3_MAX))
    codes: Bytes = q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def fp8_costs(x: Matrix, grid: Grid, costs: Float64s) -> None:
    """Add to each block's cost what its codes in these rows are off by.

    The sum of squares in float64: of a block's row in eight lanes, element i in lane i % 8, these
    by halves, then row after row.
    costs  as the scales of the grid lie
    """
    values = decode_fp8(quantize_fp8(x, grid).reshape(-1).data, x.shape, grid)
    squares = np.square(as_floats(x).astype(np.float64) - values)
    width = grid.block[1]
    for row, terms in enumerate(squares):
        for column, first in enumerate(range(0, len(terms), width)):
            own = terms[first : first + width]
            lanes = np.pad(own, (0, -len(own) % COST_LANES)).reshape(-1, COST_LANES)
            sums = np.cumsum(lanes, axis=0)[-1]  # one after the other, as the kernels add
            while len(sums) > 1:
                sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
            costs[(row + grid.first_row) // grid.block[0], column] += sums[0]


def through_fp8(x: Float32s, block: tuple[int, int]) -> Float32s:
    """Return fl(e4m3(x / scale) * scale), scale = amax / 448 of a block.

    x  (rows, columns), from the first row of a block on; blocks at the edges may be cut
    """
    rows, columns = x.shape
    height, width = (-(-size // step) for size, step in zip(x.shape, block, strict=True))
    padded = np.zeros((height * block[0], width * block[1]), np.float32)
    padded[:rows, :columns] = x
    blocks = padded.reshape(height, block[0], width, block[1])
    scales = fp8_scales_of(np.abs(blocks).max(axis=(1, 3)))[:, None, :, None]
    with np.errstate(over="ignore", under="ignore"):
        q = np.clip(blocks / scales, -f32(E4M3_MAX), f32(E4M3_MAX))
        values: Float32s = q.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    return np.ascontiguousarray(values.reshape(padded.shape)[:rows, :columns])


def transpose(stored: Matrix, columns: range) -> Matrix:
    """Return columns of a stored matrix of any dtype as rows."""
    rows, width = stored.shape
    raw = np.frombuffer(stored.data, np.uint8)
    values = raw.reshape(rows, width, -1)[:, columns.start : columns.stop : columns.step]
    turned = np.ascontiguousarray(values.swapaxes(0, 1))
    return Matrix(turned.reshape(-1).data, stored.dtype, (len(columns), rows))


def to_bf16(values: Float32s) -> memoryview:
    """Round values to bytes of bf16, half to even; NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint8).data
