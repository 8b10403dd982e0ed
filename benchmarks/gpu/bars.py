"""Every bar that a GPU is to meet, judged by what the first run has left: met, NOT MET or not run.

    python benchmarks/bench.py bars FOLDER      FOLDER/gpu-NAME.json, of the files that are there

Decides which bars there are, and what a figure is taken from. Nothing is judged by hand, and what
is not there, or was not finished, is not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from gpu.gpu_results import RATIO, tables

SHARES = {"amax": 97, "quantize": 92, "dequantize": 92}  # % of the copy's rate
GEMV_SHARES = {False: 60, True: 90}  # by whether the hardware decodes E2M1
ISSUE_SHARE = 80  # % of the cycles in which a search may issue an instruction
CPU_SHARE = 0.5  # of the CPU backend's CPU-seconds
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
ISSUED = "smsp__issue_active.avg.pct_of_peak_sustained_active"
NOT_RUN = "not run"
RIGHT = ("bytes equal", "product right")  # what stands beside a row


class Judged(NamedTuple):
    """What was found, and whether that is enough."""

    found: str
    is_met: bool


Judge = Callable[[Path], Judged | None]  # folder -> None where there is nothing to judge


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
        root = ElementTree.parse(folder / "bytes.xml").getroot()
        cases = [c for c in root.iter("testcase") if module in c.get("classname", "").split(".")]
        has_ended = "-- bytes: rc 124" not in read(folder / "bytes.txt")
        if not cases or not has_ended or any(case.find("skipped") is not None for case in cases):
            return None
        bad = sum(case.find(kind) is not None for case in cases for kind in ("failure", "error"))
        return Judged(f"{len(cases) - bad} of {len(cases)} tests pass", not bad)

    return judge


def share_of(family: str) -> Judge:
    """The lowest share of a kernel that has a bar; of gpu.md, where all rows were measured."""

    def judge(folder: Path) -> Judged | None:
        page, _, _ = read(folder / "gpu.md").partition("\n## Others")
        rows = [
            (line, title)
            for title, lines in tables(page)
            for line in lines
            if line["what"].startswith(f"{family}_")
        ]
        if "\nFailed: " in page or any(line["output"].startswith("not run") for line, _ in rows):
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
    """Cycles in which the NVFP4 search issues an instruction; of ncu.csv."""
    lines = read(folder / "ncu.csv").splitlines()
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    found = [
        float(row["Metric Value"].replace(",", ""))
        for row in rows
        if row["Metric Name"] == ISSUED and row["Kernel Name"].startswith("search_nvfp4_")
    ]
    return Judged(f"{min(found):.1f} %", min(found) >= ISSUE_SHARE) if found else None


def sanitized(folder: Path) -> Judged | None:
    """How each of the four has ended; of sanitizer.txt."""
    text = read(folder / "sanitizer.txt")
    ends = {tool: re.search(rf"^-- {tool}: rc (\d+)", text, re.MULTILINE) for tool in SANITIZERS}
    if not all(ends.values()):
        return None
    bad = [tool for tool, end in ends.items() if end and end[1] != "0"]
    return Judged(f"errors of {', '.join(bad)}" if bad else "no errors", not bad)


def conversions(folder: Path) -> dict[tuple[object, object], list[dict[str, object]]]:
    """Rows of whole.jsonl by format and rule, all runs of which have ended well."""
    lines = read(folder / "whole.jsonl").splitlines()
    found: dict[tuple[object, object], list[dict[str, object]]] = {}
    for row in map(json.loads, lines):
        if "format" in row:
            found.setdefault((row["format"], row["rule"]), []).append(row)
    return found


def run_of(rows: Iterable[dict[str, object]], device: str) -> dict[str, float]:
    return next(row for row in rows if (row["device"], row["workers"]) == (device, 0))


def digests(folder: Path) -> Judged | None:
    """One digest for each format and rule."""
    found = conversions(folder)
    if not found or any(
        "not run" in str(r.get("problem")) for rows in found.values() for r in rows
    ):
        return None
    differ = [
        " ".join(map(str, key))
        for key, rows in found.items()
        if len({row.get("digest") for row in rows} | {None}) != 2
        or not all(row.get("digest") for row in rows)
    ]
    text = f"differ or are missing: {', '.join(differ)}" if differ else f"{len(found)} pairs equal"
    return Judged(text, not differ)


def never_slower(folder: Path) -> Judged | None:
    """The GPU beside the CPU in seconds, where --device auto takes it."""
    ratios = {
        key: run_of(rows, "auto")["seconds"] / run_of(rows, "cpu")["seconds"]
        for key, rows in conversions(folder).items()
        if str(run_of(rows, "auto")["took"]).startswith("cuda")
    }
    if not ratios:
        return Judged("auto took it for nothing", True) if conversions(folder) else None
    (fmt, rule), worst = max(ratios.items(), key=lambda pair: pair[1])
    return Judged(f"{worst:.2f} of the CPU's seconds: {fmt} {rule}", worst <= 1)


def cpu_seconds(folder: Path) -> Judged | None:
    """CPU-seconds with the GPU, beside those of the CPU backend, of every rule that searches."""
    ratios = [
        run_of(rows, "cuda")["cpu_seconds"] / run_of(rows, "cpu")["cpu_seconds"]
        for (_, rule), rows in conversions(folder).items()
        if rule == "mse"
    ]
    return Judged(f"{max(ratios):.2f}", max(ratios) <= CPU_SHARE) if ratios else None


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
    Bar("whole conversions: digests on both devices", "equal", digests),
    Bar("whole conversions, where `auto` takes the GPU", "<= the CPU's seconds", never_slower),
    Bar("whole conversions by `mse`: CPU-seconds", f"<= {CPU_SHARE} of the CPU's", cpu_seconds),
)


def judged(bar: Bar, folder: Path) -> tuple[str, str]:
    """What was found, and the verdict."""
    with suppress(OSError, ElementTree.ParseError, LookupError, StopIteration, ValueError):
        if judgement := bar.judge(folder):
            return judgement.found, "met" if judgement.is_met else "NOT MET"
    return "", NOT_RUN


def document(folder: Path) -> dict[str, object]:
    """For JSON: the GPU, and every bar with what was found."""
    head = ""
    with suppress(OSError, IndexError):
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
