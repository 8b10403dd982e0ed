"""Weigh errors of a layer's weights by its inputs.

The output error of rounding W to V is |(W - V) x|^2 over the inputs x.  It needs no input but their
second moments: its mean is tr(E G E') with their Gram matrix G, or the sum of E_ij^2 G_jj where G
is taken for diagonal.  Inputs that are independent Gaussians of unit variance have G = 1, for which
that is the expectation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.statistics import Calibration, Gram
from fp4convert.numerics.codec import Float32s

FloatArray = NDArray[np.floating[Any]]


class Inputs(NamedTuple):
    """The inputs of a linear layer.

    Known by the Gram matrix, by the moments alone, or by neither: Gaussians of unit variance.
    """

    moments: Float32s | None = None
    gram: Gram | None = None

    @classmethod
    def of(cls, calibration: Calibration | None, module: str) -> Inputs:
        """Read the inputs of a module; Gaussians without a calibration.

        Raises InputError where the calibration has none
        """
        return cls(calibration.moments(module), calibration.gram(module)) if calibration else cls()

    @property
    def is_plain(self) -> bool:
        """Tell whether they are Gaussians of unit variance."""
        return self.moments is None and self.gram is None

    def power(self, matrix: FloatArray) -> float:
        """Return the mean of |matrix x|^2 over the inputs x, in float64.

        matrix  (rows, columns) float32 or float64, in which it is multiplied with a Gram matrix;
                float32 may round the power of a matrix that these inputs hardly see to a little
                below 0
        """
        if self.gram is None:
            return weighted(column_power(matrix), self.moments)
        count, width, _ = self.gram.blocks.shape
        padded = np.zeros((len(matrix), count * width), matrix.dtype)
        padded[:, : matrix.shape[1]] = matrix
        blocks = padded.reshape(len(matrix), count, width).swapaxes(0, 1)
        return float(np.multiply(blocks @ self.gram.blocks, blocks).sum(dtype=np.float64))


def describe_inputs(calibration: Calibration | None) -> dict[str, str | None]:
    """Describe the inputs of output errors for documents.

    calibration  None for Gaussians of unit variance
    """
    inputs = f"calibration, gram {calibration.gram_kind}" if calibration else "gaussian"
    return {"inputs": inputs, "calibration": calibration.sha256 if calibration else None}


def column_power(matrix: FloatArray) -> NDArray[np.float64]:
    """Sum the squares of every column."""
    power: NDArray[np.float64] = np.add.reduce(np.square(matrix, dtype=np.float64), axis=0)
    return power


def weighted(columns: NDArray[np.float64], moments: Float32s | None) -> float:
    """Sum the power of columns by the moments of their inputs.

    moments  None for inputs of unit variance
    """
    return float(np.add.reduce(columns if moments is None else columns * moments))


def output_power(matrix: FloatArray, inputs: Inputs) -> float:
    """Return the mean of |matrix x|^2 over the inputs x, never below 0.

    matrix  (rows, columns) float32 or float64; the mean is counted in float64
    """
    return max(inputs.power(matrix.astype(np.float64, copy=False)), 0.0)
