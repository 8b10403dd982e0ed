"""Verify an artifact: structure, hashes, and errors by its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import Entry, Recorded, read_recorded, shares
from fp4convert.engines.files import Engine
from fp4convert.engines.versions import Version
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.error_sums import SOURCE, Sums, count_codes, summarise
from fp4convert.numerics.formats import CODES
from fp4convert.numerics.matrices import row_panels
from fp4convert.process import processors
from fp4convert.progress import Phases
from fp4convert.quality.checks import (
    Judged,
    check_headers,
    choose_modules,
    is_healthy,
    judge,
)
from fp4convert.quality.engine_check import check_engine
from fp4convert.quality.kept_values import check_all_finite
from fp4convert.quality.signature import check_signature, open_verifier
from fp4convert.quality.source_compare import (
    Distance,
    Outputs,
    SourcePairs,
    mean_output_error,
    pair_with_source,
)
from fp4convert.storage.checkpoint_files import (
    RECORD,
    REPORT,
    SIGNATURE,
    UNDIGESTED,
    recorded_hashes,
)
from fp4convert.storage.disk import hash_stream
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source, stopping

AGREEMENT = 1e-6  # of an error; sums of float32 squares are off by less
# Of a value: what a global scale stored as its reciprocal moves it, and float32 differences.
STORED = 2.0**-22
OUTPUT_GATE = "--max-output-error"
MOST_NAMED = 3  # findings, in a line
NO_FAULT = "no fault found, no gate was set"
MISREAD = ("nibble-order", "scale-layout")  # findings of bytes that lie otherwise than declared


@dataclass(frozen=True, slots=True)
class TensorError:
    """The distance between the four-bit values of one tensor and its source.

    sqnr_db  10 log10(sum x^2 / sum (x - y)^2); None if nothing was lost or the source is zero
    mse      mean of (x - y)^2; None, as max_abs, if a value is not finite
    max_abs  largest |x - y|
    cosine   of x and y as vectors; None if one of them is zero
    saturated, zero, histogram  of its codes, by error_report.shares
    output_error  sqrt(E |(W - V) x|^2 / E |W x|^2) over the inputs x of the layer; None if it is no
                  number, or not asked for
    """

    name: str
    sqnr_db: float | None
    mse: float | None
    max_abs: float | None
    cosine: float | None
    saturated: float | None = None
    zero: float | None = None
    histogram: list[int] | None = None
    output_error: float | None = None


class Gate(NamedTuple):
    """What `passed` asks of every tensor; None asks nothing.

    engine      that is to load it
    public_key  of whoever must have signed it
    """

    min_sqnr_db: float | None = None
    max_nmse: float | None = None
    max_output_error: float | None = None
    engine: tuple[Engine, Version | None] | None = None
    public_key: Path | None = None

    @property
    def is_set(self) -> bool:
        return any(asked is not None for asked in self)

    @property
    def given(self) -> dict[str, float]:
        """Return the limits by option."""
        asked = {
            "--min-sqnr": self.min_sqnr_db,
            "--max-nmse": self.max_nmse,
            OUTPUT_GATE: self.max_output_error,
        }
        return {option: value for option, value in asked.items() if value is not None}

    def check(self, has_source: bool, has_inputs: bool) -> None:
        """Raise InputError for a gate without a source, or an idle number.

        has_inputs  of layers, of a calibration
        """
        if self.given and not has_source:
            verb = "needs" if len(self.given) == 1 else "need"
            detail = f"{' and '.join(self.given)} {verb} the original weights"
            raise InputError("no-source", detail, "Add --source SOURCE.")
        for option, value in self.given.items():
            if not math.isfinite(value):
                detail = f"{option} {value} is no limit; expected a finite number"
                next_step = f"Give a finite number, or leave {option} out."
                raise InputError("bad-gate", detail, next_step)
            if option != "--min-sqnr" and value < 0:
                detail = f"{option} {value:g}: an error is never negative; expected 0 or more"
                raise InputError("bad-gate", detail, "Give 0 or more.")
            if option == OUTPUT_GATE and value > 1:
                detail = f"{option} {value:g} is {100 * value:g} %"
                detail += "; expected a fraction from 0 to 1"
                raise InputError("bad-gate", detail, f"For {value:g} %: {option} {value / 100:g}")
        if not has_inputs and self.max_output_error is not None:
            detail = f"{OUTPUT_GATE} needs the inputs of the layers"
            step = "Add --calibration FILE; or --min-sqnr instead."
            raise InputError("no-calibration", detail, step)
        if has_inputs and not has_source:
            detail = "--calibration needs the original weights"
            raise InputError("no-source", detail, "Add --source SOURCE.")


@dataclass(frozen=True, slots=True, repr=False)
class Verified:
    """The document of `verify --json`.

    recorded  the summary of quantization_report.json; None where the artifact has none
    inputs, calibration  by which outputs were measured, as describe_inputs tells it; None where
                         they were not
    checked  how many files were hashed, modules' scales read and tensors compared; the source,
             what became of the signature, and whether a gate was set
    verdict  a sentence, where the source is another model's
    """

    tensors: tuple[TensorError, ...]
    summary: dict[str, Any]
    findings: tuple[Finding, ...]
    passed: bool
    recorded: dict[str, Any] | None = None
    inputs: str | None = None
    calibration: str | None = None
    checked: dict[str, Any] = field(default_factory=dict)
    verdict: str | None = None

    def __repr__(self) -> str:
        """Say the verdict in a line, for the end of a notebook's cell."""
        parts = [f"{len(self.tensors)} tensors measured"]
        for word, key in (("mean", "sqnr_db_mean"), ("least", "sqnr_db_min")):
            if isinstance(value := self.summary.get(key), float):
                parts.append(f"SQNR {word} {value:.2f} dB")
        parts += [f"{one.level} {one.code}" for one in self.findings[:MOST_NAMED]]
        if (more := len(self.findings) - MOST_NAMED) > 0:
            parts.append(f"and {more} more")
        return f"<Verified {self.words}: {', '.join(parts)}>"

    @property
    def words(self) -> str:
        """Say the verdict for a person: nothing passes where no gate was set."""
        if not self.passed:
            return "failed"
        return "passed" if self.checked.get("gated") else NO_FAULT

    def as_json(self) -> dict[str, Any]:
        tensors = [asdict(error) for error in self.tensors]
        if not self.inputs:
            for tensor in tensors:
                del tensor["output_error"]
        by = {"inputs": self.inputs, "calibration": self.calibration} if self.inputs else {}
        return {
            **by,
            "tensors": tensors,
            "summary": self.summary,
            "findings": [asdict(finding) for finding in self.findings],
            "passed": self.passed,
            "recorded": self.recorded,
            "checked": self.checked,
            "verdict": self.verdict,
        }


