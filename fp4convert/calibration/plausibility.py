"""Refuse statistics of inputs that contradict each other.

Of n numbers x: max|x| / n <= mean|x| <= max|x|, mean|x|^2 <= mean x^2 <= max|x|^2, and
max|x|^2 / n <= mean x^2; a Gram matrix has the means of squares in its diagonal, equals its
transpose, and holds |g_ij|^2 <= g_ii g_jj.
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


class InputStatistics(NamedTuple):
    """The statistics of a linear layer's inputs; None for missing ones.

    tokens  number of tokens
    amax    largest |x|
    largest, magnitudes, squares  (columns,): the largest and the means of |x|, the means of x^2
    diagonal  of the Gram matrix, with its padding
    """

    tokens: int | None
    amax: float | None
    largest: Float32s
    magnitudes: Float32s | None
    squares: Float32s | None
    diagonal: Float32s | None


def contradiction(said: InputStatistics) -> tuple[str, str] | None:
    """Find the first statistic that no inputs have beside the others.

    Returns  (statistic, why it cannot be); None where some inputs may have all of them
    """
    largest = said.largest.astype(np.float64)
    highest = float(largest.max(initial=0))
    if said.amax is not None and abs(said.amax - highest) > SLACK * highest:
        why = f"is {said.amax:.4g}, but input_channel_amax reaches {highest:.4g}"
        return "input_amax", why
    if said.tokens == 0 and highest:
        return "tokens", f"is 0, but inputs reach {highest:.4g}"
    # What is left of the largest in the mean when all others are 0.
    share = 1 / said.tokens if said.tokens else 0.0
    least = f"the mean of the largest value there over {said.tokens} tokens"
    found = None
    if said.magnitudes is not None:
        low, high = (largest * share, least), (largest, "input_channel_amax there")
        found = _find_outside("input_abs_mean", said.magnitudes, low, high)
    if said.squares is None:
        return found
    low = np.square(largest) * share, least
    high = np.square(largest), "the square of input_channel_amax there"
    found = found or _find_outside("input_sq_mean", said.squares, low, high)
    if said.magnitudes is not None:
        low = np.square(said.magnitudes.astype(np.float64)), "the square of input_abs_mean there"
        found = found or _find_outside("input_sq_mean", said.squares, low, high)
    if said.diagonal is None or found:
        return found
    # The diagonal of a Gram matrix has the same means of squares, and zeros in its padding.
    diagonal, squares = said.diagonal.astype(np.float64), said.squares.astype(np.float64)
    expected = np.pad(squares, (0, len(diagonal) - len(squares)))
    slack = SLACK * expected + SPREAD * expected.max(initial=0) + TINY
    is_bad = np.abs(diagonal - expected) > slack
    if not is_bad.any():
        return None
    column = int(np.argmax(is_bad))
    what = "input_sq_mean there" if column < len(squares) else "as in padding"
    why = f"has {diagonal[column]:.4g} in its diagonal at column {column}"
    return "input_gram", f"{why}, expected {expected[column]:.4g}, {what}"


def _find_outside(
    statistic: str, values: Float32s, low: tuple[Columns, str], high: tuple[Columns, str]
) -> tuple[str, str] | None:
    """Describe the first value outside its bounds."""
    (least, why_least), (most, why_most) = low, high
    is_low = (values < least * (1 - SLACK)) & (least > TINY)
    is_high = values > most * (1 + SLACK) + TINY
    for is_bad, bound, how, why in (
        (is_low, least, "below", why_least),
        (is_high, most, "above", why_most),
    ):
        if is_bad.any():
            column = int(np.argmax(is_bad))
            detail = f"is {values[column]:.4g} in column {column}"
            return statistic, f"{detail}, {how} {bound[column]:.4g}, {why}"
    return None


def not_a_gram(blocks: Float32s) -> str | None:
    """Tell why (k, b, b) blocks are no mean of x x^T, in words.

    None where they may be one, positive definite or not.
    """
    roots = np.sqrt(np.diagonal(blocks, axis1=1, axis2=2).astype(np.float64))
    slack = SPREAD * float(roots.max(initial=0)) ** 2 + TINY
    for number, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        for first in range(0, len(block), PANEL_ROWS):
            rows, across = block[first : first + PANEL_ROWS], block[:, first : first + PANEL_ROWS].T
            limit = root[first : first + PANEL_ROWS, None] * root
            is_large = np.abs(rows) > limit * (1 + SLACK) + slack
            is_other = np.abs(rows - across) > limit * SLACK + slack
            for is_bad, why in (
                (is_large, "more than its diagonal allows"),
                (is_other, "and a different value across the diagonal"),
            ):
                if is_bad.any():
                    row, column = map(int, np.unravel_index(int(np.argmax(is_bad)), is_bad.shape))
                    place = [number, first + row, column]
                    return f"has {rows[row, column]:.4g} at {place}, {why}"
    return None
