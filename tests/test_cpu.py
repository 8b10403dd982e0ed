"""The C kernels against codec.py, byte for byte, on every instruction-set level that this processor has.

Decides that kernels/*.c are right wherever codec.py is; test_codec.py decides the latter.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from adversarial import (
    DTYPES,
    LARGEST,
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
    matrix,
    rounded,
    wide_range,
)

from fp4convert import codec
from fp4convert.backends.cpu import Cpu, _library
from fp4convert.codec import FLOAT_DTYPES
from fp4convert.errors import InputError, NumericError
from fp4convert.formats import FLOAT_TYPES, FORMATS, MXFP4, NVFP4, Format, Kind, Matrix, Quantized

NATIVE = _library().fp4_level(0)  # 4, 3 or 2 on x86-64, 0 elsewhere
Cpus = dict[int, Cpu]
EVERY_RULE = pytest.mark.parametrize(("fmt", "rule"), [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.scale_rules])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Cpus:
    """One backend a level; a level is lowered for good, so each has a copy of the library, and that its own level."""
    source = Path(_library()._name)
    folder = tmp_path_factory.mktemp("levels")
    found = {}
    for level in range(2, NATIVE + 1) if NATIVE else (0,):
        copy = shutil.copy(source, folder / f"v{level}{source.suffix}")
        found[level] = Cpu()
        found[level]._library = ctypes.CDLL(str(copy))
        found[level]._library.fp4_level(level)
    return found


def check(cpus: Cpus, values: Values, dtype: str, fmt: Format, rule: str, group_amax: float | None = None) -> Quantized:
    """What codec.quantize makes of `values`, after every level made the same of them."""
    wide = values.astype(np.float32)
    amax = float(np.abs(wide).max(initial=0)) if group_amax is None else group_amax
    expected = codec.quantize(wide, fmt, rule, amax)
    for level, cpu in cpus.items():
        found = cpu.quantize(matrix(values, dtype), fmt, rule, amax)
        assert_same_bytes(found, expected, values, f"level {level}, {dtype}, {rule}, group amax {amax.hex()}")
    return expected


@pytest.mark.parametrize("level", [2, 3, 4])
def test_every_level_of_this_processor_is_reached(cpus: Cpus, level: int) -> None:
    if level > NATIVE:
        pytest.skip(f"this processor has level {NATIVE}; level {level} is not tested here")
    assert cpus[level]._library.fp4_level(0) == level


# --------------------------------------------------------------------------------------------------------- quantize


@EVERY_RULE
@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_quantize(cpus: Cpus, make, dtype: str, fmt: Format, rule: str) -> None:  # type: ignore[no-untyped-def]
    values = make(dtype, 37, 416)
    amax = float(np.abs(values.astype(np.float32)).max())
    check(cpus, values, dtype, fmt, rule)
    for group_amax in (float(np.float32(min(amax * 7.3, LARGEST["F32"]))), *group_amaxes(dtype)) if fmt is NVFP4 else ():
        check(cpus, values, dtype, fmt, rule, group_amax)


@EVERY_DTYPE
def test_nvfp4_around_midpoints(cpus: Cpus, dtype: str) -> None:
    for group_amax in group_amaxes(dtype):
        values = around_midpoints(block_amaxes(dtype, group_amax, 1500), dtype, NVFP4, "amax", group_amax)
        check(cpus, values, dtype, NVFP4, "amax", group_amax)


@pytest.mark.parametrize("rule", MXFP4.scale_rules)
@EVERY_DTYPE
def test_mxfp4_around_midpoints(cpus: Cpus, dtype: str, rule: str) -> None:
    amax = PLAIN["random_bits"](dtype, 1, 20000)[0]
    check(cpus, around_midpoints(np.abs(amax), dtype, MXFP4, rule, 0.0), dtype, MXFP4, rule)


def reciprocal_differences(values: Values, q: Quantized) -> int:
    """How many codes x * (1 / step) would get wrong."""
    blocks = values.astype(np.float32).reshape(-1, q.format.block_size)
    wrong = codec.encode_e2m1(blocks * (np.float32(1) / codec.block_steps(q))[:, None])
    return int((wrong.reshape(1, -1) != codec.unpack(np.frombuffer(q.packed, np.uint8)[None])).sum())


@pytest.mark.parametrize("exponent", [-43, -122, -125, -133, -148, -10, -6, 90])
def test_nvfp4_bf16_within_a_hair_of_a_midpoint(cpus: Cpus, exponent: int) -> None:
    """Where fl(x / step) reaches a midpoint that x / step does not, or misses it by one float32 step; the block scale is 1."""
    for x, group_amax in hair_breadths(exponent):
        values = np.zeros((4, 16), FLOAT_DTYPES["BF16"])  # four blocks fill the widest vectors
        near = bits(rounded(np.array([x]), "BF16")) + np.arange(-1, 2)
        values[:, 1:4] = from_bits(near, "BF16", np.array([False, True, False]))
        values[:, 0] = rounded(np.array([group_amax / 448]), "BF16")
        check(cpus, values, "BF16", NVFP4, "amax", group_amax)


@pytest.mark.parametrize(("dtype", "most_on_plain"), [("BF16", 100), ("F16", 0), ("F32", 0)])
def test_the_midpoints_tell_a_reciprocal_from_a_division_and_plain_data_hardly(dtype: str, most_on_plain: int) -> None:
    """bf16 weights meet ties by themselves, because the amax has eight bits too: 51 of these 65536."""
    amax = 2688.0
    values = around_midpoints(block_amaxes(dtype, amax, 1500), dtype, NVFP4, "amax", amax)
    assert reciprocal_differences(values, codec.quantize(values.astype(np.float32), NVFP4, "amax", amax)) > 100
    plain = gaussian(dtype, 64, 1024)
    assert reciprocal_differences(plain, codec.quantize(plain.astype(np.float32), NVFP4, "amax")) <= most_on_plain


# ------------------------------------------------------------------------------------------------------- exhaustive

SCALES = [0x01, 0x02, 0x07, 0x08, 0x0F, 0x10, 0x2B, 0x38, 0x39, 0x3F, 0x50, 0x66, 0x77, 0x7D, 0x7E]
# Global scales; the bf16 kernel takes another path where block_scale * global_scale is outside 2^-100 .. 2^16.
GLOBALS = {
    "BF16": (-126, -125.3, -117.2, -109, -100.9, -91, -60.4, -24, 0, 0.1, 7.19, 9.7, 16, 60.2, 115.9, 116.6),
    "F16": (-126, -60.1, -33, -21.7, -16, -15.6, -14.8, -13, -12.1, -10.7, -9, -7.9, -6.3, -4, -3.3, -1.2, 0, 1.4, 3, 4.6, 7.2),
}


@pytest.mark.parametrize("dtype", GLOBALS)
def test_every_16_bit_value_nvfp4(cpus: Cpus, dtype: str) -> None:
    """Every value beside a block amax for each scale; a value above that amax sets its block's scale itself."""
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
        q = check(cpus, blocks.reshape(len(SCALES), -1), dtype, NVFP4, "amax", group_amax)
        reached |= {(scale, exponent) for scale in bytes(q.block_scales)[:: others.shape[1]]}
    assert len(reached) >= 200


