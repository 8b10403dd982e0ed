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
from collections.abc import Callable, Iterable
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
RUNS = (1, 2, *range(4, 64, 4), *range(64, 128, 8), *range(128, 257, 16), 320, 384, 512)
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
            readings = [_sample(matrix, layout) for layout, is_fit in zip(LAYOUTS.values(), fits, strict=True) if is_fit]
            shares[fits] = _shares(np.stack(readings, axis=1))
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


def _sample(matrix: StoredScales, layout: Layout) -> Float32s:
    """log2 of a part of the scales as read in a layout, less their mean; 0 where a byte is zero or NaN."""
    linear = np.frombuffer(layout.restore(matrix.stored.data, matrix.shape), np.uint8).reshape(matrix.shape)
    block_scales = linear[:, :SAMPLE_BLOCKS]
    rows, blocks = block_scales.shape
    count = max(PANELS, SAMPLE // (PANEL * blocks))
    if rows // PANEL > count:
        block_scales = np.concatenate([block_scales[PANEL * (k * (rows // PANEL) // count) :][:PANEL] for k in range(count)])
    x = _log2(matrix.format.scale_dtype)[block_scales]
    is_known = np.isfinite(x)
    mean = x.sum(where=is_known, dtype=np.float64) / max(is_known.sum(), 1)
    return np.where(is_known, x - np.float32(mean), np.float32(0))


@cache
def _log2(scale_dtype: str) -> Float32s:
    """log2 of the scale that each byte stands for; -inf or NaN for none, as byte 0 is, which zero blocks and padding store."""
    with np.errstate(divide="ignore", invalid="ignore"):
        table = np.log2(DECODERS[scale_dtype](np.arange(256, dtype=np.uint8)))
    table[0] = -np.inf
    return table


def _shares(x: Float32s) -> Floats:
    """(readings, STRUCTURES) shares of the variance that is explained: rows and columns, then those of RUNS, then of PERIODS.

    x  (rows, readings, blocks): the same scales, read in several layouts; float64 sums are exact enough for differences of them
    """
    rows, readings, blocks = x.shape
    doubles = x.astype(np.float64)
    joined, starts = _join_blocks(doubles)
    above = np.zeros((rows + 1, *joined.shape[1:]))  # the sums of all rows above
    np.cumsum(joined, axis=0, out=above[1:])
    members = np.array([*RUNS, *(rows // period for period in PERIODS)])
    groups = np.array([*(rows // run for run in RUNS), *PERIODS])
    cells = [np.diff(above[: rows // run * run + 1 : run], axis=0) for run in RUNS]
    cells += [_join_blocks(sums)[0] for sums in _period_sums(doubles)]
    power = np.add.reduceat(np.array([np.einsum("ijk,ijk->jk", sums, sums) for sums in cells]), starts, axis=-1)
    total = np.add.reduceat(above[members * groups], starts, axis=-1)
    squares = _squares_above(doubles, len(starts))
    by_rows = np.square(joined[..., :blocks].sum(axis=-1)).sum(axis=0)
    by_columns = np.square(above[-1, :, :blocks]).sum(axis=-1)
    sides = ((by_rows, (rows, blocks)), (by_columns, (blocks, rows)))
    shares = np.zeros((readings, len(members), WIDEST.bit_length()))
    for column in range(len(starts)):
        cell, beside = (members << column)[:, None], blocks >> column
        sums = squares[members * groups, :, column], total[..., column], power[..., column]
        share = _share(*sums, (groups[:, None] * beside, cell))
        shares[..., column] = np.where(cell < LEAST_CELL, 0, np.where(2 * cell >= blocks, share, share / FINE)).T
    both = sum(_share(squares[-1, :, 0], total[0, :, 0], one, shape) for one, shape in sides)
    return np.concatenate((np.reshape(both, (readings, 1)), shares.reshape(readings, -1)), axis=1)


def _join_blocks(x: Floats) -> tuple[Floats, list[int]]:
    """Sums over 1, 2, 4, ... WIDEST neighbours in every row, side by side, and where each width begins."""
    parts, starts = [x], [0]
    while len(parts) < WIDEST.bit_length() and (even := parts[-1].shape[-1] // 2 * 2):
        starts.append(starts[-1] + parts[-1].shape[-1])
        parts.append(parts[-1][..., 0:even:2] + parts[-1][..., 1:even:2])
    return np.concatenate(parts, axis=-1), starts


def _period_sums(x: Floats) -> list[Floats]:
    """For each of PERIODS, the sums over every period-th row, of as many rows as are whole periods: each from its double."""
    rows, widest = len(x), PERIODS[-1]
    found = [x[: rows // widest * widest].reshape(-1, widest, *x.shape[1:]).sum(axis=0)]
    for period in PERIODS[-2::-1]:
        begin, end = (rows // count * count for count in (2 * period, period))
        sums = found[-1][:period] + found[-1][period:]
        found.append(sums + x[begin:end] if begin < end else sums)
    return found[::-1]


def _squares_above(x: Floats, widths: int) -> Floats:
    """(rows + 1, readings, widths) sums of squares of all rows above, of as many blocks as are whole cells of 1, 2, 4, ..."""
    squares, blocks = np.square(x), x.shape[-1]
    counts = [blocks >> width << width for width in range(widths)]
    sums = {count: squares[..., :count].sum(axis=-1) for count in set(counts)}
    above = np.zeros((len(x) + 1, x.shape[1], widths))
    np.cumsum(np.stack([sums[count] for count in counts], axis=-1), axis=0, out=above[1:])
    return above


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
