"""How everything here is measured: works taken in turn, ratios within a turn, medians; and what to
say of the machine.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SUPPORT = ROOT / "tests" / "support"  # what the tests of the package share, such as a Hub


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(
    *works: Callable[[], Any], rounds: int, clock: Callable[[Callable[[], Any]], float] = seconds
) -> list[tuple[float, ...]]:
    """Times of `rounds` calls of every work in turn, a tuple of rounds for each work, after one
    call that is not counted.
    """
    taken = [[clock(work) for work in works] for _ in range(rounds + 1)]
    return list(zip(*taken[1:], strict=True))


def median_ratio(above: tuple[float, ...], below: tuple[float, ...]) -> float:
    """The median of ratios within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def paired(
    work: Callable[[], object], reference: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Medians over `rounds` alternating calls: (work's seconds, reference's seconds, work /
    reference).
    """
    ours, theirs = in_turn(work, reference, rounds=rounds)
    return statistics.median(ours), statistics.median(theirs), median_ratio(ours, theirs)


def results(name: str, kind: str) -> Path:
    """Where a page of figures is kept: those of processors without AVX-512 have their own, such as
    cpu-avx2.md.
    """
    from fp4convert.numerics.backends.cpu import Cpu
    from fp4convert.process import LEVELS

    words = {LEVELS[4]: "", LEVELS[3]: "-avx2", LEVELS[2]: "-sse4"}
    return RESULTS / f"{name}{words.get(Cpu().instruction_set, f'-{platform.machine()}')}.{kind}"


def machine() -> str:
    """Processor, its instruction set, cores, versions, commit and date."""
    import numpy

    from fp4convert.numerics.backends.cpu import Cpu

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in cpuinfo.splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = f"Python {platform.python_version()}, NumPy {numpy.__version__}"
    cores = f"{len(os.sched_getaffinity(0))} cores, {Cpu().instruction_set}"
    return f"{model}, {cores}; {versions}; commit {commit()}; {datetime.date.today()}"


def commit() -> str:
    """The commit whose files are measured; with -dirty where they are others."""
    is_dirty = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{_git('rev-parse', '--short=7', 'HEAD') or 'unknown'}{'-dirty' if is_dirty else ''}"


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(value: float, bar: float, is_floor: bool = True) -> str:
    """The bar beside a value, and whether it is met."""
    met = value >= bar if is_floor else value <= bar
    return f"{'>=' if is_floor else '<='} {bar:g} {'met' if met else 'NOT MET'}"
