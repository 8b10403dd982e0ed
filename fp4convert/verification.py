"""Does an artifact keep its word?  Structure and hashes first; the numbers too, tensor by tensor, where there is a source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.accounting import Sums, count_codes
from fp4convert.artifact import UNDIGESTED, Artifact, is_healthy
from fp4convert.auditing import check_codes, check_measured, stem_of
from fp4convert.backends import processors
from fp4convert.backends.cpu import Cpu
from fp4convert.codec import FLOAT_DTYPES
from fp4convert.codings import Linear
from fp4convert.codings.folded import foldings_of
from fp4convert.codings.fp4 import FourBit
from fp4convert.errors import InputError
from fp4convert.formats import CODES, Matrix, row_panels
from fp4convert.inspection import check_scales
from fp4convert.ledger import read_recorded, shares
from fp4convert.linears import Linears, linears_stored
from fp4convert.reading import Finding
from fp4convert.record import RECORD
from fp4convert.shard import TensorRef, hash_stream
from fp4convert.sources import Source, stopping
from fp4convert.unfolding import check_columns, check_vector, unfolded

DIFFERENT = 0.5  # of the weights' power; other weights have about 2, and odd ones lose up to 0.3 by rounding
PART_NBYTES = 8 << 20
MEASURED_ELEMENTS = 1 << 20  # at once: 8 MB for each float64 copy


@dataclass(frozen=True, slots=True)
class TensorError:
    """How far the four-bit values of one tensor are from its source.

    sqnr_db  10 log10(sum x^2 / sum (x - y)^2); None where nothing was lost or the source is zero
    mse      mean of (x - y)^2; None, as max_abs, where a value is not finite
    max_abs  largest |x - y|
    cosine   of x and y as vectors; None where one of them is zero
    saturated, zero, histogram  of its codes, as ledger.shares has them
    """

    name: str
    sqnr_db: float | None
    mse: float | None
    max_abs: float | None
    cosine: float | None
    saturated: float | None = None
    zero: float | None = None
    histogram: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """What `passed` asks of every tensor beside soundness; None asks nothing."""

    min_sqnr_db: float | None = None
    max_nmse: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The document of `verify --json`.

    recorded  the summary of quantization_report.json; None where the artifact has none
    """

    tensors: tuple[TensorError, ...]
    summary: dict[str, float | None]
    findings: tuple[Finding, ...]
    passed: bool
    recorded: dict[str, Any] | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "tensors": [asdict(error) for error in self.tensors],
            "summary": self.summary,
            "findings": [asdict(finding) for finding in self.findings],
            "passed": self.passed,
            "recorded": self.recorded,
        }


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the elements of one tensor, in float64.

    stem       what holds it in the artifact
    histogram  of its codes; empty where they are not four-bit
    """

    elements: int
    signal: float
    noise: float
    max_abs: float
    product: float
    output: float
    stem: str
    histogram: tuple[int, ...] = ()


def verify(artifact: Artifact, source: Source | None, gate: Gate) -> Report:
    """Re-hash every file and read every scale; with a source, measure every tensor and compare what was kept.

    Raises InputError where the gate asks for numbers and there is no source
    """
    if source is None and (gate.min_sqnr_db is not None or gate.max_nmse is not None):
        raise InputError("no-source", "--min-sqnr and --max-nmse need the original weights", "Add --source SOURCE.")
    for option, value in (("--min-sqnr", gate.min_sqnr_db), ("--max-nmse", gate.max_nmse)):
        if value is not None and not math.isfinite(value):
            raise InputError("bad-gate", f"{option} {value} asks nothing; expected a finite number")
    findings = [
        *artifact.findings,
        *_check_hashes(artifact),
        *check_scales(artifact, list(artifact.modules)),
        *_check_kept(artifact),
    ]
    recorded, damages = read_recorded(artifact)
    findings += damages
    sums: dict[str, _Sums] = {}
    if source is not None:
        sums, differences = _compare(artifact, source)
        findings += differences
    if recorded is not None:
        findings += check_codes(artifact, recorded) if source is None else check_measured(recorded, _by_stem(sums.values()))
    tensors = tuple(_tensor_error(name, total) for name, total in sums.items())
    findings += [finding for error in tensors if (finding := _judge(error, sums[error.name], gate))]
    summary = recorded.summary if recorded else None
    return Report(tensors, _summarise(tensors, sums), tuple(findings), is_healthy(tuple(findings)), summary)


def _by_stem(measured: Iterable[_Sums]) -> dict[str, Sums]:
    """What holds tensors in the artifact -> what all of them lost."""
    found: dict[str, Sums] = {}
    for one in measured:
        so_far = found.get(one.stem, Sums())
        found[one.stem] = so_far.with_all(
            Sums(one.elements, one.signal, one.noise, one.output, one.max_abs, histogram=one.histogram)
        )
    return found


def _check_hashes(artifact: Artifact) -> Iterator[Finding]:
    """Findings on files that are not what was written, not there, or not ours; the model card is everybody's."""
    if not artifact.record:
        yield Finding("note", "no-hashes", None, "the artifact records no hashes, so its files could not be compared with them")
        return
    recorded = artifact.record.get("files")
    hashes = {file: sha256 for file, sha256 in recorded.items() if file not in UNDIGESTED} if isinstance(recorded, dict) else {}
    for file, sha256 in hashes.items():
        try:
            with artifact.source.open_file(file) as stream:
                is_same = hash_stream(stream) == sha256
        except InputError as error:
            yield Finding("error", "file-missing", None, f"{file} is recorded and cannot be read: {error.message}")
            continue
        if not is_same:
            yield Finding("error", "hash-mismatch", None, f"{file} is not the file that was written: its sha256 differs")
    checkpoint = artifact.source.checkpoint
    for file in (*(shard.file for shard in checkpoint.shards), *checkpoint.left_out):
        if file not in hashes:
            yield Finding("error", "file-unrecorded", None, f"{file} holds weights, and the record does not name it")
    for file in checkpoint.sidecars:
        if file not in hashes and file not in (RECORD, *UNDIGESTED):
            yield Finding("warning", "file-unrecorded", None, f"{file} was added later: the record does not name it")


