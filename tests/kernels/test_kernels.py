"""Every kernel against codec.py, byte for byte: the C kernels on each level of this processor, the
CUDA kernels on the host.

Decides that kernels/ is right wherever codec.py is; test_codec.py decides the latter.  Needs a C++
compiler, and no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from adversarial import (
    EXPONENTS,
    LARGEST,
    MANTISSA_BITS,
    MIDPOINTS,
    PLAIN,
    Values,
    around_midpoints,
    assert_same_bytes,
    assert_same_values,
    binade_ends,
    bits,
    block_amaxes,
    every_finite,
    from_bits,
    gaussian,
    generator,
    group_amaxes,
    hair_breadths,
    importance_for,
    matrix,
    rounded,
)
from cpu_levels import EVERY_DTYPE, EVERY_RULE, Cpus, every_level
from ptx import SOURCE_OR_PTX, every_backend
from simt import SimtKernels

from fp4convert.numerics import codec
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import FP4_FORMATS, MXFP4, NVFP4, Format, Kind
from fp4convert.numerics.matrices import Quantized

SEARCHED = ("mse", "four-over-six", "importance")
UNWEIGHTED = [
    rule for rule in MXFP4.scale_rules if rule != "importance"
]  # which is many times the reference's work
Backends = dict[str, Cpu | SimtKernels]


@pytest.fixture(scope="module", params=SOURCE_OR_PTX)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return every_backend(tmp_path_factory.mktemp("kernels"), request.param)


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    return every_level(tmp_path_factory.mktemp("levels"))


def check(
    backends: Backends,
    values: Values,
    dtype: str,
    fmt: Format,
    rule: str,
    group_amax: float | None = None,
) -> Quantized:
    """What codec.quantize makes of `values`, after every backend made the same of them."""
    wide = values.astype(np.float32)
    amax = float(np.abs(wide).max(initial=0)) if group_amax is None else group_amax
    importance = importance_for(rule, values.shape[1])
    expected = codec.quantize(wide, fmt, rule, amax, importance)
    for name, backend in backends.items():
        found = backend.quantize(matrix(values, dtype), fmt, rule, amax, importance)
        assert_same_bytes(
            found, expected, values, f"{name}, {dtype}, {rule}, group amax {amax.hex()}"
        )
    return expected


# --------------------------------------------------------------------------------------------------
# quantize


@pytest.mark.sweep(16)
@EVERY_RULE
@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_quantize(backends: Backends, make, dtype: str, fmt: Format, rule: str) -> None:  # type: ignore[no-untyped-def]
    values = make(dtype, 37, 416)
    amax = float(np.abs(values.astype(np.float32)).max())
    check(backends, values, dtype, fmt, rule)
    others = list(group_amaxes(dtype))[:: 40 if rule in SEARCHED else 1]
    for group_amax in (
        (0.0, float(np.float32(min(amax * 7.3, LARGEST["F32"]))), *others) if fmt is NVFP4 else ()
    ):
        check(backends, values, dtype, fmt, rule, group_amax)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("fmt", "width"), [(NVFP4, 32), (NVFP4, 64), (MXFP4, 16), (MXFP4, 64)])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_blocks_that_no_engine_reads(cpus: Cpus, make, fmt: Format, width: int) -> None:  # type: ignore[no-untyped-def]
    """Of every rule, and under the amax of a larger matrix."""
    values, studied = make("F32", 37, 448), replace(fmt, block_size=width)
    amax = float(np.abs(values).max())
    for rule, group_amax in product(fmt.scale_rules, (amax, min(amax * 7.3, LARGEST["F32"]))):
        importance = importance_for(rule, 448)
        q = codec.quantize(values, studied, rule, group_amax, importance)
        for level, cpu in cpus.items():
            found = cpu.study(values, studied, rule, group_amax, importance)
            assert_same_values(found, codec.dequantize(q), f"level {level}, {rule}, {group_amax}")


@EVERY_DTYPE
def test_nvfp4_around_midpoints(backends: Backends, dtype: str) -> None:
    for group_amax in group_amaxes(dtype):
        values = around_midpoints(
            block_amaxes(dtype, group_amax, 1500), dtype, NVFP4, "amax", group_amax
        )
        check(backends, values, dtype, NVFP4, "amax", group_amax)


@pytest.mark.parametrize("rule", UNWEIGHTED)
@EVERY_DTYPE
def test_mxfp4_around_midpoints(backends: Backends, dtype: str, rule: str) -> None:
    amax = PLAIN["random_bits"](dtype, 1, 20000)[0]
    check(backends, around_midpoints(np.abs(amax), dtype, MXFP4, rule, 0.0), dtype, MXFP4, rule)


def reciprocal_differences(values: Values, q: Quantized) -> int:
    """How many codes x * (1 / step) would get wrong."""
    blocks = values.astype(np.float32).reshape(-1, q.format.block_size)
    wrong = codec.encode_e2m1(blocks * (np.float32(1) / codec.block_steps(q))[:, None])
    return int(
        (wrong.reshape(1, -1) != codec.unpack(np.frombuffer(q.packed, np.uint8)[None])).sum()
    )


@pytest.mark.sweep(8)
@pytest.mark.parametrize("exponent", [-43, -122, -125, -133, -148, -10, -6, 90])
def test_nvfp4_bf16_within_a_hair_of_a_midpoint(backends: Backends, exponent: int) -> None:
    """Where fl(x / step) reaches a midpoint that x / step does not, or misses it by one float32
    step; the block scale is 1.
    """
    for x, group_amax in hair_breadths(exponent):
        values = np.zeros((4, 16), FLOAT_DTYPES["BF16"])  # four blocks fill the widest vectors
        near = bits(rounded(np.array([x]), "BF16")) + np.arange(-1, 2)
        values[:, 1:4] = from_bits(near, "BF16", np.array([False, True, False]))
        values[:, 0] = rounded(np.array([group_amax / 448]), "BF16")
        check(backends, values, "BF16", NVFP4, "amax", group_amax)


def nearly_doubtful(dtype: str, count: int) -> Iterator[np.float32]:
    """Global scales that put a midpoint times a step within 9 units of float32 of a value of
    `dtype`, where reciprocals err.
    """
    rng = generator(12)
    spare = 23 - MANTISSA_BITS[dtype]
    values = rng.integers(1 << 23 - spare, 1 << 24 - spare, count) << spare
    products = (values + rng.integers(-9, 10, count)) * 2.0**-24
    mantissas, midpoints = rng.integers(8, 16, count), rng.integers(4, 8, count)
    return iter((products / (mantissas * midpoints)).astype(np.float32))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_nvfp4_beside_doubtful_global_scales(backends: Backends, dtype: str) -> None:
    """Under every mantissa of a block scale, both neighbours of every midpoint."""
    scales = np.arange(8, 16) / 8
    for global_scale in nearly_doubtful(dtype, 1500):
        group_amax = float(np.float32(2688) * global_scale)
        steps = (scales * codec.global_scale_of(group_amax)).astype(np.float32).astype(np.float64)
        exact = steps[:, None] * MIDPOINTS
        nearest = rounded(exact, dtype)
        other = bits(nearest) + np.where(nearest.astype(np.float64) < exact, 1, -1)
        blocks = np.zeros((8, 16), FLOAT_DTYPES[dtype])
        blocks[:, 0] = rounded(steps * 6, dtype)
        blocks[:, 1:8] = nearest
        blocks[:, 8:15] = from_bits(other, dtype, generator(13).random(other.shape) < 0.5)
        check(backends, blocks.reshape(1, -1), dtype, NVFP4, "amax", group_amax)


def hardest_quotients(exponent: int) -> Iterator[tuple[float, float]]:
    """Pairs of float32 x and step whose quotient is next to where rounding to a midpoint begins.

    That place is N / 2^k with N odd, and N * step + r = x * 2^j, so that step = -r / N modulo 2^j,
    for small r.  Then step, which
    is 2^23 .. 2^24, is multiplied by 2^exponent, and x as it must be.
    """
    for midpoint in MIDPOINTS.tolist():
        mantissa = int(np.frexp(midpoint)[0] * 2**24)
        k = 26 - int(np.frexp(midpoint)[1])
        below = mantissa * 4 - (1 if mantissa == 1 << 23 else 2)  # units halve below a power of two
        for boundary in (mantissa * 4 + 2, below):
            n, halvings = (boundary, 0) if boundary % 2 else (boundary // 2, 1)
            for r, j in ((r, j) for r in range(-24, 25) for j in (23, 24, 25, 26)):
                step = -r * pow(n, -1, 1 << j) % (1 << j)
                x = (n * step + r) >> j
                if r and 2**23 <= step < 2**24 and 2**23 <= x < 2**24:
                    yield (
                        float(np.ldexp(float(x), j - k + halvings + exponent)),
                        float(np.ldexp(float(step), exponent)),
                    )


@pytest.mark.parametrize("exponent", range(-126, -88, 3))
def test_nvfp4_f32_with_the_smallest_steps(backends: Backends, exponent: int) -> None:
    """Where the residuals of quotients leave the normal range: subnormal block scales, global
    scales just below powers of two.
    """
    for k in range(1, 40, 3):
        group_amax = float(np.float32(2688 * (2 - k * 2.0**-23) * 2.0**exponent))
        global_scale = codec.global_scale_of(group_amax)
        blocks = np.zeros((64, 16), np.float32)
        scales = np.repeat(2.0 ** np.arange(-9, -1), 8).astype(np.float32)
        blocks[:, 0] = 6 * scales * global_scale
        exact = (
            np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])[None, :, None]
            * (scales * global_scale)[:, None, None]
        )
        nearest = exact.astype(np.float32)
        blocks[:, 1:15] = np.concatenate(
            [np.nextafter(nearest, np.float32(9)), np.nextafter(nearest, np.float32(0))], 2
        ).reshape(64, 14)
        check(backends, blocks.reshape(1, -1), "F32", NVFP4, "amax", group_amax)


@pytest.mark.parametrize("exponent", [-100, -60, -30])
def test_nvfp4_f32_by_the_hardest_quotients(backends: Backends, exponent: int) -> None:
    """fl(x / step) is a midpoint, or the float32 beside it, by 2^-22 of a unit; the block scale is
    1.
    """
    count = 0
    for x, step in hardest_quotients(exponent):
        group_amax = float(np.float32(2688 * step))
        if codec.global_scale_of(group_amax) != step:
            continue
        values = np.zeros((1, 16), np.float32)
        values[0, :3] = 6 * step, x, -x
        check(backends, values, "F32", NVFP4, "amax", group_amax)
        count += 1
    assert count > 100


@EVERY_DTYPE
def test_nvfp4_where_quotients_are_7(backends: Backends, dtype: str) -> None:
    """Where an amax was given that the data exceed; 7 is a tie between codes that the format has
    and has not.
    """
    for group_amax in group_amaxes(dtype):
        step = 448 * np.float64(codec.global_scale_of(group_amax))
        magnitudes = np.maximum(bits(rounded(np.array([7 * step]), dtype)) + np.arange(-3, 4), 0)
        if 7.5 * step < LARGEST[dtype]:
            blocks = np.zeros((7, 16), FLOAT_DTYPES[dtype])
            blocks[:, 3:5] = from_bits(
                np.stack([magnitudes, magnitudes], axis=1), dtype, np.array([False, True])
            )
            check(backends, blocks.reshape(1, -1), dtype, NVFP4, "amax", group_amax)


@pytest.mark.sweep(4)
@EVERY_DTYPE
@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_the_smallest_values_under_every_step(backends: Backends, dtype: str, fmt: Format) -> None:
    """Where x / step underflows, a sign is lost; steps are powers of two, or just beside them."""
    low, high = EXPONENTS[dtype]
    amax = rounded(
        6 * np.exp2(np.arange(low, high - 1.0))[:, None] * [1, 1 - 2**-7, 1 + 2**-7], dtype
    ).ravel()
    blocks = np.zeros((amax.size, 32), FLOAT_DTYPES[dtype])
    blocks[:, :31] = from_bits(np.arange(31) // 2, dtype, np.arange(31) % 2 == 1)
    blocks[:, 31] = blocks[:, 15] = amax
    if fmt is MXFP4:
        for rule in UNWEIGHTED:
            check(backends, blocks.reshape(1, -1), dtype, fmt, rule)
        return
    for block in blocks:
        for factor in (1.0, 448.0, 2.0**9):
            group_amax = float(np.float32(min(float(np.abs(block[31])) * factor, LARGEST["F32"])))
            check(backends, block[None], dtype, fmt, "amax", group_amax)


@pytest.mark.parametrize(("dtype", "most_on_plain"), [("BF16", 100), ("F16", 0), ("F32", 0)])
def test_the_midpoints_tell_a_reciprocal_from_a_division_and_plain_data_hardly(
    dtype: str, most_on_plain: int
) -> None:
    """bf16 weights meet ties by themselves, because the amax has eight bits too:
    51 of these 65536.
    """
    hard = around_midpoints(block_amaxes(dtype, 2688.0, 1500), dtype, NVFP4, "amax", 2688.0)
    plain = gaussian(dtype, 64, 1024)
    counts = [
        reciprocal_differences(values, codec.quantize(values.astype(np.float32), NVFP4, *rest))
        for values, *rest in ((hard, "amax", 2688.0), (plain, "amax"))
    ]
    assert counts[0] > 100
    assert counts[1] <= most_on_plain


# --------------------------------------------------------------------------------------------------
# exhaustive

SCALES = [0x01, 0x02, 0x07, 0x08, 0x0F, 0x10, 0x2B, 0x38, 0x39, 0x3F, 0x50, 0x66, 0x77, 0x7D, 0x7E]
# Global scales; the bf16 kernel takes another path where block_scale * global_scale is outside
# 2^-100 .. 2^16.
_BF16 = (-126, -125.3, -117.2, -109, -100.9, -91, -60.4, -24, 0, 0.1, 7.19, 9.7, 16, 60.2)
_F16 = (-126, -60.1, -33, -21.7, -16, -15.6, -14.8, -13, -12.1, -10.7, -9, -7.9, -6.3, -4, -3.3)
GLOBALS = {"BF16": (*_BF16, 115.9, 116.6), "F16": (*_F16, -1.2, 0, 1.4, 3, 4.6, 7.2)}


@pytest.mark.parametrize("dtype", GLOBALS)
def test_every_16_bit_value_nvfp4(backends: Backends, dtype: str) -> None:
    """Every value beside a block amax for each scale; a value above that amax sets its block's
    scale itself.
    """
    every = every_finite(dtype)
    others = np.append(every, every[: -len(every) % 15]).reshape(1, -1, 15)
    reached = set()
    for exponent in GLOBALS[dtype]:
        global_scale = np.float64(np.exp2(exponent))
        group_amax = float(np.float32(min(2688 * global_scale, LARGEST["F32"])))
        amax = rounded(6 * global_scale * codec.decode_e4m3(np.array(SCALES, np.uint8)), dtype)
        blocks = np.empty((len(SCALES), others.shape[1], 16), FLOAT_DTYPES[dtype])
        blocks[:, :, 0] = amax[:, None]
        blocks[:, :, 1:] = others
        q = check(backends, blocks.reshape(len(SCALES), -1), dtype, NVFP4, "amax", group_amax)
        reached |= {(scale, exponent) for scale in bytes(q.block_scales)[:: others.shape[1]]}
    assert len(reached) >= 200


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rule", UNWEIGHTED[:3])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_mxfp4(backends: Backends, dtype: str, rule: str) -> None:
    """Under every scale, every value that fits it."""
    every = every_finite(dtype)
    for amax in binade_ends(dtype):
        others = every[: 2 * amax + 2]
        others = np.append(others, np.zeros(-len(others) % 31, every.dtype)).reshape(-1, 31)
        blocks = np.insert(others, 17, every[2 * amax + 1], axis=1)
        check(backends, blocks.reshape(1, -1), dtype, MXFP4, rule)


@EVERY_DTYPE
def test_every_block_scale_of_mxfp4(backends: Backends, dtype: str) -> None:
    """Lone values: all of a 16-bit dtype; of fp32 every exponent with the mantissas about each
    threshold.
    """
    if dtype == "F32":
        mantissas = np.arange(0, 0x800000, 0x200000)[:, None] + np.arange(-2, 3)
        magnitudes = (np.arange(255)[:, None, None] * 0x800000 + mantissas).ravel()
        amax = from_bits(
            np.clip(magnitudes, 0, 0x7F7FFFFF), dtype, generator(9).random(magnitudes.size) < 0.5
        )
    else:
        amax = every_finite(dtype)
    blocks = np.zeros((len(amax), 32), amax.dtype)
    blocks[np.arange(len(amax)), np.arange(len(amax)) % 32] = amax
    for rule in UNWEIGHTED:
        check(backends, blocks, dtype, MXFP4, rule)


@EVERY_DTYPE
def test_block_scales_of_nvfp4_around_their_midpoints(backends: Backends, dtype: str) -> None:
    scales = codec.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    scales = np.concatenate([scales, (scales[:-1] + scales[1:]) / 2, scales * 2.0**-12])
    for group_amax in group_amaxes(dtype):
        magnitudes = bits(rounded(scales * (group_amax / 448), dtype))[:, None] + np.arange(-3, 4)
        largest = int(bits(rounded(np.array([np.inf]), dtype))[0])
        blocks = np.zeros((magnitudes.size, 16), FLOAT_DTYPES[dtype])
        blocks[:, 9] = from_bits(
            np.clip(magnitudes.ravel(), 0, largest), dtype, np.arange(magnitudes.size) % 2 == 1
        )
        check(backends, blocks.reshape(1, -1), dtype, NVFP4, "amax", group_amax)


# --------------------------------------------------------------------------------------------------
# dequantize

# Ties of bf16 and fp16, results that are subnormal in each dtype, overflow to Inf, zero.
STORED = (1.0, 0.3, 1 / 2688, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 5e-6)
STORED += (2.0**-15, 2.0**-17, 0.9 * 2.0**-18, 1.7e-38, 2.0**-126, 2.0**-130, 2.0**-149)
STORED += (1e30, 1.26e35, LARGEST["F32"], 0.0)


def every_block(fmt: Format, global_scale: float | None, kind: Kind) -> Quantized:
    """Every code under every scale byte, and the codes in another order."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (512, fmt.block_size // 16))
    codes[256:] = generator(10).permuted(codes[256:], axis=1)
    scales = np.tile(np.arange(256, dtype=np.uint8), 2)
    stored = None if global_scale is None else float(np.float32(global_scale))
    return Quantized(
        fmt, (512, fmt.block_size), codec.pack(codes).ravel().data, scales.data, stored, kind
    )


