"""The rules that search, on blocks that hypothesis makes up: codec.py against every scale there is,
all kernels against codec.py.

test_search.py says what the best scale is.  Blocks are grids of a step, midpoints and their
neighbours, equal values, lone ones,
zeros, subnormals and any bits at all, also mixed; groups and importance are as hostile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from adversarial import (
    DTYPES,
    LARGEST,
    MIDPOINTS,
    Values,
    assert_same_bytes,
    bits,
    from_bits,
    generator,
    matrix,
    rounded,
    scattered_importance,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx import SOURCE_OR_PTX, every_backend
from scale_search import (
    E4M3,
    GRID,
    assert_same_scales,
    costs,
    every_code,
    every_exponent,
    lattice,
    normalised,
)
from simt import SimtKernels

from fp4convert.numerics import codec
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import IMPORTANCE, MXFP4, NVFP4, Format

Backends = dict[str, Cpu | SimtKernels]
f32 = np.float32
EVERY_SEARCH = pytest.mark.parametrize(
    ("fmt", "rule"),
    [
        (NVFP4, "mse"),
        (NVFP4, "four-over-six"),
        (NVFP4, IMPORTANCE),
        (MXFP4, "mse"),
        (MXFP4, IMPORTANCE),
    ],
)
UNITS = np.concatenate(
    [GRID, MIDPOINTS.astype(f32), GRID * f32(1.5), f32([7, 8, 12, 3.25, 1e-3, 1e-20])]
)


class Case(NamedTuple):
    """A matrix of a few blocks, one to a row, the amax of its scale group, and the importance of
    every one of its elements.
    """

    dtype: str
    blocks: Values
    group_amax: float
    importance: Float32s


@pytest.fixture(scope="module", params=SOURCE_OR_PTX)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return every_backend(tmp_path_factory.mktemp("kernels"), request.param, (False,))


@st.composite
def block(draw: st.DrawFn, dtype: str, size: int) -> Values:
    """Elements of one kind or of several, under a step of any exponent."""
    step = E4M3[draw(st.integers(1, 126))].astype(np.float64) * 2.0 ** draw(
        st.integers(-150, 119) | st.integers(-8, 8)
    )
    places = draw(st.lists(st.integers(0, len(UNITS) - 1), min_size=size, max_size=size))
    ulps = draw(st.just([0] * size) | st.lists(st.integers(-2, 2), min_size=size, max_size=size))
    signs = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    with np.errstate(under="ignore"):
        magnitudes = bits(rounded(UNITS[places] * step, dtype)) + ulps
    largest = int(bits(rounded(np.array([np.inf]), dtype))[0])
    kind = draw(st.sampled_from(("grid", "equal", "lone", "tiny", "any")))
    if kind == "equal":
        magnitudes[:] = magnitudes[0]
    elif kind == "lone":
        magnitudes[np.arange(size) != draw(st.integers(0, size - 1))] = 0
    elif kind != "grid":
        most = 40 if kind == "tiny" else largest
        others = np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)))
        magnitudes = np.where(
            draw(st.lists(st.booleans(), min_size=size, max_size=size)), others, magnitudes
        )
    return from_bits(np.clip(magnitudes, 0, largest), dtype, signs)


@st.composite
def cases(draw: st.DrawFn, fmt: Format) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    blocks = np.stack(draw(st.lists(block(dtype, fmt.block_size), min_size=1, max_size=6)))
    own = float(np.abs(blocks.astype(f32)).max())
    factor = draw(st.sampled_from((1.0, 7.3, 448.0, 1 / 3, 1 / 40, 2.0**-30, 2.0**40)))
    group_amax = draw(st.sampled_from((float(f32(min(own * factor, LARGEST["F32"]))), 2688.0, 0.0)))
    weights = st.sampled_from((0.0, 1.0, 1.5, 0.75, 3e-3, 1e-12, 1e-20, 2.0**-149, 1e30, 3e38))
    importance = np.array(draw(st.lists(weights, min_size=blocks.size, max_size=blocks.size)), f32)
    return Case(dtype, blocks, group_amax, importance)


def best_scales(case: Case, fmt: Format, rule: str) -> np.ndarray:
    """Every scale tried, by test_search.py's own arithmetic."""
    blocks, amax = case.blocks.astype(f32), case.group_amax
    weights = normalised(case.importance.reshape(blocks.shape)) if rule == IMPORTANCE else None
    with np.errstate(all="ignore"):
        if rule == "four-over-six":
            return better_of_two(blocks, amax)
        return (
            every_code(blocks, amax, weights)
            if fmt is NVFP4
            else every_exponent(blocks, weights, 41)
        )


def better_of_two(blocks: Float32s, group_amax: float) -> np.ndarray:
    """Where the block's largest is 6 steps, or 4 if that is better: scales of (largest / 6) * 1 and
    1.5, nearest in E4M3.
    """
    global_scale = f32(1) if group_amax == 0 else max(f32(group_amax) / f32(1536), f32(2.0**-126))
    r = np.abs(blocks).max(axis=1) / (f32(6) * global_scale)
    six, four = (nearest_e4m3(f32(factor) * r) for factor in (1, 1.5))
    spent = [
        [
            costs(row[None], E4M3[code] * global_scale, float(E4M3[code]) ** 2)[0]
            for row, code in zip(blocks, codes, strict=True)
        ]
        for codes in (six, four)
    ]
    return np.where(r == 0, 0x38, np.where(np.array(spent[1]) < np.array(spent[0]), four, six))


