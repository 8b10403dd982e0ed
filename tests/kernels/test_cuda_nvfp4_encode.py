"""What kernels/quantize.cu claims of its fast quotients of 16-bit values, by all the cases in which
it could fail.

q = fl(x * inverse + fl(x * rest)) and fl(x / step) can lie on different sides of a midpoint B only
where x / step is within 2^-45
of the place from which it is rounded to B.  With integers, x = X * 2^j, step = S, place = N / 2^25:
|X * 2^j - N * S| <= 16.
Arithmetic here is that of fractions, rounded by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

MIDPOINTS = [Fraction(mantissa, 4) for mantissa in (4, 5, 6, 7)]  # 0.25 .. 5, up to powers of two
REACH = 4096  # far beyond 16


def rounded(value: Fraction) -> Fraction:
    """To 24 bits, half to even."""
    if not value:
        return value
    exponent = abs(value).numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def places(midpoint: Fraction) -> tuple[int, int]:
    """2^25 times the places from which quotients are rounded to the midpoint; units halve below a
    power of two.
    """
    middle = int(midpoint * 2**25)
    return middle + 2, middle - (1 if midpoint == 1 else 2)


def critical_cases(bits: int) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """(x, step, midpoint) of every x of that many bits and every step of 24 whose quotient is next
    to such a place.
    """
    for midpoint in MIDPOINTS:
        for place in places(midpoint):
            for mantissa in range(1 << (bits - 1), 1 << bits):
                for shift in range(47 - bits, 56 - bits):
                    x = mantissa << shift
                    for step in range(x // place - 1, x // place + 2):
                        if 1 << 23 <= step < 1 << 24 and abs(x - place * step) <= REACH:
                            yield Fraction(x, 1 << 25), Fraction(step), midpoint


def fast_quotient(x: Fraction, step: Fraction, units: int) -> Fraction:
    """As NvFp4 computes it, from an inverse that is off by so many units in its last place."""
    inverse = rounded(1 / step)
    inverse += units * (inverse - rounded(inverse * (1 - Fraction(3, 1 << 25))))
    rest = rounded(rounded(1 - step * inverse) * inverse)
    return rounded(x * inverse + rounded(x * rest))


def side(value: Fraction, midpoint: Fraction) -> int:
    return (value > midpoint) - (value < midpoint)


@pytest.mark.parametrize("bits", [8, 11])
def test_only_steps_of_all_ones_are_wrong(bits: int) -> None:
    wrong = {
        step
        for x, step, midpoint in critical_cases(bits)
        for units in (-1, 0, 1)
        if side(fast_quotient(x, step, units), midpoint) != side(rounded(x / step), midpoint)
    }
    assert wrong == {Fraction((1 << 24) - 1)}


def test_no_quotient_lies_on_such_a_place() -> None:
    """Then rounding to B is a matter of sides alone: N has a factor beyond any 16-bit x."""
    for midpoint in MIDPOINTS:
        for place in places(midpoint):
            odd = place // (place & -place)
            assert odd >= 1 << 11
