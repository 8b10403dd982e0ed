"""One conversion by several processes: what the sharing itself costs, beside what one process takes
for the same bytes.

Every process has one thread.  Start-up is what quantize takes of the processors when its part is
done already: it imports, reads headers, plans, and finds nothing to do.  Of parts one after the
other it is that of the same commands, each part in turn; of workers that join, which would wait
for one another, that of as many with `--shard-index 0 --num-shards 8`.  Of workers that begin at
once it is measured at once, too: they take more of the processors than one after the other.  That
of `merge` is one of next to nothing: what grows with bytes, tensors or shards is no start-up.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cpu.conversion import ROUNDS, THREADS, scratch_folder, words_of
from harness.checkpoints import LAYER_NBYTES, make_checkpoint, make_small_checkpoint
from harness.gate import SECONDS
from harness.processes import COMMAND, Cost, median_of, ratio_of, run, run_together, take_turns
from harness.sections import Row, Section

SHARDS = 8
GIGABYTES = SHARDS * LAYER_NBYTES / 1e9  # a layer each
COUNTS = (1, 2, 4, 8)
BAR, START_BAR = 1.1, 0.4  # times one worker's CPU-seconds; CPU-seconds
JOINED, DEALT = "at once, --join", "one after the other, --shard-index and merge"
START, MERGE = "start-up of ", "merge"
ABOUT = (
    f"{SHARDS} shards, {GIGABYTES:.1f} GB of bf16 to NVFP4, rule amax, {THREADS} cores, one thread"
    f" a worker, warm; medians of {ROUNDS}. CPU-seconds of all processes together, less their"
    " start-up, beside those of one. Start-up is of as many processes, at once or one after the"
    " other as they were, whose part is done already; of merge where next to nothing was written."
)


def sections(is_quick: bool) -> list[Section]:
    """Quick: one worker and the most."""
    counts = (1, SHARDS) if is_quick else COUNTS
    done = _measure(counts)
    less = {
        name: list(map(_without, done[name], done[START + name]))
        for name in done
        if START + name in done
    }
    one = less[f"{JOINED}1"]
    names = [(count, JOINED, f"{JOINED}{count}") for count in counts] + [(SHARDS, DEALT, DEALT)]
    rows = tuple(_row(count, how, done[name], less[name], one) for count, how, name in names)
    begun = {
        "quantize": (f"{START}{JOINED}1", 1),
        f"quantize, each of {SHARDS} at once": (f"{START}{JOINED}{SHARDS}", SHARDS),
        MERGE: (MERGE, 1),
    }
    lines = tuple(_line(name, done[key], count) for name, (key, count) in begun.items())
    headings = ("workers", "how", "seconds", "CPU-seconds", "less start-up")
    return [
        Section("Several workers", ABOUT, headings, rows, "times one worker", is_floor=False),
        Section(
            "Start-up of a worker",
            "CPU-seconds of a process that was taken for start-up above. Judged by the figure"
            " itself.",
            ("command", "seconds"),
            lines,
            SECONDS,
            is_floor=False,
        ),
    ]


def _measure(counts: Sequence[int]) -> dict[str, list[Cost]]:
    """Measure every way to work, and the start-up of each, in turns."""
    with scratch_folder() as scratch:
        source, output, least = scratch / "source", scratch / "output", scratch / "least"
        make_checkpoint(source, GIGABYTES, SHARDS)
        make_small_checkpoint(scratch / "small")
        run(_words(scratch / "small", least))
        works = {f"{JOINED}{count}": partial(_join, source, output, count) for count in counts}
        works[DEALT] = partial(_deal, source, output, output)
        # From here on the folder is finished.
        works |= {
            f"{START}{JOINED}{count}": partial(_start, source, output, count) for count in counts
        }
        works |= {START + DEALT: partial(_deal, source, output, least)}
        works |= {MERGE: partial(_merge, least)}
        return take_turns(works, ROUNDS)


def _words(source: Path, output: Path) -> list[object]:
    return [*words_of(source, output, "amax"), "--workers", 1]


def _join(source: Path, output: Path, count: int) -> Cost:
    """Workers of one folder, all started at once."""
    shutil.rmtree(output, ignore_errors=True)
    return _together([[*_words(source, output), "--join"]] * count)


def _start(source: Path, output: Path, count: int) -> Cost:
    """Workers whose part is done, all started at once."""
    return _together([_part(source, output, 0)] * count)


def _together(commands: list[list[object]]) -> Cost:
    costs = run_together(commands)
    return Cost(max(cost.seconds for cost in costs), sum(cost.cpu_seconds for cost in costs))


def _deal(source: Path, output: Path, merged: Path) -> Cost:
    """Parts of one folder, one after the other, and the end; of a new folder, where it is the one
    that is merged.
    """
    if merged == output:
        shutil.rmtree(output, ignore_errors=True)
    parts = [*(run(_part(source, output, index)) for index in range(SHARDS)), _merge(merged)]
    return Cost(sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts))


def _part(source: Path, output: Path, index: int) -> list[object]:
    return [*_words(source, output), "--shard-index", index, "--num-shards", SHARDS]


def _merge(output: Path) -> Cost:
    return run([COMMAND, "merge", output, "-q"])


def _without(cost: Cost, start: Cost) -> Cost:
    return Cost(cost.seconds, cost.cpu_seconds - start.cpu_seconds)


def _row(count: int, how: str, costs: list[Cost], less: list[Cost], one: list[Cost]) -> Row:
    cells = (
        f"{median_of(costs):.2f}",
        *(f"{median_of(each, 'cpu_seconds'):.2f}" for each in (costs, less)),
    )
    return Row(
        (str(count), how),
        cells,
        ratio_of(less, one, "cpu_seconds"),
        BAR if count == SHARDS else None,
    )


def _line(name: str, costs: list[Cost], count: int) -> Row:
    return Row(
        (name,), (f"{median_of(costs):.2f}",), median_of(costs, "cpu_seconds") / count, START_BAR
    )
