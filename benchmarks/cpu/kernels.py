"""The CPU kernels against the memory: each call as a share of the read bandwidth measured in turn
with it.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np

from cpu import compiled_libraries
from fp4convert.process import LEVELS
from harness.measure import in_turn, median_ratio
from harness.sections import Row, Section

ELEMENTS = 128 << 20  # 256 MB of bf16: several times the last cache
SEARCHED = 32 << 20  # by kernels that try many scales: those compute, so that less is enough
PART = 4096  # elements that a thread's share is a multiple of
ROUNDS = 5
THREADS = (1, 2)
KINDS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
BARS = {  # of one thread with AVX-512
    **{("amax", kind): 1.0 for kind in KINDS},
    **{("quantize_nvfp4", "bf16"): 0.22, ("quantize_mxfp4", "bf16"): 0.4},
    **{(f"quantize_{fmt}", kind): 0.2 for fmt in ("nvfp4", "mxfp4") for kind in ("fp16", "fp32")},
    **{(f"search_{fmt}", kind): 0.03 for fmt in ("nvfp4", "mxfp4") for kind in KINDS},
    **{
        (f"dequantize_{fmt}", kind): 0.42 for fmt in ("nvfp4", "mxfp4") for kind in ("bf16", "fp32")
    },
}
AMAX_DECIMALS = 2  # a kernel cannot read faster than the memory is read; the rest is noise
NAMED = (
    "amax",
    "quantize_nvfp4",
    "quantize_mxfp4",
    "search_nvfp4",
    "search_mxfp4",
    "dequantize_nvfp4",
    "dequantize_mxfp4",
)
NVFP4_MSE, MXFP4_EVEN = 1, 1  # kernels/fp4.h
TITLE = "Kernels"
HEADINGS = (
    "compiler",
    "instruction set",
    "kernel",
    "type",
    "threads",
    "GB/s",
    "read GB/s",
    "share of memcpy",
)

Work = Callable[[], float]


class Memory:
    """Buffers that all calls share, and the memory's own speed on the first of them."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        values = np.random.default_rng(0).standard_normal(elements, np.float32) * np.float32(0.02)
        self.x = {kind: _aligned(values.astype(dtype)) for kind, dtype in KINDS.items()}
        self.y = {kind: np.ones(elements, dtype) for kind, dtype in KINDS.items()}
        self.packed = np.ones(elements // 2, np.uint8)
        self.block_scales = np.ones(elements // 16, np.uint8)
        self.amax = np.array([np.abs(values).max()], np.float32)
        self.bits = np.zeros(max(THREADS) * 64, np.uint32)  # a line of the cache for each thread
        self._stream = compiled_libraries.stream()
        self.nbytes = self.x["bf16"].nbytes

    def read(self, start: int, count: int) -> None:
        """Bytes of bf16, by elements."""
        self._stream.stream_read(_at(self.x["bf16"], start), ctypes.c_int64(2 * count))

    def copy(self, start: int, count: int) -> None:
        self._stream.stream_copy(
            _at(self.y["bf16"], start), _at(self.x["bf16"], start), ctypes.c_int64(2 * count)
        )


def _aligned(values: np.ndarray) -> np.ndarray:
    """A copy that begins at 64 bytes."""
    room = np.empty(values.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    found = room[begin : begin + values.nbytes].view(values.dtype)
    found[:] = values
    return found


def _at(array: np.ndarray, start: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + start * array.itemsize)


class Kernels:
    """One copy of the library, held at one instruction set."""

    def __init__(self, library: Path, level: int, memory: Memory) -> None:
        self._library = compiled_libraries.loaded(library)
        self.level = self._library.fp4_level(level)
        self._memory = memory

    def call(self, name: str, kind: str, start: int, count: int) -> None:
        """On `count` elements from `start` on."""
        memory, n = self._memory, ctypes.c_int64(count)
        x, y = _at(memory.x[kind], start), _at(memory.y[kind], start)
        parts = (
            _at(memory.packed, start // 2),
            _at(memory.block_scales, start // (32 if "mxfp4" in name else 16)),
        )
        amax = _at(memory.amax, 0)
        arguments = {
            "amax": (x, n, _at(memory.bits, 64 * (start > 0))),
            "quantize_nvfp4": (x, n, amax, *parts),
            "quantize_mxfp4": (x, n, ctypes.c_int64(MXFP4_EVEN), *parts),
            "search_nvfp4": (x, n, amax, ctypes.c_int64(NVFP4_MSE), *parts),
            "search_mxfp4": (x, n, *parts),
            "dequantize_nvfp4": (*parts, n, amax, ctypes.c_int64(0), y),
            "dequantize_mxfp4": (*parts, n, y),
        }[name]
        self._library[f"{name}_{kind}"](*arguments)


def shared(
    pool: ThreadPoolExecutor, threads: int, elements: int, call: Callable[[int, int], object]
) -> Work:
    """A call for each thread on its share of the elements, all at once; says how long the slowest
    thread had a core.
    """
    starts = [elements * number // threads // PART * PART for number in range(threads)]
    counts = [end - start for start, end in zip(starts, [*starts[1:], elements], strict=True)]

    def timed(start: int, count: int) -> float:
        begun = time.thread_time()
        call(start, count)
        return time.thread_time() - begun

    return lambda: max(pool.map(timed, starts, counts))


def take(*works: Work) -> list[tuple[float, ...]]:
    """In turn; each says its own time."""
    return in_turn(*works, rounds=ROUNDS, clock=lambda work: work())


def rows_of(kernels: Kernels, memory: Memory, compiler: str, threads: int) -> Iterator[Row]:
    with ThreadPoolExecutor(threads) as pool:
        read, copy = (shared(pool, threads, ELEMENTS, call) for call in (memory.read, memory.copy))
        for name, (kind, dtype) in product(NAMED, KINDS.items()):
            elements = SEARCHED if name.startswith("search") else ELEMENTS
            work = shared(pool, threads, elements, partial(kernels.call, name, kind))
            ours, reads, copies = take(work, read, copy)
            moved = (
                elements * np.dtype(dtype).itemsize / memory.nbytes
            )  # of the bytes that read and copy move
            rates = [
                size / statistics.median(taken) / 1e9 for size, taken in ((moved, ours), (1, reads))
            ]
            cells = [
                *(f"{rate * memory.nbytes:.1f}" for rate in rates),
                f"{moved * median_ratio(copies, ours):.2f}",
            ]
            bar = BARS.get((name, kind)) if (kernels.level, threads) == (4, 1) else None
            labels = (compiler, LEVELS[kernels.level], name, kind, str(threads))
            yield Row(
                labels,
                tuple(cells),
                moved * median_ratio(reads, ours),
                bar,
                AMAX_DECIMALS if name == "amax" else None,
            )


def copy_row(memory: Memory, threads: int) -> Row:
    """memcpy itself, by the bytes that it reads."""
    with ThreadPoolExecutor(threads) as pool:
        read, copy = (shared(pool, threads, ELEMENTS, call) for call in (memory.read, memory.copy))
        reads, copies = take(read, copy)
    rates = [memory.nbytes / statistics.median(taken) / 1e9 for taken in (copies, reads)]
    return Row(
        ("", "", "memcpy", "", str(threads)),
        (*(f"{rate:.1f}" for rate in rates), "1.00"),
        median_ratio(reads, copies),
    )


def hold_cores(threads: int, cores: list[int]) -> None:
    """Threads that are started from now on stay on the first cores; so does this one."""
    os.sched_setaffinity(0, cores[:threads])


def sections(is_quick: bool) -> list[Section]:
    """Quick: one thread alone, on the same bytes."""
    own, missing = compiled_libraries.installed(), ""
    compiler = compiled_libraries.compiler_of(own)
    memory, rows, cores = Memory(), [], sorted(os.sched_getaffinity(0))
    for threads in THREADS[:1] if is_quick else THREADS:
        if threads > len(cores):
            missing += f" Not measured with {threads} threads: {len(cores)} core."
            continue
        hold_cores(threads, cores)
        rows.append(copy_row(memory, threads))
        for level in LEVELS:
            kernels = Kernels(own, level, memory)
            if kernels.level == level:
                rows += rows_of(kernels, memory, compiler[0], threads)
    return [
        Section(TITLE, about(" ".join(compiler)) + missing, HEADINGS, tuple(rows), "share of read")
    ]


def about(compiler: str) -> str:
    return (
        "GB/s of input (dequantize: of output), and that as a share of the bandwidth of a pass "
        "that only reads, and of memcpy by"
        " the bytes it reads, both measured in turn with it on as many threads. Time is that for "
        "which the slowest thread had a"
        f" core; {ELEMENTS >> 20}M elements (search: {SEARCHED >> 20}M), medians of {ROUNDS}. "
        "quantize: rules amax and even;"
        f" search: mse. Bars hold for one thread with AVX-512, that of amax to {AMAX_DECIMALS} "
        f"decimals. The package was compiled by {compiler}."
    )
