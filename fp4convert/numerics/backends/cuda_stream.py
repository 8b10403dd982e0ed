"""Move matrices through one GPU: buffers, streams, kernels.

    preadv -> pinned buffer -> [up] -> device -> [work] amax, then quantize
           -> [down] -> pinned buffer -> caller

A lane has three streams and two buffers at either end: while one panel is computed, the next comes
in and the last goes out. amax runs on each panel as it arrives; quantize reads it from device
memory; the host waits only for the first panel's amax, to give its scale to the comparison. Panels
of a scale group stay on the GPU between the passes while there is room, and are fetched again where
there is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends.cuda_kernels import (
    ALIGNMENT,
    Buffer,
    Kernels,
    lay_out,
    refuse_memory,
)
from fp4convert.numerics.backends.entry_points import (
    Call,
    Codes,
    Values,
    amax_call,
    compare_call,
    count_call,
    dequantize_call,
    quantize_call,
)
from fp4convert.numerics.codec import (
    Float32s,
    check_finite,
    check_importance,
    global_scale_of,
    weigh,
)
from fp4convert.numerics.formats import CODES, FLOAT_TYPES, ROW_SUMS, Format
from fp4convert.numerics.matrices import (
    Blocks,
    Compared,
    Quantized,
    StoredRows,
    Weights,
    row_panels,
)
from fp4convert.numerics.value_checks import check_range

# To a GPU at most: callers that read and write side by side, 2.8 GB/s of bf16 a core
# (benchmarks/results/host.md: read, write and lock).
LANES = 16
# 16 MB of bf16: a third of a millisecond of PCIe 5, several times what starting the work costs.
GPU_PANEL_ELEMENTS = 8 << 20
MAX_ELEMENT_NBYTES = 4  # float32
RESULT_NBYTES = 1  # for an element, with the sums of its row where that has NARROW elements or more
NARROW = 128
EVEN_ROWS = 16  # panels of more are multiples: transposing goes by squares

T = TypeVar("T")
Part = memoryview | NDArray[np.generic]


class Lane:
    """The way of panels through one GPU, whose `device` must be current."""

    def __init__(self, kernels: Kernels) -> None:
        cupy = kernels.cupy
        self.device = cupy.cuda.Device(kernels.gpu.number)
        self._kernels = kernels
        self._room_nbytes = kernels.room_nbytes // LANES
        self._resident: dict[tuple[Weights, int], Any] = {}
        self._is_measured = False
        with self.device:
            self._up, self._work, self._down = (
                cupy.cuda.Stream(non_blocking=True) for _ in range(3)
            )
            self._amax_buffer, self._scale_buffer, self._weights_buffer, *buffers = (
                Buffer(cupy) for _ in range(7)
            )
        self._decoded: Any = None  # device memory for one panel that does not stay
        self._tables: list[Any] = []  # of blocks, and what else a matrix takes
        self._buffers = buffers
        self._arrivals, self._results = cycle(buffers[:2]), cycle(buffers[2:])

    def reserve(self, measured: Sequence[Weights]) -> None:
        """Have memory for any panel of these, before some stay and fill the GPU."""
        shapes = [weights.shape for weights in measured]
        elements = max(max(GPU_PANEL_ELEMENTS, columns) for _, columns in shapes)
        largest = max(FLOAT_TYPES[weights.dtype].nbytes for weights in measured)
        # Codes, scales and sums of rows have less than a byte an element: _panels.
        sizes = 2 * [elements * largest] + 2 * [elements * RESULT_NBYTES]
        for buffer, nbytes in zip(self._buffers, sizes, strict=True):
            buffer.hold(nbytes)
        if any(weights.stored_reader() for weights in measured):
            self._hold_decoded(elements * largest)

    def finish(self) -> None:
        """Wait for whatever is under way, and forget what stayed."""
        try:
            with self.device:
                for stream in (self._up, self._work, self._down):
                    stream.synchronize()
        finally:
            self._resident.clear()
            self._tables.clear()

    def give_amax(self, amax: float) -> None:
        """Set the amax that `quantize` uses."""
        self._hold_scalars()
        self._amax_buffer.host[:4] = np.float32(amax).tobytes()
        self._amax_buffer.upload(4, self._work)
        self._is_measured = False

    def measure(self, measured: Sequence[Weights], keep: Sequence[Weights]) -> None:
        """Measure the amax that `quantize` uses; panels of some stay."""
        self._hold_scalars()
        self._amax_buffer.device.memset_async(0, 4, self._work)
        for weights in measured:
            for first, last in _panels(weights.shape):
                with self._panel(weights, first, last, may_stay=weights in keep) as x:
                    self._start(x.n, amax_call(x, self._amax_buffer.device.ptr))
        self._amax_buffer.download(4, self._down, after=self._work)
        self._is_measured = True

    def _hold_scalars(self) -> None:
        for buffer in (self._amax_buffer, self._scale_buffer):
            buffer.hold(ALIGNMENT)

    def amax(self) -> float:
        """Wait for the amax."""
        self._amax_buffer.copied.synchronize()
        return float(np.frombuffer(self._amax_buffer.host, np.float32, 1)[0])

    def quantize(
        self,
        members: Sequence[Weights],
        fmt: Format,
        rule: str,
        importance: Sequence[Float32s] = (),
        note: Callable[[int, float], None] | None = None,
    ) -> Iterator[tuple[int, Quantized]]:
        """Quantize panels in order, under the amax that is set.

        importance  of each member, under the rule of that name
        note        told each panel's own amax, as Given has it
        Yields      panels, each valid until the next is asked for
        Raises      NumericError where a measured amax is no number; InputError as codec.quantize
        """
        check_importance(rule, importance[0] if importance else None)
        pairs = zip(importance, members, strict=bool(importance))
        weighed = [weigh(own, weights.shape[1], fmt) for own, weights in pairs]
        group_amax, group_scale = self._amax_buffer, self._scale_buffer
        scale: list[float] = []  # of the group, as soon as it is known

        def start(number: int, first: int, last: int) -> Callable[[], tuple[int, Quantized]]:
            weights, result = members[number], next(self._results)
            shape = (last - first, weights.shape[1])
            n = shape[0] * shape[1]
            counts, own, sums, packed, block_scales = lay_out(
                8 * CODES, 4, 8 * ROW_SUMS * shape[0], n // 2, n // fmt.block_size
            )
            result.hold(block_scales.stop)
            at = result.device.ptr
            codes = Codes(fmt, at + packed.start, at + block_scales.start)
            result.device.memset_async(0, own.stop, self._work)
            with self._panel(weights, first, last) as x:
                choice = self._give_weights(weighed[number]) if weighed else ()
                self._start(n, quantize_call(x, codes, rule, group_amax.device.ptr, choice))
                if fmt.has_global_scale and not scale:
                    scale.append(self._give_scale(rule))
                if note:
                    self._start(n, amax_call(x, at + own.start))
                stored_codes = codes._replace(global_scale=group_scale.device.ptr)
                self._start(shape[0], compare_call(x, stored_codes, at + sums.start))
            self._start(n, count_call(codes.packed, n // 2, at))
            result.download(block_scales.stop, self._down, after=self._work)

            def take() -> tuple[int, Quantized]:
                result.copied.synchronize()
                self._check_amax()
                if note:
                    note(
                        number, check_finite(float(np.frombuffer(result.host[own], np.float32)[0]))
                    )
                host, stored = result.host, scale[0] if scale else None
                parts, lost = (host[packed], host[block_scales]), Compared(host[sums], host[counts])
                return number, Quantized(fmt, shape, *parts, stored, compared=lost)

            return take

        parts = ((k, *panel) for k, one in enumerate(members) for panel in _panels(one.shape))
        yield from one_behind(start(*part) for part in parts)

    def _check_amax(self) -> float:
        """Wait for the amax; NumericError where it is measured and no number."""
        return check_finite(self.amax()) if self._is_measured else self.amax()

    def _give_scale(self, rule: str) -> float:
        """Put the global scale on the device, for work that starts later."""
        stored = float(global_scale_of(self._check_amax(), rule))
        self._scale_buffer.copied.synchronize()
        self._scale_buffer.host[:4] = np.float32(stored).tobytes()
        self._scale_buffer.upload(4, self._work)
        return stored

    def _give_weights(self, weights: Float32s) -> tuple[int, int]:
        """Put weights of columns on the device; return address and number."""
        buffer = self._weights_buffer
        buffer.used.record(self._work)
        buffer.hold(weights.nbytes)
        buffer.copied.synchronize()
        buffer.host[: weights.nbytes] = weights.view(np.uint8).data
        buffer.upload(weights.nbytes, self._work)
        return buffer.device.ptr, weights.size

    def dequantize(self, q: Blocks, dtype: str) -> Iterator[memoryview]:
        """Read the values in order; a panel is valid until the next."""

        def start(part: Quantized) -> Callable[[], memoryview]:
            check_range(part, dtype)
            result = next(self._results)
            n = part.shape[0] * part.shape[1]
            nbytes = n * FLOAT_TYPES[dtype].nbytes
            result.hold(nbytes)
            stored = np.array([part.global_scale or 0], np.float32).view(np.uint8).data
            with self._parts([part.packed, part.block_scales, stored]) as places:
                codes = Codes(part.format, places[0], places[1], places[2], part.kind)
                y = Values(dtype, result.device.ptr, part.shape)
                self._start(n, dequantize_call(codes, y))
            result.download(nbytes, self._down, after=self._work)

            def take() -> memoryview:
                result.copied.synchronize()
                return result.host[:nbytes]

            return take

        return one_behind(
            start(q.rows(first, last)) for first, last in row_panels(q.shape, GPU_PANEL_ELEMENTS)
        )

    def _start(self, n: int, call: Call) -> None:
        """Start a kernel on n elements, or rows."""
        self._kernels.launch(call, self._work, n)

    @contextmanager
    def _panel(
        self, weights: Weights, first: int, last: int, may_stay: bool = False
    ) -> Iterator[Values]:
        """Put rows on the device for the work that is started meanwhile."""
        shape = last - first, weights.shape[1]
        if (weights, first) in self._resident:
            yield Values(weights.dtype, self._resident[weights, first].ptr, shape)
            return
        n = shape[0] * shape[1]
        nbytes = n * FLOAT_TYPES[weights.dtype].nbytes
        if read := weights.stored_reader():
            stored = read(first, last)
            place = self._stay(weights, first, nbytes) if may_stay else None
            at = (place or self._hold_decoded(nbytes)).ptr
            with self._decode(stored, n, at):
                yield Values(weights.dtype, at, shape)
            return
        buffer = self._free_arrival(nbytes)
        weights.copy_rows(first, last, buffer.host[:nbytes])
        place = self._stay(weights, first, nbytes) if may_stay else None
        with self._uploaded(buffer, nbytes, place):
            yield Values(weights.dtype, (place or buffer.device).ptr, shape)

    def _stay(self, weights: Weights, first: int, nbytes: int) -> Any:
        """Take memory for a panel that stays; None without room."""
        taken = sum(held.mem.size for held in self._resident.values())
        if taken + nbytes <= self._room_nbytes:
            with suppress(self._kernels.cupy.cuda.memory.OutOfMemoryError):
                self._resident[weights, first] = self._kernels.cupy.cuda.alloc(nbytes)
        return self._resident.get((weights, first))

    def _hold_decoded(self, nbytes: int) -> Any:
        """Return memory for a decoded panel: of one after the other."""
        if self._decoded is None or self._decoded.mem.size < nbytes:
            self._work.synchronize()
            try:
                self._decoded = self._kernels.cupy.cuda.alloc(nbytes)
            except self._kernels.cupy.cuda.memory.OutOfMemoryError as error:
                refuse_memory(nbytes, error)
        return self._decoded

    @contextmanager
    def _decode(self, stored: StoredRows, n: int, at: int) -> Iterator[None]:
        """Decode n elements before the work that is started meanwhile."""
        tables = [table for table in stored.arguments if not isinstance(table, int)]
        with self._parts(tables) as addresses:
            places = iter(addresses)
            arguments = [a if isinstance(a, int) else next(places) for a in stored.arguments]
            counts: tuple[int, ...] = (n,)
            if stored.kernel.startswith("transpose"):
                rows = tables[0].shape[0]
                counts = (rows, n // rows)
            self._kernels.launch((stored.kernel, (*arguments, at)), self._work, *counts)
            yield

    def decode(self, stored: StoredRows, nbytes: int) -> memoryview:
        """Decode rows; the bytes are valid until the lane is used again."""
        result = next(self._results)
        result.hold(nbytes)
        itemsize = int(stored.kernel[-1]) if stored.kernel.startswith("transpose") else 4
        with self._decode(stored, nbytes // itemsize, result.device.ptr):
            result.download(nbytes, self._down, after=self._work)
        result.copied.synchronize()
        return result.host[:nbytes]

    @contextmanager
    def _parts(self, parts: Sequence[Part]) -> Iterator[list[int]]:
        """Put tables on the device for work started meanwhile; yield places."""
        places = lay_out(*(part.nbytes for part in parts))
        buffer = self._free_arrival(places[-1].stop)
        for place, part in zip(places, parts, strict=True):
            table = np.asarray(part)
            held = np.frombuffer(buffer.host[place], table.dtype).reshape(table.shape)
            held[...] = table
        with self._uploaded(buffer, places[-1].stop):
            yield [buffer.device.ptr + place.start for place in places]

    def _free_arrival(self, nbytes: int) -> Buffer:
        """Take a buffer whose pinned side is not being copied any more."""
        buffer = next(self._arrivals)
        buffer.hold(nbytes)
        buffer.copied.synchronize()
        return buffer

    @contextmanager
    def _uploaded(self, buffer: Buffer, nbytes: int, place: Any = None) -> Iterator[None]:
        """Upload a buffer for the work that is started meanwhile."""
        self._up.wait_event(buffer.used)
        buffer.upload(nbytes, self._up, place)
        self._work.wait_event(buffer.copied)
        yield
        buffer.used.record(self._work)


def held_nbytes(widest: int) -> int:
    """Count the pinned memory of a lane for rows of so many elements.

    Two buffers of float32 weights, two of results, one of weights of columns; CuPy takes powers of
    two.
    """
    elements = max(GPU_PANEL_ELEMENTS, widest)
    sizes = 2 * [elements * MAX_ELEMENT_NBYTES] + 2 * [elements * RESULT_NBYTES] + [4 * widest]
    return sum(1 << (nbytes - 1).bit_length() for nbytes in sizes if nbytes)


def _panels(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Cut a matrix into panels; of narrow rows, each with its sums, into less."""
    return even_panels(shape, max(shape[1], NARROW))


def even_panels(shape: tuple[int, int], room: int) -> Iterator[tuple[int, int]]:
    """Cut a matrix into panels; `room` is what a row takes of their elements."""
    height = GPU_PANEL_ELEMENTS // room
    height -= height % EVEN_ROWS if height > EVEN_ROWS else 0
    return row_panels(shape, height * shape[1])


def one_behind(started: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Yield what each gives, asked for after the next was started."""
    previous: Callable[[], T] | None = None
    for take in started:
        if previous:
            yield previous()
        previous = take
    if previous:
        yield previous()
