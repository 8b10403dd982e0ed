"""PTX on the host: what ptx.py makes of it computes as the ISA says, and wrong PTX is noticed.

The kernels' own tests run on NVRTC's PTX in test_cuda_kernels.py, test_kernels.py, test_gemv.py,
test_search_hostile.py, test_fp8_int.py, test_descend.py and test_error_sums.py, as ptx-90 and
ptx-120a.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ptx import UnknownPtxError, compile_ptx, compile_text, translate
from simt import KERNELS, launch
from simt_gpu import ELF, Machine

from fp4convert.numerics.backends import gpus, self_check

STEMS = [Path(source).stem for source in self_check.CHECKED]
BY_HAND = """
.visible .entry sums(
	.param .u64 .ptr .align 1 sums_param_0,
	.param .u64 sums_param_1
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<8>;
	.reg .f32 	%f<4>;
	.reg .b64 	%rd<5>;

	ld.param.u64 	%rd1, [sums_param_0];
	ld.param.u64 	%rd2, [sums_param_1]; // how often
	mov.u32 	%r1, %tid.x;
	mov.f32 	%f1, 0f3F800000;
	cvt.u32.u64 	%r2, %rd2;
$L__BB0_1:
	.pragma "nounroll";
	setp.eq.s32 	%p1, %r2, 0;
	@%p1 bra 	$L__BB0_3;
	fma.rn.f32 	%f1, %f1, 0f40000000, 0fBF000000;
	add.s32 	%r2, %r2, -1;
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	shfl.sync.bfly.b32 	%r4|%p2, %r1, 1, 31, -1;
	// begin inline asm
	{.reg .b16 low, high;
mov.b32 {low, high}, %r4;
mov.b32 %r5, {high, low};}
	// end inline asm
	@!%p2 ret;
	mul.wide.u32 	%rd3, %r1, 8;
	add.s64 	%rd4, %rd1, %rd3;
	mov.b32 	%r6, %f1;
	st.global.v2.u32 	[%rd4+0], {%r5, %r6};
	ret;

}
"""
# Wrong PTX: (stem, with the instructions for E2M1, a pattern, what stands in its place).
F, R = r"(%f\d+)", r"(%r\d+)"
CVT_E2M1 = rf"(cvt.rn.satfinite.e2m1x2.f32 \w+), {F}, {F};"
TWO_SWAPPED, FIRST_SWAPPED = r"\1, \3, \2;", r"\1, \3, \2,"
PRMT = rf"(prmt.b32 \s*%r\d+), {R}, {R},"
SWAPPED = {
    "halves of e2m1x2": ("quantize", True, CVT_E2M1, TWO_SWAPPED),
    "halves of bf16x2": (
        *("dequantize", False, rf"(cvt.rn.bf16x2.f32 %r\d+), {F}, {F};", TWO_SWAPPED),
    ),
    "halves of f16x2": ("dequantize", True, rf"(cvt.rn.f16x2.f32 %r\d+), {F}, {F};", TWO_SWAPPED),
    "bytes of four codes": ("quantize", True, r"\{a, b, c, d\};\}", "{b, a, c, d};}"),
    "a quotient": ("search", False, rf"(div.rn.f32 \s*%f\d+), {F}, {F};", TWO_SWAPPED),
    "a difference": ("compare", False, rf"(sub.rn.f32 \s*%f\d+), {F}, {F};", r"\1, \2, \2;"),
    "factor and summand": (
        *("quantize", False, rf"(fma.rn.f32 \s*%f\d+), {F}, {F}, {F};", r"\1, \2, \4, \3;"),
    ),
    "sources of prmt": ("quantize", False, PRMT, FIRST_SWAPPED),
    "the partner of a shuffle": (
        *("quantize", False, r"(shfl.sync.bfly.b32 [^,]*, %r\d+), %r\d+,", r"\1, 2,"),
    ),
    "sides of a choice": ("search", False, rf"(selp.f32 \s*%f\d+), {F}, {F},", FIRST_SWAPPED),
    "an integer's origin": (
        *("decode", False, rf"add.rn.f32 \s*{F}, {F}, %f\d+;", r"mov.b32 \1, \2;"),
    ),
    "halves of a square": ("decode", True, PRMT, FIRST_SWAPPED),
    "-0.0 kept": (
        *("quantize", False, rf"fma.rn.bf16x2 {R}, {R}, %r\d+, %r\d+;", r"mov.b32 \1, \2;"),
    ),
    "a maximum": ("quantize", True, rf"max.u32 \s*{R}, {R}, %r\d+;", r"mov.b32 \1, \2;"),
}
REFUSED = {
    "a sum that may be contracted": ("add.rn.f32", "add.f32"),
    "a product that may be contracted": ("mul.rn.f32", "mul.f32"),
    "a sum towards zero": ("add.rn.f32", "add.rz.f32"),
    "fused, towards zero": ("fma.rn.f32", "fma.rz.f32"),
    "a conversion towards zero": ("cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
    "E2M1 that does not saturate": ("cvt.rn.satfinite.e2m1x2.f32", "cvt.rn.e2m1x2.f32"),
    "flushed sums": ("add.rn.f32", "add.rn.ftz.f32"),
    "flushed products": ("mul.rn.f32", "mul.rn.ftz.f32"),
    "flushed comparisons": ("setp.lt.f32", "setp.lt.ftz.f32"),
    "an approximate quotient": ("div.rn.f32", "div.full.f32"),
    "a maximum that loses NaN": ("max.NaN.bf16x2", "max.bf16x2"),
}


def test_ptx_by_hand(tmp_path):
    """A loop, a guard, an exchange, halves that are swapped, a vector that is stored."""
    library = compile_text(translate(BY_HAND), tmp_path / "by_hand.so")
    found = np.zeros(128, np.uint32)
    launch(library, "sums", (1, 1), [found.ctypes.data, 3], threads=64)
    assert found[0::2].tolist() == [(i ^ 1) << 16 for i in range(64)]
    assert found[1::2].view(np.float32).tolist() == [2.0**3 - 3.5] * 64


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fma.rn.f32", "fma.f32"),
        pytest.param("fma.rn.f32", "fma.rn.ftz.f32", marks=pytest.mark.slow),
    ],
)
def test_an_instruction_that_is_not_there_does_not_compile(tmp_path, before, after):
    with pytest.raises(subprocess.CalledProcessError):
        compile_text(translate(BY_HAND.replace(before, after)), tmp_path / "wrong.so")


@pytest.mark.parametrize("wrong", ["mov.u32 %r1, %tid.z;", "add.rn.f32 %f1, 1.0, %f1;"])
def test_an_operand_that_is_not_known_is_refused(wrong):
    with pytest.raises(UnknownPtxError):
        translate(BY_HAND.replace("ret;\n\n}", f"{wrong}\n\n}}"))


def differences(machine: Machine, monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    """What the self-check finds of the machine's kernels."""
    machine.install(monkeypatch, cache)
    monkeypatch.setattr("fp4convert.numerics.backends.cubins.compile_cubin", lambda *_: (ELF, ""))
    return self_check.find_difference(gpus.survey().gpus[0])


