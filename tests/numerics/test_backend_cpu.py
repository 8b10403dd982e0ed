"""What the C kernels alone promise, on every instruction-set level that this processor has: any
address, any length, no overflow.

Decides that each level is reached and how it treats memory; test_kernels.py holds its bytes to
codec.py's.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from adversarial import (
    DTYPES,
    LARGEST,
    PLAIN,
    Values,
    assert_same_bytes,
    every_finite,
    gaussian,
    generator,
    importance_for,
    matrix,
    rounded,
    wide_range,
)
from cpu_levels import (
    EVERY_DTYPE,
    EVERY_RULE,
    NATIVE,
    Cpus,
    every_level,
    unaligned,
    unaligned_bytes,
)

from fp4convert.errors import InputError, NumericError
from fp4convert.numerics import codec
from fp4convert.numerics.backends.base import Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import (
    FLOAT_TYPES,
    FP4_FORMATS,
    MXFP4,
    NVFP4,
    Format,
    global_range,
    kernel_of,
    rule_number,
)
from fp4convert.numerics.matrices import InMemory, Matrix, Quantized


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    return every_level(tmp_path_factory.mktemp("levels"))


@pytest.mark.parametrize("level", [2, 3, 4])
def test_every_level_of_this_processor_is_reached(cpus: Cpus, level: int) -> None:
    if level > NATIVE:
        pytest.skip(f"this processor has level {NATIVE}; level {level} is not tested here")
    assert cpus[level]._library.fp4_level(0) == level


# ---------------------------------------------------------------------------------------------
# lengths and addresses

GUARD = 0xA5


def raw_quantize(
    cpu: Cpu, values: Values, dtype: str, fmt: Format, rule: str, offset: int
) -> Quantized:
    """Through the library's own entry, into buffers at odd addresses whose surroundings must stay
    as they were.
    """
    sizes = (values.size // 2, values.size // fmt.block_size)
    buffers = [np.full(size + 64, GUARD, np.uint8) for size in sizes]
    packed, scales = (
        buffer[offset : offset + size] for buffer, size in zip(buffers, sizes, strict=True)
    )
    amax = np.array([1.0], np.float32)
    importance = importance_for(rule, values.size)
    choice = [
        *rule_number(fmt, rule),
        *([] if importance is None else [codec.weigh(importance, values.size, fmt), values.size]),
    ]
    arguments = [values, values.size, *([amax] if fmt is NVFP4 else []), *choice, packed, scales]
    native = [
        ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data)
        for a in arguments
    ]
    cpu._library[f"{kernel_of(fmt, rule)}_{FLOAT_TYPES[dtype].word}"](*native)
    for buffer, size in zip(buffers, sizes, strict=True):
        assert (buffer[:offset] == GUARD).all(), "written before the buffer"
        assert (buffer[offset + size :] == GUARD).all(), "written behind the buffer"
    stored = float(codec.global_scale_of(1.0, rule)) if fmt is NVFP4 else None
    return Quantized(fmt, (1, values.size), packed.data, scales.data, stored)


@pytest.mark.sweep(6)
@EVERY_RULE
@EVERY_DTYPE
def test_any_number_of_blocks_at_any_address(
    cpus: Cpus, dtype: str, fmt: Format, rule: str
) -> None:
    source = rounded(wide_range(dtype, 1, 32 * 200).astype(np.float32)[0] * 2.0**-8, dtype)
    for blocks in [*range(1, 71), 127, 128, 129, 150]:
        size, start = blocks * fmt.block_size, blocks % 13
        around = np.full(size + 64, np.nan, source.dtype)  # what lies beside x must not matter
        values = around[start : start + size]
        values[:] = source[:size]
        expected = codec.quantize(
            values.astype(np.float32)[None], fmt, rule, 1.0, importance_for(rule, size)
        )
        for level, cpu in cpus.items():
            found = raw_quantize(cpu, values, dtype, fmt, rule, blocks % 31)
            assert_same_bytes(
                found, expected, values, f"level {level}, {dtype}, {rule}, {blocks} blocks"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_amax_takes_the_place_of_the_groups(dtype: str) -> None:
    """2688 makes the global scale 1, whatever the weights are: what mlx stores, which has no place
    for one.
    """
    values = rounded(generator(7).normal(0, 900, (33, 512)), dtype)
    whole = InMemory(matrix(values, dtype))
    for rule in NVFP4.scale_rules:
        given, importance = global_range(rule), importance_for(rule, 512)
        ((_, found),) = Cpu().quantize_group(
            [whole], [whole], NVFP4, rule, Given(given, () if importance is None else [importance])
        )
        assert found.global_scale == 1.0
        assert_same_bytes(
            found,
            codec.quantize(values.astype(np.float32), NVFP4, rule, given, importance),
            values,
            rule,
        )
    values[32, 511] = np.inf
    spoiled = InMemory(matrix(values, dtype))
    with pytest.raises(NumericError):
        next(Cpu().quantize_group([spoiled], [spoiled], NVFP4, "amax", Given(2688.0)))


@EVERY_RULE
@EVERY_DTYPE
def test_data_need_not_be_aligned(cpus: Cpus, dtype: str, fmt: Format, rule: str) -> None:
    values = gaussian(dtype, 3, 96)
    x = matrix(values, dtype)
    for cpu in cpus.values():
        amax = cpu.amax(unaligned(x))
        assert amax == cpu.amax(x)
        importance = importance_for(rule, 96)
        found = cpu.quantize(unaligned(x), fmt, rule, amax, importance)
        assert_same_bytes(found, cpu.quantize(x, fmt, rule, amax, importance), values, "unaligned")
        shifted = Quantized(
            fmt,
            found.shape,
            *(unaligned_bytes(part) for part in (found.packed, found.block_scales)),
            found.global_scale,
        )
        assert cpu.dequantize(shifted, dtype) == cpu.dequantize(found, dtype)


@EVERY_RULE
def test_no_rows(cpus: Cpus, fmt: Format, rule: str) -> None:
    for cpu in cpus.values():
        q = cpu.quantize(
            Matrix(memoryview(b""), "BF16", (0, 64)), fmt, rule, 0.0, importance_for(rule, 64)
        )
        assert (len(q.packed), len(q.block_scales), q.shape) == (0, 0, (0, 64))
        assert len(cpu.dequantize(q, "BF16")) == 0


def test_a_rule_of_the_other_format_is_refused(cpus: Cpus) -> None:
    for fmt, rule in ((NVFP4, "even"), (MXFP4, "amax")):
        with pytest.raises(InputError, match="does not belong to"):
            cpus[NATIVE].quantize(matrix(gaussian("BF16", 1, 32), "BF16"), fmt, rule, 1.0)


# --------------------------------------------------------------------------------------------------
# amax


@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_amax(cpus: Cpus, make, dtype: str) -> None:  # type: ignore[no-untyped-def]
    values = make(dtype, 1, 4096)
    for cpu in cpus.values():
        for start, size in [(0, 4096), *((size * 7, size) for size in range(200))]:
            part = values[:, start : start + size]
            assert cpu.amax(matrix(part, dtype)) == float(
                np.abs(part.astype(np.float32)).max(initial=0)
            )


@EVERY_DTYPE
def test_amax_is_exact_and_lets_nothing_through_that_is_not_finite(cpus: Cpus, dtype: str) -> None:
    every = every_finite(dtype) if dtype != "F32" else PLAIN["random_bits"](dtype, 1, 4096)[0]
    for cpu in cpus.values():
        for value in every[:: max(1, len(every) // 1500)]:
            assert cpu.amax(matrix(np.array([[value]]), dtype)) == abs(float(value))
        for size in (1, 16, 96, 333, 9000):
            for place in {
                0,
                size // 2,
                size - 1,
                *({4095, 4096, 8191, 8192} if size > 8192 else ()),
            }:  # four pages end there
                for bad in (np.inf, -np.inf, np.nan, -np.nan):
                    values = np.full((1, size), LARGEST[dtype]).astype(FLOAT_DTYPES[dtype])
                    values[0, place] = bad
                    found = cpu.amax(matrix(values, dtype))
                    assert np.isnan(found) if np.isnan(bad) else found == np.inf


# --------------------------------------------------------------------------------------------------
# overflow


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_fp16_holds_65504_and_nothing_beyond(cpus: Cpus, fmt: Format) -> None:
    """Codes 0 and -4 or -6 in blocks whose step is 2^14: 65536 is beyond fp16, and refused; so is 6
    * 2^14.
    """
    scale, stored = (0x38, 2.0**14) if fmt is NVFP4 else (127 + 14, None)
    for code, is_refused in ((0xD, False), (0xE, True), (0xF, True)):
        packed = np.zeros(fmt.block_size, np.uint8)
        packed[-1] = code << 4
        q = Quantized(fmt, (2, fmt.block_size), packed.data, memoryview(bytes([scale] * 2)), stored)
        for cpu in cpus.values():
            if not is_refused:
                assert np.frombuffer(cpu.dequantize(q, "F16"), np.float16)[-1] == -3 * 2**14
                continue
            with pytest.raises(NumericError, match="beyond 65504") as refused:
                cpu.dequantize(q, "F16")
            assert (refused.value.code, refused.value.exit_code) == ("fp16-overflow", 2)


@EVERY_DTYPE
@pytest.mark.parametrize("rule", MXFP4.scale_rules)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_mxfp4_refuses_what_is_not_finite_in_one_pass(
    cpus: Cpus, dtype: str, rule: str, bad: float
) -> None:
    """Scales of finite values tell that nothing has to be looked at again."""
    x, importance = PLAIN["extremes"](dtype, 64, 64), importance_for(rule, 64)
    given = Given(importance=() if importance is None else (importance,))
    for cpu in cpus.values():
        weights = InMemory(matrix(x, dtype))
        assert list(cpu.quantize_group([weights], [weights], MXFP4, rule, given))
        for place in range(0, 32, 5):
            wrong = x.copy()
            wrong[33, place] = bad
            weights = InMemory(matrix(wrong, dtype))
            with pytest.raises(NumericError, match="NaN or Inf"):
                list(cpu.quantize_group([weights], [weights], MXFP4, rule, given))


@pytest.mark.parametrize(
    ("scales", "stored"), [(b"\x7f\x7e", 1e6), (b"\xfe\x38", 100.0)], ids=["nan", "negative"]
)
def test_nothing_hides_an_overflow_of_fp16(cpus: Cpus, scales: bytes, stored: float) -> None:
    """A NaN scale beside it, a negative block scale."""
    packed = np.repeat(np.array([0xF0, 0xFF], np.uint8), 8)
    q = Quantized(NVFP4, (2, 16), packed.data, memoryview(scales), stored)
    for cpu in cpus.values():
        with pytest.raises(NumericError, match="beyond 65504"):
            cpu.dequantize(q, "F16")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_values_beyond_fp32_are_sent_to_no_other_dtype(cpus: Cpus, dtype: str) -> None:
    """448 * 1e38 is Inf, beside 0 * Inf."""
    packed = np.repeat(np.array([0xF0, 0xFF], np.uint8), 8)
    q = Quantized(NVFP4, (2, 16), packed.data, memoryview(b"\x7e\x7e"), 1e38)
    for cpu in cpus.values():
        with pytest.raises(NumericError, match=r"beyond 3.40282e\+38") as refused:
            cpu.dequantize(q, dtype)
        assert refused.value.code == "scale-not-finite"
