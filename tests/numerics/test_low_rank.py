"""Low-rank arithmetic: kernels equal the reference on every level, and the reference is GPTQ's."""

from fractions import Fraction

import numpy as np
import pytest
from cpu_levels import every_level

from fp4convert.numerics import low_rank
from fp4convert.numerics.low_rank import directions_of, protection_of

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    return every_level(tmp_path_factory.mktemp("levels"))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exactly_rounded(value: Fraction) -> np.float32:
    """The float32 nearest to an exact number, half to even, among its two neighbours."""
    near = np.float32(float(value))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.inf)]
    return min(
        map(np.float32, candidates),
        key=lambda each: (
            abs(Fraction(float(each)) - value),
            int(np.float32(each).view(np.uint32)) & 1,
        ),
    )


def test_products_are_added_with_one_rounding_each():
    b, a = normal(3, 9, seed=1), normal(9, 4, seed=2)
    b[0, 1], a[1, 0] = 2.0**-70, 3.0  # far below the sum: only its sign counts
    expected = np.zeros((3, 4), np.float32)
    for i in range(3):
        for j in range(4):
            for k in range(9):
                exact = Fraction(float(b[i, k])) * Fraction(float(a[k, j]))
                expected[i, j] = exactly_rounded(exact + Fraction(float(expected[i, j])))
    assert (low_rank.multiply(b, a) == expected).all()


def test_a_sum_close_to_the_middle_of_two_floats_is_rounded_once(levels):
    """1 + 2^-23 + 2^-24 - 2^-70: float64 has it in the middle, from where it would go up."""
    b = np.array([[1, 2.0**-12 * (1 + 2.0**-23)]], np.float32)
    a = np.array([[1 + 2.0**-23], [2.0**-12 * (1 - 2.0**-23)]], np.float32)
    expected = np.float32(1 + 2.0**-23)
    assert low_rank.multiply(b, a)[0, 0] == expected
    assert {level: cpu.multiply(b, a)[0, 0] for level, cpu in levels.items()} == dict.fromkeys(
        levels, expected
    )


@pytest.mark.parametrize("shape", [(5, 3, 7), (40, 16, 300), (2, 600, 16), (3, 40, 33), (1, 1, 1)])
def test_every_level_multiplies_alike(shape, levels):
    rows, inner, columns = shape
    b, a = normal(rows, inner, seed=3), normal(inner, columns, seed=4)
    for level, cpu in levels.items():
        found = cpu.multiply(b, a)
        assert np.array_equal(found.view(np.uint32), low_rank.multiply(b, a).view(np.uint32)), level


@pytest.mark.parametrize(("rows", "columns", "rank", "block"), [(37, 64, 5, 16), (16, 96, 1, 32)])
def test_every_level_rounds_alike(rows, columns, rank, block, levels):
    x, a = normal(rows, columns, seed=5), normal(rank, columns, seed=6)
    steps = np.exp2(normal(rows, columns // block, seed=7) - 2).astype(np.float32)
    way = directions_of(a)
    nothing = np.zeros((rows, rank), np.float32)
    y, pulled = low_rank.pull_to_nearest(x, steps, (way.basis, way.first), x, nothing)
    again = low_rank.pull_to_nearest(x, steps, (way.basis, way.again), y, pulled)
    for level, cpu in levels.items():
        found = cpu.pull_to_nearest(x, steps, (way.basis, way.first), x, nothing)
        assert all(map(np.array_equal, found, (y, pulled))), level
        found = cpu.pull_to_nearest(x, steps, (way.basis, way.again), *found)
        assert all(map(np.array_equal, found, again)), level


def test_a_basis_is_orthonormal_and_spans_the_rows():
    a = normal(6, 48, seed=8)
    a[3], a[5] = 2 * a[0] - a[1], 0
    basis = low_rank.basis_of(a).astype(np.float64)
    assert basis.shape == (48, 4)
    assert np.abs(basis.T @ basis - np.eye(4)).max() < 1e-6
    assert np.abs(a - (a @ basis) @ basis.T).max() < 1e-5
    assert low_rank.basis_of(np.zeros((2, 8), np.float32)).shape == (8, 0)


def gptq(x, steps, h):
    """Algorithm 1 of GPTQ (arXiv 2210.17323), columns in their order, with the inverse itself."""
    x, y = x.astype(np.float64), np.zeros(x.shape)
    block = x.shape[1] // steps.shape[1]
    for j in range(x.shape[1]):
        inverse = np.linalg.inv(h[j:, j:])
        step = steps[:, j // block].astype(np.float64)
        quotient = np.clip(np.abs(x[:, j]) / step, 0, 6)
        nearest = GRID[np.abs(quotient[:, None] - GRID).argmin(axis=1)]
        y[:, j] = np.sign(x[:, j]) * nearest * step
        error = (x[:, j] - y[:, j]) / inverse[0, 0]
        x[:, j + 1 :] -= error[:, None] * inverse[0, 1:]
    return y


def test_the_first_pass_is_gptq_under_the_same_h():
    x, a = normal(24, 64, seed=9), normal(4, 64, seed=10)
    steps = np.full((24, 4), 0.4, np.float32)
    way = directions_of(a)
    wide = way.basis.astype(np.float64)
    expected = gptq(x, steps, np.eye(64) + 3.2 * wide @ wide.T)  # 64 columns over 5 * 4
    found, pulled = low_rank.pull_to_nearest(
        x, steps, (way.basis, way.first), x, np.zeros((24, 4), np.float32)
    )
    assert (np.abs(found - expected) < 1e-4).mean() > 0.999  # but for ties that floats decide
    assert np.abs((x - found) @ wide - pulled).max() < 1e-4


def test_every_pass_lessens_the_error_that_counts():
    x, a = normal(32, 128, seed=11), normal(2, 128, seed=12)
    steps = np.full((32, 8), 0.4, np.float32)
    way = directions_of(a)

    def cost(y):
        error = (x - y).astype(np.float64)
        return (error**2).sum() + 12.8 * ((error @ way.basis) ** 2).sum()

    step = np.repeat(steps, 16, axis=1)
    sign, quotient = np.sign(x), np.clip(np.abs(x) / step, 0, 6)
    costs = [cost(sign * GRID[np.abs(quotient[..., None] - GRID).argmin(axis=-1)] * step)]
    y, pulled = x, np.zeros((32, 2), np.float32)
    for pull in (way.first, way.again, way.again):
        y, pulled = low_rank.pull_to_nearest(x, steps, (way.basis, pull), y, pulled)
        costs.append(cost(y))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] * 0.9


def test_protection_spares_matrices_of_few_columns():
    assert protection_of(np.zeros((4096, 16), np.float32)) == 30
    assert protection_of(np.zeros((1024, 16), np.float32)) == 12.8
    assert protection_of(np.zeros((64, 0), np.float32)) == 12.8