def _check_kept(artifact: Artifact) -> Iterator[Finding]:
    """A warning for each tensor that was kept and holds NaN or Inf."""
    ours = _own_names(artifact)
    for ref in artifact.tensors.values():
        if ref.name not in ours and ref.dtype in FLOAT_DTYPES:
            kind = FLOAT_DTYPES[ref.dtype]
            parts = (np.frombuffer(artifact.source.read_range(ref, *part), kind) for part in _parts(ref))
            if bad := sum(int(np.count_nonzero(~np.isfinite(values))) for values in parts):
                yield Finding("warning", "kept-not-finite", ref.name, f"it was kept with {bad} values that are NaN or Inf")


class _Pair(NamedTuple):
    """One linear layer, as the artifact stores it and as the source does."""

    ours: Linear
    theirs: Linear


def _compare(artifact: Artifact, source: Source) -> tuple[dict[str, _Sums], list[Finding]]:
    """The error of every quantized module, and findings where the artifact holds what is not the source's."""
    originals = unfolded(artifact, source)
    pairs, findings = _pair(artifact, originals.of)
    replaced = {ref.name for pair in pairs for ref in (pair.theirs.home, *pair.theirs.refs, *pair.theirs.idle)}
    replaced |= {ref.name for ref in originals.idle}
    copied = [ref for ref in source.checkpoint.tensors if ref.name not in replaced]
    ours = {ref.name for pair in pairs for ref in (*pair.ours.refs, *pair.ours.idle)} | _own_names(artifact)
    for name in sorted(artifact.tensors.keys() - ours - {ref.name for ref in copied}):
        findings.append(Finding("error", "tensor-foreign", name, "it comes from no tensor of the source"))
    sums: dict[str, _Sums] = {}
    for shard in source.checkpoint.shards:
        here = [pair for pair in pairs if pair.theirs.refs[0].file == shard.file]
        threads = ThreadPoolExecutor(processors())
        with source.stream(shard.file), threads as pool, stopping(source, artifact.source):
            kept = (_compare_kept(artifact, source, ref, originals) for ref in copied if ref.file == shard.file)
            findings += (found for found in kept if found)
            measured = pool.map(lambda pair: _measure(artifact, source, pair), here)
            for pair, total in zip(here, measured, strict=True):
                if pair.ours.coding.is_packed:
                    sums[pair.theirs.name] = total
                    findings += _check_folded(artifact, source, pair)
                elif total.max_abs != 0:
                    detail = "it was kept, but its values are not the source's"
                    findings.append(Finding("error", "kept-differs", pair.ours.refs[0].name, detail))
    return {pair.theirs.name: sums[pair.theirs.name] for pair in pairs if pair.theirs.name in sums}, findings


def _check_folded(artifact: Artifact, source: Source, pair: _Pair) -> Iterator[Finding]:
    if foldings_of(pair.theirs) and pair.ours.module in artifact.modules:
        yield from check_columns(pair.ours.module, artifact.decode(pair.ours.module), pair.theirs, source)


def _pair(artifact: Artifact, theirs: Mapping[str, Linear]) -> tuple[list[_Pair], list[Finding]]:
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
            pairs.append(_Pair(own, original))
    return pairs, findings


