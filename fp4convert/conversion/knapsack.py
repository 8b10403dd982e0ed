"""Choose options that fit a size with the least added error.

Every part begins with its most accurate option. Each further option of the lower convex hull of its
(bytes, error) saves bytes and adds error; the cheapest such steps of all parts are taken, by error
per byte, until the whole fits (the greedy solution of the Lagrangian). Of all choices that take no
more bytes than the result of these steps, none has less error. The last step may have saved more
than was needed: steps that fit into what is left are then taken back, the dearest first. The error
is therefore within one step of the least: the last step's own error. Where a few parts bear most of
the error a step is much: then a part is raised where the cheapest steps of others pay for it, as
long as the error falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

MOST_EXCHANGES = 1000  # each lessens the error
ROUNDING = 1e-12  # of errors: what is less is none


class Option(NamedTuple):
    """What a part can become.

    word    for what it becomes
    nbytes  that it then takes
    error   that it then has, in units that add up over parts
    """

    word: str
    nbytes: int
    error: float


def choose(parts: Sequence[Sequence[Option]], nbytes: int) -> list[Option] | None:
    """Choose an option for every part, so that all take at most so many bytes.

    parts    of each its options; a part changes its format as one: a matrix, or several that
             engines need in one format
    Returns  an option for each; None where even the smallest options take more
    """
    hulls = [hull(options) for options in parts]
    # From one option of a hull to the next smaller one: price, part, level and bytes saved. They
    # sort by price, then by the order of parts.
    steps = sorted(
        (_price(before, after), part, level, before.nbytes - after.nbytes)
        for part, options in enumerate(hulls)
        for level, (before, after) in enumerate(pairwise(options), 1)
    )
    levels = [0] * len(parts)
    excess = sum(options[0].nbytes for options in hulls) - nbytes
    taken = 0
    while excess > 0 and taken < len(steps):
        _, part, level, saved_nbytes = steps[taken]
        levels[part] = level
        excess -= saved_nbytes
        taken += 1
    if excess > 0:
        return None
    for _, part, level, saved_nbytes in reversed(steps[:taken]):
        if levels[part] == level and excess + saved_nbytes <= 0:
            levels[part] -= 1
            excess += saved_nbytes
    for _ in range(MOST_EXCHANGES):
        if not _exchange(hulls, levels, nbytes):
            break
    return [options[level] for options, level in zip(hulls, levels, strict=True)]


def _exchange(hulls: Sequence[Sequence[Option]], levels: list[int], nbytes: int) -> bool:
    """Raise a part and lower others where that lessens the error.

    Of all parts that could be raised it is the one that gains most, less the price of the others.
    Returns whether there was one
    """
    taken = sum(options[level].nbytes for options, level in zip(hulls, levels, strict=True))
    steps = sorted(
        (_price(before, after), part, level, before.nbytes - after.nbytes)
        for part, options in enumerate(hulls)
        for level, (before, after) in enumerate(pairwise(options), 1)
        if level > levels[part]
    )
    best, found = 0.0, dict[int, int]()
    for part, options in enumerate(hulls):
        for level in range(levels[part]):
            own, higher = options[levels[part]], options[level]
            excess, error = taken + higher.nbytes - own.nbytes - nbytes, higher.error - own.error
            changed = {part: level}
            for price, other, lower, saved_nbytes in steps:
                if excess <= 0 or error >= best:
                    break
                if other != part:
                    changed[other] = lower
                    excess -= saved_nbytes
                    error += price * saved_nbytes
            if excess <= 0 and error < best * (1 + ROUNDING) - ROUNDING * own.error:
                best, found = error, changed
    for part, level in found.items():
        levels[part] = level
    return bool(found)


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of (bytes, error).

    From the most accurate option to the smallest; what is on no edge is left out.
    """
    found: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.error)):
        if found and option.error >= found[-1].error:
            continue  # larger, and no better
        while len(found) > 1 and _price(option, found[-1]) >= _price(found[-1], found[-2]):
            found.pop()
        found.append(option)
    return found[::-1]


def _price(larger: Option, smaller: Option) -> float:
    """Return the error added for each byte saved."""
    return (smaller.error - larger.error) / (larger.nbytes - smaller.nbytes)
