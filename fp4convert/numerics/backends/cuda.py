"""Run kernels/*.cu on GPUs through CuPy.

Each GPU has lanes, which callers take in turn.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.cuda_descent import descend
from fp4convert.numerics.backends.cuda_fp8 import Fp8Lane
from fp4convert.numerics.backends.cuda_kernels import Kernels, as_device_error
from fp4convert.numerics.backends.cuda_stream import LANES, held_nbytes
from fp4convert.numerics.backends.gpus import Gpu
from fp4convert.numerics.codec import Float32s, global_scale_of
from fp4convert.numerics.formats import Format
from fp4convert.numerics.matrices import Blocks, InMemory, Matrix, Quantized, Weights
from fp4convert.process import processors

LEAST_LANES = 4  # so that a GPU has work while callers wait for a disk


class Cuda:
    """The given GPUs; nothing is asked of them before there is work."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.name = ",".join(f"cuda:{gpu.number}" for gpu in gpus)
        lanes = min(LANES, max(LEAST_LANES, processors() // len(gpus)))  # of each
        self.threads = lanes * len(gpus)
        self._lanes: queue.SimpleQueue[tuple[Kernels, Fp8Lane | None]] = queue.SimpleQueue()
        kernels = [Kernels(gpu) for gpu in gpus]
        # One descent to a GPU, which it fills; whoever waits here may hold a lane, and never waits
        # for one.
        self._idle: queue.SimpleQueue[Kernels] = queue.SimpleQueue()
        for one in kernels:
            self._idle.put(one)
        for _ in range(lanes):
            for one in kernels:
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
        with self._take() as lane:
            lane.reserve([*measured, *members])
            if given.amax is None:
                lane.measure(measured, keep=members)
                yield from lane.quantize(members, fmt, rule, given.importance)
            else:
                lane.give_amax(given.amax)
                yield from lane.quantize(members, fmt, rule, given.importance, given.note)

    def dequantize_panels(self, q: Blocks, dtype: str) -> Iterator[memoryview]:
        with self._take() as lane:
            yield from lane.dequantize(q, dtype)

    @contextmanager
    def fp8_passes(self, weights: Weights) -> Iterator[Fp8Lane]:
        with self._take() as lane:
            lane.reserve([weights])
            yield lane

    def amax(self, x: Matrix) -> float:
        """Find the largest magnitude, exact; Inf or NaN where there is one."""
        with self._take() as lane:
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
        """Quantize rows under an amax that is known, which saves a pass.

        Equals codec.quantize.
        Raises InputError for a rule of another format, DeviceError
        """
        with self._take() as lane:
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
        """Read the values as bytes of `dtype`; NumericError beyond its range."""
        return memoryview(b"".join(bytes(panel) for panel in self.dequantize_panels(q, dtype)))

    def descend(self, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
        """Find codes and scales that cost less; equals descent.descend.

        Raises DeviceError where H and a few rows do not fit into the GPU
        """
        kernels = self._idle.get()
        try:
            with as_device_error(kernels):
                return descend(kernels, x, q, h, passes)
        finally:
            self._idle.put(kernels)

    @contextmanager
    def _take(self) -> Iterator[Fp8Lane]:
        """Lend a lane to this caller alone; make it when it is first taken.

        Whatever CUDA refuses meanwhile is a DeviceError.
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
