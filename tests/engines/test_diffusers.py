"""Diffusers: it loads what `dequantize` makes of its transformers, and reads NVFP4 as Black Forest
Labs publishes it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from tiny_models import fp4convert

from fp4convert.storage.open import open_source

diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install diffusers pillow"
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.*Enum subclass"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
INDEX_NAME = "diffusion_pytorch_model.safetensors.index.json"
FLUX: dict[str, Any] = {
    **{
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "axes_dims_rope": (4, 4, 8),
    },
    **{
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
    },
}
WAN: dict[str, Any] = {
    **{
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
    },
    **{"freq_dim": 32, "ffn_dim": 128, "num_layers": 5},
}
ACTIVATIONS_4 = ("--dialect", "modelopt", "--activations", "4")


def make_pipeline(folder: Path, name: str, config: dict[str, Any], shard_size: str) -> Path:
    """A pipeline whose transformer Diffusers itself made, of random values, and saved in bf16."""
    import torch

    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config).to(torch.bfloat16)
    model.save_pretrained(folder / "transformer", max_shard_size=shard_size)
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    scheduler = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    index = {
        "_class_name": "DiffusionPipeline",
        "scheduler": scheduler,
        "transformer": ["diffusers", name],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def load(name: str, folder: Path, **options: Any) -> Any:
    import torch

    options = {"torch_dtype": torch.bfloat16, "output_loading_info": True, **options}
    model, info = getattr(diffusers, name).from_pretrained(folder, **options)
    assert not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    return model


def nvfp4_values(tensors: dict[str, Any], module: str) -> Any:
    """Values of a module in dialect modelopt, by Diffusers' own formula."""
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4

    return dequantize_nvfp4(
        *(tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
    )


@pytest.mark.parametrize(
    ("name", "config"), [("FluxTransformer2DModel", FLUX), ("WanTransformer3DModel", WAN)]
)
def test_what_was_restored_loads_with_the_values_that_the_artifact_holds(name, config, tmp_path):
    import torch
    from safetensors.torch import load_file

    source = make_pipeline(tmp_path / "m", name, config, "100KB")
    fp4convert("quantize", source, "--format", "nvfp4", *ACTIVATIONS_4, "-o", tmp_path / "q", "-q")
    fp4convert(
        "dequantize", tmp_path / "q", "--subfolder", "transformer", "-o", tmp_path / "d", "-q"
    )
    index = json.loads((tmp_path / "d" / INDEX_NAME).read_text())
    assert len(set(index["weight_map"].values())) > 1
    restored = load(name, tmp_path / "d").state_dict()
    stored = {
        key: tensor
        for file in (tmp_path / "q").rglob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    original = load(name, source / "transformer").state_dict()
    made = {
        key.removesuffix(".weight_scale_2") for key in stored if key.endswith(".weight_scale_2")
    }
    assert len(made) >= 10
    assert restored.keys() == original.keys()
    for key, tensor in restored.items():
        module = key.removesuffix(".weight")
        expected = (
            nvfp4_values(stored, module).to(torch.bfloat16) if module in made else original[key]
        )
        assert torch.equal(tensor, expected), key


def test_it_reads_nvfp4_of_one_file_and_computes_what_the_restored_weights_give(tmp_path):
    """Its fallback without a Blackwell GPU, which dequantizes; the config is the original's,
    without a record.
    """
    import torch

    name, kinds = "FluxTransformer2DModel", {"dtype": torch.bfloat16}
    source = make_pipeline(tmp_path / "m", name, FLUX, "1GB")
    fp4convert("quantize", source, "--format", "nvfp4", *ACTIVATIONS_4, "-o", tmp_path / "q", "-q")
    fp4convert(
        "dequantize", tmp_path / "q", "--subfolder", "transformer", "-o", tmp_path / "d", "-q"
    )
    packed = diffusers.FluxTransformer2DModel.from_single_file(
        str(tmp_path / "q" / "transformer" / "diffusion_pytorch_model.safetensors"),
        config=str(source / "transformer"),
        torch_dtype=torch.bfloat16,
        quantization_config=diffusers.BFLQuantizationConfig(),
    )
    assert sum(type(module).__name__ == "BFLNVFP4Linear" for module in packed.modules()) == 20
    torch.manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 16, 16, **kinds),
        "encoder_hidden_states": torch.randn(1, 4, 32, **kinds),
        "pooled_projections": torch.randn(1, 32, **kinds),
        "timestep": torch.tensor([0.5], **kinds),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(4, 3),
    }
    with torch.no_grad():
        expected = load(name, tmp_path / "d")(**inputs).sample
        assert torch.equal(packed(**inputs).sample, expected)
        assert not torch.equal(load(name, source / "transformer")(**inputs).sample, expected)


@pytest.mark.parametrize(
    "options",
    [("--format", "nvfp4"), ("--format", "mxfp4"), ("--format", "nvfp4", "--dialect", "modelopt")],
)
def test_it_loads_none_of_the_folders_as_they_are(options, tmp_path):
    """The day this fails, docs/engines.md has something to say."""
    source = make_pipeline(tmp_path / "m", "FluxTransformer2DModel", FLUX, "1GB")
    fp4convert("quantize", source, *options, "-o", tmp_path / "q", "-q")
    with pytest.raises((ValueError, TypeError), match=r"quantization type|quant_type"):
        load("FluxTransformer2DModel", tmp_path / "q" / "transformer")


def test_the_pipeline_it_copied_loads_its_other_components(tmp_path):
    source = make_pipeline(tmp_path / "m", "FluxTransformer2DModel", FLUX, "1GB")
    fp4convert("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q", "-q")
    config = diffusers.DiffusionPipeline.load_config(tmp_path / "q")
    assert config["transformer"] == ["diffusers", "FluxTransformer2DModel"]
    found, expected = (
        diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
        for folder in (tmp_path / "q", source)
    )
    assert found.config == expected.config
    assert (
        open_source(str(tmp_path / "q" / "transformer")).checkpoint.config["_class_name"]
        == "FluxTransformer2DModel"
    )


def test_the_line_that_loads_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_pipeline(tmp_path / "m", "FluxTransformer2DModel", FLUX, "1GB")
    made = run("quantize", "m", "--for", "diffusers", "-o", "q", "--json")
    *_, line = made.json["next"]
    *_, program = shlex.split(line)
    names: dict[str, Any] = {}
    exec(program, names)
    kinds = [type(module).__name__ for module in names["model"].modules()]
    assert kinds.count("BFLNVFP4Linear") == 20
