"""Verify an artifact: structure, hashes, and errors by its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import Entry, Recorded, read_recorded, shares
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.backends.base import processors
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.error_sums import SOURCE, Sums, count_codes, summarise
from fp4convert.numerics.formats import CODES
from fp4convert.numerics.matrices import row_panels
from fp4convert.quality.checks import choose_modules, is_healthy, judge
from fp4convert.quality.source_compare import (
    Distance,
    Outputs,
    mean_output_error,
    own_names,
    parts,
    stand_beside,
)
from fp4convert.storage.checkpoint_files import RECORD, REPORT, UNDIGESTED
from fp4convert.storage.disk import hash_stream
from fp4convert.storage.source import Source, stopping

AGREEMENT = 1e-6  # of an error; sums of float32 squares are off by less
STORED = (
    2.0**-22
)  # of a value: what a global scale stored as its reciprocal moves it, and float32 differences


def check_codes(artifact: Artifact, recorded: Recorded) -> Iterator[Finding]:
    """A finding for each tensor whose codes are not those that the report counted; on the Hub they are not read."""
    if artifact.source.is_streamed:
        return
    held: dict[str, list[str]] = {}
    for module, packed in artifact.modules.items():
        held.setdefault(packed.stem, []).append(module)
    entries = [entry for entry in recorded.entries if entry.histogram]
    with ThreadPoolExecutor(processors()) as pool, stopping(artifact.source):
        counts = pool.map(lambda entry: _count(artifact, held.get(entry.module, [])), entries)
        yield from (
            found
            for entry, count in zip(entries, counts, strict=True)
            if (found := compare_codes(entry, count))
        )


def _count(artifact: Artifact, modules: list[str]) -> tuple[int, ...]:
    """How often each code occurs in these modules."""
    total = [0] * CODES
    for module in modules:
        blocks = artifact.decode(module)
        for panel in row_panels(blocks.shape):
            total = [
                sum(pair)
                for pair in zip(
                    total, count_codes(blocks.rows(*panel).packed).tolist(), strict=True
                )
            ]
    return tuple(total)


def compare_codes(entry: Entry, counts: tuple[int, ...]) -> Finding | None:
    """A finding where a tensor has other codes than the report says."""
    differing = [
        code
        for code, (ours, theirs) in enumerate(zip(counts, entry.histogram, strict=True))
        if ours != theirs
    ]
    if not differing:
        return None
    code = differing[0]
    detail = f"{REPORT} counts code {code} {entry.histogram[code]:,} times, and it occurs {counts[code]:,} times"
    return Finding(
        "error",
        "report-differs",
        entry.module,
        f"{detail}; {len(differing)} of {CODES} codes differ",
    )


def check_measured(recorded: Recorded, measured: Mapping[str, Sums]) -> Iterator[Finding]:
    """A finding for each tensor that the report says to have lost more or less than was measured now.

    measured  by the name of what holds a tensor in the artifact
    """
    for entry in recorded.entries:
        sums = measured.get(entry.module)
        if sums is None or not math.isfinite(sums.noise) or not sums.elements:
            continue
        if entry.histogram and (finding := compare_codes(entry, sums.histogram)):
            yield finding
        elif entry.against == SOURCE and (detail := _differ(entry, sums)):
            yield Finding("error", "report-differs", entry.module, detail)


def _differ(entry: Entry, sums: Sums) -> str | None:
    """How the report's numbers are not those that were measured; a distance moves by no more than the values do."""
    moved = STORED * math.sqrt(sums.output)
    told, found = math.sqrt(max(entry.mse, 0) * sums.elements), math.sqrt(sums.noise)
    if not abs(told - found) <= AGREEMENT * found + moved:
        return f"{REPORT} says that its mean squared error is {entry.mse:.9g}, and it is {sums.mse:.9g}"
    if not abs(entry.max_abs - sums.max_abs) <= AGREEMENT * sums.max_abs + moved:
        return f"{REPORT} says that it is off by at most {entry.max_abs:.9g}, and it is by {sums.max_abs:.9g}"
    return None


OUTPUT_GATE = "--max-output-error"


