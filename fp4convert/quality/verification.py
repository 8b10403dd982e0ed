"""Verify an artifact: structure, hashes, and errors by its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import read_recorded, shares
from fp4convert.engines.files import EngineAt
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.error_sums import summarise
from fp4convert.progress import Phases
from fp4convert.quality.checks import (
    Judged,
    check_headers,
    choose_modules,
    fault_word,
    is_healthy,
    judge,
)
from fp4convert.quality.engine_check import check_engines
from fp4convert.quality.evaluation import find_usual_sqnr
from fp4convert.quality.kept_values import check_kept
from fp4convert.quality.record_checks import (
    check_codes,
    check_hashes,
    check_losses,
    digested_hashes,
)
from fp4convert.quality.signature import check_signature, open_verifier
from fp4convert.quality.source_compare import (
    Distance,
    SourcePairs,
    mean_output_error,
    pair_with_source,
)
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source

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
    output_error  sqrt(E |(W - V) x|^2 / E |W x|^2) over the inputs x of the layer; None if it is
                  not finite or was not measured
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
    """The limits and demands of `verify`; None for no limit.

    engines     that have to load the artifact
    public_key  of the signer
    """

    min_sqnr_db: float | None = None
    max_nmse: float | None = None
    max_output_error: float | None = None
    engines: tuple[EngineAt, ...] = ()
    public_key: Path | None = None

    @property
    def is_set(self) -> bool:
        return any(asked not in (None, ()) for asked in self)

    @property
    def given(self) -> dict[str, float]:
        """Return the limits by option."""
        limits = zip(("--min-sqnr", "--max-nmse", OUTPUT_GATE), self, strict=False)
        return {option: value for option, value in limits if isinstance(value, float | int)}

    def check(self, has_source: bool, has_inputs: bool) -> None:
        """Raise InputError for a gate without a source, or an impossible limit.

        has_inputs  a calibration gives the inputs of layers
        """
        if self.given and not has_source:
            verb = "needs" if len(self.given) == 1 else "need"
            detail = f"{' and '.join(self.given)} {verb} the original weights"
            raise InputError("no-source", detail, "Add --source SOURCE.")
        for option, value in self.given.items():
            if not math.isfinite(value):
                detail = f"{option} {value} is no limit; expected a finite number"
                step = f"Give a finite number, or leave {option} out."
                raise InputError("bad-gate", detail, step)
            if option != "--min-sqnr" and value < 0:
                detail = f"{option} {value:g}: an error is never negative; expected 0 or more"
                raise InputError("bad-gate", detail, "Give 0 or more.")
            if option == OUTPUT_GATE and value > 1:
                detail = f"{option} {value:g} is {100 * value:g} %; expected a fraction from 0 to 1"
                raise InputError("bad-gate", detail, f"For {value:g} %: {option} {value / 100:g}")
        if not has_inputs and self.max_output_error is not None:
            raise InputError("no-calibration", f"{OUTPUT_GATE} needs the inputs of the layers")
        if has_inputs and not has_source:
            detail = "--calibration needs the original weights"
            raise InputError("no-source", detail, "Add --source SOURCE.")


@dataclass(frozen=True, slots=True, repr=False)
class Verified:
    """The document of `verify --json`.

    recorded  the summary of quantization_report.json; None without the file
    inputs, calibration  of describe_inputs, if errors of outputs were measured
    checked  counts of hashed files, modules with scales, and compared tensors; the source, the
             result for the signature, and whether a gate was set
    verdict  a sentence, if the source is another model's
    usual    the UsualSqnr of such an artifact, if it is known
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
    usual: dict[str, Any] | None = None

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
            return fault_word((one.code for one in self.findings if one.level == "error"), "failed")
        return "passed" if self.checked.get("gated") else NO_FAULT

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        document |= {key: list(document[key]) for key in ("tensors", "findings")}
        by = {key: document.pop(key) for key in ("inputs", "calibration")}
        if self.inputs:
            return by | document
        for tensor in document["tensors"]:
            del tensor["output_error"]
        return document


def verify(
    artifact: Artifact,
    source: Source | None,
    gate: Gate,
    calibration: Calibration | None = None,
    phases: Phases | None = None,
) -> Verified:
    """Verify every file and scale, and with a source every tensor.

    calibration  the inputs of layers, to measure errors of outputs
    phases       receives the progress
    Raises       InputError for gates without a source, or for a calibration of another model
    """
    verified, _ = verify_judged(artifact, source, gate, calibration, phases)
    return verified


