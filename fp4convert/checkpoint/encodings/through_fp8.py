"""Read weights that are rounded to FP8 blocks of 128x128 first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.encodings.base import ChangedCoding, Coding, Folding, Linear, is_fp8
from fp4convert.numerics import fp8_int
from fp4convert.numerics.codec import FLOAT_DTYPES, as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.storage.source import Source

BLOCK = (128, 128)
COLUMNS = 2048  # rounded together, so that memory does not grow with the width of a matrix


@dataclass(frozen=True, slots=True)
class ThroughFp8(ChangedCoding):
    """A coding whose values are rounded to FP8 first."""

    stored: Coding
    format = None
    change = "rounded to fp8 first"
    against = "fp8"

    @property
    def columns(self) -> Folding | None:
        return self.stored.columns

    @property
    def rows(self) -> Folding | None:
        return self.stored.rows

    @property
    def foldings(self) -> tuple[Folding, ...]:
        return self.stored.foldings

    def weights(self, linear: Linear, source: Source) -> Weights:
        return rounded_to_fp8(self.stored.weights(linear, source))


def through_fp8(linear: Linear) -> Linear:
    """Round the values of a linear layer to FP8, unless it is FP8 already."""
    return linear if is_fp8(linear) else linear._replace(coding=ThroughFp8(linear.coding))


def rounded_to_fp8(weights: Weights) -> Weights:
    """Return weights rounded to FP8 in blocks of 128x128, as float32."""
    whole_height, width = weights.shape
    height = BLOCK[0]

    def fetch(first: int, last: int) -> Matrix:
        rounded = np.empty((last - first, width), np.float32)
        for begin in range(first // height * height, last, height):
            stored = weights.rows(begin, min(begin + height, whole_height))
            values = np.frombuffer(stored.data, FLOAT_DTYPES[stored.dtype]).reshape(stored.shape)
            wanted = slice(max(first - begin, 0), last - begin)  # of the rows of these blocks
            for left in range(0, width, COLUMNS):
                columns = slice(left, left + COLUMNS)
                part = fp8_int.through_fp8(values[:, columns].astype(np.float32), BLOCK)[wanted]
                rounded[max(begin - first, 0) :][: len(part), columns] = part
        return as_matrix(rounded)

    return FetchedWeights("F32", weights.shape, fetch)