@dataclass(frozen=True, slots=True)
class TensorError:
    """How far the four-bit values of one tensor are from its source.

    sqnr_db  10 log10(sum x^2 / sum (x - y)^2); None where nothing was lost or the source is zero
    mse      mean of (x - y)^2; None, as max_abs, where a value is not finite
    max_abs  largest |x - y|
    cosine   of x and y as vectors; None where one of them is zero
    saturated, zero, histogram  of its codes, as error_report.shares has them
    output_error  sqrt(E |(W - V) x|^2 / E |W x|^2) over the inputs x of the layer; None where it is no number, or not asked for
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


@dataclass(frozen=True, slots=True)
class Gate:
    """What `passed` asks of every tensor beside soundness; None asks nothing."""

    min_sqnr_db: float | None = None
    max_nmse: float | None = None
    max_output_error: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """What is asked, by the option that asks it."""
        asked = {
            "--min-sqnr": self.min_sqnr_db,
            "--max-nmse": self.max_nmse,
            OUTPUT_GATE: self.max_output_error,
        }
        return {option: value for option, value in asked.items() if value is not None}

    def check(self, has_source: bool) -> None:
        """InputError for a number that asks nothing or cannot be met, and where there is no source to ask it of."""
        if self.given and not has_source:
            verb = "needs" if len(self.given) == 1 else "need"
            raise InputError(
                "no-source",
                f"{' and '.join(self.given)} {verb} the original weights",
                "Add --source SOURCE.",
            )
        for option, value in self.given.items():
            if not math.isfinite(value):
                detail = f"{option} {value} asks nothing; expected a finite number"
                raise InputError(
                    "bad-gate", detail, f"Give a finite number, or leave {option} out."
                )
            if option != "--min-sqnr" and value < 0:
                raise InputError(
                    "bad-gate",
                    f"{option} {value:g}: no error is negative; expected 0 or more",
                    "Give 0 or more.",
                )
            if option == OUTPUT_GATE and value > 1:
                detail = (
                    f"{option} {value:g} is {100 * value:g} %; expected a part of 1, from 0 to 1"
                )
                raise InputError("bad-gate", detail, f"For {value:g} %: {option} {value / 100:g}")


@dataclass(frozen=True, slots=True)
class Verified:
    """The document of `verify --json`.

    recorded  the summary of quantization_report.json; None where the artifact has none
    inputs, calibration  by which outputs were measured, as describe_inputs tells it; None where they were not
    """

    tensors: tuple[TensorError, ...]
    summary: dict[str, Any]
    findings: tuple[Finding, ...]
    passed: bool
    recorded: dict[str, Any] | None = None
    inputs: str | None = None
    calibration: str | None = None

    def as_json(self) -> dict[str, Any]:
        left_out = () if self.inputs else ("output_error",)
        by = {"inputs": self.inputs, "calibration": self.calibration} if self.inputs else {}
        return {
            **by,
            "tensors": [
                {key: value for key, value in asdict(one).items() if key not in left_out}
                for one in self.tensors
            ],
            "summary": self.summary,
            "findings": [asdict(finding) for finding in self.findings],
            "passed": self.passed,
            "recorded": self.recorded,
        }


def verify(
    artifact: Artifact, source: Source | None, gate: Gate, outputs: Outputs | None = None
) -> Verified:
    """Re-hash every file and read every scale; with a source, measure every tensor and compare what was kept.

    outputs  measures what linear layers answer, too; a gate that asks for it does so for Gaussian inputs where this is None
    Raises   InputError where numbers are asked for and there is no source, or for a calibration of another model
    """
    gate.check(source is not None)
    if outputs is None and gate.max_output_error is not None:
        outputs = Outputs()
    if source is None and outputs:
        raise InputError(
            "no-source", "--outputs needs the original weights", "Add --source SOURCE."
        )
    beside = stand_beside(artifact, source, outputs) if source else None
    fitting = source if beside and beside.shares_any() else None
    judged = judge(
        artifact, fitting, list(artifact.modules), choose_modules(artifact, is_full=False)
    )
    findings = [*judged.findings, *_check_hashes(artifact), *_check_kept(artifact)]
    recorded, damages = read_recorded(artifact)
    findings += damages
    found: dict[str, Distance] = {}
    if beside is not None:
        found, differences = beside.compare()
        findings += differences
    if recorded is not None:
        findings += (
            check_codes(artifact, recorded)
            if beside is None
            else check_measured(recorded, _by_stem(found.values()))
        )
    if any(distance.check(name) for name, distance in found.items()):
        findings += judged.refuted
    tensors = tuple(_tensor_error(name, distance) for name, distance in found.items())
    findings += (finding for error in tensors for finding in _judge(error, found[error.name], gate))
    findings += _check_measured(gate, found)
    by = describe_inputs(outputs.calibration) if outputs else {}
    summary = recorded.summary if recorded else None
    return Verified(
        tensors,
        _summarise(tensors, found),
        tuple(findings),
        is_healthy(findings),
        summary,
        **by,
    )


def _by_stem(measured: Iterable[Distance]) -> dict[str, Sums]:
    """What holds tensors in the artifact -> what all of them lost."""
    found: dict[str, Sums] = {}
    for one in measured:
        found[one.stem] = found.get(one.stem, Sums()).with_all(one.sums)
    return found


def _check_hashes(artifact: Artifact) -> Iterator[Finding]:
    """Findings on files that are not what was written, not there, or not ours; the model card is everybody's."""
    if not artifact.record:
        yield Finding(
            "note",
            "no-hashes",
            None,
            "the artifact records no hashes, so its files could not be compared with them",
        )
        return
    recorded = artifact.record.get("files")
    hashes = (
        {file: sha256 for file, sha256 in recorded.items() if file not in UNDIGESTED}
        if isinstance(recorded, dict)
        else {}
    )
    for file, sha256 in hashes.items():
        try:
            with artifact.source.open_file(file) as stream:
                is_same = hash_stream(stream) == sha256
        except InputError as error:
            yield Finding(
                "error",
                "file-missing",
                None,
                f"{file} is recorded and cannot be read: {error.message}",
            )
            continue
        if not is_same:
            yield Finding(
                "error",
                "hash-mismatch",
                None,
                f"{file} is not the file that was written: its sha256 differs",
            )
    checkpoint = artifact.source.checkpoint
    for file in (*(shard.file for shard in checkpoint.shards), *checkpoint.left_out):
        if file not in hashes:
            yield Finding(
                "error",
                "file-unrecorded",
                None,
                f"{file} holds weights, and the record does not name it",
            )
    for file in checkpoint.sidecars:
        if file not in hashes and file not in (RECORD, *UNDIGESTED):
            yield Finding(
                "warning",
                "file-unrecorded",
                None,
                f"{file} was added later: the record does not name it",
            )


