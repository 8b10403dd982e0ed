"""FP8 and MXFP8, judged by those who read them: what a judge makes of the stored bytes is what
dequantize writes, and where a judge quantizes by itself, its codes and scales are ours.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_folder
from compressed_tensors_export import export_compressed
from modelopt_export import FP4, MXFP8, export_modelopt, with_exceptions
from tiny_models import (
    differing,
    fp4convert,
    fp4convert_json,
    make_llama,
    make_qwen3_moe,
    read_json,
    read_tensors,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CT, MO = "compressed-tensors", "modelopt"
MODULES = 14


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


def quantize(source: Path, folder: Path, fmt: str, dialect: str, *options: object) -> Path:
    made = folder / f"{fmt}-{dialect}"
    fp4convert(
        "quantize", source, "--format", fmt, "--dialect", dialect, "-o", made, *options, "-q"
    )
    found = fp4convert_json("inspect", made)
    assert (found["healthy"], found["findings"], found["format"]) == (True, [], fmt)
    assert found["tensors"]["quantized"] == MODULES
    verified = fp4convert_json("verify", made, "--source", source, "--min-sqnr", "30")
    assert (verified["passed"], len(verified["tensors"])) == (True, MODULES)
    return made


def restored(artifact: Path, folder: Path) -> dict[str, Any]:
    """The weights that were quantized, turned back by the command in float32."""
    fp4convert("dequantize", artifact, "-o", folder / "restored", "--dtype", "fp32", "-q")
    return {
        name: tensor
        for name, tensor in read_tensors(folder / "restored").items()
        if name.endswith("_proj.weight")
    }


def loaded(folder: Path, **options: Any) -> Any:
    """The model as transformers loads it, nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def weights_of(model: Any) -> dict[str, Any]:
    """Its weights in float32, which holds all of bfloat16."""
    return {
        name: tensor.float()
        for name, tensor in model.state_dict().items()
        if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize("rule", ["default", "mse"])
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
@pytest.mark.sweep(3)
def test_compressed_tensors_decompresses_what_dequantize_writes(
    source: Path, tmp_path: Path, fmt: str, rule: str, activations: int
) -> None:
    rules = () if rule == "default" else ("--scale-rule", rule)
    made = quantize(source, tmp_path, fmt, CT, "--activations", activations, *rules)
    model = loaded(made)
    assert all(
        (module.quantization_scheme.input_activations is None) == (activations == 16)
        for module in model.modules()
        if hasattr(module, "quantization_scheme")
    )
    model.hf_quantizer.compressor.decompress_model(model)
    weights = weights_of(model)
    assert len(weights) == MODULES
    assert differing(weights, restored(made, tmp_path)) == []


def test_mxfp8_is_what_compressed_tensors_makes(source: Path, tmp_path: Path) -> None:
    """Tensor for tensor, and key for key of its record; but for blocks whose largest is 448 steps
    of a power of two: compressed-tensors 0.20 takes the next one there.
    """
    export_compressed(source, (("MXFP8", "Linear"),), tmp_path / "theirs")
    made = quantize(source, tmp_path, "mxfp8", CT, "--scale-rule", "ceil")
    ours, theirs = read_tensors(made), read_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    seldom = 0
    for name, weight in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            continue
        mantissas, _ = weight.float().abs().unflatten(1, (-1, 32)).amax(2).frexp()
        usual = mantissas != 0.875
        seldom += int((~usual).sum())
        left, right = ours[f"{name}_scale"], theirs[f"{name}_scale"]
        assert torch.equal(left[usual], right[usual])
        assert torch.equal(left[~usual] + 1, right[~usual])
        left, right = (
            each[name].view(torch.uint8).unflatten(1, (-1, 32))[usual] for each in (ours, theirs)
        )
        assert torch.equal(left, right)
    assert seldom
    left, right = (
        read_json(folder / "config.json")["quantization_config"]
        for folder in (made, tmp_path / "theirs")
    )
    assert (left["format"], right["format"]) == ("mxfp8-quantized", "mxfp8-quantized")
    own, other = (each["config_groups"]["group_0"] for each in (left, right))
    for part in ("weights", "input_activations"):
        assert {key: other[part][key] for key in own[part]} == own[part]


def test_transformers_fp8_reads_blocks_of_128(source: Path, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    made = quantize(source, tmp_path, "fp8", "deepseek", "--scale-rule", "mse")
    model = loaded(made, quantization_config=FineGrainedFP8Config(dequantize=True))
    weights = weights_of(model)
    assert len(weights) == MODULES
    assert differing(weights, restored(made, tmp_path)) == []
    (made / "quantization_config.json").unlink()  # as a publisher's own
    shutil.rmtree(made / ".fp4convert")
    found = fp4convert_json("inspect", made)
    assert (found["healthy"], found["dialect"], found["block_size"]) == (
        True,
        "deepseek",
        [128, 128],
    )


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
def test_modelopt_exports_the_same(source: Path, tmp_path: Path, fmt: str) -> None:
    """But for scales of activations, which it calibrates, and codes of FP8, which it rounds to bf16
    first.
    """
    theirs = export_modelopt(source, f"{fmt.upper()}_DEFAULT_CFG", tmp_path / "theirs")
    rule = {"fp8": "amax", "mxfp8": "ceil"}[fmt]
    made = quantize(source, tmp_path, fmt, MO, "--scale-rule", rule)
    ours, own = read_folder(made), read_folder(theirs)
    assert {name: tensor[:2] for name, tensor in ours.items()} == {
        name: tensor[:2] for name, tensor in own.items()
    }
    beside = ("input_scale", "_proj.weight") if fmt == "fp8" else ("input_scale",)
    alike = [name for name in ours if not name.endswith(beside)]
    assert len(alike) > MODULES
    assert {name: ours[name] for name in alike} == {name: own[name] for name in alike}
    left, right = (
        read_json(folder / "config.json")["quantization_config"] for folder in (made, theirs)
    )
    for key in ("quant_algo", "quant_method", "config_groups"):
        if key in right:  # it describes no groups of MXFP8
            assert left[key] == right[key], key
    left, right = (
        read_json(folder / "hf_quant_config.json")["quantization"] for folder in (made, theirs)
    )
    assert left["quant_algo"] == right["quant_algo"]
    assert left.get("group_size") == right.get("group_size")
    assert {name for name in own if name.endswith("scale")} == {
        name for name in ours if name.endswith("scale")
    }


@pytest.mark.parametrize("dialect", [CT, MO, "mlx", "comfy"])
def test_the_same_codes_and_scales_in_every_dialect(
    source: Path, tmp_path: Path, dialect: str
) -> None:
    made = quantize(source, tmp_path, "mxfp8", dialect)
    first = quantize(source, tmp_path / "first", "mxfp8", CT)
    assert differing(restored(made, tmp_path), restored(first, tmp_path / "first")) == []


RECIPE = """
about = "NVFP4 experts beside MXFP8"
base = "default"
[[format]]
modules = ["*self_attn*"]
format = "mxfp8"
"""


def test_nvfp4_beside_mxfp8_is_what_modelopt_exports(source: Path, tmp_path: Path) -> None:
    """MIXED_PRECISION: names, dtypes, shapes and all bytes but those of calibrated activations."""
    quantizers = {
        **{f"*mlp*{which}_quantizer": FP4 for which in ("weight", "input")},
        **{f"*self_attn*{which}_quantizer": MXFP8 for which in ("weight", "input")},
    }
    theirs = export_modelopt(source, with_exceptions(quantizers), tmp_path / "theirs")
    (tmp_path / "mixed.toml").write_text(RECIPE)
    made = tmp_path / "made"
    options = ("--recipe", tmp_path / "mixed.toml", "--activations", 4, "--scale-rule", "amax")
    fp4convert("quantize", source, "--format", "nvfp4", "--dialect", MO, "-o", made, *options, "-q")
    found = fp4convert_json("inspect", made)
    assert (found["healthy"], found["findings"], found["format"]) == (True, [], "mixed")
    assert [(form["format"], form["modules"]) for form in found["forms"]] == [
        ("nvfp4", 6),
        ("mxfp8", 8),
    ]
    assert fp4convert_json("verify", made, "--source", source)["passed"]
    own = fp4convert_json("inspect", theirs)
    assert [(form["format"], form["modules"]) for form in own["forms"]] == [
        ("nvfp4", 6),
        ("mxfp8", 8),
    ]
    ours, others = read_folder(made), read_folder(theirs)
    assert {name: tensor[:2] for name, tensor in ours.items()} == {
        name: tensor[:2] for name, tensor in others.items()
    }
    alike = [name for name in ours if ".self_attn." not in name and "input_scale" not in name]
    assert {name: ours[name] for name in alike} == {name: others[name] for name in alike}
    left, right = (
        read_json(folder / "hf_quant_config.json")["quantization"] for folder in (made, theirs)
    )
    assert left["quant_algo"] == right["quant_algo"] == "MIXED_PRECISION"
    fused = ("qkv_proj", "gate_up_proj")  # which we name too
    named = left["quantized_layers"].items()
    assert dict(each for each in named if not each[0].endswith(fused)) == right["quantized_layers"]


def test_compressed_tensors_reads_nvfp4_experts_beside_mxfp8(tmp_path: Path) -> None:
    source = make_qwen3_moe(tmp_path / "source")
    (tmp_path / "mixed.toml").write_text(RECIPE)
    made = tmp_path / "made"
    options = ("--recipe", tmp_path / "mixed.toml", "--dialect", CT, "-o", made, "-q")
    fp4convert("quantize", source, "--format", "nvfp4", *options)
    record = read_json(made / "config.json")["quantization_config"]
    assert record["format"] == "mixed-precision"
    assert {group["format"] for group in record["config_groups"].values()} == {
        "nvfp4-pack-quantized",
        "mxfp8-quantized",
    }
    found = fp4convert_json("inspect", made)
    assert (found["healthy"], found["findings"]) == (True, [])
    fp4convert("dequantize", made, "-o", tmp_path / "restored", "--dtype", "fp32", "-q")
    ours = read_tensors(tmp_path / "restored")
    model = loaded(made)
    model.hf_quantizer.compressor.decompress_model(model)
    weights = {name: tensor for name, tensor in weights_of(model).items() if ".self_attn." in name}
    assert len(weights) == 8
    assert differing(weights, {name: ours[name] for name in weights}) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU build of MLX is for Linux")
def test_mlx_makes_and_reads_the_same(source: Path, tmp_path: Path) -> None:
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    made = quantize(source, tmp_path, "mxfp8", "mlx", "--scale-rule", "ceil")
    model, _ = load_model(made)
    ours, stored = restored(made, tmp_path), read_tensors(made)
    originals = read_tensors(source)
    for name, tensor in ours.items():
        module = model
        for part in name.removesuffix(".weight").split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        values = mx.dequantize(module.weight, module.scales, group_size=32, bits=8, mode="mxfp8")
        theirs = torch.from_numpy(np.array(values.astype(mx.float32)))
        assert torch.equal(theirs, tensor), name
        x = mx.array(originals[name].float().numpy())
        codes, scales = mx.quantize(x, group_size=32, bits=8, mode="mxfp8")
        mine, theirs = stored[name.replace(".weight", ".scales")].numpy(), np.array(scales)
        assert (np.where(mine == 0, 127, mine) == theirs).all()  # 127 for blocks of zeros
        mine = stored[name].view(torch.uint8).numpy()
        assert (np.array(codes).view(np.uint8) == mine).all(), name


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
def test_comfy_kitchen_makes_and_reads_the_same(source: Path, tmp_path: Path, fmt: str) -> None:
    from comfy_kitchen.tensor.fp8 import TensorCoreFP8Layout
    from comfy_kitchen.tensor.mxfp8 import TensorCoreMXFP8Layout

    layout, rule, word = {
        "fp8": (TensorCoreFP8Layout, "amax", "float8_e4m3fn"),
        "mxfp8": (TensorCoreMXFP8Layout, "ceil", "mxfp8"),
    }[fmt]
    made = quantize(source, tmp_path, fmt, "comfy", "--scale-rule", rule)
    stored, ours, originals = read_tensors(made), restored(made, tmp_path), read_tensors(source)
    for name, tensor in ours.items():
        mark = bytes(stored[name.replace(".weight", ".comfy_quant")].tolist())
        assert json.loads(mark) == {"format": word}
        scale = stored[f"{name}_scale"]
        scale = scale.view(torch.float8_e8m0fnu) if fmt == "mxfp8" else scale
        params = layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=tensor.shape)
        assert torch.equal(layout.dequantize(stored[name], params), tensor)
        codes, theirs = layout.quantize(originals[name].float())
        kind = torch.uint8 if fmt == "mxfp8" else torch.float32
        assert torch.equal(theirs.scale.view(kind), scale.view(kind))
        assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8))
