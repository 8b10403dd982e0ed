"""A conversion beside a copy: `quantize --scale-rule amax`, and `cp -r` of the same folder; at the
end both are on the disk.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cpu.conversion import CACHES, GIGABYTES, ROUNDS, convert, scratch_folder
from harness.checkpoints import make_checkpoint
from harness.disk import file_system, files_of, put_on_disk
from harness.processes import Cost, cost_here, median_of, ratio_of, take_turns
from harness.sections import Row, Section


def copy(source: Path, target: Path) -> Cost:
    """What `cp -r` takes, and fsync of all that it wrote."""
    shutil.rmtree(target, ignore_errors=True)

    def do() -> None:
        subprocess.run(["cp", "-r", source, target], check=True)
        put_on_disk(target)

    cost = cost_here(do)
    shutil.rmtree(target)
    return cost


def sections(is_quick: bool) -> list[Section]:
    """Quick: from the cache alone."""
    with scratch_folder() as scratch:
        source = scratch / "source"
        make_checkpoint(source, GIGABYTES)
        nbytes = sum(path.stat().st_size for path in files_of(source))
        rows = tuple(_row(cache, source, scratch) for cache in (("warm",) if is_quick else CACHES))
        about = (
            f"{nbytes / 1e9:.2f} GB of bf16 to NVFP4, rule amax, start-up included, beside `cp "
            "-r` of the folder and fsync of all"
            f" that it wrote, {file_system(scratch)}; medians of {ROUNDS} pairs. Below 1, "
            "converting takes less time."
        )
    headings = ("cache", "quantize s", "cp -r + fsync s", "quantize CPU-s", "cp -r + fsync CPU-s")
    return [
        Section(
            "Converting beside copying", about, headings, rows, "times the copy", is_floor=False
        )
    ]


def _row(cache: str, source: Path, scratch: Path) -> Row:
    def converted() -> Cost:
        CACHES[cache](source)
        cost = convert(source, scratch / "output", "amax")
        shutil.rmtree(scratch / "output")
        return cost

    def copied() -> Cost:
        CACHES[cache](source)
        return copy(source, scratch / "copy")

    done = take_turns({"quantize": converted, "cp": copied}, ROUNDS)
    cells = [
        f"{median_of(costs, what):.2f}"
        for what in ("seconds", "cpu_seconds")
        for costs in done.values()
    ]
    return Row((cache,), tuple(cells), ratio_of(done["quantize"], done["cp"]), 1)
