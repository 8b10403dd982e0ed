"""Which layout the block scales of an artifact lie in, by statistics on their bytes; None wherever these do not say.

Weights have rows and columns that are larger than others.  Read in the right layout this explains a share of the variance of
log2(block scale); read in a wrong one, most of that share is gone.  Single matrices overlap, so all are judged together.
A wrong answer comes from structure of another kind (heads, tiles, rows that repeat), which a wrong layout can turn into rows.
A layout is therefore named only where its rows and columns clearly say more than every rival does, and a rival may explain the
variance by any such structure of its own: cells of q rows x w blocks, or of w blocks in every p-th row.

Source of the shares: one-way analysis of variance, the intraclass correlation 1 - (mean square within cells) / variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.codec import Bytes, Float32s, decode_e4m3, decode_e8m0
from fp4convert.formats import Format
from fp4convert.layout import LAYOUTS, LINEAR, Layout

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# q, w and p: the sizes of heads and of their parts
FINEST_RUN = 4  # of those whose sums longer ones are made of
RUNS = (1, 2, *range(FINEST_RUN, 64, FINEST_RUN), *range(64, 128, 8), *range(128, 257, 16), 320, 384, 512)
WIDEST = 64  # w: 1, 2, 4, ...
PERIODS = (1, 2, 4, 8, 16, 32, 64, 128)
STRUCTURES = 1 + (len(RUNS) + len(PERIODS)) * WIDEST.bit_length()  # the first is rows and columns

LEAST_ROWS, LEAST_BLOCKS, LEAST_SCALES = 32, 4, 1024  # of a matrix that says anything
ALL_MATRICES = 64  # every matrix up to this one is looked at, then every second up to its double, every fourth, ...
SAMPLE, PANEL, PANELS, SAMPLE_BLOCKS = 1 << 17, 256, 4, 512  # panels of rows from all over a matrix, this many at least

FINE = 1.25  # cells below half a row are so many that they must explain this much more than rows and columns do
LEAST_CELL = 4
LEAST_VARIANCE = 1e-6  # of log2; below it a matrix is constant
ACCIDENT, ACCIDENT_SCALES = 0.05, 4096  # standard deviation of a share by accident; the matrix in which it is sqrt(2) of that
AGREEMENT, CONTRADICTION = 2.5, 5.0  # standard deviations by which every rival is beaten: linear as declared, and otherwise
CERTAINTY, ENOUGH = 15.0, 4  # so many, for the declared layout after so many matrices or their doubles, end the search
CONTRARY = 0.1  # of the lead over a rival, the part that other matrices may take back
DECODERS: dict[str, Callable[[Bytes], Float32s]] = {"fp8_e4m3": decode_e4m3, "e8m0": decode_e8m0}


class StoredScales(NamedTuple):
    """The block scales of one matrix as they are stored.

    stored  flat, with whatever padding their layout has
    shape   (rows, blocks a row)
    format  says what the bytes mean
    """

    stored: Bytes
    shape: tuple[int, int]
    format: Format


class _Contest:
    """Sums over matrices of the lead of each layout's rows and columns over each structure of each rival."""

    def __init__(self) -> None:
        self.won = np.zeros((len(LAYOUTS), len(LAYOUTS), STRUCTURES))
        self.lost = np.zeros_like(self.won)
        self.explained = np.zeros(len(LAYOUTS))
        self.variance = 0.0

    def add(self, shares: Floats, scales: int) -> None:
        """One matrix of so many scales: (layouts, structures) shares of its variance."""
        lead = shares[:, None, :1] - shares
        self.won += np.maximum(lead, 0)
        self.lost += np.maximum(-lead, 0)
        self.explained += shares[:, 0]
        self.variance += ACCIDENT**2 * (1 + ACCIDENT_SCALES / scales)

    def levels(self, fits: NDArray[np.bool_]) -> Floats:
        """By how many standard deviations each layout that fits beats all others that do, and no structure at all."""
        lead = np.where(self.lost > CONTRARY * self.won, -np.inf, self.won - self.lost).min(axis=-1)
        np.fill_diagonal(lead, self.explained)
        least: Floats = np.where(fits, lead[:, fits].min(axis=-1, initial=np.inf), -np.inf)
        return least / math.sqrt(self.variance) if self.variance else np.full(len(LAYOUTS), -np.inf)


def detect_layout(matrices: Iterable[StoredScales], declared: str) -> str | None:
    """The layout, of those in LAYOUTS, that all matrices together lie in; None where they do not say.

    matrices  are taken one by one until all doubt is gone; a layout that has another number of bytes for one of them is out
    declared  what the artifact says; where that is linear, as almost all are, less evidence confirms it
    """
    for name, level in evidence(matrices, declared).items():
        if level >= (AGREEMENT if name == declared == LINEAR.name else CONTRADICTION):
            return name
    return None


