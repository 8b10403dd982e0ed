"""Folds: which there are in every family, and that transformers computes with them what it did
without.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, bf16, values_of, write_single
from folding_llama import LLAMA, TENSORS, bf16_norm
from folding_models import MODELS, build, outputs, write_as
from paths import ROOT
from tiny_models import read_tensors

from fp4convert.calibration.methods.awq import storable
from fp4convert.calibration.methods.folds import Fold
from fp4convert.calibration.methods.scaled_weights import divided, quotients
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.encodings.base import Factors
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.planning.fold_plan import FoldedLayers, use_folds
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Recipe, Target, build_recipe
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Source

ATTENTION = ("input_layernorm", "self_attn.v_proj")
GATED = (*ATTENTION, "post_attention_layernorm", "mlp.up_proj")
FEEDFORWARD = (*ATTENTION, "pre_feedforward_layernorm", "mlp.up_proj")
EXPERTS = tuple(f"mlp.experts.{number}.up_proj" for number in range(4))
LATENT = (
    "input_layernorm",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_layernorm",
    "post_attention_layernorm",
)
# Typed by hand from transformers' forward functions.
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), (GATED, GATED)),
    **dict.fromkeys(("gemma2", "gemma3"), (FEEDFORWARD, FEEDFORWARD)),
    "phi": (ATTENTION, ATTENTION),
    "phi3": (("input_layernorm", "post_attention_layernorm"),) * 2,
    **dict.fromkeys(("cohere", "cohere2"), ((*ATTENTION, "mlp.up_proj"),) * 2),
    "olmo": (("mlp.up_proj",),) * 2,
    "olmo2": (("self_attn.v_proj", "mlp.up_proj"),) * 2,
    "bert": (("attention.self.value",),) * 2,
    "mixtral": ((*GATED[:3], *(f"block_sparse_moe.experts.{number}.w3" for number in range(4))),)
    * 2,
    "qwen2_moe": (GATED, (*GATED[:3], *EXPERTS, "mlp.shared_expert.up_proj")),
    "qwen3_moe": ((*GATED[:3], *EXPERTS), GATED),
    "deepseek_v2": ((*LATENT, "mlp.up_proj"), (*LATENT, *EXPERTS, "mlp.shared_experts.up_proj")),
    "deepseek_v32": ((*LATENT, "mlp.up_proj"), (*LATENT, *EXPERTS, "mlp.shared_experts.up_proj")),
    "deepseek_v3": (
        (*LATENT[:1], *LATENT[2:], "mlp.up_proj"),  # without q_a_proj
        (*LATENT[:1], *LATENT[2:], *EXPERTS, "mlp.shared_experts.up_proj"),
    ),
}
EVERYTHING = RecipeOptions(recipe="all")
PREFIXES = {"bert": "encoder.layer", "gemma3": "language_model.model.layers"}


def recipe_of(source: Source, choice: RecipeOptions) -> Recipe:
    return build_recipe(Target("nvfp4", "plain"), source.checkpoint.config, choice)


def merged(source: Source, choice: RecipeOptions = EVERYTHING) -> FoldedLayers:
    """Every fold, with factors between 1/8 and 8 that nothing asks for."""

    def find(fold: Fold, source: Source) -> Factors:
        random = np.random.default_rng(sum(map(ord, fold.name)))
        return storable(fold, source, np.exp2(random.uniform(-3, 3, fold.outputs)))

    recipe = recipe_of(source, choice)
    return use_folds(
        source.checkpoint, recipe, find_linears(source, recipe), dialect_named("plain"), find
    )


def folded(source: Source, found: FoldedLayers, tensors: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's tensors as the folds make them, nothing rounded to four bits."""
    import torch

    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for linear in (*found.linears.of.values(), *found.linears.vectors.values()):
        if linear.coding.foldings:
            values = linear.coding.weights(linear, source).rows(0, linear.shape[0])
            assert values.dtype == "F32"
            tensor = result[linear.refs[0].name]
            tensor.copy_(
                torch.frombuffer(bytearray(values.data), dtype=torch.float32).reshape(tensor.shape)
            )
    return result


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def checkpoint(
    name: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if name not in checkpoints:
        checkpoints[name] = build(name, tmp_path_factory.mktemp(name))
    return checkpoints[name]


@pytest.fixture(params=MODELS)
def model(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
):
    return request.param, checkpoint(request.param, checkpoints, tmp_path_factory)


@pytest.mark.engine
def test_the_folds_of_every_family_are_those_that_its_code_allows(model):
    name, folder = model
    source = open_source(str(folder))
    found = merged(source)
    prefix = PREFIXES.get(name, "model.layers")
    expected = {
        f"{prefix}.{layer}.{place}" for layer, places in enumerate(LAYERS[name]) for place in places
    }
    assert {fold.name for fold in found.folds} == expected
    assert not [note for note in found.notes if "not used" in note]


@pytest.mark.sweep(3)
@pytest.mark.engine
def test_a_folded_model_computes_what_it_did(model, tmp_path):
    name, folder = model
    source = open_source(str(folder))
    tensors = read_tensors(folder)
    changed = folded(source, merged(source), tensors)
    assert sum(not changed[name].equal(tensors[name]) for name in tensors) >= 4
    before = outputs(name, folder)
    after = outputs(name, write_as(folder, changed, tmp_path / "folded"))
    assert before.std() > 0.01
    assert (before - after).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama")],
)
def test_every_tensor_that_a_fold_changes_has_to_change(
    name, checkpoints, tmp_path_factory, tmp_path
):
    """A list that names a reader too many, or one too few, would show: with any one of them as it
    was, the model is another.
    """
    folder = checkpoint(name, checkpoints, tmp_path_factory)
    tensors = read_tensors(folder)
    changed = folded(open_source(str(folder)), merged(open_source(str(folder))), tensors)
    before = outputs(name, folder)
    last = f"{PREFIXES.get(name, 'model.layers')}.1."
    touched = [
        each for each in tensors if each.startswith(last) and not changed[each].equal(tensors[each])
    ]
    assert touched
    for number, each in enumerate(touched):
        mixed = {**changed, each: tensors[each]}
        after = outputs(name, write_as(folder, mixed, tmp_path / str(number)))
        assert (before - after).abs().max() > 1e-4 * before.abs().max(), each


