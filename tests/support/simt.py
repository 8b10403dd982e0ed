"""The CUDA kernels on the host: simt.h stands in for the hardware, the sources are those that GPUs
get.

Decides how kernels are built and launched there; what they must give is codec.py's business.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from paths import ROOT, SUPPORT

from fp4convert.numerics.backends import entry_points
from fp4convert.numerics.backends.cpu import native_grid
from fp4convert.numerics.backends.entry_points import Call, Codes, Values, entry_of
from fp4convert.numerics.codec import FLOAT_DTYPES, Bytes, Float32s, global_scale_of, weigh
from fp4convert.numerics.descent import check_shapes, gpu_room_nbytes
from fp4convert.numerics.formats import CODES, ROW_SUMS, Format
from fp4convert.numerics.fp8_int import Float64s, Grid
from fp4convert.numerics.matrices import Compared, Matrix, Quantized

KERNELS = ROOT / "kernels"
BUILT = ROOT / "build" / "simt"  # what was compiled, by the digest of all that it was made of
FLAGS = [
    "-x",
    "c++",
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
]
ELEMENTS_PER_BLOCK = 8192  # as kernels/device.h says
POISON = 0xFF  # beside every buffer: NaN in all dtypes and as a block scale
MARGIN = 4 * ELEMENTS_PER_BLOCK  # bytes that a launch block without a tail rule could write

# What device.h takes from targets that have FP4_CVT; unlike e2m1_encode, the hardware keeps the
# sign of -0.0.
CVT = """
#define FP4_CVT
static inline unsigned round8_e2m1(const float *v) {
    unsigned codes = 0;
    for (int i = 0; i < 8; i++)
        codes |= ((e2m1_encode(v[i]) & 7u) | (std::signbit(v[i]) ? 8u : 0u)) << 4 * i;
    return codes;
}
static inline unsigned round2_e2m1(float low, float high) {
    return narrow2_fp16(e2m1_decode(e2m1_encode(low)), e2m1_decode(e2m1_encode(high)));
}
static inline void widen8_e2m1(unsigned codes, unsigned *pairs) {
    for (int i = 0; i < 4; i++)
        pairs[i] = narrow2_fp16(e2m1_decode(codes >> 8 * i), e2m1_decode(codes >> (8 * i + 4)));
}
"""

Array = NDArray[np.generic]


def compile_for_host(source: Path, folder: Path, has_cvt: bool = False) -> ctypes.CDLL:
    """The kernels of one .cu file as a library of the host's own; `has_cvt` as in cubins.Target.

    The same sources are compiled once, whatever their file is called: workers and runs share it.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed to run the CUDA kernels on the host"
    folders = (source.parent, KERNELS, SUPPORT)
    headers = [file for folder in folders for file in sorted(folder.glob("*.*h"))]
    read = dict.fromkeys((file.name, file.read_bytes()) for file in headers)
    made_of = (compiler, os.stat(compiler).st_mtime_ns, FLAGS, CVT * has_cvt, source.read_bytes())
    digest = hashlib.sha256(repr((made_of, list(read))).encode()).hexdigest()
    library = BUILT / f"{digest[:32]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            wrapper, part = folder / f"{source.stem}.cpp", library.with_suffix(".part")
            wrapper.write_text(f'#include "simt.h"\n{CVT * has_cvt}\n#include "{source.name}"\n')
            where = [f"-I{folder}" for folder in folders]
            subprocess.run([compiler, *FLAGS, *where, str(wrapper), "-o", str(part)], check=True)
            part.replace(library)
    return ctypes.CDLL(str(library))


def launch(
    library: ctypes.CDLL,
    name: str,
    grid: tuple[int, ...],
    arguments: Iterable[int],
    threads: int = 256,
    last: int | None = None,
) -> None:
    """Run one kernel to its end; `arguments` are addresses and integers, 64 bits each.

    grid  of one to three numbers
    last  so many columns of the grid are run, the last ones; None: all
    """
    words = (ctypes.c_int64 * 11)(*arguments)
    kernel = ctypes.cast(library[name], ctypes.c_void_p)
    first = 0 if last is None else max(0, grid[0] - last)
    numbers = (ctypes.c_int64(number) for number in (first, *(*grid, 1, 1)[:3], threads))
    library.simt_launch(kernel, *numbers, words)


