"""A GPU without a GPU: the part of CuPy that programs use, over the kernels that simt.py runs.

Streams put everything off for as long as they may. What is started on one happens when something
waits for it, in the order of that stream alone; what another stream does is only seen after an
event was waited for. A wait that the program forgets therefore gives wrong bytes, on every run.
Memory is poisoned when it is allocated, and belongs to the device then current; after each kernel
nothing may have been written beside any of it.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy as real_cupy
import numpy as np
import pytest
from simt import POISON, guarded, is_intact, launch

from fp4convert.numerics.backends import gpus, self_check

LOCK = threading.RLock()
ELF = b"\x7fELF" + bytes(60)  # without any table
MAP_NORESERVE = 0x4000  # Linux; Python's mmap has no name for it before 3.13


class OutOfMemoryError(Exception):
    pass


class CUDARuntimeError(Exception):
    pass


class CUDADriverError(Exception):
    pass


class Machine:
    """The GPUs, as the modules that `import cupy` gives.

    is_eager  streams put nothing off; for programs that use one alone
    last      of each launch so many columns of the grid are run, the last ones; None: all
    """

    def __init__(
        self,
        libraries: dict[str, ctypes.CDLL],
        count: int = 1,
        capability: tuple[int, int] = (9, 0),
        is_eager: bool = False,
        last: int | None = None,
    ) -> None:
        self.libraries, self.is_eager, self.last = libraries, is_eager, last
        self.count = count
        self.capability = capability
        self.capabilities: dict[int, tuple[int, int]] = {}  # of GPUs that differ
        self.is_lost = False
        self.free_nbytes = 1 << 40
        self.allocations = 0
        self.refuse_allocation: Callable[[int], bool] = lambda number: False
        self.refuse_module: Callable[[bytes], bool] = lambda cubin: False
        self.launches: list[tuple[int, str]] = []
        self.streams: list[Stream] = []
        self.defaults: dict[int, Stream] = {}  # the default stream of each device
        self.copied: list[tuple[str, int]] = []  # to or from the host, and how many bytes
        self.held = weakref.WeakSet[Memory]()
        self.current = threading.local()

    def install(
        self, patched: pytest.MonkeyPatch, cache: Path | None = None, is_checked: bool = False
    ) -> None:
        """Put it into the place of CuPy; the driver shows it, and its first use is not checked.

        is_checked  it is, which takes a second; test_self_check.py has it
        """
        patched.setitem(sys.modules, "cupy", self.module())
        patched.setattr(gpus, "ask_driver", lambda: ((13, 0), self.count, ""))
        if not is_checked:
            patched.setattr(self_check, "check", lambda gpu: None)
        if cache:
            patched.setenv("XDG_CACHE_HOME", str(cache))

    def library_of(self, cubin: Path) -> ctypes.CDLL:
        """The kernels of a cubin, whose file tells which source it was made of."""
        return self.libraries[cubin.name.partition("-")[0]]

    def device(self) -> int:
        return getattr(self.current, "device", 0)

    def stream(self, ptr: int = 0) -> Stream:
        """The stream that CUDA calls so; 0 and 1 are the default one of the device."""
        if ptr not in (0, 1):
            return next(stream for stream in self.streams if stream.ptr == ptr)
        return self.defaults.setdefault(self.device(), Stream(self, 0))

    def current_stream(self) -> Stream:
        entered = getattr(self.current, "streams", [])
        return entered[-1] if entered else self.stream()

    def copy(self, to: int, source: int, nbytes: int, kind: int, ptr: int) -> None:
        """cudaMemcpyAsync; what comes from pageable memory is read at once."""
        self.copied.append((("up", "down", "there")[kind - 1], nbytes))
        data = ctypes.string_at(source, nbytes) if kind == 1 else None
        self.stream(ptr).start(lambda: ctypes.memmove(to, data or source, nbytes))

    def allocate(self, nbytes: int) -> Memory:
        self.allocations += 1
        if self.refuse_allocation(self.allocations):
            raise OutOfMemoryError
        return Memory(self, nbytes)

    def unfinished(self) -> int:
        """Parts of work that were started and have not happened."""
        return sum(len(stream.queue) - stream.done for stream in self.streams)

    def properties(self, number: int) -> dict[str, Any]:
        major, minor = self.capabilities.get(number, self.capability)
        return {
            "name": b"Imaginary GPU",
            "major": major,
            "minor": minor,
            "totalGlobalMem": 1 << 34,
            "l2CacheSize": 1 << 12,
            "number": number,
        }

    def module(self) -> ModuleType:
        """What stands in sys.modules for cupy."""
        cupy = ModuleType("cupy")
        cupy.__version__ = "0.0"
        cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        cupy._environment = real_cupy._environment  # which NVRTC, the real one, asks
        cupy.RawModule = lambda path: RawModule(self, path)
        cupy.cuda = SimpleNamespace(
            Device=lambda number: Device(self, number),
            Stream=lambda non_blocking: Stream(self),
            ExternalStream=self.stream,
            get_current_stream=self.current_stream,
            Event=lambda block=False, disable_timing=True: Event(self),
            get_elapsed_time=lambda start, stop: 1e3 * (stop.seconds - start.seconds) + 1e-6,
            set_allocator=lambda allocate: None,
            alloc=self.allocate,
            alloc_pinned_memory=Pinned,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                getDevice=self.device,
                getDeviceProperties=self.properties,
                CUDARuntimeError=CUDARuntimeError,
                memcpyAsync=self.copy,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                memcpyDeviceToDevice=3,
                pointerGetAttributes=lambda address: SimpleNamespace(device=self.owner_of(address)),
            ),
        )
        cupy.empty = lambda shape, dtype: Array(self, shape, np.dtype(dtype))
        cupy.zeros = lambda nbytes, dtype: Array(self, nbytes, np.dtype(dtype), _zeros(nbytes))
        cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
        cupy.ndarray = Array
        return cupy

    def owner_of(self, address: int) -> int:
        """The device that an address belongs to; cudaInvalidDeviceId for none."""
        own = (memory.device for memory in self.held if 0 <= address - memory.ptr < memory.nbytes)
        return next(own, -2)

    def check_margins(self) -> None:
        """Nothing was written beside memory of any device."""
        with LOCK:
            assert all(is_intact(memory.bytes) for memory in self.held)


class Device:
    def __init__(self, machine: Machine, number: int) -> None:
        assert number < machine.count
        self.machine, self.number = machine, number
        self.outer: list[int] = []
        self.mem_info = (machine.free_nbytes, 1 << 41)

    def __enter__(self) -> Device:
        self.outer.append(self.machine.device())
        self.machine.current.device = self.number
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.current.device = self.outer.pop()


class Stream:
    """Work that was started, of which the first `done` parts have happened."""

    def __init__(self, machine: Machine, ptr: int | None = None) -> None:
        self.machine, self.device = machine, machine.device()
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.ptr = 4096 + len(machine.streams) if ptr is None else ptr
        machine.streams.append(self)

    def __enter__(self) -> Stream:
        vars(self.machine.current).setdefault("streams", []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.current.streams.pop()

    def start(self, work: Callable[[], None]) -> None:
        with LOCK:
            self.queue.append(work)
            if self.machine.is_eager:
                self.run_to(len(self.queue))

    def run_to(self, position: int) -> None:
        with LOCK:
            while self.done < position:
                self.done += 1  # first: a stream that waited for itself would not end
                self.queue[self.done - 1]()
                self.queue[self.done - 1] = lambda: None

    def synchronize(self) -> None:
        if self.machine.is_lost:
            raise CUDARuntimeError("cudaErrorIllegalAddress: the GPU is lost")
        self.run_to(len(self.queue))

    def wait_event(self, event: Event) -> None:
        recorded = event.recorded
        if recorded:
            self.start(lambda: recorded[0].run_to(recorded[1]))


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current_stream()
        self.recorded = (stream, len(stream.queue))
        self.seconds = time.perf_counter()  # a clock that goes on, and measures nothing

    def synchronize(self) -> None:
        if self.recorded:
            self.recorded[0].run_to(self.recorded[1])


class Memory:
    """A device's memory, as the pointer to it."""

    def __init__(self, machine: Machine, nbytes: int, held: np.ndarray | None = None) -> None:
        self.machine, self.device, self.nbytes = machine, machine.device(), nbytes
        self.bytes = guarded(nbytes) if held is None else held
        self.ptr = self.bytes.ctypes.data
        self.mem = SimpleNamespace(size=nbytes)
        with LOCK:
            machine.held.add(self)
        if getattr(machine.current, "streams", []):  # as CuPy's pool: later work there takes it
            weakref.finalize(self, _reuse, machine.current_stream(), self.bytes)

    def copy_from_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
        self._copy("up", (self.ptr, address), nbytes, stream)

    def copy_to_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
        self._copy("down", (address, self.ptr), nbytes, stream)

    def copy_from_device_async(self, source: Memory, nbytes: int) -> None:
        assert nbytes <= source.nbytes
        self._copy("there", (self.ptr, source.ptr), nbytes, self.machine.current_stream())

    def _copy(self, way: str, ends: tuple[int, int], nbytes: int, stream: Stream) -> None:
        assert nbytes <= self.nbytes
        assert self.device == stream.device == self.machine.device()
        self.machine.copied.append((way, nbytes))
        stream.start(lambda: ctypes.memmove(*ends, nbytes))

    def __add__(self, start: int) -> Memory:
        """Its end, from there on, which keeps it."""
        later = object.__new__(Memory)
        later.whole = self
        later.machine, later.device, later.nbytes = self.machine, self.device, self.nbytes - start
        later.bytes, later.ptr, later.mem = self.bytes, self.ptr + start, self.mem
        return later

    def memset_async(self, value: int, nbytes: int, stream: Stream | None = None) -> None:
        assert nbytes <= self.nbytes
        stream = stream or self.machine.current_stream()
        stream.start(lambda: ctypes.memset(self.ptr, value, nbytes))