def _check_kept(artifact: Artifact) -> Iterator[Finding]:
    """A warning for each tensor that was kept and holds NaN or Inf."""
    ours = own_names(artifact)
    for ref in artifact.tensors.values():
        if ref.name not in ours and ref.dtype in FLOAT_DTYPES:
            kind = FLOAT_DTYPES[ref.dtype]
            held = (
                np.frombuffer(artifact.source.read_range(ref, *part), kind) for part in parts(ref)
            )
            if bad := sum(int(np.count_nonzero(~np.isfinite(values))) for values in held):
                yield Finding(
                    "warning",
                    "kept-not-finite",
                    ref.name,
                    f"it was kept with {bad} values that are NaN or Inf",
                )


def _tensor_error(name: str, found: Distance) -> TensorError:
    sums = found.sums
    codes: dict[str, Any] = shares(sums.histogram)
    if not math.isfinite(sums.noise):
        return TensorError(name, None, None, None, None, **codes)
    output_error = found.answers.error if found.answers else None
    return TensorError(
        name, sums.sqnr_db, sums.mse, sums.max_abs, sums.cosine, **codes, output_error=output_error
    )


def _judge(error: TensorError, found: Distance, gate: Gate) -> Iterator[Finding]:
    """A finding for each gate that a tensor misses, or one where it cannot be measured or is another."""
    missed = list(_missed(error, found, gate)) if math.isfinite(found.sums.noise) else []
    yield from missed
    if not missed and (doubt := found.check(error.name)):
        yield doubt


def _check_measured(gate: Gate, found: Mapping[str, Distance]) -> Iterator[Finding]:
    """A finding where gates ask of what nobody measured: none of them is met then."""
    has_answers = any(distance.answers for distance in found.values())
    if idle := [
        option for option in gate.given if not (has_answers if option == OUTPUT_GATE else found)
    ]:
        detail = f"{' and '.join(idle)}: no tensor was measured, for none of the source's is quantized in the artifact"
        yield Finding("error", "nothing-measured", None, detail)


def _missed(error: TensorError, found: Distance, gate: Gate) -> Iterator[Finding]:
    """Findings on the gates that a tensor misses."""
    sums = found.sums
    sqnr_db = -math.inf if sums.signal == 0 and sums.noise > 0 else error.sqnr_db
    if gate.min_sqnr_db is not None and sqnr_db is not None and sqnr_db < gate.min_sqnr_db:
        detail = f"SQNR {sqnr_db:.3f} dB, expected at least {gate.min_sqnr_db:g} dB"
        yield Finding("error", "sqnr-low", error.name, detail)
    if gate.max_nmse is not None and sums.noise > gate.max_nmse * sums.signal:
        nmse = math.inf if sums.nmse is None else sums.nmse
        yield Finding(
            "error", "nmse-high", error.name, f"NMSE {nmse:.3g}, expected at most {gate.max_nmse:g}"
        )
    if (
        gate.max_output_error is not None
        and found.answers
        and not _is_within(error.output_error, gate.max_output_error)
    ):
        told = math.inf if error.output_error is None else error.output_error
        detail = (
            f"output error {100 * told:.4g} %, expected at most {100 * gate.max_output_error:g} %"
        )
        yield Finding("error", "output-error-high", error.name, detail)


def _is_within(output_error: float | None, most: float) -> bool:
    return output_error is not None and output_error <= most


def _summarise(tensors: tuple[TensorError, ...], found: dict[str, Distance]) -> dict[str, Any]:
    """output_error_mean is that of powers, by weights, as analyze's of the whole."""
    summary = summarise((name, distance.sums) for name, distance in found.items())
    if not any(distance.answers for distance in found.values()):
        return summary
    known = [error.output_error for error in tensors if error.output_error is not None]
    mean = mean_output_error(
        (found[error.name].sums.elements, error.output_error) for error in tensors
    )
    return {**summary, "output_error_max": max(known, default=None), "output_error_mean": mean}
