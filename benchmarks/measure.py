"""How everything here is measured: pairs taken in turn, ratios pair by pair, medians; and what to say of the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(work: Callable[[], object], reference: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Medians over `rounds` alternating calls: (work's seconds, reference's seconds, work / reference)."""
    work(), reference()
    pairs = [(seconds(work), seconds(reference)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in pairs)


def machine() -> str:
    """Processor, cores and versions, one line each."""
    import numpy

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), platform.machine()
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores; Python {platform.python_version()}, NumPy {numpy.__version__}; commit {commit}"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(value: float, bar: float, is_floor: bool = True) -> str:
    """The bar beside a value, and whether it is met."""
    met = value >= bar if is_floor else value <= bar
    return f"{'>=' if is_floor else '<='} {bar:g} {'met' if met else 'NOT MET'}"
