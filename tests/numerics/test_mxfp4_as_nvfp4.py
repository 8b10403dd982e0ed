"""MXFP4 blocks as NVFP4 blocks, against fractions and tables typed by hand."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from fp4convert.numerics.codec import dequantize
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Quantized
from fp4convert.numerics.mxfp4_as_nvfp4 import (
    NOTHING,
    Recast,
    global_exponent,
    largest_exponent,
    recast,
)

E2M1 = [Fraction(value) / 2 for value in (0, 1, 2, 3, 4, 6, 8, 12)]  # magnitudes of codes 0-7
# 2^-9 .. 2^8; below 2^-6 they are subnormal
E4M3_POWERS = "01 02 04 08 10 18 20 28 30 38 40 48 50 58 60 68 70 78"
EVERY_CODE = list(range(16)) * 2
TINY = 0.5 * 2.0**-127  # the least an MXFP4 code can be worth


def mxfp4(blocks: list[list[int]], exponents: list[int], rows: int = 1) -> Quantized:
    """Blocks of 32 codes under 2^exponent, dealt out to rows; packed by hand, low nibble first."""
    codes = [code for block in blocks for code in block]
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    scales = bytes(exponent + 127 for exponent in exponents)
    return Quantized(
        MXFP4, (rows, len(codes) // rows), memoryview(packed), memoryview(scales), None
    )


def codes_of(q: Quantized) -> list[int]:
    return [code for byte in bytes(q.packed) for code in (byte & 15, byte >> 4)]


@cache
def value_of(code: int) -> Fraction:
    return (-1 if code & 8 else 1) * E2M1[code & 7]


def shifted(code: int, shift: int) -> int:
    """The code nearest to code * 2^-shift, half to even; its sign stays."""
    wanted = E2M1[code & 7] / 2**shift
    return (
        min(range(8), key=lambda candidate: (abs(E2M1[candidate] - wanted), candidate & 1))
        | code & 8
    )


def expected(q: Quantized, k: int) -> tuple[list[int], list[int], int]:
    """Codes, the power of two of each block, and how many blocks keep every value."""
    codes, blocks, powers, kept = codes_of(q), [], [], 0
    for number, byte in enumerate(bytes(q.block_scales)):
        block = codes[32 * number : 32 * number + 32]
        is_zero = all(code & 7 == 0 for code in block)
        power = 0 if is_zero else byte - 127 - k
        shift = max(0, -9 - power)
        made = [shifted(code, shift) for code in block]
        kept += all(
            value_of(new) * 2**shift == value_of(old) for new, old in zip(made, block, strict=True)
        )
        blocks += made
        powers.append(max(power, -9))
    return blocks, powers, kept


def assert_recast(made: Recast, q: Quantized, k: int) -> None:
    """Codes, block scales, global scale and count are the expected ones."""
    codes, powers, kept = expected(q, k)
    assert (made.rows.format, made.rows.shape, made.rows.global_scale) == (NVFP4, q.shape, 2.0**k)
    assert made.rows.kind == "multiplier"
    assert codes_of(made.rows) == codes
    table = bytes.fromhex(E4M3_POWERS)
    assert bytes(made.rows.block_scales) == bytes(
        table[power + 9] for power in powers for _ in range(2)
    )
    assert made.kept_blocks == kept


def random_blocks(count: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 16, (count, 32)).tolist()


@pytest.mark.parametrize("top", [-118, -60, 0, 60, 125])
def test_blocks_within_18_powers_keep_every_value(top: int) -> None:
    exponents = list(range(top, max(top - 18, -128), -1))
    q = mxfp4([EVERY_CODE] * len(exponents), exponents)
    k = global_exponent(largest_exponent(q))
    assert k == top - 8
    made = recast(q, k)
    assert made.kept_blocks == len(exponents)
    assert bytes(made.rows.packed) == bytes(q.packed)
    assert_recast(made, q, k)
    values = np.array(
        [np.copysign(float(value_of(code)), -1 if code & 8 else 1) for code in EVERY_CODE]
    )
    found = dequantize(made.rows).reshape(-1, 32).astype(np.float64)
    assert found.tobytes() == (values * np.exp2(exponents)[:, None]).tobytes(), (
        "a code of -0 stays one"
    )


def test_the_first_block_below_is_rounded_half_to_even() -> None:
    """2^-10 of the group's power: every code is halved; halves that tie, 0.25, 0.75 and 1.5 ->
    0.75, go to the even code.
    """
    q = mxfp4([[7] * 32, EVERY_CODE], [0, -18])
    made = recast(q, -8)
    halved = [0, 0, 1, 2, 2, 3, 4, 5, 8, 8, 9, 10, 10, 11, 12, 13]  # 0.25 -> 0, 0.75 -> 1
    assert codes_of(made.rows)[32:] == halved * 2
    assert bytes(made.rows.block_scales) == b"\x78\x78\x01\x01"
    assert made.kept_blocks == 1
    assert_recast(made, q, -8)


def test_a_block_below_whose_codes_can_be_halved_is_kept() -> None:
    q = mxfp4([[7] * 32, [0, 8, 2, 10, 4, 12, 5, 13, 6, 14, 7, 15] + [0] * 20], [0, -18])
    made = recast(q, -8)
    assert made.kept_blocks == 2
    assert_recast(made, q, -8)


@pytest.mark.parametrize("span", [17, 18, 19, 20, 21, 22, 40, 140, 150, 200, 254])
def test_every_depth_is_rounded_and_counted(span: int) -> None:
    """By far below everything is rounded to nothing, and the block is not kept."""
    q = mxfp4([[7] * 32, EVERY_CODE, [8] * 32, [1] * 32], [127, 127 - span, 127 - span, 127 - span])
    made = recast(q, 119)
    assert_recast(made, q, 119)
    assert made.kept_blocks == (4 if span <= 17 else 2)


def test_blocks_of_zeros_have_no_say() -> None:
    """Whatever their scale, they are kept, with the block scale 1 and the signs of their zeros."""
    zeros = [[0] * 32, [8] * 32, [0, 8] * 16]
    q = mxfp4([*zeros, [1] + [0] * 31], [125, -127, 127, -3])
    assert largest_exponent(q) == -3
    made = recast(q, -11)
    assert made.kept_blocks == 4
    assert bytes(made.rows.packed) == bytes(q.packed)
    assert bytes(made.rows.block_scales) == b"\x38" * 6 + b"\x78" * 2


def test_a_matrix_of_zeros() -> None:
    q = mxfp4([[0] * 32, [8] * 32], [127, -127], rows=2)
    assert largest_exponent(q) == NOTHING
    assert global_exponent(NOTHING) == 0
    made = recast(q, 0)
    assert (made.kept_blocks, made.rows.global_scale) == (2, 1.0)
    assert (bytes(made.rows.packed), bytes(made.rows.block_scales)) == (
        bytes(q.packed),
        b"\x38" * 4,
    )


@pytest.mark.parametrize(
    ("exponent", "k"),
    [(-127, -126), (-126, -126), (-119, -126), (-118, -126), (-117, -125), (127, 119)],
)
def test_a_global_scale_is_a_normal_float32(exponent: int, k: int) -> None:
    """Bytes 0 and 254 too; 2^-126 is the least normal one, and its reciprocal is finite."""
    assert global_exponent(exponent) == k
    q = mxfp4([[3] * 32], [exponent])
    made = recast(q, k)
    assert_recast(made, q, k)
    assert made.kept_blocks == 1
    assert (dequantize(made.rows).astype(np.float64) == 1.5 * 2.0**exponent).all()


@pytest.mark.parametrize("byte", [0, 1, 252, 254])
def test_extreme_bytes_beside_one_another(byte: int) -> None:
    q = mxfp4([*random_blocks(4, byte)], [byte - 127, -127, 0, 127], rows=2)
    k = global_exponent(largest_exponent(q))
    assert k == 119
    assert_recast(recast(q, k), q, k)


@pytest.mark.parametrize("seed", range(8))
def test_any_blocks_equal_fractions(seed: int) -> None:
    chance = np.random.default_rng(seed)
    blocks = random_blocks(48, seed)
    for block in blocks[::5]:
        block[:] = [code & 8 for code in block]
    exponents = chance.integers(
        *((-30, 1), (-127, 128), (100, 128), (-127, -100))[seed % 4], 48
    ).tolist()
    q = mxfp4(blocks, exponents, rows=6)
    top = max(
        exponent
        for block, exponent in zip(blocks, exponents, strict=True)
        if any(code & 7 for code in block)
    )
    assert largest_exponent(q) == top
    k = max(top - 8, -126)
    assert global_exponent(top) == k
    assert_recast(recast(q, k), q, k)


@pytest.mark.parametrize("height", [1, 2, 5])
def test_panels_are_the_whole(height: int) -> None:
    q = mxfp4(random_blocks(44, 3), np.random.default_rng(3).integers(-25, 0, 44).tolist(), rows=11)
    whole = recast(q, -8)
    panels = [recast(q.rows(first, min(first + height, 11)), -8) for first in range(0, 11, height)]
    assert 0 < whole.kept_blocks < 44, "otherwise this tests nothing"
    assert sum(panel.kept_blocks for panel in panels) == whole.kept_blocks
    for part in ("packed", "block_scales"):
        assert b"".join(bytes(getattr(panel.rows, part)) for panel in panels) == bytes(
            getattr(whole.rows, part)
        )


def test_the_least_value_survives() -> None:
    q = mxfp4([[1] * 32], [-127])
    assert (dequantize(recast(q, -126).rows).astype(np.float64) == TINY).all()