ALL = {f"model.layers.0.{name}" for name in GATED}


def names_and_notes(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any] = LLAMA, **choice: Any
):
    """The folds that a checkpoint gets, and what it is told of others."""
    source = open_source(str(write_single(tmp_path / "m", tensors, config)))
    found = merged(source, RecipeOptions(**choice))
    return {fold.name for fold in found.folds}, " ".join(found.notes)


def without(name: str) -> dict[str, Tensor]:
    return {each: tensor for each, tensor in TENSORS.items() if name not in each}


def test_a_whole_layer_has_every_fold(tmp_path):
    assert names_and_notes(tmp_path, TENSORS) == (ALL, "")


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (2, 64, 8), (64, 1)])
def test_a_layer_with_a_matrix_that_no_row_names_is_left_alone(shape, tmp_path):
    stranger = {"model.layers.0.self_attn.adapter.weight": ("BF16", shape, bf16(*shape)), **TENSORS}
    second = {name.replace("layers.0", "layers.1"): tensor for name, tensor in TENSORS.items()}
    names, notes = names_and_notes(tmp_path, {**stranger, **second})
    assert names == {name.replace("layers.0", "layers.1") for name in ALL}
    assert "4 folds are not used" in notes
    assert (
        "the recipe does not list model.layers.0.self_attn.adapter, which may read it too" in notes
    )
    assert "modules have no fold and are rounded as they are" in notes


