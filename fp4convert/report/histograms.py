"""Count how often values occur in a tensor and in its source."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.numerics.codec import as_doubles
from fp4convert.numerics.matrices import Weights, row_panels
from fp4convert.quality.fold_recovery import unfolded
from fp4convert.storage.source import Source

BINS = 81  # odd: zero has one of its own
MOST_PANELS, PANEL = 16, 1 << 18  # of a tensor, evenly spread; elements of each


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in BINS equal parts of -limit..limit, the same for both.

    limit  the largest magnitude that either has
    share  of the rows that were read
    """

    limit: float
    source: tuple[int, ...]
    artifact: tuple[int, ...]
    share: float


def count_values(
    artifact: Artifact, source: Source, names: Collection[str]
) -> dict[str, Histogram]:
    """name -> histogram, of those of the tensors that both hold in one shape; names are those of the source's tensors.

    Raises  what reading the source raises
    """
    originals, stored = unfolded(artifact, source).of, linears_stored(artifact)
    wanted = {linear.name: linear for linear in originals.values() if linear.name in names}
    found = {}
    for name, theirs in wanted.items():
        ours = stored.get(theirs.module)
        if ours is not None and ours.shape == theirs.shape:
            found[name] = _count(_weights(theirs, source), _weights(ours, artifact.source))
    return found


def _weights(linear: Linear, source: Source) -> Weights:
    return linear.coding.weights(linear, source)


def _count(theirs: Weights, ours: Weights) -> Histogram:
    panels = list(_spread(theirs.shape))
    x, y = (
        np.concatenate([as_doubles(weights.rows(*panel)) for panel in panels])
        for weights in (theirs, ours)
    )
    limit = (
        max(float(np.abs(values[np.isfinite(values)]).max(initial=0)) for values in (x, y)) or 1.0
    )
    counts = [tuple(map(int, np.histogram(values, BINS, (-limit, limit))[0])) for values in (x, y)]
    share = sum(last - first for first, last in panels) / max(theirs.shape[0], 1)
    return Histogram(limit, counts[0], counts[1], share)


def _spread(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Panels of whole rows from all over a matrix, at most MOST_PANELS of them; all where there are no more."""
    panels = list(row_panels(shape, PANEL))
    step = len(panels) / min(MOST_PANELS, max(len(panels), 1))
    return (panels[math.floor(number * step)] for number in range(min(MOST_PANELS, len(panels))))
