"""Reference arithmetic in NumPy, which every kernel must equal.

All arithmetic is IEEE float32, round to nearest even, one operation at a time, in the order written
here. NVFP4, rule amax: ModelOpt 0.47, NVFP4QTensor.quantize. MXFP4: OCP MX v1.0 section 6.3
(floor); even and ceil as compressed-tensors and torchao (RCEIL) have them. four-over-six: arXiv
2512.02010. This module decides values only; files and names are others' work.

Rules that search (mse, importance) take the block scale of least cost:

  NVFP4  cost = block_scale^2 * sum of w * (q - e2m1(q))^2   q = x / (block_scale * global_scale)
  MXFP4  cost = 4^(e - e0) * the same sum                    q = x / 2^e

The weight w is 1, under importance the second moment of the column's inputs. The sum over a block
is made by halves: element i and i + 8, then +4, +2, +1 (of 32 elements first +16). c0 is the code
that rule amax stores (MXFP4: e0, the exponent of rule floor). Of equal costs the code nearest to c0
wins, then the lower one; so a block of zeros, all of whose costs are 0, keeps c0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    E8M0_STORED_MAX,
    GLOBAL_SCALE_MIN,
    IMPORTANCE,
    Format,
    check_rule,
    global_range,
)
from fp4convert.numerics.matrices import Matrix, Quantized

Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
f32 = np.float32

# Bounds of the searches for the least error, by the names that kernels/fp4.h has for them.
LARGEST_CODE = 126  # of E4M3
# Code c is worth twice code c - 8, from ALL_CODES_BELOW on; below that, c * 2^-9.
CODES_PER_BINADE = 8
ALL_CODES_BELOW = 2 * CODES_PER_BINADE
LOWEST_EXPONENT = 40  # below that of rule floor, for weighted squares: _mxfp4_search
WEIGHT_MIN = 2.0**-LOWEST_EXPONENT
# TINY of global scales: q of what is more is above 2^-53 / E4M3_MAX = 2^-61.8, its square 2^-123.6
TINY = 2.0**-53
TINY_WEIGHTED = 2.0**-34  # the same with a weight: WEIGHT_MIN * (2^-34 / E4M3_MAX)^2 is 2^-125.6
# No step is below 2^-9 times this, which is normal; 2^-117 would do, and this leaves room.
LEAST_GLOBAL_SCALE = 2.0**-60

# safetensors' name of a float dtype -> the NumPy dtype that holds its bits
FLOAT_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}


def as_floats(x: Matrix) -> Float32s:
    """Return (rows, columns) float32 values of stored weights, exact; a copy."""
    return np.frombuffer(x.data, FLOAT_DTYPES[x.dtype]).reshape(x.shape).astype(np.float32)


def as_doubles(x: Matrix) -> NDArray[np.float64]:
    """Return float64 values of stored weights, flat, exact; a copy."""
    return np.frombuffer(x.data, FLOAT_DTYPES[x.dtype]).astype(np.float64)


def as_matrix(values: Float32s) -> Matrix:
    """Return (rows, columns) float32 values as stored weights."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return Matrix(data, "F32", (values.shape[0], values.shape[1]))


def encode_e2m1(q: Float32s) -> Bytes:
    """Encode `q` as E2M1 codes 0-15: half to even, saturating at 6.

    The sign bit is set iff q < 0, so -0.0 gives code 0.
    """
    saturated = np.minimum(np.abs(q), f32(E2M1_MAX)).astype(ml_dtypes.float4_e2m1fn)
    magnitude = np.bitwise_and(saturated.view(np.uint8), np.uint8(7))
    return np.where(q < 0, np.bitwise_or(magnitude, np.uint8(8)), magnitude)


def decode_e2m1(codes: Bytes) -> Float32s:
    """Return float32 values of codes 0-15."""
    return _widen(codes, ml_dtypes.float4_e2m1fn)


def pack(codes: Bytes) -> Bytes:
    """Pack (rows, columns) codes, two to a byte: element 2i in bits 0-3."""
    return np.bitwise_or(codes[:, 0::2], np.left_shift(codes[:, 1::2], 4))


