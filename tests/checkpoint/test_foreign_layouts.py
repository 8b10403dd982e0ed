"""Layouts of other makers are read by every command: values by a decoder typed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import done, run
from safetensors.torch import load_file, save_file
from tiny_models import fp4convert, fp4convert_json

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Layout = Callable[[], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
"""Makes the tensors, config.json and the values of each tensor of `dequantize --dtype fp32`."""
NVFP4 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def codes(*shape: int) -> Any:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def floats8(*shape: int) -> Any:
    return (torch.rand(shape) + 0.5).to(torch.float8_e4m3fn)


def e2m1(packed: Any, scales: Any) -> Any:
    """Two codes a byte, the first in the low bits; scales float32, each of as many columns."""
    values = torch.stack((E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]), -1).flatten(-2)
    return values * scales.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)


def stacked() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Step 3.7: a global scale for each expert."""
    stem = "model.layers.0.moe.down_proj"
    packed, scales, of_all = codes(3, 96, 32), floats8(3, 96, 4), torch.rand(3) + 0.5
    tensors = {f"{stem}.weight": packed, f"{stem}.weight_scale": scales}
    tensors[f"{stem}.weight_scale_2"] = of_all
    config = {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5"}
    values = {f"{stem}.weight": e2m1(packed, scales.float() * of_all[:, None, None])}
    return tensors, {**config, "quantization_config": NVFP4}, values


def across(parent: str, model: str, has_bias: bool) -> tuple[Any, Any, Any]:
    """x @ W: codes [experts, columns / 2, rows]; the values stay so."""
    tensors, values = {}, {}
    for name, rows, columns in (("gate_up_proj", 64, 96), ("down_proj", 96, 32)):
        stem = f"{parent}.{name}"
        packed, scales, one = codes(2, rows, columns // 2), floats8(2, rows, columns // 16), 0.75
        turned = scales.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)
        tensors |= {stem: packed.mT, f"{stem}_weight_scale": turned}
        tensors[f"{stem}_weight_scale_2"] = torch.tensor(one)
        values[stem] = e2m1(packed, scales.float() * one).mT
        if has_bias:
            values[f"{stem}_bias"] = tensors[f"{stem}_bias"] = torch.rand(2, rows)
    config = {"model_type": model, "num_local_experts": 2, "hidden_size": 96}
    return tensors, {**config, "quantization_config": NVFP4}, values


def llama4() -> tuple[Any, Any, Any]:
    return across("language_model.model.layers.7.feed_forward.experts", "llama4", False)


def gptoss() -> tuple[Any, Any, Any]:
    return across("model.layers.0.mlp.experts", "gpt_oss", True)


def mistral() -> tuple[Any, Any, Any]:
    """No config.json; a float32 scale of one element."""
    matrix, one = floats8(48, 64), torch.tensor([0.03])
    tensors = {"layers.0.attention.wo.weight": matrix, "layers.0.attention.wo.qscale_weight": one}
    tensors["layers.0.attention.wo.qscale_act"] = torch.tensor(0.5)
    tensors["layers.0.attention.k_fake_quantizer.qscale_act"] = torch.tensor(0.5)
    return tensors, {}, {"layers.0.attention.wo.weight": matrix.float() * one}


def mxfp4_experts(ending: str, dtype: Any, record: dict[str, str]) -> tuple[Any, Any, Any]:
    """E8M0 exponents of 32 columns beside FP8 in blocks of 128x128."""
    expert, other = "model.layers.1.mlp.experts.5.up_proj", "model.layers.0.self_attn.o_proj"
    packed, exponents = codes(32, 64), torch.randint(120, 134, (32, 4), dtype=torch.uint8)
    matrix, blocks = floats8(200, 128), torch.rand(2, 1)
    tensors = {f"{expert}.weight": packed.view(dtype), f"{other}.weight": matrix}
    tensors[expert + ending] = exponents.view(torch.float8_e8m0fnu)
    tensors[f"{other}.weight_scale_inv"] = blocks
    by_row = blocks.repeat_interleave(128, 0)[:200]
    values = {f"{expert}.weight": e2m1(packed, torch.exp2(exponents.float() - 127))}
    values[f"{other}.weight"] = matrix.float() * by_row
    return tensors, {**SIZES, "quantization_config": {**FP8, **record}}, values


def ling() -> tuple[Any, Any, Any]:
    record = {"routed_experts_quant_method": "mxfp4"}
    return mxfp4_experts(".weight_scale_inv", torch.uint8, record)


def mimo_experts() -> tuple[Any, Any, Any]:
    return mxfp4_experts(".weight_scale", torch.int8, {"store_dtype": "mxfp4"})


def ranks() -> tuple[Any, Any, Any]:
    """Four ranks of 160 rows: two blocks each, the second of 32 rows."""
    stem = "model.layers.0.self_attn.qkv_proj"
    matrix, scales = floats8(640, 256), torch.rand(8, 2) + 0.5
    blocks = torch.tensor([row // 160 * 2 + row % 160 // 128 for row in range(640)])
    values = matrix.float() * scales[blocks].repeat_interleave(128, 1)
    tensors = {f"{stem}.weight": matrix, f"{stem}.weight_scale_inv": scales}
    return tensors, {**SIZES, "quantization_config": FP8}, {f"{stem}.weight": values}


LAYOUTS = [stacked, llama4, gptoss, mistral, ling, mimo_experts, ranks]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_command_reads_it(tmp_path: Path, layout: Layout) -> None:
    torch.manual_seed(0)
    tensors, config, expected = layout()
    source = tmp_path / "source"
    source.mkdir()
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    name = "model" if config else "consolidated"
    save_file(stored, source / f"{name}.safetensors")
    if config:
        (source / "config.json").write_text(json.dumps(config))
    else:
        record = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
        (source / "params.json").write_text(json.dumps({"dim": 64, "quantization": record}))
    fp4convert("dequantize", source, "-o", tmp_path / "floats", "--dtype", "fp32", "-q")
    found = load_file(tmp_path / "floats" / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for each, values in expected.items():
        assert torch.equal(found[each], values.float()), each
    words = ("--format", "nvfp4", "--dialect", "modelopt", "-q", "-o", tmp_path / "made")
    fp4convert("quantize", source, *words)
    assert fp4convert_json("verify", tmp_path / "made", "--source", source)["passed"]
    if config.get("quantization_config") == NVFP4:
        assert fp4convert_json("inspect", source)["tensors"]["quantized"] > 1
        words = ("--dialect", "compressed-tensors", "-q", "-o", tmp_path / "carried")
        fp4convert("transcode", source, *words)
        fp4convert("dequantize", tmp_path / "carried", "-o", tmp_path / "again", "-q")


def test_stacks_are_read_where_experts_one_by_one_are_not(tmp_path: Path) -> None:
    """SGLang 0.5.23, models/step3p5.py: Step's experts lie in stacks, as ModelOpt leaves them."""
    tensors, config, _ = stacked()
    source, plain = tmp_path / "source", tmp_path / "plain"
    floats = {f"model.layers.0.moe.{one}_proj.weight": (3, 64, 64) for one in ("gate", "up")}
    floats |= {"model.layers.0.moe.down_proj.weight": (3, 64, 64)}
    made = {name: torch.rand(shape).bfloat16() for name, shape in floats.items()}
    made["model.layers.0.mlp.down_proj.weight"] = torch.rand(64, 64).bfloat16()
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    for folder, stored, record in ((source, tensors, config), (plain, made, bare)):
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(record))
    assert done("inspect", source, "--for", "sglang").code == 0
    words = ("quantize", plain, "--dialect", "modelopt", "-o", tmp_path / "out", "--json")
    error = run(*words, "--for", "sglang").json["error"]
    assert error["code"] == "engine-refuses"
    assert "as stacks alone" in error["message"]
    assert done(*words, "--for", "vllm").code == 0
    found = run("inspect", tmp_path / "out", "--for", "sglang", "--json")
    assert found.code == 6
