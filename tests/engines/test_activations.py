"""transformers with compressed-tensors loads and runs artifacts for four-bit activations (W4A4).

On a CPU compressed-tensors runs its own emulation: every linear layer rounds its inputs to four
bits first.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import differing, fp4convert, make_llama, read_json, read_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]

FORMATS = ["nvfp4", "mxfp4"]
MULTIPLIER, DIVISOR = 0.0078125, 128.0
LINEARS = 14


@dataclass(frozen=True, slots=True)
class Conversion:
    """Folders: artifacts with four-bit and 16-bit activations, and the first turned back into bf16
    weights.
    """

    w4a4: Path
    w4a16: Path
    restored: Path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=FORMATS)
def done(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Conversion:
    folder, fmt = tmp_path_factory.mktemp(request.param), request.param
    made = Conversion(folder / fmt, folder / "w4a16", folder / "restored")
    scale = ("--input-scale", MULTIPLIER) if fmt == "nvfp4" else ()
    fp4convert(
        "quantize", source, "--format", fmt, "--activations", 4, *scale, "-o", made.w4a4, "-q"
    )
    fp4convert("quantize", source, "--format", fmt, "-o", made.w4a16, "-q")
    fp4convert("dequantize", made.w4a4, "-o", made.restored, "-q")
    return made


def _load(folder: Path) -> Any:
    """The model as transformers loads it; the test fails where a tensor was missing, unexpected or
    of another shape.
    """
    model, info = _load_and_tell(folder)
    assert not any(info.values()), info
    return model


def _load_and_tell(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    return model.eval(), info


def _logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(1, 49).reshape(3, 16)).logits


def _schemed(model: Any) -> dict[str, Any]:
    """Name -> module that the engine quantizes."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None)
    }


def _kind(done: Conversion) -> str:
    return done.w4a4.name


def test_the_record_is_the_engines_own_scheme(done: Conversion) -> None:
    """Equal to the preset that compressed-tensors offers under the format's name, weights and
    activations.
    """
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    record = read_json(done.w4a4 / "config.json")["quantization_config"]
    scheme = QuantizationConfig.model_validate(record).config_groups["group_0"]
    preset = preset_name_to_scheme(_kind(done).upper(), ["Linear"])
    assert scheme.input_activations.model_dump() == preset.input_activations.model_dump()
    assert scheme.weights.model_dump() == preset.weights.model_dump()
    assert (scheme.targets, scheme.output_activations) == (
        preset.targets,
        preset.output_activations,
    )


def test_loaded_modules_know_their_input_activations(done: Conversion) -> None:
    modules = _schemed(_load(done.w4a4))
    assert len(modules) == LINEARS
    for name, module in modules.items():
        inputs = module.quantization_scheme.input_activations
        group = (16, "tensor_group", "local") if _kind(done) == "nvfp4" else (32, "group", True)
        assert (
            inputs.num_bits,
            inputs.type,
            inputs.group_size,
            inputs.strategy,
            inputs.dynamic,
        ) == (4, "float", *group), name
        assert module.quantization_scheme.weights.num_bits == 4
        if _kind(done) == "nvfp4":
            assert module.input_global_scale.shape == (1,), name
            assert module.input_global_scale.item() == DIVISOR, name
        else:
            assert not hasattr(module, "input_global_scale"), name
    assert all(
        module.quantization_scheme.input_activations is None
        for module in _schemed(_load(done.w4a16)).values()
    )


def test_engine_computes_the_weights_that_dequantize_writes(done: Conversion) -> None:
    """Asked for plain weights the engine has no use for the input scales: they alone are
    unexpected.
    """
    from transformers import CompressedTensorsConfig

    model, info = _load_and_tell(
        done.w4a4, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    input_scales = {
        name for name in read_tensors(done.w4a4) if name.endswith(".input_global_scale")
    }
    assert set(info.pop("unexpected_keys")) == input_scales
    assert not any(info.values()), info
    assert len(input_scales) == (LINEARS if _kind(done) == "nvfp4" else 0)
    assert differing(model.state_dict(), read_tensors(done.restored)) == []


def test_forward_rounds_the_activations(done: Conversion) -> None:
    """Finite, near the 16-bit model's logits, and not equal to them: the inputs of every layer
    really are four-bit.
    """
    import torch

    logits, plain = _logits(_load(done.w4a4)).float(), _logits(_load(done.w4a16)).float()
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert not logits.equal(plain)
    assert torch.nn.functional.cosine_similarity(logits.flatten(), plain.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("done", ["nvfp4"], indirect=True)
def test_the_stored_input_scale_is_the_one_that_counts(done: Conversion, tmp_path: Path) -> None:
    """An input scale stored the wrong way round still loads; activations then saturate, and the
    logits show it.
    """
    from safetensors.torch import save_file

    shutil.copytree(done.w4a4, tmp_path / "tampered")
    tensors = read_tensors(done.w4a4)
    inverted = {
        name: 1 / tensor if name.endswith(".input_global_scale") else tensor
        for name, tensor in tensors.items()
    }
    save_file(inverted, tmp_path / "tampered" / "model.safetensors", metadata={"format": "pt"})
    right, wrong, plain = (
        _logits(_load(folder)).float() for folder in (done.w4a4, tmp_path / "tampered", done.w4a16)
    )
    assert (wrong - plain).norm() > 2 * (right - plain).norm()
