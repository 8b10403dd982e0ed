"""The CUDA kernels on the host: simt.h stands in for the hardware, the sources are those that GPUs get.

Decides how kernels are built and launched there; what they must give is codec.py's business.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4convert.codec import FLOAT_DTYPES, global_scale_of
from fp4convert.formats import FLOAT_TYPES, Format, Matrix, Quantized

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels"
FLAGS = "-x c++ -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC".split()
ELEMENTS_PER_BLOCK = 8192  # as kernels/device.h says

Array = NDArray[np.generic]


def compile_for_host(source: Path, folder: Path, headers: Path = KERNELS) -> ctypes.CDLL:
    """The kernels of one .cu file as a library of the host's own."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed to run the CUDA kernels on the host"
    library = folder / f"{source.stem}.so"
    where = [f"-I{headers}", f"-I{source.parent}", "-include", str(TESTS / "simt.h")]
    subprocess.run([compiler, *FLAGS, *where, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def launch(library: ctypes.CDLL, name: str, grid: tuple[int, int], arguments: Iterable[int], threads: int = 256) -> None:
    """Run one kernel to its end; `arguments` are addresses and integers, 64 bits each."""
    words = (ctypes.c_int64 * 11)(*arguments)
    kernel = ctypes.cast(library[name], ctypes.c_void_p)
    x, y = (ctypes.c_int64(size) for size in grid)
    library.simt_launch(kernel, x, y, ctypes.c_int64(threads), words)


def guarded(nbytes: int) -> Array:
    """`nbytes` that start on a 16-byte boundary, as device memory does, full of 0xAA."""
    raw = np.full(nbytes + 16, 0xAA, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + nbytes]


def aligned(data: Array | memoryview) -> Array:
    raw = np.frombuffer(data, np.uint8)
    copy = guarded(raw.size)
    copy[:] = raw
    return copy


class SimtKernels:
    """The elementwise kernels with a backend's methods, so that tests of backends fit."""

    name = "simt"

    def __init__(self, folder: Path, kernels: Path = KERNELS) -> None:
        self._libraries = [compile_for_host(kernels / f"{stem}.cu", folder, kernels) for stem in ("quantize", "dequantize")]

    def amax(self, x: Matrix) -> float:
        values, found = aligned(x.data), np.zeros(1, np.uint32)
        n = x.shape[0] * x.shape[1]
        self._call(f"amax_{FLOAT_TYPES[x.dtype].word}", n, values, n, found)
        return float(found.view(np.float32)[0])

    def quantize(self, x: Matrix, fmt: Format, rule: str, group_amax: float) -> Quantized:
        values, n = aligned(x.data), x.shape[0] * x.shape[1]
        packed, block_scales = guarded(n // 2), guarded(n // fmt.block_size)
        extra = np.array([group_amax], np.float32) if fmt.has_global_scale else fmt.scale_rules.index(rule)
        self._call(f"quantize_{fmt.name}_{FLOAT_TYPES[x.dtype].word}", n, values, n, extra, packed, block_scales)
        stored = float(global_scale_of(group_amax)) if fmt.has_global_scale else None
        return Quantized(fmt, x.shape, packed.data, block_scales.data, stored)

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        n = q.shape[0] * q.shape[1]
        packed, block_scales = aligned(q.packed), aligned(q.block_scales)
        values = guarded(n * FLOAT_DTYPES[dtype].itemsize)
        extra = (np.array([q.global_scale], np.float32), int(q.kind == "divisor")) if q.format.has_global_scale else ()
        self._call(f"dequantize_{q.format.name}_{FLOAT_TYPES[dtype].word}", n, packed, block_scales, n, *extra, values)
        return values.data

    def _call(self, name: str, n: int, *arguments: Array | int) -> None:
        library = self._libraries[name.startswith("dequantize")]
        words = [a if isinstance(a, int) else a.ctypes.data for a in arguments]
        launch(library, name, (-(-n // ELEMENTS_PER_BLOCK), 1), words)