def _own_names(artifact: Artifact) -> set[str]:
    packed = (*artifact.modules.values(), *artifact.others.values())
    names = {ref.name for module in packed for ref in (*module.refs, *module.companions)}
    return names | artifact.cache_scales(artifact.spelling).keys()


def _compare_kept(artifact: Artifact, source: Source, ref: TensorRef, originals: Linears) -> Finding | None:
    """A finding where a tensor of the source that was not quantized is another one in the artifact."""
    if ref.name in originals.vectors:
        return check_vector(artifact, originals.vectors[ref.name], source)
    kept = artifact.tensors.get(ref.name)
    if kept is None or (kept.dtype, kept.shape) != (ref.dtype, ref.shape):
        return Finding("error", "kept-missing", ref.name, "the source has it, the artifact has it not, or otherwise")
    if any(artifact.source.read_range(kept, *part) != source.read_range(ref, *part) for part in _parts(ref)):
        return Finding("error", "kept-differs", ref.name, "it was kept, but its bytes are not the source's")
    return None


def _parts(ref: TensorRef) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's bytes that are held at once."""
    return ((start, min(start + PART_NBYTES, ref.nbytes)) for start in range(0, ref.nbytes, PART_NBYTES))


def _measure(artifact: Artifact, source: Source, pair: _Pair) -> _Sums:
    """How far the values in the artifact are from the source's; what was kept is rounded to its own dtype before."""
    theirs, ours = pair.theirs.coding.weights(pair.theirs, source), _Stored(pair.ours, artifact.source)
    signal = noise = max_abs = product = output = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for panel in row_panels(theirs.shape, MEASURED_ELEMENTS):
            x, y = _floats(theirs.rows(*panel)), _floats(stored := ours.rows(*panel))
            if not pair.ours.coding.is_packed:
                x = x.astype(FLOAT_DTYPES[stored.dtype]).astype(np.float64)
            difference = x - y
            signal += float(x @ x)
            noise += float(difference @ difference)
            product += float(x @ y)
            output += float(y @ y)
            max_abs = max(max_abs, float(np.abs(difference).max(initial=0)))
    stem, histogram = stem_of(artifact, pair.ours.module), tuple(map(int, ours.counts))
    return _Sums(math.prod(theirs.shape), signal, noise, max_abs, product, output, stem, histogram)


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
        return Matrix(Cpu().dequantize(q, "F32"), "F32", q.shape)


def _floats(matrix: Matrix) -> NDArray[np.float64]:
    return np.frombuffer(matrix.data, FLOAT_DTYPES[matrix.dtype]).astype(np.float64)


def _tensor_error(name: str, sums: _Sums) -> TensorError:
    sqnr_db = 10 * math.log10(sums.signal / sums.noise) if sums.signal > 0 and sums.noise > 0 else None
    cosine = sums.product / math.sqrt(sums.signal * sums.output) if sums.signal > 0 and sums.output > 0 else None
    if not math.isfinite(sums.noise):
        return TensorError(name, None, None, None, None, **shares(sums.histogram))
    mse = sums.noise / max(sums.elements, 1)
    return TensorError(name, sqnr_db, mse, sums.max_abs, cosine, **shares(sums.histogram))


def _judge(error: TensorError, sums: _Sums, gate: Gate) -> Finding | None:
    """A finding where a tensor misses the gate, or cannot be measured at all."""
    if not math.isfinite(sums.noise):
        return Finding("error", "not-measurable", error.name, "its values or the source's are not finite")
    sqnr_db = -math.inf if sums.signal == 0 and sums.noise > 0 else error.sqnr_db
    if gate.min_sqnr_db is not None and sqnr_db is not None and sqnr_db < gate.min_sqnr_db:
        return Finding("error", "sqnr-low", error.name, f"SQNR {sqnr_db:.3f} dB, expected at least {gate.min_sqnr_db:g} dB")
    if gate.max_nmse is not None and sums.noise > gate.max_nmse * sums.signal:
        nmse = sums.noise / sums.signal if sums.signal else math.inf
        return Finding("error", "nmse-high", error.name, f"NMSE {nmse:.3g}, expected at most {gate.max_nmse:g}")
    if sums.noise > DIFFERENT * sums.signal:
        return Finding("error", "source-differs", error.name, "its values are not those of the source, in no sense of four bits")
    return None


def _summarise(tensors: tuple[TensorError, ...], sums: dict[str, _Sums]) -> dict[str, float | None]:
    known = [error.sqnr_db for error in tensors if error.sqnr_db is not None]
    finite = [total for total in sums.values() if math.isfinite(total.noise)]
    signal, noise = sum(total.signal for total in finite), sum(total.noise for total in finite)
    return {
        "sqnr_db_min": min(known, default=None),
        "sqnr_db_mean": sum(known) / len(known) if known else None,
        "nmse": noise / signal if signal > 0 else None,
    }
