"""Make values beside the ties of four-bit formats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import FLOAT_DTYPES, decode_e4m3
from fp4convert.numerics.formats import E2M1_MAX, E4M3_MAX, E8M0_STORED_MAX, GLOBAL_RANGE, Format

COLUMNS = 544  # whole blocks, and a tail of everything that takes more
# Midpoints of neighbours, as shares of the largest value.
E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / E2M1_MAX
E4M3_VALUES = decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
E4M3_TIES = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2 / E4M3_MAX
TURNS = np.array([1.5, 1.75, 2.0])  # mantissas at which rules floor, even and ceil go up
REACH = 2  # units in the last place around every tie


def hard_values(dtype: str, fmt: Format, group_amax: float) -> NDArray[np.generic]:
    """Return (rows, COLUMNS) finite values beside the ties of a format.

    The largest values of blocks are beside every turn of the block scale, the others beside
    midpoints of E2M1 and of E4M3; some blocks hold subnormals, some zeros of both signs.
    """
    rng, kind = np.random.default_rng(3), FLOAT_DTYPES[dtype]
    unsigned = np.dtype(f"u{kind.itemsize}")
    last = int(np.array(np.inf, np.float32).astype(kind).view(unsigned)) - 1  # the largest finite
    if fmt.has_global_scale:
        steps = E4M3_VALUES * group_amax / GLOBAL_RANGE
        turns = (steps[1:] + steps[:-1]) / 2
    else:
        steps = np.exp2(np.arange(E8M0_STORED_MAX + 1) - 127.0)
        turns = np.outer(steps, TURNS).ravel() / E2M1_MAX
    tops = E2M1_MAX * np.concatenate([np.tile(steps, 4), np.tile(turns, 2 * REACH + 1)])
    shape = (tops.size, fmt.block_size)
    shares = rng.choice(E2M1_TIES, shape)
    shares[::3] = rng.choice(E4M3_TIES, shares[::3].shape)
    shares[:, 0] = 1
    largest = float(np.array(last, unsigned).view(kind))
    values = np.minimum(shares * tops[:, None], largest).astype(np.float32).astype(kind)
    ulps = rng.integers(-REACH, REACH + 1, shape)
    ulps[: 4 * steps.size, 0] = 0  # exact block scales
    stored = np.clip(values.view(unsigned).astype(np.int64) + ulps, 0, last)
    stored[5::11] = rng.integers(0, 90, stored[5::11].shape)  # subnormals
    stored[7::11] = 0
    stored[9::11] = rng.integers(0, last + 1, stored[9::11].shape)
    stored |= rng.integers(0, 2, shape) << 8 * kind.itemsize - 1
    return np.resize(stored, (-(-stored.size // COLUMNS), COLUMNS)).astype(unsigned).view(kind)
