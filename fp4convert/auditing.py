"""Does a report agree with the artifact beside it?  With its codes always, and with what was measured where there is a source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from fp4convert.accounting import SOURCE, Sums, count_codes
from fp4convert.artifact import REPORT, Artifact
from fp4convert.backends import processors
from fp4convert.formats import CODES, row_panels
from fp4convert.ledger import Entry, Recorded
from fp4convert.reading import Finding
from fp4convert.sources import stopping

AGREEMENT = 1e-6  # of an error; sums of float32 squares are off by less
STORED = 2.0**-22  # of a value: what a global scale stored as its reciprocal moves it, and float32 differences


def stem_of(artifact: Artifact, module: str) -> str:
    """What holds a linear layer in the artifact."""
    return artifact.modules[module].stem if module in artifact.modules else module


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
        yield from (found for entry, count in zip(entries, counts, strict=True) if (found := compare_codes(entry, count)))


def _count(artifact: Artifact, modules: list[str]) -> tuple[int, ...]:
    """How often each code occurs in these modules."""
    total = [0] * CODES
    for module in modules:
        blocks = artifact.decode(module)
        for panel in row_panels(blocks.shape):
            total = [sum(pair) for pair in zip(total, count_codes(blocks.rows(*panel).packed).tolist(), strict=True)]
    return tuple(total)


def compare_codes(entry: Entry, counts: tuple[int, ...]) -> Finding | None:
    """A finding where a tensor has other codes than the report says."""
    differing = [code for code, (ours, theirs) in enumerate(zip(counts, entry.histogram, strict=True)) if ours != theirs]
    if not differing:
        return None
    code = differing[0]
    detail = f"{REPORT} counts code {code} {entry.histogram[code]:,} times, and it occurs {counts[code]:,} times"
    return Finding("error", "report-differs", entry.module, f"{detail}; {len(differing)} of {CODES} codes differ")


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
