"""A GPU is checked before its first work: right kernels pass, wrong ones are named.

The kernels run on the host, as simt_gpu.py has them; some are broken on purpose.
"""

from __future__ import annotations

import ctypes
import shutil
from itertools import product
from pathlib import Path

import pytest
from checkpoints import run, write_llama
from simt import KERNELS, compile_for_host
from simt_gpu import ELF, Machine

from fp4convert.conversion import device_choice
from fp4convert.errors import DeviceError
from fp4convert.numerics.backends import cubins, gpu_choice, open_backend, self_check
from fp4convert.numerics.formats import FLOAT_TYPES, FP4_FORMATS

COMPILE = cubins.compile_cubin
WORDS = [kind.word for kind in FLOAT_TYPES.values()]
ENTRIES = {
    *("count_codes", "decode_fp8", "decode_int4", "decode_int8", "transpose_2", "transpose_4"),
    "add_costs",
    *(
        f"{kind}_{word}"
        for kind, word in product(
            ("amax", "grid_amax", "quantize_fp8", "row_costs", "compare_values"), WORDS
        )
    ),
    "descend_nvfp4",
    "descend_mxfp4",
    *(
        f"{kind}_{fmt}_{word}"
        for kind, fmt, word in product(
            ("quantize", "search", "weigh", "dequantize", "compare"), FP4_FORMATS, WORDS
        )
    ),
}
# A wrong line, and the kernel whose bytes must tell: (file, what is there, what is put there).
BROKEN = {
    "a reciprocal without its correction": (
        *("codes.cuh", "__fmaf_rn(v, b.inverse, __fmul_rn(v, b.rest))", "__fmul_rn(v, b.inverse)"),
        "quantize_nvfp4_bf16",
    ),
    "an E4M3 ulp": (
        *("fp4.h", "(bits + 0x7FFFFu + ((bits >> 20) & 1u))", "(bits + 0x80000u)"),
        "quantize_nvfp4_bf16",
    ),
    "a zero block's scale": (
        *("fp4.h", "return r == 0.0f ? 0x38u : scale;", "return scale;"),
        "quantize_nvfp4_bf16",
    ),
    "-0.0 keeps its sign": (
        *("device.h", "return fma2_bf16(w, 0x3F803F80u, 0);", "return w;"),
        "quantize_nvfp4_bf16",
    ),
    "ceil as floor": (
        *("fp4.h", "if (rule == FP4_CEIL) exponent", "if (rule < 0) exponent"),
        "quantize_mxfp4_bf16",
    ),
    "an amax that loses NaN": (
        "device.h",
        "return fp4_bits(T::low(T::max2(m, m >> 16)));",
        "return fp4_bits(T::low(m));",
        "amax_bf16",
    ),
    "a search that stops early": (
        *("screening.cuh", "i < TRIED_CODES; i++) open.add", "i < 4; i++) open.add"),
        "search_nvfp4_bf16",
    ),
    "a step in the wrong order": (
        *("device.h", "? block_scale / stored_global", "? block_scale * (1.0f / stored_global)"),
        "dequantize_nvfp4_fp32, divisor",
    ),
    "a code that is counted as another": (
        *("compare.cu", "(k & 8 ? bits[3] : ~bits[3])", "(k & 8 ? bits[3] : bits[3])"),
        "count_codes",
    ),
    "a zero point with the wrong sign": (
        *("decode.cu", "__fadd_rn(middle, zero_points[block])", "middle - zero_points[block]"),
        "decode_int4",
    ),
    "the scale of another row": (
        *("grid.cuh", "(i64)((u64)(first_row + row) / height) * across + block}", "block}"),
        "decode_fp8",
    ),
    "a block's amax that is another's": (
        *("fp8.cu", "if (m > amax_bits[block]) atomicMax", "if (m > *amax_bits) atomicMax"),
        "grid_amax_bf16",
    ),
    "FP8 by a reciprocal": (
        *("fp8.cu", "e4m3_encode_signed(v[i] / step)", "e4m3_encode_signed(v[i] * (1 / step))"),
        "quantize_fp8_bf16",
    ),
    "costs in another order": (
        *("fp8.cu", "half = COST_LANES / 2; half; half /= 2", "half = 1; half < 8; half *= 2"),
        "row_costs_bf16",
    ),
    "rows of costs from the last on": (
        "fp8.cu",
        "row_costs[row * across + block]",
        "row_costs[(end + begin - 1 - row) * across + block]",
        "row_costs_bf16",
    ),
    "a tail's values left out": (
        *("compare.cu", "(n % GROUP_LANES || !(is_coarse && is_held))", "!(is_coarse && is_held)"),
        "compare_values_bf16",
    ),
    "every second column, the wrong one": (
        *("decode.cu", "keep = odd ? 0x7632u", "keep = !odd ? 0x7632u"),
        "transpose_2",
    ),
    "a block scale that is not kept": (
        *("descend.cu", "if (lane == 0) room.scales[first / BLOCK] = (u8)best,", "if (lane == 0)"),
        "descend_nvfp4",
    ),
    "a cost in float32": ("descend.cu", "double term = (", "float term = (", "descend_mxfp4"),
    "sums in another order": (
        "compare.cu",
        "total += __shfl_xor_sync(ALL_LANES, total, 2);",
        "total += __shfl_xor_sync(ALL_LANES, total, 3);",
        "compare_nvfp4_bf16",
    ),
}
IN_GATE = {
    "a reciprocal without its correction",
    "a step in the wrong order",
    "a zero point with the wrong sign",
    "costs in another order",
    "a block scale that is not kept",
}


