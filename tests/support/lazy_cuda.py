"""A stand-in for the part of CuPy that cuda_*.py use: streams put everything off for as long
as they may.

What is started on a stream happens when something waits for it, in the order of that stream alone;
what another stream does
is only seen after an event was waited for.  A wait that the program forgets therefore gives wrong
bytes, on every run.  Kernels
are those of kernels/*.cu, run by simt.py.  Memory is poisoned when it is allocated, and belongs to
the device then current.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy as real_cupy
import numpy as np
from simt import POISON, guarded, launch

LOCK = threading.RLock()


class OutOfMemoryError(Exception):
    pass


class CUDARuntimeError(Exception):
    pass


class CUDADriverError(Exception):
    pass


class Machine:
    """The GPUs, as the modules that `import cupy` gives."""

    def __init__(
        self,
        libraries: dict[str, ctypes.CDLL],
        count: int = 1,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.libraries = libraries
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
            "number": number,
        }

    def module(self) -> ModuleType:
        """What stands in sys.modules for cupy."""
        cupy = ModuleType("cupy")
        cupy.__version__ = "0.0"
        cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        cupy._environment = (
            real_cupy._environment
        )  # where NVRTC, which is the real one, asks for its library
        cupy.RawModule = lambda path: RawModule(self, path)
        cupy.cuda = SimpleNamespace(
            Device=lambda number: Device(self, number),
            Stream=lambda non_blocking: Stream(self),
            ExternalStream=self.stream,
            get_current_stream=self.current_stream,
            Event=lambda block, disable_timing: Event(),
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
        cupy.ndarray = Array
        return cupy

    def owner_of(self, address: int) -> int:
        """The device that an address belongs to; cudaInvalidDeviceId for none."""
        own = (memory.device for memory in self.held if 0 <= address - memory.ptr < memory.nbytes)
        return next(own, -2)


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
    def __init__(self) -> None:
        self.recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = (stream, len(stream.queue))

    def synchronize(self) -> None:
        if self.recorded:
            self.recorded[0].run_to(self.recorded[1])


class Memory:
    """A device's memory, as the pointer to it."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self.device, self.nbytes = machine.device(), nbytes
        self.bytes = guarded(nbytes)
        self.ptr = self.bytes.ctypes.data
        self.mem = SimpleNamespace(size=nbytes)
        machine.held.add(self)
        if getattr(machine.current, "streams", []):  # as CuPy's pool: later work there takes it
            weakref.finalize(self, _reuse, machine.current_stream(), self.bytes)

    def copy_from_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
        assert nbytes <= self.nbytes
        assert self.device == stream.device == stream.machine.device()
        stream.machine.copied.append(("up", nbytes))
        stream.start(lambda: ctypes.memmove(self.ptr, address, nbytes))

    def copy_to_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
        assert nbytes <= self.nbytes
        assert self.device == stream.device == stream.machine.device()
        stream.machine.copied.append(("down", nbytes))
        stream.start(lambda: ctypes.memmove(address, self.ptr, nbytes))

    def __add__(self, start: int) -> Memory:
        """Its end, from there on, which keeps it."""
        later = object.__new__(Memory)
        later.device, later.nbytes = self.device, self.nbytes - start
        later.bytes, later.ptr, later.mem = self.bytes, self.ptr + start, self.mem
        return later

    def memset_async(self, value: int, nbytes: int, stream: Stream) -> None:
        assert nbytes <= self.nbytes
        stream.start(lambda: ctypes.memset(self.ptr, value, nbytes))


def _reuse(stream: Stream, freed: np.ndarray) -> None:
    stream.start(lambda: freed.fill(POISON))


class Array:
    """An array of CuPy, on the device that is current."""

    def __init__(self, machine: Machine, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.machine, self.shape, self.dtype = machine, tuple(shape), dtype
        self.data = machine.allocate(math.prod(shape) * dtype.itemsize)

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
        return self.data.bytes.view(self.dtype).reshape(self.shape).copy()


class Pinned(np.ndarray):
    """Page-locked memory: a buffer with an address."""

    def __new__(cls, nbytes: int) -> Pinned:
        made = guarded(nbytes).view(cls)
        made.ptr = made.ctypes.data
        return made


class RawModule:
    """The kernels of one cubin; the file tells which source it was made of.

    As in CuPy it is read when a kernel is asked for, not before.
    """

    def __init__(self, machine: Machine, path: str) -> None:
        self.machine, self.path = machine, Path(path)
        self.device = machine.device()

    def get_function(self, name: str) -> Callable[..., None]:
        cubin = self.path.read_bytes()
        assert cubin[:4] == b"\x7fELF"
        if self.machine.refuse_module(cubin):
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        library = self.machine.libraries[self.path.name.partition("-")[0]]

        def start(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            arguments: tuple[int, ...],
            stream: Stream,
        ) -> None:
            assert self.device == stream.device == self.machine.device()
            assert all(type(argument) is int for argument in arguments)
            assert 0 < grid[0] < 1 << 31
            assert all(0 < count < 1 << 16 for count in grid[1:])
            self.machine.launches.append((stream.device, name))
            stream.start(lambda: launch(library, name, grid, arguments, block[0]))

        return start
