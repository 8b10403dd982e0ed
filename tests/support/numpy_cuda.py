"""A stand-in for the part of CuPy that benchmarks/gpu uses: arrays of NumPy, everything at once.

Kernels are those of the .cu files, run by simt.py; a clock goes on, which measures nothing.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy as real_cupy
import numpy as np
from lazy_cuda import CUDADriverError, CUDARuntimeError, OutOfMemoryError
from simt import guarded, is_intact, launch

MAP_NORESERVE = 0x4000  # Linux; Python's mmap has no name for it before 3.13
Build = Callable[[Path], ctypes.CDLL]


class Pointer:
    """The address of an array, and what can be done there."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.ptr = values, values.ctypes.data

    def memset_async(self, value: int, nbytes: int, stream: object = None) -> None:
        self.values[:nbytes] = value

    def copy_from_device_async(self, source: Pointer, nbytes: int, stream: object = None) -> None:
        assert nbytes == self.values.nbytes == source.values.nbytes
        self.values[:] = source.values


class Array:
    """Bytes on the device."""

    def __init__(self, values: np.ndarray) -> None:
        self.data, self.nbytes, self.size = Pointer(values), values.nbytes, values.size

    def __getitem__(self, part: slice) -> Array:
        return Array(self.data.values[part])

    def set(self, values: np.ndarray) -> None:
        assert (values.dtype, values.size) == (np.uint8, self.size)
        self.data.values[:] = values

    def get(self) -> np.ndarray:
        return self.data.values.copy()


class Event:
    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        assert self.seconds


class Device:
    def __init__(self, number: int) -> None:
        self.mem_info = (1 << 37, 1 << 37)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Gpu:
    """One GPU, as the module that `import cupy` gives.

    build  path of a cubin -> its kernels for the host
    last   of each launch so many columns of the grid are run, the last ones; None: all
    """

    def __init__(self, build: Build, capability: tuple[int, int], last: int | None = None) -> None:
        self.build, self.capability, self.last = build, capability, last
        self.launched: set[str] = set()
        self.arrays: list[np.ndarray] = []

    def properties(self, number: int) -> dict[str, Any]:
        major, minor = self.capability
        sizes = {"totalGlobalMem": 1 << 37, "l2CacheSize": 1 << 12}
        return {"name": b"NumPy GPU", "major": major, "minor": minor, **sizes}

    def empty(self, nbytes: int, dtype: object) -> Array:
        self.arrays.append(guarded(nbytes))
        return Array(self.arrays[-1])

    def zeros(self, nbytes: int, dtype: object) -> Array:
        """Memory that is there when it is touched, so that there may be more than the host has."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return Array(np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8))

    def module(self) -> ModuleType:
        cupy = ModuleType("cupy")
        cupy.__version__ = "0.0"
        cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        cupy._environment = real_cupy._environment  # NVRTC, which is the real one, asks it
        cupy.empty, cupy.zeros = self.empty, self.zeros
        cupy.RawModule = lambda path: SimpleNamespace(
            get_function=lambda name: self._function(Path(path), name)
        )
        cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
        cupy.cuda = SimpleNamespace(
            set_allocator=lambda allocate: None,
            Event=Event,
            Device=Device,
            get_elapsed_time=lambda start, stop: 1e3 * (stop.seconds - start.seconds) + 1e-6,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                getDeviceProperties=self.properties, CUDARuntimeError=CUDARuntimeError
            ),
        )
        return cupy

    def _function(self, cubin: Path, name: str) -> Callable[..., None]:
        library = self.build(cubin)

        def start(
            grid: Sequence[int],
            block: Sequence[int],
            arguments: Sequence[int],
            stream: object = None,
        ) -> None:
            assert all(type(argument) is int for argument in arguments)
            self.launched.add(name)
            launch(library, name, tuple(grid), arguments, block[0], self.last)

        return start

    def check_margins(self) -> None:
        """Nothing was written beside an array."""
        assert all(map(is_intact, self.arrays))
