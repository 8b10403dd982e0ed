"""One conversion by several processes: what the sharing itself costs, beside what one process takes for the same bytes.

Every process has one thread.  Start-up is what the same command takes of the processors when its part is done already: it
imports, reads headers, plans, and finds nothing to do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from conversion import ROUNDS, THREADS, scratch_folder, words_of
from llamas import LAYER_NBYTES, make_checkpoint
from processes import COMMAND, Cost, median_of, ratio_of, run, run_together, take_turns
from sections import Row, Section

SHARDS = 8
GIGABYTES = SHARDS * LAYER_NBYTES / 1e9  # a layer each
COUNTS = (1, 2, 4, 8)
BAR, START_BAR = 1.1, 0.4  # times one worker's CPU-seconds; CPU-seconds
JOINED, DEALT = "at once, --join", "one after the other, --shard-index and merge"


def sections(is_quick: bool) -> list[Section]:
    """Quick: one worker and the most."""
    counts = (1, SHARDS) if is_quick else COUNTS
    with scratch_folder() as scratch:
        source, output = scratch / "source", scratch / "output"
        make_checkpoint(source, GIGABYTES, SHARDS)
        works = {JOINED + str(count): lambda count=count: _join(source, output, count) for count in counts}
        done = take_turns(works | {DEALT: lambda: _deal(source, output), "start": lambda: _start(source, output)}, ROUNDS)
    start = median_of(done["start"], "cpu_seconds")
    one = [_without(cost, start, 1) for cost in done[f"{JOINED}1"]]
    rows = [_row(JOINED, count, done[JOINED + str(count)], one, start) for count in counts]
    rows.append(_row(DEALT, SHARDS, done[DEALT], one, start))
    about = (
        f"{SHARDS} shards, {GIGABYTES:.1f} GB of bf16 to NVFP4, rule amax, {THREADS} cores, one thread a worker, warm; medians of"
        f" {ROUNDS}. CPU-seconds of all workers together, less their start-up, beside those of one."
    )
    headings = ("workers", "how", "seconds", "CPU-seconds", "less start-up")
    shared = Section("Several workers", about, headings, tuple(rows), "times one worker", is_floor=False)
    about = "CPU-seconds that the same command takes where its part is done already. Judged by the figure itself."
    begun = Row(("quantize",), (f"{median_of(done['start']):.2f}",), start, START_BAR)
    return [shared, Section("Start-up of a worker", about, ("command", "seconds"), (begun,), "CPU-seconds", is_floor=False)]


def _words(source: Path, output: Path) -> list[object]:
    return [*words_of(source, output, "amax"), "--workers", 1]


def _join(source: Path, output: Path, count: int) -> Cost:
    """Workers of one folder, all started at once."""
    shutil.rmtree(output, ignore_errors=True)
    costs = run_together([[*_words(source, output), "--join"]] * count)
    return Cost(max(cost.seconds for cost in costs), sum(cost.cpu_seconds for cost in costs))


def _deal(source: Path, output: Path) -> Cost:
    """Parts of one folder, one after the other, and the end."""
    shutil.rmtree(output, ignore_errors=True)
    parts = [run([*_words(source, output), "--shard-index", index, "--num-shards", SHARDS]) for index in range(SHARDS)]
    parts.append(run([COMMAND, "merge", output, "-q"]))
    return Cost(sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts))


def _start(source: Path, output: Path) -> Cost:
    """A worker whose part is done."""
    return run([*_words(source, output), "--shard-index", 0, "--num-shards", SHARDS])


def _without(cost: Cost, start: float, starts: int) -> Cost:
    return Cost(cost.seconds, cost.cpu_seconds - starts * start)


def _row(how: str, count: int, costs: list[Cost], one: list[Cost], start: float) -> Row:
    less = [_without(cost, start, count) for cost in costs]
    cells = (f"{median_of(costs):.2f}", *(f"{median_of(each, 'cpu_seconds'):.2f}" for each in (costs, less)))
    return Row((str(count), how), cells, ratio_of(less, one, "cpu_seconds"), BAR if count == SHARDS else None)


if __name__ == "__main__":
    print("\n\n".join(section.markdown() for section in sections(is_quick=False)))
