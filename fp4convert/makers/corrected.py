"""Round the residual of weights and a low-rank correction, without data.

This is SVDQuant: columns are multiplied by smooth factors; the strongest directions of the product
go into two thin factors of bf16, and the codes hold the rest (arXiv 2411.05007).  Smooth factors
and thin factors are rounded first, so that the codes see all that this rounding lost.  Every sum
runs in a fixed order, so that any CPU and any number of workers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fp4convert.checkpoint.encodings.base import Linear, room_for
from fp4convert.checkpoint.encodings.corrected import Residual, corrected, residual_of
from fp4convert.makers.maker import Maker, Parts, Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group, Method
from fp4convert.makers.methods.protected import PANEL_NBYTES
from fp4convert.makers.spelling import Losses, Spelling, naming
from fp4convert.makers.unit import Stem, Unit
from fp4convert.numerics.backends.base import Given
from fp4convert.numerics.backends.cpu import READ_ELEMENTS, Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_floats, not_finite
from fp4convert.numerics.formats import NVFP4, global_range
from fp4convert.numerics.low_rank import Correction, basis_of
from fp4convert.numerics.matrices import Quantized, Weights, row_panels
from fp4convert.storage.safetensors import TensorRef

SMALLEST = np.float32(1e-6)  # amax of a column, and smooth factor: Diffusers' pull request 14608
PASSES = 5  # over the weights: leaves less than 1 % more than the best factors of that rank
PANEL = 1 << 18  # elements, which stay in the second cache
SEED = 14608
CALLER_NBYTES = PANEL_NBYTES * READ_ELEMENTS
f32 = np.float32


@dataclass(frozen=True, slots=True)
class Corrected(Maker):
    """One matrix with its own global scale."""

    stem: Stem
    linear: Linear
    spelling: Spelling
    method: Method
    rule: str

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return self.linear.refs

    @property
    def held_nbytes(self) -> int:
        return self.linear.nbytes

    def parts(self, tools: Tools) -> Parts:
        linear, table = self.linear, self.spelling.spoken.TRAITS.correction
        if table is None:
            raise RuntimeError("this dialect has no corrections")
        losses = Losses(self.stem.name, [linear], self.spelling.form)
        with naming([linear], tools), room_for(tools.source, [linear]):
            weights = linear.coding.weights(linear, tools.source)
            correction, panels = self.rounded(weights, table.rank, tools)
            yield from table.encode(self.stem.name, correction)
            yield from self.spelling.encode(self.stem, losses.passing(panels))
        return losses.facts()

    def rounded(
        self, weights: Weights, rank: int, tools: Tools
    ) -> tuple[Correction, Iterator[Quantized]]:
        """Return a correction, and panels of its residual.

        A panel's losses are those of correction and codes together.
        """
        correction, amax = find_correction(weights, rank)
        given = Given(_exact_amax(amax, global_range(self.rule)))
        return correction, self._panels(weights, correction, given, tools)

    def _panels(
        self, weights: Weights, correction: Correction, given: Given, tools: Tools
    ) -> Iterator[Quantized]:
        residual, first = Residual(weights, correction), 0
        group = Group([], [residual], [self.linear.module], NVFP4)
        under = self.method.under(group, tools, given)
        for _, q in self.method.panels(group, tools, under):
            last = first + q.shape[0]
            values = corrected(Cpu().values(q).reshape(q.shape), correction, first)
            compared = Cpu().compare_values(weights.rows(first, last), values)
            counts = q.compared.counts if q.compared else compared.counts
            yield replace(q, compared=compared._replace(counts=counts))
            first = last


def make(unit: Unit) -> Corrected:
    """Make the maker of a module whose form has a correction."""
    (stem,), (linear,) = unit.stems, unit.linears.values()
    target, fmt = unit.target, unit.form.format
    spelling, method = Spelling(str(target.dialect), unit.form), method_for(target, fmt)
    return Corrected(stem, linear, spelling, method, target.rule_for(fmt))


def find_correction(weights: Weights, rank: int) -> tuple[Correction, float]:
    """Find smooth factors and low-rank factors of weights.

    Returns  the correction, every number of it a bf16, and the amax of its residual
    Raises   NumericError on NaN or infinity
    Formula  smooth = 1 / sqrt(amax of the column); up down = the projection of the smoothed weights
             on `rank` directions, which iterations of the subspace find (arXiv 0909.4061, 4.4)
    """
    smooth = _smooth_factors(weights)
    directions = _find_directions(weights, smooth, rank)
    turned = np.ascontiguousarray(directions.T)
    down = _as_bf16(directions / smooth)
    up = np.empty((weights.shape[0], rank), f32)
    amax = 0.0
    for first, last, x in _read(weights):
        up[first:last] = _as_bf16(Cpu().multiply(x * smooth, turned))
        left = residual_of(x, Correction(smooth, down, up), first)
        amax = max(amax, float(np.abs(left).max(initial=0)))
    return Correction(smooth, down, up), amax


def _smooth_factors(weights: Weights) -> Float32s:
    amax = np.zeros(weights.shape[1], f32)
    for _, _, x in _read(weights):
        np.maximum(amax, np.abs(x).max(axis=0), out=amax)  # NaN stays
    if not np.isfinite(amax).all():
        raise not_finite()
    found = f32(1) / np.sqrt(np.maximum(amax, SMALLEST))
    return _as_bf16(np.maximum(found, SMALLEST))


def _find_directions(weights: Weights, smooth: Float32s, rank: int) -> Float32s:
    """Return orthonormal rows, (rank, columns); zeros where there are no more."""
    signs = np.random.PCG64(SEED)  # its bits are the same in every version of NumPy
    found = np.zeros((rank, weights.shape[1]), f32)
    for first, last, x in _read(weights):
        bits = signs.random_raw(last - first) >> np.arange(rank, dtype=np.uint64)[:, None] & 1
        found += Cpu().multiply(1 - 2 * bits.astype(f32), x * smooth)
    for _ in range(PASSES):
        basis = basis_of(found)
        found = np.zeros_like(found)
        for _, _, x in _read(weights):
            smoothed = x * smooth
            along = Cpu().multiply(smoothed, basis)
            found[: basis.shape[1]] += Cpu().multiply(np.ascontiguousarray(along.T), smoothed)
    basis = basis_of(found)
    directions = np.zeros_like(found)
    directions[: basis.shape[1]] = basis.T
    return directions


def _exact_amax(amax: float, reach: float) -> float:
    """Return the next amax whose global scale is a bf16; 1 for zeros alone."""
    scale = np.array([amax / reach if amax else 1.0], f32)
    upper = (scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return float(upper.view(f32)[0] * f32(reach))


def _read(weights: Weights) -> Iterator[tuple[int, int, Float32s]]:
    for first, last in row_panels(weights.shape, PANEL):
        yield first, last, as_floats(weights.rows(first, last))


def _as_bf16(values: Float32s) -> Float32s:
    return values.astype(FLOAT_DTYPES["BF16"]).astype(f32)
