"""Count how often values occur in a tensor and in its source."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.numerics.codec import as_doubles
from fp4convert.numerics.matrices import Weights, row_panels
from fp4convert.quality.fold_recovery import fold_originals
from fp4convert.storage.source import Source

BINS = 81  # odd: zero has one of its own
MOST_PANELS, PANEL = 16, 1 << 18  # of a tensor, evenly spread; elements of each


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in BINS equal parts of -limit..limit.

    The parts are the same for artifact and source.

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
    """Count the values of tensors that artifact and source hold in one shape.

    names    of the source's tensors
    Returns  name -> histogram
    Raises   errors of reading the source
    """
    originals, stored = fold_originals(artifact, source).of, linears_stored(artifact)
    wanted = {linear.name: linear for linear in originals.values() if linear.name in names}
    found = {}
    for name, theirs in wanted.items():
        ours = stored.get(theirs.module)
        if ours is not None and ours.shape == theirs.shape:
            found[name] = _count(
                theirs.coding.weights(theirs, source), ours.coding.weights(ours, artifact.source)
            )
    return found


def _count(theirs: Weights, ours: Weights) -> Histogram:
    """Count the values of at most MOST_PANELS panels from all over a matrix."""
    panels = list(row_panels(theirs.shape, PANEL))
    if len(panels) > MOST_PANELS:
        step = len(panels) / MOST_PANELS
        panels = [panels[int(number * step)] for number in range(MOST_PANELS)]
    x, y = (
        np.concatenate([as_doubles(weights.rows(*panel)) for panel in panels])
        for weights in (theirs, ours)
    )
    largest = (float(np.abs(v[np.isfinite(v)]).max(initial=0)) for v in (x, y))
    limit = max(largest) or 1.0
    counts = [tuple(map(int, np.histogram(values, BINS, (-limit, limit))[0])) for values in (x, y)]
    share = sum(last - first for first, last in panels) / max(theirs.shape[0], 1)
    return Histogram(limit, counts[0], counts[1], share)
