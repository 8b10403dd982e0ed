"""Read four-bit codes beside low-rank corrections, and biases in tiles.

The codes hold (W - up down), its columns multiplied with the smooth factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.tables import CorrectionTable
from fp4convert.checkpoint.encodings.base import Coding, CodingDefaults, Linear
from fp4convert.checkpoint.encodings.floats import as_row
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats, as_matrix
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.low_rank import Correction
from fp4convert.numerics.matrices import FetchedWeights, Matrix, RowReader, Weights
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

BIAS_DTYPE = "BF16"  # of biases in tiles


@dataclass(frozen=True, slots=True, eq=False)
class Residual(RowReader):
    """The rest of weights that the codes beside a correction hold."""

    stored: Weights
    correction: Correction = field(repr=False)
    dtype = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def rows(self, first: int, last: int) -> Matrix:
        x = as_floats(self.stored.rows(first, last))
        return as_matrix(residual_of(x, self.correction, first))


def residual_of(x: Float32s, correction: Correction, first: int) -> Float32s:
    """Return the rest of rows `first`, first + 1, ... for the codes to hold."""
    smooth, down, up, channels = correction
    rows = slice(first, first + len(x))
    left = (x - Cpu().multiply(up[rows], down)) * smooth
    return left if channels is None else left / channels[rows, None]


def corrected(values: Float32s, correction: Correction, first: int) -> Float32s:
    """Undo `residual_of` on values of codes."""
    smooth, down, up, channels = correction
    rows = slice(first, first + len(values))
    if channels is not None:
        values = values * channels[rows, None]
    return values / smooth + Cpu().multiply(up[rows], down)


@dataclass(frozen=True, slots=True, eq=False)
class Corrected(CodingDefaults):
    """Four-bit blocks with a low-rank correction.

    It has no `blocks`, which would not give its values, and no format that a module could keep.
    """

    artifact: Artifact = field(repr=False)
    rank: int
    is_packed = True
    format = None

    @property
    def word(self) -> str:
        return f"nvfp4 + rank {self.rank}"

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Return the values of codes and correction together, as float32."""
        blocks = self.artifact.decode(linear.module)
        correction = self.artifact.correction(linear.module)
        if correction is None:
            raise RuntimeError(f"{linear.module} has no correction")

        def fetch(first: int, last: int) -> Matrix:
            values = Cpu().values(blocks.rows(first, last)).reshape(last - first, -1)
            return as_matrix(corrected(values, correction, first))

        return FetchedWeights("F32", linear.shape, fetch)


@dataclass(frozen=True, slots=True)
class InTiles(CodingDefaults):
    """A bias, as one row, permuted into tiles, or back."""

    stored: Coding
    table: CorrectionTable = field(repr=False)
    is_restored: bool = False
    is_packed = False
    format = None

    @property
    def word(self) -> str:
        return self.stored.word

    @property
    def becomes(self) -> str:
        return BIAS_DTYPE

    @property
    def change(self) -> str:
        return "a bias, out of tiles" if self.is_restored else "a bias, bf16 in tiles"

    def weights(self, linear: Linear, source: Source) -> Weights:
        stored = self.stored.weights(linear, source)

        def fetch(first: int, last: int) -> Matrix:
            values = as_floats(stored.rows(0, 1)).reshape(-1)
            order = self.table.order(values.size)
            values = values[np.argsort(order) if self.is_restored else order]
            return Matrix(Cpu().to_bf16(values), BIAS_DTYPE, stored.shape)

        return FetchedWeights(BIAS_DTYPE, stored.shape, fetch)


def biases_in_tiles(
    modules: Iterable[str],
    tensors: Mapping[str, TensorRef],
    table: CorrectionTable,
    known: Mapping[str, Linear],
) -> Iterator[tuple[str, Linear]]:
    """Yield the biases of those modules by name, to be permuted into tiles.

    known  vectors that are changed first
    """
    for module in modules:
        name = module + table.bias
        ref = tensors.get(name)
        if ref is not None and ref.dtype in FLOAT_TYPES and len(ref.shape) == 1:
            bias = known.get(name) or as_row(ref)
            yield name, Linear(name, bias.shape, InTiles(bias.coding, table), bias.refs)


def biases_stored(artifact: Artifact) -> dict[str, Linear]:
    """Return the biases that an artifact holds in tiles, in ordinary order."""
    table = artifact.spelling.TRAITS.correction
    if table is None:
        return {}
    refs = (artifact.tensors.get(module + table.bias) for module in artifact.modules)
    rows = [as_row(ref) for ref in refs if ref is not None and ref.dtype in FLOAT_TYPES]
    return {
        row.module: row._replace(coding=InTiles(row.coding, table, is_restored=True))
        for row in rows
    }