@pytest.mark.slow
@pytest.mark.parametrize("has_cvt", [False, True], ids=["90", "120a"])
def test_ptx_passes_the_check_of_a_gpus_first_use(has_cvt, tmp_path, monkeypatch):
    libraries = {stem: compile_ptx(KERNELS / f"{stem}.cu", tmp_path, has_cvt) for stem in STEMS}
    assert not differences(Machine(libraries), monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", SWAPPED.values(), ids=SWAPPED)
def test_swapped_operands_are_noticed(
    simt_libraries: dict[str, ctypes.CDLL], tmp_path, monkeypatch, wrong
):
    """In every place at once, in the kernels of one file; the others are right."""
    stem, has_cvt, pattern, instead = wrong

    def swap(ptx: str) -> str:
        changed, count = re.subn(pattern, instead, ptx)
        assert count
        return changed

    library = compile_ptx(KERNELS / f"{stem}.cu", tmp_path, has_cvt, swap)
    assert differences(Machine({**simt_libraries, stem: library}), monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), REFUSED.values(), ids=REFUSED)
def test_another_rounding_or_flushing_does_not_compile(tmp_path, before, after):
    has_cvt = "e2m1x2" in before
    stem = "dequantize" if before.startswith("cvt.rn.bf16x2") else "quantize"

    def change(ptx: str) -> str:
        assert before in ptx
        return ptx.replace(before, after, 1)

    with pytest.raises(subprocess.CalledProcessError):
        compile_ptx(KERNELS / f"{stem}.cu", tmp_path, has_cvt, change)