def _reuse(stream: Stream, freed: np.ndarray) -> None:
    stream.start(lambda: freed.fill(POISON))


def _zeros(nbytes: int) -> np.ndarray:
    """Memory that is there when it is touched, so that there may be more than the host has."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


class Array:
    """An array of CuPy, on the device that is current."""

    def __init__(
        self,
        machine: Machine,
        shape: int | tuple[int, ...],
        dtype: np.dtype,
        held: np.ndarray | None = None,
    ) -> None:
        self.machine, self.dtype = machine, dtype
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * dtype.itemsize
        given = machine.allocate(self.nbytes) if held is None else None
        self.data = given or Memory(machine, self.nbytes, held)

    def __getitem__(self, part: slice) -> Array:
        """A part of bytes, which keeps the whole."""
        first, last, _ = part.indices(self.size)
        found = object.__new__(Array)
        found.machine, found.dtype, found.data = self.machine, self.dtype, self.data + first
        found.shape, found.size, found.nbytes = (last - first,), last - first, last - first
        return found

    def set(self, values: np.ndarray) -> None:
        assert (values.dtype, values.size) == (np.uint8, self.size)
        data = values.tobytes()
        self.machine.current_stream().start(lambda: ctypes.memmove(self.data.ptr, data, len(data)))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device

    def __dlpack__(self, *, stream: int) -> object:
        raise BufferError("dtype is not supported for dlpack export")  # as of bf16, here of all

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self.machine.current_stream().ptr
        typestr = self.dtype.str if self.dtype.kind != "V" else f"<V{self.dtype.itemsize}"
        data = (self.data.ptr, False)
        return {"typestr": typestr, "shape": self.shape, "data": data, "stream": stream}

    def get(self) -> np.ndarray:
        """What is there when the device has done all it was given."""
        for stream in self.machine.streams:
            stream.synchronize()
        found = ctypes.string_at(self.data.ptr, self.nbytes)
        return np.frombuffer(found, self.dtype).reshape(self.shape)


class Pinned(np.ndarray):
    """Page-locked memory: a buffer with an address."""

    def __new__(cls, nbytes: int) -> Pinned:
        made = guarded(nbytes).view(cls)
        made.ptr = made.ctypes.data
        return made


class RawModule:
    """The kernels of one cubin; as in CuPy it is read when a kernel is asked for, not before."""

    def __init__(self, machine: Machine, path: str) -> None:
        self.machine, self.path = machine, Path(path)
        self.device = machine.device()

    def get_function(self, name: str) -> Callable[..., None]:
        machine, cubin = self.machine, self.path.read_bytes()
        assert cubin[:4] == b"\x7fELF"
        if machine.refuse_module(cubin):
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        library = machine.library_of(self.path)

        def run(grid: tuple[int, ...], threads: int, arguments: tuple[int, ...]) -> None:
            launch(library, name, grid, arguments, threads, machine.last)
            machine.check_margins()

        def start(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            arguments: tuple[int, ...],
            stream: Stream | None = None,
        ) -> None:
            stream = stream or machine.current_stream()
            assert self.device == stream.device == machine.device()
            assert all(type(argument) is int for argument in arguments)
            assert 0 < grid[0] < 1 << 31
            assert all(0 < count < 1 << 16 for count in grid[1:])
            machine.launches.append((stream.device, name))
            stream.start(lambda: run(grid, block[0], arguments))

        return start
