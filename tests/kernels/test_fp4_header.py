"""fp4.h, compiled by itself: every scalar conversion against ml_dtypes, over all codes and over
awkward floats.
"""

import ctypes
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from paths import ROOT

from fp4convert.numerics import codec, error_sums

KERNELS = ROOT / "kernels"
PROGRAM = """
#include "fp4.h"
#define EACH(name, from, to, call) \\
    void name(const from *x, to *y, long long n) \\
    { for (long long i = 0; i < n; i++) y[i] = call(x[i]); }
EACH(decode_e2m1, unsigned, float, e2m1_decode)
EACH(decode_e4m3, unsigned, float, e4m3_decode)
EACH(decode_e8m0, unsigned, float, e8m0_decode)
EACH(encode_e2m1, float, unsigned, e2m1_encode)
EACH(encode_e4m3, float, unsigned, e4m3_encode)
EACH(encode_e4m3_signed, float, unsigned, e4m3_encode_signed)
EACH(from_bf16, unsigned short, float, fp4_from_bf16)
EACH(from_fp16, unsigned short, float, fp4_from_fp16)
EACH(to_bf16, float, unsigned short, fp4_to_bf16)
EACH(to_fp16, float, unsigned short, fp4_to_fp16)
double bounds[] = {
    LARGEST_CODE, CODES_PER_BINADE, ALL_CODES_BELOW, LOWEST_EXPONENT, TINY, TINY_WEIGHTED,
    LEAST_GLOBAL_SCALE};
double held[] = {SUM_GROUP, SUMS, FINE, COARSE, SMALLEST_STEP};
"""
ALL_16 = np.arange(1 << 16).astype(np.uint16)


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed, as for the package itself"
    folder = tmp_path_factory.mktemp("header")
    (folder / "probe.c").write_text(PROGRAM)
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{KERNELS}"]
    subprocess.run([compiler, *flags, folder / "probe.c", "-o", folder / "probe.so"], check=True)
    return ctypes.CDLL(str(folder / "probe.so"))


def call(header: ctypes.CDLL, name: str, x: np.ndarray, dtype: type) -> np.ndarray:
    y = np.zeros(x.size, dtype)
    header[name](
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size)
    )
    return y


def awkward_floats() -> np.ndarray:
    """Every upper half with lower halves at, and beside, the middle: all rounding cases of a 16-bit
    target.
    """
    lower = np.array(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    return ((ALL_16.astype(np.uint32) << 16)[:, None] | lower).ravel().view(np.float32)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, any NaN for a NaN."""
    both_nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    unsigned = np.dtype(f"u{found.itemsize}")
    wrong = np.flatnonzero((found.view(unsigned) != expected.view(unsigned)) & ~both_nan)
    assert not wrong.size, f"first at {wrong[0]}: {found[wrong[0]]} instead of {expected[wrong[0]]}"


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [
        ("decode_e2m1", 16, ml_dtypes.float4_e2m1fn),
        ("decode_e4m3", 256, ml_dtypes.float8_e4m3fn),
        ("decode_e8m0", 256, ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_code_is_decoded(header, name, count, kind):
    codes = np.arange(count)
    same(
        call(header, name, codes.astype(np.uint32), np.float32),
        codes.astype(np.uint8).view(kind).astype(np.float32),
    )


def test_e2m1_and_e4m3_are_encoded_half_to_even(header):
    floats = awkward_floats()
    finite = floats[np.isfinite(floats)]
    magnitude = (
        np.minimum(np.abs(finite), np.float32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 7
    )
    expected = np.where(finite < 0, magnitude | 8, magnitude)
    assert (call(header, "encode_e2m1", finite, np.uint32) == expected).all()
    scales = finite[(finite >= 0) & (finite <= 448)]
    expected = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) & 0x7F
    assert (call(header, "encode_e4m3", scales, np.uint32) == expected).all()
    anything = floats[~np.isnan(floats)]  # Inf too
    expected = (
        np.clip(anything, np.float32(-448), np.float32(448))
        .astype(ml_dtypes.float8_e4m3fn)
        .view(np.uint8)
    )
    assert (call(header, "encode_e4m3_signed", anything, np.uint32) == expected).all()


@pytest.mark.parametrize(
    ("name", "kind"), [("from_bf16", ml_dtypes.bfloat16), ("from_fp16", np.float16)]
)
def test_every_half_is_widened(header, name, kind):
    same(call(header, name, ALL_16, np.float32), ALL_16.view(kind).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "kind"), [("to_bf16", ml_dtypes.bfloat16), ("to_fp16", np.float16)]
)
def test_floats_are_narrowed_half_to_even(header, name, kind):
    floats = awkward_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        same(call(header, name, floats, np.uint16).view(kind), floats.astype(kind))


def test_bounds_of_the_search_are_the_codecs(header):
    ours = (
        codec.LARGEST_CODE,
        codec.CODES_PER_BINADE,
        codec.ALL_CODES_BELOW,
        codec.LOWEST_EXPONENT,
    )
    ours += (codec.TINY, codec.TINY_WEIGHTED, codec.LEAST_GLOBAL_SCALE)
    assert tuple((ctypes.c_double * len(ours)).in_dll(header, "bounds")) == ours


def test_sums_that_float32_holds_are_those_of_error_sums(header):
    ours = (error_sums.GROUP, len(error_sums.COLUMNS))
    ours += (error_sums.FINE, error_sums.COARSE, error_sums.SMALLEST_STEP)
    assert tuple((ctypes.c_double * len(ours)).in_dll(header, "held")) == ours


def test_under_the_bounds_of_the_search_nothing_is_subnormal():
    normal, values = (
        2.0**-126,
        codec.decode_e4m3(np.arange(codec.LARGEST_CODE + 1, dtype=np.uint8)).astype(np.float64),
    )
    assert (codec.TINY / values.max()) ** 2 >= normal
    assert codec.WEIGHT_MIN * (codec.TINY_WEIGHTED / values.max()) ** 2 >= normal
    assert values[1] * codec.LEAST_GLOBAL_SCALE >= normal
    low, high = np.split(values, [codec.ALL_CODES_BELOW])
    assert (low == values[1] * np.arange(len(low))).all()
    assert (
        high == 2 * values[codec.ALL_CODES_BELOW - codec.CODES_PER_BINADE : -codec.CODES_PER_BINADE]
    ).all()
    for lower, is_left_out in (
        (codec.LOWEST_EXPONENT, False),
        (codec.LOWEST_EXPONENT + 1, True),
    ):  # as _mxfp4_search says
        assert (47 * codec.WEIGHT_MIN * 2.0**lower > 62) == is_left_out
