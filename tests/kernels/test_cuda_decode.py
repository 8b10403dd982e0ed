"""kernels/decode.cu on the host against fp8_int.py, byte for byte.

Decides that packed weights are decoded on a GPU as the CPU does; simt.py stands in for the GPU.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from adversarial import generator
from ptx import BUILDS
from scale_grids import EVERY_LAYOUT, same, some_scales
from simt import KERNELS, aligned, guarded, is_intact, launch

from fp4convert.numerics import fp8_int
from fp4convert.numerics.fp8_int import Grid

Array = np.ndarray


@pytest.fixture(scope="module", params=BUILDS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    build, has_cvt = request.param
    made: ctypes.CDLL = build(KERNELS / "decode.cu", tmp_path_factory.mktemp("decode"), has_cvt)
    return made


def raw(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def written(
    library: ctypes.CDLL, name: str, nbytes: int, grid: tuple[int, int], *arguments: Array | int
) -> Array:
    """What a kernel writes; nothing beside it, and nothing into what it reads."""
    held = [a if isinstance(a, int) else aligned(raw(a)) for a in arguments]
    y = guarded(nbytes)
    places = [a if isinstance(a, int) else a.ctypes.data for a in (*held, y)]
    launch(library, name, grid, places)
    assert is_intact(y), f"{name}: written beside y"
    for given, own in zip(arguments, held, strict=True):
        assert isinstance(given, int) or (is_intact(own) and own.tobytes() == bytes(raw(given)))
    return y


def decoded(
    library: ctypes.CDLL, name: str, codes: Array, shape: tuple[int, int], where: Grid, *more: Array
) -> Array:
    zeros = more or ((0,) if "int" in name else ())
    layout = np.array([*shape, *where.block, where.first_row])
    n = shape[0] * shape[1]
    blocks = (-(-n // 8192), 1)
    found = written(library, name, 4 * n, blocks, codes, where.scales, *zeros, layout)
    return found.view(np.float32).reshape(shape)


# --------------------------------------------------------------------------------------------------
# FP8


@EVERY_LAYOUT
def test_decode_fp8(library: ctypes.CDLL, rows: int, columns: int, block: tuple[int, int]) -> None:
    codes = generator(60, rows).integers(0, 256, (rows, columns)).astype(np.uint8)
    scales = some_scales(rows, columns, block)
    for first in {0, 1, rows // 2, rows - 1}:
        where, shape = Grid(scales, block, first), (rows - first, columns)
        expected = fp8_int.decode_fp8(raw(codes[first:]), shape, where)
        same(decoded(library, "decode_fp8", codes[first:], shape, where), expected)


def test_every_fp8_code_under_every_kind_of_scale(library: ctypes.CDLL) -> None:
    """Every exponent that float32 has, both ends of its mantissas, zero, infinity and NaN."""
    bits = np.arange(256, dtype=np.uint32)[:, None] << 23 | np.array(
        [0, 1, 0x2AAAAA, 0x7FFFFF], np.uint32
    )
    both = np.concatenate([bits.ravel(), bits.ravel() | 1 << 31]).astype(np.uint32)
    where = Grid(both.view(np.float32)[:, None], (1, 256))
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(both), 1))
    expected = fp8_int.decode_fp8(raw(codes), codes.shape, where)
    assert np.isnan(expected[:, [0x7F, 0xFF]]).all()  # NaN codes, which amax then finds
    same(decoded(library, "decode_fp8", codes, codes.shape, where), expected)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 24, 64])
def test_any_number_of_fp8_columns(library: ctypes.CDLL, width: int) -> None:
    for columns in [*range(1, 36), 127, 129, 513]:
        codes = generator(61, columns).integers(0, 256, (3, columns)).astype(np.uint8)
        where = Grid(some_scales(3, columns, (2, width)), (2, width))
        expected = fp8_int.decode_fp8(raw(codes), codes.shape, where)
        same(decoded(library, "decode_fp8", codes, codes.shape, where), expected)


@pytest.mark.parametrize("shape", [(9, 8192), (70, 1000), (20000, 3), (1, 30000)])
def test_rows_go_on_in_the_next_launch_block(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    codes = generator(62, shape[0]).integers(0, 256, shape).astype(np.uint8)
    where = Grid(some_scales(shape[0] + 5, shape[1], (128, 128)), (128, 128), 5)
    expected = fp8_int.decode_fp8(raw(codes), shape, where)
    same(decoded(library, "decode_fp8", codes, shape, where), expected)


# --------------------------------------------------------------------------------------------------
# integers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("group", [1, 7, 16, 32, 128, 1100])
def test_decode_integers(
    library: ctypes.CDLL, bits: int, has_zero_points: bool, group: int
) -> None:
    rng, half = generator(63, group), 1 << bits - 1
    for rows, columns in ((5, 1), (2, 9), (3, 32), (3, 100), (4, 511), (2, 1100), (40, 512)):
        row_nbytes = -(-columns * bits // 32) * 4
        packed = rng.integers(0, 256, (rows, row_nbytes)).astype(np.uint8)
        scales = some_scales(rows, columns, (1, group))
        zeros = rng.integers(-half, half, scales.shape).astype(np.float32)
        zeros[0, 0] = -half
        more = (zeros,) if has_zero_points else ()
        where, shape = Grid(scales, (1, group)), (rows, columns)
        expected = fp8_int.decode_integers(raw(packed), shape, where, bits, *more)
        same(decoded(library, f"decode_int{bits}", packed, shape, where, *more), expected)


def test_every_integer_code_under_every_zero_point(library: ctypes.CDLL) -> None:
    for bits in (4, 8):
        count = 1 << bits
        codes = np.tile(np.arange(count), (count, 1)).astype(np.uint8)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        where = Grid(some_scales(count, count, (1, count)), (1, count))
        zeros = np.arange(count, dtype=np.float32)[:, None] - count // 2
        values = (codes.astype(np.float32) - count // 2 - zeros) * where.scales
        shape = (count, count)
        same(decoded(library, f"decode_int{bits}", packed, shape, where, zeros), values)


# --------------------------------------------------------------------------------------------------
# transpose

SHAPES = [(1, 1), (3, 70), (64, 64), (130, 67), (257, 33), (304, 200), (136, 288)]


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize("shape", SHAPES)
def test_transpose(library: ctypes.CDLL, kind: type[np.generic], shape: tuple[int, int]) -> None:
    rows, width = shape
    values = generator(64).integers(0, np.iinfo(kind).max, shape).astype(kind)
    side = 256 // values.itemsize
    for columns in (
        range(width),
        range(0, width, 2),
        range(1, width, 2),
        range(8, width, 1),
        range(width // 3, width, 3),
        range(width // 2, width),
    ):
        if not columns:
            continue
        numbers = (rows, width, columns.start, columns.step, len(columns))
        grid = (-(-rows // side), -(-len(columns) // side))
        name = f"transpose_{values.itemsize}"
        found = written(
            library, name, rows * len(columns) * values.itemsize, grid, values, *numbers
        )
        expected = values[:, columns.start : columns.stop : columns.step].T
        assert found.tobytes() == expected.tobytes(), columns
