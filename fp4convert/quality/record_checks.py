"""Check files and losses against the records of an artifact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import Entry, Recorded
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.error_sums import SOURCE, Sums, count_codes
from fp4convert.numerics.formats import CODES
from fp4convert.numerics.matrices import row_panels
from fp4convert.process import processors
from fp4convert.progress import Phases
from fp4convert.quality.source_compare import Distance
from fp4convert.storage.checkpoint_files import (
    RECORD,
    REPORT,
    SIGNATURE,
    UNDIGESTED,
    recorded_hashes,
)
from fp4convert.storage.sha256 import hash_each
from fp4convert.storage.source import Source, stopping

AGREEMENT = 1e-6  # of an error; sums of float32 squares are off by less
# Of a value: what a global scale stored as its reciprocal moves it, and float32 differences.
STORED = 2.0**-22


def digested_hashes(artifact: Artifact) -> dict[str, str]:
    """Return the recorded sha256 of every file of the digest."""
    files = recorded_hashes(artifact.record or {})
    return {file: sha256 for file, sha256 in files.items() if file not in UNDIGESTED}


def check_hashes(artifact: Artifact, hashes: dict[str, str], phases: Phases) -> Iterator[Finding]:
    """Check that files are there, unchanged and recorded.

    hashes  receives the sha256 of every file
    """
    if not artifact.record:
        detail = "the artifact records no hashes, so its files could not be compared with them"
        yield Finding("note", "no-hashes", None, detail)
        return
    source, checkpoint = artifact.source, artifact.source.checkpoint
    recorded = digested_hashes(artifact)
    sizes = {file: _nbytes_there(source, file) for file in recorded}
    phases.begin("hash", sum(sizes.values()))
    by_size = sorted(recorded, key=lambda file: -sizes[file])
    read = dict(hash_each(by_size, source.open_file, InputError, phases.report))
    for file, sha256 in recorded.items():
        if isinstance(found := read[file], InputError):
            detail = f"{file} is recorded and cannot be read: {found.message}"
            yield Finding("error", "file-missing", None, detail)
            continue
        hashes[file] = found
        if found != sha256:
            detail = f"{file} is not the file that was written: its sha256 differs"
            yield Finding("error", "hash-mismatch", None, detail)
    for file in (*(shard.file for shard in checkpoint.shards), *checkpoint.left_out):
        if file not in recorded:
            detail = f"{file} holds weights, and the record does not name it"
            yield Finding("error", "file-unrecorded", None, detail)
    for file in checkpoint.sidecars:
        if file not in recorded and file not in (RECORD, SIGNATURE, *UNDIGESTED):
            detail = f"{file} was added later: the record does not name it"
            yield Finding("warning", "file-unrecorded", None, detail)


def _nbytes_there(source: Source, file: str) -> int:
    """Return the size of a recorded file; 0 if it is missing."""
    try:
        return source.file_nbytes(file) if source.has_file(file) else 0
    except InputError:  # no file can have the name
        return 0


def check_codes(artifact: Artifact, report: Recorded, phases: Phases) -> Iterator[Finding]:
    """Check the codes of tensors against the counts of the report.

    Codes on the Hub are not read.
    """
    if artifact.source.is_streamed:
        return
    members: dict[str, list[str]] = {}
    for module, packed in artifact.modules.items():
        members.setdefault(packed.stem, []).append(module)
    entries = [entry for entry in report.entries if entry.histogram]
    counted = [module for entry in entries for module in members.get(entry.module, [])]
    phases.begin("codes", sum(math.prod(artifact.modules[each].shape) // 2 for each in counted))

    def count(entry: Entry) -> tuple[int, ...]:
        total = np.zeros(CODES, np.int64)
        for module in members.get(entry.module, []):
            blocks = artifact.decode(module)
            for panel in row_panels(blocks.shape):
                packed = blocks.rows(*panel).packed
                total += count_codes(packed)
                phases.report(module, len(packed))
        return tuple(total.tolist())

    with ThreadPoolExecutor(processors()) as pool, stopping(artifact.source):
        for entry, counts in zip(entries, pool.map(count, entries), strict=True):
            yield from _compare_codes(entry, counts)


def _compare_codes(entry: Entry, counts: tuple[int, ...]) -> Iterator[Finding]:
    """Check the counts of codes in a tensor against the report's."""
    pairs = zip(counts, entry.histogram, strict=True)
    differing = [code for code, (found, recorded) in enumerate(pairs) if found != recorded]
    if differing:
        code = differing[0]
        detail = f"{REPORT} counts code {code} {entry.histogram[code]:,} times, and it occurs"
        detail += f" {counts[code]:,} times; {len(differing)} of {CODES} codes differ"
        yield Finding("error", "report-differs", entry.module, detail)


def check_losses(report: Recorded, distances: Mapping[str, Distance]) -> Iterator[Finding]:
    """Check the losses of the report against the measured losses.

    A source in another dtype than the rounded one, such as its original, has other losses.
    """
    measured: dict[str, Sums] = {}  # of everything that lies in one tensor of the artifact
    dtypes: dict[str, str] = {}
    others: list[Entry] = []
    for distance in distances.values():
        dtypes.setdefault(distance.stem, distance.dtype)
        measured[distance.stem] = measured.get(distance.stem, Sums()).with_all(distance.sums)
    for entry in report.entries:
        sums = measured.get(entry.module)
        if sums is None or not math.isfinite(sums.noise) or not sums.elements:
            continue
        if entry.histogram and (differing := list(_compare_codes(entry, sums.histogram))):
            yield from differing
        elif entry.against == SOURCE and (detail := _compare_losses(entry, sums)):
            if entry.source_dtype in ("", dtypes[entry.module]):
                detail = f"{REPORT} says that {detail}"
                yield Finding("error", "report-differs", entry.module, detail)
            else:
                others.append(entry)
    if others:
        first = others[0]
        detail = f"{len(others)} tensors were quantized from another source, such as {first.module}"
        detail += f", which was {first.source_dtype} there and is {dtypes[first.module]} here"
        detail += f"; so their errors are not those in {REPORT}"
        yield Finding("note", "other-source", None, detail)


def _compare_losses(entry: Entry, sums: Sums) -> str:
    """Describe how losses differ from the report's; "" if they are equal."""
    # A distance moves by no more than the values do.
    moved = STORED * math.sqrt(sums.output)
    recorded, lost = math.sqrt(max(entry.mse, 0) * sums.elements), math.sqrt(sums.noise)
    if not abs(recorded - lost) <= AGREEMENT * lost + moved:
        return f"its mean squared error is {entry.mse:.9g}, and it is {sums.mse:.9g}"
    if not abs(entry.max_abs - sums.max_abs) <= AGREEMENT * sums.max_abs + moved:
        return f"it is off by at most {entry.max_abs:.9g}, and it is by {sums.max_abs:.9g}"
    return ""
