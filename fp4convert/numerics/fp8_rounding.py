"""Choose the scales of FP8 and MXFP8 matrices, and round to E4M3.

One scale stands for a block of rows and columns: the whole matrix, a row, 128x128, or for MXFP8 32
columns of a row. Rules:

  fp8    amax   amax / 448 of the block, and 1 where that is 0
         mse    that times one of FACTORS, by which the squared error is least
  mxfp8  floor, even, ceil  a power of two, as fp8_int.mxfp8_scales_of has them
         mse    the power of two of least squared error

Of equal errors the smaller scale wins. Under floor the largest of a block is 256 to 512 units, so
the best power of two is that one or twice it: half of it clips the largest by 32 units or more,
while all others save 2^-10 of a unit at most; and above twice it nothing was clipped before.
"""

from __future__ import annotations

import numpy as np

from fp4convert.numerics.backends.base import Fp8Passes
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, not_finite
from fp4convert.numerics.formats import FP8, MXFP8_STORED_MAX, Format, check_rule
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of, mxfp8_scales_of
from fp4convert.numerics.matrices import Weights, row_panels

# E4M3's steps double with every power of two, so that one octave holds all that differs but for
# subnormals; below 1 the largest values would be clipped.
FACTORS = tuple(1 + eighths / 8 for eighths in range(8))
MXFP8_LARGEST = np.float32(2.0 ** (MXFP8_STORED_MAX - 127))
Block = tuple[int, int]
f32 = np.float32


def find_scales(
    weights: Weights, block: Block, fmt: Format, rule: str, passes: Fp8Passes | None = None
) -> Float32s:
    """Choose the scale of every block: (block rows, block columns) float32.

    rule    one of fmt.scale_rules
    passes  of what computes; None: the CPU
    Raises  NumericError where there is Inf or NaN
    """
    check_rule(fmt, rule)
    passes = passes or Cpu()
    amax = passes.block_amaxes(weights, block)
    if not np.isfinite(amax).all():
        raise not_finite()
    candidates = _candidates(amax, fmt, rule)
    if len(candidates) == 1:
        return candidates[0]
    best = passes.block_costs(weights, block, candidates).argmin(axis=0)  # the first of equal ones
    found: Float32s = np.take_along_axis(np.stack(candidates), best[None], 0)[0]
    return found


def _candidates(amax: Float32s, fmt: Format, rule: str) -> list[Float32s]:
    """Return the scales that a rule chooses from, by blocks."""
    if fmt is FP8:
        own = fp8_scales_of(amax)
        factors = FACTORS if rule == "mse" else (1.0,)
        return [np.where(amax == 0, own, own * f32(factor)) for factor in factors]
    own = mxfp8_scales_of(amax, "floor" if rule == "mse" else rule)
    return [own, np.minimum(2 * own, MXFP8_LARGEST)] if rule == "mse" else [own]


def round_to_fp8(weights: Weights, scales: Float32s, block: Block) -> Float32s:
    """Round a matrix to E4M3; return its values, (rows, columns) float32.

    scales  of every block; as they are stored, for engines divide by no others
    """
    cpu, parts = Cpu(), []
    for first, last in row_panels(weights.shape):
        x, grid = weights.rows(first, last), Grid(scales, block, first)
        codes = cpu.quantize_fp8(x, grid)
        parts.append(cpu.decode_fp8(codes.reshape(-1).data, x.shape, grid))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
