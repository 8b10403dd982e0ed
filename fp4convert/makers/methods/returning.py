"""Keep the blocks of weights that fake quantization made.

The scale rules find their block scales and codes again wherever the global scale is the one that
they were made under; here it is looked for, and what came back is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.method import Group, Method, Under
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, as_floats
from fp4convert.numerics.fake_quantization import (
    count_exact,
    count_on_grid,
    find_amaxes,
    find_telling,
    is_on_grid,
)
from fp4convert.numerics.formats import GLOBAL_RANGE, Format, global_range
from fp4convert.numerics.matrices import Matrix, Quantized, Weights, row_panels

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

LOOKED_AT, SAMPLE = 1024, 1 << 16  # elements of a matrix: to tell ordinary weights, and to measure


def rows_over(weights: Weights, elements: int) -> Matrix:
    """Read about so many elements: whole rows, spread over the matrix."""
    rows, columns = weights.shape
    count = max(1, min(rows, elements // columns))
    chosen = [(2 * number + 1) * rows // (2 * count) for number in range(count)]
    data = b"".join(bytes(weights.rows(row, row + 1).data) for row in chosen)
    return Matrix(memoryview(data), weights.dtype, (count, columns))


def glance(weights: Weights, fmt: Format) -> tuple[int, int]:
    """Count, in few rows, blocks that tell and those that are on the grid."""
    return count_on_grid(as_floats(rows_over(weights, LOOKED_AT)), weights.dtype, fmt)


def are_exact(members: Sequence[Weights], fmt: Format) -> bool:
    """Tell from a glance whether weights come from fake quantization.

    Steps are looked for only where enough blocks have few magnitudes: ordinary weights have more
    in nearly every block.
    """
    samples = [as_floats(rows_over(weights, LOOKED_AT)) for weights in members]
    counts = [(total, len(blocks)) for total, blocks in (find_telling(x, fmt) for x in samples)]
    if not is_on_grid(sum(total for total, _ in counts), sum(few for _, few in counts)):
        return False
    counts = [
        count_on_grid(x, weights.dtype, fmt) for x, weights in zip(samples, members, strict=True)
    ]
    return is_on_grid(sum(total for total, _ in counts), sum(found for _, found in counts))


def under_their_scale(group: Group, rule: str, given: Given) -> Given:
    """Give the amax that most blocks of a scale group come back under.

    Returns   what was given where a file gives an amax, where the format has no global scale, where
              the rule has another one by definition, or where no other brings more blocks back
    """
    measured, fmt = group.measured, group.fmt
    is_free = fmt.has_global_scale and global_range(rule) == GLOBAL_RANGE
    if not is_free or (given.amax is not None and not given.is_own):
        return given
    if len({weights.dtype for weights in measured}) > 1:
        return given
    amax = _amax(measured) if given.amax is None else given.amax
    if not np.isfinite(amax) or amax == 0:
        return given
    samples = [rows_over(weights, SAMPLE // len(measured)) for weights in measured]
    dtype = samples[0].dtype
    blocks = np.concatenate([as_floats(sample).reshape(-1, fmt.block_size) for sample in samples])
    best, most = amax, -1
    for tried in find_amaxes(blocks, dtype, amax):
        exact = sum(
            _count(sample, Cpu().quantize(sample, fmt, "mse", tried))[1] for sample in samples
        )
        if exact > most:
            best, most = tried, exact
    return given if best == amax else Given(best)


def _amax(measured: Sequence[Weights]) -> float:
    panels = (weights.rows(*panel) for weights in measured for panel in row_panels(weights.shape))
    return max(map(Cpu().amax, panels), default=0.0)


class Returning(NamedTuple):
    """Another method, under the amax that most blocks come back under.

    Panels say how many blocks of such weights came back.
    """

    inner: Method
    rule: str

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        given = self.inner.under(group, tools, given).given
        if not are_exact(group.members, group.fmt):
            return Under(given)
        return Under(under_their_scale(group, self.rule, given), is_exact=True)

    def panels(self, group: Group, tools: Tools, under: Under) -> Iterator[tuple[int, Quantized]]:
        panels = self.inner.panels(group, tools, under)
        return with_exact(panels, group.members) if under.is_exact else panels

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        return self.inner.caller_nbytes(calibration)

    def working(self) -> AbstractContextManager[None]:
        return self.inner.working()


def with_exact(
    panels: Iterator[tuple[int, Quantized]], members: Sequence[Weights]
) -> Iterator[tuple[int, Quantized]]:
    """Pass panels on, with how many of their blocks come back.

    members  by their number, each panel below the one before
    """
    place = [0] * len(members)
    for number, q in panels:
        first = place[number]
        place[number] += q.shape[0]
        if q.compared is None:
            yield number, q
            continue
        exact = _count(members[number].rows(first, place[number]), q)
        yield number, replace(q, compared=q.compared._replace(exact=exact))


def _count(stored: Matrix, q: Quantized) -> tuple[int, int]:
    """Count blocks that are not zero, and those that come back."""
    x = np.frombuffer(stored.data, FLOAT_DTYPES[stored.dtype]).reshape(stored.shape)
    return count_exact(x, Cpu().values(q), q.format.block_size)
