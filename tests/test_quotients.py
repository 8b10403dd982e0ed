"""What kernels/quotients.h claims of its quotients in fixed point, in integers, by the steps at which it could fail.

F is the mantissa of an x, its leading one at bit 15, shifted right by what its exponent lacks of E; R is 2^(E + 13) / step, cut
off; Q = F * R >> 16, about 4096 |x| / step.  Everything scales with 2^E, so that E is 0 here.  Numbers are counted in 2^-26, of
which all of these steps are multiples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

Integers = NDArray[np.int64]
REACH = np.float32(6.9)  # the largest quotient of a quick block
ONE = 4096  # of Q
MIDPOINTS = [int(ONE * midpoint) for midpoint in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)]
UNIT = 26  # numbers are multiples of 2^-UNIT
BITS = {"bf16": 8, "fp16": 11}  # of a mantissa, its leading one too


def quick_steps() -> NDArray[np.float32]:
    """Steps by which R is next to an integer, on either side, and any others, of blocks whose largest magnitude is 1 or more."""
    rng = np.random.default_rng(0)
    round_ones = 2048 * np.arange(1, 28)  # powers of two over them are at midpoints, or next to them
    whole = np.concatenate((np.arange(1, 64), round_ones, rng.integers(64, 57000, 150), np.arange(56400, 56600, 5)))
    near = (8192 / whole).astype(np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    steps = np.concatenate((near.ravel().view(np.float32), np.exp2(rng.uniform(-3, 12, 200)).astype(np.float32)))
    return steps[np.float32(1) / steps < REACH]


def quotients(dtype: str, shifts: range) -> Iterator[tuple[Integers, Integers, Integers]]:
    """(Q, |x|, step) of every mantissa under those steps, by how much smaller than E the exponent of x is.

    Without a leading one it is a subnormal's, which has the exponent of the smallest normal numbers.
    """
    steps, bits = quick_steps(), BITS[dtype]
    r = (np.float32(8192) * (np.float32(1) / steps)).astype(np.int64)
    assert r.max() < 1 << 16
    in_units = np.ldexp(steps.astype(np.float64), UNIT).astype(np.int64)
    assert (np.ldexp(in_units.astype(np.float64), -UNIT) == steps).all()
    mantissas = np.arange(1 << bits)[:, None]
    for shift in shifts:
        f = mantissas << 16 - bits >> shift
        x = mantissas << UNIT - (bits - 1) - shift
        is_reached = np.ldexp(x, -UNIT) * (np.float32(1) / steps) < REACH
        each_x, each_step = np.broadcast_arrays(x, in_units)
        yield (f * r >> 16)[is_reached], each_x[is_reached], each_step[is_reached]


def test_steps_reach_from_the_least_to_far_beyond_the_largest() -> None:
    steps = quick_steps()
    assert 1 / 6.91 < steps.min() < 1 / 6.89
    assert steps.max() > 4096


def test_a_quotient_is_at_most_two_too_small_and_one_too_large() -> None:
    """Of every bf16 magnitude of which F cuts nothing off."""
    low, high = 0, 0
    for q, x, step in quotients("bf16", range(9)):
        assert (ONE * x <= (q + 2) * step).all()
        assert ((q - 1) * step <= ONE * x).all()
        low, high = low + int((ONE * x > (q + 1) * step).sum()), high + int((q * step > ONE * x).sum())
    assert low > 0  # both come to pass
    assert high > 0


@pytest.mark.parametrize("dtype", BITS)
def test_what_is_cut_off_is_below_the_first_midpoint(dtype: str) -> None:
    """Nothing is where the exponent lacks no more than the 8 or 5 zeros behind a mantissa."""
    for q, x, step in quotients(dtype, range(16 - BITS[dtype] + 1, 16)):
        assert (ONE * x < MIDPOINTS[0] * step).all()
        assert (q + 2 < MIDPOINTS[0]).all()


@pytest.mark.parametrize("dtype", BITS)
def test_codes_are_in_doubt_at_midpoints_alone(dtype: str) -> None:
    """Q + 2 below a midpoint, or four or more above it, is on the side of the quotient; and it has no more than 15 bits."""
    for q, x, step in quotients(dtype, range(16)):
        assert q.max(initial=0) + 2 < 1 << 15
        for midpoint in MIDPOINTS:
            is_above = ONE * x > midpoint * step
            assert not is_above[q + 2 < midpoint].any()
            assert is_above[q + 2 >= midpoint + 4].all()
