"""Find values that are not finite, or beyond the range of a dtype."""

from __future__ import annotations

import numpy as np

from fp4convert.errors import NumericError
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, block_steps, dequantize
from fp4convert.numerics.formats import E2M1_MAX, FLOAT_TYPES
from fp4convert.numerics.matrices import Quantized, Weights, row_panels


def find_not_finite_values(weights: Weights) -> str:
    """Describe values that are NaN or Inf, and the first; "" without any."""
    count, place, what = 0, [0, 0], ""
    for first, last in row_panels(weights.shape):
        values = np.frombuffer(weights.rows(first, last).data, FLOAT_DTYPES[weights.dtype])
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size and not count:
            row, column = divmod(int(bad[0]), weights.shape[1])
            place, what = [first + row, column], "NaN" if np.isnan(values[bad[0]]) else "Inf"
        count += bad.size
    if count == 1:
        return f"1 value that is {what}, at {place}"
    return f"{count} values that are NaN or Inf, the first {what} at {place}" if count else ""


def check_range(q: Quantized, dtype: str) -> None:
    """Raise NumericError where a value is beyond the range of a dtype."""
    if dtype == "F32" or _largest(block_steps(q)) * E2M1_MAX <= FLOAT_TYPES[dtype].largest:
        return
    largest, widest = _largest(dequantize(q)), FLOAT_TYPES["F32"].largest
    if largest > widest:
        detail = f"its scales make values beyond {widest:g}, the largest of fp32"
        next_step = "Start from the original weights; see: fp4convert inspect."
        raise NumericError("scale-not-finite", detail, next_step)
    check_largest(largest, dtype)


def check_largest(largest: float, dtype: str) -> None:
    """Raise NumericError where a magnitude is beyond the range of a dtype."""
    kind = FLOAT_TYPES[dtype]
    if largest > kind.largest and dtype != "F32":
        detail = f"the value {largest:g} is beyond {kind.largest:g}, the largest of {kind.word}"
        next_step = f"Choose the dtype {'bf16 or ' * (dtype == 'F16')}fp32."
        raise NumericError(f"{kind.word}-overflow", detail, next_step)


def _largest(values: Float32s) -> float:
    """Find the largest magnitude; NaN does not hide it."""
    return float(np.fmax.reduce(np.abs(values), axis=None, initial=0))
