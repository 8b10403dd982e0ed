"""What a matrix loses in each form that it can take: its own error, and that of its outputs, by NumPy.

The output error of rounding W to V is |(W - V) X| / |W X| over the inputs X of the linear layer, as inputs.py tells it.
W - V is a float32, as W and V are; everything that is made of it is float64.
Block sizes that no engine reads are for study, by the reference arithmetic of codec.py with another block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp4convert.backends.cpu import Cpu
from fp4convert.codec import FLOAT_DTYPES, Float32s, as_floats, as_matrix, dequantize, not_finite, quantize
from fp4convert.formats import FORMATS, FP8, IMPORTANCE, Weights
from fp4convert.grid import through_fp8
from fp4convert.inputs import Floats, Inputs, column_power, weighted

STUDIED_BLOCKS = (16, 32, 64)
ROW, TENSOR = "row", "tensor"
BF16 = "bf16"
_SCALE_BITS = 8  # of a block
_WORD_BITS = 32  # of a global scale, and of one of FP8
_BYTE_BITS = 8


class Way(NamedTuple):
    """A form that a matrix can take.

    format  nvfp4, mxfp4, fp8 or bf16
    rule    that sets the block scales; None where there are none
    block   columns to a block; "row" or "tensor" for what shares a scale of FP8; None for bf16
    """

    format: str
    rule: str | None = None
    block: int | str | None = None

    @property
    def is_for_study(self) -> bool:
        """True where no engine reads such blocks."""
        return self.format in FORMATS and self.block != FORMATS[self.format].block_size

    @property
    def is_fp4(self) -> bool:
        return self.format in FORMATS

    def fits(self, columns: int) -> bool:
        """True where a row is made of whole blocks."""
        return not isinstance(self.block, int) or columns % self.block == 0

    def nbits(self, shape: tuple[int, int]) -> float:
        """Bits that a matrix of that shape takes, scales and all."""
        weights = shape[0] * shape[1]
        if isinstance(self.block, int):
            word = _WORD_BITS if FORMATS[self.format].has_global_scale else 0
            return weights * (_BYTE_BITS // 2 + _SCALE_BITS / self.block) + word
        if self.format == FP8.name:
            return weights * _BYTE_BITS + _WORD_BITS * (shape[0] if self.block == ROW else 1)
        return weights * 2 * _BYTE_BITS


def ways(is_calibrated: bool) -> list[Way]:
    """All forms that are compared: both formats, every rule, every block size; FP8 and bf16 to compare with."""
    fp4 = [
        Way(fmt.name, rule, block)
        for fmt in FORMATS.values()
        for rule in fmt.scale_rules
        for block in STUDIED_BLOCKS
        if rule != IMPORTANCE or is_calibrated
    ]
    return [*fp4, Way(FP8.name, "amax", ROW), Way(FP8.name, "amax", TENSOR), Way(BF16)]


class Loss(NamedTuple):
    """What one matrix loses in one form.

    nmse    sum (w - v)^2 / sum w^2
    output  sum |(W - V) x|^2 / sum |W x|^2
    """

    nmse: float
    output: float


def losses_of(x: Float32s, inputs: Inputs, chosen: list[Way]) -> Iterator[Loss]:
    """The loss of that matrix in every form that fits it; NumericError on NaN or infinity.

    x  (rows, columns), some rows of a matrix or all of them; their amax sets the global scale
    """
    if not np.isfinite(x).all():
        raise not_finite()
    signal, output = _of_weights(x), output_power(x, inputs)
    for way in chosen:
        error = x - rounded(x, way, inputs.moments)
        yield Loss(_ratio(_of_weights(error), signal), _ratio(output_power(error, inputs), output))


def _of_weights(matrix: Float32s) -> float:
    return weighted(column_power(matrix), None)


def output_power(matrix: Floats, inputs: Inputs) -> float:
    """The mean of |matrix x|^2 over the inputs x, in float64.

    matrix  (rows, columns) float32 or float64
    """
    return max(inputs.power(matrix.astype(np.float64, copy=False)), 0.0)


def _ratio(noise: float, signal: float) -> float:
    return noise / signal if signal else 0.0


def rounded(x: Float32s, way: Way, importance: Float32s | None = None) -> Float32s:
    """The values of that form of a matrix.

    importance  of the columns, for the rule of that name
    """
    if isinstance(way.block, int):
        fmt, amax = FORMATS[way.format], float(np.abs(x).max(initial=0))
        given = importance if way.rule == IMPORTANCE else None
        if way.is_for_study:
            return dequantize(quantize(x, replace(fmt, block_size=way.block), str(way.rule), amax, given))
        q = Cpu().quantize(as_matrix(x), fmt, str(way.rule), amax, given)
        return Cpu().values(q)
    if way.format == BF16:
        return x.astype(FLOAT_DTYPES["BF16"]).astype(np.float32)
    return through_fp8(x, (1, x.shape[1]) if way.block == ROW else (x.shape[0], x.shape[1]))


def rows_of(weights: Weights, strips: tuple[tuple[int, int], ...]) -> Float32s:
    """Those ranges of rows of a matrix, one below the other."""
    return np.concatenate([as_floats(weights.rows(first, last)) for first, last in strips])
