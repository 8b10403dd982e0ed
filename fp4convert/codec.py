"""Reference arithmetic in NumPy and ml_dtypes: the definition of right, which every kernel equals byte for byte.

All arithmetic is IEEE float32, round to nearest even, one operation at a time, in the order written here.
NVFP4, rule amax: ModelOpt 0.47, NVFP4QTensor.quantize.  MXFP4: OCP MX v1.0 section 6.3 (floor); even and ceil as
compressed-tensors and torchao (RCEIL) have them.  This module decides values only; files and names are others' work.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import NumericError
from fp4convert.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    E8M0_STORED_MAX,
    FLOAT_TYPES,
    GLOBAL_RANGE,
    GLOBAL_SCALE_MIN,
    Format,
    Kind,
    Quantized,
    check_rule,
)

Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]
f32 = np.float32

# safetensors' name of a float dtype -> the NumPy dtype that holds its bits
FLOAT_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}


def encode_e2m1(q: Float32s) -> Bytes:
    """Codes 0-15 of `q`: half to even, saturating at 6; the sign bit is set iff q < 0, so -0.0 gives code 0."""
    saturated = np.minimum(np.abs(q), f32(E2M1_MAX))
    magnitude = np.bitwise_and(saturated.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), np.uint8(7))
    return np.where(q < 0, np.bitwise_or(magnitude, np.uint8(8)), magnitude)


def decode_e2m1(codes: Bytes) -> Float32s:
    """float32 values of codes 0-15."""
    return _widen(codes, ml_dtypes.float4_e2m1fn)


def pack(codes: Bytes) -> Bytes:
    """(rows, columns) codes -> (rows, columns / 2) bytes, element 2i in bits 0-3."""
    return np.bitwise_or(codes[:, 0::2], np.left_shift(codes[:, 1::2], 4))


def unpack(packed: Bytes) -> Bytes:
    """(rows, columns / 2) bytes -> (rows, columns) codes."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def decode_e4m3(block_scales: Bytes) -> Float32s:
    """float32 values of E4M3 (e4m3fn) bytes; 0x7F and 0xFF are NaN."""
    return _widen(block_scales, ml_dtypes.float8_e4m3fn)


def decode_e8m0(block_scales: Bytes) -> Float32s:
    """float32 values 2**(byte - 127) of E8M0 bytes; 0xFF is NaN."""
    return _widen(block_scales, ml_dtypes.float8_e8m0fnu)


def _widen(stored: Bytes, kind: type[np.generic]) -> Float32s:
    wide: Float32s = stored.view(kind).astype(np.float32)
    return wide


def global_scale_of(amax: float) -> np.float32:
    """The multiplier for a scale group whose largest magnitude is `amax`; 1 for an all-zero group."""
    narrow = f32(amax)
    return f32(1) if narrow == 0 else max(narrow / f32(GLOBAL_RANGE), f32(GLOBAL_SCALE_MIN))


def quantize(x: Float32s, fmt: Format, rule: str, group_amax: float | None = None) -> Quantized:
    """Codes and scales of a matrix, equal bit for bit on every backend.

    x           (rows, columns) float32, finite; columns % fmt.block_size == 0
    rule        one of fmt.scale_rules
    group_amax  largest |x| of the tensor or of its scale group (default: of x); sets the NVFP4 global scale
    Returns     Quantized in canonical form, with the global scale as a multiplier
    Raises      NumericError on NaN or infinity
    Formula     nvfp4: block_scale = e4m3(clamp(block_amax / (6 * global_scale), 2^-9, 448)), 1 where that quotient is 0,
                code = e2m1(x / (block_scale * global_scale)); mxfp4: code = e2m1(x / 2^(byte - 127))
    """
    if not np.isfinite(x).all():
        raise not_finite()
    blocks = x.reshape(len(x), -1, fmt.block_size)
    block_amax = np.abs(blocks).max(axis=-1, initial=0)
    check_rule(fmt, rule)
    with np.errstate(under="ignore", over="ignore"):
        if fmt.has_global_scale:
            global_scale = global_scale_of(float(np.abs(x).max(initial=0)) if group_amax is None else group_amax)
            block_scales = _nvfp4_scales(block_amax, global_scale)
            step = decode_e4m3(block_scales) * global_scale
        else:
            global_scale = None
            block_scales = _mxfp4_scales(block_amax, rule)
            step = decode_e8m0(block_scales)
        q = blocks / step[..., None]
    packed = pack(encode_e2m1(q).reshape(x.shape))
    stored = None if global_scale is None else float(global_scale)
    return Quantized(fmt, (x.shape[0], x.shape[1]), packed.ravel().data, block_scales.ravel().data, stored)