@pytest.mark.parametrize(
    ("lacking", "left"),
    [
        ("k_proj", {"self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"}),
        ("o_proj", {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"}),
        ("gate_proj", {"input_layernorm", "self_attn.v_proj", "mlp.up_proj"}),
        ("input_layernorm", {"self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"}),
    ],
)
def test_a_fold_needs_all_that_its_row_names(lacking, left, tmp_path):
    names, notes = names_and_notes(tmp_path, without(lacking))
    assert names == {f"model.layers.0.{name}" for name in left}
    assert ("is not there" in notes) == ("proj" in lacking and lacking != "o_proj")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads 4 and num_key_value_heads 4"),
        ({"num_key_value_heads": None}, "num_key_value_heads None"),
        ({"num_attention_heads": 8}, "num_attention_heads 8 and num_key_value_heads 2"),
    ],
)
def test_heads_that_do_not_fit_have_no_fold(changes, words, tmp_path):
    names, notes = names_and_notes(tmp_path, TENSORS, {**LLAMA, **changes})
    assert names == ALL - {"model.layers.0.self_attn.v_proj"}
    assert words in notes


def test_shapes_that_do_not_fit_have_no_fold(tmp_path):
    odd = {
        **TENSORS,
        "model.layers.0.input_layernorm.weight": bf16_norm(32),
        "model.layers.0.mlp.up_proj.bias": bf16_norm(64),
    }
    names, notes = names_and_notes(tmp_path, odd)
    assert names == {"model.layers.0.self_attn.v_proj", "model.layers.0.post_attention_layernorm"}
    assert "q_proj has 64 columns, and expected 1 for each of 32 outputs" in notes
    assert "mlp.up_proj.bias is BF16 [64]; expected 96 floats" in notes


