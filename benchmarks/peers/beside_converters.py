"""Whole converters of other packages beside ours: the same checkpoint, a process each, start-up
included, warm.

converters.py calls them.  LIMIT is for each package: no pair begins after it, and a run that alone
takes LONGEST times that is
ended, and told so.  mlx_lm.convert and Model Optimizer run beside fp4convert; llm-compressor in the
environment that
`make bench-peers` makes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cpu.conversion import convert, scratch_folder
from harness.checkpoints import make_checkpoint
from harness.disk import files_of, make_warm
from harness.measure import ROOT
from harness.processes import Cost, FailedError, TimeIsUpError, median_of, ratio_of, run
from harness.sections import Row, Section

GIGABYTES, PAIRS = 4.0, 5
LIMIT = 1100.0  # seconds; five pairs take as long
LONGEST = 4  # times the limit, for one run
BAR = 100  # times as fast as each
SMALLEST, LARGEST = 0.25, 0.45  # of the source's bytes: what an artifact of four bits has


@dataclass(frozen=True, slots=True)
class Converter:
    """It runs in the environment of `python`, and needs `module` there; `install` gets it."""

    name: str
    module: str
    python: Path
    install: str


HERE, ELSEWHERE = Path(sys.executable), ROOT / ".venv-peers" / "bin" / "python"
CONVERTERS = (
    Converter("mlx_lm.convert", "mlx_lm", HERE, "pip install '.[test]'"),
    Converter(
        "Model Optimizer: mtq.quantize, export_hf_checkpoint",
        "modelopt",
        HERE,
        "pip install '.[test]'",
    ),
    Converter("llm-compressor: model_free_ptq", "llmcompressor", ELSEWHERE, "make bench-peers"),
)


def version_of(converter: Converter) -> str | None:
    """Its version; None where it is not installed."""
    code = "import importlib.metadata as m, importlib.util as u, sys\n"
    code += (
        "name = sys.argv[1]\nassert "
        "u.find_spec(name)\nprint(m.version(m.packages_distributions()[name][0]))"
    )
    words = [converter.python, "-c", code, converter.module]
    if not converter.python.exists():
        return None
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else None


def sections(is_quick: bool) -> list[Section]:
    """Quick: nothing, since the others are slow."""
    if is_quick:
        return []
    with scratch_folder() as scratch:
        source = scratch / "source"
        make_checkpoint(source, GIGABYTES)
        nbytes = sum(path.stat().st_size for path in files_of(source))
        found = [_beside(converter, source, scratch) for converter in CONVERTERS]
    about = (
        f"{nbytes / 1e9:.2f} GB of bf16 to NVFP4, weights alone, on the CPU, warm, with "
        "start-up; ours by rule amax. Medians of"
        f" as many pairs as begin in {LIMIT:.0f} s, {PAIRS} at most. Memory is RssAnon, looked "
        "at every few milliseconds."
    )
    headings = (
        "converter",
        "pairs",
        "its s",
        "ours s",
        "its CPU-s",
        "ours CPU-s",
        "its peak MB",
        "ours MB",
    )
    return [Section("Beside other converters", about, headings, tuple(found), "times as fast")]


def _beside(converter: Converter, source: Path, scratch: Path) -> Row:
    """The row of one; without a ratio, why there is none."""
    version = version_of(converter)
    if version is None:
        return _empty(converter.name, f"not installed: {converter.install}")
    name = f"{converter.name} {version}"
    ours: list[Cost] = []
    theirs: list[Cost] = []
    begun = time.monotonic()
    while len(theirs) < PAIRS and time.monotonic() - begun < LIMIT:
        make_warm(source)
        ours.append(convert(source, scratch / "output", "amax", is_watched=True))
        make_warm(source)
        try:
            theirs.append(_run(converter, source, scratch / "other"))
        except TimeIsUpError as error:
            if not theirs:
                return _empty(
                    name,
                    f"{error}, ours {ours[0].seconds:.2f} s: more than "
                    f"{LONGEST * LIMIT / ours[0].seconds:.0f} times",
                )
            break
        except FailedError as error:
            return _empty(
                name, f"failed: {(str(error).strip() or 'said nothing').splitlines()[-1]}"
            )
    ours = ours[: len(theirs)]
    cells = [f"{median_of(each):.2f}" for each in (theirs, ours)]
    cells += [f"{median_of(each, 'cpu_seconds'):.1f}" for each in (theirs, ours)]
    cells += [f"{median_of(each, 'anonymous_nbytes') / 1e6:,.0f}" for each in (theirs, ours)]
    return Row((name,), (str(len(theirs)), *cells), ratio_of(theirs, ours), BAR)


def _empty(name: str, why: str) -> Row:
    return Row((name,), (why, *[""] * 6))


def _run(converter: Converter, source: Path, output: Path) -> Cost:
    """What it takes; SystemExit where what it wrote is no artifact of four bits."""
    shutil.rmtree(output, ignore_errors=True)
    words = [
        converter.python,
        "-P",
        Path(__file__).with_name("converters.py"),
        converter.module,
        source,
        output,
    ]
    cost = run(words, is_watched=True, limit=LONGEST * LIMIT)
    share = sum(path.stat().st_size for path in files_of(output)) / sum(
        path.stat().st_size for path in files_of(source)
    )
    shutil.rmtree(output)
    if not SMALLEST < share < LARGEST:
        raise SystemExit(
            f"{converter.name} wrote {share:.2f} of the source's bytes; expected {SMALLEST} to "
            f"{LARGEST}"
        )
    return cost