@pytest.mark.parametrize("rule", MXFP4.scale_rules)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_mxfp4(cpus: Cpus, dtype: str, rule: str) -> None:
    """Under every scale, every value that fits it."""
    every = every_finite(dtype)
    for amax in binade_ends(dtype):
        others = every[: 2 * amax + 2]
        others = np.append(others, np.zeros(-len(others) % 31, every.dtype)).reshape(-1, 31)
        blocks = np.insert(others, 17, every[2 * amax + 1], axis=1)
        check(cpus, blocks.reshape(1, -1), dtype, MXFP4, rule)


@EVERY_DTYPE
def test_every_block_scale_of_mxfp4(cpus: Cpus, dtype: str) -> None:
    """Lone values: all of a 16-bit dtype; of fp32 every exponent with the mantissas about each threshold."""
    if dtype == "F32":
        mantissas = np.arange(0, 0x800000, 0x200000)[:, None] + np.arange(-2, 3)
        magnitudes = (np.arange(255)[:, None, None] * 0x800000 + mantissas).ravel()
        amax = from_bits(np.clip(magnitudes, 0, 0x7F7FFFFF), dtype, generator(9).random(magnitudes.size) < 0.5)
    else:
        amax = every_finite(dtype)
    blocks = np.zeros((len(amax), 32), amax.dtype)
    blocks[np.arange(len(amax)), np.arange(len(amax)) % 32] = amax
    for rule in MXFP4.scale_rules:
        check(cpus, blocks, dtype, MXFP4, rule)


