"""Measure descents over codes and scales on this GPU, beside the C library on all cores.

One launch is one call: three passes over a matrix under the whole of H, which is there already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.descent import PANEL_ROWS, gpu_room_nbytes
from fp4convert.numerics.formats import FP4_FORMATS, Format
from fp4convert.numerics.matrices import Quantized
from fp4convert.process import processors
from gpu.compare import descended
from gpu.device import Case, Device, Rung
from harness.measure import table

SHAPE = (4096, 4096)
PASSES = 3
HEADINGS = ["what", "GPU, s", "C library, s", "times", "output"]


class Descents:
    """A matrix, its codes in both formats and H, on the host and on the device."""

    def __init__(self, device: Device, shape: tuple[int, int]) -> None:
        self._device, self._shape = device, shape
        rows, columns = shape
        self._given = {fmt: descended(fmt, shape, columns) for fmt in FP4_FORMATS.values()}
        x, _, h = next(iter(self._given.values()))
        sizes = np.array([rows, columns, columns, PASSES, rows])
        self._tables = [device.upload(part) for part in (x, h, sizes)]
        self._room = device.empty(gpu_room_nbytes(rows, columns))

    def cases(self) -> Iterator[Case]:
        for fmt, (_, q, _) in self._given.items():
            rung = Rung(self._device.kernels, f"descend_{fmt.name}")
            stored = [np.float32(q.global_scale)] if fmt.has_global_scale else []
            parts = [self._device.upload(part) for part in (*stored, q.packed, q.block_scales)]
            found = [self._device.empty(part.nbytes) for part in (q.packed, q.block_scales)]
            places = (*self._tables, *parts, *found, self._room)
            yield self._device.case(rung, partial(self._launch, rung, places), q.packed.nbytes)

    def _launch(self, rung: Rung, places: tuple[object, ...], run: int) -> None:
        rung.launch(self._shape[0], *places)

    def table(self) -> str:
        rows = []
        for fmt, case in zip(self._given, self.cases(), strict=True):
            if self._device.is_late():
                rows.append([case.label, "", "", "", "not run: the time is up"])
                continue
            on_gpu, on_cpu = self._gpu_seconds(case), self._cpu_seconds(fmt)
            cells = f"{on_gpu:.3f}", f"{on_cpu:.2f}", f"{on_cpu / on_gpu:.0f}"
            rows.append([case.label, *cells, case.output])
        about = f"{PASSES} passes from the nearest codes; the C library on {processors()} cores."
        return f"{about}\n\n{table(HEADINGS, rows)}"

    def _gpu_seconds(self, case: Case) -> float:
        """Of the second launch."""
        start, stop = (self._device.cupy.cuda.Event() for _ in range(2))
        case.work(0)
        start.record()
        case.work(1)
        stop.record()
        stop.synchronize()
        return float(self._device.cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def _cpu_seconds(self, fmt: Format) -> float:
        x, q, h = self._given[fmt]

        def descend(first: int) -> Quantized:
            last = min(first + PANEL_ROWS, len(x))
            return Cpu().descend(x[first:last], q.rows(first, last), h, PASSES)

        begun = time.perf_counter()
        with ThreadPoolExecutor(processors()) as pool:
            list(pool.map(descend, range(0, len(x), PANEL_ROWS)))
        return time.perf_counter() - begun


def descents(device: Device) -> str:
    return Descents(device, SHAPE).table()