def test_a_reader_that_stays_asks_for_powers_of_two_and_is_multiplied(tmp_path):
    source = open_source(str(write_single(tmp_path / "m", TENSORS, LLAMA)))
    found = merged(source, RecipeOptions(exclude=("*.k_proj", "*.up_proj")))
    exact = {fold.name: fold.is_exact for fold in found.folds}
    assert exact == {f"model.layers.0.{name}": True for name in GATED}
    plain = {fold.name: fold.is_exact for fold in merged(source, RecipeOptions()).folds}
    assert plain == {f"model.layers.0.{name}": name.endswith("_proj") for name in GATED}
    for linear in (*found.linears.of.values(), *found.linears.vectors.values()):
        for folding in linear.coding.foldings:
            mantissas, _ = np.frexp(folding.find(source).columns)
            assert (mantissas == 0.5).all()
    kept = found.linears.of["model.layers.0.self_attn.k_proj"]
    (folding,) = kept.coding.foldings
    rows = kept.coding.weights(kept, source).rows(0, 64).data
    values = np.frombuffer(rows, np.float32).reshape(64, 64)
    stored = np.frombuffer(source.read(kept.refs[0]), ml_dtypes.bfloat16)
    stored = stored.astype(np.float32).reshape(64, 64)
    assert (values == stored * folding.find(source).columns).all()
    assert (values == values.astype(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("biased", ["input_layernorm", "self_attn.v_proj", "mlp.up_proj"])
def test_a_bias_is_divided_without_rounding(biased, tmp_path):
    """By powers of two; the bias of a norm makes its factors such, too."""
    outputs_of = {"input_layernorm": 64, "self_attn.v_proj": 64, "mlp.up_proj": 96}
    name = f"model.layers.0.{biased}.bias"
    tensors = {**TENSORS, name: bf16_norm(outputs_of[biased])}
    source = open_source(str(write_single(tmp_path / "m", tensors, LLAMA)))
    found = merged(source, RecipeOptions())
    assert {fold.name: fold.is_exact for fold in found.folds}[f"model.layers.0.{biased}"]
    linear = found.linears.vectors[name]
    before = values_of(bf16_norm(outputs_of[biased]))
    row = linear.coding.weights(linear, source).rows(0, 1).data
    after = np.frombuffer(row, ml_dtypes.bfloat16).astype(np.float64)
    (folding,) = linear.coding.foldings
    assert (after * folding.find(source).made == before).all()
    assert (after != before).any()


@pytest.mark.parametrize("kind", ["norm", "norm_plus_one"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_divided_norm_and_its_factors_give_the_norm_back(kind, dtype):
    """Rounding the norm does not show: the factor is what it takes to undo it."""
    random = np.random.default_rng(0)
    stored = FLOAT_DTYPES[dtype]
    before = random.normal(0.3, 1, 4096).astype(np.float32).astype(stored).astype(np.float32)
    after = divided(before, np.exp2(random.uniform(-4, 4, 4096)).astype(np.float32), kind, dtype)
    assert (after == after.astype(stored).astype(np.float32)).all()
    factors = quotients(before, after, kind)
    one = 1.0 if kind == "norm_plus_one" else 0.0
    is_sound = np.isfinite(factors) & (factors > 0)
    assert is_sound.mean() > 0.99
    again, whole = (one + after.astype(np.float64)) * factors, one + before.astype(np.float64)
    assert (np.abs(again - whole) <= 3e-7 * np.abs(whole))[is_sound].all()


def test_a_model_without_folds_is_refused(tmp_path):
    unknown = {"model_type": "never_heard_of"}
    source = open_source(str(write_single(tmp_path / "m", TENSORS, unknown)))
    why = "no fold is known for model type never_heard_of"
    with pytest.raises(InputError, match=why) as caught:
        merged(source, RecipeOptions())
    assert "\n" not in caught.value.message
    source = open_source(str(write_single(tmp_path / "n", TENSORS, LLAMA)))
    with pytest.raises(InputError, match="no fold of model type llama reaches a four-bit module"):
        merged(source, RecipeOptions(exclude=("*layers*",), include=("model.embed",)))


def test_rows_of_a_users_file_are_used(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[fold]]\ninto = "{layer}.mlp.up_proj"\nkind = "linear"\n'
        'linears = ["{layer}.mlp.down_proj"]\n'
        'aside = ["{layer}.self_attn.q_proj", "{layer}.self_attn.k_proj",'
        ' "{layer}.self_attn.v_proj", "{layer}.self_attn.o_proj",'
        ' "{layer}.mlp.gate_proj"]\n'
    )
    names, notes = names_and_notes(
        tmp_path, TENSORS, {"model_type": "mine"}, recipe=str(tmp_path / "mine.toml")
    )
    assert names == {"model.layers.0.mlp.up_proj"}
    assert "6 modules have no fold and are rounded as they are: self_attn.q_proj (1)" in notes


def test_two_rows_for_one_place_are_none(tmp_path):
    row = (
        '[[fold]]\ninto = "{layer}.mlp.up_proj"\nkind = "linear"\n'
        'linears = ["{layer}.mlp.down_proj"]\n'
    )
    (tmp_path / "mine.toml").write_text('base = "llama"\n' + row)
    names, notes = names_and_notes(tmp_path, TENSORS, LLAMA, recipe=str(tmp_path / "mine.toml"))
    assert names == ALL - {"model.layers.0.mlp.up_proj"}
    assert "two rules name it" in notes


def test_a_row_whose_readers_are_of_no_expert_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[fold]]\ninto = "{layer}.mlp.experts.{expert}.up_proj"\nkind = "linear"\n'
        'linears = ["{layer}.mlp.down_proj"]\n'
    )
    with pytest.raises(InputError, match="does not name layer and expert, which `into` does"):
        names_and_notes(tmp_path, TENSORS, LLAMA, recipe=str(tmp_path / "mine.toml"))


def test_the_page_of_methods_and_the_changelog_count_the_model_types_with_folds():
    files = {
        path.stem: tomllib.loads(path.read_text()) for path in (ROOT / "configs").glob("*.toml")
    }

    def has_folds(name: str) -> bool:
        return "fold" in files[name] or ("base" in files[name] and has_folds(files[name]["base"]))

    kinds = {
        kind
        for name, file in files.items()
        if has_folds(name)
        for kind in file.get("model_types", ())
    }
    said = re.findall(r"(\d+) model types", (ROOT / "docs" / "methods.md").read_text())
    assert said == [str(len(kinds))]
