"""Refuse statistics of inputs that contradict each other.

Of n numbers x: max|x| / n <= mean|x| <= max|x|, mean|x|^2 <= mean x^2 <= max|x|^2, and max|x|^2 / n <= mean x^2; a Gram matrix
has the means of squares in its diagonal, equals its transpose, and holds |g_ij|^2 <= g_ii g_jj.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import Float32s

SLACK = 0.01  # sums in float32, in any order, are off by less; so is what is kept in float16
TINY = 1e-30  # of squares: below, float32 loses their digits
SPREAD = 1e-6  # of the largest on a diagonal: what float16 cannot tell from nothing
PANEL_ROWS = 512  # of a Gram matrix, compared with its transpose at once

Columns = NDArray[np.float64]


class Seen(NamedTuple):
    """What is said of a linear layer's inputs; None for what is not.

    tokens  how many
    amax    largest |x|
    largest, magnitudes, squares  (columns,): the largest and the means of |x|, the means of x^2
    diagonal  of the Gram matrix, those of its padding with them
    """

    tokens: int | None
    amax: float | None
    largest: Float32s
    magnitudes: Float32s | None
    squares: Float32s | None
    diagonal: Float32s | None


def contradiction(seen: Seen) -> tuple[str, str] | None:
    """(statistic, why it cannot be) of the first that no inputs have beside the others; None where some may."""
    largest = seen.largest.astype(np.float64)
    highest = float(largest.max(initial=0))
    if seen.amax is not None and abs(seen.amax - highest) > SLACK * highest:
        return (
            "input_amax",
            f"is {seen.amax:.4g} beside an input_channel_amax of up to {highest:.4g}",
        )
    if seen.tokens == 0 and highest:
        return "tokens", f"is 0 beside inputs of up to {highest:.4g}"
    share = (
        1 / seen.tokens if seen.tokens else 0.0
    )  # of the largest, that is left of it in the mean when all others are 0
    least = f"which the largest there has left of it after {seen.tokens} tokens"
    found = None
    if seen.magnitudes is not None:
        found = _outside(
            "input_abs_mean",
            seen.magnitudes,
            (largest * share, least),
            (largest, "input_channel_amax there"),
        )
    if seen.squares is not None:
        high = np.square(largest), "the square of input_channel_amax there"
        found = found or _outside(
            "input_sq_mean", seen.squares, (np.square(largest) * share, least), high
        )
        if seen.magnitudes is not None:
            low = (
                np.square(seen.magnitudes.astype(np.float64)),
                "the square of input_abs_mean there",
            )
            found = found or _outside("input_sq_mean", seen.squares, low, high)
        if seen.diagonal is not None:
            found = found or _other_diagonal(
                seen.diagonal.astype(np.float64), seen.squares.astype(np.float64)
            )
    return found


def _outside(
    kind: str, values: Float32s, low: tuple[Columns, str], high: tuple[Columns, str]
) -> tuple[str, str] | None:
    """The first of the values that is below or above what it can be, in words."""
    (least, why_least), (most, why_most) = low, high
    is_low = (values < least * (1 - SLACK)) & (least > TINY)
    is_high = values > most * (1 + SLACK) + TINY
    for is_bad, bound, how, why in (
        (is_low, least, "below", why_least),
        (is_high, most, "above", why_most),
    ):
        if is_bad.any():
            at = int(np.argmax(is_bad))
            return kind, f"is {values[at]:.4g} in column {at}, {how} {bound[at]:.4g}, {why}"
    return None


def _other_diagonal(diagonal: Columns, squares: Columns) -> tuple[str, str] | None:
    expected = np.pad(squares, (0, len(diagonal) - len(squares)))
    is_bad = (
        np.abs(diagonal - expected) > SLACK * expected + SPREAD * expected.max(initial=0) + TINY
    )
    if not is_bad.any():
        return None
    at = int(np.argmax(is_bad))
    what = "input_sq_mean there" if at < len(squares) else "what padding is"
    return (
        "input_gram",
        f"has {diagonal[at]:.4g} in its diagonal at column {at}, beside {expected[at]:.4g}, {what}",
    )


def not_a_gram(blocks: Float32s) -> str | None:
    """Why (k, b, b) blocks are no mean of x x^T, in words; None where they may be one, positive definite or not."""
    roots = np.sqrt(np.diagonal(blocks, axis1=1, axis2=2).astype(np.float64))
    slack = SPREAD * float(roots.max(initial=0)) ** 2 + TINY
    for number, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        for first in range(0, len(block), PANEL_ROWS):
            rows, across = block[first : first + PANEL_ROWS], block[:, first : first + PANEL_ROWS].T
            limit = root[first : first + PANEL_ROWS, None] * root
            for is_bad, why in (
                (np.abs(rows) > limit * (1 + SLACK) + slack, "more than its diagonal allows"),
                (
                    np.abs(rows - across) > limit * SLACK + slack,
                    "and another value across the diagonal",
                ),
            ):
                if is_bad.any():
                    row, column = np.unravel_index(int(np.argmax(is_bad)), is_bad.shape)
                    return f"has {rows[row, column]:.4g} at {[number, first + int(row), int(column)]}, {why}"
    return None
