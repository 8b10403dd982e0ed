"""Measure how far an artifact is from its source."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.fingerprint import check_source
from fp4convert.calibration.input_power import Inputs, output_power
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.error_report import source_dtypes
from fp4convert.checkpoint.linears import Linears, linears_stored
from fp4convert.checkpoint.record import ADAPTER, DECODED, describe_adapter
from fp4convert.errors import Finding, InputError, named
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, as_doubles, as_matrix
from fp4convert.numerics.error_sums import Sums, count_codes
from fp4convert.numerics.formats import CODES, FLOAT_TYPES, dtype_named
from fp4convert.numerics.matrices import Blocks, Weights, row_panels
from fp4convert.process import processors
from fp4convert.progress import Phases
from fp4convert.quality.fold_recovery import check_columns, check_vector, fold_originals
from fp4convert.quality.kept_values import own_names, split_bytes
from fp4convert.quality.odd_places import OddPlaces
from fp4convert.quality.source_match import is_underflow, underflow
from fp4convert.storage.gguf import (
    Q8_0,
    decode,
    encode_q8_0,
    shape_in_bytes,
    shape_in_weights,
)
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source, stopping

# Of the weights' power; other weights have about 2, and odd ones lose up to 0.3 by rounding.
DIFFERENT = 0.5
MEASURED_ELEMENTS = 1 << 20  # at once: 8 MB for each float64 copy
Doubles = NDArray[np.float64]


class Distance(NamedTuple):
    """The distance between one tensor of an artifact and the source's.

    sums     added in float64; x is the source's, y the artifact's; nothing is counted as clipped
    stem     the module of the tensor in the artifact
    dtype    of the source's tensor
    odd      rows and blocks of packed values that are not the source's, in words; "" for none
    is_lost  values that differ were too small for their scales
    answers  mean power of W x over the layer's inputs x, and of (W - V) x; None without inputs
    """

    sums: Sums
    stem: str
    dtype: str
    odd: str = ""
    answers: tuple[float, float] | None = None
    is_lost: bool = False

    @property
    def output_error(self) -> float | None:
        """Return sqrt(noise / signal) of the answers, if it is a number."""
        if self.answers is None:
            return None
        signal, noise = self.answers
        if noise == 0 and math.isfinite(signal):
            return 0.0
        found = noise / signal if signal > 0 else math.inf
        return math.sqrt(found) if math.isfinite(found) else None

    def check(self, name: str) -> Finding | None:
        """Check that a tensor's values are the source's, rounded to its format."""
        if not math.isfinite(self.sums.noise):
            detail = "its values or the source's are not finite"
            return Finding("error", "not-measurable", name, detail)
        if self.is_lost:
            return underflow(name)
        detail = f"its values are the source's, but for {self.odd}" if self.odd else ""
        if self.sums.noise > DIFFERENT * self.sums.signal:
            detail = "its values are not the source's, rounded to its format"
        return Finding("error", "source-differs", name, detail) if detail else None


def mean_output_error(weighted: Iterable[tuple[int, float | None]]) -> float | None:
    """Return the root of the mean power of output errors, by weights.

    weighted  (weights, output error) of layers
    Returns   None if no output error is known
    """
    known = [(weights, error) for weights, error in weighted if error is not None]
    total = sum(weights for weights, _ in known)
    if not total:
        return None
    return math.sqrt(math.fsum(weights * error * error for weights, error in known) / total)


class Pair(NamedTuple):
    """One linear layer, as the artifact stores it and as the source does."""

    ours: Linear
    theirs: Linear


def measure(
    artifact: Artifact, source: Source, pair: Pair, inputs: Inputs | None = None
) -> Distance:
    """Measure the distance between a layer of the artifact and the source's.

    The source of a kept layer is rounded to its dtype first.
    inputs  of the layer, to measure its answers
    """
    weights = pair.theirs.coding.weights(pair.theirs, source)
    coding = pair.ours.coding
    stored = coding.weights(pair.ours, artifact.source)
    module, blocks = pair.ours.module, coding.blocks(pair.ours)
    coded = artifact.decode(module) if module in artifact.modules else None
    counts = np.zeros(0 if coded is None else CODES, np.int64)
    max_abs = output = 0.0
    width = coded.format.block_size if coded else weights.shape[1]
    # Of other tools' artifacts no record says whether GPTQ rounded them.
    is_placed = not artifact.record or artifact.record.get("method") == "gptq"
    places = OddPlaces(weights.shape[1], width, is_placed)
    dtype = pair.theirs.refs[0].dtype
    stem = artifact.modules[module].stem if module in artifact.modules else module
    has_factors = bool(pair.theirs.coding.columns or pair.theirs.coding.rows)
    is_plain = not inputs or (inputs.is_plain and not has_factors)
    if coded and blocks and is_plain and (whole := places.sum_by_rows(weights, coded)):
        answers = (whole.signal, whole.noise) if inputs else None
        return Distance(whole, stem, dtype, answers=answers)
    answered = answered_wrongly = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for panel in row_panels(weights.shape, MEASURED_ELEMENTS):
            x = as_doubles(weights.rows(*panel))
            q = coded.rows(*panel) if coded else None
            if q:
                counts += count_codes(q.packed)
            rows = as_matrix(Cpu().values(q)) if q and blocks else stored.rows(*panel)
            y = as_doubles(rows)
            if not coding.is_packed:
                x = x.astype(FLOAT_DTYPES[rows.dtype]).astype(np.float64)
            difference = x - y
            places.add(panel[0], x, difference)
            output += float(y @ y)
            max_abs = max(max_abs, float(np.abs(difference).max(initial=0)))
            if inputs:
                x, difference = (
                    _without_factors(values, pair.theirs, source, panel)
                    for values in (x, difference)
                )
                answered += output_power(x, inputs)
                answered_wrongly += output_power(difference, inputs)
    histogram = tuple(map(int, counts))
    sums = Sums(
        math.prod(weights.shape), places.signal, places.noise, output, max_abs, histogram=histogram
    )
    answers = (answered, answered_wrongly) if inputs else None
    odd = places.describe() if coding.is_packed else ""
    is_other = bool(odd) or places.noise > DIFFERENT * places.signal
    is_lost = is_other and _is_lost(weights, coded)
    return Distance(sums, stem, dtype, odd, answers, is_lost)


def _is_lost(weights: Weights, coded: Blocks | None) -> bool:
    """Read a layer again; tell whether it lost only too small values."""
    panels = row_panels(weights.shape, MEASURED_ELEMENTS)
    return coded is not None and is_underflow(
        (as_doubles(weights.rows(*panel)), coded.rows(*panel)) for panel in panels
    )


def _without_factors(
    values: Doubles, linear: Linear, source: Source, panel: tuple[int, int]
) -> Doubles:
    """Return rows as (rows, columns) without the factors of folds.

    Inputs and answers belong to the source's layer, which has no factors.
    """
    matrix = values.reshape(-1, linear.shape[1])
    if linear.coding.columns:
        matrix = matrix / linear.coding.columns.find(source).columns
    if linear.coding.rows:
        matrix = matrix * linear.coding.rows.find(source).made[slice(*panel), None]
    return matrix


class SourcePairs(NamedTuple):
    """An artifact paired with its source, before a weight is read.

    originals    the linear layers of the source, under the folds of the artifact
    pairs        layers that the artifact stores in another form
    findings     on linear layers that the source lacks
    calibration  inputs of layers; None for Gaussians of unit variance
    has_outputs  errors of outputs are measured
    """

    artifact: Artifact
    source: Source
    originals: Linears
    pairs: list[Pair]
    findings: list[Finding]
    calibration: Calibration | None
    has_outputs: bool

    def compare(
        self, phases: Phases, verb: str = "compare"
    ) -> tuple[dict[str, Distance], list[Finding]]:
        """Measure every quantized module, and check all kept tensors.

        phases  receives the progress, as the phase `verb`
        """
        (found,) = compare_all([self], phases, verb)
        return found

    def _find_copied(self) -> list[TensorRef]:
        """Find the source's tensors that the artifact holds as they are.

        These are all that no pair replaces.
        """
        replaced = {ref.name for ref in self.originals.idle}
        for _, theirs in self.pairs:
            replaced.update(ref.name for ref in (theirs.home, *theirs.refs, *theirs.idle))
        return [ref for ref in self.source.checkpoint.tensors if ref.name not in replaced]

    def _find_added(self, copied: Collection[TensorRef]) -> Iterator[Finding]:
        """Find the artifact's tensors that come from none of the source."""
        known = own_names(self.artifact) | {ref.name for ref in copied}
        for ours, _ in self.pairs:
            known.update(ref.name for ref in (*ours.refs, *ours.idle))
        for name in sorted(self.artifact.tensors.keys() - known):
            detail = "it comes from no tensor of the source"
            yield Finding("error", "tensor-foreign", name, detail)

    def _measure_pair(self, pair: Pair) -> Distance:
        inputs = None
        if self.has_outputs and pair.ours.coding.is_packed:
            inputs = Inputs.of(self.calibration, pair.theirs.module)
        return measure(self.artifact, self.source, pair, inputs)

    def _find_folded(self) -> tuple[set[str], Mapping[str, str]]:
        """Find modules with folded columns, and the dtypes of their source.

        They have the nearest codes of the rounded weights, not of an original of them.
        """
        folded = {pair.ours.module for pair in self.pairs if pair.theirs.coding.foldings}
        folded &= self.artifact.modules.keys()
        return folded, source_dtypes(self.artifact) if folded else {}

    def _check_kept(self, ref: TensorRef) -> Finding | None:
        """Check that the artifact holds a tensor as the source does."""
        artifact, source = self.artifact, self.source
        if ref.name in self.originals.vectors:
            return check_vector(artifact, self.originals.vectors[ref.name], source)
        kept = artifact.tensors.get(ref.name)
        decoded = artifact.record.get(DECODED)
        is_decoded = isinstance(decoded, list) and ref.name in decoded
        if kept and (is_decoded or artifact.foreign):
            return self._check_decoded(kept, ref)
        kinds = {(ref.dtype, ref.shape)}
        word = artifact.record.get("keep_dtype")
        if word == Q8_0.lower() and ref.dtype in FLOAT_TYPES and ref.shape:
            kinds.add((Q8_0, shape_in_bytes(Q8_0, ref.shape)))
        elif word and ref.dtype == "F32":
            kinds.add((dtype_named(str(word)), ref.shape))
        if ref.dtype in FLOAT_TYPES:  # as GGUF files have norms: the same values
            kinds.add(("F32", ref.shape))
        if kept is None or (kept.dtype, kept.shape) not in kinds:
            detail = "missing from the artifact, or there with another dtype or shape"
            return Finding("error", "kept-missing", ref.name, detail)
        for part in split_bytes(ref):
            expected, own = source.read_range(ref, *part), part
            if kept.dtype != ref.dtype:  # by --keep-dtype, or widened
                values = np.frombuffer(expected, FLOAT_DTYPES[ref.dtype])
                if kept.dtype == Q8_0:
                    expected = encode_q8_0(values.astype(np.float32))
                else:
                    expected = values.astype(FLOAT_DTYPES[kept.dtype]).view(np.uint8).data
                own = (part[0] * kept.nbytes // ref.nbytes, part[1] * kept.nbytes // ref.nbytes)
            if artifact.source.read_range(kept, *own) != expected:
                detail = "it was kept, but its bytes are not the source's"
                return Finding("error", "kept-differs", ref.name, detail)
        return None

    def _check_decoded(self, kept: TensorRef, ref: TensorRef) -> Finding | None:
        """Check that values which were rounded before are near the source's."""
        noise = signal = 0.0
        elements = _elements(ref)
        is_whole = _elements(kept) == elements
        for first in range(0, elements if is_whole else 0, MEASURED_ELEMENTS):
            last = min(first + MEASURED_ELEMENTS, elements)
            x, y = (
                _values(source, one, first, last)
                for source, one in ((self.source, ref), (self.artifact.source, kept))
            )
            noise, signal = noise + float(np.sum((x - y) ** 2)), signal + float(np.sum(x**2))
        if is_whole and noise <= DIFFERENT * signal:
            return None
        detail = "it has another dtype or format, and its values are not near the source's"
        return Finding("error", "kept-differs", ref.name, detail)


def compare_all(
    every: Sequence[SourcePairs], phases: Phases, verb: str = "compare"
) -> list[tuple[dict[str, Distance], list[Finding]]]:
    """Compare artifacts with the source of all, which is read once.

    phases   receives the progress, as the phase `verb`
    Returns  what SourcePairs.compare returns, of each
    """
    copied = [one._find_copied() for one in every]
    folded = [one._find_folded() for one in every]
    findings = [
        [*one.findings, *one._find_added(refs)] for one, refs in zip(every, copied, strict=True)
    ]
    found: list[dict[str, Distance]] = [{} for _ in every]
    nbytes = sum(ref.nbytes for refs in copied for ref in refs)
    phases.begin(verb, nbytes + sum(pair.theirs.nbytes for one in every for pair in one.pairs))

    def compare_shard(at: int, file: str, pool: ThreadPoolExecutor) -> None:
        """Compare the kept tensors of a shard with an artifact, then its pairs."""
        one, (modules, dtypes) = every[at], folded[at]

        def check_kept(ref: TensorRef) -> Finding | None:
            finding = one._check_kept(ref)
            phases.report(ref.name, ref.nbytes)
            return finding

        def measure_pair(pair: Pair) -> Distance:
            distance = one._measure_pair(pair)
            phases.report(pair.theirs.name, pair.theirs.nbytes)
            return distance

        here = [pair for pair in one.pairs if pair.theirs.refs[0].file == file]
        kept = (check_kept(ref) for ref in copied[at] if ref.file == file)
        findings[at] += (finding for finding in kept if finding)
        for pair, distance in zip(here, pool.map(measure_pair, here), strict=True):
            if pair.ours.coding.is_packed:
                found[at][pair.theirs.name] = distance
                is_own = dtypes.get(distance.stem, distance.dtype) == distance.dtype
                if pair.ours.module in modules and is_own:
                    blocks = one.artifact.decode(pair.ours.module)
                    findings[at] += check_columns(blocks, *pair, one.source)
            elif distance.sums.max_abs != 0:
                detail = "it was kept, but its values are not the source's"
                findings[at].append(
                    Finding("error", "kept-differs", pair.ours.refs[0].name, detail)
                )

    source, is_alone = every[0].source, len(every) == 1
    for shard in source.checkpoint.shards:
        threads = ThreadPoolExecutor(processors())
        stops = stopping(source, *(one.artifact.source for one in every))
        with source.stream(shard.file), threads as pool, stops:
            for at, one in enumerate(every):
                with named("" if is_alone else one.artifact.source.name):
                    compare_shard(at, shard.file, pool)
    ordered = [
        {pair.theirs.name: own[pair.theirs.name] for pair in one.pairs if pair.theirs.name in own}
        for one, own in zip(every, found, strict=True)
    ]
    return list(zip(ordered, findings, strict=True))


def _elements(ref: TensorRef) -> int:
    is_plain = ref.dtype in FLOAT_DTYPES
    return math.prod(ref.shape if is_plain else shape_in_weights(ref.dtype, ref.shape))


def _values(source: Source, ref: TensorRef, first: int, last: int) -> Doubles:
    """Read elements of floats, or of llama.cpp's blocks, which are whole."""
    elements = _elements(ref)
    part = (first * ref.nbytes // elements, last * ref.nbytes // elements)
    stored = source.read_range(ref, *part)
    if ref.dtype in FLOAT_DTYPES:
        return np.frombuffer(stored, FLOAT_DTYPES[ref.dtype]).astype(np.float64)
    return decode(stored, ref.dtype).reshape(-1).astype(np.float64)


def pair_with_source(
    artifact: Artifact, source: Source, calibration: Calibration | None, has_outputs: bool
) -> SourcePairs:
    """Match every changed linear layer with its original.

    calibration, has_outputs  as SourcePairs has them
    Raises  InputError for a packed source that cannot be read, a calibration of another source, and
            an artifact with an adapter that --lora does not name
    """
    if ADAPTER in artifact.record and artifact.adapter is None:
        detail = f"{artifact.source.name} was made with {describe_adapter(artifact.record)}"
        expected = "expected --lora ADAPTER, for the source alone is not what was rounded"
        raise InputError("adapter-needed", f"{detail}; {expected}")
    originals = fold_originals(artifact, source)
    pairs, findings = [], []
    for module, ours in linears_stored(artifact).items():
        theirs = originals.of.get(module)
        is_stored_alone = theirs is None or (
            theirs.home == theirs.refs[0] and not theirs.coding.is_packed
        )
        is_changed = theirs is not None and bool(theirs.coding.change)
        if not ours.coding.is_packed and is_stored_alone and not is_changed:
            continue  # copied byte for byte
        if theirs is not None and theirs.shape == ours.shape:
            pairs.append(Pair(ours, theirs))
            continue
        detail = f"expected a matrix of {list(ours.shape)}; "
        detail += f"the source holds {list(theirs.shape)}" if theirs else "it is not in the source"
        findings.append(Finding("error", "source-differs", module, detail))
    if calibration:
        packed = [pair.theirs for pair in pairs if pair.ours.coding.is_packed]
        adapter = artifact.adapter.key if artifact.adapter else None
        check_source(calibration, source, packed, adapter)
    return SourcePairs(artifact, source, originals, pairs, findings, calibration, has_outputs)
