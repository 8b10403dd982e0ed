"""Find weights that are values of a four-bit format already.

Training with fake quantization leaves such weights: every block is a step times E2M1 values,
rounded to the dtype of the checkpoint. Decides whether blocks are that, and which global scale they
were made under; whoever rounds them decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import Float32s, decode_e2m1, encode_e2m1
from fp4convert.numerics.formats import E2M1_MAX, E4M3_MAX, E4M3_MIN, GLOBAL_RANGE, Format

MAGNITUDES = decode_e2m1(np.arange(7, 0, -1, dtype=np.uint8))  # 6, 4, 3 ... 0.5
TELLING = 3  # magnitudes of a block; what has fewer is a step times E2M1 values by accident
LEAST_BLOCKS = 8  # telling ones, below which nothing is said
LEAST_SHARE = 0.9  # of telling blocks; of other weights it is below 0.01
# Half a unit in the last place is 2^-(bits + 1) times the power of two above x, or that of the
# smallest number.
PRECISION = {"BF16": (8, 2.0**-133), "F16": (11, 2.0**-24), "F32": (24, 2.0**-149)}
# Block scales that the largest weight may have had, one of each mantissa of E4M3: 448, 416 ... 240.
LARGEST = tuple(E4M3_MAX * eighths / 14 for eighths in (14, 13, 12, 11, 10, 9, 8, 7.5))
F32_ROUNDINGS = 4  # half units: float32 values were products of float32 products
F32_NEIGHBOURS = 8  # of an amax, that may be the one

Doubles = NDArray[np.float64]


def half_units(x: Doubles, dtype: str) -> Doubles:
    """Return how far a number may lie from what was rounded to it."""
    bits, smallest = PRECISION[dtype]
    halves = np.maximum(np.ldexp(1.0, np.frexp(x)[1] - 1 - bits), smallest / 2)
    return np.asarray(halves * (F32_ROUNDINGS if dtype == "F32" else 1))


def find_steps(blocks: Float32s, dtype: str) -> tuple[Doubles, Doubles]:
    """Find the range of the smallest step whose E2M1 multiples each block is.

    blocks   (count, block_size), as they are stored in `dtype`
    Returns  lowest and highest; NaN where there is none, and for blocks of zeros
    """
    x = np.abs(blocks).astype(np.float64)
    slack, top = half_units(x, dtype), x.max(axis=1, initial=0)
    low, high = np.full((2, len(x)), np.nan)
    for largest in MAGNITUDES.astype(np.float64):
        open_ = np.flatnonzero(np.isnan(low) & (top > 0))
        own, room = x[open_], slack[open_]
        with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
            quotients = own * (largest / top[open_])[:, None]
            values = decode_e2m1(encode_e2m1(quotients.astype(np.float32))).astype(np.float64)
            is_zero = values == 0
            least = np.where(is_zero, 0, (own - room) / values).max(axis=1, initial=0)
            most = np.where(is_zero, np.inf, (own + room) / values).min(axis=1, initial=np.inf)
        fits = (least <= most) & ~(is_zero & (own > 0)).any(axis=1)
        low[open_[fits]], high[open_[fits]] = least[fits], most[fits]
    return low, high


def count_on_grid(x: Float32s, dtype: str, fmt: Format) -> tuple[int, int]:
    """Count blocks that tell, and those that are E2M1 values times a step.

    The step is a power of two where the format's are. Whether E4M3 has it is not asked here: that
    needs the global scale.
    """
    telling, blocks = find_telling(x, fmt)
    low, high = find_steps(blocks, dtype)
    fits = ~np.isnan(low)
    if not fmt.has_global_scale:
        with np.errstate(invalid="ignore"):
            fits &= np.ldexp(1.0, np.frexp(np.where(fits, high, 1.0))[1] - 1) >= low
    return telling, int(fits.sum())


def find_telling(x: Float32s, fmt: Format) -> tuple[int, Float32s]:
    """Count blocks that tell; return those that may lie on a grid."""
    blocks = x.reshape(-1, fmt.block_size)
    ordered = np.sort(np.abs(blocks), axis=1)
    magnitudes = (np.diff(ordered, axis=1) > 0).sum(axis=1) + (ordered[:, 0] > 0)
    telling = magnitudes >= TELLING
    return int(telling.sum()), blocks[telling & (magnitudes <= len(MAGNITUDES))]


def is_on_grid(telling: int, on_grid: int) -> bool:
    """Tell whether blocks so counted come from fake quantization."""
    return telling >= LEAST_BLOCKS and on_grid >= LEAST_SHARE * telling


def find_amaxes(blocks: Float32s, dtype: str, amax: float) -> Iterator[float]:
    """Find amaxes under whose global scales blocks may have been made.

    The first is that of the weights; the next is where most steps are E4M3 values times amax /
    2688. That amax may be another: of weights before they were rounded to `dtype`, or frozen before
    the training ended.
    """
    yield amax
    low, high = (values[~np.isnan(values)] for values in find_steps(blocks, dtype))
    near = 2 * float(half_units(np.array([amax]), dtype)[0]) / amax
    best, most = amax, 0
    # The largest weight is 6 or 4 times a step, which is one of 8 mantissas times the global scale.
    for value in (E2M1_MAX, 4.0):
        for scale in LARGEST:
            tried = amax / (value * scale) * GLOBAL_RANGE
            steps = (low + high) / 2 / (tried / GLOBAL_RANGE)
            scales = np.clip(steps, E4M3_MIN, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
            divisors = scales.astype(np.float64) / GLOBAL_RANGE
            begin, end = low / divisors, high / divisors
            fits = (begin <= tried * (1 + near)) & (end >= tried * (1 - near))
            middle, count = _most_shared(begin[fits], end[fits])
            if count > most:
                best, most = middle, count
    yield best
    if dtype == "F32":
        for distance in range(1, F32_NEIGHBOURS + 1):
            for sign in (-1, 1):
                bits = np.float32(best).view(np.int32) + np.int32(sign * distance)
                yield float(bits.view(np.float32))


def _most_shared(begin: Doubles, end: Doubles) -> tuple[float, int]:
    """Find the middle of where most ranges meet, and how many do."""
    if not len(begin):
        return 0.0, 0
    edges = np.concatenate((begin, end))
    turns = np.concatenate((np.ones(len(begin), np.int64), np.full(len(end), -1)))
    order = np.lexsort((-turns, edges))
    counts = np.cumsum(turns[order])
    at = int(counts.argmax())
    return float(np.float32((edges[order[at]] + edges[order[at + 1]]) / 2)), int(counts[at])


def count_exact(x: NDArray[np.generic], values: Float32s, block_size: int) -> tuple[int, int]:
    """Count blocks that are not zero, and those that come back as x."""
    with np.errstate(over="ignore", under="ignore"):
        same = (values.astype(x.dtype) == x).reshape(-1, block_size).all(axis=1)
    counted = (x != 0).reshape(-1, block_size).any(axis=1)
    return int(counted.sum()), int((same & counted).sum())
