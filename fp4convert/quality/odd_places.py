"""Find rows and blocks of a tensor that do not have its source's values.

Sums over a whole tensor do not show a few of them: eight rows of zeros among 4,096 cost 0.01 dB.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # elements, where rows have whole ones: NVFP4's; two are MXFP4's
# Of a row's power: other values have about 2 and zeros 1; GPTQ left up to 0.5 where 40 samples of
# text were its calibration.
DIFFERENT_ROW = 0.9
# Of a block's power, and of the mean of its row: GPTQ left up to 4.
DIFFERENT_BLOCK = 16.0
# Of the mean power of a row's blocks: a block that has that much is rounded to zeros by no rule.
NEVER_ZERO = 0.25
FEW = 0.25  # of a row's blocks
# Of the largest value: so much smaller ones may become zeros, because FP8 holds no block scale of
# theirs (2^-9 / 448 of the largest is its smallest).
FAINT = 2.0**-16
Doubles = NDArray[np.float64]


class OddPlaces:
    """Look for rows and blocks that are not the source's, panel by panel."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._width = columns if columns % BLOCK else BLOCK
        self._largest = 0.0  # power of a block
        self._rows: list[tuple[int, float]] = []  # that differ, and by which power
        self._blocks: list[tuple[int, int]] = []  # the first of them
        self._count = 0  # of all of them

    def look(self, first: int, x: Doubles, difference: Doubles) -> tuple[float, float]:
        """Look at rows, and return the power of both.

        first          number of the first row
        x, difference  the source's values of whole rows, and what the artifact's lack of them
        """
        if not x.size:
            return 0.0, 0.0
        signal, noise = (
            np.einsum("rbk,rbk->rb", blocks, blocks)
            for blocks in (
                each.reshape(-1, self._columns // self._width, self._width)
                for each in (x, difference)
            )
        )
        row_signal, row_noise = signal.sum(axis=1), noise.sum(axis=1)
        self._largest = max(self._largest, float(signal.max(initial=0)))
        mean = row_signal[:, None] / signal.shape[1]
        is_lost = (noise == signal) & (signal > NEVER_ZERO * mean)
        is_wrong = (noise > DIFFERENT_BLOCK * np.maximum(signal, mean)) | is_lost
        # A row is told as one unless a few blocks are all that is wrong with it.
        is_odd = row_noise > DIFFERENT_ROW * row_signal
        others = row_noise - np.where(is_wrong, noise, 0).sum(axis=1)
        is_odd &= (is_wrong.mean(axis=1) > FEW) | (others > DIFFERENT_ROW * row_signal)
        self._rows += [(first + int(row), float(row_noise[row])) for row in np.flatnonzero(is_odd)]
        is_wrong[is_odd] = False
        if found := int(np.count_nonzero(is_wrong)):
            row, block = np.argwhere(is_wrong)[0]
            self._blocks = self._blocks or [(first + int(row), int(block) * self._width)]
            self._count += found
        return float(row_signal.sum()), float(row_noise.sum())

    def describe(self) -> str:
        """Say which rows and blocks differ; "" where none does."""
        least = self._columns * self._largest * FAINT**2
        rows = [row for row, noise in self._rows if noise > least and math.isfinite(noise)]
        parts = []
        if rows:
            parts.append(f"{_count(len(rows), 'row')} (the first is row {rows[0]})")
        if self._blocks:
            row, column = self._blocks[0]
            where = f"the first in row {row} from column {column}"
            parts.append(f"{_count(self._count, 'block')} of {self._width} values ({where})")
        return " and ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