def evidence(matrices: Iterable[StoredScales], declared: str = "") -> dict[str, float]:
    """By how many standard deviations each layout beats all others and no structure at all; -inf where it does not fit.

    declared  the layout that the rest of the matrices is not asked about once it is certain; one of another name never is, for
              they may rule it out
    """
    contest = _Contest()
    fits = np.ones(len(LAYOUTS), bool)
    looked = 0
    for position, matrix in enumerate(matrices):
        fits &= [matrix.stored.size == math.prod(layout.padded(matrix.shape)) for layout in LAYOUTS.values()]
        if _is_looked_at(position) and fits.any() and _says_anything(matrix):
            shares = np.zeros((len(LAYOUTS), STRUCTURES))
            shares[fits] = _shares(
                _read(matrix, [layout for layout, is_fit in zip(LAYOUTS.values(), fits, strict=True) if is_fit])
            )
            contest.add(shares, min(math.prod(matrix.shape), SAMPLE))
            looked += 1
            if looked >= ENOUGH and looked.bit_count() == 1 and _level(contest, fits, declared) >= CERTAINTY:
                break
    return dict(zip(LAYOUTS, contest.levels(fits).tolist(), strict=True))


def _level(contest: _Contest, fits: NDArray[np.bool_], name: str) -> float:
    return float(contest.levels(fits)[list(LAYOUTS).index(name)]) if name in LAYOUTS else -math.inf


