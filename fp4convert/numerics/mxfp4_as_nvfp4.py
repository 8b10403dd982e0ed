"""Turn MXFP4 blocks into NVFP4 blocks of the same values.

A global scale of 2^k turns an MXFP4 block scale of 2^e into the E4M3 value 2^(e - k), twice, for
NVFP4 blocks are half as long. E4M3 holds the powers from 2^-9 to 2^8, so k = e - 8 for the largest
e of a scale group leaves room for 18 of them; the codes of blocks below are rounded again, half to
even, under 2^-9. Source: OCP MX v1.0; ModelOpt 0.47 casts gpt-oss in this way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import NumericError
from fp4convert.numerics.codec import decode_e2m1, encode_e2m1, pack, unpack
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Quantized

LOWEST, HIGHEST = -9, 8  # powers of two in E4M3
BIAS, NAN_BYTE = 127, 255  # of E8M0
ONE = 0x38  # 1.0 as E4M3: what a block of zeros stores
NOTHING = -(1 << 15)  # the exponent of a matrix without any value


class Recast(NamedTuple):
    """Rows as NVFP4, and how many of their MXFP4 blocks kept every value."""

    rows: Quantized
    kept_blocks: int


def largest_exponent(q: Quantized) -> int:
    """Find the largest e of scales 2^e of blocks that are not all zeros.

    Raises  NumericError where a scale is NaN, for which a global scale of 2^k leaves no place
    """
    exponents = _exponents(q)
    if nans := int(np.count_nonzero(exponents == NAN_BYTE - BIAS)):
        raise NumericError("scale-not-finite", f"{nans} block scales are NaN; expected numbers")
    return int(exponents[_has_values(q)].max(initial=NOTHING))


def global_exponent(largest: int) -> int:
    """Return k of the global scale 2^k, for the group's largest exponent."""
    return max(largest - HIGHEST, -126) if largest > NOTHING else 0


def recast(q: Quantized, exponent: int) -> Recast:
    """Convert rows of MXFP4 to NVFP4 under the multiplier 2^exponent."""
    rows, columns = q.shape
    has_values = _has_values(q)
    powers = np.where(has_values, _exponents(q) - exponent, 0)
    # E4M3 bytes of 2^power; below 2^-6 they are subnormal, and there are none below LOWEST
    held = np.maximum(powers, LOWEST)
    scales = np.where(held >= -6, (held + 7) << 3, 1 << np.maximum(held - LOWEST, 0))
    stored = np.where(has_values, scales, ONE).astype(np.uint8)
    block_scales = np.repeat(stored, MXFP4.block_size // NVFP4.block_size, axis=-1)
    packed, lost_blocks = q.packed, 0
    low = powers < LOWEST
    if low.any():  # the codes of these blocks are rounded under the lowest power
        codes = unpack(np.frombuffer(q.packed, np.uint8).reshape(rows, -1))
        codes = codes.reshape(rows, -1, MXFP4.block_size).copy()
        shifts = (powers[low] - LOWEST)[:, None]
        values = np.ldexp(decode_e2m1(codes[low]).astype(np.float64), shifts)
        # what is lost on the way to float32 is far below 0.25
        magnitudes = encode_e2m1(np.abs(values).astype(np.float32))
        rounded = np.where(codes[low] == 0, 0, magnitudes | (codes[low] & 8)).astype(np.uint8)
        codes[low] = rounded
        lost_blocks = int((~(decode_e2m1(rounded) == values).all(axis=-1)).sum())
        packed = pack(codes.reshape(rows, columns)).ravel().data
    made = Quantized(NVFP4, q.shape, packed, block_scales.ravel().data, 2.0**exponent)
    return Recast(made, low.size - lost_blocks)


def _exponents(q: Quantized) -> NDArray[np.int64]:
    return np.frombuffer(q.block_scales, np.uint8).astype(np.int64).reshape(q.shape[0], -1) - BIAS


def _has_values(q: Quantized) -> NDArray[np.bool_]:
    """Tell for each block whether a code is other than zero."""
    packed = np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1, MXFP4.block_size // 2)
    has_values: NDArray[np.bool_] = (packed & 0x77 != 0).any(axis=-1)
    return has_values
