"""How long a conversion takes on other machines: a model of its time, held against whole commands, and what it says of giants.

The formulas are timeline.py's, the costs those of costs.py, which measures stages by themselves: nothing is fitted to the runs
that are predicted.

python benchmarks/scaling.py            # some minutes; writes benchmarks/results/scaling.md, from which `make docs` takes tables
python benchmarks/scaling.py 0.5 1      # checkpoints of these sizes in GB; prints, and writes nothing
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from conversion import THREADS
from costs import FORMAT, Found, Stages, quantize
from disk import put_on_disk
from giants import GIANTS
from hub import REPOSITORY, SLOW, hash_alone, hub_of
from llamas import make_checkpoint
from measure import machine, results, seconds, table, verdict
from processes import COMMAND, clean_environment
from timeline import Costs, Machine, Shard, Times, conversion, shards_of

from fp4convert.backends import open_backend
from fp4convert.convert import Request, prepare_quantize
from fp4convert.forecast import estimate_seconds
from fp4convert.sources import open_source

RULES = ("amax", "mse")
SIZES = (1.0, 2.0, 4.0)  # GB
ROUNDS = 3
BAR = 0.2  # of the measured time
GIGABIT = 1e9 / 8
MACHINES = {
    "2 cores, source and result on one disk of 1 GB/s": Machine(2, 1e9),
    "16 cores, source and result on one disk of 1 GB/s": Machine(16, 1e9),
    "16 cores, Hub at 10 Gbit/s, disk of 1 GB/s": Machine(16, 1e9, 10 * GIGABIT, is_streamed=True),
    "64 cores, Hub at 25 Gbit/s, disk of 3 GB/s": Machine(64, 3e9, 25 * GIGABIT, is_streamed=True),
}
FLEET = 32


class Checked(NamedTuple):
    """A run that was measured and is to be predicted.

    how       in words
    machine   on which it ran: this one
    parts     that were done one after the other, as if by so many machines
    estimate  what a dry run calls work
    start     seconds of a process that has next to nothing to do, where these are not those of the costs
    """

    size: float
    how: str
    rule: str
    shards: list[Shard]
    measured: float
    link: float | None = None
    parts: int = 1
    estimate: float | None = None
    start: float | None = None

    def predicted(self, found: Found) -> float:
        costs = found.costs[self.rule]
        if self.start is not None:
            costs = costs._replace(start=self.start)
        here = Machine(THREADS, found.disk, self.link or math.inf, self.link is not None)
        return conversion(self.shards, costs, here, self.parts).whole

    def row(self, found: Found) -> list[str]:
        predicted = self.predicted(found)
        error = predicted / self.measured - 1
        estimate = "" if self.estimate is None else f"{self.estimate:.2f}"
        seconds = [estimate, f"{predicted:.2f}", f"{self.measured:.2f}"]
        name = f"{self.size:g} GB, shards: {len(self.shards)}"
        return [name, self.how, self.rule, *seconds, f"{error:+.0%}", verdict(abs(error), BAR, is_floor=False)]


def check(source: Path, output: Path, size: float, rule: str) -> Checked:
    """The whole command on a checkpoint that is in memory."""
    opened = open_source(str(source))
    plan = prepare_quantize(opened, Request(FORMAT, scale_rule=rule))
    estimate = float(str(estimate_seconds(opened, plan, open_backend("cpu"), THREADS)["work"]))
    runs = [seconds(lambda: quantize(source, output, "--scale-rule", rule)) for _ in range(ROUNDS)]
    return Checked(size, "one command", rule, shards_of(plan), statistics.median(runs), estimate=estimate)


def check_parts(source: Path, output: Path, whole: Checked) -> Checked:
    """The same in as many parts as there are shards, done here one after the other: the slowest, and the merge."""
    count = len(whole.shards)
    shutil.rmtree(output)
    words = [COMMAND, "quantize", source, "--format", FORMAT, "-o", output, "-q", "--device", "cpu", "--scale-rule", whole.rule]
    parts = [
        seconds(lambda number=number: run(*words, "--num-shards", count, "--shard-index", number)) for number in range(count)
    ]
    gathered = shutil.copytree(output, output.with_name("gathered"))  # as from other machines: else merge reads nothing again
    put_on_disk(gathered)
    measured = max(parts) + seconds(lambda: run(COMMAND, "merge", gathered, "-q"))
    shutil.rmtree(gathered)
    return whole._replace(how=f"{count} parts, then merge", measured=measured, parts=count, estimate=None)


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, env=clean_environment())


def check_hub(source: Path, least: Path, output: Path, whole: Checked) -> Checked:
    """The same from a Hub on the loopback device that gives each connection little.

    The rate of the link is that of reading and hashing alone; the start is that of a checkpoint of next to nothing there.
    """

    def measure() -> float:
        return seconds(lambda: quantize(Path(REPOSITORY), output, "--scale-rule", whole.rule))

    with hub_of(least, SLOW):
        start = measure()
    with hub_of(source, SLOW):
        link = sum(path.stat().st_size for path in source.glob("*.safetensors")) / seconds(hash_alone)
        measured = measure()
    how = f"Hub at {link / 1e6:.0f} MB/s"
    return whole._replace(how=how, measured=measured, link=link, start=start, estimate=None)


def predictions(found: Found, scratch: Path) -> str:
    rows = []
    for number, giant in enumerate(GIANTS):
        shards = giant.plan(scratch / f"giant-{number}", FORMAT)
        sizes = [sum(shard.source_nbytes for shard in shards), sum(shard.output_nbytes for shard in shards)]
        name = f"{giant.name}: {sizes[0] / 1e12:.2f} TB in {len(shards)} shards, {sizes[1] / 1e12:.2f} TB written"
        for where, kind in MACHINES.items():
            alone, fleet = ([conversion(shards, found.costs[rule], kind, count) for rule in RULES] for count in (1, FLEET))
            rows.append([name, where, *(words(times.whole) for times in alone), alone[-1].bound, *_fleet(fleet)])
    headings = ["model", "machine", *(f"1 machine, {rule}" for rule in RULES), "mostly waits for"]
    headings += [*(f"{FLEET} machines, {rule}" for rule in RULES), "of which merge", "the rest mostly waits for"]
    return table(headings, rows)


def _fleet(times: list[Times]) -> list[str]:
    return [*(words(one.whole) for one in times), words(times[-1].merge), times[-1].bound]


def words(duration: float) -> str:
    """A duration as a person says it."""
    if duration < 100:
        return f"{duration:.0f} s"
    return f"{duration / 60:.0f} min" if duration < 100 * 60 else f"{duration / 3600:.1f} h"


def costs_table(found: Found) -> str:
    first: Costs = next(iter(found.costs.values()))
    rows = [
        ["start-up, a process", f"{first.start:.2f} s"],
        ["planning, a tensor", f"{first.planning * 1e6:.0f} us"],
        ["Python's own, a tensor", f"{first.tensor * 1e6:.0f} us"],
        ["a shard", f"{first.shard * 1e3:.1f} ms"],
    ]
    for rule, costs in found.costs.items():
        for dtype, cost in costs.rounding.items():
            rows.append([f"rounding by rule {rule}, {dtype}, a core", f"{1 / cost / 1e9:.2f} billion weights/s"])
    for name in ("reading", "writing", "hashing"):
        rows.append([f"{name}, memory, a core", f"{1 / getattr(first, name) / 1e9:.2f} GB/s"])
    return table(["stage", "measured"], [*rows, ["flushing to the disk", f"{found.disk / 1e9:.2f} GB/s"]])


def measure_all(sizes: tuple[float, ...], scratch: Path) -> tuple[Found, list[Checked]]:
    """Costs, measured before and after the runs of each size, and the runs."""
    checked: list[Checked] = []
    stages, source, output = Stages(scratch, RULES), scratch / "source", scratch / "output"
    for size in sizes:
        make_checkpoint(source, size)
        stages.measure()
        runs = [check(source, output, size, rule) for rule in RULES]
        checked += runs
        if size == max(sizes):
            checked += [check_parts(source, output, whole) for whole in runs if len(whole.shards) > 1]
        if size == min(sizes):
            checked.append(check_hub(source, stages.least, output, runs[-1]))
        stages.measure()
        shutil.rmtree(source)
    return stages.found(), checked


def report(sizes: tuple[float, ...] = SIZES) -> str:
    """The three tables."""
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as name:
        found, checked = measure_all(sizes, Path(name))
        told = predictions(found, Path(name))
    headings = ["checkpoint", "how", "rule", "work by the dry run, s", "predicted s", "measured s", "error", "bar"]
    held = table(headings, [run.row(found) for run in checked])
    return (
        f"## What a stage costs\n\nMedians of {2 * len(sizes)}, {THREADS} threads.\n\n{costs_table(found)}\n\n"
        f"## Predicted and measured\n\nWhole commands, source in memory, medians of {ROUNDS}; parts and Hub once.\n\n{held}\n\n"
        f"## Giants\n\nPredicted; nothing of this was run.\n\n{told}\n"
    )


def circumstances() -> str:
    """Where and when this is measured, and beside how much other work."""
    load = os.getloadavg()[0]
    busy = f"; beside other work on the same cores (load {load:.1f}), by which every time is longer" if load > THREADS / 2 else ""
    return f"{machine()}{busy}. Repeat with `python benchmarks/scaling.py`."


def main() -> None:
    sizes = tuple(map(float, sys.argv[1:]))
    page = f"# Scaling\n\n{circumstances()}\n\n{report(sizes or SIZES)}"
    if not sizes:
        results("scaling", "md").write_text(page, encoding="utf-8")
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
