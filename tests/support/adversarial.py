"""Inputs made to break quantizers, and the comparison that reports where they did.

Decides which values a kernel meets.  Every maker returns finite values in the dtype's own NumPy
type, (rows, columns), from a
fixed seed; what is right about them is codec.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics import codec
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import Format
from fp4convert.numerics.matrices import Matrix, Quantized

Values = NDArray[np.generic]
Float32s = NDArray[np.float32]
DTYPES = tuple(FLOAT_DTYPES)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
LARGEST = {
    "BF16": float.fromhex("0x1.fep127"),
    "F16": 65504.0,
    "F32": float.fromhex("0x1.fffffep127"),
}
MANTISSA_BITS = {"BF16": 7, "F16": 10, "F32": 23}
EXPONENTS = {
    "BF16": (-133, 127),
    "F16": (-24, 15),
    "F32": (-149, 127),
}  # from the smallest subnormal to the largest


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def matrix(values: Values, dtype: str) -> Matrix:
    """The same bytes as the package's own value."""
    rows, columns = values.shape
    return Matrix(
        np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, dtype, (rows, columns)
    )


def rounded(values: NDArray[np.float64] | Float32s, dtype: str) -> Values:
    """`values` in `dtype`, by way of its largest finite value where they are beyond it."""
    return (
        np.clip(values, -LARGEST[dtype], LARGEST[dtype])
        .astype(np.float32)
        .astype(FLOAT_DTYPES[dtype])
    )


