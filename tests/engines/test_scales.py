"""Static scales of activations and of FP8 and NVFP4 caches, beside those that ModelOpt and
compressed-tensors calibrate themselves.

What a calibration file says is measured here by hooks on the model that transformers builds, on the
very tokens that ModelOpt's
calibration sees; fp4convert's part is to make the same scales of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import write_calibration
from compressed_tensors_export import export_compressed
from modelopt_export import FP4, FP8, export_modelopt, with_exceptions
from packaging.version import Version
from tiny_models import differing, fp4convert, fp4convert_json, make_llama, read_json, read_tensors

from fp4convert.storage.open import open_source

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]

looks_for_caches = pytest.mark.skipif(
    Version(version("transformers")) >= Version("5.24"),
    reason="attention's argument is cache there, and compressed-tensors 0.20 looks for another",
)
CT, MO = "compressed-tensors", "modelopt"
MODULES, ATTENTIONS = 14, 2
EXPORTS = {
    "w4a4": {"*weight_quantizer": FP4, "*input_quantizer": FP4, "*[kv]_bmm_quantizer": FP8},
    "fp4-cache": {f"*{which}_quantizer": FP4 for which in ("weight", "input", "[kv]_bmm")},
    "beside-fp8": {
        **{f"*mlp*{which}_quantizer": FP4 for which in ("weight", "input")},
        **{f"*self_attn*{which}_quantizer": FP8 for which in ("weight", "input")},
    },
}
RECIPE = 'about = "attention in FP8"\n\n[[format]]\nformat = "fp8"\nmodules = ["*self_attn*"]\n'


@dataclass(frozen=True, slots=True)
class Judged:
    """A model, what ModelOpt exports of it, and what hooks saw while it read the tokens of
    ModelOpt's calibration.
    """

    source: Path
    exports: dict[str, Path]
    calibration: Path


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("judged")
    source = make_llama(folder / "source")
    exports = {
        name: export_modelopt(source, with_exceptions(chosen), folder / name)
        for name, chosen in EXPORTS.items()
    }
    statistics = _measured(source)
    return Judged(
        source,
        exports,
        write_calibration(folder / "seen.safetensors", open_source(str(source)), statistics),
    )


def _measured(source: Path) -> dict[str, np.ndarray]:
    """amax of every linear layer's inputs, of keys after their rotation, and of values, by hooks
    and by transformers' cache.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    found: dict[str, np.ndarray] = {}

    def seen(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].float().abs().flatten(0, -2).amax(0).numpy()
            found[f"{name}.input_channel_amax"], found[f"{name}.input_amax"] = x, x.max()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(seen(name))
    with torch.no_grad():
        cache = model(torch.arange(1, 17).reshape(1, -1), use_cache=True).past_key_values
    for number, layer in enumerate(cache.layers):
        found[f"model.layers.{number}.self_attn.k_amax"] = layer.keys.float().abs().max().numpy()
        found[f"model.layers.{number}.self_attn.v_amax"] = layer.values.float().abs().max().numpy()
    return found


def _quantized(judged: Judged, folder: Path, *options: object, dialect: str = MO) -> Path:
    fp4convert(
        "quantize",
        judged.source,
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--activations",
        4,
        "-o",
        folder,
        "-q",
        *options,
    )
    return folder


def _endings(folder: Path, *endings: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in read_tensors(folder).items() if name.endswith(endings)}


def _with_headroom(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor * 8 if name.endswith(".input_scale") else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("cache", "export"), [("fp8", "w4a4"), ("nvfp4", "fp4-cache")])
def test_a_calibrated_artifact_is_modelopts_own(
    judged: Judged, tmp_path: Path, cache: str, export: str
) -> None:
    """Every tensor byte for byte: weights, scales of the cache, and input scales that reach 8 times
    as far as ModelOpt's amax / 2688; and the records but
    for modules to leave alone.
    """
    options = ("--calibration", judged.calibration, "--kv-cache", cache, "--scale-rule", "amax")
    ours, theirs = _quantized(judged, tmp_path / "out", *options), judged.exports[export]
    assert len(_endings(theirs, ".input_scale")) == MODULES
    assert len(_endings(theirs, ".k_scale", ".v_scale")) == 2 * ATTENTIONS
    assert differing(read_tensors(ours), _with_headroom(read_tensors(theirs))) == []
    for file, key, ignored in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        left, right = (read_json(folder / file)[key] for folder in (ours, theirs))
        assert {**left, ignored: None, "producer": None} == {
            **right,
            ignored: None,
            "producer": None,
        }


