"""Blocks of four-bit values in wider dtypes, typed by hand; others are not taken for such."""

import ml_dtypes
import numpy as np
import pytest

from fp4convert.numerics.fake_quantization import (
    count_exact,
    count_on_grid,
    find_amaxes,
    find_steps,
    is_on_grid,
)
from fp4convert.numerics.formats import MXFP4, NVFP4

CODES = np.array([6, -4, 3, 2, 1.5, -1, 0.5, 0, 0, 1, 1, -2, 3, 4, -6, 0.5], np.float32)
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def as_bf16(values):
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("step", [1, 0.75, 0.0123, 3e-30, 7e20])
def test_the_step_of_a_block_is_found(step):
    low, high = find_steps(as_bf16(CODES * step).reshape(1, 16), "BF16")
    assert low[0] <= step <= high[0]
    assert high[0] - low[0] < step * 2.0**-7


@pytest.mark.parametrize("place", range(16))
def test_one_value_beside_the_grid_is_seen(place):
    """Five eighths of a step more than a value of E2M1 is none; bf16 has it."""
    values = CODES.copy()
    values[place] += 0.625 if abs(values[place]) < 6 else 1.25
    assert (np.abs(values[place]) == np.array(MAGNITUDES)).sum() == 0
    assert np.isnan(find_steps(values.reshape(1, 16), "BF16")).all()


def test_blocks_of_zeros_have_no_step():
    assert np.isnan(find_steps(np.zeros((1, 16), np.float32), "BF16")).all()


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(1).standard_normal((64, 64)),
        np.random.default_rng(2).integers(-8, 8, (64, 64)) * 0.01,  # int4
        np.random.default_rng(3).integers(-1, 2, (64, 64)) * 0.01,  # ternary
        np.random.default_rng(4).choice([-1.5, -0.5, 0.5, 1.5], (64, 64)) * 0.01,  # two bits
        np.zeros((64, 64)),
        np.full((64, 64), 0.3),
        np.where(
            np.random.default_rng(5).random((64, 64)) < 0.8,
            0,
            np.random.default_rng(6).standard_normal((64, 64)),
        ),  # pruned
        (np.random.default_rng(7).standard_normal((64, 64)) * 20).astype(ml_dtypes.float8_e4m3fn),
    ],
    ids=["normal", "int4", "ternary", "two bits", "zeros", "constant", "pruned", "fp8"],
)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_other_weights_are_not_taken_for_such(values, fmt):
    assert not is_on_grid(*count_on_grid(as_bf16(values), "BF16", fmt))


def test_steps_of_mxfp4_are_powers_of_two():
    rows = np.tile(CODES, (8, 2))
    assert count_on_grid(as_bf16(rows * 0.25), "BF16", MXFP4) == (8, 8)
    assert count_on_grid(as_bf16(rows * 0.3), "BF16", MXFP4) == (8, 0)
    assert count_on_grid(as_bf16(rows * 0.3), "BF16", NVFP4) == (16, 16)


def test_a_million_random_blocks_hold_none():
    rng = np.random.default_rng(8)
    for dtype, kind in (("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("F32", np.float32)):
        values = (rng.standard_normal((1 << 10, 1 << 12)) * 0.02).astype(kind).astype(np.float32)
        assert count_on_grid(values, dtype, NVFP4) == (1 << 18, 0)


@pytest.mark.parametrize("largest", [448, 416, 384, 352, 320, 288, 256, 240])
@pytest.mark.parametrize("value", [6, 4])
def test_the_amax_of_the_global_scale_is_found(largest, value):
    """The largest weight is 6 (or 4) steps of any of E4M3's mantissas."""
    scales = np.array([largest, 208, 176, 144, 120, 88, 52, 36], np.float32)
    codes = np.where(np.abs(CODES) > value, np.sign(CODES) * value, CODES)
    global_scale = np.float32(0.0123 / 2688)
    blocks = as_bf16(codes * (scales * global_scale)[:, None])
    found = list(find_amaxes(blocks, "BF16", float(np.abs(blocks).max())))[-1]
    ratio = found / 2688 / float(global_scale)
    assert abs(ratio / 2.0 ** round(np.log2(ratio)) - 1) < 2.0**-8
    steps = scales * global_scale / (np.float32(found) / np.float32(2688))
    rounded = steps.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    again = as_bf16(codes * (rounded * (np.float32(found) / np.float32(2688)))[:, None])
    assert np.array_equal(again, blocks)


def test_what_comes_back_is_counted():
    """Of three blocks one is zero, one comes back once it is rounded to bf16, one does not."""
    stored = np.zeros((1, 48), ml_dtypes.bfloat16)
    stored[0, 16:32], stored[0, 32:] = 1.0, 1.0
    values = stored.astype(np.float32)
    values[0, 16], values[0, 32] = 1 + 2.0**-10, 1 + 2.0**-7
    assert count_exact(stored, values, 16) == (2, 1)