def verify(
    artifact: Artifact,
    source: Source | None,
    gate: Gate,
    outputs: Outputs | None = None,
    phases: Phases | None = None,
) -> Verified:
    """Verify every file and scale, and with a source every tensor.

    outputs  the inputs for output errors; None without them
    phases   receives the progress
    Raises   InputError for gates without a source, or for a calibration of another model
    """
    verified, _ = verify_judged(artifact, source, gate, outputs, phases)
    return verified


def verify_judged(
    artifact: Artifact,
    source: Source | None,
    gate: Gate,
    outputs: Outputs | None = None,
    phases: Phases | None = None,
) -> tuple[Verified, Judged]:
    """Verify an artifact; return its judgement by records and scales, too."""
    phases = phases or Phases()
    gate.check(source is not None, outputs is not None)
    verifier = open_verifier(artifact.source, gate.public_key) if gate.public_key else None
    pairs = pair_with_source(artifact, source, outputs) if source else None
    # 1. Records, names and scales; a source that has the modules decides what scales alone cannot.
    known = {pair.ours.module for pair in pairs.pairs} if pairs else set()
    related = source if known & artifact.modules.keys() else None
    sampled = choose_modules(artifact, is_full=False)
    judged = judge(artifact, related, list(artifact.modules), sampled, phases)
    findings = [*judged.findings, *check_headers(artifact)]
    findings += check_engine(artifact, findings, gate.engine)  # to which hashes are nothing
    # 2. The hashes of files, the signature, and the tensors that were kept.
    findings += _check_hashes(artifact, hashes := dict[str, str](), phases)
    signed = check_signature(artifact, verifier, hashes, phases)
    findings += [*signed.findings, *check_all_finite(artifact, phases, source is not None)]
    # 3. Every tensor against the source, and what the report says against what was measured.
    recorded, damages = read_recorded(artifact)
    findings += damages
    found: dict[str, Distance] = {}
    if pairs is not None:
        found, differences = pairs.compare(phases)
        findings += differences
    if recorded is not None and pairs is None:
        findings += check_codes(artifact, recorded, phases)
    as_meant = _leave_out_misread(found, judged)
    if recorded is not None and pairs is not None:
        findings += check_measured(recorded, as_meant)
    if any(not each.is_lost and each.check(name) for name, each in found.items()):
        findings += judged.refuted  # the source does not fit, so it refutes nothing
    # 4. The gates: for each tensor, and that there is one to measure.
    tensors = tuple(_tensor_error(name, distance) for name, distance in found.items())
    findings += _check_tensors(tensors, found, as_meant, gate)
    findings += _check_measuring(found, gate)
    verified = Verified(
        tensors,
        _summarise(tensors, found),
        tuple(findings),
        is_healthy(findings),
        recorded.summary if recorded else None,
        **(describe_inputs(outputs.calibration) if outputs else {}),
        checked={**_count_checked(artifact, source, found, gate), "signature": signed.word},
        verdict=None if pairs is None else _name_other_source(pairs, judged, found),
    )
    return verified, judged


