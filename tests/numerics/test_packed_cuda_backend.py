"""Packed sources on an imaginary GPU: decoded there, with the CPU's bytes.

FP8, integers and transposed stacks; simt_gpu.py stands in for CuPy, and kernels run on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adversarial import generator
from checkpoints import LAYER, LLAMA, Tensor, bf16, run, weight, write_single

from fp4convert.checkpoint.encodings import floats
from fp4convert.makers.methods import returning

Tensors = dict[str, Tensor]
SHAPES = {
    f"{LAYER}.self_attn.q_proj": (80, 96),
    f"{LAYER}.self_attn.k_proj": (37, 96),
    f"{LAYER}.self_attn.v_proj": (37, 96),
    f"{LAYER}.mlp.gate_proj": (200, 96),
    f"{LAYER}.mlp.up_proj": (200, 96),
    f"{LAYER}.mlp.down_proj": (96, 224),
}
BLOCK = (32, 64)
EXPERTS = f"{LAYER}.mlp.experts"


def positive(*shape: int) -> np.ndarray:
    return np.exp2(generator(70, *shape).uniform(-14, -4, shape)).astype(np.float32)


def fp8(scales_of: Callable[[tuple[int, int]], tuple[str, np.ndarray]]) -> Tensors:
    """Any finite codes, and scales of that name."""
    tensors: Tensors = {"lm_head.weight": weight(1)}
    for number, (module, shape) in enumerate(SHAPES.items()):
        codes = generator(71, number).integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 1
        ending, scales = scales_of(shape)
        tensors[f"{module}.weight"] = ("F8_E4M3", shape, codes.tobytes())
        tensors[module + ending] = ("F32", scales.shape, scales.tobytes())
    return tensors


def blocks(shape: tuple[int, int]) -> tuple[str, np.ndarray]:
    counts = [-(-size // step) for size, step in zip(shape, BLOCK, strict=True)]
    return ".weight_scale_inv", positive(*counts)


def integers(bits: int, has_zero_points: bool) -> Tensors:
    """Groups of 32 columns under one scale, zero points packed down the columns."""
    tensors: Tensors = {"lm_head.weight": weight(1)}
    for number, (module, (rows, columns)) in enumerate(SHAPES.items()):
        rng, groups, each = generator(72, number), columns // 32, 32 // bits
        items = rng.integers(0, 1 << 32, (rows, columns // each), np.uint32)
        zeros = rng.integers(0, 1 << 32, (-(-rows // each), groups), np.uint32)
        sizes = np.array([rows, columns])
        tensors[f"{module}.weight_packed"] = ("I32", items.shape, items.tobytes())
        tensors[f"{module}.weight_scale"] = (
            "F32",
            (rows, groups),
            positive(rows, groups).tobytes(),
        )
        tensors[f"{module}.weight_shape"] = ("I64", (2,), sizes.tobytes())
        if has_zero_points:
            tensors[f"{module}.weight_zero_point"] = ("I32", zeros.shape, zeros.tobytes())
    return tensors


def integers_record(bits: int, has_zero_points: bool) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "symmetric": not has_zero_points}
    group = {"targets": ["Linear"], "weights": {**weights, "strategy": "group", "group_size": 32}}
    record = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**record, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def stack(dtype: str) -> Tensors:
    """Three experts, (experts, in, out): gate and up share a tensor."""
    tensors: Tensors = {"lm_head.weight": weight(1)}
    for name, shape in (("gate_up_proj", (3, 96, 2 * 112)), ("down_proj", (3, 112, 96))):
        data = bf16(*shape, seed=len(name))
        if dtype == "F32":
            data = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()
        tensors[f"{EXPERTS}.{name}"] = (dtype, shape, data)
    return tensors


FP8_RECORD: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [*BLOCK]}
STACK = ("--stack-order", "in_out", "--stack-rows")
CASES = {  # tensors, record, options, the kernel that decodes
    "DeepSeek's blocks": (lambda: fp8(blocks), FP8_RECORD, (), "decode_fp8"),
    "fp8 of the whole": (
        *(lambda: fp8(lambda _: (".weight_scale", positive(1))), FP8_RECORD, ()),
        "decode_fp8",
    ),
    "fp8 of rows": (
        *(lambda: fp8(lambda shape: (".weight_scale", positive(shape[0], 1))), FP8_RECORD, ()),
        "decode_fp8",
    ),
    "int4": (lambda: integers(4, False), integers_record(4, False), (), "decode_int4"),
    "int4, zero points": (lambda: integers(4, True), integers_record(4, True), (), "decode_int4"),
    "int8, zero points": (lambda: integers(8, True), integers_record(8, True), (), "decode_int8"),
    "gpt-oss's stacks": (lambda: stack("BF16"), None, (*STACK, "interleaved"), "transpose_2"),
    "stacks of halves": (lambda: stack("BF16"), None, (*STACK, "concatenated"), "transpose_2"),
    "stacks of fp32": (lambda: stack("F32"), None, (*STACK, "concatenated"), "transpose_4"),
}


def written(folder: Path, tensors: Tensors, record: dict[str, object] | None) -> Path:
    config = {**LLAMA, "hidden_size": 96}
    return write_single(
        folder, tensors, {**config, "quantization_config": record} if record else config
    )


@pytest.mark.parametrize("free_nbytes", [0, 1 << 40])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(4)
def test_the_same_artifact_as_on_the_cpu(machine, case, free_nbytes, tmp_path):
    make, record, options, kernel = CASES[case]
    machine.free_nbytes = free_nbytes  # for panels that stay between the passes
    source = written(tmp_path / "source", make(), record)
    options = (*options, "--format", "nvfp4", "--scale-rule", "amax", "--json")
    expected, found = (
        run("quantize", source, *options, "--device", device, "-o", tmp_path / device).json
        for device in ("cpu", "cuda")
    )
    assert found["digest"] == expected["digest"]
    assert found["tensors"] == expected["tensors"]
    names = {name for _, name in machine.launches}
    assert {name for name in names if name.startswith(("decode", "transpose"))} == {kernel}


@pytest.mark.parametrize("free_nbytes", [0, 1 << 40])
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])  # divisors, multipliers
def test_four_bits_become_another_four_bits_as_on_the_cpu(machine, dialect, free_nbytes, tmp_path):
    machine.free_nbytes = free_nbytes
    tensors = {f"{module}.weight": weight(3, *shape) for module, shape in SHAPES.items()}
    source, four = written(tmp_path / "source", tensors, None), tmp_path / "four"
    assert run("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", four).code == 0
    words = ("quantize", four, "--format", "mxfp4", "--scale-rule", "even", "--json")
    expected, found = (
        run(*words, "--device", device, "-o", tmp_path / device).json for device in ("cpu", "cuda")
    )
    assert expected["tensors"]["quantized"] == len(SHAPES)
    assert found["digest"] == expected["digest"]
    decoded = [name for _, name in machine.launches if name.startswith("dequantize")]
    assert set(decoded) == {"dequantize_nvfp4_fp32"}
    assert len(decoded) >= len(SHAPES)


def test_what_the_cpu_decodes_for_a_gpu_is_told_in_one_line(machine, tmp_path):
    """FP8 of type E5M2, fp32 whose members take turns, and what goes through FP8 first."""
    tensors = fp8(blocks)
    for name, (dtype, shape, data) in tensors.items():
        if dtype == "F8_E4M3":  # any byte, but no NaN or Inf
            codes = np.frombuffer(data, np.uint8) & 0xBB
            tensors[name] = ("F8_E5M2", shape, codes.tobytes())
    turns = (*STACK, "interleaved")
    made = {
        "e5m2": (written(tmp_path / "e5m2", tensors, FP8_RECORD), (), "6 of 6 modules for it (fp8"),
        "turns": (written(tmp_path / "turns", stack("F32"), None), turns, "6 of 9 modules for it"),
        "via": (
            *(written(tmp_path / "via", stack("BF16"), None), (*turns, "--via", "fp8")),
            "9 of 9 modules for it (bf16)",
        ),
        "none": (written(tmp_path / "none", stack("BF16"), None), turns, ""),
    }
    for name, (source, options, said) in made.items():
        words = ("quantize", source, *options, "--format", "nvfp4", "--scale-rule", "amax")
        outcomes = [
            run(*words, "--json", "--device", device, "-o", tmp_path / f"{name}-{device}")
            for device in ("cpu", "cuda")
        ]
        assert outcomes[0].json["digest"] == outcomes[1].json["digest"]
        told = [outcome.err.replace("\n", " ").count("the CPU decodes") for outcome in outcomes]
        assert told == [0, int(bool(said))], name
        assert said in outcomes[1].err.replace("\n", " ")


def test_rows_that_take_turns_are_copied_from_where_they_lie(machine, monkeypatch, tmp_path):
    """Each once, into the memory that is uploaded; never put into rows of their own before."""
    tensors = {
        "lm_head.weight": weight(1),
        f"{EXPERTS}.gate_up_proj": ("BF16", (3, 2 * 112, 96), bf16(3, 2 * 112, 96)),
    }
    source = written(tmp_path / "source", tensors, None)
    words = ("quantize", source, "--stack-order", "out_in", "--stack-rows", "interleaved")
    words = (*words, "--format", "mxfp4", "--scale-rule", "even", "--json")
    expected = run(*words, "--device", "cpu", "-o", tmp_path / "cpu").json["digest"]
    monkeypatch.setattr(floats._Rows, "rows", None)
    # whose glance at a row or two tells weights of fake quantization
    monkeypatch.setattr(returning, "are_exact", lambda members, fmt: False)
    found = run(*words, "--device", "cuda", "-o", tmp_path / "cuda")
    assert (found.code, found.json["digest"]) == (0, expected), found.err
    assert found.json["tensors"]["quantized"] == 6


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_refused_as_on_the_cpu(machine, code, tmp_path):
    tensors, name = fp8(blocks), f"{LAYER}.mlp.down_proj.weight"
    codes = bytearray(tensors[name][2])
    codes[-5] = code
    tensors[name] = (*tensors[name][:2], bytes(codes))
    source = written(tmp_path / "source", tensors, FP8_RECORD)
    errors = [
        run(
            "quantize",
            source,
            "--format",
            "nvfp4",
            "--json",
            "--device",
            device,
            "-o",
            tmp_path / device,
        )
        for device in ("cpu", "cuda")
    ]
    assert [error.code for error in errors] == [2, 2]
    assert errors[0].json["error"]["message"] == errors[1].json["error"]["message"]
    assert "decode_fp8" in {name for _, name in machine.launches}


def test_interleaved_stacks_of_fp32_are_turned_on_the_cpu(machine, tmp_path):
    """Both members would be uploaded with each: eight bytes for an element."""
    source = written(tmp_path / "source", stack("F32"), None)
    options = (*STACK, "interleaved", "--format", "nvfp4", "--scale-rule", "amax", "--json")
    expected, found = (
        run("quantize", source, *options, "--device", device, "-o", tmp_path / device).json
        for device in ("cpu", "cuda")
    )
    assert found["digest"] == expected["digest"]
    assert {name for _, name in machine.launches} & {"transpose_2", "transpose_4"} == {
        "transpose_4"
    }
