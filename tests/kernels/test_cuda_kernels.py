"""What the CUDA kernels alone promise, run on the host by simt.py: launch blocks, their tails, and
an amax that accumulates.

test_kernels.py holds their bytes to codec.py's. Every launch here and there has poisoned margins
beside each of its buffers: SimtKernels asserts that they stay as they were.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from adversarial import (
    LARGEST,
    PLAIN,
    assert_same_bytes,
    gaussian,
    generator,
    importance_for,
    matrix,
    rounded,
    wide_range,
)
from cpu_levels import EVERY_DTYPE, EVERY_RULE
from ptx import BUILDS
from simt import KERNELS, MARGIN, POISON, SimtKernels, aligned, guarded, is_intact, survives, walled

from fp4convert.numerics import codec
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import FLOAT_TYPES, FP4_FORMATS, MXFP4, NVFP4, Format, rule_number

# One unit, two; one warp's and a block's first row of units and their neighbours; a whole block;
# several and a tail.
LENGTHS = (16, 32, 48, 496, 512, 528, 4080, 4096, 4112, 4128, 8160, 8176, 8192, 8208, 8224)
LENGTHS += (16384, 3 * 8192 + 32, 5 * 8192 - 16)


@pytest.fixture(scope="module", params=BUILDS)
def simt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimtKernels:
    build, has_cvt = request.param
    return SimtKernels(tmp_path_factory.mktemp("simt"), KERNELS, has_cvt, build)


def test_the_margins_tell() -> None:
    for place in (-1, 100, -MARGIN, 100 + MARGIN - 1):
        buffer = guarded(100)
        assert is_intact(buffer)
        assert buffer.ctypes.data % 16 == 0
        whole = buffer.base
        assert isinstance(whole, np.ndarray)
        whole[buffer.ctypes.data - whole.ctypes.data + place] = POISON - 1
        assert not is_intact(buffer)


@pytest.fixture(scope="module", params=BUILDS)
def fast_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SimtKernels:
    """The kernels with an exact way that gives nothing but code 15, so that a block which takes it
    is seen.
    """
    kernels = Path(shutil.copytree(KERNELS, tmp_path_factory.mktemp("fast") / "kernels"))
    text, count = re.subn(
        r"codes \|= format\.exact\([^;]*;", "codes = ~0u;", (kernels / "codes.cuh").read_text()
    )
    assert count == 1
    (kernels / "codes.cuh").write_text(text)
    build, has_cvt = request.param
    return SimtKernels(tmp_path_factory.mktemp("simt"), kernels, has_cvt, build)


@pytest.mark.sweep(60)
@EVERY_RULE
@EVERY_DTYPE
def test_weights_take_the_fast_way(
    fast_alone: SimtKernels, dtype: str, fmt: Format, rule: str
) -> None:
    """Under the amax that they have themselves, with every mantissa that it can have in 8 bits,
    down to weights of 1e-4.
    """
    importance = importance_for(rule, 512)
    for mantissa in range(128, 256, 1 if rule in ("amax", "floor", "even", "ceil") else 9):
        values = gaussian(dtype, 4, 512)
        values[0, 0] = mantissa * 2.0 ** -(9 + mantissa % 4)
        amax = float(np.abs(values.astype(np.float32)).max())
        expected = codec.quantize(values.astype(np.float32), fmt, rule, amax, importance)
        found = fast_alone.quantize(matrix(values, dtype), fmt, rule, amax, importance)
        assert_same_bytes(found, expected, values, f"{dtype}, {amax.hex()}")


def test_the_exact_way_is_seen_where_it_is_taken(fast_alone: SimtKernels) -> None:
    values = np.full((1, 32), 2.0**-120, np.float32)
    packed = fast_alone.quantize(matrix(values, "F32"), NVFP4, "amax", 2.0**-120).packed
    assert bytes(packed) == b"\xff" * 16


def lengths(fmt: Format) -> list[int]:
    return [n for n in LENGTHS if n % fmt.block_size == 0]


@pytest.mark.sweep(60)
@EVERY_RULE
@EVERY_DTYPE
def test_quantize_any_tail(simt: SimtKernels, dtype: str, fmt: Format, rule: str) -> None:
    source = rounded(wide_range(dtype, 1, max(LENGTHS)).astype(np.float32) * 2.0**-8, dtype)
    for n in lengths(fmt):
        values = source[:, :n]
        importance = importance_for(rule, n)
        expected = codec.quantize(values.astype(np.float32), fmt, rule, 1.0, importance)
        found = simt.quantize(matrix(values, dtype), fmt, rule, 1.0, importance)
        assert_same_bytes(found, expected, values, f"{dtype}, {rule}, n = {n}")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@EVERY_DTYPE
def test_nothing_is_read_behind_an_input(simt: SimtKernels, dtype: str, fmt: Format) -> None:
    kind = FLOAT_TYPES[dtype]
    one = aligned(np.ones(1, np.float32))
    packed, block_scales, y = (guarded(4 * max(LENGTHS)) for _ in range(3))
    for n in lengths(fmt):
        x, codes, scales = (walled(size) for size in (n * kind.nbytes, n // 2, n // fmt.block_size))
        forth, back = ((one,), (one, 0)) if fmt is NVFP4 else ((fmt.scale_rules.index("even"),), ())
        amax = (one,) if fmt is NVFP4 else ()
        weights = walled(4 * n)
        weights.view(np.float32)[:] = 1.0
        number = rule_number(fmt, "mse")
        calls = {
            f"amax_{kind.word}": (x, n, one),
            f"quantize_{fmt.name}_{kind.word}": (x, n, *forth, packed, block_scales),
            f"search_{fmt.name}_{kind.word}": (x, n, *amax, *number, packed, block_scales),
            f"weigh_{fmt.name}_{kind.word}": (x, n, *amax, weights, n, packed, block_scales),
            f"dequantize_{fmt.name}_{kind.word}": (codes, scales, n, *back, y),
        }
        for name, arguments in calls.items():
            assert survives(partial(simt.call, (name, arguments), n)), (
                f"{name}, n = {n}: read behind an input"
            )


# --------------------------------------------------------------------------------------------------
# amax


@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_amax_of_any_length_with_the_largest_anywhere(simt: SimtKernels, make, dtype: str) -> None:  # type: ignore[no-untyped-def]
    for n in LENGTHS:
        values = make(dtype, 1, -(-n // 32) * 32)[:, :n]
        assert simt.amax(matrix(values, dtype)) == float(np.abs(values.astype(np.float32)).max())


def places(n: int) -> list[int]:
    """The first 64 elements, then one of each unit of 16, at every place in one; and the last."""
    return [*range(64), *(unit * 16 + unit % 16 for unit in range(4, n // 16)), n - 1]


@EVERY_DTYPE
def test_amax_finds_one_value_anywhere(simt: SimtKernels, dtype: str) -> None:
    values = np.full((1, 8192 + 48), -0.0).astype(FLOAT_DTYPES[dtype])
    largest = LARGEST[dtype]
    for number, place in enumerate(places(values.size)):
        value = (largest, -largest, 0.75, -(2.0**-24))[number % 4]
        values[0, place] = value
        assert simt.amax(matrix(values, dtype)) == abs(value)
        values[0, place] = -0.0


@pytest.mark.sweep(3)
@EVERY_DTYPE
def test_amax_hides_nothing_that_is_not_finite(simt: SimtKernels, dtype: str) -> None:
    values = np.full((1, 8192 + 48), LARGEST[dtype]).astype(FLOAT_DTYPES[dtype])
    values[0, ::3] *= -1
    for place in places(values.size):
        before = values[0, place]
        for bad in (np.inf, -np.inf, np.nan, -np.nan):
            values[0, place] = bad
            found = simt.amax(matrix(values, dtype))
            assert np.isnan(found) if np.isnan(bad) else found == np.inf
        values[0, place] = before
    values[0, [5, 8200]] = np.inf, np.nan
    assert np.isnan(simt.amax(matrix(values, dtype)))


@EVERY_DTYPE
def test_amax_accumulates(simt: SimtKernels, dtype: str) -> None:
    """Over calls, from what the place holds; NaN stays, and zeros of either sign leave +0.0."""
    zeros = matrix(np.full((1, 8208), -0.0).astype(FLOAT_DTYPES[dtype]), dtype)
    ones = matrix(np.full((1, 64), -1.0).astype(FLOAT_DTYPES[dtype]), dtype)
    assert np.float32(simt.amax(zeros)).view(np.uint32) == 0
    assert simt.amax(ones, so_far=0.5) == 1.0
    assert simt.amax(ones, so_far=1.5) == 1.5
    assert simt.amax(zeros, so_far=2.0**-149) == 2.0**-149
    assert simt.amax(ones, so_far=np.inf) == np.inf
    assert np.isnan(simt.amax(ones, so_far=np.nan))


# --------------------------------------------------------------------------------------------------
# MXFP4


@pytest.mark.parametrize("rule", MXFP4.scale_rules)
@EVERY_DTYPE
def test_mxfp4_shares_an_amax_between_two_lanes_and_no_more(
    simt: SimtKernels, dtype: str, rule: str
) -> None:
    """Each block has one large value, in either half, of an exponent of its own."""
    rng = generator(21)
    n = 8192 + 96
    values = rng.normal(0, 2.0**-12, n).reshape(-1, 32)
    values[np.arange(len(values)), rng.integers(0, 32, len(values))] = (
        np.exp2(np.arange(len(values)) % 23 - 11.0) * 1.3
    )
    narrow = rounded(values.reshape(1, -1), dtype)
    importance = importance_for(rule, narrow.size)
    expected = codec.quantize(narrow.astype(np.float32), MXFP4, rule, None, importance)
    assert_same_bytes(
        simt.quantize(matrix(narrow, dtype), MXFP4, rule, 0.0, importance),
        expected,
        narrow,
        f"{dtype}, {rule}",
    )
