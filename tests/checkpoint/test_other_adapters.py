"""Adapters of kohya, Diffusers, ComfyUI's trainers and mlx-lm.

They are merged by their makers' formulas, which are typed here, or refused for what they are.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import LAYER, done, pack_shard, read_folder, run, values_of, write_llama
from checkpoints import Tensor as Stored

from fp4convert.checkpoint.adapters.merging import merge_adapter
from fp4convert.checkpoint.adapters.peft import open_adapter
from fp4convert.checkpoint.linears import find_linears
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access

RANK, ROWS, COLUMNS = 3, 96, 64
FLUX = "double_blocks.1.img_attn.proj"


def factors(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """A and B, on a grid of which products and their sums are exact in float32."""
    dice = np.random.default_rng(seed)
    a, b = dice.integers(-9, 10, (RANK, columns)), dice.integers(-9, 10, (rows, RANK))
    return a.astype(np.float32) / 64, b.astype(np.float32) / 64


def stored(values: np.ndarray) -> Stored:
    return "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes()


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def model(folder: Path, *modules: str) -> tuple[Path, dict[str, np.ndarray]]:
    """One file of bf16 matrices, and their values."""
    folder.mkdir()
    made = {}
    for seed, module in enumerate(modules):
        made[module] = bf16(np.random.default_rng(seed).normal(0, 1, (ROWS, COLUMNS)))
    tensors = {
        f"{name}.weight": ("BF16", (ROWS, COLUMNS), v.astype(ml_dtypes.bfloat16).tobytes())
        for name, v in made.items()
    }
    file = folder / "model.safetensors"
    file.write_bytes(pack_shard(tensors))
    return file, made


def merged(
    base: Path, adapter: Path, scale: float = 1.0
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The matrices that the adapter changes, and the notes for a person."""
    source = open_source(str(base))
    linears = find_linears(source, model_recipe(source.checkpoint.config))
    done = merge_adapter(linears, open_adapter(str(adapter), scale, Access()), source.checkpoint)
    changed = {}
    for name, linear in done.of.items():
        if linear.coding.change:
            rows = linear.coding.weights(linear, source).rows(0, linear.shape[0])
            changed[name] = values_of((rows.dtype, linear.shape, bytes(rows.data)))
    return changed, done.notes


def save(folder: Path, name: str, tensors: dict[str, Stored], metadata: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pack_shard(tensors, metadata))
    return folder


def refusal(base: Path, adapter: Path) -> dict[str, str]:
    command = ("quantize", base, "--format", "nvfp4", "--lora", adapter)
    return run(*command, "-o", adapter.parent / "out", "--json").json["error"]


KOHYA = "lora_unet_double_blocks_1_img_attn_proj"
TO_Q = "transformer_blocks.0.attn.to_q"
SPELLED = [  # names of the model and of the adapter's two factors
    (FLUX, KOHYA, "lora_down", "lora_up"),
    (
        f"model.diffusion_model.{FLUX}",
        "lora_unet_double_blocks_1_img_attn_proj",
        "lora_down",
        "lora_up",
    ),
    (f"model.diffusion_model.{FLUX}", f"diffusion_model.{FLUX}", "lora_A", "lora_B"),
    (FLUX, f"diffusion_model.{FLUX}", "lora_down", "lora_up"),
    (
        "transformer_blocks.0.attn.to_q",
        "transformer.transformer_blocks.0.attn.to_q",
        "lora_A",
        "lora_B",
    ),
    (
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1",
        "lora_down",
        "lora_up",
    ),
    (
        "text_encoders.t5xxl.transformer.encoder.block.1.layer.0.SelfAttention.q",
        "lora_te3_encoder_block_1_layer_0_SelfAttention_q",
        "lora_down",
        "lora_up",
    ),
]


@pytest.mark.parametrize(("module", "called", "down", "up"), SPELLED)
@pytest.mark.parametrize("alpha", [None, 1.5])
def test_one_file_is_merged_into_the_module_that_it_names(
    module, called, down, up, alpha, tmp_path
):
    base, weights = model(tmp_path / "base", module, "double_blocks.10.img_attn.proj")
    a, b = factors(1)
    tensors = {f"{called}.{down}.weight": stored(a), f"{called}.{up}.weight": stored(b)}
    if alpha:
        tensors[f"{called}.alpha"] = stored(np.array(alpha))
    folder = save(tmp_path / "lora", "pytorch_lora_weights.safetensors", tensors)
    expected = bf16(weights[module] + (alpha or RANK) / RANK * (b @ a))
    for adapter in (folder, folder / "pytorch_lora_weights.safetensors"):
        found, notes = merged(base, adapter)
        assert (found.keys(), notes) == ({module}, ())
        np.testing.assert_array_equal(found[module], expected)