def unpack(packed: Bytes) -> Bytes:
    """Unpack (rows, columns / 2) bytes into (rows, columns) codes."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def decode_e4m3(block_scales: Bytes) -> Float32s:
    """Return float32 values of E4M3 (e4m3fn) bytes; 0x7F, 0xFF are NaN."""
    return _widen(block_scales, ml_dtypes.float8_e4m3fn)


def decode_e8m0(block_scales: Bytes) -> Float32s:
    """Return float32 values 2**(byte - 127) of E8M0 bytes; 0xFF is NaN."""
    return _widen(block_scales, ml_dtypes.float8_e8m0fnu)


def _widen(stored: Bytes, kind: type[np.generic]) -> Float32s:
    wide: Float32s = stored.view(kind).astype(np.float32)
    return wide


def global_scale_of(amax: float, rule: str = "amax") -> np.float32:
    """Compute the multiplier for a scale group; 1 for a group of zeros."""
    narrow = f32(amax)
    return f32(1) if narrow == 0 else max(narrow / f32(global_range(rule)), f32(GLOBAL_SCALE_MIN))


def quantize(
    x: Float32s,
    fmt: Format,
    rule: str,
    group_amax: float | None = None,
    importance: Float32s | None = None,
) -> Quantized:
    """Return the codes and scales of a matrix; all backends give these.

    x           (rows, columns) float32, finite; columns % fmt.block_size == 0
    rule        one of fmt.scale_rules
    group_amax  largest |x| of the tensor or of its scale group (default: of x); sets the NVFP4
                global scale
    importance  (columns,) what a squared error in each column counts for, under the rule of that
                name; as `weigh` takes it
    Returns     Quantized in canonical form, with the global scale as a multiplier
    Raises      NumericError on NaN or infinity
    Formula     nvfp4, amax: block_scale = e4m3(clamp(block_amax / (6 * global_scale), 2^-9, 448)),
                1 where that quotient is 0, code = e2m1(x / (block_scale * global_scale)); mxfp4:
                code = e2m1(x / 2^(byte - 127))
    """
    if not np.isfinite(x).all():
        raise not_finite()
    blocks = x.reshape(-1, fmt.block_size)
    check_rule(fmt, rule)
    check_importance(rule, importance)
    weights = None
    if importance is not None:
        own = weigh(importance, x.shape[1], fmt).reshape(-1, fmt.block_size)
        weights = np.tile(own, (len(x), 1))
    with np.errstate(under="ignore", over="ignore"):
        if fmt.has_global_scale:
            amax = float(np.abs(x).max(initial=0)) if group_amax is None else group_amax
            global_scale = global_scale_of(amax, rule)
            block_scales = _nvfp4_scales(blocks, global_scale, rule, weights)
            step = decode_e4m3(block_scales) * global_scale
        else:
            global_scale = None
            block_scales = _mxfp4_scales(blocks, rule, weights)
            step = decode_e8m0(block_scales)
        q = blocks / step[:, None]
    packed = pack(encode_e2m1(q).reshape(x.shape))
    stored = None if global_scale is None else float(global_scale)
    return Quantized(fmt, (x.shape[0], x.shape[1]), packed.ravel().data, block_scales.data, stored)


LEAVE = "Correct the matrix, or do not quantize it."


def not_finite() -> NumericError:
    """Return the error for NaN or Inf whose place is not known."""
    return NumericError("not-finite", "the matrix holds NaN or Inf; weights must be finite", LEAVE)


def check_finite(amax: float) -> float:
    """Return the amax of a matrix; NumericError where it is no number."""
    if not math.isfinite(amax):
        raise not_finite()
    return amax


def check_importance(rule: str, importance: Float32s | None) -> None:
    """Raise where rule importance has none, or another rule has some."""
    if rule == IMPORTANCE and importance is None:
        detail = "scale rule importance needs second moments of the inputs"
        raise InputError("no-importance", detail, "Give --calibration FILE, or importance=.")
    if rule != IMPORTANCE and importance is not None:
        raise ValueError(f"importance for scale rule {rule}, which does not use it")


def weigh(importance: Float32s, columns: int, fmt: Format) -> Float32s:
    """Return weights of the squares of columns, as the searches take them.

    importance  (columns,) second moments of the inputs, finite and not negative
    Returns     (columns,) float32. Each block is divided by the power of two at or below its
                largest, so that all are below 2, and raised to WEIGHT_MIN: columns that were never
                seen decide between scales that serve the others equally well. Blocks of zeros
                become ones, so that rule importance is mse there.
    """
    if importance.shape != (columns,):
        detail = f"importance of shape {importance.shape}; expected {(columns,)}, one to a column"
        next_step = f"Give one array of {columns} numbers, the mean of x^2 of every column."
        raise InputError("importance-shape", detail, next_step)
    is_bad = ~((importance >= 0) & np.isfinite(importance))
    if is_bad.any():
        first = int(is_bad.argmax())
        detail = f"importance holds {importance[first]} at column {first}"
        detail += "; expected second moments, finite and not negative"
        next_step = "Give the mean of x^2 of every column, from inputs that are finite."
        raise InputError("importance-value", detail, next_step)
    blocks = importance.astype(np.float32).reshape(-1, fmt.block_size)
    largest = blocks.max(axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        scaled = np.maximum(np.ldexp(blocks, 1 - np.frexp(largest)[1]), f32(WEIGHT_MIN))
    weights: Float32s = np.where(largest == 0, f32(1), scaled)
    return weights.ravel()


def _costs(q: Float32s, factor: Float32s, weights: Float32s | None) -> Float32s:
    """Compute factor * sum of squared errors of each block, by halves.

    q        (blocks, elements) float32, x / step
    factor   the square of the block scale, or a power of 4
    """
    terms = np.square(q - decode_e2m1(encode_e2m1(q)))
    if weights is not None:
        terms = weights * terms
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    costs: Float32s = terms[:, 0] * factor
    return costs


def _nvfp4_scales(
    blocks: Float32s, global_scale: np.float32, rule: str, weights: Float32s | None
) -> Bytes:
    """Choose the E4M3 code of every block's scale.

    Rule four-over-six takes the code of rule amax, or of 1.5 times as much, whichever costs less.
    """
    r = np.abs(blocks).max(axis=-1, initial=0) / (f32(E2M1_MAX) * global_scale)
    amax_codes = _encode_block_scales(r)
    if rule == "amax":
        return amax_codes
    if rule == "four-over-six":
        four = _encode_block_scales(f32(1.5) * r)
        costs = [_nvfp4_costs(blocks, codes, global_scale, weights) for codes in (four, amax_codes)]
        return np.where(costs[0] < costs[1], four, amax_codes)
    return _nvfp4_search(blocks, amax_codes, global_scale, weights)


def _encode_block_scales(r: Float32s) -> Bytes:
    """Round block scales to E4M3 codes, half to even; 0 is stored as 1.0.

    r  not negative; what is beyond E4M3's normal and subnormal range is clamped to it
    """
    clamped = np.minimum(np.maximum(r, f32(E4M3_MIN)), f32(E4M3_MAX))
    return np.where(r == 0, f32(1), clamped).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _nvfp4_costs(
    blocks: Float32s, codes: Bytes, global_scale: np.float32, weights: Float32s | None
) -> Float32s:
    values = decode_e4m3(codes)
    return _costs(blocks / (values * global_scale)[:, None], values * values, weights)


def _nvfp4_search(
    blocks: Float32s, amax_codes: Bytes, global_scale: np.float32, weights: Float32s | None
) -> Bytes:
    """Find the code of least cost among 1 to 126, from the highest down.

    A code is not tried above the bound of _nvfp4_last, and where clipping one element alone costs
    more than the best so far.
    """
    c0 = amax_codes.astype(np.int64)
    best, least = c0.copy(), np.full(len(c0), np.inf, f32)
    last = _nvfp4_last(blocks, c0, global_scale, weights is not None)
    # The element of each block whose clipping costs most, by magnitude and weight.
    magnitudes, all_weights = np.abs(blocks), np.ones_like(blocks) if weights is None else weights
    place = (all_weights * np.square(magnitudes)).argmax(axis=-1)[:, None]
    heaviest: Float32s = np.take_along_axis(magnitudes, place, 1)[:, 0]
    its_weight: Float32s = np.take_along_axis(all_weights, place, 1)[:, 0]
    for code in range(LARGEST_CODE, 0, -1):
        codes = np.full(len(c0), code, np.uint8)
        value = decode_e4m3(codes[:1])
        clipped = np.maximum(heaviest / (value * global_scale) - f32(E2M1_MAX), 0)
        clipping = its_weight * np.square(clipped) * np.square(value)
        tried = np.flatnonzero((code <= last) & (clipping <= least))
        own = None if weights is None else weights[tried]
        costs = _nvfp4_costs(blocks[tried], codes[tried], global_scale, own)
        wins = _wins(costs, codes[tried].astype(np.int64), least[tried], best[tried], c0[tried])
        best[tried[wins]], least[tried[wins]] = code, costs[wins]
    return best.astype(np.uint8)


def _wins(
    costs: Float32s, codes: Integers, least: Float32s, best: Integers, c0: Integers
) -> NDArray[np.bool_]:
    """Return whether codes are better than the best of the higher ones."""
    is_as_near = np.abs(codes - c0) <= np.abs(best - c0)
    wins: NDArray[np.bool_] = (costs < least) | ((costs == least) & is_as_near)
    return wins


def _nvfp4_last(
    blocks: Float32s, c0: Integers, global_scale: np.float32, has_weights: bool
) -> Integers:
    """Return the highest code to try: min(max(c0 + 7, 15), 126).

    It is 126 where a square or a step may be subnormal.
    """
    # Why no code above can be the best: from 16 on code c is worth twice code c - 8, and E2M1's
    # values up to 3, doubled, are E2M1 values. So where every q is at most 3.5 under c, it is 2q
    # under c - 8, twice as far from its value at most: the sum is at most four times as large, the
    # square of the scale a quarter, the cost no more. From c0 + 8 on the largest of the block has
    # q <= 3.5, and c - 8 is nearer to c0. This holds after every rounding, too, while nothing is
    # subnormal. (The same bound, and c0 - 3 as the lower one, which need not be relied on here:
    # arXiv 2606.07618, ScaleSweep.)
    tiny = f32(TINY_WEIGHTED if has_weights else TINY)
    is_tiny = (blocks != 0) & (np.abs(blocks) <= global_scale * tiny)
    is_unsound = is_tiny.any(axis=-1) | (global_scale < LEAST_GLOBAL_SCALE)
    last = np.minimum(np.maximum(c0 + CODES_PER_BINADE - 1, ALL_CODES_BELOW - 1), LARGEST_CODE)
    return np.where(is_unsound, LARGEST_CODE, last)


_MXFP4_EXPONENT: dict[str, Callable[[Integers], Integers]] = {
    "floor": lambda bits: (bits >> 23) - 2,
    "even": lambda bits: ((bits + 0x200000) >> 23) - 2,
    "ceil": lambda bits: (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000),
}


def _mxfp4_scales(blocks: Float32s, rule: str, weights: Float32s | None) -> Bytes:
    """Choose the E8M0 byte of every block's scale, from the bits of its amax."""
    bits = np.abs(blocks).max(axis=-1, initial=0).view(np.uint32).astype(np.int64)
    exponent_of = _MXFP4_EXPONENT.get(rule, _MXFP4_EXPONENT["floor"])
    chosen = np.clip(exponent_of(bits), 0, E8M0_STORED_MAX)
    if rule not in _MXFP4_EXPONENT:
        chosen = _mxfp4_search(blocks, chosen, weights)
    return chosen.astype(np.uint8)


