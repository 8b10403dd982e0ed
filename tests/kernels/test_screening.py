"""The margins of kernels/screening.cuh: derived again in exact numbers, and run at their worst.

Decides that no code of least cost is ruled out. The kernel's own functions run on the host; NumPy's
float64, which holds products of these numbers exactly, and fractions judge them.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from adversarial import generator
from numpy.typing import NDArray
from scale_search import E4M3
from simt import KERNELS, compile_for_host

from fp4convert.numerics import codec
from fp4convert.numerics.formats import NVFP4

Array = NDArray[np.generic]
Doubles = NDArray[np.float64]
PROBE = """
#include "screening.cuh"
extern "C" __attribute__((visibility("default"))) void distances(
    const unsigned *u, long n, float worth, float inverse, long is_clipped, float *d) {
    unsigned inverses = narrow2_fp16(inverse, inverse), minus = narrow2_fp16(-worth, -worth);
    for (long i = 0; i < n; i++)
        d[i] = widen_fp16((u16)(is_clipped ? two_distances<true>(u[i], inverses, minus)
                                           : two_distances<false>(u[i], inverses, minus)));
}
/* Of blocks of 16 magnitudes u: what fp16 leaves open, and the costs it finds from the top. */
extern "C" __attribute__((visibility("default"))) void screen(
    const float *u, long n, const int *highest, unsigned *open, float *costs, float *limits) {
    for (long i = 0; i < n; i++, u += UNIT, costs += TRIED_CODES) {
        Screen<false> one = {};
        one.worths.highest = highest[i];
        u32 halves[UNIT / 2];
        for (int j = 0; j < UNIT; j++) {
            one.elements.magnitudes[j] = u[j];
            one.elements.heaviest = fmaxf(one.elements.heaviest, u[j]);
        }
        float norm2 = narrow(u, halves), least = INFINITE;
        open[i] = one.in_halves(halves, norm2);
        for (int k = 0; k < TRIED_CODES; k += 2) {
            u32 both = k < TOP_CODES ? two_costs<false>(halves, one.worths, k)
                                     : two_costs<true>(halves, one.worths, k);
            costs[k] = widen_fp16((u16)both), costs[k + 1] = widen_fp16((u16)(both >> 16));
            least = fminf(least, fminf(costs[k], costs[k + 1]));
        }
        limits[i] = least * HALF_LIMIT + norm2 * HALF_NORM + HALF_REST;
    }
}
"""
CONSTANTS = ("HALF_LIMIT", "HALF_NORM", "HALF_REST", "BOUND_LIMIT", "BOUND_NORM")
CONSTANTS += ("FLOAT_LIMIT", "FLOAT_NORM", "FLOAT_REST")
TOP, TRIED, MANTISSAS, OFFSETS = 8, 10, 8, 32
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
HALF, FLOAT = Fraction(1, 2**11), Fraction(1, 2**24)
TINY = Fraction(1, 2**25)  # what a subnormal result of fp16 is off by
QUOTIENT = 6.9  # of the top codes: search.cu


def build(folder: Path, changed: dict[str, str] | None = None) -> ctypes.CDLL:
    """The probe, with other constants where these are given."""
    text = (KERNELS / "screening.cuh").read_text()
    for name, value in (changed or {}).items():
        text, count = re.subn(rf"(#define {name}) .*", rf"\1 {value}", text)
        assert count == 1
    (folder / "screening.cuh").write_text(text)
    (folder / "probe.cu").write_text(PROBE)
    return compile_for_host(folder / "probe.cu", folder)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("screening"))


def worth(mantissa: int, offset: int) -> float:
    """What code `highest - offset` is worth, where that has a mantissa and is normal."""
    code = 128 + mantissa - offset  # with an exponent that is far from an end
    return (1 + code % 8 / 8) * 2.0 ** (code // 8 - 17)


def nearest(u: Doubles, of: float) -> Doubles:
    """Distances from the nearest value of E2M1 times what a code is worth."""
    found: Doubles = np.abs(u[..., None] - of * GRID).min(axis=-1)
    return found


# --------------------------------------------------------------------------------------------------
# the derivation, step by step


def inverse_error() -> Fraction:
    """b of fp16: of the eight mantissas, whose float32 inverse may be off by a unit."""
    found = Fraction(0)
    for mantissa in range(MANTISSAS):
        exact = np.array([1 / (1 + mantissa / 8)], np.float32)
        for ulps in (-1, 0, 1):
            near = (exact.view(np.int32) + ulps).astype(np.int32).view(np.float32)
            inverse = Fraction(float(near.astype(np.float16)[0]))
            found = max(found, abs(inverse * (1 + Fraction(mantissa, 8)) - 1))
    return found


def test_every_half_under_every_worth_is_as_far_off_as_step_2_says(probe: ctypes.CDLL) -> None:
    """Every u that a block may have, for ten codes of eight mantissas, and 22 more that are
    clipped.
    """
    b, e = float(inverse_error()), float(HALF)
    halves = np.arange(0x7C00, dtype=np.uint16)
    numbers = halves.view(np.float16).astype(np.float64)
    count = 0
    for mantissa in range(MANTISSAS):
        largest = QUOTIENT * worth(mantissa, TOP - 1)
        u = np.ascontiguousarray(halves[numbers <= largest].astype(np.uint32))
        exact, d = numbers[: u.size], np.empty(u.size, np.float32)
        for offset in range(OFFSETS):
            of = worth(mantissa, offset)
            scaled, is_far = of * 2.0**14, nearest(exact, of)
            for ulps in (-1, 0, 1):
                inverse = np.array([1 / scaled], np.float32).view(np.int32) + np.int32(ulps)
                probe.distances(
                    u.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_long(u.size),
                    ctypes.c_float(scaled),
                    ctypes.c_float(float(inverse.view(np.float32)[0])),
                    ctypes.c_long(offset >= TOP),
                    d.ctypes.data_as(ctypes.c_void_p),
                )
                found = np.abs(d.astype(np.float64))
                excess = 2 * b * exact + 2 * e * np.maximum(0.8 * exact, of)
                assert (found <= (is_far + excess) * (1 + e) + 2.0**-25).all(), (mantissa, offset)
                assert (found >= is_far * (1 - e) - 2.0**-25).all(), (mantissa, offset)
                count += u.size
    assert count > 10_000_000


@dataclass(frozen=True)
class Margins:
    """Constants of screening.cuh, and what they must allow for: a, b, c, e, t as there.

    rest  what subnormal results add, of 17 numbers each
    """

    limit: Fraction
    norm: Fraction
    rest: Fraction
    e: Fraction
    a: Fraction
    b: Fraction
    c: int
    t: Fraction
    worths: int = 16
    subnormal: Fraction = Fraction(0)

    def is_enough(self) -> bool:
        """Whether the limit is above what step 5 says, for every |u|.

        M^2 = (p u + q r)^2 with r^2 = .64 u^2 + 16, and 2 u r <= k u^2 + r^2 / k for any k.
        """
        up, down = (1 + self.e) ** self.c, (1 - self.e) ** self.c
        shown = 1 - 4 * FLOAT  # of the constants, which float32 multiplies and adds
        if self.limit * shown < up / down * (1 + self.t):
            return False
        p, q, factor = 2 * self.a + 2 * self.b, 2 * self.e, up * (1 + 1 / self.t)
        measured = shown * (1 - self.e) ** 10  # of the norm, as `narrow` finds it
        for k in (Fraction(number, 1000) for number in range(500, 2000)):
            norm = p * p + q * q * Fraction(64, 100) + p * q * (k + Fraction(64, 100) / k)
            rest = self.worths * (q * q + p * q / k)
            if self.norm * measured >= factor * norm and (
                self.rest * shown >= factor * rest + self.subnormal
            ):
                return True
        return False


def constants(probe_source: str) -> dict[str, Fraction]:
    """The constants as the file writes them."""
    found = {}
    for name in CONSTANTS:
        (text,) = re.findall(rf"#define {name} (.*)", probe_source)
        plus, _, digits = text.strip("()").rpartition(" + ")
        found[name] = Fraction(float.fromhex(digits.removesuffix("f"))) + bool(plus)
    return found


def smaller(name: str, own: dict[str, Fraction]) -> dict[str, Fraction]:
    """One constant less by its last place, of two hexadecimal digits behind the point."""
    part = own[name] - (own[name] > 1)
    exponent = np.floor(np.log2(float(part)))
    return {**own, name: own[name] - Fraction(2.0**exponent) / 256}


def half_margins(own: dict[str, Fraction]) -> Margins:
    """u has three roundings of float32 before its own, codec.py's quotients and sums a few."""
    a = HALF + 12 * FLOAT
    names = own["HALF_LIMIT"], own["HALF_NORM"], own["HALF_REST"]
    subnormal = 2 * 17 * TINY + Fraction(1, 2**20)  # step 8
    return Margins(*names, HALF, a, inverse_error(), 11, Fraction(1, 32), subnormal=subnormal)


