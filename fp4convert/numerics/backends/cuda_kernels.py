"""Load the kernels of a GPU, start them, and hold memory for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any, NoReturn

from fp4convert.errors import DeviceError
from fp4convert.numerics.backends import cubins
from fp4convert.numerics.backends.entry_points import Call, entry_of, grid_of
from fp4convert.numerics.backends.gpus import Gpu

RESIDENT_SHARE = 0.8  # of the free device memory: panels that stay between the passes
THREADS = 256  # of a block: kernels/device.h
ALIGNMENT = 16  # of every part of a buffer


class Kernels:
    """The compiled kernels of one GPU, loaded when they are first wanted."""

    def __init__(self, gpu: Gpu) -> None:
        import cupy

        self.cupy = cupy
        self.gpu = gpu
        self._room_nbytes: int | None = None
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def room_nbytes(self) -> int:
        """Measure device memory for panels that stay, once."""
        with self._lock:
            if self._room_nbytes is None:
                with self.cupy.cuda.Device(self.gpu.number) as device:
                    self._room_nbytes = int(RESIDENT_SHARE * device.mem_info[0])
            return self._room_nbytes

    def launch(self, call: Call, stream: Any, *counts: int) -> None:
        """Start a kernel, on the GPU that must be current.

        call    its arguments are addresses and integers, which CuPy passes as 64 bits each
        counts  of elements, or of rows and vectors or columns, and of matrices: `grid_of`
        """
        name, arguments = call
        # Generators of two GPUs that take turns in a thread would leave the other's current.
        if (current := self.cupy.cuda.runtime.getDevice()) != self.gpu.number:
            raise RuntimeError(f"{name} is for cuda:{self.gpu.number}; cuda:{current} is current")
        with self._lock:
            if name not in self._functions:
                self._functions[name] = self._load(name)
        self._functions[name](grid_of(name, *counts), (THREADS,), arguments, stream=stream)

    def _load(self, name: str) -> Any:
        """Load a kernel; a cubin that the driver refuses is made again, once."""
        source = cubins.kernels_folder() / entry_of(name).file
        path = cubins.cubin_path(source, self.gpu.target)
        try:
            return self.cupy.RawModule(path=str(path)).get_function(name)
        except self.cupy.cuda.driver.CUDADriverError:
            cubins.discard(path)
            path = cubins.cubin_path(source, self.gpu.target)
            return self.cupy.RawModule(path=str(path)).get_function(name)


@contextmanager
def as_device_error(kernels: Kernels) -> Iterator[None]:
    """Turn CUDA's refusals into a DeviceError that names the GPU."""
    cuda = kernels.cupy.cuda
    try:
        yield
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
        detail = f"cuda:{kernels.gpu.number} ({kernels.gpu.name}) failed: {error}"
        raise DeviceError("device-failed", detail) from error


class Buffer:
    """Pinned memory, its twin on the device, and how far work on them is.

    copied  behind the last copy from or to the pinned side
    used    behind the last kernel on the device side
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self.nbytes = 0
        self.copied, self.used = (
            cupy.cuda.Event(block=True, disable_timing=True) for _ in range(2)
        )

    def hold(self, nbytes: int) -> None:
        """Make both sides at least so large; what they held is lost."""
        wanted = max(nbytes, ALIGNMENT)
        if wanted <= self.nbytes:
            return
        self.copied.synchronize()
        self.used.synchronize()
        cuda = self._cupy.cuda
        try:
            pinned, device = cuda.alloc_pinned_memory(wanted), cuda.alloc(wanted)
        except (cuda.memory.OutOfMemoryError, cuda.runtime.CUDARuntimeError) as error:
            refuse_memory(wanted, error)
        self.pinned, self.device, self.nbytes = pinned, device, wanted
        self.host = memoryview(pinned).cast("B")

    def upload(self, nbytes: int, stream: Any, place: Any = None) -> None:
        """Start a copy of the first bytes to the device, or a place there."""
        (place or self.device).copy_from_host_async(self.pinned.ptr, nbytes, stream)
        self.copied.record(stream)

    def download(self, nbytes: int, stream: Any, after: Any, place: Any = None) -> None:
        """Start a copy of the first bytes from the device, or a place there.

        after  a stream: what it has to do comes first
        """
        self.used.record(after)
        stream.wait_event(self.used)
        (place or self.device).copy_to_host_async(self.pinned.ptr, nbytes, stream)
        self.copied.record(stream)


def refuse_memory(nbytes: int, error: Exception) -> NoReturn:
    detail = f"the GPU or its driver has no {nbytes:,} bytes of memory left: {error}"
    next_step = "End what else uses the GPU, or use --device cpu."
    raise DeviceError("device-memory", detail, next_step) from None


def lay_out(*sizes: int) -> list[slice]:
    """Place parts of these sizes in a buffer."""
    ends = list(accumulate(sizes, lambda end, nbytes: aligned(end) + nbytes))
    return [slice(end - nbytes, end) for end, nbytes in zip(ends, sizes, strict=True)]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