def _count_checked(
    artifact: Artifact, source: Source | None, found: Mapping[str, Distance], gate: Gate
) -> dict[str, Any]:
    """Count files, modules and tensors; tell whether a gate was set."""
    return {
        "files": len(_recorded_hashes(artifact)),
        "modules": len(artifact.packed),
        "tensors": len(found),
        "source": source.name if source else None,
        "gated": gate.is_set,
    }


def _name_other_source(
    pairs: SourcePairs, judged: Judged, found: Mapping[str, Distance]
) -> str | None:
    """Return a sentence if the artifact was not made from the source.

    An artifact that is only stored or read wrongly fits the source in another reading, or in part.
    """
    artifact, source = pairs.artifact, pairs.source
    begun = f"{artifact.source.name} was not made from {source.name}"
    ours = {(ref.name, ref.shape) for ref in artifact.tensors.values()}
    common = sum((ref.name, ref.shape) in ours for ref in source.checkpoint.tensors)
    if not pairs.pairs and artifact.packed:
        few = f"only {common} tensors that were not quantized" if common else "no tensor"
        return f"{begun}: they have {few} in common"
    if any(one.code == "source-differs" and one.tensor is None for one in judged.findings):
        count = sum(distance.check(name) is not None for name, distance in found.items())
        if count == len(found):
            return f"{begun}: none of {count} tensors has its values, read in any way"
        some = f"{count} of {len(found)} tensors have other values, read in any way"
        return f"{begun} as it is: {some}; one of the two was changed, or is another version"
    return None


def _leave_out_misread(found: Mapping[str, Distance], judged: Judged) -> Mapping[str, Distance]:
    """Leave out tensors with misread codes or scales; a finding explains them."""
    misread = {one.tensor for one in judged.findings if one.code in MISREAD}
    if None in misread:
        return {}
    stems = {
        distance.stem for name, distance in found.items() if name.removesuffix(WEIGHT) in misread
    }
    return {name: distance for name, distance in found.items() if distance.stem not in stems}


def _check_measuring(found: Mapping[str, Distance], gate: Gate) -> Iterator[Finding]:
    """Check that there is a tensor to measure for every gate."""
    has_answers = any(distance.answers for distance in found.values())
    asked = [
        option for option in gate.given if not (has_answers if option == OUTPUT_GATE else found)
    ]
    if asked:
        detail = f"{' and '.join(asked)}: no tensor was measured"
        detail += ", for none of the source's is quantized in the artifact"
        yield Finding("error", "nothing-measured", None, detail)


def _summarise(tensors: Sequence[TensorError], found: Mapping[str, Distance]) -> dict[str, Any]:
    """Summarise the errors of all tensors.

    output_error_mean is that of powers, by weights, as analyze's of the whole.
    """
    summary = summarise((name, distance.sums) for name, distance in found.items())
    if any(distance.answers for distance in found.values()):
        errors = [(found[error.name].sums.elements, error.output_error) for error in tensors]
        known = [error for _, error in errors if error is not None]
        summary["output_error_max"] = max(known, default=None)
        summary["output_error_mean"] = mean_output_error(errors)
    return summary