def verify_judged(
    artifact: Artifact,
    source: Source | None,
    gate: Gate,
    calibration: Calibration | None = None,
    phases: Phases | None = None,
) -> tuple[Verified, Judged]:
    """Verify an artifact; return its judgement by records and scales, too."""
    phases, has_inputs = phases or Phases(), calibration is not None
    gate.check(source is not None, has_inputs)
    verifier = open_verifier(artifact.source, gate.public_key) if gate.public_key else None
    pairs = pair_with_source(artifact, source, calibration, has_inputs) if source else None
    # 1. Records, names and scales; a source that has the modules decides what scales alone cannot.
    known = {pair.ours.module for pair in pairs.pairs} if pairs else set()
    related = source if known & artifact.modules.keys() else None
    sampled = choose_modules(artifact, is_full=False)
    judged = judge(artifact, related, list(artifact.modules), sampled, phases)
    findings = [*judged.findings, *check_headers(artifact)]
    findings += check_engines(artifact, findings, gate.engines)  # which reads no hashes
    # 2. The hashes of files, the signature, and the tensors that were kept.
    findings += check_hashes(artifact, hashes := dict[str, str](), phases)
    signature, signed = check_signature(artifact, verifier, hashes, phases)
    findings += [*signed, *check_kept(artifact, phases, source is not None)]
    # 3. Every tensor against the source, and the report against codes or measured losses.
    report, damages = read_recorded(artifact)
    findings += damages
    distances: dict[str, Distance] = {}
    if pairs is not None:
        distances, differences = pairs.compare(phases)
        findings += differences
    as_declared = _leave_out_misread(distances, judged)
    if report is not None and pairs is None:
        findings += check_codes(artifact, report, phases)
    elif report is not None:
        findings += check_losses(report, as_declared)
    if any(not each.is_lost and each.check(name) for name, each in distances.items()):
        findings += judged.refuted  # the source does not fit, so it refutes nothing
    # 4. The gates: for each tensor, and that there is one to measure.
    tensors = tuple(_tensor_error(name, distance) for name, distance in distances.items())
    findings += _check_tensors(tensors, distances, as_declared, gate)
    findings += _check_measuring(distances, gate)
    verified = Verified(
        tensors,
        _summarise(tensors, distances),
        tuple(findings),
        is_healthy(findings),
        report.summary if report else None,
        **(describe_inputs(calibration) if calibration else {}),
        checked={
            "files": len(digested_hashes(artifact)),
            "modules": len(artifact.packed),
            "tensors": len(distances),
            "source": source.name if source else None,
            "gated": gate.is_set,
            "signature": signature,
        },
        verdict=None if pairs is None else _name_other_source(pairs, judged, distances),
        usual=usual._asdict() if (usual := find_usual_sqnr(artifact)) else None,
    )
    return verified, judged


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
        detail = f"{' and '.join(asked)}: no tensor was measured, for none of the source's is"
        detail += " quantized in the artifact"
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
    tensors: Sequence[TensorError],
    distances: Mapping[str, Distance],
    as_declared: Mapping[str, Distance],
    gate: Gate,
) -> list[Finding]:
    """Check every tensor against the gates, else against the source.

    as_declared  the distances of tensors that are not misread
    Returns      findings, the worst of a code first
    """
    missed: list[tuple[float, Finding]] = []
    others: list[Finding] = []
    for error in tensors:
        if own := list(_check_gates(error, distances[error.name], gate)):
            missed += own
        elif error.name in as_declared and (doubt := as_declared[error.name].check(error.name)):
            others.append(doubt)
    missed.sort(key=lambda one: -one[0])
    return [finding for _, finding in missed] + others


def _check_gates(
    error: TensorError, distance: Distance, gate: Gate
) -> Iterator[tuple[float, Finding]]:
    """Check a tensor against the gates; worse findings have larger numbers."""
    sums, name = distance.sums, error.name
    if not math.isfinite(sums.noise):
        return
    sqnr_db = -math.inf if sums.signal == 0 and sums.noise > 0 else error.sqnr_db
    if gate.min_sqnr_db is not None and sqnr_db is not None and sqnr_db < gate.min_sqnr_db:
        detail = f"SQNR {sqnr_db:.3f} dB, expected at least {gate.min_sqnr_db:g} dB"
        yield -sqnr_db, Finding("error", "sqnr-low", name, detail)
    if gate.max_nmse is not None and sums.noise > gate.max_nmse * sums.signal:
        nmse = math.inf if sums.nmse is None else sums.nmse
        detail = f"NMSE {nmse:.3g}, expected at most {gate.max_nmse:g}"
        yield nmse, Finding("error", "nmse-high", name, detail)
    if gate.max_output_error is not None and distance.answers:
        lost, most = error.output_error, gate.max_output_error
        lost = math.inf if lost is None else lost
        if lost > most:
            detail = f"output error {100 * lost:.4g} %, expected at most {100 * most:g} %"
            yield lost, Finding("error", "output-error-high", name, detail)
