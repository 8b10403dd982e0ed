"""Round matrices to E4M3 on one GPU, in passes over panels.

Panels stay there while there is room.

Tables of blocks (amaxes, scales, costs) lie on the GPU whole; what a rule makes of them is the
host's business (fp8_rounding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends import cuda_stream
from fp4convert.numerics.backends.cuda_kernels import ALIGNMENT, lay_out, refuse_memory
from fp4convert.numerics.backends.cuda_stream import Lane, even_panels, one_behind
from fp4convert.numerics.backends.entry_points import (
    compare_values_call,
    grid_amax_call,
    quantize_fp8_call,
    row_costs_call,
)
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import ROW_SUMS
from fp4convert.numerics.fp8_int import Float64s, grid_shape
from fp4convert.numerics.matrices import Compared, Fp8Panel, Weights

T = TypeVar("T", bound=np.generic)
ROW_NBYTES = 8 * ROW_SUMS + ALIGNMENT  # of a panel's result, beside a byte for an element


class Fp8Lane(Lane):
    """A lane that makes the passes of Fp8Passes, too."""

    def block_amaxes(self, weights: Weights, block: tuple[int, int]) -> Float32s:
        found = np.zeros(grid_shape(weights.shape, block), np.float32)
        amaxes = self._zeros(found.nbytes)
        for first, last, grid in self._grids(weights, block):
            with self._panel(weights, first, last, may_stay=True) as x:
                self._start(x.n, grid_amax_call(x, grid, amaxes.ptr))
        return self._fetch(amaxes, found)

    def block_costs(
        self, weights: Weights, block: tuple[int, int], candidates: Sequence[Float32s]
    ) -> Float64s:
        down, across = grid_shape(weights.shape, block)
        found = np.zeros((len(candidates), down, across))
        scales = [self._send(own) for own in candidates]
        costs, panels = self._zeros(found.nbytes), self._grids(weights, block)
        rows = max(last - first for first, last, _ in panels)
        row_costs = self._memory(8 * rows * across)
        for first, last, grid in panels:
            blocks = ((last - 1) // block[0] - first // block[0] + 1) * across
            with self._panel(weights, first, last, may_stay=True) as x:
                for number, own in enumerate(scales):
                    call = row_costs_call(x, own.ptr, grid, row_costs.ptr)
                    self._start((last - first) * across, call)
                    at = costs.ptr + 8 * number * down * across
                    self._start(blocks, ("add_costs", (row_costs.ptr, grid, at)))
        return self._fetch(costs, found)

    def fp8_panels(
        self, weights: Weights, block: tuple[int, int], scales: Float32s
    ) -> Iterator[Fp8Panel]:
        held, panels = self._send(scales), self._grids(weights, block)
        columns = weights.shape[1]
        values = self._memory(4 * columns * max(last - first for first, last, _ in panels))

        def start(first: int, last: int, grid: int) -> Callable[[], Fp8Panel]:
            shape, result = (last - first, columns), next(self._results)
            sums, codes = lay_out(8 * ROW_SUMS * shape[0], shape[0] * columns)
            result.hold(codes.stop)
            at = result.device.ptr
            with self._panel(weights, first, last) as x:
                made = at + codes.start
                self._start(x.n, quantize_fp8_call(x, held.ptr, grid, made))
                self._start(x.n, ("decode_fp8", (made, held.ptr, grid, values.ptr)))
                self._start(shape[0], compare_values_call(x, values.ptr, at + sums.start))
            result.download(codes.stop, self._down, after=self._work)

            def take() -> Fp8Panel:
                result.copied.synchronize()
                lost = Compared(result.host[sums], memoryview(b""))
                return Fp8Panel(first, shape, result.host[codes], lost)

            return take

        return one_behind(start(*panel) for panel in panels)

    def _grids(self, weights: Weights, block: tuple[int, int]) -> list[tuple[int, int, int]]:
        """Cut a matrix into panels: first row, last + 1, address of a grid."""
        rows, columns = weights.shape
        cuts = list(even_panels((rows, columns), columns + ROW_NBYTES))
        grids = np.zeros((len(cuts), 6), np.int64)  # six, so that each begins at whole 16 bytes
        for grid, (first, last) in zip(grids, cuts, strict=True):
            grid[:5] = last - first, columns, *block, first
        at, pitch = self._send(grids).ptr, grids.strides[0]
        return [(*cut, at + pitch * number) for number, cut in enumerate(cuts)]

    def _memory(self, nbytes: int) -> Any:
        """Take memory on the GPU, until `finish`, for work may still use it."""
        with suppress(self._kernels.cupy.cuda.memory.OutOfMemoryError):
            self._tables.append(self._kernels.cupy.cuda.alloc(max(nbytes, ALIGNMENT)))
            return self._tables[-1]
        return refuse_memory(nbytes, MemoryError("tables of blocks"))

    def _zeros(self, nbytes: int) -> Any:
        place = self._memory(nbytes)
        place.memset_async(0, nbytes, self._work)
        return place

    def _send(self, table: NDArray[np.generic]) -> Any:
        """Put a table on the GPU, for work that starts from now on."""
        raw = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        place = self._memory(raw.size)
        for start, part in _pieces(raw):
            buffer = self._free_arrival(part.size)
            buffer.host[: part.size] = part.data
            with self._uploaded(buffer, part.size, place + start):
                pass
        return place

    def _fetch(self, place: Any, found: NDArray[T]) -> NDArray[T]:
        """Wait for a table; into `found`, which is returned."""
        for start, part in _pieces(found.reshape(-1).view(np.uint8)):
            result = next(self._results)
            result.hold(part.size)
            result.download(part.size, self._down, self._work, place + start)
            result.copied.synchronize()
            part[:] = np.frombuffer(result.host[: part.size], np.uint8)
        return found


def _pieces(raw: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    size = cuda_stream.GPU_PANEL_ELEMENTS
    return ((start, raw[start : start + size]) for start in range(0, raw.size, size))
