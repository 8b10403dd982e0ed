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

    matrices  are taken one by one; a layout that has another number of bytes for one of them is out
    declared  what the artifact says; where that is linear, as almost all are, less evidence confirms it
    """
    for name, level in evidence(matrices).items():
        if level >= (AGREEMENT if name == declared == LINEAR.name else CONTRADICTION):
            return name
    return None


def evidence(matrices: Iterable[StoredScales]) -> dict[str, float]:
    """By how many standard deviations each layout beats all others and no structure at all; -inf where it does not fit."""
    contest = _Contest()
    fits = np.ones(len(LAYOUTS), bool)
    for position, matrix in enumerate(matrices):
        fits &= [matrix.stored.size == math.prod(layout.padded(matrix.shape)) for layout in LAYOUTS.values()]
        if _is_looked_at(position) and fits.any() and _says_anything(matrix):
            readings = zip(LAYOUTS.values(), fits, strict=True)
            shares = [_shares(_sample(matrix, layout)) if is_fit else np.zeros(STRUCTURES) for layout, is_fit in readings]
            contest.add(np.array(shares), min(math.prod(matrix.shape), SAMPLE))
    return dict(zip(LAYOUTS, contest.levels(fits).tolist(), strict=True))


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
    """Shares of the variance that each structure explains: rows and columns, then those of RUNS, then those of PERIODS."""
    rows, blocks = x.shape
    shares = [_share(x.sum(axis=1), blocks, x) + _share(x.sum(axis=0), rows, x)]
    for run in RUNS:
        shares += _cell_shares(x, x[: rows // run * run].reshape(-1, run, blocks).sum(axis=1), run)
    for period in PERIODS:
        shares += _cell_shares(x, x[: rows // period * period].reshape(-1, period, blocks).sum(axis=0), rows // period)
    return np.array(shares)


def _cell_shares(x: Float32s, row_sums: Float32s, members: int) -> list[float]:
    """What cells of 1, 2, 4, ... WIDEST blocks explain, of x summed over the `members` rows of each group."""
    x = x[: members * len(row_sums)]
    shares, sums, width = [], row_sums, 1
    while width <= WIDEST:
        cell = members * width
        share = _share(sums, cell, x[:, : sums.shape[1] * width]) if cell >= LEAST_CELL else 0.0
        shares.append(share if 2 * cell >= x.shape[1] else share / FINE)
        even = sums.shape[1] // 2 * 2
        sums, width = sums[:, 0:even:2] + sums[:, 1:even:2], 2 * width
    return shares


def _share(sums: Float32s, members: int, x: Float32s) -> float:
    """The share of x's variance between cells of `members` elements each, whose sums are given; not below 0."""
    if sums.size < 2 or members < 2:
        return 0.0
    squares, total = float(np.vdot(x, x)), float(sums.sum())
    variance = (squares - total * total / x.size) / (x.size - 1)
    within = (squares - float(np.vdot(sums, sums)) / members) / (x.size - sums.size)
    return max(1 - within / variance, 0.0) if variance > LEAST_VARIANCE else 0.0
