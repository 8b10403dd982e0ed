"""What a matrix loses in each form that it can take: its own error, and that of its outputs, by NumPy in float64.

The output error of rounding W to V is |(W - V) X| / |W X| over the inputs X of the linear layer.  It needs no input but their
second moments: |E X|^2 is tr(E G E') with their Gram matrix G, or the sum of E_ij^2 G_jj where G is taken for diagonal.  Inputs
that are independent Gaussians of unit variance have G = 1, for which that is the expectation.

Block sizes that no engine reads are for study, by the reference arithmetic of codec.py with another block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.backends.cpu import Cpu
from fp4convert.calibration_file import Calibration, Gram
from fp4convert.codec import FLOAT_DTYPES, Float32s, decode_e4m3, dequantize, not_finite, quantize
from fp4convert.formats import FORMATS, FP8, IMPORTANCE, Matrix, Weights
from fp4convert.grid import fp8_scales_of, quantize_fp8

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a linear layer is given: by its Gram matrix, by the moments alone, or by neither: Gaussians of unit variance."""

    moments: Float32s | None = None
    gram: Gram | None = None

    @classmethod
    def of(cls, calibration: Calibration | None, module: str) -> Inputs:
        """Those of that module; InputError where the calibration has none."""
        return cls(calibration.moments(module), calibration.gram(module)) if calibration else cls()

    def power(self, matrix: Float32s) -> float:
        """The mean of |matrix x|^2 over the inputs x."""
        if self.gram is None:
            return weighted(column_power(matrix), self.moments)
        blocks, width = self.gram.blocks, self.gram.blocks.shape[-1]
        total = 0.0
        for number, block in enumerate(blocks):
            part = matrix[:, number * width : (number + 1) * width].astype(np.float64)
            own = block[: part.shape[1], : part.shape[1]].astype(np.float64)
            total += float(np.add.reduce((part @ own) * part, axis=None))
        return max(total, 0.0)


def column_power(matrix: Float32s) -> NDArray[np.float64]:
    """The sum of squares of every column."""
    power: NDArray[np.float64] = np.add.reduce(np.square(matrix, dtype=np.float64), axis=0)
    return power


def weighted(columns: NDArray[np.float64], moments: Float32s | None) -> float:
    """What inputs of these moments make of the power of columns; of unit variance where there are none."""
    return float(np.add.reduce(columns if moments is None else columns * moments))


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
    signal, output = weighted(column_power(x), None), inputs.power(x)
    for way in chosen:
        error = x - rounded(x, way, inputs.moments)
        yield Loss(_ratio(weighted(column_power(error), None), signal), _ratio(inputs.power(error), output))


def _ratio(noise: float, signal: float) -> float:
    return noise / signal if signal else 0.0


def rounded(x: Float32s, way: Way, importance: Float32s | None = None) -> Float32s:
    """The values of that form of a matrix.

    importance  of the columns, for the rule of that name
    """
    matrix = Matrix(x.reshape(-1).view(np.uint8).data, "F32", (x.shape[0], x.shape[1]))
    if isinstance(way.block, int):
        fmt, amax = FORMATS[way.format], float(np.abs(x).max(initial=0))
        given = importance if way.rule == IMPORTANCE else None
        if way.is_for_study:
            return dequantize(quantize(x, replace(fmt, block_size=way.block), str(way.rule), amax, given))
        q = Cpu().quantize(matrix, fmt, str(way.rule), amax, given)
        return np.frombuffer(Cpu().dequantize(q, "F32"), np.float32).reshape(x.shape)
    if way.format == BF16:
        return x.astype(FLOAT_DTYPES["BF16"]).astype(np.float32)
    scales = fp8_scales_of(np.abs(x).max(axis=1 if way.block == ROW else None, initial=0)).reshape(-1, 1)
    return decode_e4m3(quantize_fp8(matrix, scales)) * scales


def as_floats(matrix: Matrix) -> Float32s:
    """The values of stored rows as float32, exactly."""
    values: Float32s = np.frombuffer(matrix.data, FLOAT_DTYPES[matrix.dtype]).reshape(matrix.shape).astype(np.float32)
    return values


def rows_of(weights: Weights, strips: tuple[tuple[int, int], ...]) -> Float32s:
    """Those ranges of rows of a matrix, one below the other."""
    return np.concatenate([as_floats(weights.rows(first, last)) for first, last in strips])