@pytest.fixture
def machine(
    simt_libraries: dict[str, ctypes.CDLL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """One imaginary GPU that was never used before, and a compiler that takes no time."""
    made = Machine(dict(simt_libraries))
    monkeypatch.setattr(cubins, "compile_cubin", lambda *_: (ELF, ""))
    monkeypatch.setattr(self_check, "DRIVER", tmp_path / "driver")
    made.install(monkeypatch, tmp_path / "cache", is_checked=True)
    return made


def break_kernels(machine: Machine, tmp_path: Path, file: str, before: str, after: str) -> None:
    """Let the GPU run kernels with one wrong line."""
    kernels = Path(shutil.copytree(KERNELS, tmp_path / "kernels"))
    text = (kernels / file).read_text()
    assert text.count(before) == 1
    (kernels / file).write_text(text.replace(before, after))
    included = ["decode"] if file == "grid.cuh" else ["quantize", "search", "dequantize"]
    stems = [Path(file).stem] if file.endswith(".cu") else included
    for stem in stems:
        machine.libraries[stem] = compile_for_host(kernels / f"{stem}.cu", tmp_path)


def test_right_kernels_pass_and_are_not_checked_twice(machine, tmp_path, monkeypatch):
    assert open_backend("cuda").name == "cuda:0"
    assert {name for _, name in machine.launches} == ENTRIES
    count = len(machine.launches)
    assert open_backend("auto").name == open_backend("cuda:0").name == "cuda:0"
    assert gpu_choice.unused("auto") == []
    assert len(machine.launches) == count
    monkeypatch.setattr(self_check, "find_difference", lambda gpu: "anew")
    changes = {
        "another driver": lambda: (tmp_path / "driver").write_text("NVRM version: 580.1"),
        "another version": lambda: monkeypatch.setattr(self_check, "__version__", "9.9"),
        "another GPU": lambda: monkeypatch.setattr(
            machine, "properties", lambda n: {**Machine.properties(machine, n), "name": b"Other"}
        ),
    }
    for change in changes.values():
        change()
        with pytest.raises(DeviceError, match="anew"):
            open_backend("cuda")


@pytest.mark.parametrize(
    "case", [pytest.param(k, marks=() if k in IN_GATE else pytest.mark.slow) for k in BROKEN]
)
@pytest.mark.sweep(3)
def test_a_wrong_kernel_is_named(machine, tmp_path, case):
    file, before, after, kernel = BROKEN[case]
    break_kernels(machine, tmp_path, file, before, after)
    with pytest.raises(DeviceError) as caught:
        open_backend("cuda")
    assert caught.value.code == "device-differs"
    assert "cuda:0 (Imaginary GPU) gives other bytes than the CPU: " in caught.value.message
    assert kernel in caught.value.message
    assert " byte 0x" in caught.value.message


def test_auto_warns_and_takes_the_cpu(machine, tmp_path, monkeypatch):
    for name in ("LEAST_WEIGHTS", "BEGIN_SECONDS", "COPY_SECONDS", "LINK_SECONDS"):
        monkeypatch.setattr(device_choice, name, 0)  # any GPU wins
    _, before, after, _ = BROKEN["a reciprocal without its correction"]
    break_kernels(machine, tmp_path, "codes.cuh", before, after)
    source = write_llama(tmp_path / "source")
    options = ("--format", "nvfp4", "--scale-rule", "amax", "--json")
    outcomes = {
        device: run("quantize", source, *options, "--device", device, "-o", tmp_path / device)
        for device in ("auto", "cuda", "cpu")
    }
    assert (outcomes["auto"].code, outcomes["auto"].json["device"]) == (0, "cpu")
    assert outcomes["auto"].json["digest"] == outcomes["cpu"].json["digest"]
    assert "the CPU is used: cuda:0 (Imaginary GPU) gives other bytes" in outcomes["auto"].err
    assert (outcomes["cuda"].code, outcomes["cuda"].json["error"]["code"]) == (2, "device-differs")
    # It is known now, without a launch; and the next process compiles the kernels anew.
    count = len(machine.launches)
    with pytest.raises(DeviceError, match="codes of block") as caught:
        open_backend("cuda")
    assert len(machine.launches) == count
    place = Path(caught.value.next_step.rpartition(" ")[2])
    assert place.parent == cubins.cache_folder()
    found = run("doctor", "--json").json
    assert (found["device"], found["gpus_refused"][0]["device"]) == ("cpu", "cuda:0")
    place.unlink()
    machine.libraries.clear()
    with pytest.raises(KeyError):  # it is checked again
        open_backend("cuda")


def test_a_difference_makes_the_next_process_compile_anew(machine, monkeypatch):
    monkeypatch.setattr(self_check, "find_difference", lambda gpu: "a difference")
    with pytest.raises(DeviceError, match="a difference"):
        open_backend("cuda")
    assert not list(cubins.cache_folder().glob("*.cubin"))
    with pytest.raises(DeviceError, match="a difference"):
        open_backend("cuda")
    assert list(cubins.cache_folder().glob("*.cubin"))  # the same binaries: they stay


def test_a_gpu_that_fails_meanwhile_is_left_aside_by_auto(machine, monkeypatch):
    machine.is_lost = True
    with pytest.raises(DeviceError, match="the GPU is lost") as caught:
        open_backend("cuda")
    assert caught.value.code == "device-failed"
    assert open_backend("auto").name == "cpu"
    assert "the GPU is lost" in gpu_choice.unused("auto")[0]
    assert not list(cubins.cache_folder().glob("check-*"))  # no verdict of that


def test_a_compiler_that_fails_is_told(machine, monkeypatch):
    from cupy_backends.cuda.libs import nvrtc

    def fail(program: int, options: tuple[str, ...]) -> None:
        raise nvrtc.NVRTCError(7)

    log = "nvrtc: error: failed to open libnvrtc-builtins.so.12.9.\n  Make sure it is installed."
    monkeypatch.setattr(cubins, "compile_cubin", COMPILE)
    monkeypatch.setattr(nvrtc, "compileProgram", fail)
    monkeypatch.setattr(nvrtc, "getProgramLog", lambda program: log)
    with pytest.raises(
        DeviceError, match=r"compile quantize\.cu for sm_90: nvrtc: error: failed"
    ) as caught:
        open_backend("cuda")
    assert caught.value.code == "no-kernel"
    assert open_backend("auto").name == "cpu"
    assert "the CPU is used: NVRTC" in gpu_choice.unused("auto")[0]
