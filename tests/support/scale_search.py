"""The search for block scales, by trying every code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from adversarial import MIDPOINTS, Values, generator
from numpy.typing import NDArray

from fp4convert.numerics import codec
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import MXFP4, NVFP4, Format

f32 = np.float32


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)


E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)],
    f32,
)


def costs(
    blocks: Float32s, step: Float32s, factor: float, weights: Float32s | None = None
) -> Float32s:
    """t * factor of every block, in the order of addition that is promised."""
    q = np.abs(blocks) / step
    distance = np.abs(q - GRID[np.searchsorted(MIDPOINTS, q)])
    t = distance * distance if weights is None else weights * (distance * distance)
    if t.shape[1] == 32:
        t = t[:, :16] + t[:, 16:]
    eight = t[:, :8] + t[:, 8:]
    four = eight[:, :4] + eight[:, 4:]
    two = four[:, :2] + four[:, 2:]
    return (two[:, 0] + two[:, 1]) * f32(factor)


def best_of(
    tried: list[int], cost: Callable[[int], Float32s], first: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Of each block the code of least cost, then the nearest to its first, then the lowest."""
    with np.errstate(over="ignore", under="ignore"):
        found = np.stack([cost(code) for code in tried])
    codes = np.array(tried)[:, None]
    distance = np.where(found == found.min(axis=0), np.abs(codes - first), 10**6) * 1000 + codes
    return np.array(tried)[distance.argmin(axis=0)]


def every_code(
    blocks: Float32s, group_amax: float, weights: Float32s | None = None
) -> NDArray[np.int64]:
    """The best of all 126 codes of E4M3."""
    global_scale = f32(1) if group_amax == 0 else max(f32(group_amax) / f32(2688), f32(2.0**-126))
    amax_rule = codec.quantize(
        blocks, NVFP4, "amax", group_amax
    )  # test_codec.py decides that it is right
    first = np.frombuffer(amax_rule.block_scales, np.uint8).astype(np.int64)
    return best_of(
        list(range(1, 127)),
        lambda c: costs(blocks, E4M3[c] * global_scale, float(E4M3[c]) ** 2, weights),
        first,
    )


def searched(
    blocks: Float32s, fmt: Format, group_amax: float | None = None, rule: str = "mse"
) -> NDArray[np.int64]:
    return np.frombuffer(
        codec.quantize(blocks, fmt, rule, group_amax).block_scales, np.uint8
    ).astype(np.int64)


def assert_same_scales(
    found: NDArray[np.int64], expected: NDArray[np.int64], blocks: Values, where: str = ""
) -> None:
    wrong = np.flatnonzero(found != expected)
    assert not wrong.size, (
        f"{where}: {wrong.size} of {len(found)} blocks, first {wrong[0]}: {found[wrong[0]]}, "
        f"expected {expected[wrong[0]]}, "
        f"of {[float(value).hex() for value in blocks[wrong[0]]]}"
    )


def lattice(count: int, seed: int) -> Iterator[Float32s]:
    """Blocks whose values lie on the grid of a scale of their own, or beside it, with few, some or
    many elements that clip it.
    """
    rng = generator(seed)
    for noise in (0.0, 1e-7, 1e-3, 0.05, 0.3):
        scale = E4M3[rng.integers(1, 127, (count, 1))]
        values = rng.choice(GRID, (count, 16)) * scale * (1 + noise * rng.normal(size=(count, 16)))
        outliers = rng.random((count, 16)) < rng.choice([0.02, 0.1, 0.5], (count, 1))
        yield np.where(outliers, values * rng.uniform(1, 4, (count, 16)), values).astype(f32)


def every_exponent(
    blocks: Float32s, weights: Float32s | None = None, reach: int = 8
) -> NDArray[np.int64]:
    first = searched(blocks, MXFP4, rule="floor")

    def cost(offset: int) -> Float32s:
        codes = first + offset
        step = np.ldexp(f32(1), np.clip(codes, 0, 252) - 127)[:, None]
        found = costs(blocks, step, 4.0**offset, weights)
        return np.where((codes >= 0) & (codes <= 252), found, np.inf).astype(f32)

    return first + best_of(list(range(-reach, 5)), cost, np.zeros_like(first))


def normalised(importance: Float32s) -> Float32s:
    """By hand: over the power of two at or below the block's largest, at least 2^-40."""
    largest = importance.max(axis=-1, keepdims=True).astype(np.float64)
    power = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))))
    return np.where(largest > 0, np.maximum(importance / power, 2.0**-40), 1).astype(f32)
