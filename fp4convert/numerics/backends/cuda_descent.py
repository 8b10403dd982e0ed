"""Go over codes and block scales on one GPU, by kernels/descend.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends.cuda_buffers import lay_out, refuse_memory
from fp4convert.numerics.backends.cuda_kernels import Kernels
from fp4convert.numerics.backends.cuda_stream import LANES
from fp4convert.numerics.backends.entry_points import Codes, descend_call
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.descent import GPU_ROWS, check_shapes, gpu_room_nbytes
from fp4convert.numerics.matrices import Quantized

Rows = NDArray[np.generic]


def descend(kernels: Kernels, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
    """Find codes and scales that cost less; equals descent.descend.

    Raises DeviceError where H and 16 rows do not fit into the GPU's free memory
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
        height = _panel_rows(kernels, x.shape, width)
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


def _panel_rows(kernels: Kernels, shape: tuple[int, int], width: int) -> int:
    """Choose how many rows go at once: as fit into a lane's memory."""
    rows, columns = shape
    nbytes = gpu_room_nbytes(GPU_ROWS, width) + GPU_ROWS * 6 * columns
    fit = kernels.room_nbytes // LANES // nbytes
    return min(max(fit, 1), -(-rows // GPU_ROWS)) * GPU_ROWS


def _copy(kernels: Kernels, stream: Any, place: int, rows: Rows, is_back: bool = False) -> None:
    """Copy an array to the GPU, or back.

    CUDA has read pageable memory when it returns, and written it after the stream's end.
    """
    runtime, own = kernels.cupy.cuda.runtime, np.ascontiguousarray(rows)
    ends, direction = (place, own.ctypes.data), runtime.memcpyHostToDevice
    if is_back:
        ends, direction = ends[::-1], runtime.memcpyDeviceToHost
    runtime.memcpyAsync(*ends, own.nbytes, direction, stream.ptr)
