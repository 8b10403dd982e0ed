"""Code a module of the source as another checkpoint has it in eight bits.

The other is a publisher's own release of the same model. Values are compared when they are written:
each value of the source has to round to the code that stands there.

  |code x scale - weight| <= |weight| / 16 + scale / 1024, half a step of E4M3 (normal, subnormal)

and an eighth of a step more, for weights that were rounded to 16 bits; a code of +-448 may stand
for what is up to 512 scales, as the OCP's floor rule leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear
from fp4convert.checkpoint.encodings.fp8 import Fp8
from fp4convert.errors import NumericError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats
from fp4convert.numerics.formats import E4M3_MAX, Format
from fp4convert.numerics.fp8_int import Grid, each_scale
from fp4convert.numerics.matrices import Weights, row_panels
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Source

NORMAL, SUBNORMAL = (1 + 1 / 8) / 16, (1 + 1 / 8) / 1024
SATURATED = (512 - E4M3_MAX) / 512  # of a weight that a code of 448 stands for
SAME_MODEL = "Give the FP8 release of the same model and version, or leave --base out."


@dataclass(frozen=True, slots=True)
class FromBase(CodingDefaults):
    """A matrix in eight bits, and its weights in the source.

    eight   in the base
    floats  in the source
    """

    eight: Linear
    floats: Linear
    stored: Fp8
    base: str = field(repr=False)
    is_packed = True

    @property
    def word(self) -> str:
        return f"{self.stored.word} from {self.base}"

    @property
    def format(self) -> Format:
        return self.stored.format

    def weights(self, linear: Linear, source: Source) -> Weights:
        return self.stored.weights(self.eight, source)

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        return self.stored.form_kept(self.eight, target)

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        panels, differing = row_panels(linear.shape), _Differing()
        for codes, scales in self.stored.kept(self.eight, source, form):
            if codes.nbytes:
                self._compare(source, codes, next(panels), differing)
            yield codes, scales
        if differing.count:
            raise self._differs(linear, differing)

    def _compare(
        self, source: Source, codes: memoryview, rows: tuple[int, int], differing: _Differing
    ) -> None:
        """Count the weights of some rows that do not round to their codes."""
        shape = (rows[1] - rows[0], self.eight.shape[1])
        grid = self.stored.read_scales(source, self.eight.refs[1], self.eight.shape, rows)
        values = Cpu().decode_fp8(codes, shape, grid)
        x = as_floats(self.floats.coding.weights(self.floats, source).rows(*rows))
        differing.add(rows[0], x, values, grid)

    def _differs(self, linear: Linear, differing: _Differing) -> NumericError:
        row, column, weight, value = differing.first
        detail = (
            f"{linear.module}: {differing.count} of its {linear.shape[0] * linear.shape[1]} values"
            f" are not those of {self.base}, first at [{row}, {column}]: {weight:g} here,"
            f" {value:g} there; expected a difference of FP8's rounding at most"
        )
        return NumericError("base-differs", detail, SAME_MODEL, linear.module)


class _Differing:
    """Counts weights that are too far from their codes."""

    def __init__(self) -> None:
        self.count = 0
        self.first = (0, 0, 0.0, 0.0)

    def add(self, row: int, x: Float32s, values: Float32s, grid: Grid) -> None:
        scales = each_scale(grid, x.shape)
        size = np.abs(x)
        limit = size * np.float32(NORMAL) + scales * np.float32(SUBNORMAL)
        is_largest = np.abs(values) == scales * np.float32(E4M3_MAX)
        limit = np.where(is_largest, size * np.float32(SATURATED * (1 + 1 / 64)), limit)
        with np.errstate(invalid="ignore"):
            is_far = ~(np.abs(x - values) <= limit)
        if is_far.any() and not self.count:
            at = np.unravel_index(int(is_far.argmax()), is_far.shape)
            self.first = (row + int(at[0]), int(at[1]), float(x[at]), float(values[at]))
        self.count += int(is_far.sum())
