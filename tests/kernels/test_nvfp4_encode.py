"""What kernels/nvfp4_encode.h claims of its quotients in fixed point, in integers, by the values at
which it could fail.

Q is 4096 * x * fl(1 / step) of a float32 x, as an integer: with AVX-512 the one below, with AVX2
the nearest.  Powers of two move
nothing, so that steps are taken from [1, 2): x is X * 2^(e - 23) with X of 24 bits, step S * 2^-23,
and fl(1 / step) I * 2^-24.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from paths import ROOT

Integers = NDArray[np.int64]
SOURCE = (ROOT / "kernels" / "nvfp4_encode.h").read_text()
REACH = np.float32(6.9)  # the largest quotient of a quick block
ONE = 4096  # of Q
MIDPOINTS = [int(ONE * midpoint) for midpoint in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)]
PLACES = [midpoint + away for midpoint in MIDPOINTS for away in (-2, -1, 0, 1, 2)]
EXPONENTS = range(-3, 4)  # of x that come near a midpoint; beyond the last none is reached
# of itself that a quotient which is not in doubt keeps away from a midpoint; float32's is 6e-8
LEAST_FRACTION = 4e-5


class Case(NamedTuple):
    """Arrays of equal size: x and step counted in 2^-26; and 4096 * x * fl(1 / step), the integer
    below and the nearest.
    """

    x: Integers
    step: Integers
    q: Integers
    nearest: Integers


def steps() -> Integers:
    """S, but for the one that is not quick."""
    first, last = 1 << 23, (1 << 24) - 2
    any_others = np.random.default_rng(0).integers(first, last, 3000)
    return np.concatenate(
        (np.arange(first, first + 40), any_others, np.arange(last - 40, last + 1))
    )


def cases(exponent: int, sign: int) -> Case:
    """Those x of an exponent whose quotients are next to midpoints, or a 4096th or two away."""
    s = steps()
    inverse = np.float32(1) / np.ldexp(s.astype(np.float32), -23)
    i = np.ldexp(inverse.astype(np.float64), 24).astype(np.int64)
    assert (np.ldexp(i.astype(np.float64), -24) == inverse).all()
    x = (np.multiply.outer(PLACES, s) >> 12 + exponent)[..., None] + np.arange(-2, 4)
    every_s, every_i = (np.broadcast_to(values[:, None], x.shape) for values in (s, i))
    is_quick = (
        np.ldexp(x.astype(np.float32), exponent - 23) * np.ldexp(every_i.astype(np.float32), -24)
        < REACH
    )
    is_taken = (x >= 1 << 23) & (x < 1 << 24) & is_quick
    in_units = sign * x[is_taken] << 26 - 23 + exponent
    product = in_units * every_i[is_taken]  # of 26 + 24 - 12 bits below Q's last
    half = 1 << 37
    is_tie_to_even = (product & 2 * half - 1 == half) & (product >> 38 & 1 == 0)
    nearest = (product + half >> 38) - is_tie_to_even
    return Case(in_units, every_s[is_taken] << 26 - 23, product >> 38, nearest)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_codes_are_in_doubt_next_to_midpoints_alone(exponent: int, sign: int) -> None:
    """Another Q is on its quotient's side of every midpoint, with room for rounding; and it has no
    more than 16 bits.
    """
    x, step, q, nearest = cases(exponent, sign)
    assert x.size > 500
    assert -(1 << 15) <= q.min() <= q.max() < 1 << 15
    assert np.abs(nearest).max() < 1 << 15
    for midpoint in [sign * midpoint for midpoint in MIDPOINTS]:
        distance = ONE * x - midpoint * step
        has_room = np.abs(distance) > abs(midpoint) * step * LEAST_FRACTION
        for found, doubtful in ((q, (midpoint, midpoint - 1)), (nearest, (midpoint,))):
            is_certain = ~np.isin(found, doubtful)
            assert has_room[is_certain].all()
            assert ((distance > 0) == (found >= midpoint))[is_certain].all()


def test_what_is_in_doubt_can_be_on_either_side() -> None:
    low, high, nearest_low, nearest_high = 0, 0, 0, 0
    for exponent in EXPONENTS:
        x, step, q, nearest = cases(exponent, 1)
        for midpoint in MIDPOINTS:
            is_above = ONE * x >= midpoint * step
            low += int(((q == midpoint - 1) & is_above).sum())
            high += int(((q == midpoint) & ~is_above).sum())
            nearest_low += int(((nearest == midpoint) & ~is_above).sum())
            nearest_high += int(((nearest == midpoint) & is_above).sum())
    assert min(low, high, nearest_low, nearest_high) > 0


def test_cells_have_their_codes_and_their_doubts() -> None:
    """On both sides of every midpoint; else where no multiple of 1/2 is, which what was FP4 before
    would hit.
    """
    tables = re.findall(r"u16x32 cells_\w+ = \{(.*?)\};", SOURCE, re.DOTALL)
    entries = [entry for table in tables for entry in re.findall(r"(BEGIN|END)\((\d+)\)", table)]
    quarters = [sign * midpoint // (ONE // 4) for midpoint in MIDPOINTS for sign in (1, -1)]
    for cell, (doubt, code) in zip([*range(32), *range(-32, 0)], entries, strict=True):
        magnitude = cell if cell >= 0 else -1 - cell
        assert int(code) == sum(0 < quarter <= magnitude for quarter in quarters) + 8 * (cell < 0)
        own = [kind for kind, place in (("BEGIN", cell), ("END", cell + 1)) if place in quarters]
        assert [doubt] == (own or ["BEGIN" if cell % 2 else "END"])


def test_entries_have_their_codes_and_their_doubts() -> None:
    """AVX2: some entries serve two cells; none has its doubt where a value of E2M1 is, which what
    was FP4 before would hit.
    """
    tables = re.findall(r"u8v entry_\w+ = TWICE\((.*?)\);", SOURCE)
    codes, begins = ([int(number) for number in table.split(",")] for table in tables)
    assert len(codes) == len(begins) == 16
    quarters = [midpoint // (ONE // 4) for midpoint in MIDPOINTS]
    for cell in range(int(REACH * 4) + 1):
        entry = min(cell, cell // 2 + 4, 15)
        assert codes[entry] == sum(quarter <= cell for quarter in quarters)
        if cell in quarters:
            assert begins[entry] == 1
        if cell in (0, 2, 4, 6, 8, 12, 16, 24):
            assert begins[entry] == 0