def _is_looked_at(position: int) -> bool:
    return position % (1 << (position // ALL_MATRICES).bit_length()) == 0


def _says_anything(matrix: StoredScales) -> bool:
    rows, blocks = matrix.shape
    if rows < LEAST_ROWS or blocks < LEAST_BLOCKS or rows * blocks < LEAST_SCALES:
        return False
    is_known = np.isfinite(_log2(matrix.format.scale_dtype))[matrix.stored]
    return bool(2 * is_known.sum() >= rows * blocks)


def _read(matrix: StoredScales, layouts: list[Layout]) -> Floats:
    """(rows, layouts, blocks) log2 of a part of the scales as each layout reads them."""
    first = _sample(matrix, layouts[0])
    readings = np.empty((len(first), len(layouts), first.shape[1]))
    readings[:, 0] = first
    for position, layout in enumerate(layouts[1:], 1):
        readings[:, position] = _sample(matrix, layout)
    return readings


def _sample(matrix: StoredScales, layout: Layout) -> Floats:
    """log2 of a part of the scales as read in a layout, less their mean; 0 where a byte is zero or NaN."""
    linear = np.frombuffer(layout.restore(matrix.stored.data, matrix.shape), np.uint8).reshape(matrix.shape)
    block_scales = linear[:, :SAMPLE_BLOCKS]
    rows, blocks = block_scales.shape
    count = max(PANELS, SAMPLE // (PANEL * blocks))
    if rows // PANEL > count:
        block_scales = np.concatenate([block_scales[PANEL * (k * (rows // PANEL) // count) :][:PANEL] for k in range(count)])
    table = _log2(matrix.format.scale_dtype)
    is_known = np.isfinite(table)
    counts = np.bincount(block_scales.reshape(-1), minlength=len(table))[is_known]
    mean = float((counts * table[is_known]).sum()) / max(int(counts.sum()), 1)
    around: Floats = np.where(is_known, table - mean, 0)
    return around[block_scales]


@cache
def _log2(scale_dtype: str) -> Floats:
    """log2 of the scale that each byte stands for; -inf or NaN for none, as byte 0 is, which zero blocks and padding store."""
    with np.errstate(divide="ignore", invalid="ignore"):
        table = np.log2(DECODERS[scale_dtype](np.arange(256, dtype=np.uint8)).astype(np.float64))
    table[0] = -np.inf
    return table


def _shares(x: Floats) -> Floats:
    """(readings, STRUCTURES) shares of the variance that is explained: rows and columns, then those of RUNS, then of PERIODS.

    x  (rows, readings, blocks): the same scales, read in several layouts; float64 sums are exact enough for differences of them
    """
    rows, readings, blocks = x.shape
    widths = 1 << np.arange(min(blocks, WIDEST).bit_length())
    *starts, joined = np.cumsum([0, *(blocks // widths)]).tolist()
    power = np.zeros((len(RUNS) + len(PERIODS), readings, joined))
    for sums, to in zip(_cells(x), power, strict=True):
        np.einsum("ijk,ijk->jk", sums, sums, out=to[:, -sums.shape[-1] :])
    members = np.array([*RUNS, *(rows // period for period in PERIODS)])[:, None, None]
    groups = np.array([*(rows // run for run in RUNS), *PERIODS])[:, None, None]
    of_rows, squares_of_rows = _sum_blocks(x, widths)
    total, squares = (_sum_above(each, (members * groups).reshape(-1)) for each in (of_rows, squares_of_rows))
    cell = members * widths
    share = _share(squares, total, np.add.reduceat(power, starts, axis=-1), (groups * (blocks // widths), cell))
    shares = np.zeros((len(power), readings, WIDEST.bit_length()))
    shares[..., : len(widths)] = np.where(cell < LEAST_CELL, 0, np.where(2 * cell >= blocks, share, share / FINE))
    by_rows, by_columns = np.square(of_rows[..., 0]).sum(axis=0), np.square(x.sum(axis=0)).sum(axis=-1)
    sides = ((by_rows, (rows, blocks)), (by_columns, (blocks, rows)))
    both = sum(_share(squares[0, :, 0], total[0, :, 0], one, shape) for one, shape in sides)  # the first run has all rows
    return np.concatenate((np.reshape(both, (readings, 1)), shares.swapaxes(0, 1).reshape(readings, -1)), axis=1)


def _cells(x: Floats) -> Iterator[Floats]:
    """The sums of all cells, for each of RUNS, then for each of PERIODS; not of those too small to be looked at."""
    for run in RUNS:
        if run < FINEST_RUN:
            yield _join_blocks(_sum_rows(x, run), LEAST_CELL // run)
    above = _join_blocks(np.concatenate((np.zeros((1, *x.shape[1:])), _sum_rows(x, FINEST_RUN))))
    yield above[1:]
    np.cumsum(above, axis=0, out=above)
    for run in RUNS:
        if run > FINEST_RUN:
            ends = above[: len(x) // run * run // FINEST_RUN + 1 : run // FINEST_RUN]
            yield ends[1:] - ends[:-1]
    for sums in _period_sums(x):
        yield _join_blocks(sums)


def _sum_rows(x: Floats, run: int) -> Floats:
    """Sums over whole runs of so many rows."""
    whole = len(x) // run * run
    sums = x[:whole:run]
    for row in range(1, run):
        sums = sums + x[row:whole:run]
    return sums


def _join_blocks(x: Floats, narrowest: int = 1) -> Floats:
    """Sums over 1, 2, 4, ... WIDEST neighbours in every row, side by side; no narrower ones than that."""
    parts, width = [], 1
    while width <= WIDEST and x.shape[-1]:
        if width >= narrowest:
            parts.append(x)
        even = x.shape[-1] // 2 * 2
        x, width = x[..., 0:even:2] + x[..., 1:even:2], 2 * width
    return np.concatenate(parts, axis=-1)


def _period_sums(x: Floats) -> list[Floats]:
    """For each of PERIODS, the sums over every period-th row, of as many rows as are whole periods: each from its double."""
    rows, widest = len(x), PERIODS[-1]
    found = [x[: rows // widest * widest].reshape(-1, widest, *x.shape[1:]).sum(axis=0)]
    for period in PERIODS[-2::-1]:
        begin, end = (rows // count * count for count in (2 * period, period))
        sums = found[-1][:period] + found[-1][period:]
        found.append(sums + x[begin:end] if begin < end else sums)
    return found[::-1]


def _sum_blocks(x: Floats, widths: Integers) -> tuple[Floats, Floats]:
    """(rows, readings, widths) sums of every row and of its squares, of as many blocks as are whole cells of those widths."""
    counts = (x.shape[-1] // widths * widths).tolist()
    parts = {count: x[..., :count] for count in counts}
    sums = {count: np.einsum("ijk->ij", part) for count, part in parts.items()}
    squares = {count: np.einsum("ijk,ijk->ij", part, part) for count, part in parts.items()}
    return np.stack([sums[count] for count in counts], axis=-1), np.stack([squares[count] for count in counts], axis=-1)


def _sum_above(x: Floats, ends: Integers) -> Floats:
    """The sums of all rows above each end."""
    bounds = np.array(sorted({0, *ends.tolist()}))  # np.unique would load numpy.ma, which takes 10 ms
    above = np.zeros((len(bounds), *x.shape[1:]))
    np.cumsum(np.add.reduceat(x, bounds[:-1], axis=0), axis=0, out=above[1:])
    return above[np.searchsorted(bounds, ends)]


def _share(squares: Floats, total: Floats, power: Floats, shape: tuple[Integers | int, Integers | int]) -> Floats:
    """The share of the variance between cells; not below 0, and 0 where there are not two cells of two elements.

    squares, total  the sums of the squares of all elements, and of all elements
    power           the sum of the squares of the cells' sums
    shape           (cells, elements of each)
    """
    cells, members = np.asarray(shape[0]), np.asarray(shape[1])
    count = cells * members
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = (squares - total * total / count) / (count - 1)
        within = (squares - power / members) / (count - cells)
        share = np.where(variance > LEAST_VARIANCE, np.maximum(1 - within / variance, 0), 0)
    return np.where((cells > 1) & (members > 1), share, 0)
