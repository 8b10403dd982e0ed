"""Read four-bit codes under factors of inputs, as AWQ leaves them.

  M.pre_quant_scale  [columns], a float: engines multiply the inputs of M with it, so that column j
                     of the weights is that of the codes times factor j

Source: ModelOpt 0.47, torch/export; ComfyUI, comfy/ops.py at 0271a46, MixedPrecisionOps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import ChangedCoding, Coding, Linear
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, as_floats, as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source


def check_factors(ref: TensorRef, columns: int) -> None:
    """Raise InputError for factors that are not one float for each column."""
    if ref.dtype not in FLOAT_DTYPES or ref.shape != (columns,):
        detail = f"{ref.file}: {ref.name} is {ref.dtype} {list(ref.shape)}"
        detail += f"; expected a float for each of {columns} columns"
        raise InputError("scales-shape", detail, tensor=ref.name)


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed(ChangedCoding):
    """Codes whose columns are multiplied with factors; it has no `blocks`."""

    stored: Coding
    within: Artifact = field(repr=False)
    format = None

    @property
    def word(self) -> str:
        return f"{self.stored.word} awq"

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Return the products with the factors, as float32."""
        stored = self.stored.weights(linear, source)
        factors = self.within.input_factors(linear.module)
        if factors is None:
            raise RuntimeError(f"{linear.module} has no factors")

        def fetch(first: int, last: int) -> Matrix:
            with np.errstate(over="ignore"):  # Inf is refused where it is rounded
                return as_matrix(as_floats(stored.rows(first, last)) * factors)

        return FetchedWeights("F32", linear.shape, fetch)
