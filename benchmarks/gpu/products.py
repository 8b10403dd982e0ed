"""Measure products of packed matrices with vectors on this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fp4convert.numerics.formats import MXFP4, NVFP4, Format
from gpu.bars import GEMV_SHARES
from gpu.compare import vectors_of
from gpu.device import BASELINES, LADDER, Case, Device, M, Rung

SHAPES = ((16384, 16384), (28672, 8192))
MATRICES = 8  # of a batch


class Products:
    """Matrices of random codes in buffers that take turns, times vectors; bytes counted: the
    matrix, once.
    """

    def __init__(self, device: Device, rows: int, columns: int) -> None:
        self._device, self._rows, self._columns = device, rows, columns
        n = rows * columns
        self._sets = device.sets(n // 2)
        rng = np.random.default_rng(0)
        codes, scales = (rng.integers(0, high, 16 * M).astype(np.uint8) for high in (256, 127))
        self._packed, self._target = (
            [device.filled(codes, n // 2) for _ in range(self._sets)] for _ in range(2)
        )
        self._block_scales = [device.filled(scales, n // 16) for _ in range(self._sets)]
        self._stored = device.upload(np.full(MATRICES, 2.0**-20, np.float32))
        self._vectors = {
            (kind, vectors): [device.upload(part) for part in vectors_of(kind, vectors, columns)[0]]
            for kind, vectors in (("fp16", 1), ("fp16", 2), ("fp16", 8), ("bf16", 1), ("nvfp4", 1))
        }
        self._y = device.empty(2 * 8 * rows)

    def table(self) -> str:
        return self._device.measure(
            Case("copy", self._rows * self._columns, self._copy), self._cases()
        )

    def _cases(self) -> Iterator[Case]:
        lower = [Rung(self._device.kernels, name) for name in LADDER]
        for fmt in (NVFP4, MXFP4):
            for kind, vectors in self._vectors:
                rungs = self._device.rungs(f"gemv_{fmt.name}_{kind}")[::-1]
                for rung in lower + rungs if (fmt, kind, vectors) == (NVFP4, "fp16", 1) else rungs:
                    yield self._case(rung, fmt, kind, vectors)
        note = f", {MATRICES} matrices of {self._rows // MATRICES} rows, each with its vector"
        n = self._rows * self._columns
        for rung in self._device.rungs("gemv_nvfp4_fp16")[::-1]:
            yield self._device.case(
                rung, partial(self._multiply_batch, rung), n // 2 + n // 16, note=note
            )

    def _case(self, rung: Rung, fmt: Format, kind: str, vectors: int) -> Case:
        n = self._rows * self._columns
        bar = (
            GEMV_SHARES[self._device.software is not None]
            if vectors == 1 and rung.name not in BASELINES
            else None
        )
        work = partial(self._multiply, rung, kind, vectors)
        return self._device.case(
            rung,
            work,
            n // 2 + n // fmt.block_size,
            bar,
            f", {vectors} vectors" if vectors > 1 else "",
        )

    def _copy(self, run: int) -> None:
        self._device.copy(self._target[run % self._sets], self._packed[run % self._sets])

    def _multiply(self, rung: Rung, kind: str, vectors: int, run: int) -> None:
        matrix = (*self._matrix(run), self._rows, self._columns)
        x = self._vectors[kind, vectors]
        rung.launch((self._rows, vectors), *matrix, *x, vectors, self._y)

    def _multiply_batch(self, rung: Rung, run: int) -> None:
        """The same matrix cut into MATRICES, its first rows with the first vector and so on."""
        rows = self._rows // MATRICES
        matrix = (*self._matrix(run), rows, self._columns)
        x = self._vectors["fp16", MATRICES]
        rung.launch((rows, 1, MATRICES), *matrix, *x, 1, self._y)

    def _matrix(self, run: int) -> tuple[object, ...]:
        turn = run % self._sets
        return self._packed[turn], self._block_scales[turn], self._stored, 0


def products(device: Device, rows: int, columns: int) -> str:
    return Products(device, rows, columns).table()
