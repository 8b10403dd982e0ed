"""kernels/fp8.cu, and compare_values of compare.cu, on the host against NumPy, byte for byte.

Decides that FP8 and MXFP8 have on a GPU the amaxes, codes, costs and reports of the CPU; simt.py
stands in for the GPU. Codes are ml_dtypes' own rounding, in fp8_int.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from adversarial import DTYPES, PLAIN, Values, every_finite, generator, matrix
from ptx import BUILDS
from scale_grids import EVERY_LAYOUT, some_scales
from simt import KERNELS, aligned, guarded, is_intact, launch

from fp4convert.numerics import error_sums, fp8_int
from fp4convert.numerics.backends import entry_points
from fp4convert.numerics.codec import as_floats
from fp4convert.numerics.fp8_int import Grid, grid_shape

Array = np.ndarray
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_KIND = pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
MORE_LAYOUTS = pytest.mark.parametrize(  # of several launch blocks; rows that begin anywhere
    ("shape", "block"),
    [
        ((9, 2048), (9, 2048)),
        ((40, 544), (1, 32)),
        ((70, 1000), (64, 128)),
        ((3000, 7), (1000, 2)),
        ((1, 20000), (1, 32)),
    ],
)


class Kernels:
    """The kernels of fp8.cu and compare.cu as the methods of fp8_int.py."""

    def __init__(self, fp8: ctypes.CDLL, compare: ctypes.CDLL) -> None:
        self._libraries = {"fp8.cu": fp8, "compare.cu": compare}

    def call(self, call: entry_points.Call, count: int) -> None:
        """Launch; nothing may be written beside an argument."""
        name, arguments = call
        library = self._libraries[entry_points.entry_of(name).file]
        places = [a if isinstance(a, int) else a.ctypes.data for a in arguments]
        launch(library, name, entry_points.grid_of(name, count), places)
        assert all(isinstance(a, int) or is_intact(a) for a in arguments), name

    @staticmethod
    def held(values: Values, dtype: str, where: Grid) -> tuple[entry_points.Values, Array, Array]:
        x = entry_points.Values(dtype, aligned(matrix(values, dtype).data), values.shape)
        layout = np.array([*values.shape, *where.block, where.first_row])
        return x, aligned(where.scales.reshape(-1).view(np.uint8)), aligned(layout.view(np.uint8))

    def grid_amax(self, values: Values, dtype: str, where: Grid) -> Array:
        x, amaxes, grid = self.held(values, dtype, where)
        self.call(entry_points.grid_amax_call(x, grid, amaxes), x.n)
        return amaxes.view(np.float32).reshape(where.scales.shape)

    def quantize(self, values: Values, dtype: str, where: Grid) -> Array:
        x, scales, grid = self.held(values, dtype, where)
        codes = guarded(x.n)
        self.call(entry_points.quantize_fp8_call(x, scales, grid, codes), x.n)
        return codes.reshape(values.shape)

    def costs(self, values: Values, dtype: str, where: Grid, so_far: Array) -> Array:
        x, scales, grid = self.held(values, dtype, where)
        across, (rows, height) = where.scales.shape[1], (len(values), where.block[0])
        row_costs = guarded(8 * rows * across)
        costs = aligned(so_far.reshape(-1).view(np.uint8))
        call = entry_points.row_costs_call(x, scales, grid, row_costs)
        self.call(call, rows * across)
        first, last = where.first_row // height, (where.first_row + rows - 1) // height
        self.call(("add_costs", (row_costs, grid, costs)), (last - first + 1) * across)
        return costs.view(np.float64).reshape(so_far.shape)

    def compare(self, values: Values, dtype: str, y: Array) -> Array:
        x, made, _ = self.held(values, dtype, Grid(y, (1, 1)))
        sums = guarded(8 * 5 * len(values))
        self.call(entry_points.compare_values_call(x, made, sums), len(values))
        return sums.view(np.float64).reshape(-1, 5)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    (build, has_cvt), folder = request.param, tmp_path_factory.mktemp("fp8")
    return Kernels(*(build(KERNELS / f"{stem}.cu", folder, has_cvt) for stem in ("fp8", "compare")))


def scales_for(values: Values, dtype: str, block: tuple[int, int]) -> Array:
    """The scales of rule amax, and in every third block of any size."""
    shape = (len(values), values.shape[1])
    amax = np.zeros(grid_shape(shape, block), np.float32)
    fp8_int.grid_amax(matrix(values, dtype), Grid(amax, block))
    scales, others = fp8_int.fp8_scales_of(amax), np.abs(some_scales(*shape, block))
    others[others == 0] = 1
    return np.where(np.arange(scales.size).reshape(scales.shape) % 3 == 2, others, scales)


def both_halves(
    values: Values, scales: Array, block: tuple[int, int]
) -> Sequence[tuple[Values, Grid]]:
    """All rows, and those from the middle on, which begin within a block."""
    middle = len(values) // 2
    return [(values[first:], Grid(scales, block, first)) for first in {0, middle}]


def same_bits(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    differ = np.flatnonzero(found.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8))
    assert not differ.size, f"{differ.size} bytes, first {differ[0]}"


def check_all(kernels: Kernels, values: Values, dtype: str, block: tuple[int, int]) -> None:
    scales = scales_for(values, dtype, block)
    for rows, where in both_halves(values, scales, block):
        x, amaxes = matrix(rows, dtype), np.full_like(scales, 2.0**-140)
        found = kernels.grid_amax(rows, dtype, Grid(amaxes, block, where.first_row))
        fp8_int.grid_amax(x, Grid(amaxes, block, where.first_row))
        same_bits(found, amaxes)
        codes = fp8_int.quantize_fp8(x, where)
        same_bits(kernels.quantize(rows, dtype, where), codes)
        costs = generator(1).exponential(1, scales.shape) ** 9
        found = kernels.costs(rows, dtype, where, costs)
        with np.errstate(over="ignore", invalid="ignore"):
            fp8_int.fp8_costs(x, where, costs)
        same_bits(found, costs)
        y = fp8_int.decode_fp8(codes.reshape(-1).data, x.shape, where)
        if np.isfinite(y).all():
            expected = error_sums.compare_values(as_floats(x), y)
            same_bits(kernels.compare(rows, dtype, y), expected)


@EVERY_DTYPE
@EVERY_KIND
@EVERY_LAYOUT
@pytest.mark.sweep(6)
def test_any_values(  # type: ignore[no-untyped-def]
    kernels: Kernels, make, dtype: str, rows: int, columns: int, block: tuple[int, int]
) -> None:
    check_all(kernels, make(dtype, rows, -(-columns // 32) * 32)[:, :columns], dtype, block)


@MORE_LAYOUTS
def test_any_number_of_launch_blocks(
    kernels: Kernels, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    rng = generator(2, *shape)
    values = rng.standard_t(3, shape) * np.exp2(rng.integers(-20, 20, (shape[0], 1)))
    check_all(kernels, values.astype(ml_dtypes.bfloat16), "BF16", block)


def test_any_number_of_columns(kernels: Kernels) -> None:
    """Rows and blocks that begin at any address."""
    for columns in [*range(1, 36), 127, 129, 255, 257, 264, 513]:
        values = generator(3, columns).standard_normal((5, columns), np.float32)
        for dtype in ("F16", "F32"):
            narrow = values.astype({"F16": np.float16, "F32": np.float32}[dtype])
            check_all(kernels, narrow, dtype, (2, 24))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_value(kernels: Kernels, dtype: str) -> None:
    values = every_finite(dtype)
    values = np.resize(values, (-(-len(values) // 512), 512))
    check_all(kernels, values, dtype, (1, 32))


def test_every_midpoint_of_e4m3(kernels: Kernels) -> None:
    """Its neighbours in float32, too, under scales that divide exactly; both signs."""
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = np.concatenate([(grid[1:] + grid[:-1]) / 2, grid, [464, 480, 2.0**-10, 2.0**-11]])
    near = np.stack([np.nextafter(middles, to, dtype=np.float32) for to in (0, np.inf)])
    values = np.concatenate([near.ravel(), middles]).astype(np.float32)
    values = np.resize(np.stack([values, -values], 1).reshape(1, -1), (1, 800))
    for exponent in (-100, -9, 0, 7, 100):
        scales = np.full((1, 1), 2.0**exponent, np.float32)
        where, x = Grid(scales, (1, 800)), values * scales
        expected = fp8_int.quantize_fp8(matrix(x, "F32"), where)
        same_bits(kernels.quantize(x, "F32", where), expected)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@EVERY_DTYPE
def test_amaxes_hide_nothing_that_is_not_finite(kernels: Kernels, dtype: str, bad: float) -> None:
    values = PLAIN["gaussian"](dtype, 3, 96)[:, :70]
    for place in range(values.size):
        spoilt, amaxes = values.copy(), np.zeros((3, 5), np.float32)
        spoilt.flat[place] = bad
        found = kernels.grid_amax(spoilt, dtype, Grid(amaxes, (1, 16)))
        row, column = divmod(place, 70)
        assert np.argwhere(~np.isfinite(found)).tolist() == [[row, column // 16]]
