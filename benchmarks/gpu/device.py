"""Launch kernels on one GPU, and time them.

Decides how kernels are launched, and how they are timed: medians of REPEATS times of LAUNCHES runs
between two events, so that the start of one is hidden behind the end of the one before, as in a
stream of work. All are queued behind enough copying that the GPU never waits for Python, on buffers
that take turns, so that no run finds its input in the L2 cache.
"""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4convert.numerics.backends import gpus
from fp4convert.numerics.backends.cubins import Target, cubin_path, kernels_folder
from fp4convert.numerics.backends.entry_points import entry_of
from harness.measure import table, verdict

REPEATS, LAUNCHES, WARM_UP = 20, 8, 5
M = 1 << 20
BUSY_NBYTES, BUSY_COPIES = (
    256 * M,
    64,
)  # some milliseconds: more than it takes to queue REPEATS * LAUNCHES runs
SLOT_NBYTES = 128  # a cache line: each run has an amax of its own, zero at first
THREADS = 256
PER_BLOCK = {  # of baselines.cu: elements, or rows and vectors, to a block of threads
    "quantize_naive": (128, 1),
    "quantize_naive_mxfp4": (256, 1),
    "dequantize_naive": (256, 1),
    "gemv_naive": (256, 1),
    "gemv_coalesced": (8, 1),
    "gemv_one_tile": (32, 1),
    "gemv_three_tiles": (32, 1),
}
BASELINES = tuple(PER_BLOCK)
LADDER = tuple(name for name in BASELINES if name.startswith("gemv"))
SUMMED_COLUMNS = 8192  # of the matrices that compare_* is measured on
INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
HEADINGS = ["what", "ms", "GB/s", "% of copy", "bar", "output"]

Values = np.ndarray
Work = Callable[[int], object]  # takes the number of the run


def family(name: str) -> str:
    """Return the first word of a kernel: amax, search, weigh and so on."""
    return name.partition("_")[0]