def test_scales_copied_from_modelopts_export_are_its_own(judged: Judged, tmp_path: Path) -> None:
    """Byte for byte in modelopt; and through compressed-tensors, whose divisors lose no bit that
    matters to them.
    """
    theirs = judged.exports["w4a4"]
    copied = _quantized(judged, tmp_path / "mo", "--input-scale", theirs)
    assert differing(_endings(copied, ".input_scale"), _endings(theirs, ".input_scale")) == []
    divisors = _endings(
        _quantized(judged, tmp_path / "ct", "--input-scale", theirs, dialect=CT),
        ".input_global_scale",
    )
    multipliers = _endings(theirs, ".input_scale")
    assert len(divisors) == MODULES
    for name, stored in divisors.items():
        multiplier = np.float64(
            multipliers[name.replace("input_global_scale", "input_scale")].item()
        )
        assert stored.item() == np.float32(1 / multiplier), name


@pytest.mark.slow
def test_eight_bit_modules_get_modelopts_scales(judged: Judged, tmp_path: Path) -> None:
    """Attention in FP8 beside an NVFP4 MLP: activations by amax / 448 and amax / 2688, times 8."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    options = ("--recipe", tmp_path / "recipe.toml", "--calibration", judged.calibration)
    ours = _endings(_quantized(judged, tmp_path / "out", *options), ".input_scale")
    theirs = _endings(judged.exports["beside-fp8"], ".input_scale")
    assert len(theirs) == MODULES
    assert differing(ours, _with_headroom(theirs)) == []
    copied = _quantized(
        judged, tmp_path / "copied", *options[:2], "--input-scale", judged.exports["beside-fp8"]
    )
    assert differing(_endings(copied, ".input_scale"), theirs) == []


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@looks_for_caches
def test_compressed_tensors_loads_scales_of_modules_and_caches(
    judged: Judged, tmp_path: Path
) -> None:
    """Every module has its own; the cache's are bfloat16 in transformers, as compressed-tensors
    registers them; it runs.
    """
    import torch

    out = _quantized(
        judged,
        tmp_path / "out",
        "--calibration",
        judged.calibration,
        "--kv-cache",
        "fp8",
        dialect=CT,
    )
    model, seen = _load(out), read_tensors(judged.calibration.parent / "w4a4")
    scaled = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "input_global_scale")
    }
    assert len(scaled) == MODULES
    for name, module in scaled.items():
        assert module.input_global_scale.item() == pytest.approx(
            1 / (8 * seen[f"{name}.input_scale"].item()), rel=1e-7
        ), name
    for number in range(ATTENTIONS):
        attention = model.model.layers[number].self_attn
        for which in "kv":
            expected = seen[
                f"model.layers.{number}.self_attn.{which}_proj.{which}_scale"
            ].bfloat16()
            assert getattr(attention, f"{which}_scale").item() == expected.item()
    tokens = torch.arange(1, 17).reshape(1, -1)
    plain = _load(judged.source)
    with torch.no_grad():
        logits, expected = model(tokens).logits.float(), plain(tokens).logits.float()
    assert torch.nn.functional.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) > 0.9


def test_scales_of_an_nvfp4_cache_are_modelopts_of_the_same_amaxes(
    judged: Judged, tmp_path: Path
) -> None:
    """What its exporter for Hugging Face makes of a quantizer's amax, for that kind of cache."""
    import torch
    from modelopt.torch.export.quant_utils import postprocess_state_dict

    seen = read_tensors(judged.calibration.parent)
    state = {
        f"{name.removesuffix(f'.{which}_amax')}.{which}_bmm_quantizer._amax": tensor
        for which in "kv"
        for name, tensor in seen.items()
        if name.endswith(f".{which}_amax")
    }
    assert len(state) == 2 * ATTENTIONS
    theirs = postprocess_state_dict(state, 448, "NVFP4")
    options = ("--calibration", judged.calibration, "--kv-cache", "nvfp4")
    ours = _endings(_quantized(judged, tmp_path / "mo", *options), ".k_scale", ".v_scale")
    assert differing(ours, theirs) == []
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())


