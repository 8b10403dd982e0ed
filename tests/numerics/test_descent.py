"""Codes and scales that cost less: beside brute force in float64, which tries every value and knows
no formula but the cost; and on matrices that are made to break it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4convert.numerics import codec, descent
from fp4convert.numerics.formats import MXFP4, NVFP4

BOTH = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def second_moments(count, width, seed, share=0.05):
    """Blocks of x x^T of inputs that go together, and what is added to the diagonals."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((count, 3 * width, width // 3))
    x = (
        x
        @ chance.standard_normal((count, width // 3, width))
        * np.exp(chance.normal(0, 1, (count, 1, width)))
    )
    h = x.swapaxes(1, 2) @ x / (3 * width)
    h += share * np.trace(h, axis1=1, axis2=2).mean() / width * np.eye(width)
    narrow = h.astype(np.float32)
    return np.tril(narrow) + np.tril(narrow, -1).swapaxes(1, 2)


def matrix_of(fmt, rows, columns, seed=0, rule=None):
    x = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    return x, codec.quantize(x, fmt, rule or fmt.scale_rules[0])


def stored_steps(q):
    """What one code unit is worth under each byte, by ml_dtypes."""
    every = np.arange(256, dtype=np.uint8)
    if q.format is MXFP4:
        return every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(q.global_scale)


def values_of(q):
    """(rows, columns) float32 values, and the scales' bytes."""
    packed = np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(q.shape)
    scales = np.frombuffer(q.block_scales, np.uint8).reshape(q.shape[0], -1)
    steps = np.repeat(stored_steps(q)[scales], q.format.block_size, axis=1)
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) * steps, scales


def costs(x, values, h):
    """e^T H e of every row; float64."""
    e, width = x.astype(np.float64) - values.astype(np.float64), h.shape[1]
    found = np.zeros(len(x))
    for number, block in enumerate(h.astype(np.float64)):
        part = e[:, number * width : (number + 1) * width]
        n = part.shape[1]
        found += np.einsum("ri,ij,rj->r", part, block[:n, :n], part)
    return found


def by_brute_force(x, q, h, passes):
    """Every scale in reach, and under it for one column after the other every value there is."""
    (values, scales), steps, size = values_of(q), stored_steps(q), q.format.block_size
    values, scales, reach = values.copy(), scales.astype(int), {16: 3, 32: 1}[size]
    legal = {16: range(1, 127), 32: range(253)}[size]
    h = h.astype(np.float64)
    for row, v in enumerate(values):
        for number in range(passes):
            for first in range(0, x.shape[1], size):
                best, own = (costs(x[row : row + 1], v[None], h)[0], v.copy(), None), None
                own = scales[row, first // size]
                far = reach if number == 0 else 1
                for byte in sorted(range(own - far, own + far + 1), key=lambda b: abs(b - own)):
                    if byte not in legal:
                        continue
                    tried = v.copy()
                    for j in range(first, first + size):
                        every = np.repeat(tried[None], len(GRID), axis=0)
                        every[:, j] = GRID * steps[byte]
                        lost = costs(np.repeat(x[row : row + 1], len(GRID), axis=0), every, h)
                        tried = every[lost.argmin()]
                    lost = costs(x[row : row + 1], tried[None], h)[0]
                    if lost < best[0]:
                        best = lost, tried, byte
                if best[2] is not None:
                    v[:], scales[row, first // size] = best[1], best[2]
    return values, scales


@pytest.mark.parametrize("passes", [1, 3])
@BOTH
@pytest.mark.sweep(3)
def test_every_step_is_the_one_of_least_cost(fmt, passes):
    """In one block of H, and in two, of which the last has half its columns."""
    for columns, width, seed in ((64, 64, 0), (96, 64, 1)):
        x, q = matrix_of(fmt, 5, columns, seed, {NVFP4: "amax", MXFP4: "ceil"}[fmt])
        h = second_moments(-(-columns // width), width, seed)
        found, found_scales = values_of(descent.descend(x, q, h, passes))
        expected, scales = by_brute_force(x, q, h, passes)
        assert np.array_equal(found_scales, scales)
        assert np.array_equal(found, expected)
        assert not np.array_equal(scales, values_of(q)[1])


@BOTH
def test_in_the_end_no_single_code_is_better_another(fmt):
    x, q = matrix_of(fmt, 8, 64)
    h = second_moments(1, 64, 3)
    values, scales = values_of(descent.descend(x, q, h, 60))
    steps = np.repeat(stored_steps(q)[scales], fmt.block_size, axis=1)
    least = costs(x, values, h)
    assert (least < 0.5 * costs(x, values_of(q)[0], h)).all()
    for j in range(64):
        for value in GRID:
            tried = values.copy()
            tried[:, j] = value * steps[:, j]
            assert (costs(x, tried, h) >= least * (1 - 1e-6)).all()


@BOTH
def test_no_passes_change_nothing(fmt):
    x, q = matrix_of(fmt, 3, 64)
    found = descent.descend(x, q, second_moments(1, 64, 0), 0)
    assert (bytes(found.packed), bytes(found.block_scales)) == (
        bytes(q.packed),
        bytes(q.block_scales),
    )


def hostile(columns):
    """H, and what is hard about it."""
    ones = np.ones((columns, columns), np.float32)
    eye = np.eye(columns, dtype=np.float32)
    spread = np.geomspace(1e-12, 1e12, columns).astype(np.float32)
    yield "columns that are all the same", ones + 1e-6 * eye
    yield "nothing but the diagonal, of any size", eye * spread
    yield (
        "large and small inputs that go together",
        np.sqrt(np.outer(spread, spread)).astype(np.float32) * (0.999 * ones + 0.001 * eye),
    )
    yield "tiny", second_moments(1, columns, 1)[0] * np.float32(1e-30)
    yield "squares beyond float32", second_moments(1, columns, 1)[0] * np.float32(1e34)
    signs = np.where(np.arange(columns) % 2, -1, 1).astype(np.float32)
    yield "columns that are each other's opposites", np.outer(signs, signs) + 1e-5 * eye


def weights(columns):
    chance = np.random.default_rng(4)
    x = chance.standard_normal((24, columns), dtype=np.float32)
    yield x
    yield x * np.exp(chance.normal(0, 6, x.shape)).astype(np.float32)
    yield np.where(chance.random(x.shape) < 0.97, 0, x).astype(np.float32)
    yield x * np.float32(1e-40)
    yield x * np.float32(1e37)
    yield np.repeat(chance.choice(GRID, (24, 1)), columns, axis=1)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@BOTH
@pytest.mark.sweep(2)
def test_no_row_costs_more_than_it_did(fmt, every):
    """By the cost in float64, of any matrix and any H; and by much less where there is room.

    every  all scale rules before each matrix; in the gate before the first one
    """
    for what, h in hostile(96):
        for number, x in enumerate(weights(96)):
            rules = fmt.scale_rules[:-1] if every or number == 0 else ("mse",)
            for rule in rules:
                q = codec.quantize(x, fmt, rule)
                found = descent.descend(x, q, h[None], 2)
                before, after = (costs(x, values_of(each)[0], h[None]) for each in (q, found))
                assert (after <= before * (1 + 1e-12)).all(), (what, rule)
                if number == 0 and what.startswith("columns"):
                    assert after.sum() <= 0.7 * before.sum(), (what, rule)


@pytest.mark.parametrize(("width", "joined"), [(48, 96), (100, 800), (64, 64), (8, 32)])
def test_blocks_of_h_are_joined_until_they_hold_whole_blocks_of_scales(width, joined):
    columns = 800
    count = -(-columns // width)
    h = second_moments(count, width if width > 8 else 9, 2)[:, :width, :width]
    found = descent.aligned(h, columns, MXFP4)
    assert found.shape == (-(-count * width // joined), joined, joined)
    whole, expected = (np.zeros((1000, 1000), np.float32) for _ in range(2))
    for blocks, into in ((h, expected), (found, whole)):
        for number, block in enumerate(blocks):
            here = slice(number * len(block), (number + 1) * len(block))
            into[here, here] = block
    assert np.array_equal(whole, expected)


def test_a_single_block_of_h_ends_with_the_columns():
    h = second_moments(1, 70, 0)
    assert np.array_equal(descent.aligned(h, 64, NVFP4), h[:, :64, :64])


@BOTH
def test_sums_that_float32_cannot_hold_make_no_row_worse(fmt):
    """Errors of a few large columns cancel, and their sum in float32 is off by as much as the small
    ones are worth: steps that look like gains are none, and such rows stay as they came in.
    """
    size = {NVFP4: np.float32(1e5), MXFP4: np.float32(1e7)}[fmt]
    x = np.random.default_rng(0).standard_normal((300, 64), dtype=np.float32)
    x[:, :32] *= size
    h = np.ones((1, 64, 64), np.float32) + np.float32(1e-6) * np.eye(64, dtype=np.float32)
    q = descent.descend(x, codec.quantize(x, fmt, "mse"), h, 4)
    found = descent.descend(x, q, h, 2)
    before, after = (costs(x, values_of(each)[0], h) for each in (q, found))
    assert (after <= before).all()
    assert (after < before).any()
