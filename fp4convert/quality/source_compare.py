"""Measure how far an artifact is from its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.input_power import Inputs, output_power
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import Linears, linears_stored
from fp4convert.errors import Finding
from fp4convert.numerics.backends.base import processors
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, as_doubles, as_matrix
from fp4convert.numerics.error_sums import Sums, count_codes
from fp4convert.numerics.formats import CODES
from fp4convert.numerics.matrices import Matrix, row_panels
from fp4convert.quality.fold_recovery import check_columns, check_vector, unfolded
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source, stopping


def stem_of(artifact: Artifact, module: str) -> str:
    """What holds a linear layer in the artifact."""
    return artifact.modules[module].stem if module in artifact.modules else module


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
            return Finding(
                "error", "not-measurable", name, "its values or the source's are not finite"
            )
        if self.sums.noise > DIFFERENT * self.sums.signal:
            return Finding(
                "error",
                "source-differs",
                name,
                "its values are not those of the source, in no sense of four bits",
            )
        return None


def mean_output_error(weighted: Iterable[tuple[int, float | None]]) -> float | None:
    """Of (weights, output error) of layers: the root of the mean power, by weights; None where none is known."""
    known = [(weights, error) for weights, error in weighted if error is not None]
    total = sum(weights for weights, _ in known)
    return (
        math.sqrt(math.fsum(weights * error * error for weights, error in known) / total)
        if total
        else None
    )


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
        is_copied = original is None or (
            original.home == original.refs[0] and not original.coding.is_packed
        )
        if not own.coding.is_packed and is_copied and not (original and original.coding.foldings):
            continue  # byte for byte
        if original is None or original.shape != own.shape:
            detail = (
                "it is not in the source"
                if original is None
                else f"the source holds {list(original.shape)}"
            )
            findings.append(
                Finding(
                    "error",
                    "source-differs",
                    module,
                    f"expected a matrix of {list(own.shape)}; {detail}",
                )
            )
        else:
            pairs.append(Pair(own, original))
    return pairs, findings


def measure(
    artifact: Artifact, source: Source, pair: Pair, inputs: Inputs | None = None
) -> Distance:
    """How far the values in the artifact are from the source's; what was kept is rounded to its own dtype before.

    inputs  what the layer is given, where its answers are asked for
    """
    theirs, ours = (
        pair.theirs.coding.weights(pair.theirs, source),
        _Stored(pair.ours, artifact.source),
    )
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
                answered_wrongly += output_power(
                    _unfolded(difference, pair.theirs, source, panel), inputs
                )
    sums = Sums(
        math.prod(theirs.shape),
        signal,
        noise,
        output,
        max_abs,
        histogram=tuple(map(int, ours.counts)),
    )
    answers = Answers(answered, answered_wrongly) if inputs else None
    return Distance(sums, stem_of(artifact, pair.ours.module), answers)


def _unfolded(values: Doubles, linear: Linear, source: Source, panel: tuple[int, int]) -> Doubles:
    """Those rows as (rows, columns) without the factors of folds: inputs and answers are those of the source's layer."""
    matrix = values.reshape(-1, linear.shape[1])
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
        self._blocks = coding.blocks(linear)
        self._weights = coding.weights(linear, source)
        self.counts = np.zeros(CODES if self._blocks else 0, np.int64)

    def rows(self, first: int, last: int) -> Matrix:
        if self._blocks is None:
            return self._weights.rows(first, last)
        q = self._blocks.rows(first, last)
        self.counts += count_codes(q.packed)
        return as_matrix(Cpu().values(q))


