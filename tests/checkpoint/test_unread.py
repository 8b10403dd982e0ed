"""unread.py: scales of unknown names, and codes that no module takes, are refused by every command
that would carry them along; inspect names them.

Byte 0x38 is 1.0 in E4M3, 0x3F00 is 0.5 and 0x3F80 is 1.0 in bfloat16.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA, Outcome, Tensor, read_folder, run, weight, write_single
from gguf_donors import llamas, model, write_donor
from spellings import module_of, records, tensors_of

Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
EXPERTS = "model.layers.0.mlp.experts"
SHAPE = (32, 64)
CODES: Tensor = ("F8_E4M3", SHAPE, b"\x38" * 2048)
HALF: Tensor = ("BF16", (), b"\x00\x3f")
FLOAT: Tensor = ("F32", (1,), struct.pack("<f", 0.5))
RECORD = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}


def refused(outcome: Outcome, code: str, *words: str) -> None:
    assert outcome.code == 2, outcome.out + outcome.err
    error = outcome.json["error"]
    assert error["code"] == code, error
    assert all(word in error["message"] for word in words), error


@pytest.mark.parametrize("config", [LLAMA, RECORD], ids=["bare", "record"])
@pytest.mark.parametrize(
    ("ending", "tensor"),
    [
        (".xscale_weight", HALF),  # of Mistral
        (".weight_qscale", FLOAT),
        (".scales_x", ("F32", (32,), struct.pack("<f", 0.5) * 32)),
        (".xscale_act", HALF),
        (".weight.scale", FLOAT),
        ("_scale", FLOAT),
        (".factor", ("F64", (), struct.pack("<d", 0.5))),
        (".weight_scales", ("U8", (32, 2), b"\x7e" * 64)),  # E8M0
    ],
)
def test_fp8_beside_a_float_of_an_unknown_name_is_refused(
    ending: str, tensor: Tensor, config: dict[str, object], tmp_path: Path
) -> None:
    names = (f"{Q}.weight", f"{Q}{ending}")
    tensors = {names[0]: CODES, names[1]: tensor, f"{OUT}.weight": weight()}
    folder = write_single(tmp_path / "fp8", tensors, config)
    floats = write_single(tmp_path / "m", {f"{Q}.weight": weight(), f"{OUT}.weight": weight()})
    four, out = tmp_path / "four", tmp_path / "out"
    other = tmp_path / "other"
    assert run("quantize", floats, "--format", "nvfp4", "-o", four, "-q").code == 0
    assert run("quantize", floats, "--format", "mxfp4", "-o", other, "-q").code == 0
    for words in (
        ("quantize", folder, "--format", "nvfp4", "-o", out),
        ("quantize", folder, "--format", "nvfp4", "--dry-run"),
        *([("dequantize", folder, "-o", out)] if config is RECORD else []),
        ("analyze", folder),
        ("verify", four, "--source", folder),
        ("compare", four, other, "--source", folder),
    ):
        refused(run(*words, "--json"), "scales-unread", *names)
    assert not out.exists()


@pytest.mark.parametrize("config", [LLAMA, RECORD], ids=["bare", "record"])
@pytest.mark.parametrize("ending", [".xscale_weight", ".weight_qscale", "_scale", ".weight.scale"])
def test_a_second_scale_of_fp8_is_refused(
    ending: str, config: dict[str, object], tmp_path: Path
) -> None:
    scaled = {f"{Q}.weight": CODES, f"{Q}.weight_scale": FLOAT, f"{Q}{ending}": HALF}
    folder = write_single(tmp_path / "m", {**scaled, f"{OUT}.weight": weight()}, config)
    words = ("--format", "nvfp4", "-o", tmp_path / "out", "--json")
    refused(run("quantize", folder, *words), "scales-unread", f"{Q}.weight", f"{Q}{ending}")


def test_a_second_scale_of_recorded_fp8_is_refused(tmp_path: Path) -> None:
    source = write_single(tmp_path / "m", {f"{Q}.weight": weight(), f"{OUT}.weight": weight()})
    folder, out = tmp_path / "fp8", tmp_path / "out"
    assert run("quantize", source, "--format", "fp8", "-o", folder, "-q").code == 0
    config = json.loads((folder / "config.json").read_text())
    tensors = {**read_folder(folder), f"{Q}.xscale_weight": HALF}
    made = write_single(tmp_path / "two", tensors, config)
    refused(run("dequantize", made, "-o", out, "--json"), "scales-unread", f"{Q}.xscale_weight")


def test_fp8_with_a_scale_is_read_beside_what_is_no_other_scale_of_it(tmp_path: Path) -> None:
    endings = [".input_scale", ".act_scale", ".xscale_act", ".k_scale", ".kv_cache_scale"]
    endings += [".q_output_scale", ".input_scale_ub", ".embed_scale", ".amax", ".gamma", ".factor"]
    beside: dict[str, Tensor] = {Q + ending: FLOAT for ending in endings}
    beside |= {f"{Q}.weight_scale_shape": ("I64", (2,), bytes(16)), f"{Q}_norm.scale": FLOAT}
    tensors = {f"{Q}.weight": CODES, f"{Q}.weight_scale_inv": FLOAT, **beside}
    folder = write_single(tmp_path / "m", {**tensors, f"{OUT}.weight": weight()})
    done = run("quantize", folder, "--format", "nvfp4", "-o", tmp_path / "out", "-q")
    assert done.code == 0, done.err


def test_a_scale_that_is_renamed_as_the_next_step_says_is_applied(tmp_path: Path) -> None:
    tensors = {f"{Q}.weight": CODES, f"{Q}.xscale_weight": HALF, f"{Q}.xscale_act": HALF}
    folder = write_single(tmp_path / "m", tensors, RECORD)
    error = run("dequantize", folder, "-o", tmp_path / "out", "--json").json["error"]
    assert f"rename it to {Q}.weight_scale, " in error["next"]
    assert f"(of activations: {Q}.input_scale)" in error["next"]
    named = {f"{Q}.weight": CODES, f"{Q}.weight_scale": HALF, f"{Q}.input_scale": HALF}
    folder = write_single(tmp_path / "named", named, RECORD)
    assert run("dequantize", folder, "-o", tmp_path / "out", "-q").code == 0
    assert read_folder(tmp_path / "out") == {f"{Q}.weight": ("BF16", SHAPE, b"\x00\x3f" * 2048)}


def test_fp8_without_scales_is_read_beside_what_multiplies_no_weight(tmp_path: Path) -> None:
    """Files in which all is FP8 have biases and norms of it, too."""
    beside: dict[str, Tensor] = {
        f"{Q}.bias": ("F8_E4M3", (32,), b"\x38" * 32),
        f"{Q}.e_score_correction_bias": ("F32", (32,), bytes(128)),
        f"{Q}.input_scale": FLOAT,
        f"{Q}.k_scale": FLOAT,
        f"{Q}.norm.scale": ("F8_E4M3", (64,), b"\x38" * 64),
        f"{Q}_norm.scale": FLOAT,
        f"{Q}.weight_shape": ("I64", (2,), struct.pack("<qq", *SHAPE)),
        "model.layers.0.self_attn.q_scale": FLOAT,
        "model.layers.0.layer_scale": FLOAT,
        "scaled_fp8": ("F8_E4M3", (0,), b""),
        "vae.conv.weight": ("F8_E4M3", (2, 2, 3, 3), b"\x38" * 36),
        "text.positional_embedding": CODES,
    }
    tensors = {f"{Q}.weight": CODES, f"{OUT}.weight": CODES, **beside}
    folder = write_single(tmp_path / "m", tensors)
    words = ("--format", "nvfp4", "--exclude", "*q_proj", "-o", tmp_path / "out", "-q")
    done = run("quantize", folder, *words)
    assert done.code == 0, done.err
    assert read_folder(tmp_path / "out")[f"{Q}.weight"] == ("BF16", SHAPE, b"\x80\x3f" * 2048)


def artifact(folder: Path, dialect: str, more: dict[str, Tensor]) -> Path:
    """A foreign NVFP4 artifact of one module, and tensors beside it."""
    modules = {Q: module_of(1, "nvfp4", SHAPE, 0.5)}
    config = records(dialect, "nvfp4", modules, 16)["config.json"]
    assert isinstance(config, dict)
    return write_single(folder, tensors_of(dialect, "nvfp4", modules) | more, config)


def stacks(ending: str) -> dict[str, Tensor]:
    """Experts as ModelOpt stacks them for gpt-oss and Llama 4 (""), or Step 3.7 (".weight")."""
    stack = f"{EXPERTS}.down_proj"
    scales = f"{stack}{ending}_scale" if ending else f"{stack}_weight_scale"
    codes, blocks = ((2, 64, 32), (2, 64, 4)) if ending else ((2, 32, 64), (2, 4, 64))
    return {
        f"{stack}{ending}": ("U8", codes, bytes(4096)),
        scales: ("F8_E4M3", blocks, b"\x38" * 512),
        f"{scales}_2": ("F32", (2,), bytes(8)),
        f"{stack}.input_scale" if ending else f"{stack}_input_scale": FLOAT,
    }


def found_by_inspect(folder: Path) -> tuple[list[tuple[str, str]], dict[str, bool | None]]:
    document = run("inspect", folder, "--json").json
    findings = [(each["level"], each["code"]) for each in document["findings"]]
    return findings, {each["engine"]: each["loads"] for each in document["engines"]}


@pytest.mark.parametrize("dialect", ["compressed-tensors", "quark"])
def test_stacks_of_packed_experts_are_named_and_never_carried(dialect: str, tmp_path: Path) -> None:
    folder, out = artifact(tmp_path / "m", dialect, stacks("")), tmp_path / "out"
    findings, loads = found_by_inspect(folder)
    assert [each for each in findings if each[0] == "error"] == [("error", "stack-unread")]
    assert not any(loads.values())
    name = f"{EXPERTS}.down_proj"
    transcode = run("transcode", folder, "--dialect", "modelopt", "-o", out, "--json")
    refused(transcode, "mixed-modules", f"the first {name!r}")
    refused(run("dequantize", folder, "-o", out, "--json"), "already-quantized", repr(name))
    quantize = run("quantize", folder, "--format", "mxfp4", "-o", out, "--json")
    refused(quantize, "already-quantized", repr(name))
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["U8", "I8", "F8_E4M3"])
def test_a_matrix_of_bytes_under_a_record_is_named_and_never_carried(
    dtype: str, tmp_path: Path
) -> None:
    table = f"{EXPERTS}.table"
    folder = artifact(tmp_path / "m", "compressed-tensors", {table: (dtype, (4, 8), bytes(32))})
    assert ("warning", "stack-unread") in found_by_inspect(folder)[0]
    out = tmp_path / "out"
    transcode = run("transcode", folder, "--dialect", "modelopt", "-o", out, "--json")
    refused(transcode, "mixed-modules", repr(table))
    refused(run("dequantize", folder, "-o", out, "--json"), "already-quantized", repr(table))
    assert not out.exists()


FLOATS: Tensor = ("F32", (2, 32, 1), bytes(256))


@pytest.mark.parametrize(
    ("codes", "scales", "dtype", "shape"),
    [
        ("_packed", "_scale", "I32", (2, 32, 8)),
        ("_qweight", "_scales", "I32", (2, 32, 8)),
        (".codes", ".scales", "I16", (2, 32, 16)),  # AQLM
        (".q4", ".q4_scale", "I32", (2, 32, 8)),
        (".weight", ".scales", "U32", (2, 32, 8)),
        ("", ".absmax", "U8", (2048,)),  # bitsandbytes
        ("", ".absmax", "U8", (2048, 1)),
    ],
)
def test_codes_of_any_width_beside_a_scale_are_named_and_never_carried(
    codes: str, scales: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    name = f"{EXPERTS}.down_proj{codes}"
    stack: Tensor = (dtype, shape, bytes(2048))
    more = {name: stack, f"{EXPERTS}.down_proj{scales}": FLOATS}
    folder, out = artifact(tmp_path / "m", "modelopt", more), tmp_path / "out"
    assert "stack-unread" in [code for _, code in found_by_inspect(folder)[0]]
    transcode = run("transcode", folder, "--dialect", "compressed-tensors", "-o", out, "--json")
    refused(transcode, "mixed-modules", repr(name))
    refused(run("dequantize", folder, "-o", out, "--json"), "already-quantized", repr(name))
    assert not out.exists()


ATTENTION = Q.removesuffix(".q_proj")
INTEGERS: dict[str, Tensor] = {
    f"{ATTENTION}.relative_position_index": ("I64", (4, 4), bytes(128)),
    f"{ATTENTION}.logit_scale": FLOAT,
    f"{ATTENTION}.scale": FLOAT,
    f"{ATTENTION}.offsets": ("I32", (4, 4), bytes(64)),
    f"{Q}.tid2eid": ("I32", (4, 4), bytes(64)),  # beside scales of the weight
    "model.position_ids": ("I32", (1, 4), bytes(16)),
    "model.position_scale": FLOAT,
    "spiece_model": ("U8", (9,), bytes(9)),
    "spiece_scale": FLOAT,
}
MASKS: dict[str, Tensor] = {  # GPT-2 and GPT-J keep causal masks; ComfyUI a tokenizer
    "h.0.attn.bias": ("U8", (1, 1, 4, 4), bytes(16)),
    "h.0.attn.masked_bias": ("U8", (1, 1, 4, 4), bytes(16)),
    "h.0.attn.causal_mask": ("I8", (4, 4), bytes(16)),
    "spiece_model": ("U8", (9,), bytes(9)),
    "position_ids": ("I64", (1, 4), bytes(32)),
}


@pytest.mark.parametrize("more", [INTEGERS, MASKS], ids=["integers", "masks"])
def test_integers_without_a_scale_of_their_own_are_carried(
    more: dict[str, Tensor], tmp_path: Path
) -> None:
    folder = artifact(tmp_path / "m", "compressed-tensors", more)
    assert "stack-unread" not in [code for _, code in found_by_inspect(folder)[0]]
    for words in (("transcode", folder, "--dialect", "modelopt"), ("dequantize", folder)):
        out = tmp_path / str(words[0])
        done = run(*words, "-o", out, "-q")
        assert done.code == 0, done.err
        assert more.items() <= read_folder(out).items()


def test_bytes_under_scales_are_refused_without_a_record(tmp_path: Path) -> None:
    """As they stand they are some table, which quantize carries."""
    stack = {f"{EXPERTS}.down_proj": ("I8", (2, 32, 64), bytes(4096)), f"{OUT}.weight": weight()}
    quantize = ("quantize", "--format", "nvfp4", "-o")
    folder = write_single(tmp_path / "bare", stack)
    assert run(*quantize, tmp_path / "four", folder, "-q").code == 0
    scales: dict[str, Tensor] = {f"{EXPERTS}.down_proj_scale": ("F32", (2,), bytes(8))}
    folder = write_single(tmp_path / "scaled", stack | scales)
    name = f"{EXPERTS}.down_proj"
    refused(run(*quantize, tmp_path / "x", folder, "--json"), "already-quantized", repr(name))


IN_GGUF = "blk.0.attn_q"


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "Q8_0"])
@pytest.mark.parametrize(
    "name",
    [
        *(".weight.scale", ".weight_scale", ".scales", ".scale_2", "_scale", ".weight.lora_a"),
        *(".s", ".mult", ".alpha", ".Scale", "_Scale", ".scale.weight"),
    ],
)
def test_unknown_names_beside_quantized_weights_of_gguf_are_refused(
    name: str, kind: str, tmp_path: Path
) -> None:
    arrays = {**llamas(model()), IN_GGUF + name: np.full(1, 0.5, np.float32)}
    donor = write_donor(tmp_path / "d.gguf", arrays, kinds={f"{IN_GGUF}.weight": kind})
    out = tmp_path / "out"
    quantize = ("quantize", donor, "--format", "nvfp4", "--dialect", "gguf")
    for words in (quantize, ("dequantize", donor)):
        outcome = run(*words, "-o", out, "--json")
        refused(outcome, "unsaid-tensors", repr(IN_GGUF + name), repr(f"{IN_GGUF}.weight"))
    assert not out.exists()
    if kind != "Q8_0":  # which is no four-bit artifact
        findings, loads = found_by_inspect(donor)
        assert ("error", "tensor-unread") in findings
        assert loads["llama.cpp"] is False


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "Q8_0"])
@pytest.mark.parametrize("name", [".scale", ".input_scale", ".bias", ".input_max", "_norm.weight"])
def test_names_that_llama_cpp_has_beside_weights_are_carried(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The limits are those of Gemma 4's towers (clip.cpp)."""
    arrays = {**llamas(model()), IN_GGUF + name: np.full(1, 0.5, np.float32)}
    donor = write_donor(tmp_path / "d.gguf", arrays, kinds={f"{IN_GGUF}.weight": kind})
    done = run("dequantize", donor, "-o", tmp_path / "out", "-q")
    assert done.code == 0, done.err