def _mxfp4_search(blocks: Float32s, e0: Integers, weights: Float32s | None) -> Integers:
    """Find the exponent of least cost, from e0 + 1 down."""
    # No other exponent is better. The block's largest is 4 to 8 times 2^e0 (less where e0 is 0).
    # From e0 + 2 on it is at most 3.5 steps, so that the exponent below is as good, as in
    # _nvfp4_last. From e = e0 - 2 down its clipping costs at least 84 * 4^e more than under e + 1,
    # and the other 31 can save 0.25 * 4^e each. With weights from 2^-40 to 2 it costs, from e0 - 41
    # down, 47 * 2^-40 * 2^(e + e0) more, and they can save 62 * 4^e in all.
    best, least = e0.copy(), np.full(len(e0), np.inf, f32)
    for offset in range(1, -(1 if weights is None else LOWEST_EXPONENT) - 1, -1):
        codes = e0 + offset
        q = blocks / decode_e8m0(np.clip(codes, 0, E8M0_STORED_MAX).astype(np.uint8))[:, None]
        costs = _costs(q, np.ldexp(f32(1), 2 * np.full(len(e0), offset)), weights)
        is_better = _wins(costs, codes, least, best, e0) & (codes >= 0) & (codes <= E8M0_STORED_MAX)
        best, least = np.where(is_better, codes, best), np.where(is_better, costs, least)
    return best