def _tensor_error(name: str, distance: Distance) -> TensorError:
    sums = distance.sums
    codes: dict[str, Any] = shares(sums.histogram)
    if not math.isfinite(sums.noise):
        return TensorError(name, None, None, None, None, **codes)
    numbers = sums.sqnr_db, sums.mse, sums.max_abs, sums.cosine
    return TensorError(name, *numbers, **codes, output_error=distance.output_error)


def _check_tensors(
    tensors: Iterable[TensorError],
    found: Mapping[str, Distance],
    as_meant: Mapping[str, Distance],
    gate: Gate,
) -> list[Finding]:
    """Check tensors against the gates, then against the source.

    Returns  findings, the worst of a code first
    """
    missed: list[tuple[float, Finding]] = []
    others: list[Finding] = []
    for error in tensors:
        own = _check_gates(error, found[error.name], gate)
        missed += own
        others += [] if own else _check_source(error, as_meant)
    missed.sort(key=lambda one: -one[0])
    return [finding for _, finding in missed] + others


def _check_gates(error: TensorError, distance: Distance, gate: Gate) -> list[tuple[float, Finding]]:
    """Check a tensor against the gates.

    Returns  findings with a number, larger for worse
    """
    sums = distance.sums
    missed = []
    if math.isfinite(sums.noise):
        least = gate.min_sqnr_db
        sqnr_db = -math.inf if sums.signal == 0 and sums.noise > 0 else error.sqnr_db
        if least is not None and sqnr_db is not None and sqnr_db < least:
            detail = f"SQNR {sqnr_db:.3f} dB, expected at least {least:g} dB"
            missed.append((-sqnr_db, Finding("error", "sqnr-low", error.name, detail)))
        if gate.max_nmse is not None and sums.noise > gate.max_nmse * sums.signal:
            nmse = math.inf if sums.nmse is None else sums.nmse
            detail = f"NMSE {nmse:.3g}, expected at most {gate.max_nmse:g}"
            missed.append((nmse, Finding("error", "nmse-high", error.name, detail)))
        most = gate.max_output_error
        if most is not None and distance.answers:
            output_error = math.inf if error.output_error is None else error.output_error
            if not output_error <= most:
                detail = f"output error {100 * output_error:.4g} %"
                detail += f", expected at most {100 * most:g} %"
                finding = Finding("error", "output-error-high", error.name, detail)
                missed.append((output_error, finding))
    return missed


def _check_source(error: TensorError, as_meant: Mapping[str, Distance]) -> list[Finding]:
    """Check that a tensor is the source's, unless it is misread."""
    doubt = as_meant[error.name].check(error.name) if error.name in as_meant else None
    return [doubt] if doubt else []


def _recorded_hashes(artifact: Artifact) -> dict[str, str]:
    """Return the sha256 that the record has of every file of the digest."""
    files = recorded_hashes(artifact.record or {})
    return {file: sha256 for file, sha256 in files.items() if file not in UNDIGESTED}


def _check_hashes(artifact: Artifact, found: dict[str, str], phases: Phases) -> Iterator[Finding]:
    """Check that files are there, unchanged and recorded.

    found  receives the sha256 of every file
    """
    if not artifact.record:
        detail = "the artifact records no hashes, so its files could not be compared with them"
        yield Finding("note", "no-hashes", None, detail)
        return
    hashes = _recorded_hashes(artifact)
    phases.begin("hash", sum(_nbytes_there(artifact, file) for file in hashes))
    for file, sha256 in hashes.items():
        try:
            with artifact.source.open_file(file) as stream:
                found[file] = hash_stream(stream, partial(phases.report, file))
        except InputError as error:
            detail = f"{file} is recorded and cannot be read: {error.message}"
            yield Finding("error", "file-missing", None, detail)
            continue
        if found[file] != sha256:
            detail = f"{file} is not the file that was written: its sha256 differs"
            yield Finding("error", "hash-mismatch", None, detail)
    checkpoint = artifact.source.checkpoint
    for file in (*(shard.file for shard in checkpoint.shards), *checkpoint.left_out):
        if file not in hashes:
            detail = f"{file} holds weights, and the record does not name it"
            yield Finding("error", "file-unrecorded", None, detail)
    for file in checkpoint.sidecars:
        if file not in hashes and file not in (RECORD, SIGNATURE, *UNDIGESTED):
            detail = f"{file} was added later: the record does not name it"
            yield Finding("warning", "file-unrecorded", None, detail)


