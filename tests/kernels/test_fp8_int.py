"""The C kernels of FP8 and integer codes against fp8_int.py, byte for byte, on each level of this
processor.

Decides that they are right wherever fp8_int.py is; test_fp8_int.py decides the latter.
"""

from __future__ import annotations

import numpy as np
import pytest
from adversarial import DTYPES, PLAIN, Float32s, generator, matrix
from cpu_levels import Cpus, every_level, unaligned, unaligned_bytes
from scale_grids import EVERY_LAYOUT, same, some_scales

from fp4convert.numerics import fp8_int
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.matrices import Matrix

GUARD = 0xA5


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    return every_level(tmp_path_factory.mktemp("levels"))


def some_codes(rows: int, columns: int) -> np.ndarray:
    return generator(30, rows).integers(0, 256, (rows, columns)).astype(np.uint8)


def raw(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def written(
    cpu: Cpu, nbytes: int, alignment: int, name: str, *arguments: np.ndarray | int
) -> np.ndarray:
    """What a kernel writes into a buffer at an odd multiple of that alignment; its surroundings
    must stay as they were.
    """
    buffer = np.full(nbytes + 128, GUARD, np.uint8)
    start = -buffer.ctypes.data % 64 + alignment
    cpu._call(name, *arguments, buffer[start : start + nbytes])
    assert (buffer[:start] == GUARD).all(), "written before the buffer"
    assert (buffer[start + nbytes :] == GUARD).all(), "written behind the buffer"
    return buffer[start : start + nbytes]


# --------------------------------------------------------------------------------------------------
# FP8


@EVERY_LAYOUT
def test_decode_fp8(cpus: Cpus, rows: int, columns: int, block: tuple[int, int]) -> None:
    codes, scales = some_codes(rows, columns), some_scales(rows, columns, block)
    for first in {0, 1, rows // 2, rows - 1}:
        part, where = raw(codes[first:]), Grid(scales, block, first)
        expected = fp8_int.decode_fp8(part, (rows - first, columns), where)
        for cpu in cpus.values():
            same(cpu.decode_fp8(part, expected.shape, where), expected)
            same(cpu.decode_fp8(unaligned_bytes(part), expected.shape, where), expected)
            same(
                cpu.decode_fp8(part, expected.shape, where, "F8_E5M2"),
                fp8_int.decode_fp8(part, expected.shape, where, "F8_E5M2"),
            )


def test_every_fp8_code_under_every_kind_of_scale(cpus: Cpus) -> None:
    """Every exponent that float32 has, both ends of its mantissas, zero, infinity and NaN, negative
    ones too.
    """
    bits = np.arange(256, dtype=np.uint32)[:, None] << 23 | np.array(
        [0, 1, 0x2AAAAA, 0x7FFFFF], np.uint32
    )
    scales = (
        np.concatenate([bits.ravel(), bits.ravel() | 1 << 31])
        .astype(np.uint32)
        .view(np.float32)[:, None]
    )
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    where = Grid(scales, (1, 256))
    expected = fp8_int.decode_fp8(raw(codes), codes.shape, where)
    for cpu in cpus.values():
        same(cpu.decode_fp8(raw(codes), codes.shape, where), expected)


def test_any_number_of_fp8_columns_at_any_address(cpus: Cpus) -> None:
    for columns in [*range(1, 70), 127, 129, 255, 513]:
        codes, scales = some_codes(3, columns), some_scales(3, columns, (2, 24))
        expected = fp8_int.decode_fp8(raw(codes), codes.shape, Grid(scales, (2, 24)))
        layout = np.array([3, columns, 2, 24, 0])
        shifted = np.frombuffer(unaligned_bytes(raw(codes)), np.uint8)
        for cpu in cpus.values():
            found = written(cpu, codes.size * 4, 4, "decode_fp8", shifted, scales, layout)
            same(found.view(np.float32).reshape(codes.shape), expected)


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
@pytest.mark.parametrize("group", [1, 7, 16, 32, 128, 1100])
def test_decode_integers(cpus: Cpus, bits: int, has_zero_points: bool, group: int) -> None:
    rng = generator(31, group)
    for rows, columns in ((5, 1), (2, 9), (3, 32), (3, 100), (4, 511), (2, 1100)):
        block = (1, group)
        row_nbytes = -(-columns * bits // 32) * 4
        packed = rng.integers(0, 256, (rows, row_nbytes)).astype(np.uint8)
        scales = some_scales(rows, columns, block)
        half = 1 << bits - 1
        zeros = (
            rng.integers(-half, half, scales.shape).astype(np.float32) if has_zero_points else None
        )
        for first in (0, rows // 2):
            shape, where, part = (
                (rows - first, columns),
                Grid(scales, block, first),
                raw(packed[first:]),
            )
            expected = fp8_int.decode_integers(part, shape, where, bits, zeros)
            for cpu in cpus.values():
                same(cpu.decode_integers(part, shape, where, bits, zeros), expected)
                same(
                    cpu.decode_integers(unaligned_bytes(part), shape, where, bits, zeros), expected
                )


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_written_where_they_belong(cpus: Cpus, bits: int) -> None:
    for columns in [*range(1, 40), 511, 512, 513]:
        packed = generator(32).integers(0, 256, (3, -(-columns * bits // 32) * 4)).astype(np.uint8)
        scales, layout = some_scales(3, columns, (1, 8)), np.array([3, columns, 1, 8, 0])
        expected = fp8_int.decode_integers(raw(packed), (3, columns), Grid(scales, (1, 8)), bits)
        for cpu in cpus.values():
            found = written(cpu, 3 * columns * 4, 4, f"decode_int{bits}", packed, scales, 0, layout)
            same(found.view(np.float32).reshape(3, columns), expected)


# --------------------------------------------------------------------------------------------------
# to FP8, to bf16


@pytest.mark.parametrize("block", [(1, 32), (1, 7), (1, 416), (128, 128), (3, 100), (11, 416)])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_to_fp8(cpus: Cpus, make, dtype: str, block: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    values = make(dtype, 11, 416)
    for columns, first in ((416, 0), (399, 2), (17, 1)):
        x, shape = matrix(values[:, :columns], dtype), (11 + first, columns)
        grid_shape = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        amax = np.zeros(grid_shape, np.float32)
        fp8_int.grid_amax(x, Grid(amax, block, first))
        grid = Grid(fp8_int.fp8_scales_of(amax), block, first)
        expected, costs = fp8_int.quantize_fp8(x, grid), np.full(grid_shape, 0.5)
        fp8_int.fp8_costs(x, grid, costs)
        for cpu in cpus.values():
            for own in (x, unaligned(x)):
                found, sums = np.zeros(grid_shape, np.float32), np.full(grid_shape, 0.5)
                cpu.grid_amax(own, Grid(found, block, first))
                assert (found == amax).all()
                assert (cpu.quantize_fp8(own, grid) == expected).all()
                cpu.fp8_costs(own, grid, sums)
                assert sums.tobytes() == costs.tobytes()


def test_grid_amax_tells_which_block_is_not_finite(cpus: Cpus) -> None:
    values = np.ones((3, 50), np.float32)
    values[1, 49], values[2, 0] = -np.inf, np.nan
    for dtype in DTYPES:
        for cpu in cpus.values():
            found = np.zeros((3, 2), np.float32)
            cpu.grid_amax(matrix(values.astype(FLOAT_DTYPES[dtype]), dtype), Grid(found, (1, 32)))
            assert found[:2].tolist() == [[1, 1], [1, np.inf]]
            assert np.isnan(found[2, 0])
            assert found[2, 1] == 1


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


def transposed(values: Float32s | np.ndarray, columns: range) -> bytes:
    """By NumPy alone."""
    return values[:, columns.start : columns.stop : columns.step].T.tobytes()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (64, 64), (130, 67), (257, 33), (300, 200)])
def test_transpose(cpus: Cpus, kind: type[np.generic], shape: tuple[int, int]) -> None:
    rows, width = shape
    dtype = {1: "U8", 2: "BF16", 4: "F32"}[kind(0).itemsize]
    values = generator(33).integers(0, np.iinfo(kind).max, shape).astype(kind)
    stored = Matrix(unaligned_bytes(raw(values)), dtype, shape)
    for columns in (
        range(width),
        range(0, width, 2),
        range(1, width, 2),
        range(width // 3, width, 3),
        range(width // 2, width),
    ):
        if not columns:
            continue
        flat = np.frombuffer(stored.data, np.uint8)
        extra = (rows, width, columns.start, columns.step, len(columns))
        for cpu in cpus.values():
            found = cpu.transpose(stored, columns)
            assert (found.shape, found.dtype) == ((len(columns), rows), dtype)
            assert bytes(found.data) == transposed(values, columns)
            again = written(cpu, len(found.data), 1, f"transpose_{values.itemsize}", flat, *extra)
            assert again.tobytes() == found.data