def dequantize(q: Quantized) -> Float32s:
    """Return (rows, columns) float32: e2m1(code) * step of the block."""
    rows, columns = q.shape
    codes = unpack(np.frombuffer(q.packed, np.uint8).reshape(rows, columns // 2))
    step = block_steps(q).reshape(rows, -1, 1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = decode_e2m1(codes).reshape(rows, -1, q.format.block_size) * step
    return values.reshape(rows, columns)


def block_steps(q: Quantized) -> Float32s:
    """Return what one code unit is worth in each block: float32, flat.

    fl(scales * multiplier) or fl(scales / divisor): the order in which engines compute.
    """
    stored = np.frombuffer(q.block_scales, np.uint8)
    if q.global_scale is None:
        return decode_e8m0(stored)
    scales = decode_e4m3(stored)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        global_scale = f32(q.global_scale)
        return scales * global_scale if q.kind == "multiplier" else scales / global_scale


def nearest_values(x: NDArray[np.floating], q: Quantized) -> Float32s:
    """Round values to the nearest codes under the block scales that q has.

    x        (rows, columns) of q, or flat
    Returns  the same shape; 0 where a scale is NaN
    """
    steps = block_steps(q)[:, None]
    with np.errstate(all="ignore"):
        quotients = np.nan_to_num(x.reshape(steps.size, -1).astype(np.float32) / steps)
        values = decode_e2m1(encode_e2m1(quotients)) * steps
    return np.where(np.isfinite(values), values, f32(0)).reshape(x.shape)
