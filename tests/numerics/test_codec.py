"""codec.py against values typed by hand and against bytes that other packages made
(golden/README.md).

Decides that the reference itself is right; test_kernels.py then holds every kernel to it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adversarial import importance_for
from golden_cases import CASES, EXCLUDED, golden

from fp4convert.errors import InputError, NumericError
from fp4convert.numerics import codec
from fp4convert.numerics.codec import Bytes, Float32s
from fp4convert.numerics.formats import MXFP4, NVFP4, Format, Kind
from fp4convert.numerics.matrices import Matrix, Quantized

f32 = np.float32
FLT_MAX = float.fromhex("0x1.fffffep127")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# midpoint -> the code of a tie, which is the neighbour with the even code
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def array(*values: float) -> Float32s:
    return np.array(values, f32)


def block(fmt: Format, *values: float) -> Float32s:
    """One row of one block: `values`, then zeros."""
    return np.array([[*values] + [0.0] * (fmt.block_size - len(values))], f32)


def codes(q: Quantized) -> list[int]:
    found: list[int] = codec.unpack(np.frombuffer(q.packed, np.uint8)[None])[0].tolist()
    return found


@pytest.mark.parametrize(
    ("dtype", "stored"), [("BF16", "803f00c0"), ("F16", "003c00c0"), ("F32", "0000803f000000c0")]
)
def test_stored_weights_as_floats(dtype: str, stored: str) -> None:
    assert codec.as_floats(Matrix(memoryview(bytes.fromhex(stored)), dtype, (2, 1))).tolist() == [
        [1],
        [-2],
    ]


def test_floats_as_stored_weights() -> None:
    x = codec.as_matrix(
        array(1, 0, -2, 0).reshape(2, 2)[:, :1]
    )  # whose bytes do not lie side by side
    assert (bytes(x.data).hex(), x.dtype, x.shape) == ("0000803f000000c0", "F32", (2, 1))


def scale_byte(fmt: Format, rule: str, *values: float, group_amax: float | None = None) -> int:
    return codec.quantize(block(fmt, *values), fmt, rule, group_amax).block_scales[0]


# -------------------------------------------------------------------------------------------------
# E2M1, E4M3, E8M0


def test_the_sixteen_e2m1_codes() -> None:
    every = np.arange(16, dtype=np.uint8)
    decoded = codec.decode_e2m1(every)
    assert decoded.tolist() == E2M1 + [-value for value in E2M1]
    assert np.signbit(decoded[8])
    # -0.0 is not below zero.
    assert codec.encode_e2m1(decoded).tolist() == [*range(8), 0, *range(9, 16)]


@pytest.mark.parametrize("midpoint", TIES)
def test_e2m1_ties_go_to_the_even_code_and_neighbours_to_the_nearer(midpoint: float) -> None:
    below = sum(value < midpoint for value in E2M1) - 1
    tie = f32(midpoint)
    q = np.array([np.nextafter(tie, f32(0)), tie, np.nextafter(tie, f32(9))], f32)
    assert codec.encode_e2m1(q).tolist() == [below, TIES[midpoint], below + 1]
    # -0.25 is below zero: code 8.
    assert codec.encode_e2m1(-q).tolist() == [below + 8, TIES[midpoint] + 8, below + 9]


def test_e2m1_zero_subnormals_and_saturation() -> None:
    smallest = 2.0**-149
    assert codec.encode_e2m1(array(0.0, -0.0, smallest, -smallest)).tolist() == [0, 0, 0, 8]
    assert codec.encode_e2m1(array(6.0, 7.0, 8.0, 1e30, FLT_MAX, np.inf)).tolist() == [7] * 6
    assert codec.encode_e2m1(array(-6.0, -7.5, -FLT_MAX, -np.inf)).tolist() == [15] * 4


def test_the_finite_e4m3_bytes() -> None:
    """OCP 8-bit floating point v1.0: bias 7, subnormals below 2^-6; 0x7F and 0xFF are NaN."""
    positive = [m * 2.0**-9 for m in range(8)] + [
        (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)
    ][:-1]
    assert len(positive) == 127
    assert (positive[0x01], positive[0x08], positive[0x38], positive[0x7E]) == (
        0.001953125,
        0.015625,
        1.0,
        448.0,
    )
    decoded = codec.decode_e4m3(np.arange(256, dtype=np.uint8))
    assert decoded[:127].tolist() == positive
    assert (-decoded[128:255]).tolist() == positive
    assert np.flatnonzero(np.isnan(decoded)).tolist() == [0x7F, 0xFF]


def test_the_e8m0_bytes() -> None:
    decoded = codec.decode_e8m0(np.arange(256, dtype=np.uint8))
    assert decoded[:255].astype(np.float64).tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert np.isnan(decoded[255])


def test_element_2i_is_the_low_nibble() -> None:
    assert codec.pack(np.array([[1, 2, 15, 0], [8, 7, 3, 12]], np.uint8)).tolist() == [
        [0x21, 0x0F],
        [0x78, 0xC3],
    ]
    every = np.arange(256, dtype=np.uint8).reshape(4, 64)
    assert np.array_equal(codec.pack(codec.unpack(every)), every)


# --------------------------------------------------------------------------------------------------
# NVFP4


@pytest.mark.parametrize(
    ("amax", "global_scale"),
    [
        (0.0, 1.0),
        (2688.0, 1.0),
        (1.0, float.fromhex("0x1.8618620000000p-12")),  # fl(1 / 2688)
        (2688 * 2.0**-126, 2.0**-126),
        (2687 * 2.0**-126, 2.0**-126),
        (2.0**-149, 2.0**-126),
        (FLT_MAX, float.fromhex("0x1.8618600000000p+116")),
    ],
)
def test_global_scale(amax: float, global_scale: float) -> None:
    assert float(codec.global_scale_of(amax)) == global_scale


def test_an_all_zero_tensor() -> None:
    q = codec.quantize(np.array([[0.0, -0.0] * 16] * 2, f32), NVFP4, "amax")
    assert (bytes(q.packed), bytes(q.block_scales), q.global_scale, q.kind) == (
        bytes(32),
        b"\x38" * 4,
        1.0,
        "multiplier",
    )


def test_zero_and_underflowing_blocks_store_one() -> None:
    rows = ((-0.0,), (2.0**-149, -(2.0**-149)), (2.0**-20,), (1e30,))
    q = codec.quantize(np.concatenate([block(NVFP4, *row) for row in rows]), NVFP4, "amax")
    # fl(2^-149 / 6e26) is 0, fl(2^-20 / 6e26) is not: smallest scale.
    assert bytes(q.block_scales) == b"\x38\x38\x01\x7e"
    assert codes(q)[16:18] == [0, 0]  # the quotient of the negative one is -0.0, not below zero


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (2.0**-9, 0x01),
        (2.0**-30, 0x01),  # clamped to the smallest
        (1.5 * 2.0**-9, 0x02),
        (2.5 * 2.0**-9, 0x02),
        (3.5 * 2.0**-9, 0x04),
        (7.5 * 2.0**-9, 0x08),  # the tie between the largest subnormal and the smallest normal
        (1.0, 0x38),
        (1.0625, 0x38),
        (1.1875, 0x3A),
        (1.9375, 0x40),
        (432.0, 0x7E),  # between 416 (0x7D) and 448
        (416.0, 0x7D),
        (448.0, 0x7E),
        (10000.0, 0x7E),  # beyond the group's amax: clamped
    ],
)
def test_block_scales_round_half_to_even(value: float, byte: int) -> None:
    assert scale_byte(NVFP4, "amax", 6 * value, group_amax=2688.0) == byte
    assert scale_byte(NVFP4, "amax", -6 * value, group_amax=2688.0) == byte


def test_every_e4m3_midpoint_and_its_neighbours() -> None:
    values = codec.decode_e4m3(np.arange(1, 127, dtype=np.uint8)).astype(np.float64)
    for low, tie in enumerate((values[:-1] + values[1:]) / 2, start=1):
        near = [
            scale_byte(NVFP4, "amax", 6 * tie * (1 + offset * 2.0**-20), group_amax=2688.0)
            for offset in (-1, 0, 1)
        ]
        assert near == [low, low + low % 2, low + 1], tie


def test_codes_use_the_rounded_block_scale() -> None:
    """Block amax 6.2 of a group of 2688: scale e4m3(6.2 / 6) = 1, so 6.2 saturates and 2.55 is
    above the tie of 2.5.
    """
    q = codec.quantize(block(NVFP4, 6.2, 2.5, 2.55, -5.0, -0.1, 0.3), NVFP4, "amax", 2688.0)
    assert (q.block_scales[0], codes(q)[:7]) == (0x38, [7, 4, 5, 14, 8, 1, 0])


def test_a_group_amax_beyond_the_tensor_shares_its_global_scale() -> None:
    q = codec.quantize(block(NVFP4, 6.0, 3.0), NVFP4, "amax", 2 * 2688.0)
    assert (q.global_scale, q.block_scales[0], codes(q)[:2]) == (2.0, 0x30, [7, 5])


# --------------------------------------------------------------------------------------------------
# MXFP4


@pytest.mark.parametrize(
    ("amax", "floor", "even", "ceil"),
    [
        ("0x1.000000p0", 125, 125, 125),
        ("0x1.7ffffep0", 125, 125, 125),
        ("0x1.800000p0", 125, 125, 125),  # 6 * 2^-2 holds 1.5: mantissa 0x400000
        ("0x1.800002p0", 125, 125, 126),
        ("0x1.bffffep0", 125, 125, 126),
        ("0x1.c00000p0", 125, 126, 126),  # mantissa 0x600000
        ("0x1.fffffep0", 125, 126, 126),
        ("0x1.000000p1", 126, 126, 126),
        ("0x1.000000p-125", 0, 0, 0),
        ("0x1.800002p-125", 0, 0, 1),
        ("0x1.c00000p-125", 0, 1, 1),
        ("0x1.c00000p-126", 0, 0, 0),
        ("0x1.000000p-149", 0, 0, 0),
        ("0x1.800000p127", 252, 252, 252),
        ("0x1.fffffep127", 252, 252, 252),  # 253 would put 6 steps beyond float32
    ],
)
def test_mxfp4_scale_rules(amax: str, floor: int, even: int, ceil: int) -> None:
    value = float.fromhex(amax)
    assert [scale_byte(MXFP4, rule, -value, value / 2) for rule in ("floor", "even", "ceil")] == [
        floor,
        even,
        ceil,
    ]


@pytest.mark.parametrize("rule", MXFP4.scale_rules)
def test_every_exponent_stays_within_the_stored_range(rule: str) -> None:
    importance = importance_for(rule, 32)
    amax = (np.arange(0, 0x7F800000, 0x1FFFFF, dtype=np.uint32)).view(f32)
    x = np.zeros((len(amax), 32), f32)
    x[:, 31] = amax
    stored = np.frombuffer(codec.quantize(x, MXFP4, rule, None, importance).block_scales, np.uint8)
    assert (stored.min(), stored.max()) == (0, 252)


def test_ceil_is_the_least_power_of_two_that_holds_the_block() -> None:
    for amax in np.geomspace(1e-30, 1e30, 2000).astype(f32).tolist():
        step = 2.0 ** (scale_byte(MXFP4, "ceil", amax) - 127)
        assert 3 * step < amax <= 6 * step


@pytest.mark.parametrize("rule", MXFP4.scale_rules)
def test_a_zero_mxfp4_block(rule: str) -> None:
    q = codec.quantize(block(MXFP4, -0.0, 0.0), MXFP4, rule, None, importance_for(rule, 32))
    assert (bytes(q.packed), bytes(q.block_scales), q.global_scale) == (bytes(16), b"\x00", None)


def test_mxfp4_codes() -> None:
    """Amax 7.5: floor has step 1 and saturates, even and ceil have step 2."""
    x = block(MXFP4, 7.5, -5.0, 3.5, -0.5, 0.25, -0.25, -0.0)
    assert codes(codec.quantize(x, MXFP4, "floor"))[:8] == [7, 14, 6, 9, 0, 8, 0, 0]
    assert (
        codes(codec.quantize(x, MXFP4, "even"))[:8]
        == codes(codec.quantize(x, MXFP4, "ceil"))[:8]
        == [6, 12, 4, 8, 0, 8, 0, 0]
    )


# -----------------------------------------------------------------------------------------------
# refusals, dequantize


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("fmt", "rule"), [(NVFP4, "amax"), (MXFP4, "even")])
def test_what_is_not_finite_is_refused(fmt: Format, rule: str, bad: float) -> None:
    with pytest.raises(NumericError) as refused:
        codec.quantize(block(fmt, 1.0, bad), fmt, rule)
    assert (refused.value.code, refused.value.exit_code) == ("not-finite", 2)


@pytest.mark.parametrize(("fmt", "rule"), [(NVFP4, "even"), (MXFP4, "amax"), (MXFP4, "")])
def test_a_rule_of_the_other_format_is_refused(fmt: Format, rule: str) -> None:
    with pytest.raises(InputError, match="does not belong to"):
        codec.quantize(block(fmt, 1.0), fmt, rule)


@pytest.mark.parametrize(("kind", "expected"), [("multiplier", 0.3), ("divisor", 1 / 0.3)])
def test_dequantize_multiplies_or_divides_as_stored(kind: Kind, expected: float) -> None:
    """The step is rounded once, before the code is applied; 0.3 is not a float32 and its inverse is
    another one.
    """
    stored = float(f32(0.3))
    packed = memoryview(bytes(range(0x10, 0x100, 0x22)))
    q = Quantized(NVFP4, (1, 16), packed, memoryview(b"\x3b"), stored, kind)
    step = f32(1.375) * f32(stored) if kind == "multiplier" else f32(1.375) / f32(stored)
    assert step == pytest.approx(1.375 * expected)
    values = codec.dequantize(q)
    assert values.tolist() == [
        [float(codec.decode_e2m1(np.array([code], np.uint8))[0] * step) for code in codes(q)]
    ]


def test_dequantize_mxfp4_and_nan_scales() -> None:
    q = Quantized(
        MXFP4, (1, 64), memoryview(b"\x7f\x19" + bytes(30)), memoryview(b"\x80\xff"), None
    )
    values = codec.dequantize(q)[0]
    assert values[:5].tolist() == [-12.0, 12.0, -1.0, 1.0, 0.0]
    assert np.isnan(values[32:]).all()
    assert not np.isnan(values[:32]).any()


# --------------------------------------------------------------------------------------------------
# golden bytes


def stored(name: str, key: str) -> Bytes:
    raw: Bytes = golden(name)[key].reshape(-1).view(torch.uint8).numpy()
    return raw


def quantized(case: str, fmt: Format, rule: str) -> Quantized | None:
    """None where the case is refused."""
    try:
        return codec.quantize(golden("inputs")[case].float().numpy(), fmt, rule)
    except NumericError:
        return None


def same(found: memoryview, expected: Bytes) -> bool:
    return np.array_equal(np.frombuffer(found, np.uint8), expected)


def check_golden(package: str, name: str, is_equal: bool) -> None:
    reason = EXCLUDED[package].get(name)
    assert is_equal is (reason is None), (
        f"{name} of {package}: equal is {is_equal}, excluded because: {reason}"
    )


def test_every_excluded_case_exists() -> None:
    assert len(CASES) == 36
    for excluded in EXCLUDED.values():
        assert {name.split("/")[0] for name in excluded} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_nvfp4_equals_modelopt(case: str) -> None:
    q = quantized(case, NVFP4, "amax")
    is_equal = (
        q is not None
        and same(q.packed, stored("modelopt_nvfp4", f"{case}/weight"))
        and same(q.block_scales, stored("modelopt_nvfp4", f"{case}/weight_scale"))
        and q.global_scale == golden("modelopt_nvfp4")[f"{case}/weight_scale_2"].item()
    )
    check_golden("modelopt", case, is_equal)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("rule", "mode"), [("floor", "floor"), ("even", "even"), ("ceil", "rceil")]
)
def test_mxfp4_equals_torchao_but_for_minus_zero(case: str, rule: str, mode: str) -> None:
    """Where the input is -0.0 torchao writes code 8, and we 0."""
    q = quantized(case, MXFP4, rule)
    theirs = codec.unpack(stored("torchao_mxfp4", f"{case}/qdata_{mode}")[None])
    theirs[golden("inputs")[case].reshape(1, -1).float().numpy() == 0] = 0
    is_equal = (
        q is not None
        and same(q.block_scales, stored("torchao_mxfp4", f"{case}/scale_{mode}"))
        and same(q.packed, codec.pack(theirs)[0])
    )
    check_golden("torchao", f"{case}/{rule}", is_equal)


@pytest.mark.parametrize("case", CASES)
def test_mxfp4_even_equals_compressed_tensors(case: str) -> None:
    q = quantized(case, MXFP4, "even")
    is_equal = (
        q is not None
        and same(q.packed, stored("ct_mxfp4", f"{case}/weight_packed"))
        and same(q.block_scales, stored("ct_mxfp4", f"{case}/weight_scale"))
    )
    check_golden("compressed-tensors", case, is_equal)


@pytest.mark.parametrize("case", [case for case in CASES if case not in EXCLUDED["modelopt"]])
def test_dequantize_equals_modelopt(case: str) -> None:
    q = quantized(case, NVFP4, "amax")
    assert q is not None
    assert np.array_equal(
        codec.dequantize(q), golden("modelopt_nvfp4")[f"{case}/dequant_f32"].numpy()
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in EXCLUDED["compressed-tensors"]]
)
def test_dequantize_equals_compressed_tensors(case: str) -> None:
    q = quantized(case, MXFP4, "even")
    assert q is not None
    theirs = golden("ct_mxfp4")[f"{case}/dequant"]
    assert torch.equal(torch.from_numpy(codec.dequantize(q)).to(theirs.dtype), theirs)