def grid_of(
    name: str, first: int, second: int = 1, matrices: int = 1, widened: float = 1
) -> tuple[int, int, int]:
    """Count blocks of threads for elements, or rows and vectors or columns.

    widened  how many times as many elements a block takes
    """
    across, down = PER_BLOCK.get(name) or entry_of(name)[1:]
    return -(-first // round(across * widened)), -(-second // down), matrices


def one_text(source: Path) -> str:
    """A .cu file with the text of what it includes, of the product's too."""
    folders = (source.parent, kernels_folder())
    seen: set[str] = set()

    def text_of(path: Path) -> str:
        return INCLUDE.sub(included, path.read_text(encoding="utf-8"))

    def included(line: re.Match[str]) -> str:
        if line[1] in seen:
            return ""
        seen.add(line[1])
        return text_of(next(path for folder in folders if (path := folder / line[1]).is_file()))

    return text_of(source)


def baselines_source(folder: Path) -> Path:
    """baselines.cu as one text, for NVRTC is given no header but the product's."""
    path = folder / "baselines.cu"
    path.write_text(one_text(Path(__file__).with_name("baselines.cu")), encoding="utf-8")
    return path


class Kernels:
    """Every kernel compiled for one target, loaded when it is first wanted."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._functions: dict[str, Any] = {}

    def source(self, name: str) -> Path:
        """The .cu file that has a kernel."""
        if name in BASELINES:
            return baselines_source(Path(tempfile.mkdtemp()))
        return kernels_folder() / entry_of(name).file

    def shape(self, name: str, *counts: int) -> tuple[tuple[int, int, int], int]:
        """Grid and threads of a launch."""
        return grid_of(name, *counts), THREADS

    def start(self, name: str, counts: tuple[int, ...], words: tuple[int, ...]) -> None:
        import cupy

        if name not in self._functions:
            path = cubin_path(self.source(name), self.target)
            self._functions[name] = cupy.RawModule(path=str(path)).get_function(name)
        grid, threads = self.shape(name, *counts)
        self._functions[name](grid, (threads,), words)


@dataclass(frozen=True, slots=True)
class Rung:
    """One kernel for one target."""

    kernels: Kernels
    name: str

    def launch(self, count: int | tuple[int, ...], *arguments: Any) -> None:
        """Start it; arguments are integers, addresses or arrays of the device."""
        words = tuple(a if isinstance(a, int) else int(a.data.ptr) for a in arguments)
        counts = (count,) if isinstance(count, int) else count
        self.kernels.start(self.name, counts, words)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table: what is run, the bytes it has to move,
    and what is known of its output.
    """

    label: str
    nbytes: float
    work: Work | None  # None: it cannot run, `output` says why
    bar: float | None = None
    output: str = ""


class Device:
    """The GPU, its memory and its clock; and what the comparison found of each rung."""

    def __init__(self, gpu: gpus.Gpu, seconds: float) -> None:
        import cupy

        self.cupy = cupy
        self._deadline = time.monotonic() + seconds
        self.l2_nbytes = int(cupy.cuda.runtime.getDeviceProperties(gpu.number)["l2CacheSize"])
        self.kernels = Kernels(gpu.target)
        self.software = (
            Kernels(Target(gpu.target.arch, has_cvt=False)) if gpu.target.has_cvt else None
        )
        self.verdicts: dict[Rung, str] = {}
        self._busy = [self.empty(BUSY_NBYTES) for _ in range(2)]
        self.slots = self.empty(SLOT_NBYTES * (WARM_UP + REPEATS * LAUNCHES))
        self.slots.data.memset_async(0, self.slots.nbytes)

    def is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def release(self) -> None:
        """Give back the memory that nothing uses any more, torch's too."""
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def rungs(self, name: str) -> list[Rung]:
        """The product's kernel, and the same without the hardware's conversions where it
        uses them.
        """
        return [Rung(kernels, name) for kernels in (self.kernels, self.software) if kernels]

    def sets(self, nbytes: int) -> int:
        """How many buffers of that size must take turns for none to be in the L2 cache when its
        turn comes.
        """
        return -(-4 * self.l2_nbytes // nbytes) + 1

    def empty(self, nbytes: int) -> Any:
        return self.cupy.empty(nbytes, np.uint8)

    def upload(self, data: Any) -> Any:
        """The bytes of an array or a buffer, on the device."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self.filled(raw, raw.size)

    def filled(self, pattern: Values, nbytes: int) -> Any:
        """So many bytes on the device: the pattern, again and again."""
        array = self.empty(nbytes)
        for start in range(0, nbytes, pattern.size):
            piece = array[start : start + pattern.size]
            piece.set(pattern[: piece.size])
        return array

    def poisoned(self, nbytes: int) -> Any:
        return self.filled(np.full(nbytes, 0xAA, np.uint8), nbytes)

    def copy(self, destination: Any, source: Any) -> None:
        destination.data.copy_from_device_async(source.data, source.nbytes)

    def amax_slot(self, run: int) -> int:
        """Where a run finds a zero to put its amax in."""
        return int(self.slots.data.ptr) + SLOT_NBYTES * run

    def median_ms(self, work: Work) -> float:
        self.slots.data.memset_async(0, self.slots.nbytes)
        for run in range(WARM_UP):
            work(run)
        pairs = [(self.cupy.cuda.Event(), self.cupy.cuda.Event()) for _ in range(REPEATS)]
        for _ in range(BUSY_COPIES):
            self.copy(*self._busy)
        runs = itertools.count(WARM_UP)
        for start, stop in pairs:
            start.record()
            for run in itertools.islice(runs, LAUNCHES):
                work(run)
            stop.record()
        pairs[-1][1].synchronize()
        return statistics.median(
            self.cupy.cuda.get_elapsed_time(start, stop) / LAUNCHES for start, stop in pairs
        )

    def case(
        self, rung: Rung, work: Work, nbytes: int, bar: float | None = None, note: str = ""
    ) -> Case:
        """The case of a rung that was compared; without the hardware's conversions it has no bar to
        meet.
        """
        is_software = rung.kernels is self.software
        label = rung.name + note + ", without hardware conversion" * is_software
        return Case(
            label,
            nbytes,
            work,
            None if is_software else bar,
            self.verdicts.get(rung, "not compared"),
        )

    def row(self, case: Case, copy_rate: float) -> list[str]:
        if case.work is None or self.is_late():
            return [
                case.label,
                "",
                "",
                "",
                "",
                case.output if case.work is None else "not run: the time is up",
            ]
        ms = self.median_ms(case.work)
        rate = case.nbytes / ms / 1e6
        share = 100 * rate / copy_rate
        bar = verdict(share, case.bar) if case.bar else ""
        return [case.label, f"{ms:.4f}", f"{rate:.0f}", f"{share:.1f}", bar, case.output]

    def measure(self, copy: Case, cases: Iterable[Case]) -> str:
        """A table of them; the copy is measured twice, to be the measure and to show how well it
        repeats.
        """
        copy_rate = copy.nbytes / self.median_ms(copy.work) / 1e6
        return table(HEADINGS, [self.row(case, copy_rate) for case in (copy, *cases)])