def is_bound_enough(own: dict[str, Fraction]) -> bool:
    """Step 6, with t = 2^-7."""
    t, a = Fraction(1, 128), HALF + 12 * FLOAT
    norm = own["BOUND_NORM"] * (1 - HALF) ** 10
    return own["BOUND_LIMIT"] >= (1 + t) / (1 - HALF) ** 11 and norm >= a * a * (1 + 1 / t)


def test_the_constants_follow_to_the_last_digit() -> None:
    own = constants((KERNELS / "screening.cuh").read_text())
    assert half_margins(own).is_enough()
    for name in ("HALF_LIMIT", "HALF_NORM", "HALF_REST"):
        assert not half_margins(smaller(name, own)).is_enough(), name
    assert is_bound_enough(own)
    for name in ("BOUND_LIMIT", "BOUND_NORM"):
        assert not is_bound_enough(smaller(name, own)), name


def has_bound_room(own: dict[str, Fraction]) -> bool:
    """Step 8, with |u| = 1.5: a larger norm has more room."""
    t, a, up = Fraction(1, 128), HALF + 12 * FLOAT, 1 / (1 - HALF) ** 11
    least, shown = Fraction(3, 2), 1 - 8 * FLOAT  # step 7
    norm = own["BOUND_NORM"] * shown * (1 - HALF) ** 10 - a * a * (1 + 1 / t)
    one = own["BOUND_LIMIT"] * shown >= (1 + t) * up and norm * least**2 >= (1 + t) * up * 8 * TINY
    # (p + q)^2 <= p^2 (1 + t) + q^2 (1 + 1/t) with p^2 = up N_k, N_k <= 2^-13: what is left of it
    p, q = Fraction(1, 90) * up, a * least
    return (
        one and p * p >= up * Fraction(1, 2**13) and q * (q / t - 2 * p) >= (1 + t) * up * 17 * TINY
    )