@EVERY_DTYPE
def test_block_scales_of_nvfp4_around_their_midpoints(cpus: Cpus, dtype: str) -> None:
    scales = codec.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    scales = np.concatenate([scales, (scales[:-1] + scales[1:]) / 2, scales * 2.0**-12])
    for group_amax in group_amaxes(dtype):
        magnitudes = bits(rounded(scales * (group_amax / 448), dtype))[:, None] + np.arange(-3, 4)
        largest = int(bits(rounded(np.array([np.inf]), dtype))[0])
        blocks = np.zeros((magnitudes.size, 16), FLOAT_DTYPES[dtype])
        blocks[:, 9] = from_bits(np.clip(magnitudes.ravel(), 0, largest), dtype, np.arange(magnitudes.size) % 2 == 1)
        check(cpus, blocks.reshape(1, -1), dtype, NVFP4, "amax", group_amax)


# --------------------------------------------------------------------------------------------- lengths and addresses

GUARD = 0xA5


def raw_quantize(cpu: Cpu, values: Values, dtype: str, fmt: Format, rule: str, offset: int) -> Quantized:
    """Through the library's own entry, into buffers at odd addresses whose surroundings must stay as they were."""
    sizes = (values.size // 2, values.size // fmt.block_size)
    buffers = [np.full(size + 64, GUARD, np.uint8) for size in sizes]
    packed, scales = (buffer[offset : offset + size] for buffer, size in zip(buffers, sizes, strict=True))
    amax = np.array([1.0], np.float32)
    argument = ctypes.c_void_p(amax.ctypes.data) if fmt is NVFP4 else ctypes.c_int64(fmt.scale_rules.index(rule))
    x, p, s = (ctypes.c_void_p(a.ctypes.data) for a in (values, packed, scales))
    cpu._library[f"quantize_{fmt.name}_{FLOAT_TYPES[dtype].word}"](x, ctypes.c_int64(values.size), argument, p, s)
    for buffer, size in zip(buffers, sizes, strict=True):
        assert (buffer[:offset] == GUARD).all(), "written before the buffer"
        assert (buffer[offset + size :] == GUARD).all(), "written behind the buffer"
    stored = float(codec.global_scale_of(1.0)) if fmt is NVFP4 else None
    return Quantized(fmt, (1, values.size), packed.data, scales.data, stored)


@EVERY_RULE
@EVERY_DTYPE
def test_any_number_of_blocks_at_any_address(cpus: Cpus, dtype: str, fmt: Format, rule: str) -> None:
    source = rounded(wide_range(dtype, 1, 32 * 200).astype(np.float32)[0] * 2.0**-8, dtype)
    for blocks in [*range(1, 71), 127, 128, 129, 150]:
        size, start = blocks * fmt.block_size, blocks % 13
        around = np.full(size + 64, np.nan, source.dtype)  # what lies beside x must not matter
        values = around[start : start + size]
        values[:] = source[:size]
        expected = codec.quantize(values.astype(np.float32)[None], fmt, rule, 1.0)
        for level, cpu in cpus.items():
            found = raw_quantize(cpu, values, dtype, fmt, rule, blocks % 31)
            assert_same_bytes(found, expected, values, f"level {level}, {dtype}, {rule}, {blocks} blocks")


def unaligned(x: Matrix) -> Matrix:
    """The same values, one byte past where they were aligned."""
    shifted = np.empty(len(x.data) + 1, np.uint8)
    shifted[1:] = x.data
    return Matrix(shifted[1:].data, x.dtype, x.shape)


@EVERY_RULE
@EVERY_DTYPE
def test_data_need_not_be_aligned(cpus: Cpus, dtype: str, fmt: Format, rule: str) -> None:
    values = gaussian(dtype, 3, 96)
    x = matrix(values, dtype)
    for cpu in cpus.values():
        amax = cpu.amax(unaligned(x))
        assert amax == cpu.amax(x)
        found = cpu.quantize(unaligned(x), fmt, rule, amax)
        assert_same_bytes(found, cpu.quantize(x, fmt, rule, amax), values, "unaligned")
        shifted = Quantized(
            fmt, found.shape, *(unaligned_bytes(part) for part in (found.packed, found.block_scales)), found.global_scale
        )
        assert cpu.dequantize(shifted, dtype) == cpu.dequantize(found, dtype)


def unaligned_bytes(part: memoryview) -> memoryview:
    return memoryview(b"\0" + bytes(part))[1:]


@EVERY_RULE
def test_no_rows(cpus: Cpus, fmt: Format, rule: str) -> None:
    for cpu in cpus.values():
        q = cpu.quantize(Matrix(memoryview(b""), "BF16", (0, 64)), fmt, rule, 0.0)
        assert (len(q.packed), len(q.block_scales), q.shape) == (0, 0, (0, 64))
        assert len(cpu.dequantize(q, "BF16")) == 0


def test_a_rule_of_the_other_format_is_refused(cpus: Cpus) -> None:
    for fmt, rule in ((NVFP4, "even"), (MXFP4, "amax")):
        with pytest.raises(InputError, match="does not belong to"):
            cpus[NATIVE].quantize(matrix(gaussian("BF16", 1, 32), "BF16"), fmt, rule, 1.0)


# ------------------------------------------------------------------------------------------------------------- amax


@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_amax(cpus: Cpus, make, dtype: str) -> None:  # type: ignore[no-untyped-def]
    values = make(dtype, 1, 4096)
    for cpu in cpus.values():
        for start, size in [(0, 4096), *((size * 7, size) for size in range(200))]:
            part = values[:, start : start + size]
            assert cpu.amax(matrix(part, dtype)) == float(np.abs(part.astype(np.float32)).max(initial=0))


@EVERY_DTYPE
def test_amax_is_exact_and_lets_nothing_through_that_is_not_finite(cpus: Cpus, dtype: str) -> None:
    every = every_finite(dtype) if dtype != "F32" else PLAIN["random_bits"](dtype, 1, 4096)[0]
    for cpu in cpus.values():
        for value in every[:: max(1, len(every) // 1500)]:
            assert cpu.amax(matrix(np.array([[value]]), dtype)) == abs(float(value))
        for size in (1, 16, 96, 333):
            for place in {0, size // 2, size - 1}:
                for bad in (np.inf, -np.inf, np.nan, -np.nan):
                    values = np.full((1, size), LARGEST[dtype]).astype(FLOAT_DTYPES[dtype])
                    values[0, place] = bad
                    found = cpu.amax(matrix(values, dtype))
                    assert np.isnan(found) if np.isnan(bad) else found == np.inf


# ------------------------------------------------------------------------------------------------------- dequantize

# Ties of bf16 and fp16, results that are subnormal in each dtype, overflow to Inf, zero.
STORED = (1.0, 0.3, 1 / 2688, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 5e-6, 2.0**-15, 2.0**-17, 0.9 * 2.0**-18)
STORED += (1.7e-38, 2.0**-126, 2.0**-130, 2.0**-149, 1e30, 1.26e35, LARGEST["F32"], 0.0)


def every_block(fmt: Format, global_scale: float | None, kind: Kind) -> Quantized:
    """Every code under every scale byte, and the codes in another order."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (512, fmt.block_size // 16))
    codes[256:] = generator(10).permuted(codes[256:], axis=1)
    scales = np.tile(np.arange(256, dtype=np.uint8), 2)
    stored = None if global_scale is None else float(np.float32(global_scale))
    return Quantized(fmt, (512, fmt.block_size), codec.pack(codes).ravel().data, scales.data, stored, kind)


def without_overflow(q: Quantized, dtype: str) -> Quantized:
    """The blocks that a type can hold; float32 holds what it holds."""
    if dtype == "F32":
        return q
    fits = ~(np.abs(codec.block_steps(q)) > LARGEST[dtype] / 6)
    packed = np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1)[fits]
    scales = np.frombuffer(q.block_scales, np.uint8)[fits]
    return Quantized(q.format, (len(scales), q.shape[1]), packed.ravel().data, scales.data, q.global_scale, q.kind)


def check_dequantize(cpus: Cpus, q: Quantized, dtype: str) -> None:
    with np.errstate(all="ignore"):
        expected = codec.dequantize(q).astype(FLOAT_DTYPES[dtype])
    for level, cpu in cpus.items():
        found = np.frombuffer(cpu.dequantize(q, dtype), FLOAT_DTYPES[dtype]).reshape(q.shape)
        assert_same_values(found, expected, f"level {level}, {dtype}, {q.format.name}, {q.kind} {q.global_scale}")


@EVERY_DTYPE
@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
def test_dequantize_nvfp4(cpus: Cpus, kind: Kind, dtype: str) -> None:
    for global_scale in STORED:
        q = every_block(NVFP4, global_scale, kind)
        check_dequantize(cpus, without_overflow(q, dtype), dtype)


@EVERY_DTYPE
def test_dequantize_mxfp4(cpus: Cpus, dtype: str) -> None:
    q = every_block(MXFP4, None, "multiplier")
    check_dequantize(cpus, without_overflow(q, dtype), dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@EVERY_DTYPE
def test_dequantize_any_number_of_blocks(cpus: Cpus, dtype: str, fmt: Format) -> None:
    rng = generator(11)
    for blocks in [*range(1, 71), 129]:
        packed, scales = rng.bytes(blocks * fmt.block_size // 2), rng.integers(0x30, 0x40, blocks).astype(np.uint8)
        q = Quantized(fmt, (1, blocks * fmt.block_size), memoryview(packed), scales.data, 0.7 if fmt is NVFP4 else None)
        check_dequantize(cpus, q, dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_fp16_holds_65504_and_nothing_beyond(cpus: Cpus, fmt: Format) -> None:
    """Codes 0 and -4 or -6 in blocks whose step is 2^14: 65536 is beyond fp16, and refused; so is 6 * 2^14."""
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


@pytest.mark.parametrize(
    ("scales", "stored"), [(b"\x7f\x7e", 1e6), (b"\x7e\x7e", 1e38), (b"\xfe\x38", 100.0)], ids=["nan", "inf", "negative"]
)
def test_nothing_hides_an_overflow_of_fp16(cpus: Cpus, scales: bytes, stored: float) -> None:
    """A NaN scale beside it, 0 * Inf beside it, a negative block scale."""
    packed = np.repeat(np.array([0xF0, 0xFF], np.uint8), 8)
    q = Quantized(NVFP4, (2, 16), packed.data, memoryview(scales), stored)
    for cpu in cpus.values():
        with pytest.raises(NumericError, match="beyond 65504"):
            cpu.dequantize(q, "F16")
