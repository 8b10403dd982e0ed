"""Every kernel of FP8 and integer codes against fp8_int.py, byte for byte: the C kernels on each
level of this processor, the CUDA kernels on the host.

Decides that they are right wherever fp8_int.py is; test_fp8_int.py decides the latter, whose codes
are ml_dtypes' own rounding.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from adversarial import DTYPES, PLAIN, Values, every_finite, generator, matrix
from cpu_levels import Cpus, every_level, unaligned, unaligned_bytes
from ptx import SOURCE_OR_PTX, every_backend
from scale_grids import EVERY_LAYOUT, same, some_scales
from simt import SimtKernels

from fp4convert.numerics import error_sums, fp8_int
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_floats
from fp4convert.numerics.fp8_int import Grid, grid_shape
from fp4convert.numerics.matrices import Matrix

Array = np.ndarray
Backends = dict[str, Cpu | SimtKernels]
GUARD = 0xA5
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module", params=SOURCE_OR_PTX)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return every_backend(tmp_path_factory.mktemp("kernels"), request.param)


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    return every_level(tmp_path_factory.mktemp("levels"))


def some_codes(rows: int, columns: int) -> Array:
    return generator(30, rows).integers(0, 256, (rows, columns)).astype(np.uint8)


def raw(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def written(cpu: Cpu, nbytes: int, alignment: int, name: str, *arguments: Array | int) -> Array:
    """What a kernel writes into a buffer at an odd multiple of that alignment; its surroundings
    must stay as they were.
    """
    buffer = np.full(nbytes + 128, GUARD, np.uint8)
    start = -buffer.ctypes.data % 64 + alignment
    cpu._call(name, *arguments, buffer[start : start + nbytes])
    assert (buffer[:start] == GUARD).all(), "written before the buffer"
    assert (buffer[start + nbytes :] == GUARD).all(), "written behind the buffer"
    return buffer[start : start + nbytes]


def check_decoded(
    backends: Backends, bits: int, codes: Array, columns: int, grid: Grid, *zeros: Float32s
) -> Float32s:
    """The values of codes by fp8_int.py (bits: 0 for FP8), after every backend found the same.

    CPUs are given codes at an odd address, and a buffer that begins and ends anywhere; what the
    CUDA kernels may write is seen by SimtKernels.
    """
    part, shape = raw(codes), (len(codes), columns)
    more, name = ((bits, *zeros), f"decode_int{bits}") if bits else ((), "decode_fp8")
    method = "decode_integers" if bits else "decode_fp8"
    expected: Float32s = getattr(fp8_int, method)(part, shape, grid, *more)
    shifted = np.frombuffer(unaligned_bytes(part), np.uint8).reshape(codes.shape)
    scales, layout = native_grid(grid, shape)
    tables = (scales, *(zeros or (0,)), layout) if bits else (scales, layout)
    for backend in backends.values():
        same(getattr(backend, method)(part, shape, grid, *more), expected)
        if isinstance(backend, Cpu):
            found = written(backend, 4 * expected.size, 4, name, shifted, *tables)
            same(found.view(np.float32).reshape(shape), expected)
    return expected


# --------------------------------------------------------------------------------------------------
# FP8


@EVERY_LAYOUT
def test_decode_fp8(backends: Backends, rows: int, columns: int, block: tuple[int, int]) -> None:
    codes, scales = some_codes(rows, columns), some_scales(rows, columns, block)
    for first in {0, 1, rows // 2, rows - 1}:
        check_decoded(backends, 0, codes[first:], columns, Grid(scales, block, first))
    whole = raw(codes), codes.shape, Grid(scales, block), "F8_E5M2"
    same(Cpu().decode_fp8(*whole), fp8_int.decode_fp8(*whole))


def test_every_fp8_code_under_every_kind_of_scale(backends: Backends) -> None:
    """Every exponent that float32 has, both ends of its mantissas, zero, infinity and NaN, negative
    ones too.
    """
    mantissas = np.array([0, 1, 0x2AAAAA, 0x7FFFFF], np.uint32)
    bits = np.arange(256, dtype=np.uint32)[:, None] << 23 | mantissas
    both = np.concatenate([bits.ravel(), bits.ravel() | 1 << 31]).astype(np.uint32)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(both), 1))
    values = check_decoded(backends, 0, codes, 256, Grid(both.view(np.float32)[:, None], (1, 256)))
    assert np.isnan(values[:, [0x7F, 0xFF]]).all()  # NaN codes, which amax then finds


@pytest.mark.parametrize("width", [1, 15, 16, 17, 24, 64])
def test_any_number_of_fp8_columns(backends: Backends, width: int) -> None:
    for columns in [*range(1, 70), 127, 129, 255, 513]:
        grid = Grid(some_scales(3, columns, (2, width)), (2, width))
        check_decoded(backends, 0, some_codes(3, columns), columns, grid)


@pytest.mark.parametrize("shape", [(9, 8192), (70, 1000), (20000, 3), (1, 30000)])
def test_rows_go_on_in_the_next_launch_block(backends: Backends, shape: tuple[int, int]) -> None:
    grid = Grid(some_scales(shape[0] + 5, shape[1], (128, 128)), (128, 128), 5)
    check_decoded(backends, 0, some_codes(*shape), shape[1], grid)


@EVERY_LAYOUT
def test_amax_fp8(cpus: Cpus, rows: int, columns: int, block: tuple[int, int]) -> None:
    scales = np.abs(some_scales(rows, columns, block)) % np.float32(2.0**100)
    codes = some_codes(rows, columns)
    codes[codes & 0x7F == 0x7F] = 3
    for first in (0, rows // 2):
        shape, where = (rows - first, columns), Grid(scales, block, first)
        values = fp8_int.decode_fp8(raw(codes[first:]), shape, where)
        for cpu in cpus.values():
            assert cpu.amax_fp8(unaligned_bytes(raw(codes[first:])), shape, where) == float(
                np.abs(values).max()
            )
            assert cpu.amax_fp8(raw(codes[first:]), shape, Grid(-scales, block, first)) == float(
                np.abs(values).max()
            )
    for row, column in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)):
        for code in (0x7F, 0xFF):
            spoiled = codes.copy()
            spoiled[row, column] = code
            for cpu in cpus.values():
                assert np.isnan(cpu.amax_fp8(raw(spoiled), (rows, columns), Grid(scales, block)))


def test_amax_fp8_finds_each_element(cpus: Cpus) -> None:
    for place in range(150):
        codes = np.zeros((2, 75), np.uint8)
        codes.flat[place] = 0x80 | (place % 126 + 1)
        scales = some_scales(2, 75, (1, 16)) % np.float32(1)
        where = Grid(scales, (1, 16))
        expected = fp8_int.amax_fp8(raw(codes), codes.shape, where)
        assert expected > 0 or not scales[place // 75, place % 75 // 16] or expected == 0
        for cpu in cpus.values():
            assert cpu.amax_fp8(raw(codes), codes.shape, where) == expected


def test_an_infinite_or_missing_scale_is_not_finite_or_refused(cpus: Cpus) -> None:
    codes = np.full((2, 8), 0x38, np.uint8)
    for cpu in cpus.values():
        for bad in (np.inf, np.nan):
            assert not np.isfinite(
                cpu.amax_fp8(raw(codes), (2, 8), Grid(np.array([[bad]], np.float32), (2, 8)))
            )
        for call in (cpu.amax_fp8, cpu.decode_fp8, cpu.decode_integers):
            with pytest.raises(ValueError, match="scales of shape"):
                call(
                    raw(codes), (2, 8), Grid(np.ones((1, 2), np.float32), (1, 4))
                )  # one row of scales for two
            with pytest.raises(ValueError, match="scales of shape"):
                call(raw(codes), (2, 8), Grid(np.ones((2, 1), np.float32), (1, 4)))


def test_what_would_be_read_beyond_its_end_is_refused() -> None:
    codes, where = memoryview(bytes(15)), Grid(np.ones((2, 1), np.float32), (1, 8))
    for call in (Cpu().amax_fp8, Cpu().decode_fp8, Cpu().decode_integers):
        with pytest.raises(ValueError, match="reshape"):
            call(codes, (2, 8), where)
    stored = Matrix(memoryview(bytes(32)), "BF16", (2, 8))
    for columns in (range(4, 9), range(-1, 3), range(3, 0, -1), range(1, 12, 2)):
        with pytest.raises(ValueError, match="of a matrix of 8"):
            Cpu().transpose(stored, columns)
    assert Cpu().transpose(stored, range(3, 3)).shape == (0, 2)


# --------------------------------------------------------------------------------------------------
# integers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("group", [1, 7, 8, 16, 32, 128, 1100])
def test_decode_integers(backends: Backends, bits: int, has_zero_points: bool, group: int) -> None:
    rng, half = generator(31, group), 1 << bits - 1
    shapes = [(5, 1), (2, 9), (3, 32), (3, 100), (4, 511), (2, 1100), (40, 512)]
    for rows, columns in (*shapes, *((3, columns) for columns in (*range(1, 40), 513))):
        packed = rng.integers(0, 256, (rows, -(-columns * bits // 32) * 4)).astype(np.uint8)
        scales = some_scales(rows, columns, (1, group))
        zeros = rng.integers(-half, half, scales.shape).astype(np.float32)
        zeros[0, 0] = -half
        for first in {0, rows // 2} if (rows, columns) in shapes else {0}:
            grid = Grid(scales, (1, group), first)
            own = (zeros,) if has_zero_points else ()
            check_decoded(backends, bits, packed[first:], columns, grid, *own)


def test_every_integer_code_under_every_zero_point(backends: Backends) -> None:
    for bits in (4, 8):
        count = 1 << bits
        codes = np.tile(np.arange(count), (count, 1)).astype(np.uint8)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        grid = Grid(some_scales(count, count, (1, count)), (1, count))
        zeros = np.arange(count, dtype=np.float32)[:, None] - count // 2
        values = (codes.astype(np.float32) - count // 2 - zeros) * grid.scales
        same(check_decoded(backends, bits, packed, count, grid, zeros), values)


# --------------------------------------------------------------------------------------------------
# to FP8, to bf16


def scales_for(values: Values, dtype: str, block: tuple[int, int]) -> Float32s:
    """The scales of rule amax, and in every third block of any size."""
    shape = (len(values), values.shape[1])
    amax = np.zeros(grid_shape(shape, block), np.float32)
    fp8_int.grid_amax(matrix(values, dtype), Grid(amax, block))
    scales, others = fp8_int.fp8_scales_of(amax), np.abs(some_scales(*shape, block))
    others[others == 0] = 1
    return np.where(np.arange(scales.size).reshape(scales.shape) % 3 == 2, others, scales)


def same_bits(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    differ = np.flatnonzero(found.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8))
    assert not differ.size, f"{differ.size} bytes, first {differ[0]}"


def check_all(backends: Backends, values: Values, dtype: str, block: tuple[int, int]) -> None:
    """Amaxes, codes, costs and reports of all rows, and of those from the middle on, which begin
    within a block.
    """
    scales = scales_for(values, dtype, block)
    for first in {0, len(values) // 2}:
        x, grid = matrix(values[first:], dtype), Grid(scales, block, first)
        amaxes, costs = (
            np.full_like(scales, 2.0**-140),
            generator(1).exponential(1, scales.shape) ** 9,
        )
        expected, sums = amaxes.copy(), costs.copy()
        fp8_int.grid_amax(x, Grid(expected, block, first))
        codes = fp8_int.quantize_fp8(x, grid)
        with np.errstate(over="ignore", invalid="ignore"):
            fp8_int.fp8_costs(x, grid, sums)
        y = fp8_int.decode_fp8(codes.reshape(-1).data, x.shape, grid)
        for backend in backends.values():
            for own in (x, unaligned(x)) if isinstance(backend, Cpu) else (x,):
                found, spent = amaxes.copy(), costs.copy()
                backend.grid_amax(own, Grid(found, block, first))
                same_bits(found, expected)
                same_bits(backend.quantize_fp8(own, grid), codes)
                backend.fp8_costs(own, grid, spent)
                same_bits(spent, sums)
            if np.isfinite(y).all():
                rows = backend.compare_values(x, y).rows
                assert bytes(rows) == error_sums.compare_values(as_floats(x), y).tobytes()


@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@EVERY_LAYOUT
@pytest.mark.sweep(6)
def test_any_values(  # type: ignore[no-untyped-def]
    backends: Backends, make, dtype: str, rows: int, columns: int, block: tuple[int, int]
) -> None:
    check_all(backends, make(dtype, rows, -(-columns // 32) * 32)[:, :columns], dtype, block)


@pytest.mark.parametrize(  # of several launch blocks; rows that begin anywhere
    ("shape", "block"),
    [
        ((9, 2048), (9, 2048)),
        ((40, 544), (1, 32)),
        ((70, 1000), (64, 128)),
        ((3000, 7), (1000, 2)),
        ((1, 20000), (1, 32)),
        ((11, 399), (3, 100)),
        ((11, 416), (1, 416)),
    ],
)
def test_any_number_of_launch_blocks(
    backends: Backends, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    rng = generator(2, *shape)
    values = rng.standard_t(3, shape) * np.exp2(rng.integers(-20, 20, (shape[0], 1)))
    check_all(backends, values.astype(ml_dtypes.bfloat16), "BF16", block)


def test_any_number_of_columns(backends: Backends) -> None:
    """Rows and blocks that begin at any address."""
    for columns in [*range(1, 36), 127, 129, 255, 257, 264, 513]:
        values = generator(3, columns).standard_normal((5, columns), np.float32)
        for dtype in ("F16", "F32"):
            check_all(backends, values.astype(FLOAT_DTYPES[dtype]), dtype, (2, 24))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_value(backends: Backends, dtype: str) -> None:
    values = every_finite(dtype)
    values = np.resize(values, (-(-len(values) // 512), 512))
    check_all(backends, values, dtype, (1, 32))


def test_every_midpoint_of_e4m3(backends: Backends) -> None:
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
        for backend in backends.values():
            same_bits(backend.quantize_fp8(matrix(x, "F32"), where), expected)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@EVERY_DTYPE
def test_amaxes_hide_nothing_that_is_not_finite(backends: Backends, dtype: str, bad: float) -> None:
    values = PLAIN["gaussian"](dtype, 3, 96)[:, :70]
    for place in range(values.size):
        spoilt = values.copy()
        spoilt.flat[place] = bad
        row, column = divmod(place, 70)
        for backend in backends.values():
            amaxes = np.zeros((3, 5), np.float32)
            backend.grid_amax(matrix(spoilt, dtype), Grid(amaxes, (1, 16)))
            assert np.argwhere(~np.isfinite(amaxes)).tolist() == [[row, column // 16]]
            assert np.isnan(amaxes[row, column // 16]) == np.isnan(bad)


def test_fp8_scales_for_other_rows_are_refused() -> None:
    x = matrix(np.ones((3, 8), np.float32), "F32")
    with pytest.raises(ValueError, match="scales of shape"):
        Cpu().quantize_fp8(x, Grid(np.ones((2, 1), np.float32), (1, 8)))
    with pytest.raises(ValueError, match="costs of shape"):
        Cpu().fp8_costs(x, Grid(np.ones((3, 1), np.float32), (1, 8)), np.zeros(3))


def test_bf16(cpus: Cpus) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    values = (
        (upper[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32))
        .ravel()
        .view(np.float32)
    )
    expected = np.frombuffer(fp8_int.to_bf16(values), np.uint16)
    is_nan = np.isnan(values)
    for cpu in cpus.values():
        found = np.frombuffer(cpu.to_bf16(values), np.uint16)
        assert (found[~is_nan] == expected[~is_nan]).all()
        assert (found[is_nan] & 0x7FFF > 0x7F80).all()
        for size in range(40):
            part = written(cpu, 2 * size, 2, "round_bf16", values[77:], size)
            assert (part.view(np.uint16) == expected[77 : 77 + size]).all()


# --------------------------------------------------------------------------------------------------
# transpose


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 70), (64, 64), (130, 67), (257, 33), (304, 200), (136, 288)]
)
def test_transpose(backends: Backends, kind: type[np.generic], shape: tuple[int, int]) -> None:
    rows, width = shape
    nbytes = kind(0).itemsize
    values = generator(33).integers(0, np.iinfo(kind).max, shape).astype(kind)
    stored = Matrix(unaligned_bytes(raw(values)), {1: "U8", 2: "BF16", 4: "F32"}[nbytes], shape)
    for columns in (
        range(width),
        range(0, width, 2),
        range(1, width, 2),
        range(8, width),
        range(width // 3, width, 3),
        range(width // 2, width),
    ):
        expected = values[:, columns.start : columns.stop : columns.step].T.tobytes()
        numbers = (rows, width, columns.start, columns.step, len(columns))
        for backend in backends.values() if columns else ():
            if isinstance(backend, SimtKernels) and nbytes == 1:
                continue  # no encoding has stacks of those
            found = backend.transpose(stored, columns)
            assert (found.shape, found.dtype) == ((len(columns), rows), stored.dtype)
            assert bytes(found.data) == expected, columns
            if isinstance(backend, Cpu):
                flat = np.frombuffer(stored.data, np.uint8)
                name = f"transpose_{nbytes}"
                assert (
                    written(backend, len(expected), 1, name, flat, *numbers).tobytes() == expected
                )
