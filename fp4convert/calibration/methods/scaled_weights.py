"""Weights multiplied or divided by the factors of folds.

A fold multiplies the columns of every linear layer that reads an output, and divides the output by
the same factors: in the weight of a norm, or in the rows of a linear layer.  The model computes the
same; four bits hold it better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp4convert.checkpoint.encodings.base import Coding, CodingDefaults, Folding, Linear
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_floats, as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, RowReader, Weights
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

# How a divided vector is meant: a norm multiplies with it, or with 1 + it; a bias is added.
VectorKind = Literal["norm", "norm_plus_one", "bias"]
FOLDED = "folded"
f32 = np.float32


@dataclass(frozen=True, slots=True)
class Folded(CodingDefaults):
    """A matrix whose columns are multiplied, and whose rows are divided.

    stored   the weights as they are stored
    columns  the fold of its input; None without one
    rows     the fold of its output; None without one
    """

    stored: Coding
    columns: Folding | None = None
    rows: Folding | None = None
    change = FOLDED
    format = None

    @property
    def foldings(self) -> tuple[Folding, ...]:
        return tuple(folding for folding in (self.columns, self.rows) if folding)

    @property
    def word(self) -> str:
        return self.stored.word

    @property
    def is_packed(self) -> bool:
        return self.stored.is_packed

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True  # and multiplied

    def weights(self, linear: Linear, source: Source) -> Weights:
        return Scaled(self.stored.weights(linear, source), source, self.columns, self.rows)


@dataclass(frozen=True, slots=True)
class Scaled(RowReader):
    """Weights as float32, columns multiplied and rows divided.

    They are never rounded to another dtype between.
    """

    stored: Weights
    source: Source
    columns: Folding | None
    divided: Folding | None
    dtype = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def rows(self, first: int, last: int) -> Matrix:
        values = as_floats(self.stored.rows(first, last))
        # Beyond float32 it is Inf, which is refused.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self.columns:
                values = values * self.columns.find(self.source).columns
            if self.divided:
                values = values / self.divided.find(self.source).made[first:last, None]
        return as_matrix(values)


@dataclass(frozen=True, slots=True)
class Divided(CodingDefaults):
    """A divided weight or bias of a module, as one row.

    It keeps its dtype.
    """

    kind: VectorKind
    by: Folding
    word = change = FOLDED
    is_packed = False
    format = None

    @property
    def foldings(self) -> tuple[Folding, ...]:
        return (self.by,)

    def weights(self, linear: Linear, source: Source) -> Weights:
        ref = linear.refs[0]
        shape = (1, ref.elements)

        def fetch(first: int, last: int) -> Matrix:
            made = self.by.find(source).made
            values = divided(read_vector(ref, source), made, self.kind, ref.dtype)
            data = values.astype(FLOAT_DTYPES[ref.dtype]).view(np.uint8).data
            return Matrix(data, ref.dtype, shape)

        return FetchedWeights(ref.dtype, shape, fetch)


def reach_of(linear: Linear, source: Source) -> float:
    """Return how much larger its largest input becomes by its fold.

    1 without a fold, or where nobody wants to know.
    """
    folding = linear.coding.columns
    return folding.find(source).reach.get(linear.module, 1.0) if folding else 1.0


def moments_under(moments: Float32s, weights: Weights) -> Float32s:
    """Return the second moments of the inputs under folds.

    Inputs are divided by the factors of columns.
    moments  of the inputs without folds
    """
    from fp4convert.checkpoint.dialects.stacks import InterleavedWeights

    if isinstance(weights, InterleavedWeights):
        return moments_under(moments, weights.members[0])  # rows of layers with one input
    if not isinstance(weights, Scaled) or weights.columns is None:
        return moments
    return over_squares(moments, weights.columns.find(weights.source).columns)


def over_squares(moments: Float32s, columns: Float32s) -> Float32s:
    """Divide second moments of inputs by the squares of their factors."""
    with np.errstate(all="ignore"):
        found: Float32s = (moments / np.square(columns, dtype=np.float64)).astype(np.float32)
    return found


def divided(vector: Float32s, factors: Float32s, kind: VectorKind, dtype: str) -> Float32s:
    """Divide a weight or a bias, to the nearest values of a dtype.

    dtype    safetensors' name
    Returns  float32
    Formula  norm and bias: w / s; norm_plus_one: (1 + w) / s - 1, for such a norm multiplies with
             1 + w
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if kind == "norm_plus_one":
            exact = (f32(1) + vector) / factors - f32(1)
        else:
            exact = vector / factors
        return exact.astype(FLOAT_DTYPES[dtype]).astype(np.float32)


def quotients(before: Float32s, after: Float32s, kind: VectorKind) -> Float32s:
    """Return the factors by which a norm was divided.

    A factor is an output before over the output after; 1 if both are 0; neither positive nor finite
    if no factor turns one into the other.
    """
    ones = f32(1) if kind == "norm_plus_one" else f32(0)
    before, after = ones + before, ones + after
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        found = np.where((before == 0) & (after == 0), f32(1), before / after)
    return found.astype(np.float32)


def read_vector(ref: TensorRef, source: Source) -> Float32s:
    """Read a tensor's values as float32, flat."""
    return np.frombuffer(source.read(ref), FLOAT_DTYPES[ref.dtype]).astype(np.float32)