def not_finite() -> NumericError:
    """The error for NaN or Inf, by one who does not know where they are."""
    return NumericError("not-finite", "the matrix holds NaN or Inf; weights must be finite")


def _nvfp4_scales(block_amax: Float32s, global_scale: np.float32) -> Bytes:
    r = block_amax / (f32(E2M1_MAX) * global_scale)
    clamped = np.minimum(np.maximum(r, f32(E4M3_MIN)), f32(E4M3_MAX))
    return np.where(r == 0, f32(1), clamped).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


_MXFP4_EXPONENT: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "floor": lambda bits: (bits >> 23) - 2,
    "even": lambda bits: ((bits + 0x200000) >> 23) - 2,
    "ceil": lambda bits: (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000),
}


def _mxfp4_scales(block_amax: Float32s, rule: str) -> Bytes:
    bits = block_amax.view(np.uint32).astype(np.int64)
    return np.clip(_MXFP4_EXPONENT[rule](bits), 0, E8M0_STORED_MAX).astype(np.uint8)


def dequantize(q: Quantized) -> Float32s:
    """(rows, columns) float32 values: e2m1(code) * fl(block_scale * multiplier), or * fl(block_scale / divisor)."""
    rows, columns = q.shape
    codes = unpack(np.frombuffer(q.packed, np.uint8).reshape(rows, columns // 2))
    step = block_steps(q).reshape(rows, -1, 1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = decode_e2m1(codes).reshape(rows, -1, q.format.block_size) * step
    return values.reshape(rows, columns)


def block_steps(q: Quantized) -> Float32s:
    """What one code unit is worth in each block, float32, flat; NaN where a scale byte is NaN."""
    stored = np.frombuffer(q.block_scales, np.uint8)
    if q.global_scale is None:
        return decode_e8m0(stored)
    return apply_global(decode_e4m3(stored), q.global_scale, q.kind)


def check_range(q: Quantized, dtype: str) -> None:
    """NumericError where a value is beyond the range of `dtype` (safetensors' name)."""
    if dtype != "F32" and _largest(block_steps(q)) * E2M1_MAX > FLOAT_TYPES[dtype].largest:
        check_largest(_largest(dequantize(q)), dtype)


def check_largest(largest: float, dtype: str) -> None:
    """NumericError where that magnitude is beyond the range of `dtype` (safetensors' name)."""
    kind = FLOAT_TYPES[dtype]
    if largest > kind.largest and dtype != "F32":
        detail = f"the value {largest:g} is beyond {kind.largest:g}, the largest of {kind.word}"
        raise NumericError(f"{kind.word}-overflow", detail, f"Choose --dtype {'bf16 or ' * (dtype == 'F16')}fp32.")


def _largest(values: Float32s) -> float:
    """The largest magnitude; NaN does not hide it."""
    return float(np.fmax.reduce(np.abs(values), axis=None, initial=0))


def apply_global(scales: Float32s, global_scale: float, kind: Kind) -> Float32s:
    """fl(scales * multiplier) or fl(scales / divisor): the order in which engines compute."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        return scales * f32(global_scale) if kind == "multiplier" else scales / f32(global_scale)
