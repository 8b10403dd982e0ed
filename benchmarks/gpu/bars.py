"""Judge every bar of a GPU by what the first run has left there.

    python benchmarks/bench.py bars FOLDER      FOLDER/gpu-NAME.json, of the files that are there

Decides which bars there are, and what a figure is taken from: met, NOT MET or not run. Nothing is
judged by hand, and what is not there, or was not finished, is not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from gpu.first_run.whole import RULES, RUNS
from gpu.gpu_results import RATIO, tables

SHARES = {"amax": 97, "quantize": 92, "dequantize": 92}  # % of the copy's rate
GEMV_SHARES = {False: 60, True: 90}  # by whether the hardware decodes E2M1
ISSUE_SHARE = 80  # % of the cycles in which a search may issue an instruction
# Of the CPU backend's CPU-seconds: on a machine with a GPU; and on two cores with a GPU that takes
# no time, where starting up, which no GPU makes shorter, is a larger part of a short conversion.
CPU_SHARE, NULL_GPU_SHARE = 0.5, 0.6
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_ERRORS = 9  # --error-exitcode of first_run.sh; other codes say that it did not run
SEARCHES = ("search_nvfp4_", "search_mxfp4_")
ISSUED = "smsp__issue_active.avg.pct_of_peak_sustained_active"
NOT_RUN = "not run"
VERDICTS = {True: "met", False: "NOT MET", None: NOT_RUN}
MEASURED = "Every kernel of fp4convert has been measured."  # on the page, before what others have
RIGHT = ("bytes equal", "product right")  # what stands beside a row


class Judged(NamedTuple):
    """What was found, and whether that is enough; None where it does not tell."""

    found: str
    is_met: bool | None


Judge = Callable[[Path], Judged | None]  # folder -> None where there is nothing to judge
Row = dict[str, Any]  # of whole.jsonl


class Run(NamedTuple):
    """A conversion of whole.py."""

    format: str
    rule: str
    device: str
    workers: int

    @property
    def text(self) -> str:
        workers = f" with {self.workers} worker" if self.workers else ""
        return f"{self.format} {self.rule} on {self.device}{workers}"


class Bar(NamedTuple):
    """What is wanted of a GPU."""

    what: str
    wanted: str
    judge: Judge


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def tests_of(module: str) -> Judge:
    """Have all tests of a module passed?  Of bytes.xml, where none was skipped or interrupted."""

    def judge(folder: Path) -> Judged | None:
        try:
            root = ElementTree.parse(folder / "bytes.xml").getroot()
        except ElementTree.ParseError:  # it was cut
            return None
        cases = [c for c in root.iter("testcase") if module in c.get("classname", "").split(".")]
        if not cases or any(case.find("skipped") is not None for case in cases):
            return None
        bad = sum(case.find(kind) is not None for case in cases for kind in ("failure", "error"))
        # 0, 1: of pytest, where all tests have run; after others bytes.xml may end anywhere
        if not re.search(r"^-- bytes: rc [01]\b", read(folder / "bytes.txt"), re.MULTILINE):
            text = f"the time was up after {len(cases)} tests, of which {bad or 'none'} failed"
            return Judged(text, False if bad else None)
        return Judged(f"{len(cases) - bad} of {len(cases)} tests pass", not bad)

    return judge


def share_of(family: str) -> Judge:
    """The lowest share of a kernel that has a bar; of gpu.md, where all rows were measured."""

    def judge(folder: Path) -> Judged | None:
        page, end, _ = read(folder / "gpu.md").partition(MEASURED)
        rows = [
            (line, title)
            for title, lines in tables(page)
            for line in lines
            if line["what"].startswith(f"{family}_")
        ]
        if not end or "\nFailed: " in page:
            return None
        if any(line["output"].startswith(NOT_RUN) for line, _ in rows):
            return None
        barred = [(float(line[RATIO]), line, title) for line, title in rows if line["bar"]]
        if not barred:
            return None
        share, line, title = min(barred, key=lambda row: row[0])
        is_met = all("NOT MET" not in line["bar"] for _, line, _ in barred)
        is_right = all(line["output"] in RIGHT for _, line, _ in barred)
        return Judged(f"{share:.1f} % at least: {line['what']}, {title}", is_met and is_right)

    return judge


def issued(folder: Path) -> Judged | None:
    """Cycles in which the searches of rule mse issue an instruction; of ncu-mse.csv."""
    lines = read(folder / "ncu-mse.csv").splitlines()
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    found = {
        row["Kernel Name"]: float(row["Metric Value"].replace(",", ""))
        for row in rows
        if row["Metric Name"] == ISSUED and row["Kernel Name"].startswith(SEARCHES)
    }
    if not all(any(name.startswith(search) for name in found) for search in SEARCHES):
        return None
    least = min(found, key=lambda name: found[name])
    return Judged(f"{found[least]:.1f} %: {least}", found[least] >= ISSUE_SHARE)


def sanitized(folder: Path) -> Judged | None:
    """How each of the four has ended; of sanitizer.txt."""
    text = read(folder / "sanitizer.txt")
    ends = {tool: re.search(rf"^-- {tool}: rc (\d+)", text, re.MULTILINE) for tool in SANITIZERS}
    codes = {tool: int(end[1]) if end else None for tool, end in ends.items()}
    if bad := [tool for tool, code in codes.items() if code == SANITIZER_ERRORS]:
        return Judged(f"errors of {', '.join(bad)}", False)
    if any(codes.values()):
        ended = ", ".join(f"{tool} ended with {code}" for tool, code in codes.items() if code)
        return Judged(ended, None)
    return Judged("no errors", True) if None not in codes.values() else None


def conversions(folder: Path) -> dict[Run, Row]:
    """Read whole.jsonl: every conversion that was begun, by what it was of."""
    rows = map(json.loads, read(folder / "whole.jsonl").splitlines())
    return {Run(*map(row.get, Run._fields)): row for row in rows if "rc" in row}


def of_conversions(wanted: Iterable[Run], judge: Callable[[dict[Run, Row]], Judged]) -> Judge:
    """Judge those that are wanted: one that failed is enough for NOT MET.

    judge  of those that have ended well; where some were not begun it cannot say that all is met
    """
    wanted = tuple(wanted)

    def judged(folder: Path) -> Judged | None:
        begun = conversions(folder)
        found = {run: begun[run] for run in wanted if run in begun}
        failed = [f"{run.text} ended with {row['rc']}" for run, row in found.items() if row["rc"]]
        if failed:
            return Judged("; ".join(failed), False)
        judgement = judge(found)
        return judgement if len(found) == len(wanted) or judgement.is_met is False else None

    return judged


def digests(found: dict[Run, Row]) -> Judged:
    """One digest for each format and rule."""
    by_pair: dict[str, set[object]] = {}
    for run, row in found.items():
        by_pair.setdefault(f"{run.format} {run.rule}", set()).add(row["digest"])
    differ = [pair for pair, own in by_pair.items() if len(own) != 1 or own <= {None, ""}]
    text = (
        f"differ or are missing: {', '.join(differ)}" if differ else f"{len(by_pair)} pairs equal"
    )
    return Judged(text, not differ)


def ratios(found: dict[Run, Row], device: str, what: str) -> dict[str, float]:
    """What a device took beside the CPU, by format and rule, where both are there."""
    pairs = [(run, run._replace(device="cpu")) for run in found if run.device == device]
    return {
        f"{run.format} {run.rule}": found[run][what] / found[cpu][what]
        for run, cpu in pairs
        if cpu in found and str(found[run]["took"]).startswith("cuda")
    }


def never_slower(found: dict[Run, Row]) -> Judged:
    """The GPU beside the CPU in seconds, where --device auto takes it."""
    if not (own := ratios(found, "auto", "seconds")):
        return Judged("auto took the CPU", None)
    worst = max(own, key=lambda pair: own[pair])
    return Judged(f"{own[worst]:.2f} of the CPU's seconds: {worst}", own[worst] <= 1)


def cpu_seconds(found: dict[Run, Row]) -> Judged:
    """CPU-seconds with the GPU, beside those of the CPU backend."""
    own = ratios(found, "cuda", "cpu_seconds").values()
    return Judged(f"{max(own):.2f}", max(own) <= CPU_SHARE) if own else Judged("", None)


ALL_RUNS = tuple(
    Run(fmt, rule, device, workers)
    for fmt, rules in RULES.items()
    for rule in rules
    for device, workers in RUNS
)


def runs_on(devices: tuple[str, ...], rule: str = "") -> Iterator[Run]:
    """List the runs with workers as the program chooses them; of one rule, or of all."""
    for run in ALL_RUNS:
        if run.device in devices and not run.workers and rule in ("", run.rule):
            yield run


BARS = (
    Bar("bytes, reports and products, 1 GB and more of each", "equal", tests_of("test_on_gpu")),
    Bar("2^31 + 8192 elements", "equal", tests_of("test_beyond_32_bits")),
    *(
        Bar(f"`{family}`", f">= {share} % of a copy's rate", share_of(family))
        for family, share in SHARES.items()
    ),
    Bar(
        "`gemv`, one vector",
        f">= {GEMV_SHARES[True]} %, without instructions for E2M1 {GEMV_SHARES[False]} %, of a "
        "copy's rate",
        share_of("gemv"),
    ),
    Bar("search of rule `mse`", f">= {ISSUE_SHARE} % of cycles issue an instruction", issued),
    Bar("memcheck, racecheck, initcheck, synccheck", "no errors", sanitized),
    Bar("whole conversions: digests on both devices", "equal", of_conversions(ALL_RUNS, digests)),
    Bar(
        "whole conversions, where `auto` takes the GPU",
        "<= the CPU's seconds",
        of_conversions(runs_on(("cpu", "auto")), never_slower),
    ),
    Bar(
        "whole conversions by `mse`: CPU-seconds",
        f"<= {CPU_SHARE} of the CPU's",
        of_conversions(runs_on(("cpu", "cuda"), "mse"), cpu_seconds),
    ),
)


def judged(bar: Bar, folder: Path) -> tuple[str, str]:
    """What was found, and the verdict."""
    with suppress(FileNotFoundError):
        if judgement := bar.judge(folder):
            return judgement.found, VERDICTS[judgement.is_met]
    return "", NOT_RUN


def document(folder: Path) -> dict[str, object]:
    """For JSON: the GPU, and every bar with what was found."""
    head = ""
    with suppress(FileNotFoundError):
        head = read(folder / "gpu.md").split("\n\n")[1].partition("\n")[0]
    found = {bar.what: judged(bar, folder) for bar in BARS}
    return {"gpu": head.partition(",")[0] or "unknown", "about": head, "bars": found}


def rows_of(results: Path) -> list[tuple[str, ...]]:
    """A line for each bar, a column for each page gpu-*.json; without one it is not run."""
    pages = [json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))]
    columns = [{what: f"{v}: {f}" if f else v for what, (f, v) in p["bars"].items()} for p in pages]
    if not pages:
        return [("", "bar", "any GPU"), *((bar.what, bar.wanted, NOT_RUN) for bar in BARS)]
    head = ("", "bar", *(page["gpu"] for page in pages))
    lines = ((b.what, b.wanted, *(c.get(b.what, NOT_RUN) for c in columns)) for b in BARS)
    return [head, *lines]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py bars", description="Judge every bar of a GPU.")
    parser.add_argument("folder", type=Path, help="what first_run.sh has left in $OUT")
    folder = parser.parse_args(arguments).folder
    found = document(folder)
    name = re.sub(r"[^a-z0-9]+", "-", str(found["gpu"]).lower()).strip("-")
    path = folder / f"gpu-{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for what, (text, verdict) in found["bars"].items():
        print(f"{verdict}: {what}{f': {text}' if text else ''}")
    print(f"{path}: commit it, and gpu.md as gpu-{name}.md, in benchmarks/results")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
