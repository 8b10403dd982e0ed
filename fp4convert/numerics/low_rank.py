"""Reference arithmetic of low-rank factors: merged, kept, beside codes.

A weight W with an adapter is W + s B A.  Rounding to W' leaves an error E, and of the adapter's
inputs, the rows of A, E keeps E P, where P is an orthonormal basis of these rows.  What is left of
an adapter is the power of its effect, |s B A|^2, over that of E P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import Float32s, decode_e2m1, encode_e2m1

PROTECTION = 30.0  # how much more an error counts along a row of A than across all of them
SPARED = 5  # columns for each row of A and each of these: fewer could not make up for so much
PROTECTION_PASSES = 2  # over all columns, after the first
NEGLIGIBLE = 1e-6  # of the longest row of A: what is left of one that others already span
Float64s = NDArray[np.float64]
Pulls = tuple[Float32s, Float32s]  # directions, and how far errors along them pull each column
f32 = np.float32


class Correction(NamedTuple):
    """What SVDQuant stores of a matrix beside codes.

    smooth    (columns,) float32: what columns of the codes' values are divided by
    down, up  (rank, columns) and (rows, rank) float32
    channels  (rows,) float32: what rows of the codes' values are multiplied with; None for ones
    Formula   W = channels * codes * scales / smooth + up down (arXiv 2411.05007; Diffusers 0.42,
              where x / smooth meets the codes, and x itself the factors)
    """

    smooth: Float32s
    down: Float32s
    up: Float32s
    channels: Float32s | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """Inputs that an adapter answers, and pulls of errors along them.

    basis    (columns, rank) float32: P, orthonormal
    first    (columns, rank) float32: pulls while the columns behind are not rounded yet
    again    (columns, rank) float32: pulls once all of them are
    Formula  H = I + c P P^T with c of protection_of.  first: with the columns from j on still free,
             the best column j is w_j + v_j . (sum of errors so far times their rows of P), v_j =
             c (I + c sum_{i >= j} p_i p_i^T)^-1 p_j, which is GPTQ's update (arXiv 2210.17323) for
             this H.  again: the best single column, v_j = c p_j / (1 + c |p_j|^2).
    """

    basis: Float32s
    first: Float32s
    again: Float32s


def basis_of(a: Float32s) -> Float32s:
    """Return an orthonormal basis of the rows of A, as columns.

    By Gram and Schmidt, twice, in float64 and by sums alone, so that no BLAS library changes a bit.
    Rows that others span already, and rows of zeros, add nothing.
    """
    found: list[Float64s] = []
    limit = NEGLIGIBLE * math.sqrt(max((_dot(row, row) for row in a.astype(np.float64)), default=0))
    for row in a.astype(np.float64):
        rest = row
        for direction in found * 2:
            rest = rest - _dot(rest, direction) * direction
        length = math.sqrt(_dot(rest, rest))
        if length > limit:
            found.append(rest / length)
    return np.array(found, np.float64).reshape(len(found), a.shape[1]).T.astype(f32)


def protection_of(basis: Float32s) -> float:
    """Return how much more an error counts along a basis.

    PROTECTION, and less where columns are few beside the rank: all else would lose too much.
    """
    columns, rank = (int(size) for size in basis.shape)
    return min(PROTECTION, columns / (SPARED * max(rank, 1)))


def directions_of(a: Float32s) -> Directions:
    """Return the inputs that rows of A answer, with the pulls of columns."""
    basis = basis_of(a)
    columns, rank = basis.shape
    inverse, first = np.eye(rank), np.empty((columns, rank))
    exact = basis.astype(np.float64)
    c = protection_of(basis)
    # From the last column to the first, by Sherman and Morrison's formula.
    for j in range(columns - 1, -1, -1):
        u = (inverse * exact[j]).sum(axis=1)
        weight = c / (1 + c * _dot(u, exact[j]))
        first[j] = weight * u
        inverse -= weight * (u[:, None] * u)
    lengths = (exact * exact).sum(axis=1, keepdims=True)
    again = c * exact / (1 + c * lengths)
    return Directions(basis, first.astype(f32), again.astype(f32))


def multiply(b: Float32s, a: Float32s) -> Float32s:
    """Return b @ a in float32, one fused multiply-add after the other.

    The order of PEFT's own merge on a CPU, where BLAS adds up few columns of b in theirs.
    """
    y = np.zeros((b.shape[0], a.shape[1]), f32)
    for k in range(a.shape[0]):
        product = b[:, k, None].astype(np.float64) * a[k].astype(np.float64)
        total = product + y
        # Rounded to odd where it is not exact, so that float32 rounds the exact sum.
        rest = total - product
        lost = (product - (total - rest)) + (y - rest)
        bits = total.view(np.int64)
        is_even = (lost != 0) & (bits & 1 == 0)
        away = np.where((lost > 0) == (total > 0), 1, -1)
        y = (bits + np.where(is_even, away, 0)).view(np.float64).astype(f32)
    return y


def pull_to_nearest(
    x: Float32s, steps: Float32s, pulls: Pulls, y: Float32s, pulled: Float32s
) -> tuple[Float32s, Float32s]:
    """Round every column once more, pulled by the errors of all others.

    x, y     (rows, columns) float32: weights, and the values that they have now
    steps    (rows, columns / block) float32: what one code unit is worth
    pulls    (columns, rank) float32 each
    pulled   (rows, rank) float32: sum over columns of (x - y) times their direction
    Returns  y and pulled afterwards
    """
    y, pulled = y.copy(), pulled.copy()
    block = x.shape[1] // steps.shape[1]
    for j, (direction, pull) in enumerate(zip(*pulls, strict=True)):
        step, error, t = steps[:, j // block], x[:, j] - y[:, j], x[:, j]
        for k in range(len(direction)):
            pulled[:, k] -= error * direction[k]
            t = t + pulled[:, k] * pull[k]
        y[:, j] = decode_e2m1(encode_e2m1(t / step)) * step + f32(0)
        error = x[:, j] - y[:, j]
        for k in range(len(direction)):
            pulled[:, k] += error * direction[k]
    return y, pulled


def _dot(x: Float64s, y: Float64s) -> float:
    return float((x * y).sum())
