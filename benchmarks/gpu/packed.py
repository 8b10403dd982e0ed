"""Measure how packed weights are decoded on this GPU, and how FP8 is made.

Bytes counted are those of kernels/decode.cu and fp8.cu: values, codes, scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fp4convert.numerics.formats import FLOAT_TYPES, ROW_SUMS
from gpu.device import Case, Device, M, Rung

SHAPE = (8192, 8192)
SCALE_BLOCKS = {  # name -> block of a scale, bits of a code
    "decode_fp8": ((128, 128), 8),
    "decode_int4": ((1, 128), 4),
    "decode_int8": ((1, 128), 8),
}


class Decoders:
    """Matrices of random bytes in buffers that take turns."""

    def __init__(self, device: Device, shape: tuple[int, int]) -> None:
        self._device, (self._rows, self._columns) = device, shape
        self._n = self._rows * self._columns
        self._sets = device.sets(4 * self._n)
        rng = np.random.default_rng(0)
        pattern = rng.integers(0, 256, min(16 * M, 4 * self._n)).astype(np.uint8)
        self._x = [device.filled(pattern, 4 * self._n) for _ in range(self._sets)]
        self._y = [device.empty(4 * self._n) for _ in range(self._sets)]
        scales = rng.normal(size=self._rows * -(-self._columns // 128)).astype(np.float32)
        self._scales, self._zero_points = (device.upload(part) for part in (scales, scales.round()))
        tables = rng.normal(size=(2, scales.size))
        self._row_costs, self._costs = (device.upload(table) for table in tables)
        self._amaxes = device.upload(np.zeros(scales.size, np.float32))
        self._sums = device.empty(8 * ROW_SUMS * self._rows)
        self._layouts = {
            name: device.upload(np.array([*shape, *block, 0], np.int64))
            for name, (block, _) in SCALE_BLOCKS.items()
        }

    def table(self) -> str:
        return self._device.measure(Case("copy", 8 * self._n, self._copy), self._cases())

    def _cases(self) -> Iterator[Case]:
        for name, ((high, wide), bits) in SCALE_BLOCKS.items():
            count = -(-self._rows // high) * -(-self._columns // wide)
            rung = Rung(self._device.kernels, name)
            codes = self._n * bits // 8
            zero_points: tuple[object, ...] = () if name == "decode_fp8" else (0,)
            work = partial(self._decode, rung, zero_points)
            yield self._device.case(rung, work, codes + 4 * count + 4 * self._n)
            if zero_points:
                work = partial(self._decode, rung, (self._zero_points,))
                moved = codes + 8 * count + 4 * self._n
                yield self._device.case(rung, work, moved, note=", zero points")
        for nbytes in (2, 4):
            rung = Rung(self._device.kernels, f"transpose_{nbytes}")
            for step, note in ((1, ""), (2, ", every second column")):
                work = partial(self._transpose, rung, step)
                moved = nbytes * self._n * (1 + 1 / step)
                yield self._device.case(rung, work, moved, note=note)

        for kind in FLOAT_TYPES.values():
            yield from self._fp8_cases(kind.word, kind.nbytes)

    def _fp8_cases(self, word: str, nbytes: int) -> Iterator[Case]:
        """List what makes FP8 in blocks of 128x128; of random bytes, which takes as long."""
        (high, wide), _ = SCALE_BLOCKS["decode_fp8"]
        across = -(-self._columns // wide)
        blocks, read = -(-self._rows // high) * across, nbytes * self._n
        layout = self._layouts["decode_fp8"]
        works = {  # what follows x and, where codes are made, scales; launched for; bytes moved
            "grid_amax": ((layout, self._amaxes), self._n, read),
            "quantize_fp8": ((self._scales, layout, None), self._n, read + self._n),
            "row_costs": ((self._scales, layout, self._row_costs), self._rows * across, read),
            "compare_values": (
                (self._rows, self._columns, self._x[0], self._sums),
                self._rows,
                read + 4 * self._n,
            ),
        }
        for name, (arguments, count, moved) in works.items():
            rung = Rung(self._device.kernels, f"{name}_{word}")
            yield self._device.case(rung, partial(self._round, rung, count, arguments), moved)
        if word == "bf16":
            rung = Rung(self._device.kernels, "add_costs")
            work = partial(self._add, rung, blocks, layout)
            yield self._device.case(rung, work, 8 * self._rows * across)

    def _round(self, rung: Rung, count: int, arguments: tuple[object, ...], run: int) -> None:
        """None stands for where the result goes."""
        turn = run % self._sets
        given = (self._y[turn] if own is None else own for own in arguments)
        rung.launch(count, self._x[turn], *given)

    def _add(self, rung: Rung, blocks: int, layout: object, run: int) -> None:
        rung.launch(blocks, self._row_costs, layout, self._costs)

    def _copy(self, run: int) -> None:
        self._device.copy(self._y[run % self._sets], self._x[run % self._sets])

    def _decode(self, rung: Rung, zero_points: tuple[object, ...], run: int) -> None:
        turn = run % self._sets
        tables = (self._scales, *zero_points, self._layouts[rung.name])
        rung.launch(self._n, self._x[turn], *tables, self._y[turn])

    def _transpose(self, rung: Rung, step: int, run: int) -> None:
        turn, count = run % self._sets, self._columns // step
        shape = (self._rows, self._columns, 0, step, count)
        rung.launch((self._rows, count), self._x[turn], *shape, self._y[turn])


def decoders(device: Device, shape: tuple[int, int]) -> str:
    return Decoders(device, shape).table()