PART_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Outputs:
    """That the errors of outputs are measured, too.

    calibration  whose inputs count; None for Gaussians of unit variance
    """

    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """An artifact beside its source, of which no weight was read yet.

    originals  the linear layers of the source, under the folds of the artifact
    pairs      those that the artifact stores otherwise
    findings   on linear layers that the source has not
    """

    artifact: Artifact
    source: Source
    originals: Linears
    pairs: list[Pair]
    findings: list[Finding]
    outputs: Outputs | None

    def shares_any(self) -> bool:
        """Whether the source holds any four-bit module of the artifact."""
        return any(pair.ours.module in self.artifact.modules for pair in self.pairs)

    def compare(self) -> tuple[dict[str, Distance], list[Finding]]:
        """The error of every quantized module, and findings where the artifact holds what is not the source's."""
        copied, findings = self._copied(), list(self.findings)
        own = {
            ref.name for pair in self.pairs for ref in (*pair.ours.refs, *pair.ours.idle)
        } | own_names(self.artifact)
        for name in sorted(self.artifact.tensors.keys() - own - {ref.name for ref in copied}):
            findings.append(
                Finding("error", "tensor-foreign", name, "it comes from no tensor of the source")
            )
        found: dict[str, Distance] = {}
        for shard in self.source.checkpoint.shards:
            here = [pair for pair in self.pairs if pair.theirs.refs[0].file == shard.file]
            threads = ThreadPoolExecutor(processors())
            with (
                self.source.stream(shard.file),
                threads as pool,
                stopping(self.source, self.artifact.source),
            ):
                kept = (_compare_kept(self, ref) for ref in copied if ref.file == shard.file)
                findings += (finding for finding in kept if finding)
                measured = pool.map(
                    lambda pair: measure(self.artifact, self.source, pair, self._inputs(pair)), here
                )
                for pair, distance in zip(here, measured, strict=True):
                    if pair.ours.coding.is_packed:
                        found[pair.theirs.name] = distance
                        findings += _check_folded(self.artifact, self.source, pair)
                    elif distance.sums.max_abs != 0:
                        detail = "it was kept, but its values are not the source's"
                        findings.append(
                            Finding("error", "kept-differs", pair.ours.refs[0].name, detail)
                        )
        return {
            pair.theirs.name: found[pair.theirs.name]
            for pair in self.pairs
            if pair.theirs.name in found
        }, findings

    def _inputs(self, pair: Pair) -> Inputs | None:
        is_asked = self.outputs and pair.ours.coding.is_packed
        return (
            Inputs.of(self.outputs.calibration, pair.theirs.module)
            if self.outputs and is_asked
            else None
        )

    def _copied(self) -> list[TensorRef]:
        """The tensors of the source that an artifact holds as they are."""
        replaced = {
            ref.name
            for pair in self.pairs
            for ref in (pair.theirs.home, *pair.theirs.refs, *pair.theirs.idle)
        }
        replaced |= {ref.name for ref in self.originals.idle}
        return [ref for ref in self.source.checkpoint.tensors if ref.name not in replaced]


def stand_beside(artifact: Artifact, source: Source, outputs: Outputs | None = None) -> Beside:
    """Both, linear layer by linear layer.

    Raises  InputError for a source that is packed in a way that cannot be read, and a calibration that is not of this source
    """
    originals = unfolded(artifact, source)
    pairs, findings = pair_up(artifact, originals.of)
    if outputs and outputs.calibration:
        outputs.calibration.check(
            source, [pair.theirs for pair in pairs if pair.ours.coding.is_packed]
        )
    return Beside(artifact, source, originals, pairs, findings, outputs)


def _check_folded(artifact: Artifact, source: Source, pair: Pair) -> Iterator[Finding]:
    if pair.theirs.coding.foldings and pair.ours.module in artifact.modules:
        yield from check_columns(
            pair.ours.module, artifact.decode(pair.ours.module), pair.theirs, source
        )


def own_names(artifact: Artifact) -> set[str]:
    """What holds codes, scales and their companions in an artifact: the tensors that are not kept ones."""
    names = {
        ref.name
        for module in artifact.packed.values()
        for ref in (*module.refs, *module.companions)
    }
    return names | artifact.cache_scales(artifact.spelling).keys()


def _compare_kept(beside: Beside, ref: TensorRef) -> Finding | None:
    """A finding where a tensor of the source that was not quantized is another one in the artifact."""
    artifact, source = beside.artifact, beside.source
    if ref.name in beside.originals.vectors:
        return check_vector(artifact, beside.originals.vectors[ref.name], source)
    kept = artifact.tensors.get(ref.name)
    if kept is None or (kept.dtype, kept.shape) != (ref.dtype, ref.shape):
        return Finding(
            "error",
            "kept-missing",
            ref.name,
            "the source has it, the artifact has it not, or otherwise",
        )
    if any(
        artifact.source.read_range(kept, *part) != source.read_range(ref, *part)
        for part in parts(ref)
    ):
        return Finding(
            "error", "kept-differs", ref.name, "it was kept, but its bytes are not the source's"
        )
    return None


def parts(ref: TensorRef) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's bytes that are held at once."""
    return (
        (start, min(start + PART_NBYTES, ref.nbytes)) for start in range(0, ref.nbytes, PART_NBYTES)
    )