@looks_for_caches
def test_compressed_tensors_loads_an_nvfp4_cache_and_makes_it_zero(
    judged: Judged, tmp_path: Path
) -> None:
    """The record is its preset's, and every attention has the scales, float32 as they are stored.

    It takes them for their reciprocals: block scales are below the least of E4M3.
    """
    import torch
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    options = ("--calibration", judged.calibration, "--kv-cache", "nvfp4")
    out = _quantized(judged, tmp_path / "out", *options, dialect=CT)
    record = QuantizationConfig.model_validate(
        read_json(out / "config.json")["quantization_config"]
    )
    preset = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    assert record.kv_cache_scheme.model_dump() == preset.model_dump()
    model, seen = _load(out), read_tensors(judged.calibration.parent)
    for number in range(ATTENTIONS):
        attention = model.model.layers[number].self_attn
        for which in "kv":
            stored = getattr(attention, f"{which}_global_scale")
            amax = seen[f"model.layers.{number}.self_attn.{which}_amax"].numpy()
            assert stored.dtype == torch.float32
            assert stored.item() == np.float32(amax) / np.float32(2688)
    with torch.no_grad():
        cache = model(torch.arange(1, 17).reshape(1, -1), use_cache=True).past_key_values
    assert all(not layer.keys.any() and not layer.values.any() for layer in cache.layers)


def test_too_small_a_scale_ruins_a_model_and_the_calibrated_one_does_not(
    judged: Judged, tmp_path: Path
) -> None:
    """The engine's own arithmetic, and the warning that goes before it."""
    import torch

    tokens, options = torch.arange(1, 17).reshape(1, -1), ("--calibration", judged.calibration)
    with torch.no_grad():
        plain = _load(judged.source)(tokens).logits.float()
        errors = []
        for number, scale in enumerate(((), ("--input-scale", 1e-4))):
            folder = _quantized(judged, tmp_path / f"{number}", *options, *scale, dialect=CT)
            errors.append(float((_load(folder)(tokens).logits.float() - plain).norm()))
    assert errors[1] > 2 * errors[0]
    asked = (
        "--format",
        "nvfp4",
        "--activations",
        4,
        *options,
        "--input-scale",
        1e-4,
        "--dry-run",
        "-o",
        tmp_path / "none",
    )
    warnings = fp4convert_json("quantize", judged.source, *asked)["warnings"]
    assert any(
        re.search(r"input scales of \d+ modules are smaller than .* asks for", line)
        for line in warnings
    ), warnings


def test_scales_copied_from_compressed_tensors_own_export(judged: Judged, tmp_path: Path) -> None:
    export = tmp_path / "export"
    export_compressed(judged.source, (("NVFP4", "Linear"),), export)
    ours = _quantized(judged, tmp_path / "out", "--input-scale", export, dialect=CT)
    theirs = _endings(export, ".input_global_scale")
    assert len(theirs) == MODULES
    assert differing(_endings(ours, ".input_global_scale"), theirs) == []


@pytest.mark.slow
def test_what_calibrate_saw_goes_into_every_attention(judged: Judged, tmp_path: Path) -> None:
    """fp4convert's own calibration and quantization call layers and attentions by the same
    names.
    """
    fp4convert(
        "calibrate",
        judged.source,
        "-o",
        tmp_path / "c.safetensors",
        "--self-generate",
        2,
        "--sequence-length",
        16,
        "-q",
    )
    seen = read_tensors(tmp_path)
    out = _quantized(
        judged, tmp_path / "out", "--calibration", tmp_path / "c.safetensors", "--kv-cache", "fp8"
    )
    for number in range(ATTENTIONS):
        attention, tensors = f"model.layers.{number}.self_attn", read_tensors(out)
        for which in "kv":
            stored = tensors[f"{attention}.{which}_proj.{which}_scale"].numpy()
            assert stored == seen[f"{attention}.{which}_amax"].numpy() / np.float32(448)