def guarded(nbytes: int) -> Array:
    """`nbytes` of poison between margins of it, on a 16-byte boundary, as device memory is."""
    raw = np.full(nbytes + 2 * MARGIN + 16, POISON, np.uint8)
    start = MARGIN + -raw.ctypes.data % 16
    return raw[start : start + nbytes]


def is_intact(buffer: Array) -> bool:
    """Whether nothing was written beside a buffer that `guarded` made;
    true of what has no margins.
    """
    raw = buffer.base
    if not isinstance(raw, np.ndarray) or raw.size < buffer.size + 2 * MARGIN:
        return True
    start = buffer.ctypes.data - raw.ctypes.data
    return bool((raw[:start] == POISON).all() and (raw[start + buffer.size :] == POISON).all())


def aligned(data: Array | memoryview) -> Array:
    """A copy of the bytes, guarded."""
    raw = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
    copy = guarded(raw.size)
    copy[:] = raw
    return copy


def walled(nbytes: int) -> Array:
    """`nbytes` of zeros that end where reading ends the process."""
    pages = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    raw = np.frombuffer(pages, np.uint8)
    wall = raw.ctypes.data + raw.size - mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return raw[raw.size - mmap.PAGESIZE - nbytes : raw.size - mmap.PAGESIZE]


def survives(call: Callable[[], object]) -> bool:
    """Whether a child process that makes the call lives to its end."""
    child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def values_of(x: Matrix) -> Values:
    return Values(x.dtype, aligned(x.data), x.shape)


def codes_of(q: Quantized) -> Codes:
    stored = aligned(np.array([q.global_scale or 0], np.float32))
    return Codes(q.format, aligned(q.packed), aligned(q.block_scales), stored, q.kind)


def grid_of(shape: tuple[int, int], grid: Grid) -> tuple[Array, Array]:
    scales, layout = native_grid(grid, shape)
    return aligned(scales), aligned(layout)