def _nbytes_there(artifact: Artifact, file: str) -> int:
    """Return the size of a recorded file; 0 if it is missing."""
    source = artifact.source
    try:
        return source.file_nbytes(file) if source.has_file(file) else 0
    except InputError:
        return 0


def check_codes(artifact: Artifact, recorded: Recorded, phases: Phases) -> Iterator[Finding]:
    """Check the codes of tensors against the counts of the report.

    Not on the Hub.
    """
    if artifact.source.is_streamed:
        return
    held: dict[str, list[str]] = {}
    for module, packed in artifact.modules.items():
        held.setdefault(packed.stem, []).append(module)
    entries = [entry for entry in recorded.entries if entry.histogram]
    counted = [module for entry in entries for module in held.get(entry.module, [])]
    phases.begin("codes", sum(math.prod(artifact.modules[each].shape) // 2 for each in counted))

    def count(entry: Entry) -> tuple[int, ...]:
        total = np.zeros(CODES, np.int64)
        for module in held.get(entry.module, []):
            blocks = artifact.decode(module)
            for panel in row_panels(blocks.shape):
                packed = blocks.rows(*panel).packed
                total += count_codes(packed)
                phases.report(module, len(packed))
        return tuple(total.tolist())

    with ThreadPoolExecutor(processors()) as pool, stopping(artifact.source):
        for entry, counts in zip(entries, pool.map(count, entries), strict=True):
            if finding := compare_codes(entry, counts):
                yield finding


def compare_codes(entry: Entry, counts: tuple[int, ...]) -> Finding | None:
    """Check the counts of codes in a tensor against the report's."""
    differing = [
        code
        for code, (found, said) in enumerate(zip(counts, entry.histogram, strict=True))
        if found != said
    ]
    if not differing:
        return None
    code = differing[0]
    detail = f"{REPORT} counts code {code} {entry.histogram[code]:,} times"
    detail += f", and it occurs {counts[code]:,} times"
    detail += f"; {len(differing)} of {CODES} codes differ"
    return Finding("error", "report-differs", entry.module, detail)


def check_measured(recorded: Recorded, found: Mapping[str, Distance]) -> Iterator[Finding]:
    """Check the losses of the report against the measured losses.

    A source in another dtype than the rounded one, such as its original, has other losses.
    """
    measured: dict[str, Sums] = {}  # of all that lies in one tensor of the artifact
    dtypes: dict[str, str] = {}
    others: list[Entry] = []
    for distance in found.values():
        dtypes.setdefault(distance.stem, distance.dtype)
        measured[distance.stem] = measured.get(distance.stem, Sums()).with_all(distance.sums)
    for entry in recorded.entries:
        sums = measured.get(entry.module)
        if sums is None or not math.isfinite(sums.noise) or not sums.elements:
            continue
        if entry.histogram and (finding := compare_codes(entry, sums.histogram)):
            yield finding
            continue
        if entry.against != SOURCE:
            continue
        # A distance moves by no more than the values do.
        moved = STORED * math.sqrt(sums.output)
        said, lost = math.sqrt(max(entry.mse, 0) * sums.elements), math.sqrt(sums.noise)
        if not abs(said - lost) <= AGREEMENT * lost + moved:
            detail = f"its mean squared error is {entry.mse:.9g}, and it is {sums.mse:.9g}"
        elif not abs(entry.max_abs - sums.max_abs) <= AGREEMENT * sums.max_abs + moved:
            detail = f"it is off by at most {entry.max_abs:.9g}, and it is by {sums.max_abs:.9g}"
        else:
            continue
        if entry.source_dtype not in ("", dtypes[entry.module]):
            others.append(entry)
            continue
        yield Finding("error", "report-differs", entry.module, f"{REPORT} says that {detail}")
    if others:
        first = others[0]
        detail = f"{len(others)} tensors were quantized from another source, such as {first.module}"
        detail += f", which was {first.source_dtype} there and is {dtypes[first.module]} here"
        detail += f"; so their errors are not those in {REPORT}"
        yield Finding("note", "other-source", None, detail)
