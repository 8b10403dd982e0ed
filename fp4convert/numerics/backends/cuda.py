"""Run kernels/*.cu on GPUs through CuPy.

Each GPU has lanes, which callers take in turn.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.cuda_fp8 import Fp8Lane
from fp4convert.numerics.backends.cuda_kernels import (
    Kernels,
    as_device_error,
    lay_out,
    refuse_memory,
)
from fp4convert.numerics.backends.cuda_stream import LANES, held_nbytes
from fp4convert.numerics.backends.entry_points import Codes, descend_call
from fp4convert.numerics.backends.gpus import Gpu
from fp4convert.numerics.codec import Float32s, global_scale_of
from fp4convert.numerics.descent import GPU_ROWS, check_shapes, gpu_room_nbytes
from fp4convert.numerics.formats import Format
from fp4convert.numerics.matrices import Blocks, InMemory, Matrix, Quantized, Weights
from fp4convert.process import processors

LEAST_LANES = 4  # so that a GPU has work while callers wait for a disk
Rows = NDArray[np.generic]


class Cuda:
    """The given GPUs; nothing is asked of them before there is work.

    lanes  of each GPU; None: as many as the host has callers for
    """

    def __init__(self, gpus: Sequence[Gpu], lanes: int | None = None) -> None:
        self.name = ",".join(f"cuda:{gpu.number}" for gpu in gpus)
        lanes = lanes or min(LANES, max(LEAST_LANES, processors() // len(gpus)))
        self.threads = lanes * len(gpus)
        self._lanes: queue.SimpleQueue[tuple[Kernels, Fp8Lane | None]] = queue.SimpleQueue()
        # One descent to a GPU, which it fills; whoever waits here may hold a lane, and never waits
        # for one.
        self._idle: queue.SimpleQueue[Kernels] = queue.SimpleQueue()
        kernels = [Kernels(gpu) for gpu in gpus]
        for one in kernels:
            self._idle.put(one)
        for one in kernels * lanes:
            self._lanes.put((one, None))

    def held_nbytes(self, threads: int, widest: int) -> int:
        return min(threads, self.threads) * held_nbytes(widest)

    def group_amax(self, measured: Sequence[Weights]) -> None:
        return None

    def quantize_group(
        self,
        measured: Sequence[Weights],
        members: Sequence[Weights],
        fmt: Format,
        rule: str,
        given: Given = OWN,
    ) -> Iterator[tuple[int, Quantized]]:
        with self.lane() as lane:
            lane.reserve([*measured, *members])
            if given.amax is None:
                lane.measure(measured, keep=members)
                yield from lane.quantize(members, fmt, rule, given.importance)
            else:
                lane.give_amax(given.amax)
                yield from lane.quantize(members, fmt, rule, given.importance, given.note)

    def dequantize_panels(self, q: Blocks, dtype: str) -> Iterator[memoryview]:
        with self.lane() as lane:
            yield from lane.dequantize(q, dtype)

    @contextmanager
    def fp8_passes(self, weights: Weights) -> Iterator[Fp8Lane]:
        with self.lane() as lane:
            lane.reserve([weights])
            yield lane

    def amax(self, x: Matrix) -> float:
        """Find the largest magnitude, exact; Inf or NaN where there is one."""
        with self.lane() as lane:
            lane.measure([InMemory(x)], keep=[])
            return lane.amax()

    def quantize(
        self,
        x: Matrix,
        fmt: Format,
        rule: str,
        group_amax: float,
        importance: Float32s | None = None,
    ) -> Quantized:
        """Quantize rows under an amax that is known; equals codec.quantize."""
        with self.lane() as lane:
            lane.give_amax(group_amax)
            own = [] if importance is None else [importance]
            panels = [
                (bytes(q.packed), bytes(q.block_scales))
                for _, q in lane.quantize([InMemory(x)], fmt, rule, own)
            ]
        packed, block_scales = (
            memoryview(b"".join(panel[part] for panel in panels)) for part in (0, 1)
        )
        stored = float(global_scale_of(group_amax, rule)) if fmt.has_global_scale else None
        return Quantized(fmt, x.shape, packed, block_scales, stored)

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        """Read the values as bytes of `dtype`; equals codec.dequantize."""
        return memoryview(b"".join(bytes(panel) for panel in self.dequantize_panels(q, dtype)))

    def descend(self, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
        """Find codes and scales that cost less; equals descent.descend."""
        kernels = self._idle.get()
        try:
            with as_device_error(kernels):
                return _descend(kernels, x, q, h, passes)
        finally:
            self._idle.put(kernels)

    @contextmanager
    def lane(self) -> Iterator[Fp8Lane]:
        """Lend a lane to this caller alone; make it when it is first taken.

        Raises  DeviceError for whatever CUDA refuses meanwhile
        """
        kernels, lane = self._lanes.get()
        try:
            with as_device_error(kernels):
                lane = lane or Fp8Lane(kernels)
                try:
                    with lane.device:
                        yield lane
                finally:
                    lane.finish()
        finally:
            self._lanes.put((kernels, lane))


def _descend(kernels: Kernels, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
    """Go over codes and block scales on one GPU, by kernels/descend.cu.

    Raises  DeviceError where H and 16 rows do not fit into the GPU's free memory
    """
    check_shapes(x, q, h)
    cuda, (rows, columns), width = kernels.cupy.cuda, x.shape, h.shape[1]
    packed, scales = (
        np.frombuffer(part, np.uint8).reshape(rows, -1) for part in (q.packed, q.block_scales)
    )
    read: list[Rows] = [x, packed, scales]
    written: list[Rows] = [np.empty_like(packed), np.empty_like(scales)]
    with cuda.Device(kernels.gpu.number):
        stream = cuda.Stream(non_blocking=True)
        # As many rows at once as fit into a lane's memory.
        nbytes = gpu_room_nbytes(GPU_ROWS, width) + GPU_ROWS * 6 * columns
        fit = max(kernels.room_nbytes // LANES // nbytes, 1)
        height = min(fit, -(-rows // GPU_ROWS)) * GPU_ROWS
        # One piece of memory: H, the global scale and sizes, then what a panel takes.
        of_rows = (height * (part.nbytes // rows) for part in (*read, *written))
        parts = lay_out(h.nbytes, 4, 5 * 8, *of_rows, gpu_room_nbytes(height, width))
        try:
            memory = cuda.alloc(parts[-1].stop)
        except cuda.memory.OutOfMemoryError as error:
            refuse_memory(parts[-1].stop, error)
        h_at, scale_at, sizes_at, *at, room_at = (memory.ptr + part.start for part in parts)
        codes, found = Codes(q.format, at[1], at[2], scale_at), Codes(q.format, at[3], at[4])
        call = descend_call((at[0], h_at, sizes_at), codes, found, room_at)
        try:
            _copy(kernels, stream, h_at, h)
            _copy(kernels, stream, scale_at, np.array([q.global_scale or 0], np.float32))
            for first in range(0, rows, height):
                last = min(first + height, rows)
                sizes = np.array([last - first, columns, width, passes, height])
                _copy(kernels, stream, sizes_at, sizes)
                for place, part in zip(at[:3], read, strict=True):
                    _copy(kernels, stream, place, part[first:last])
                kernels.launch(call, stream, last - first)
                for place, part in zip(at[3:], written, strict=True):
                    _copy(kernels, stream, place, part[first:last], is_back=True)
        finally:  # before another takes the memory
            stream.synchronize()
    own = [part.reshape(-1).view(np.uint8).data for part in written]
    return Quantized(q.format, q.shape, own[0], own[1], q.global_scale, q.kind)


def _copy(kernels: Kernels, stream: Any, place: int, rows: Rows, is_back: bool = False) -> None:
    """Copy an array to the GPU, or back.

    CUDA has read pageable memory when it returns, and written it after the stream's end.
    """
    runtime, own = kernels.cupy.cuda.runtime, np.ascontiguousarray(rows)
    ends, direction = (place, own.ctypes.data), runtime.memcpyHostToDevice
    if is_back:
        ends, direction = ends[::-1], runtime.memcpyDeviceToHost
    runtime.memcpyAsync(*ends, own.nbytes, direction, stream.ptr)