class SimtKernels:
    """The CUDA kernels with the methods of backends.cpu.Cpu, so that tests of these fit.

    widened  how many times as many elements as shipped a block of the elementwise kernels takes
    """

    name = "simt"

    def __init__(
        self,
        folder: Path,
        kernels: Path = KERNELS,
        has_cvt: bool = False,
        build: Callable[[Path, Path, bool], ctypes.CDLL] = compile_for_host,
        widened: float = 1,
    ) -> None:
        # Each file when one of its kernels is launched first.
        self._library = cache(lambda file: build(kernels / file, folder, has_cvt))
        self._widened = widened

    def amax(self, x: Matrix, so_far: float = 0.0) -> float:
        found = aligned(np.array([so_far], np.float32))
        values = values_of(x)
        self.call(entry_points.amax_call(values, found), values.n)
        return float(found.view(np.float32)[0])

    def quantize(
        self,
        x: Matrix,
        fmt: Format,
        rule: str,
        group_amax: float,
        importance: Float32s | None = None,
    ) -> Quantized:
        values = values_of(x)
        packed, block_scales = guarded(values.n // 2), guarded(values.n // fmt.block_size)
        columns = x.shape[1]
        weights = () if importance is None else (aligned(weigh(importance, columns, fmt)), columns)
        amax, codes = aligned(np.array([group_amax], np.float32)), Codes(fmt, packed, block_scales)
        self.call(entry_points.quantize_call(values, codes, rule, amax, weights), values.n)
        stored = float(global_scale_of(group_amax, rule)) if fmt.has_global_scale else None
        return Quantized(fmt, x.shape, packed.data, block_scales.data, stored)

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        n = q.shape[0] * q.shape[1]
        values = guarded(n * FLOAT_DTYPES[dtype].itemsize)
        self.call(entry_points.dequantize_call(codes_of(q), Values(dtype, values, q.shape)), n)
        return values.data

    def compare(self, x: Matrix, q: Quantized) -> Compared:
        rows, codes = x.shape[0], codes_of(q)
        sums, counts = guarded(rows * 8 * ROW_SUMS), aligned(np.zeros(CODES, np.int64))
        self.call(entry_points.compare_call(values_of(x), codes, sums), rows)
        nbytes = codes.packed.size
        self.call(entry_points.count_call(codes.packed, nbytes, counts), 2 * nbytes)
        return Compared(sums.data, counts.data)

    def compare_values(self, x: Matrix, y: Float32s) -> Compared:
        rows = x.shape[0]
        sums = guarded(8 * ROW_SUMS * rows)
        self.call(entry_points.compare_values_call(values_of(x), aligned(y), sums), rows)
        return Compared(sums.data, memoryview(b""))

    def grid_amax(self, x: Matrix, grid: Grid) -> None:
        values, (amaxes, layout) = values_of(x), grid_of(x.shape, grid)
        self.call(entry_points.grid_amax_call(values, layout, amaxes), values.n)
        grid.scales[...] = amaxes.view(np.float32).reshape(grid.scales.shape)

    def quantize_fp8(self, x: Matrix, grid: Grid) -> Bytes:
        values, (scales, layout) = values_of(x), grid_of(x.shape, grid)
        codes = guarded(values.n)
        self.call(entry_points.quantize_fp8_call(values, scales, layout, codes), values.n)
        return codes.reshape(x.shape)

    def fp8_costs(self, x: Matrix, grid: Grid, costs: Float64s) -> None:
        (rows, _), across, height = x.shape, costs.shape[1], grid.block[0]
        scales, layout = grid_of(x.shape, grid)
        row_costs, sums = guarded(8 * rows * across), aligned(costs)
        call = entry_points.row_costs_call(values_of(x), scales, layout, row_costs)
        self.call(call, rows * across)
        first, last = grid.first_row // height, (grid.first_row + rows - 1) // height
        self.call(("add_costs", (row_costs, layout, sums)), (last - first + 1) * across)
        costs[...] = sums.view(np.float64).reshape(costs.shape)

    def decode_fp8(self, codes: memoryview, shape: tuple[int, int], grid: Grid) -> Float32s:
        scales, layout = native_grid(grid, shape)
        return self._decode("decode_fp8", shape, codes, scales, layout)

    def decode_integers(
        self,
        packed: memoryview,
        shape: tuple[int, int],
        grid: Grid,
        bits: int = 4,
        zero_points: Float32s | None = None,
    ) -> Float32s:
        scales, layout = native_grid(grid, shape)
        zeros = 0 if zero_points is None else zero_points
        return self._decode(f"decode_int{bits}", shape, packed, scales, zeros, layout)

    def _decode(
        self, name: str, shape: tuple[int, int], *given: Array | memoryview | int
    ) -> Float32s:
        n = shape[0] * shape[1]
        return self._written(name, 4 * n, (n,), *given).view(np.float32).reshape(shape)

    def transpose(self, stored: Matrix, columns: range) -> Matrix:
        rows, width = stored.shape
        numbers = rows, width, columns.start, columns.step, len(columns)
        nbytes = len(stored.data) // (rows * width)
        counts = rows, len(columns)
        turned = self._written(
            f"transpose_{nbytes}", nbytes * rows * len(columns), counts, stored.data, *numbers
        )
        return Matrix(turned.data, stored.dtype, (len(columns), rows))

    def descend(self, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
        """All rows of a matrix in one launch."""
        check_shapes(x, q, h)
        (rows, columns), width = x.shape, h.shape[1]
        codes, sizes = codes_of(q), aligned(np.array([rows, columns, width, passes, 0]))
        written = [guarded(codes.packed.size), guarded(codes.block_scales.size)]
        given, room = (aligned(x), aligned(h), sizes), guarded(gpu_room_nbytes(rows, width))
        self.call(entry_points.descend_call(given, codes, Codes(q.format, *written), room), rows)
        found = (part.data for part in written)
        return Quantized(q.format, q.shape, *found, q.global_scale, q.kind)

    def _written(
        self, name: str, nbytes: int, counts: tuple[int, ...], *given: Array | memoryview | int
    ) -> Array:
        """What a kernel writes behind its arguments; nothing into what it reads."""
        held = [a if isinstance(a, int) else aligned(a) for a in given]
        y = guarded(nbytes)
        self.call((name, (*held, y)), *counts)
        for before, own in zip(given, held, strict=True):
            assert isinstance(before, int) or own.tobytes() == aligned(before).tobytes()
        return y

    def call(self, call: Call, first: int, second: int = 1) -> None:
        """Launch a kernel, as grid_of counts; nothing may be written beside its arguments."""
        name, arguments = call
        entry = entry_of(name)
        wide = self._widened if entry.across == ELEMENTS_PER_BLOCK else 1
        grid = (-(-first // round(entry.across * wide)), -(-second // entry.down))
        places = [a if isinstance(a, int) else a.ctypes.data for a in arguments]
        launch(self._library(entry.file), name, grid, places)
        for argument in arguments:
            assert isinstance(argument, int) or is_intact(argument), (
                f"{name}, n = {first}: written beside a buffer"
            )