def test_diffusers_alphas_stand_in_the_header(tmp_path):
    base, weights = model(tmp_path / "base", "blocks.0.attn1.to_q", "blocks.0.attn1.to_v")
    tensors = {}
    for number, leaf in enumerate(("to_q", "to_v")):
        a, b = factors(number)
        name = f"transformer.blocks.0.attn1.{leaf}"
        tensors |= {f"{name}.lora_A.weight": stored(a), f"{name}.lora_B.weight": stored(b)}
    words = {
        "transformer.r": RANK,
        "transformer.lora_alpha": 6,
        "transformer.alpha_pattern": {"to_v": 1.5},
    }
    folder = save(
        tmp_path / "lora", "x.safetensors", tensors, {"lora_adapter_metadata": json.dumps(words)}
    )
    found, _ = merged(base, folder, scale=0.5)
    for number, (leaf, scaling) in enumerate({"to_q": 1.0, "to_v": 0.25}.items()):
        a, b = factors(number)
        name = f"blocks.0.attn1.{leaf}"
        np.testing.assert_array_equal(found[name], bf16(weights[name] + scaling * (b @ a)))


def test_factors_of_text_encoders_that_are_elsewhere_are_told(tmp_path):
    base, _ = model(tmp_path / "base", FLUX)
    a, b = factors(1)
    tensors = {}
    for name in (KOHYA, "lora_te1_text_model_x"):
        tensors |= {f"{name}.lora_down.weight": stored(a), f"{name}.lora_up.weight": stored(b)}
    found, (note,) = merged(base, save(tmp_path / "lora", "x.safetensors", tensors))
    assert found.keys() == {FLUX}
    assert "lora_te1_text_model_x" in note
    unet = {name: tensor for name, tensor in tensors.items() if "te1" in name}
    alone = save(tmp_path / "te", "x.safetensors", unet)
    command = (
        "quantize",
        base,
        "--format",
        "nvfp4",
        "--lora",
        alone,
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert run(*command).json["error"]["code"] == "adapter-mismatch"


@pytest.mark.parametrize("experts", [0, 2])
def test_mlx_adapters_are_merged_by_mlx_lms_formula(experts, tmp_path):
    """The product takes the dtype of the weight before it is added (tuner/lora.py, fuse)."""
    leaf = "model.layers.0.mlp.{}gate_proj"
    modules = [leaf.format(f"experts.{n}.") for n in range(experts)] or [leaf.format("")]
    base, weights = model(tmp_path / "base", *modules)
    pairs = [factors(seed) for seed in range(max(experts, 1))]
    called = leaf.format("switch_mlp." if experts else "")
    a, b = (np.stack(each) for each in zip(*pairs, strict=True))
    if not experts:
        a, b = a[0].T, b[0].T
    folder = save(
        tmp_path / "a",
        "adapters.safetensors",
        {f"{called}.lora_a": stored(a), f"{called}.lora_b": stored(b)},
    )
    words = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 20.0}}
    (folder / "adapter_config.json").write_text(json.dumps(words))
    found, _ = merged(base, folder)
    for module, (one_a, one_b) in zip(modules, pairs, strict=True):
        expected = bf16(weights[module] + bf16(20 * (one_b @ one_a)))
        np.testing.assert_array_equal(found[module], expected)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (".hada_w1_a", "LoHa"),
        (".lokr_w2", "LoKr"),
        (".dora_scale", "DoRA"),
        (".oft_blocks", "OFT"),
        (".b1.weight", "GLoRA"),
        (".lora_mid.weight", "LoCon"),
        (".on_input", "(IA)^3"),
        (".diff", "whole differences"),
    ],
)
def test_other_kinds_are_named(ending, kind, tmp_path):
    base, _ = model(tmp_path / "base", FLUX)
    a, b = factors(1)
    name = KOHYA
    tensors = {f"{name}.lora_down.weight": stored(a), f"{name}.lora_up.weight": stored(b)}
    folder = save(tmp_path / "lora", "x.safetensors", {**tensors, name + ending: stored(a)})
    command = (
        "quantize",
        base,
        "--format",
        "nvfp4",
        "--lora",
        folder,
        "-o",
        tmp_path / "out",
        "--json",
    )
    error = run(*command).json["error"]
    assert (error["code"], kind in error["message"]) == ("adapter-kind", True)


def test_the_line_that_a_lora_is_answered_with_works(tmp_path, monkeypatch):
    """Quantizing the adapter itself names the command that merges it, which a person pastes."""
    monkeypatch.chdir(tmp_path)
    base = write_llama(tmp_path / "base")
    name = f"{LAYER}.mlp.up_proj"
    rows, columns = read_folder(base)[f"{name}.weight"][1]
    a, b = factors(1, rows, columns)
    tensors = {f"{name}.lora_A.weight": stored(a), f"{name}.lora_B.weight": stored(b)}
    save(tmp_path / "my loras", "style.safetensors", tensors)
    error = run("quantize", "my loras/style.safetensors", "--format", "nvfp4", "--json").json[
        "error"
    ]
    assert error["code"] == "adapter"
    line = error["next"].partition("fp4convert ")[2].replace("BASE", "base")
    done(*shlex.split(line), "-o", tmp_path / "out", "-q")
