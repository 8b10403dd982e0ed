"""The C kernels that add up block scales against the definition,
on each level of this processor.
"""

from __future__ import annotations

import numpy as np
import pytest
from adversarial import generator
from cpu_levels import Cpus, every_level, unaligned_bytes
from numpy.typing import NDArray

from fp4convert.numerics.backends.cpu import CELL_WIDTHS, PERIODS, Cpu, Doubles
from fp4convert.numerics.codec import Bytes

GUARD = 0xA5

RUNS = (1, 2, 3, 7, 64, 400)


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    return every_level(tmp_path_factory.mktemp("levels"))


def groups_of(rows: int, runs: tuple[int, ...]) -> list[list[range]]:
    """The rows of every group, for each of the runs, and for each of the periods;
    whole ones only.
    """
    found = [[range(first, first + run) for first in range(0, rows - run + 1, run)] for run in runs]
    return [
        *found,
        *(
            [range(first, rows // period * period, period) for first in range(period)]
            for period in PERIODS
        ),
    ]


def figures(x: NDArray[np.float64], groups: list[range], width: int) -> list[float]:
    """The squares of the sums of cells, all elements in cells, and the squares of these."""
    whole = x.shape[1] // width * width
    cells = [
        x[list(group), first : first + width]
        for group in groups
        for first in range(0, whole, width)
    ]
    return [
        sum(each(cell) for cell in cells)
        for each in (lambda c: c.sum() ** 2, np.sum, lambda c: np.square(c).sum())
    ]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (127, 5), (128, 65), (263, 24), (385, 131)])
def test_sum_cells(cpus: Cpus, shape: tuple[int, int]) -> None:
    rng = generator(51, shape[0])
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    values = np.where(
        rng.random(256) < 0.2, (np.nan, np.inf, -np.inf, np.nan) * 64, rng.normal(9, 1, 256)
    )
    values[codes[0, 0]] = 8.0
    stored = values[codes]
    x = np.where(np.isfinite(stored), stored - stored[np.isfinite(stored)].mean(), 0)
    expected = [
        [figures(x, groups, width) for width in CELL_WIDTHS] for groups in groups_of(shape[0], RUNS)
    ]
    for cpu in cpus.values():
        sums, of_rows = cpu.sum_cells(codes, values, RUNS)
        np.testing.assert_allclose(sums, expected, rtol=1e-9, atol=1e-7)
        assert of_rows == pytest.approx(np.square(x.sum(axis=1)).sum(), rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("shape", [(1, 1), (130, 3), (257, 100)])
def test_sum_cells_needs_no_more_room_than_it_says(cpus: Cpus, shape: tuple[int, int]) -> None:
    rows, blocks = shape
    codes, values, runs = (
        generator(53, rows).integers(0, 256, shape).astype(np.uint8),
        np.arange(256.0),
        np.array(RUNS),
    )
    doubles, figures = (
        rows * (blocks + 1) + (rows + 129) * 3 * min(blocks, 64),
        (len(RUNS) + 8) * 7 * 3 + 1,
    )
    for cpu in cpus.values():
        room, sums = (
            np.full(doubles + 32, GUARD, np.float64),
            np.full(figures + 32, GUARD, np.float64),
        )
        sums[:figures] = 0
        cpu._call("sum_cells", codes, values, rows, blocks, runs, len(runs), room[16:-16], sums)
        assert (room[:16] == GUARD).all()
        assert (room[-16:] == GUARD).all()
        assert (sums[figures:] == GUARD).all()
        expected, of_rows = cpu.sum_cells(codes, values, RUNS)
        assert sums[:figures].tolist() == [*expected.ravel().tolist(), of_rows]


@pytest.mark.parametrize(
    ("codes", "values", "runs", "told"),
    [
        (np.zeros((4, 4), np.uint8), np.zeros(256), (2, 0), "runs"),
        (np.zeros((4, 4), np.uint8), np.zeros(256), (-1,), "runs"),
        (np.zeros((4, 4), np.uint8), np.zeros(255), (2,), "values of shape"),
        (np.zeros((4, 4), np.uint8), np.zeros((16, 16)), (2,), "values of shape"),
        (np.zeros((4, 4), np.uint8), np.zeros(256, np.float32), (2,), "values of shape"),
        (np.zeros(16, np.uint8), np.zeros(256), (2,), "codes of shape"),
        (np.zeros((4, 4), np.int64), np.zeros(256), (2,), "codes of shape"),
    ],
)
def test_sum_cells_refuses_what_its_loops_cannot_take(
    codes: Bytes, values: Doubles, runs: tuple[int, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Cpu().sum_cells(codes, values, runs)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 17, 1000, 70001])
def test_count_bytes(cpus: Cpus, count: int) -> None:
    stored = np.minimum(generator(52).integers(0, 400, count), 255).astype(np.uint8)
    for cpu in cpus.values():
        assert (
            cpu.count_bytes(unaligned_bytes(stored.data)).tolist()
            == np.bincount(stored, minlength=256).tolist()
        )


def test_count_bytes_refuses_gaps() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Cpu().count_bytes(np.zeros((4, 4), np.uint8)[:, ::2])
