"""How far what an artifact holds is from its source: linear layers side by side, their weights and what they answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.accounting import Sums, count_codes
from fp4convert.artifact import Artifact
from fp4convert.auditing import stem_of
from fp4convert.backends.cpu import Cpu
from fp4convert.codec import FLOAT_DTYPES, as_doubles, as_matrix
from fp4convert.codings import Linear
from fp4convert.codings.folded import Folded, foldings_of
from fp4convert.codings.fp4 import FourBit
from fp4convert.formats import CODES, Matrix, row_panels
from fp4convert.inputs import Inputs
from fp4convert.linears import linears_stored
from fp4convert.losses import output_power
from fp4convert.reading import Finding
from fp4convert.sources import Source

DIFFERENT = 0.5  # of the weights' power; other weights have about 2, and odd ones lose up to 0.3 by rounding
MEASURED_ELEMENTS = 1 << 20  # at once: 8 MB for each float64 copy
Doubles = NDArray[np.float64]


class Answers(NamedTuple):
    """What a linear layer answers to its inputs: the mean power of W x over them, and that of (W - V) x."""

    signal: float
    noise: float

    @property
    def error(self) -> float | None:
        """The output error: sqrt(noise / signal); None where that is no number."""
        if self.noise == 0 and math.isfinite(self.signal):
            return 0.0
        found = self.noise / self.signal if self.signal > 0 else math.inf
        return math.sqrt(found) if math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one tensor of an artifact is from the source's, added in float64.

    sums     x is the source's, y the artifact's; nothing is counted as clipped
    stem     what holds it in the artifact
    answers  what the layer answers; None where nobody asked
    """

    sums: Sums
    stem: str
    answers: Answers | None = None

    def check(self, name: str) -> Finding | None:
        """A finding where its values are not the source's, in the sense of four bits, or nothing can be said.

        name  of the tensor
        """
        if not math.isfinite(self.sums.noise):
            return Finding("error", "not-measurable", name, "its values or the source's are not finite")
        if self.sums.noise > DIFFERENT * self.sums.signal:
            return Finding("error", "source-differs", name, "its values are not those of the source, in no sense of four bits")
        return None


def mean_output_error(weighted: Iterable[tuple[int, float | None]]) -> float | None:
    """Of (weights, output error) of layers: the root of the mean power, by weights; None where none is known."""
    known = [(weights, error) for weights, error in weighted if error is not None]
    total = sum(weights for weights, _ in known)
    return math.sqrt(math.fsum(weights * error * error for weights, error in known) / total) if total else None


class Pair(NamedTuple):
    """One linear layer, as the artifact stores it and as the source does."""

    ours: Linear
    theirs: Linear


def pair_up(artifact: Artifact, theirs: Mapping[str, Linear]) -> tuple[list[Pair], list[Finding]]:
    """Every linear layer that the artifact stores in another way than the source, beside its original."""
    ours = linears_stored(artifact)
    pairs, findings = [], []
    for module, own in ours.items():
        original = theirs.get(module)
        is_copied = original is None or (original.home == original.refs[0] and not original.coding.is_packed)
        if not own.coding.is_packed and is_copied and not (original and foldings_of(original)):
            continue  # byte for byte
        if original is None or original.shape != own.shape:
            detail = "it is not in the source" if original is None else f"the source holds {list(original.shape)}"
            findings.append(Finding("error", "source-differs", module, f"expected a matrix of {list(own.shape)}; {detail}"))
        else:
            pairs.append(Pair(own, original))
    return pairs, findings


def measure(artifact: Artifact, source: Source, pair: Pair, inputs: Inputs | None = None) -> Distance:
    """How far the values in the artifact are from the source's; what was kept is rounded to its own dtype before.

    inputs  what the layer is given, where its answers are asked for
    """
    theirs, ours = pair.theirs.coding.weights(pair.theirs, source), _Stored(pair.ours, artifact.source)
    signal = noise = max_abs = output = 0.0
    answered = answered_wrongly = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for panel in row_panels(theirs.shape, MEASURED_ELEMENTS):
            x, y = as_doubles(theirs.rows(*panel)), as_doubles(stored := ours.rows(*panel))
            if not pair.ours.coding.is_packed:
                x = x.astype(FLOAT_DTYPES[stored.dtype]).astype(np.float64)
            difference = x - y
            signal += float(x @ x)
            noise += float(difference @ difference)
            output += float(y @ y)
            max_abs = max(max_abs, float(np.abs(difference).max(initial=0)))
            if inputs:
                answered += output_power(_unfolded(x, pair.theirs, source, panel), inputs)
                answered_wrongly += output_power(_unfolded(difference, pair.theirs, source, panel), inputs)
    sums = Sums(math.prod(theirs.shape), signal, noise, output, max_abs, histogram=tuple(map(int, ours.counts)))
    answers = Answers(answered, answered_wrongly) if inputs else None
    return Distance(sums, stem_of(artifact, pair.ours.module), answers)


def _unfolded(values: Doubles, linear: Linear, source: Source, panel: tuple[int, int]) -> Doubles:
    """Those rows as (rows, columns) without the factors of folds: inputs and answers are those of the source's layer."""
    matrix = values.reshape(-1, linear.shape[1])
    if isinstance(linear.coding, Folded):
        if linear.coding.columns:
            matrix = matrix / linear.coding.columns.find(source).columns
        if linear.coding.rows:
            matrix = matrix * linear.coding.rows.find(source).made[slice(*panel), None]
    return matrix


class _Stored:
    """The values of a linear layer in an artifact, whose codes are counted as they are read.

    counts  of the sixteen codes; empty where they are not four-bit
    """

    def __init__(self, linear: Linear, source: Source) -> None:
        coding = linear.coding
        self._blocks = coding.blocks(linear) if isinstance(coding, FourBit) else None
        self._weights = coding.weights(linear, source)
        self.counts = np.zeros(CODES if self._blocks else 0, np.int64)

    def rows(self, first: int, last: int) -> Matrix:
        if self._blocks is None:
            return self._weights.rows(first, last)
        q = self._blocks.rows(first, last)
        self.counts += count_codes(q.packed)
        return as_matrix(Cpu().values(q))
