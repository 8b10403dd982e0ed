"""A whole conversion against its own lawful costs, and its memory against the checkpoint's size.

The lawful costs: read the source once, write as many bytes as the artifact has, fsync them, hash
them; writing and hashing
on as many threads as the conversion has, and as it writes.  They are done in this process, so that
they have no start-up.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.process import LEVELS
from fp4convert.storage.shard_writer import WRITE_NBYTES
from harness.checkpoints import HIDDEN, MLP, make_checkpoint
from harness.disk import file_system, files_of, make_cold, make_warm
from harness.processes import COMMAND, Cost, cost_here, median_of, ratio_of, run, take_turns
from harness.sections import Row, Section

GIGABYTES = 4
ROUNDS = 7
THREADS = len(os.sched_getaffinity(0))
BARS = {LEVELS[4]: 1.1}  # times the lawful costs, by rule amax from the cache
BAR = 1.5  # with less than AVX-512
SLOWEST_SEARCH = 2  # times the plain rule
SIZES = ((1, "mse"), (4, "mse"), (8, "mse"), (4, "amax"))  # GB, rule: of the peak of memory
LAWFUL = "lawful costs"
CACHES: dict[str, Callable[[Path], None]] = {"warm": make_warm, "cold": make_cold}


def words_of(source: Path, output: Path, rule: str, fmt: str = "nvfp4") -> list[object]:
    """The command that is measured."""
    return [
        COMMAND,
        "quantize",
        source,
        "--format",
        fmt,
        "--scale-rule",
        rule,
        "-o",
        output,
        "-q",
        "--device",
        "cpu",
    ]


def convert(
    source: Path, output: Path, rule: str, fmt: str = "nvfp4", is_watched: bool = False
) -> Cost:
    """What it takes to write a new folder."""
    shutil.rmtree(output, ignore_errors=True)
    return run(words_of(source, output, rule, fmt), is_watched)


class LawfulCosts:
    """Read every source byte; write the artifact's bytes, which are in memory already;
    hash them.
    """

    def __init__(self, source: Path, artifact: Path, scratch: Path) -> None:
        self._source = source
        self._shards = {
            path.name: path.read_bytes()
            for path in files_of(artifact)
            if path.suffix == ".safetensors"
        }
        self._scratch = scratch

    def done(self) -> Cost:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        return cost_here(self._do)

    def _do(self) -> None:
        subprocess.run(["cat", *files_of(self._source)], stdout=subprocess.DEVNULL, check=True)

        def write_and_hash(name: str) -> str:
            data = memoryview(self._shards[name])
            with (self._scratch / name).open("wb", buffering=0) as out:
                for start in range(0, len(data), WRITE_NBYTES):
                    out.write(data[start : start + WRITE_NBYTES])
                os.fsync(out.fileno())
            return hashlib.sha256(self._shards[name]).hexdigest()

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write_and_hash, self._shards))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for as long as something is measured, on the disk that holds temporary files."""
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as folder:
        yield Path(folder)


def sections(is_quick: bool) -> list[Section]:
    """Quick: rule amax from the cache alone."""
    with scratch_folder() as scratch:
        source, output = scratch / "source", scratch / "output"
        make_checkpoint(source, GIGABYTES)
        found = [
            _speed(
                source,
                output,
                scratch,
                ("warm",) if is_quick else tuple(CACHES),
                ("amax",) if is_quick else ("amax", "mse"),
            )
        ]
        found += [] if is_quick else [_search(source, output)]
        shutil.rmtree(source)
        return found if is_quick else [*found, _memory(scratch)]


def _speed(
    source: Path, output: Path, scratch: Path, caches: tuple[str, ...], rules: tuple[str, ...]
) -> Section:
    convert(source, output, "amax")
    costs = LawfulCosts(source, output, scratch / "written")
    rows = []
    for cache in caches:
        done = _rounds(source, output, costs, CACHES[cache], rules)
        rows += [_row(cache, rule, done) for rule in rules]
    about = (
        f"{GIGABYTES} GB of bf16 to NVFP4, {THREADS} threads, {file_system(scratch)}, start-up"
        " included, beside `cat` of the source, writing as many bytes as the artifact has, fsync"
        f" and sha256 of them, on as many threads, without start-up; medians of {ROUNDS} pairs."
    )
    headings = ("cache", "rule", "quantize s", "the other s", "quantize CPU-s", "the other CPU-s")
    return Section(
        "A whole conversion", about, headings, tuple(rows), "times the other", is_floor=False
    )


def _rounds(
    source: Path,
    output: Path,
    costs: LawfulCosts,
    ready: Callable[[Path], None],
    rules: tuple[str, ...],
) -> dict[str, list[Cost]]:
    """All in turn, each after the source was made ready."""

    def after(work: Callable[[], Cost]) -> Callable[[], Cost]:
        def do() -> Cost:
            ready(source)
            return work()

        return do

    works = {rule: after(lambda rule=rule: convert(source, output, rule)) for rule in rules}
    works[LAWFUL] = after(costs.done)
    return take_turns(works, ROUNDS)


def _row(cache: str, rule: str, done: dict[str, list[Cost]]) -> Row:
    pair = done[rule], done[LAWFUL]
    cells = [
        f"{median_of(costs, what):.2f}" for what in ("seconds", "cpu_seconds") for costs in pair
    ]
    bar = BARS.get(Cpu().instruction_set, BAR) if (cache, rule) == ("warm", "amax") else None
    return Row((cache, rule), tuple(cells), ratio_of(*pair), bar)


def _search(source: Path, output: Path) -> Section:
    rows = []
    for fmt, plain in (("nvfp4", "amax"), ("mxfp4", "even")):
        works = {
            rule: lambda rule=rule, fmt=fmt: convert(source, output, rule, fmt)
            for rule in ("mse", plain)
        }
        done = take_turns(works, ROUNDS)
        cells = tuple(f"{median_of(done[rule]):.2f}" for rule in ("mse", plain))
        rows.append(Row((fmt, plain), cells, ratio_of(done["mse"], done[plain]), SLOWEST_SEARCH))
    about = f"The same checkpoint by rule mse and by another, medians of {ROUNDS}."
    headings = ("format", "other rule", "mse s", "the other s")
    return Section(
        "The least squared error", about, headings, tuple(rows), "times the other", is_floor=False
    )


def _memory(scratch: Path) -> Section:
    allowed = 150e6 + THREADS * 2 * HIDDEN * MLP / 16
    rows = []
    for gigabytes, rule in SIZES:
        source = scratch / "source"
        make_checkpoint(source, gigabytes)
        done = convert(source, scratch / "output", rule, is_watched=True)
        shutil.rmtree(source)
        cells = (f"{done.seconds:.1f}", f"{done.anonymous_nbytes / 1e6:.0f}")
        rows.append(Row((f"{gigabytes} GB", rule), cells, done.anonymous_nbytes / allowed, 1))
    about = (
        f"The highest RssAnon of one run, as a share of what is allowed: {allowed / 1e6:.0f} "
        "MB, which is 150 MB and 1/16 of the"
    )
    about += " largest tensor for each worker."
    headings = ("checkpoint", "rule", "seconds", "peak RssAnon MB")
    return Section("Memory", about, headings, tuple(rows), "of what is allowed", is_floor=False)
