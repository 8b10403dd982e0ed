"""Find rows and blocks of a tensor that do not have its source's values.

Sums over a whole tensor do not show a few of them: eight rows of zeros among 4,096 cost 0.01 dB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import Finding
from fp4convert.numerics.codec import block_steps, dequantize, nearest_values
from fp4convert.numerics.formats import E2M1_MAX, NVFP4
from fp4convert.numerics.matrices import Quantized
from fp4convert.progress import count_text

# Power of the errors of a row, by its own: other values have about 2, zeros 1; rounding left 0.06,
# and GPTQ on 40 samples of text 0.5 at most.
DIFFERENT_ROW = 0.9
# Of a block, by its own and by the mean of its row's blocks: GPTQ left 4 at most.
DIFFERENT_BLOCK = 16.0
PLACED = 5.0  # times these limits, where GPTQ is known to have placed errors for outputs' sake
# Power of a block by that mean, from which no rule rounds all of it to zeros: its largest value
# decides its scale.
NEVER_ZERO = 0.25
# Share of a row's blocks up to which they are told as blocks, and above as a row.
FEW = 0.25
# Of the largest value: FP8 has no block scale for values 2^-9 / 448 = 2^-17.8 of it, which become
# zeros as they must.
FAINT = 2.0**-16
LEAST_SCALE = 0x01  # of E4M3: 2^-9
EXCESS = 1.05  # what a rule's choice of a scale may lose beside the least one
LOST = 0.5  # of a block's power: from there on rounding has lost it
Doubles = NDArray[np.float64]


def is_underflow(panels: Iterable[tuple[Doubles, Quantized]]) -> bool:
    """Tell whether all that was lost is too small for its scales.

    Each block that is lost has the nearest codes under its scale, is within the range of the least
    block scale, and would lose as much under that.

    panels  values of the source, and what they became
    """
    has_lost = False
    for values, q in panels:
        if q.format is not NVFP4:  # E8M0 reaches down to where float32 ends
            return False
        shape = (-1, q.format.block_size)
        least = replace(q, block_scales=memoryview(bytes([LEAST_SCALE]) * len(q.block_scales)))
        x, y, nearest, best = (
            each.reshape(shape).astype(np.float64)
            for each in (
                *(values, dequantize(q)),
                *(nearest_values(values, q), nearest_values(values, least)),
            )
        )
        noise, least_noise = (((x - other) ** 2).sum(axis=1) for other in (y, best))
        is_lost = noise > LOST * (x**2).sum(axis=1)
        is_due = (noise <= EXCESS * least_noise) & (y == nearest).all(axis=1)
        is_due &= np.abs(x).max(axis=1) <= E2M1_MAX * block_steps(least)
        if not is_due[is_lost].all():
            return False
        has_lost |= bool(is_lost.any())
    return has_lost


def underflow(name: str) -> Finding:
    """Return the finding on weights that is_underflow tells of."""
    detail = "weights of the source were lost to underflow: they are below half of the smallest"
    detail += " step that its scales allow; keep it (--exclude), or choose another format"
    return Finding("error", "weights-underflow", name, detail)


class OddPlaces:
    """Rows and blocks that are not the source's, gathered panel by panel.

    columns    of the tensor
    width      elements that share a scale; `columns` where it has no blocks
    is_placed  GPTQ made it

    signal, noise  power of all values of the source so far, and of what the artifact's differ by
    """

    def __init__(self, columns: int, width: int, is_placed: bool = False) -> None:
        self._slack = PLACED if is_placed else 1.0
        self.signal = self.noise = 0.0
        self._columns, self._width = columns, width
        self._largest = 0.0  # mean power of the values of a block
        # What differs: row, first column (of blocks alone), and by which mean power.
        self._rows: list[tuple[int, float]] = []
        self._blocks: list[tuple[int, int, float]] = []

    def add(self, first_row: int, x: Doubles, difference: Doubles) -> None:
        """Look at whole rows.

        x, difference  (rows * columns,) the source's values, and those minus the artifact's
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
        most = self._slack * DIFFERENT_ROW * of_rows
        is_lost = (noise == signal) & (signal > NEVER_ZERO * mean)
        is_odd = (noise > self._slack * DIFFERENT_BLOCK * np.maximum(signal, mean)) | is_lost
        # 2. Rows, unless a few such blocks are all that is wrong with one.
        others = wrong - np.where(is_odd, noise, 0).sum(axis=1)
        is_odd_row = (wrong > most) & ((is_odd.mean(axis=1) > FEW) | (others > most))
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
        """Say which rows and blocks differ; "" where none does."""
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
