"""Detect the layout of block scales by statistics.

Weights have rows and columns that are larger than others.  Read in the right layout, rows and
columns explain a share of the variance of log2(block scale); read in a wrong one, most of that
share is gone.  Single matrices overlap, so all are judged together:

1. Each matrix is read in every layout that its number of bytes fits (`evidence`).
2. Each reading gives the share of the variance that rows and columns explain, and the shares that
   other structures explain: cells of q rows x w blocks, or of w blocks in every p-th row
   (`explained_shares`).
3. A layout leads by the share of its own rows and columns less the share of any structure of any
   rival: heads, tiles and rows that repeat are structures which a wrong layout can turn into rows.
   Leads are added over matrices (`_Leads`).
4. The answer is the layout with a least lead many standard deviations above 0 (`detect_layout`).
5. Where none has it, as with few blocks to a row, rows and columns alone speak against the declared
   layout: real weights have about twice the share in their own, and more in no other (MiniLM cut to
   128, 256 and 384 columns, 168 parts of it).  Made structure deceives this: `--source` decides.

Source of the shares: one-way analysis of variance, the intraclass correlation
1 - (mean square within cells) / variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends.cpu import CELL_WIDTHS, PERIODS, Cpu
from fp4convert.numerics.codec import Bytes, Float32s, decode_e4m3, decode_e8m0
from fp4convert.numerics.formats import Format
from fp4convert.numerics.scale_layouts import LAYOUTS, LINEAR, Layout

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

# q: the sizes of heads and of their parts, as w and p are, which CELL_WIDTHS and PERIODS hold
RUNS = (1, 2, *range(4, 64, 4), *range(64, 128, 8), *range(128, 257, 16), 320, 384, 512)
STRUCTURES = 1 + (len(RUNS) + len(PERIODS)) * len(CELL_WIDTHS)  # the first is rows and columns

LEAST_ROWS, LEAST_BLOCKS, LEAST_SCALES = 32, 4, 1024  # of a matrix that says anything
# Every matrix up to this one is looked at, then every second up to its double, every fourth, ...
ALL_MATRICES = 64
# Panels of rows from all over a matrix, this many at least.
SAMPLE, PANEL, PANELS, SAMPLE_BLOCKS = 1 << 17, 256, 4, 512

LEAST_CELL = 4
LEAST_VARIANCE = 1e-6  # of log2; below it a matrix is constant
# Standard deviation of a share by accident, and the matrix in which it is sqrt(2) of that.
ACCIDENT, ACCIDENT_SCALES = 0.05, 4096
# Standard deviations by which every rival is beaten: linear as declared, and otherwise.
AGREEMENT, CONTRADICTION = 2.5, 5.0
# Of rows and columns alone, the least share in another layout by that in the declared one.
OUTWEIGHING = 1.4
# So many, for the declared layout after so many matrices or their doubles, end the search.
CERTAINTY, ENOUGH = 15.0, 4
CONTRARY = 0.1  # of the lead over a rival, the part that other matrices may take back
DECODERS: dict[str, Callable[[Bytes], Float32s]] = {"fp8_e4m3": decode_e4m3, "e8m0": decode_e8m0}


class StoredScales(NamedTuple):
    """The block scales of one matrix as they are stored.

    stored  flat, with the padding of their layout
    shape   (rows, blocks a row)
    format  of the bytes
    """

    stored: Bytes
    shape: tuple[int, int]
    format: Format


class _Leads:
    """Sums of the leads of layouts over structures of rivals."""

    def __init__(self) -> None:
        self.won = np.zeros((len(LAYOUTS), len(LAYOUTS), STRUCTURES))
        self.lost = np.zeros_like(self.won)
        self.explained = np.zeros(len(LAYOUTS))
        self.variance = 0.0

    def add(self, shares: Doubles, scales: int) -> None:
        """Add one matrix: (layouts, structures) shares, and its scales."""
        lead = shares[:, None, :1] - shares
        self.won += np.maximum(lead, 0)
        self.lost += np.maximum(-lead, 0)
        self.explained += shares[:, 0]
        self.variance += ACCIDENT**2 * (1 + ACCIDENT_SCALES / scales)

    def levels(self, fits: NDArray[np.bool_]) -> dict[str, float]:
        """Return the least lead of every layout, in standard deviations.

        fits  the layouts that are not ruled out; a layout leads over the others, and over none
        """
        lead = np.where(self.lost > CONTRARY * self.won, -np.inf, self.won - self.lost).min(axis=-1)
        np.fill_diagonal(lead, self.explained)
        least: Doubles = np.where(fits, lead[:, fits].min(axis=-1, initial=np.inf), -np.inf)
        if not self.variance:
            return dict.fromkeys(LAYOUTS, -math.inf)
        return dict(zip(LAYOUTS, (least / math.sqrt(self.variance)).tolist(), strict=True))


def detect_layout(matrices: Iterable[StoredScales], declared: str) -> str | None:
    """Name the layout of all matrices; None if unknown.

    matrices  are read one by one until all doubt is gone; a layout with another number of bytes for
              one of them is out
    declared  the layout of the record; less evidence confirms linear, which almost all have
    """
    leads, fits = _compare(matrices, declared)
    for name, level in leads.levels(fits).items():
        if level >= (AGREEMENT if name == declared == LINEAR.name else CONTRADICTION):
            return name
    explained = np.where(fits, leads.explained, 0) / math.sqrt(leads.variance or 1)
    alone = dict(zip(LAYOUTS, explained.tolist(), strict=True))
    likely = max(alone, key=alone.__getitem__)
    least = max(CONTRADICTION, OUTWEIGHING * alone.get(declared, math.inf))
    return likely if alone[likely] >= least else None


def evidence(matrices: Iterable[StoredScales], declared: str = "") -> dict[str, float]:
    """Return by how many standard deviations each layout beats all others.

    A layout that does not fit has -inf.
    declared  ends the search once it is certain; other layouts may still be ruled out
    """
    leads, fits = _compare(matrices, declared)
    return leads.levels(fits)


def _compare(matrices: Iterable[StoredScales], declared: str) -> tuple[_Leads, NDArray[np.bool_]]:
    """Add the leads of matrices; return them, and the layouts that fit all."""
    leads = _Leads()
    fits = np.ones(len(LAYOUTS), bool)
    looked = 0
    for position, matrix in enumerate(matrices):
        fits &= [
            matrix.stored.size == math.prod(layout.padded(matrix.shape))
            for layout in LAYOUTS.values()
        ]
        is_looked_at = position % (1 << (position // ALL_MATRICES).bit_length()) == 0
        if not is_looked_at or not fits.any() or not _says_anything(matrix):
            continue
        fitting = [layout for layout, is_fit in zip(LAYOUTS.values(), fits, strict=True) if is_fit]
        readings = [_sample(matrix, layout) for layout in fitting]
        shares = np.zeros((len(LAYOUTS), STRUCTURES))
        shares[fits] = explained_shares(readings, _log2(matrix.format.scale_dtype))
        leads.add(shares, min(math.prod(matrix.shape), SAMPLE))
        looked += 1
        is_asked = looked >= ENOUGH and looked.bit_count() == 1
        if is_asked and leads.levels(fits).get(declared, -math.inf) >= CERTAINTY:
            break
    return leads, fits


def _says_anything(matrix: StoredScales) -> bool:
    """Tell whether a matrix has enough rows, blocks and different scales."""
    rows, blocks = matrix.shape
    if rows < LEAST_ROWS or blocks < LEAST_BLOCKS or rows * blocks < LEAST_SCALES:
        return False
    is_known = np.isfinite(_log2(matrix.format.scale_dtype))
    return bool(2 * Cpu().count_bytes(matrix.stored)[is_known].sum() >= rows * blocks)


def _sample(matrix: StoredScales, layout: Layout) -> Bytes:
    """Read a (rows, blocks) part of the scales as they lie in a layout."""
    rows, blocks = matrix.shape[0], min(matrix.shape[1], SAMPLE_BLOCKS)
    panels, count = rows // PANEL, max(PANELS, SAMPLE // (PANEL * blocks))
    parts = [(0, rows)]
    if panels > count:
        firsts = [PANEL * (number * panels // count) for number in range(count)]
        parts = [(first, first + PANEL) for first in firsts]
    stored = matrix.stored.data
    read = [layout.restore_rows(stored, matrix.shape, *part, blocks) for part in parts]
    return np.ascontiguousarray(read[0] if len(read) == 1 else np.concatenate(read))


@cache
def _log2(scale_dtype: str) -> Doubles:
    """Return log2 of the scale of every byte.

    It is -inf or NaN for a byte without a scale, such as byte 0 of zero blocks and padding.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        table = np.log2(DECODERS[scale_dtype](np.arange(256, dtype=np.uint8)).astype(np.float64))
    table[0] = -np.inf
    return table