def bits(values: Values) -> NDArray[np.int64]:
    """The magnitude bits; they order as the magnitudes do."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    return values.view(unsigned).astype(np.int64) & (2 ** (8 * values.dtype.itemsize - 1) - 1)


def from_bits(magnitudes: NDArray[np.int64], dtype: str, negative: NDArray[np.bool_]) -> Values:
    kind = FLOAT_DTYPES[dtype]
    raw = magnitudes | (negative.astype(np.int64) << (8 * kind.itemsize - 1))
    return raw.astype(np.dtype(f"u{kind.itemsize}")).view(kind)


def every_finite(dtype: str) -> Values:
    """All finite values of a 16-bit dtype, both signs, in the order of their magnitudes."""
    magnitudes = np.arange(int(bits(np.array([LARGEST[dtype]]).astype(FLOAT_DTYPES[dtype]))[0]) + 1)
    return from_bits(np.repeat(magnitudes, 2), dtype, np.arange(2 * len(magnitudes)) % 2 == 1)


def gaussian(dtype: str, rows: int, columns: int) -> Values:
    return rounded(generator(1).normal(0, 0.02, (rows, columns)), dtype)


def random_bits(dtype: str, rows: int, columns: int) -> Values:
    """Any finite bit pattern, with as many exponents as the dtype has."""
    rng = generator(2)
    largest = int(bits(np.array([LARGEST[dtype]]).astype(FLOAT_DTYPES[dtype]))[0])
    return from_bits(
        rng.integers(0, largest + 1, (rows, columns)), dtype, rng.random((rows, columns)) < 0.5
    )


def wide_range(dtype: str, rows: int, columns: int) -> Values:
    """Every run of 16 has an exponent of its own: tiny blocks beside huge ones, and everything
    between.
    """
    rng = generator(3)
    low, high = EXPONENTS[dtype]
    exponents = rng.integers(low, high + 1, (rows, columns // 16, 1))
    return rounded(
        np.ldexp(rng.normal(size=(rows, columns // 16, 16)), exponents).reshape(rows, columns),
        dtype,
    )


def subnormals(dtype: str, rows: int, columns: int) -> Values:
    """Subnormal values, some zeros of both signs, some zero blocks."""
    rng = generator(4)
    magnitudes = rng.integers(0, 2 << MANTISSA_BITS[dtype], (rows, columns))
    magnitudes[rng.random((rows, columns)) < 0.1] = 0
    magnitudes.reshape(-1, 32)[::5] = 0
    return from_bits(magnitudes, dtype, rng.random((rows, columns)) < 0.5)


def extremes(dtype: str, rows: int, columns: int) -> Values:
    """The largest and the smallest values the dtype has, zeros of both signs, ones, mixed; some
    blocks are all zero.
    """
    rng = generator(5)
    largest = LARGEST[dtype]
    kinds = np.array(
        [
            0.0,
            -0.0,
            2.0 ** EXPONENTS[dtype][0],
            1.0,
            -1.0,
            largest,
            -largest,
            largest / 2,
            -largest / 3,
        ]
    )
    chosen = rng.integers(0, len(kinds), (rows, columns))
    chosen.reshape(-1, 32)[::7] %= 3  # blocks without a large value
    chosen.reshape(-1, 16)[::9] %= 2  # blocks of zeros
    return rounded(kinds[chosen], dtype)


def scattered_importance(columns: int) -> Float32s:
    """Second moments: alike, one far above the rest, over many decades, zeros among them; a run of
    32 is of one sort.
    """
    rng = generator(9, columns)
    runs = -(-columns // 32)
    spread = rng.choice([0.0, 1.0, 5.0, 20.0], (runs, 1))
    found = np.exp(rng.normal(size=(runs, 32)) * spread)
    found[rng.random((runs, 32)) < rng.choice([0.0, 0.3, 1.0], (runs, 1), p=[0.6, 0.3, 0.1])] = 0
    return np.clip(found, 0, 1e38).astype(np.float32).ravel()[:columns]


def importance_for(rule: str, columns: int) -> Float32s | None:
    """What a rule has to be given."""
    return scattered_importance(columns) if rule == "importance" else None


PLAIN = {make.__name__: make for make in (gaussian, random_bits, wide_range, subnormals, extremes)}


def around_midpoints(
    block_amax: Values, dtype: str, fmt: Format, rule: str, group_amax: float, reach: int = 2
) -> Values:
    """One row of blocks with these magnitudes first, and beside each values within `reach` ulps of
    a midpoint times its step.
    """
    rng = generator(6, len(block_amax))
    blocks = np.zeros((len(block_amax), fmt.block_size), FLOAT_DTYPES[dtype])
    blocks[:, 0] = block_amax
    lone = codec.quantize(blocks.astype(np.float32), fmt, rule, group_amax)
    beside = (len(block_amax), fmt.block_size - 1)
    exact = rng.choice(MIDPOINTS, beside) * codec.block_steps(lone).astype(np.float64)[:, None]
    magnitudes = bits(rounded(exact, dtype)) + rng.integers(-reach, reach + 1, beside)
    blocks[:, 1:] = from_bits(
        np.clip(magnitudes, 0, bits(block_amax)[:, None]), dtype, rng.random(beside) < 0.5
    )
    return blocks.reshape(1, -1)


def group_amaxes(dtype: str) -> Iterator[float]:
    """Amaxes of scale groups, over the whole range of the dtype, then every eight-bit mantissa.

    With a global scale of 2^k midpoints are exact ties; with a full mantissa none is; with eight
    bits, as the amax of bf16
    weights has, some are ties until the global scale is rounded.
    """
    rng = generator(7)
    low, high = EXPONENTS[dtype]
    for exponent in np.linspace(low, high, 24):
        yield float(np.float32(min(np.ldexp(2688.0, int(exponent) - 12), LARGEST["F32"])))
        yield float(np.float32(min(np.exp2(exponent) * (1 + rng.random()), LARGEST["F32"])))
    for mantissa in range(128, 256):
        yield mantissa * 2.0**-6


def block_amaxes(dtype: str, group_amax: float, count: int) -> Values:
    """Magnitudes from the group's own down to where block scales underflow; half of them make an
    exact block scale.
    """
    rng = generator(8)
    exact = codec.decode_e4m3(rng.integers(1, 127, count).astype(np.uint8)) * (group_amax / 448)
    any_one = group_amax * np.exp2(rng.uniform(-22, 0, count))
    return rounded(np.where(rng.random(count) < 0.5, exact, any_one), dtype)


def binade_ends(dtype: str) -> Iterator[int]:
    """Magnitude bits of the largest block amax that gets each scale, by any rule: 1.5, below 1.75,
    below 2.
    """
    full = 1 << MANTISSA_BITS[dtype]
    for exponent in range(255 if dtype == "BF16" else 31):
        yield from (
            exponent * full + mantissa for mantissa in (full // 2, full * 3 // 4 - 1, full - 1)
        )


def hair_breadths(exponent: int) -> Iterator[tuple[float, float]]:
    """Pairs of a bf16 value x and a group amax whose global scale g puts x within 4 units of its
    last place of a midpoint * g.

    With midpoint = b / d and x = X * 2^k / d, g = (X * 2^k - r) / b for small r: 2^23 .. 2^24,
    times 2^exponent.
    """
    around = np.array([1 - 2**-24, 1, 1 + 2**-23], np.float32)
    for b, d in (float(midpoint).as_integer_ratio() for midpoint in MIDPOINTS):
        for numerator, r in (
            (x << k, r) for x in range(128, 256) for k in range(16, 20) for r in range(-4, 5)
        ):
            quotient, rest = divmod(numerator - r, b)
            if rest or not 2**23 <= quotient < 2**24:
                continue
            global_scale = np.ldexp(float(quotient), exponent)
            for group_amax in (np.float32(2688 * global_scale) * around).tolist():
                if codec.global_scale_of(group_amax) == global_scale:  # two thirds are within reach
                    yield float(np.ldexp(numerator / d, exponent)), group_amax
                    break


def assert_same_bytes(found: Quantized, expected: Quantized, values: Values, where: str) -> None:
    """Both hold the same scales and codes; otherwise says which block or element differs first, and
    how.
    """
    assert (found.format, found.shape, found.kind) == (
        expected.format,
        expected.shape,
        expected.kind,
    ), where
    assert found.global_scale == expected.global_scale, (
        f"{where}: global scale {found.global_scale} != {expected.global_scale}"
    )
    rows, columns = expected.shape
    size = expected.format.block_size
    for part, width, per_item in (
        ("block_scales", columns // size, size),
        ("packed", columns // 2, 2),
    ):
        ours, theirs = (np.frombuffer(getattr(q, part), np.uint8) for q in (found, expected))
        assert ours.size == theirs.size, (
            f"{where}: {part} has {ours.size} bytes, expected {theirs.size}"
        )
        if np.array_equal(ours, theirs):
            continue
        first = int(np.flatnonzero(ours != theirs)[0])
        row, column = first // width, first % width * per_item
        source = [
            float(value).hex()
            for value in values.reshape(rows, columns)[row, column : column + per_item]
        ]
        verdict = (
            f"{part} differs first at row {row}, column {column}: {ours[first]:#04x}, "
            f"expected {theirs[first]:#04x}"
        )
        raise AssertionError(f"{where}: {verdict}, of {source}")


def assert_same_values(found: Values, expected: Values, where: str) -> None:
    """Both hold the same bytes, or NaN in the same places; otherwise says which element differs
    first, and how.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
    both_nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    unsigned = np.dtype(f"u{found.dtype.itemsize}")
    differ = (found.view(unsigned) != expected.view(unsigned)) & ~both_nan
    if differ.any():
        row, column = (int(i) for i in np.argwhere(differ)[0])
        pair = f"{float(found[row, column])!r}, expected {float(expected[row, column])!r}"
        raise AssertionError(
            f"{where}: {int(differ.sum())} values differ, first at row {row}, column {column}: "
            f"{pair}"
        )