def test_the_bound_has_room_for_subnormal_sums() -> None:
    own = constants((KERNELS / "screening.cuh").read_text())
    assert has_bound_room(own)
    for name in ("BOUND_LIMIT", "BOUND_NORM"):
        assert not has_bound_room(smaller(name, own)), name


def test_the_constants_of_float32_are_more_than_enough() -> None:
    """Weights below 2; codec.py's own roundings are as many again."""
    own = constants((KERNELS / "screening.cuh").read_text())
    names = own["FLOAT_LIMIT"], own["FLOAT_NORM"], own["FLOAT_REST"]
    b, t = 2 * FLOAT, Fraction(1, 2**16)
    subnormal = 2 * 17 * Fraction(1, 2**150)
    assert Margins(*names, FLOAT, 4 * FLOAT, b, 24, t, 32, subnormal).is_enough()


# --------------------------------------------------------------------------------------------------
# blocks at the margin


@dataclass(frozen=True)
class Screened:
    """Of every block: the offset that codec.py chooses, what is left open, and how near to the
    limit, in square roots: 0 for the least cost found, 1 for the limit, beyond which it is lost.
    """

    offsets: NDArray[np.int64]
    open: NDArray[np.uint32]
    nearness: Doubles

    @property
    def is_lost(self) -> NDArray[np.bool_]:
        is_open = self.open >> (31 - self.offsets).astype(np.uint32) & 1
        return (self.open != 0) & (is_open == 0)