def explained_shares(readings: Sequence[Bytes], log2: Doubles) -> Doubles:
    """Return the shares of the variance that structures explain.

    readings  (rows, blocks): the same scales, read in several layouts
    log2      (256,) of every byte; float64 sums are exact enough for their differences
    Returns   (readings, STRUCTURES): rows and columns, then those of RUNS, then of PERIODS
    """
    rows, blocks = readings[0].shape
    runs = (rows, *RUNS)  # all rows of one block are a column
    sums, of_rows = zip(*(Cpu().sum_cells(each, log2, runs) for each in readings), strict=True)
    power, total, squares = np.moveaxis(np.stack(sums), -1, 0)
    groups, cell = _cells_of((rows, blocks))
    share = _share_of_cells(squares, total, power, (groups, cell))
    # Columns are the first of these; rows are added to them.
    row_share = _share_of_cells(squares[:, 0, 0], total[:, 0, 0], np.array(of_rows), (rows, blocks))
    both = share[:, 0, 0] + row_share
    # A row of another layout is the mean of several small cells, and keeps so much of their share.
    others = np.where(2 * cell >= blocks, share, share * cell / blocks)
    others = np.where(cell < LEAST_CELL, 0, others)[:, 1:]
    return np.concatenate((both[:, None], others.reshape(len(readings), -1)), axis=1)


@cache  # matrices have few shapes
def _cells_of(shape: tuple[int, int]) -> tuple[Integers, Integers]:
    """Return the number of cells of a structure, and of scales in a cell."""
    rows, blocks = shape
    runs, widths = (rows, *RUNS), np.array(CELL_WIDTHS)
    members = np.array([*runs, *(rows // period for period in PERIODS)])[:, None]
    groups = np.array([*(rows // run for run in runs), *PERIODS])[:, None]
    return groups * (blocks // widths), members * widths


def _share_of_cells(
    squares: Doubles, total: Doubles, power: Doubles, shape: tuple[Integers | int, Integers | int]
) -> Doubles:
    """Return the share of the variance that lies between cells.

    It is 0 with fewer than two cells of two elements, and never negative.
    squares, total  the sums of the squares of all elements, and of all elements
    power           the sum of the squares of the cells' sums
    shape           (cells, elements of a cell)
    """
    cells, members = np.asarray(shape[0]), np.asarray(shape[1])
    count = cells * members
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = (squares - total * total / count) / (count - 1)
        within = (squares - power / members) / (count - cells)
        share = np.where(variance > LEAST_VARIANCE, np.maximum(1 - within / variance, 0), 0)
    return np.where((cells > 1) & (members > 1), share, 0)
