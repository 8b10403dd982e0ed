"""The scale rules that search, against every scale there is, tried one by one by other means.

Decides that codec.py's mse, four-over-six and importance are right; test_kernels.py then holds
every kernel to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from adversarial import (
    DTYPES,
    LARGEST,
    PLAIN,
    Values,
    around_midpoints,
    block_amaxes,
    generator,
    group_amaxes,
    scattered_importance,
)
from numpy.typing import NDArray
from scale_search import (
    GRID,
    assert_same_scales,
    every_code,
    every_exponent,
    f32,
    lattice,
    normalised,
    searched,
)

from fp4convert.errors import InputError
from fp4convert.numerics import codec
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import MXFP4, NVFP4, Format

# --------------------------------------------------------------------------------------------------
# NVFP4, rule mse


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_mse_is_the_best_of_all_codes(make: Callable[[str, int, int], Values], dtype: str) -> None:
    blocks = make(dtype, 16, 512).astype(f32).reshape(-1, 16)
    amax = float(np.abs(blocks).max())
    for group_amax in (amax, min(amax * 7.3, LARGEST["F32"]), 2688.0, 0.0, amax / 3000):
        assert_same_scales(
            searched(blocks, NVFP4, group_amax),
            every_code(blocks, group_amax),
            blocks,
            f"group amax {group_amax}",
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_mse_around_midpoints(dtype: str) -> None:
    for group_amax in list(group_amaxes(dtype))[::12]:
        blocks = around_midpoints(
            block_amaxes(dtype, group_amax, 150), dtype, NVFP4, "amax", group_amax
        )
        blocks = blocks.astype(f32).reshape(-1, 16)
        assert_same_scales(
            searched(blocks, NVFP4, group_amax),
            every_code(blocks, group_amax),
            blocks,
            f"{group_amax}",
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("group_amax", [2688.0, 2688e-23, 2688e20 / 448, 1536.0, 300.0, 1.0])
def test_mse_where_values_lie_on_grids_of_other_scales(group_amax: float) -> None:
    """What makes far codes win; under small group amaxes scales are at their upper end, or beyond
    it.
    """
    for values in lattice(1000, 21):
        blocks = (values * f32(group_amax / 2688)).astype(f32)
        assert_same_scales(
            searched(blocks, NVFP4, group_amax), every_code(blocks, group_amax), blocks
        )
        assert_same_scales(
            searched(blocks, NVFP4, group_amax / 40), every_code(blocks, group_amax / 40), blocks
        )


def test_mse_of_values_so_small_that_their_squares_underflow() -> None:
    """Beside one large value.  The cost of a higher code can then round to less, and wins, being
    the least of all.
    """
    rng = generator(22)
    blocks = (
        np.exp2(rng.uniform(-90, 0, (10000, 16)))
        * rng.choice([0.0, 1.0], (10000, 16), p=[0.7, 0.3])
    ).astype(f32)
    blocks[:, 0] = rng.choice(GRID[1:], 10000)
    expected = every_code(blocks, 6.0 * 64)
    assert_same_scales(searched(blocks, NVFP4, 6.0 * 64), expected, blocks)


def test_mse_stores_one_where_all_costs_are_equal() -> None:
    blocks = np.zeros((3, 16), f32)
    blocks[1, 0], blocks[2, 0] = 2.0**-149, -0.0
    assert searched(blocks, NVFP4, 1e30).tolist() == [0x38] * 3


def test_mse_by_hand() -> None:
    """6 and 4.5 are exact at scale 1.5; 6.4 and 4.8 are 6.5 and 4.875 at 1.625, and nowhere as
    near.
    """
    blocks = np.zeros((2, 16), f32)
    blocks[:, 0], blocks[:, 1] = (6, 6.4), (4.5, 4.8)
    assert searched(blocks, NVFP4, 2688.0, "amax").tolist() == [0x38, 0x39]
    assert searched(blocks, NVFP4, 2688.0).tolist() == [0x3C, 0x3D]


def test_of_equal_costs_the_code_nearest_to_that_of_rule_amax_wins() -> None:
    """A lone value is exact at code c0 (q = 6), and at c0 + 4 (q = 4)."""
    lone = np.zeros((1, 16), f32)
    lone[0, 5] = 6
    assert searched(lone, NVFP4, 2688.0).tolist() == [0x38]


def test_the_window_of_scalesweep_holds() -> None:
    """c0 - 3 to c0 + 7 from code 16 on, as arXiv 2606.07618 has it; both of its ends are reached,
    or nearly.
    """
    found = []
    for blocks in (*lattice(5000, 23), generator(24).normal(0, 1, (5000, 16)).astype(f32)):
        first = searched(blocks, NVFP4, 40.0 * 448, "amax")
        found.append((searched(blocks, NVFP4, 40.0 * 448) - first)[first >= 16])
    offsets = np.concatenate(found)
    assert -3 <= offsets.min() <= -2
    assert 6 <= offsets.max() <= 7


# --------------------------------------------------------------------------------------------------
# MXFP4, rule mse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_mxfp4_mse_is_the_best_of_all_exponents(
    make: Callable[[str, int, int], Values], dtype: str
) -> None:
    blocks = make(dtype, 16, 1024).astype(f32).reshape(-1, 32)
    assert_same_scales(searched(blocks, MXFP4), every_exponent(blocks), blocks)


def test_mxfp4_mse_where_values_lie_on_grids_of_other_exponents() -> None:
    for values in lattice(4000, 25):
        blocks = values.reshape(-1, 32)
        assert_same_scales(searched(blocks, MXFP4), every_exponent(blocks), blocks)


def test_mxfp4_mse_by_hand() -> None:
    """Of 8 beside halves step 1 makes 6 beside halves, step 2 makes 8 beside zeros; 7.5 is 7.5 =
    1.9 * 4 nearly; 6 is exact.
    """
    blocks = np.full((3, 32), 0.5, f32)
    blocks[1:] = 0
    blocks[:, 7] = 8, 7.9, 6
    assert searched(blocks, MXFP4, rule="floor").tolist() == [128, 127, 127]
    assert searched(blocks, MXFP4).tolist() == [127, 128, 127]


# --------------------------------------------------------------------------------------------------
# importance


def weighted(
    blocks: Float32s, fmt: Format, importance: Float32s, group_amax: float | None = None
) -> NDArray[np.int64]:
    """Scales of blocks, one to a row, under weights of their own."""
    x, flat = blocks.reshape(1, -1), importance.ravel()
    return np.frombuffer(
        codec.quantize(x, fmt, "importance", group_amax, flat).block_scales, np.uint8
    ).astype(np.int64)


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_importance_is_the_best_of_all_codes(make: Callable[[str, int, int], Values]) -> None:
    for dtype in DTYPES:
        blocks = make(dtype, 8, 512).astype(f32).reshape(-1, 16)
        importance = scattered_importance(blocks.size).reshape(-1, 16)
        amax = float(np.abs(blocks).max())
        for group_amax in (amax, 2688.0):
            expected = every_code(blocks, group_amax, normalised(importance))
            assert_same_scales(
                weighted(blocks, NVFP4, importance, group_amax), expected, blocks, dtype
            )


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_importance_is_the_best_of_all_exponents(make: Callable[[str, int, int], Values]) -> None:
    for dtype in DTYPES:
        blocks = make(dtype, 8, 1024).astype(f32).reshape(-1, 32)
        importance = scattered_importance(blocks.size).reshape(-1, 32)
        expected = every_exponent(blocks, normalised(importance), reach=40)
        assert_same_scales(weighted(blocks, MXFP4, importance), expected, blocks, dtype)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_only_ratios_of_importance_matter(fmt: Format) -> None:
    blocks = generator(26).normal(0, 1, (500, fmt.block_size)).astype(f32)
    importance = generator(27).exponential(1, blocks.shape).astype(f32)
    found = weighted(blocks, fmt, importance)
    for exponent in (-120, 3, 100):
        assert_same_scales(weighted(blocks, fmt, np.ldexp(importance, exponent)), found, blocks)
    for flat in (0.0, 1.0, 0.3, 2.0**-149, 3e38):
        assert_same_scales(
            weighted(blocks, fmt, np.full_like(importance, flat)),
            searched(blocks, fmt, float(abs(blocks).max())),
            blocks,
        )


def test_columns_that_were_never_seen_only_decide_ties() -> None:
    """Only the first column was: it is exact under codes 0x38 and 0x3C, of which the other column
    prefers the second.
    """
    block, importance = np.zeros((1, 16), f32), np.zeros((1, 16), f32)
    block[0, :2], importance[0, 0] = (6.0, 4.5), 5.0
    assert weighted(block, NVFP4, importance, 2688.0).tolist() == [0x3C]
    block[0, 1] = 1e4
    assert weighted(block, NVFP4, importance, 2688.0).tolist() == [
        0x54
    ]  # 12: the largest under which 6 is exact


@pytest.mark.parametrize(
    ("importance", "code"),
    [
        (np.ones(15, f32), "importance-shape"),
        (np.ones((1, 16), f32), "importance-shape"),
        (np.full(16, np.nan, f32), "importance-value"),
        (np.array([1.0] * 15 + [np.inf], f32), "importance-value"),
        (np.array([1.0] * 15 + [-1e-30], f32), "importance-value"),
        (None, "no-importance"),
    ],
)
def test_importance_that_is_none_is_refused(importance: Float32s | None, code: str) -> None:
    with pytest.raises(InputError) as refused:
        codec.quantize(np.ones((2, 16), f32), NVFP4, "importance", None, importance)
    assert (refused.value.code, refused.value.exit_code) == (code, 2)
    assert refused.value.next_step.startswith("Give ")


def test_importance_for_another_rule_is_our_bug() -> None:
    with pytest.raises(ValueError, match="does not use it"):
        codec.quantize(np.ones((2, 16), f32), NVFP4, "mse", None, np.ones(16, f32))


# --------------------------------------------------------------------------------------------------
# four-over-six


def test_four_over_six_by_hand() -> None:
    """Global scale 1 for 1536. Amax 6: scale 1, or 1.5 where that is better."""
    blocks = np.zeros((4, 16), f32)
    blocks[:, 0] = 6
    blocks[1, 1], blocks[2, 1] = 4.5, 5.0
    blocks[3, 1:3] = 3.0, 2.0
    found = codec.quantize(blocks, NVFP4, "four-over-six", 1536.0)
    assert found.global_scale == 1.0
    assert bytes(found.block_scales) == bytes([0x38, 0x3C, 0x3C, 0x38])
    assert (
        codec.quantize(np.full((1, 16), 1536, f32), NVFP4, "four-over-six").block_scales[0] == 0x78
    )  # 256
