"""Turn MXFP4 and MXFP8 into FP8 blocks under powers of two.

A value of either format is an E4M3 number times a power of two. Under a scale that is a power of
two, E4M3 holds it again, unless it is more than 2^17 times smaller than the largest of its block.

Formula: scale = 2^ceil(log2(amax / 448)), the least power of two under which the largest value is
held (OCP 8-bit floating point v1.0: e4m3fn ends at 448); 1 for a block of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.encodings.fp8 import block_of
from fp4convert.makers.eight_bits import Eight
from fp4convert.makers.maker import Cast
from fp4convert.makers.spelling import Spelling
from fp4convert.makers.unit import Unit
from fp4convert.numerics.backends.base import Fp8Passes
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats, not_finite
from fp4convert.numerics.formats import E4M3_MAX
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.fp8_rounding import Block
from fp4convert.numerics.matrices import Weights
from fp4convert.storage.source import Source

LEAST_EXPONENT = -126  # of a normal float32


@dataclass(frozen=True, slots=True)
class ExactFp8(Eight):
    """One matrix of MXFP4 or MXFP8."""

    @property
    def carries(self) -> bool:
        return True

    def scales(self, weights: Weights, block: Block, passes: Fp8Passes) -> Float32s:
        """Return the power of two of every block."""
        amax = passes.block_amaxes(weights, block)
        if not np.isfinite(amax).all():
            raise not_finite()
        return choose_powers(amax)

    def casts(self, source: Source) -> Iterator[Cast]:
        weights = self.linear.coding.weights(self.linear, source)
        (rows, columns), cpu = weights.shape, Cpu()
        block = block_of(self.spelling.form, weights.shape)
        scales, kept = self.scales(weights, block, cpu), 0
        for number, first in enumerate(range(0, rows, block[0])):
            x = weights.rows(first, min(first + block[0], rows))
            grid = Grid(scales[number : number + 1], block)
            values = cpu.decode_fp8(cpu.quantize_fp8(x, grid).reshape(-1).data, x.shape, grid)
            starts = np.arange(0, columns, block[1])
            kept += int(np.logical_and.reduceat((values == as_floats(x)).all(axis=0), starts).sum())
        yield Cast(self.linear.module, scales.size, kept)


def choose_powers(amax: Float32s) -> Float32s:
    """Return the power of two of each block by its largest magnitude."""
    fraction, exponent = np.frexp(amax)
    highest, of_highest = np.frexp(np.float32(E4M3_MAX))
    exponents = exponent - of_highest + (fraction > highest)
    powers = np.ldexp(np.float32(1), np.maximum(exponents, LEAST_EXPONENT))
    scales: Float32s = np.where(amax == 0, np.float32(1), powers).astype(np.float32)
    return scales


def make(unit: Unit) -> ExactFp8:
    """Make the maker of a matrix of MXFP4 or MXFP8."""
    (stem,), (linear,) = unit.stems, unit.linears.values()
    rule = unit.target.rule_for(unit.form.format)
    return ExactFp8(stem, linear, Spelling(str(unit.target.dialect), unit.form), rule)
