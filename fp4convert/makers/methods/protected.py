"""Round merged weights so that the adapter stays, and measure that.

Rounded to the nearest, most adapters drown: their effect is smaller than the error.  Here an error
counts 1 + c times as much along the rows of A, the only inputs that an adapter answers, and columns
make up for each other's errors along these: GPTQ under H = I + c P P^T.
With a calibration H is its Gram matrix over the mean of its diagonal, and the same beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp4convert.calibration.statistics import has_few_tokens
from fp4convert.checkpoint.adapters.merging import LowRank, MergedRows
from fp4convert.checkpoint.dialects.stacks import InterleavedWeights
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.method import Group, Method, Under
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.cpu import READ_ELEMENTS, Cpu
from fp4convert.numerics.codec import Float32s, as_floats, block_steps, encode_e2m1, pack
from fp4convert.numerics.low_rank import PROTECTION_PASSES, Directions, directions_of, protection_of
from fp4convert.numerics.matrices import Quantized, Weights

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

PANEL_NBYTES = 24  # of an element while it is rounded: weights, steps and values, as tiles too


def low_ranks_of(weights: Weights) -> tuple[LowRank, ...]:
    """Return the low-rank changes in weights: of every member, or none."""
    if isinstance(weights, InterleavedWeights):
        found = [change for member in weights.members for change in low_ranks_of(member)]
        return tuple(found) if len(found) == len(weights.members) else ()
    if isinstance(weights, MergedRows) and isinstance(weights.by, LowRank):
        return (weights.by,)
    return ()


def directions_in(changes: Sequence[LowRank]) -> Directions:
    """Return the inputs that any of these answer; their rows take turns."""
    if len(changes) == 1:
        return changes[0].directions
    return directions_of(np.concatenate([change.right for change in changes]))


def round_protected(q: Quantized, x: Float32s, directions: Directions) -> Quantized:
    """Round rows again, so that errors along an adapter's inputs cancel.

    q        these rows, rounded to the nearest, whose block scales stay
    x        (rows, columns) float32
    Returns  the same with other codes
    """
    rank = directions.basis.shape[1]
    if not rank:
        return q
    steps, cpu = block_steps(q).reshape(len(x), -1), Cpu()
    y, pulled = x, np.zeros((len(x), rank), np.float32)
    for pulls in (directions.first, *[directions.again] * PROTECTION_PASSES):
        y, pulled = cpu.pull_to_nearest(x, steps, (directions.basis, pulls), y, pulled)
    each: Float32s = np.repeat(steps, q.format.block_size, axis=1)
    codes = encode_e2m1(np.divide(y, each, dtype=np.float32))
    return replace(q, packed=pack(codes).reshape(-1).data)


def protected_gram(blocks: Float32s, columns: int, basis: Float32s) -> Float32s:
    """Add an adapter's inputs to the blocks of a Gram matrix.

    blocks   (k, n, n) float32, along the diagonal
    basis    (columns, rank) float32
    Formula  G / mean(diag(G)) + c * columns / n * P P^T, each block by itself
    """
    count, width, _ = blocks.shape
    mean = float(np.diagonal(blocks, axis1=1, axis2=2).sum()) / columns or 1.0
    parts = np.zeros((count * width, basis.shape[1]), np.float32)
    parts[:columns] = basis
    parts = parts.reshape(count, width, -1)
    weight = protection_of(basis) * columns / min(width, columns)
    return np.asarray(blocks / mean + weight * (parts @ parts.swapaxes(1, 2)), np.float32)


def measure(
    changes: Sequence[LowRank], first: int, x: Float32s, y: Float32s
) -> tuple[float, float]:
    """Measure the effect of an adapter in some rows, and errors along it.

    changes  of the members whose rows take turns
    first    the number of the first row
    x, y     (rows, columns) float32: weights, and the values that they became
    Returns  the powers |s B A|^2 and |(x - y) P|^2 of these rows
    """
    effect, error = [], []
    for number, change in enumerate(changes):
        start = (number - first) % len(changes)
        own = np.ascontiguousarray((x - y)[start :: len(changes)])
        place = (first + start) // len(changes)
        along = Cpu().multiply(own, change.directions.basis).astype(np.float64)
        left = change.left[place : place + len(own)].astype(np.float64)
        spread = Cpu().multiply(change.left[place : place + len(own)], change.gram)
        effect.append(change.scaling**2 * float((spread * left).sum()))
        error.append(float((along * along).sum()))
    return math.fsum(effect), math.fsum(error)


class Protected(NamedTuple):
    """Another method, whose panels of merged weights keep the adapter.

    adapter     hash of the factors and their scale, which are in no repr
    is_rounded  codes are found again, unless H has protected them; else the effect is measured
    statistics  sha256 of the calibration file
    """

    inner: Method
    adapter: str
    is_rounded: bool
    statistics: str | None = None

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        return self.inner.under(group, tools, given)

    def panels(self, group: Group, tools: Tools, under: Under) -> Iterator[tuple[int, Quantized]]:
        changes = [low_ranks_of(weights) for weights in group.members]
        place = [0] * len(group.members)
        for number, q in self.inner.panels(group, tools, under):
            low_ranks, first = changes[number], place[number]
            place[number] += q.shape[0]
            if not low_ranks or q.compared is None:
                yield number, q
                continue
            panel = group.members[number].rows(first, place[number])
            x, rounded, compared = as_floats(panel), q, q.compared
            if self._is_rounded_again(group.modules[number], tools):
                rounded = round_protected(q, x, directions_in(low_ranks))
                compared = Cpu().compare(panel, rounded)
            effect = measure(low_ranks, first, x, Cpu().values(rounded))
            yield number, replace(rounded, compared=compared._replace(adapter=effect))

    def _is_rounded_again(self, module: str, tools: Tools) -> bool:
        """Tell whether no Gram matrix has protected the codes already."""
        if not self.is_rounded or tools.calibration is None:
            return self.is_rounded
        return has_few_tokens(tools.calibration, module)

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        if self.statistics or not self.is_rounded:
            return self.inner.caller_nbytes(calibration)
        return PANEL_NBYTES * READ_ELEMENTS

    def working(self) -> AbstractContextManager[None]:
        return self.inner.working()