def nearest_e4m3(values: Float32s) -> np.ndarray:
    """Codes 1 to 126, half to even, by distances in float64, which holds them exactly."""
    distance = np.abs(
        np.minimum(values, 1000).astype(np.float64)[:, None] - E4M3[1:127].astype(np.float64)
    )
    codes = np.arange(1, 127)
    return codes[
        np.where(distance == distance.min(axis=1, keepdims=True), codes % 2 + 1, 9).argmin(axis=1)
    ]


def check_kernels(backends: Backends, fmt: Format, rule: str, case: Case) -> np.ndarray:
    """The scales by codec.py, after every backend found the same bytes."""
    amax = case.group_amax if fmt.has_global_scale else 0.0
    row = case.blocks.reshape(1, -1)
    importance = case.importance if rule == IMPORTANCE else None
    expected = codec.quantize(row.astype(f32), fmt, rule, amax, importance)
    for name, backend in backends.items():
        found = backend.quantize(matrix(row, case.dtype), fmt, rule, amax, importance)
        assert_same_bytes(
            found, expected, row, f"{name}, {case.dtype}, {rule}, group amax {amax.hex()}"
        )
    return np.frombuffer(expected.block_scales, np.uint8).astype(np.int64)


def check_case(backends: Backends, fmt: Format, rule: str, case: Case) -> None:
    assert_same_scales(
        check_kernels(backends, fmt, rule, case), best_scales(case, fmt, rule), case.blocks
    )


@pytest.mark.sweep(10)
@EVERY_SEARCH
def test_searches_of_hostile_blocks(backends: Backends, fmt: Format, rule: str) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(cases(fmt))
    def check(case: Case) -> None:
        check_case(backends, fmt, rule, case)

    check()


@EVERY_SEARCH
def test_kernels_where_far_scales_win(backends: Backends, fmt: Format, rule: str) -> None:
    """Grids of other scales; squares that underflow; blocks side by side whose scales are all
    subnormal.
    """
    rng = generator(28)
    tiny = np.exp2(rng.uniform(-90, 0, (320, 16))) * rng.choice([0.0, 1.0], (320, 16), p=[0.7, 0.3])
    tiny[:, 0] = rng.choice(GRID[1:], 320)
    subnormal = (
        rng.uniform(0, 1, (640, 16))
        * np.repeat(rng.uniform(0.4, 3.6, 40), 16)[:, None]
        * 6
        * 2.0**-9
    )
    for values in (*lattice(320, 28), tiny, subnormal):
        blocks = values.astype(f32).reshape(-1, fmt.block_size)
        for group_amax in (2688.0, 2688.0 / 40, 6.0 * 64):
            check_kernels(
                backends,
                fmt,
                rule,
                Case("F32", blocks, group_amax, scattered_importance(blocks.size)),
            )


def test_mxfp4_clips_a_block_where_that_serves_the_others(backends: Backends) -> None:
    """Of 4 beside 31 quarters: steps of 1 lose 31/16, steps of 1/2 make 3 of the 4 and lose 1."""
    blocks = np.full((9, 32), 0.25, f32)
    blocks[:, 11] = 4.0
    case = Case("BF16", rounded(blocks, "BF16"), 0.0, np.ones(blocks.size, f32))
    for rule in ("mse", IMPORTANCE):
        assert set(check_kernels(backends, MXFP4, rule, case)) == {126}


@pytest.mark.parametrize(
    ("dtype", "largest", "exponent"), [("BF16", 4.0, -23), ("F32", 4.0, -23), ("F16", 256.0, -11)]
)
def test_importance_reaches_far_down(
    backends: Backends, dtype: str, largest: float, exponent: int
) -> None:
    """A large value in a column of weight 2^-40; 15 others are 6, and 16 are 1.5, under a step of
    2^exponent; of twice that it is 0.75.
    """
    blocks, importance = np.full((9, 32), 1.5, f32), np.full((9, 32), 1.999, f32)
    blocks[:, 1:16] = 6.0
    blocks *= f32(2.0**exponent)
    blocks[:, 0], importance[:, 0] = largest, 0.0
    case = Case(dtype, rounded(blocks, dtype), 0.0, importance.ravel())
    check_case(backends, MXFP4, IMPORTANCE, case)
    assert set(check_kernels(backends, MXFP4, IMPORTANCE, case)) == {127 + exponent}


def test_a_subnormal_step_is_not_half_of_the_one_eight_codes_up(backends: Backends) -> None:
    """Of global scale M * 2^-149, M odd, scale 1 makes a step and 1/2 nearly one: twice M is 2 of
    the one, not 4 of the other.
    """
    odd = next(
        m
        for m in range(2**23 + 1, 2**24, 2)
        if codec.global_scale_of(float(f32(2688 * m * 2.0**-149))) == m * 2.0**-149
    )
    blocks = np.zeros((33, 16), f32)
    blocks[np.arange(33), np.arange(33) % 16] = 2 * odd * 2.0**-149
    case = Case("F32", blocks, float(f32(2688 * odd * 2.0**-149)), np.ones(blocks.size, f32))
    for rule in ("mse", IMPORTANCE):
        check_case(backends, NVFP4, rule, case)
        assert set(check_kernels(backends, NVFP4, rule, case)) == {0x38}


def test_importance_where_a_block_is_far_beyond_its_group(backends: Backends) -> None:
    """The square of what is clipped is beyond float32 after the scale's square, within it after a
    small weight.
    """
    blocks, importance = np.zeros((5, 16), f32), np.zeros(80, f32)
    blocks[:, 14], importance[15::16] = 2.0 ** np.arange(60, 70, 2), 1.0
    check_case(backends, NVFP4, IMPORTANCE, Case("F32", blocks, 2688.0, importance))
