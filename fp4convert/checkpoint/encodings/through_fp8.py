"""Read weights that are rounded to FP8 blocks of 128x128 first."""

from __future__ import annotations

from dataclasses import dataclass

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Coding, CodingDefaults, Folding, Linear, is_fp8
from fp4convert.checkpoint.encodings.fp8 import rounded_to_fp8
from fp4convert.numerics.matrices import Weights
from fp4convert.storage.source import Source


@dataclass(frozen=True, slots=True)
class ThroughFp8(CodingDefaults):
    """An encoding whose values are rounded to FP8 on their way."""

    stored: Coding
    format = None
    change = "rounded to fp8 first"
    against = "fp8"

    @property
    def word(self) -> str:
        return self.stored.word

    @property
    def is_packed(self) -> bool:
        return self.stored.is_packed

    @property
    def artifact(self) -> Artifact | None:
        return self.stored.artifact

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
    """Lay it over a linear layer that is not FP8 already."""
    return linear if is_fp8(linear) else linear._replace(coding=ThroughFp8(linear.coding))
