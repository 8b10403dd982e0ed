"""Find rows and blocks of an artifact that are not the source's.

Sums over a whole tensor do not show them: eight rows of zeros among 4,096 cost 0.01 dB.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, block_steps
from fp4convert.numerics.error_sums import COLUMNS, Float64s, Sums
from fp4convert.numerics.formats import CODES, E2M1_MAX
from fp4convert.numerics.matrices import Blocks, Matrix, Quantized, Weights, row_panels
from fp4convert.progress import count_text

Doubles = NDArray[np.float64]
# Power of the errors of a row, by its own: other values have about 2, zeros 1; rounding left 0.06,
# and GPTQ on 40 samples of text 0.5 at most.
DIFFERENT_ROW = 0.9
# The source's row in the artifact's, as a factor, is 1 +- this: zeros and other values have about
# 0. GPTQ through a quantized prefix added ten times a row's power, and left 0.86 to 1.19 of it.
OFF_ROW = 0.5
# Of a block, by its own and by the mean of its row's blocks: GPTQ left 4 at most.
DIFFERENT_BLOCK = 16.0
ALONG = 0.8  # squared cosine of a block's errors and its values
PLACED = 5.0  # times that, where a method places errors for the sake of outputs
# Power of a block by that mean, from which no rule rounds all of it to zeros: its largest value
# decides its scale.
NEVER_ZERO = 0.25
NEARLY_ZERO = 2.0**-40  # of that mean: a block whose values have no more power may be all lost
NO_SIGNS = np.uint64(0x7777777777777777)  # of 16 packed codes
# Share of a row's blocks up to which they are told as blocks, and above as a row.
FEW = 0.25
# Of the largest value: FP8 has no block scale for values 2^-9 / 448 = 2^-17.8 of it, which become
# zeros as they must.
FAINT = 2.0**-16


def _has_lost_blocks(x: Matrix, q: Quantized, mean: Float64s) -> bool:
    """Return whether ordinary values became a block of zeros, or nearly.

    mean  of each row: the mean power of a block
    """
    size = q.format.block_size
    codes = np.frombuffer(q.packed, np.uint64).reshape(-1, size // CODES)
    steps = block_steps(q).astype(np.float64).reshape(len(mean), -1)
    with np.errstate(over="ignore"):
        is_faint = size * (E2M1_MAX * steps) ** 2 <= NEARLY_ZERO * mean[:, None]
    is_faint |= ((codes & NO_SIGNS) == 0).all(axis=1).reshape(is_faint.shape)
    rows, places = np.nonzero(is_faint)
    values = np.frombuffer(x.data, FLOAT_DTYPES[x.dtype]).reshape(*is_faint.shape, size)
    lost = (values[rows, places].astype(np.float64) ** 2).sum(axis=1)
    return bool((lost > NEVER_ZERO * mean[rows]).any())


class OddPlaces:
    """Rows and blocks that are not the source's, gathered panel by panel.

    columns    of the tensor
    width      elements that share a scale; `columns` without blocks
    is_placed  rounded by GPTQ

    signal, noise  power of the source's values so far, and of the differences
    """

    def __init__(self, columns: int, width: int, is_placed: bool = False) -> None:
        self._is_placed = is_placed
        self._far_block = DIFFERENT_BLOCK * (PLACED if is_placed else 1.0)
        self.signal = self.noise = 0.0
        self._columns, self._width = columns, width
        self._largest = 0.0  # mean power of the values of a block
        # What differs: row, first column (of blocks alone), and by which mean power.
        self._rows: list[tuple[int, float]] = []
        self._blocks: list[tuple[int, int, float]] = []

    def sum_by_rows(self, weights: Weights, coded: Blocks) -> Sums | None:
        """Sum a matrix through the C library; None where a row needs `add`.

        A row whose noise is below the limits of a row and of a block with the row's mean power
        holds nothing odd, but for blocks of zeros in the place of ordinary values: these are looked
        at by their codes and scales.
        """
        if weights.dtype not in FLOAT_DTYPES:
            return None
        total, blocks = Sums(), self._columns // self._width
        for panel in row_panels(weights.shape):
            x, q = weights.rows(*panel), coded.rows(*panel)
            compared = Cpu().compare(x, q)
            signal, noise = (
                np.frombuffer(compared.rows, np.float64).reshape(-1, len(COLUMNS))[:, :2].T
            )
            mean = signal / blocks
            most = np.minimum(self._far_block * mean, DIFFERENT_ROW * signal)
            if not (noise <= most).all() or _has_lost_blocks(x, q, mean):
                return None
            total = total.plus(compared, x.shape[0] * x.shape[1])
        return replace(total, clipped=0)

    def add(self, first_row: int, x: Doubles, difference: Doubles) -> None:
        """Add the differences of whole rows.

        x, difference  (rows * columns,) the source's values, and these minus the artifact's
        """
        if not x.size:
            return
        shape = (-1, self._columns // self._width, self._width)
        signal, noise = (
            np.einsum("rbk,rbk->rb", blocks, blocks)
            for blocks in (x.reshape(shape), difference.reshape(shape))
        )
        of_rows, wrong = signal.sum(axis=1), noise.sum(axis=1)
        self.signal += float(of_rows.sum())
        self.noise += float(wrong.sum())
        self._largest = max(self._largest, float(signal.max()) / self._width)
        # 1. Blocks: far from the source's, or zeros in the place of ordinary values.
        mean = of_rows[:, None] / signal.shape[1]
        most = DIFFERENT_ROW * of_rows
        is_lost = (noise == signal) & (signal > NEVER_ZERO * mean)
        usual = np.maximum(signal, mean)
        is_odd = (noise > self._far_block * usual) | is_lost
        if self._is_placed:  # errors that lie along the values: another scale, which GPTQ never is
            along = np.einsum("rbk,rbk->rb", x.reshape(shape), difference.reshape(shape))
            is_odd |= (noise > DIFFERENT_BLOCK * usual) & (along**2 > ALONG * signal * noise)
        # 2. Rows, unless a few such blocks are all that is wrong with one.
        others = wrong - np.where(is_odd, noise, 0).sum(axis=1)
        is_odd_row = (wrong > most) & ((is_odd.mean(axis=1) > FEW) | (others > most))
        if self._is_placed:
            is_odd_row &= np.abs(along.sum(axis=1)) > OFF_ROW * of_rows
        self._rows += [
            (first_row + int(row), float(wrong[row]) / self._columns)
            for row in np.flatnonzero(is_odd_row)
        ]
        is_odd[is_odd_row] = False
        self._blocks += [
            (first_row + int(row), int(block) * self._width, float(noise[row, block]) / self._width)
            for row, block in np.argwhere(is_odd)
        ]

    def describe(self) -> str:
        """Describe the rows and blocks that differ; "" for none."""
        faint = self._largest * FAINT**2
        rows = [row for row, power in self._rows if power > faint]
        blocks = [(row, column) for row, column, power in self._blocks if power > faint]
        parts = []
        if rows:
            parts.append(f"{count_text(len(rows), 'row')} (the first is row {rows[0]})")
        if blocks:
            row, column = blocks[0]
            where = f"the first in row {row} from column {column}"
            parts.append(f"{count_text(len(blocks), 'block')} of {self._width} values ({where})")
        return " and ".join(parts)
