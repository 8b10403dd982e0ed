"""The choice of formats: beside every choice there is, by brute force, on small instances."""

from itertools import product

import numpy as np
import pytest

from fp4convert.conversion.parts import Option, choose, hull


def parts_at_random(seed: int, count: int = 6, options: int = 3) -> list[list[Option]]:
    """Parts as matrices are: four, eight and sixteen bits, errors falling, sizes of all orders."""
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        weights = int(draw.integers(16, 4000))
        sizes = sorted(draw.choice([4, 5, 8, 9, 12, 16], options, replace=False))
        errors = sorted(draw.random(options) * draw.choice([0.01, 1.0, 100.0]), reverse=True)
        made = [
            Option(f"{bits}", int(bits) * weights, float(e))
            for bits, e in zip(sizes, errors, strict=True)
        ]
        parts.append([made[at] for at in draw.permutation(options)])
    return parts


def every_choice(parts: list[list[Option]]) -> list[tuple[int, float]]:
    """(bytes, error) of every choice."""
    return [(sum(o.nbytes for o in one), sum(o.error for o in one)) for one in product(*parts)]


def sums(options: list[Option]) -> tuple[int, float]:
    return sum(option.nbytes for option in options), sum(option.error for option in options)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better_by_more_than_one_step(seed):
    parts = parts_at_random(seed)
    known = every_choice(parts)
    largest_step = max(a.error - b.error for part in parts for a in part for b in part)
    least, most = min(nbytes for nbytes, _ in known), max(nbytes for nbytes, _ in known)
    for nbytes in np.linspace(least, most, 23).astype(int):
        chosen = choose(parts, int(nbytes))
        taken, error = sums(chosen)
        best = min(e for n, e in known if n <= nbytes)
        assert taken <= nbytes
        assert best - 1e-12 <= error <= best + largest_step


@pytest.mark.parametrize("seed", range(40))
def test_on_the_hull_of_all_choices_it_is_the_best_there_is(seed):
    """Where the target is the size of a Lagrangian solution, the greedy steps end exactly there."""
    parts = parts_at_random(seed, count=5)
    known = every_choice(parts)
    corners = hull([Option("", nbytes, error) for nbytes, error in known])
    for corner in corners:
        taken, error = sums(choose(parts, corner.nbytes))
        assert (taken, error) == (corner.nbytes, pytest.approx(corner.error, abs=1e-12))


def test_typed_by_hand():
    """Two parts: the second loses less for each byte that it saves, so it goes first."""
    first = [Option("bf16", 160, 0.0), Option("fp4", 45, 1.0)]
    second = [Option("bf16", 1600, 0.0), Option("fp8", 800, 0.1), Option("fp4", 450, 1.0)]
    words = lambda nbytes: [option.word for option in choose([first, second], nbytes)]  # noqa: E731
    assert words(1760) == ["bf16", "bf16"]
    assert words(1759) == ["bf16", "fp8"]
    assert words(960) == ["bf16", "fp8"]
    assert words(959) == ["bf16", "fp4"]  # 0.9 for 350 bytes is less than 1.0 for 115
    assert words(610) == ["bf16", "fp4"]
    assert words(609) == ["fp4", "fp4"]
    assert words(495) == ["fp4", "fp4"]
    assert choose([first, second], 494) is None


def test_what_the_last_step_saved_too_much_is_taken_back():
    small = [Option("bf16", 20, 0.0), Option("fp4", 10, 0.5)]  # 0.05 a byte
    large = [Option("bf16", 2000, 0.0), Option("fp4", 1000, 100.0)]  # 0.1 a byte
    assert [option.word for option in choose([small, large], 1500)] == ["bf16", "fp4"]


def test_options_that_no_budget_wants_are_left_out():
    points = [
        Option("bf16", 16, 0.0),
        Option("worse", 16, 0.5),
        Option("above", 8, 0.9),
        Option("fp4", 4, 1.0),
        Option("odd", 9, 2.0),
    ]
    assert [option.word for option in hull(points)] == ["bf16", "fp4"]
    assert [option.word for option in hull([Option("same", 2, 0.0), Option("bf16", 4, 0.0)])] == [
        "same"
    ]


def test_equal_parts_are_chosen_in_their_order():
    parts = [[Option("bf16", 16, 0.0), Option("fp4", 4, 1.0)] for number in range(4)]
    assert [option.word for option in choose(parts, 40)] == ["fp4", "fp4", "bf16", "bf16"]


def test_no_parts_take_no_bytes():
    assert choose([], 0) == []


def test_an_early_step_that_fits_to_the_byte_is_taken_back():
    """The cheap step saves too little; once the dear one is taken, the cheap one can go, and
    exactly so many bytes are left.
    """
    cheap = [Option("bf16", 100, 0.0), Option("fp8", 50, 0.1)]
    dear = [Option("bf16", 100, 0.0), Option("fp4", 40, 1.0)]
    assert [option.word for option in choose([cheap, dear], 140)] == ["bf16", "fp4"]
    assert [option.word for option in choose([cheap, dear], 139)] == ["fp8", "fp4"]


def test_a_part_that_bears_most_is_raised_where_others_pay_for_it():
    """15 bytes are too many. By price the large part goes first, and loses 10; five small ones save
    as much together, and lose 4.5.
    """
    large = [Option("fp8", 100, 0.0), Option("nvfp4", 50, 10.0)]
    small = [Option("nvfp4", 45, 0.1), Option("mxfp4", 42, 1.0)]
    chosen = choose([large, *[small] * 5], 310)
    assert [option.word for option in chosen] == ["fp8", *["mxfp4"] * 5]
    assert [option.word for option in choose([large, *[small] * 5], 309)] == [
        "nvfp4",
        *["nvfp4"] * 5,
    ]
