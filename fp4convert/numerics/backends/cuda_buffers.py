"""Hold pinned memory and its twin on a GPU."""

from __future__ import annotations

from itertools import accumulate
from types import ModuleType
from typing import Any, NoReturn

from fp4convert.errors import DeviceError

ALIGNMENT = 16  # of every part of a buffer


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