def screened(probe: ctypes.CDLL, x: NDArray[np.float32]) -> Screened:
    """Blocks of 16 under a global scale of 1."""
    best, first = (
        np.frombuffer(codec.quantize(x, NVFP4, rule, 2688.0).block_scales, np.uint8)
        for rule in ("mse", "amax")
    )
    highest = np.maximum(first.astype(np.int32) + 7, 15)
    u = np.ldexp(np.abs(x), (6 - highest // 8)[:, None]).astype(np.float32)
    codes, n = np.zeros(len(x), np.uint32), len(x)
    costs, limits = np.zeros((n, TRIED), np.float32), np.zeros(n, np.float32)
    arrays = (u, n, highest, codes, costs, limits)
    probe.screen(
        *(
            ctypes.c_long(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data)
            for a in arrays
        )
    )
    offsets = highest.astype(np.int64) - best
    own = np.take_along_axis(costs, np.minimum(offsets, TRIED - 1)[:, None], axis=1)[:, 0]
    low, high, own = (np.sqrt(part.astype(np.float64)) for part in (costs.min(axis=1), limits, own))
    return Screened(
        offsets, codes, np.where(offsets < TRIED, (own - low) / (high - low + 1e-30), 0)
    )


def some_elements(rng: np.random.Generator, first: NDArray[np.int64], count: int) -> Doubles:
    """Values beside midpoints and on the grid of codes from `first` + 7 down, and any."""
    shape = (len(first), count)
    step = E4M3[first[:, None] + 7 - rng.integers(0, TRIED, shape)].astype(np.float64)
    midpoints = (GRID[1:] + GRID[:-1]) / 2
    kinds = [
        rng.choice(midpoints, shape) * step * (1 + rng.normal(0, 2.0**-11, shape)),
        rng.choice(GRID, shape) * step,
        rng.uniform(0, 6, shape) * step,
    ]
    found = np.choose(rng.choice(3, shape, p=(0.6, 0.2, 0.2)), kinds)
    most = 6 * E4M3[first].astype(np.float64)[:, None]
    return np.minimum(found, most)


def climb(probe: ctypes.CDLL, blocks: int, turns: int) -> tuple[Screened, Doubles]:
    """Blocks whose best code comes nearer to the limit with every turn."""
    rng = generator(91)
    first = 40 + np.arange(blocks) % MANTISSAS
    x = some_elements(rng, first, 16)
    x[:, 0] = 6 * E4M3[first] * rng.uniform(0.97, 1.02, blocks)
    x = x.astype(np.float32)
    found = screened(probe, x)
    for _ in range(turns):
        moved = x * (1 + rng.uniform(-1, 1, x.shape) * 2.0**-10)
        other = np.where(rng.random(x.shape) < 0.2, moved, x)
        other = np.where(rng.random(x.shape) < 0.05, some_elements(rng, first, 16), other)
        other[:, 0] = x[:, 0]
        other = other.astype(np.float32)
        tried = screened(probe, other)
        is_nearer = (tried.nearness >= found.nearness)[:, None]
        x = np.where(is_nearer, other, x)
        found = screened(probe, x)
    return found, x


@pytest.mark.parametrize(
    ("blocks", "turns", "least"),
    [(256, 12, 0.02), pytest.param(2048, 250, 0.1, marks=pytest.mark.slow)],
)
def test_no_best_code_is_lost_at_the_margin(
    probe: ctypes.CDLL, blocks: int, turns: int, least: float
) -> None:
    found, _ = climb(probe, blocks, turns)
    assert not found.is_lost.any()
    assert found.nearness.max() > least, "the blocks are not at the margin"


def test_without_a_margin_best_codes_are_lost(probe: ctypes.CDLL, tmp_path: Path) -> None:
    """The same blocks, of which the rounding of fp16 alone decides."""
    bare = build(tmp_path, {"HALF_LIMIT": "1.0f", "HALF_NORM": "0.0f", "HALF_REST": "0.0f"})
    _, x = climb(probe, 512, 30)
    assert screened(bare, x).is_lost.sum() > 10


def test_a_code_below_the_ten_that_are_unrolled_may_be_the_best(
    probe: ctypes.CDLL, tmp_path: Path
) -> None:
    """The largest element is clipped; 6 and 4 keep codes a quarter and a half above from being as
    good, .5 and 1.5 the double. Without the loop over lower codes this block's would be lost.
    """
    others = np.array([6.0] * 4 + [4.0] * 4 + [0.5, 1.5] * 3 + [1.5])
    of = E4M3[44].astype(np.float64)
    x = np.array([[6 * 1.25 * 0.97, *others]]) * of
    found = screened(probe, x.astype(np.float32))
    assert found.offsets.tolist() == [10]
    assert not found.is_lost.any()
    alone = build(tmp_path, {"BOUND_LIMIT": "0.0f", "BOUND_NORM": "0.0f"})
    assert screened(alone, x.astype(np.float32)).is_lost.all()