def without_overflow(q: Quantized, dtype: str) -> Quantized:
    """The blocks that a type can hold, a row each; float32 holds what it holds."""
    if dtype == "F32":
        return q
    fits = ~(np.abs(codec.block_steps(q)) > LARGEST[dtype] / 6)
    packed = np.frombuffer(q.packed, np.uint8).reshape(len(fits), -1)[fits]
    scales = np.frombuffer(q.block_scales, np.uint8)[fits]
    shape = len(scales), q.format.block_size
    return replace(q, shape=shape, packed=packed.ravel().data, block_scales=scales.data)


def check_dequantize(backends: Backends, q: Quantized, dtype: str) -> None:
    """Of all of it by CUDA kernels; the CPU refuses what overflows."""
    for name, backend in backends.items():
        part = without_overflow(q, dtype) if isinstance(backend, Cpu) else q
        with np.errstate(all="ignore"):
            expected = codec.dequantize(part).astype(FLOAT_DTYPES[dtype])
        found = np.frombuffer(backend.dequantize(part, dtype), FLOAT_DTYPES[dtype]).reshape(
            part.shape
        )
        assert_same_values(
            found, expected, f"{name}, {dtype}, {q.format.name}, {q.kind} {q.global_scale}"
        )


@EVERY_DTYPE
@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
def test_dequantize_nvfp4(backends: Backends, kind: Kind, dtype: str) -> None:
    for global_scale in STORED:
        check_dequantize(backends, every_block(NVFP4, global_scale, kind), dtype)


@EVERY_DTYPE
def test_dequantize_mxfp4(backends: Backends, dtype: str) -> None:
    check_dequantize(backends, every_block(MXFP4, None, "multiplier"), dtype)


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@EVERY_DTYPE
def test_dequantize_any_number_of_blocks(backends: Backends, dtype: str, fmt: Format) -> None:
    rng = generator(11)
    tails = [255, 257, 258, 509, 511, 513, 514, 1024, 1538, 2559]  # of launch blocks of 8192
    for blocks in [*range(1, 71), 129, *tails]:
        n, stored = blocks * fmt.block_size, 0.7 if fmt is NVFP4 else None
        packed = memoryview(rng.bytes(n // 2))
        scales = rng.integers(0x30, 0x40, blocks).astype(np.uint8)
        q = Quantized(fmt, (1, n), packed, scales.data, stored)
        check_dequantize(backends, q, dtype)
