"""docs/recipes.md: every example is a recipe file, and does what the text around it says."""

import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Tensor, run, weight, write_single
from paths import ROOT

from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Recipe, Target, build_recipe, scale_groups
from fp4convert.recipes.rules import StackRule
from fp4convert.recipes.toml_files import _FILE, _ROWS, parse

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **{
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_num_experts": 2,
        "moe_intermediate_size": 48,
    },
}


def example(text: str, heading: str) -> str:
    """The first TOML block below that heading."""
    return re.search(r"```toml\n(.*?)```", text.partition(heading)[2], re.DOTALL)[1]


def recipe(text: str, tmp_path: Path) -> Recipe:
    """The recipe that a model has with that file."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return build_recipe(Target("nvfp4"), CONFIG, RecipeOptions(recipe=str(path)))


def test_every_example_is_a_recipe_file(tmp_path):
    examples = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 11
    for text in examples:
        assert parse(text, "mine.toml", is_users=True)
        assert recipe(text, tmp_path)


def test_every_key_is_explained_and_has_an_example():
    examples = "".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    prose = re.sub(r"```toml\n.*?```", "", PAGE, flags=re.DOTALL)
    tables = ("keep", "only", "format", "group", "stack", "fold", "experts")
    for key in {*_FILE, *(key for table in tables for key in _ROWS[table])} - {*tables}:
        assert f"`{key}`" in prose, key
        assert re.search(rf"^{key} = ", examples, re.MULTILINE) or key in (
            "model_types",
            "class_names",
        ), key
    assert set(_ROWS) == set(tables)
    assert all(f"[[{table}]]" in examples for table in tables)


def test_layer_numbers(tmp_path):
    made = recipe(example(PAGE, "## Patterns"), tmp_path)
    why = [made.reason_to_keep(f"model.layers.{layer}.mlp.experts.0.up_proj") for layer in range(6)]
    assert why == [
        "the first layers, and the last two",
        None,
        None,
        None,
        *["the first layers, and the last two"] * 2,
    ]


def test_keep_for_accuracy_gives_way_to_a_format_and_a_router_does_not(tmp_path):
    kept, override = (
        example(PAGE, "## `[[keep]]`"),
        '[[format]]\nmodules = ["*"]\nformat = "target"\n',
    )
    made = recipe(kept + override, tmp_path)
    assert made.reason_to_keep("model.layers.0.mlp.gate") == "a router"
    assert made.reason_to_keep("model.layers.0.self_attn.q_proj") is None
    assert (
        recipe(kept, tmp_path).reason_to_keep("model.layers.0.self_attn.q_proj")
        == "attention, kept for accuracy"
    )
    assert made.kind_of("model.layers.0.mlp.gate") == "router"
    assert "score_head" in made.patterns_to_declare([], [])


def test_only(tmp_path):
    made = recipe(example(PAGE, "## `[[only]]`"), tmp_path)
    names = ("self_attn.q_proj", "mlp.experts.1.up_proj", "mlp.gate")
    assert [made.reason_to_keep(f"model.layers.0.{name}") for name in names] == [
        "not in an MLP",
        None,
        "a router",
    ]


def test_formats(tmp_path):
    made = recipe(example(PAGE, "## `[[format]]`"), tmp_path)
    assert (
        made.reason_to_keep("model.layers.0.self_attn.q_proj")
        == "kept by a [[format]] of the recipe"
    )
    assert made.reason_to_keep("model.layers.1.self_attn.q_proj") is None
    assert made.format_of("model.layers.1.self_attn.q_proj") == "fp8"
    assert made.format_of("model.layers.1.mlp.experts.0.up_proj") == "nvfp4"


def test_groups(tmp_path):
    made = recipe(example(PAGE, "## `[[group]]`"), tmp_path)
    (group,) = scale_groups(["transformer.blocks.0.ffn.v1"], made.groups).values()
    assert group.members == ("w1", "v1")
    assert {"k_proj", "v_proj"} <= made.may_lack


def test_stacks(tmp_path):
    made = recipe(example(PAGE, "## `[[stack]]`"), tmp_path)
    fused = made.stack_rule("model.layers.0.mlp.experts.gate_up_proj", (2, 64, 96))
    assert isinstance(fused, StackRule)
    assert (fused.members, fused.is_transposed, fused.is_interleaved) == (
        ("gate_proj", "up_proj"),
        True,
        True,
    )
    for shape, is_transposed in (((2, 64, 48), False), ((2, 48, 64), True)):
        assert (
            made.stack_rule("model.layers.0.mlp.experts.down_proj", shape).is_transposed
            is is_transposed
        )
    below = made.stack_rule("transformer.blocks.3.ffn.experts.mlp.w1")
    assert (below.experts, below.module("transformer.blocks.3.ffn.experts.mlp.w1", 1, "w1")) == (
        2,
        "transformer.blocks.3.ffn.experts.mlp.1.w1",
    )


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_the_first_recipe_makes_experts_four_bit_and_attention_fp8(dialect, tmp_path):
    (tmp_path / "mine.toml").write_text(example(PAGE, "# Recipe files"))
    layer = "model.layers.0"
    tensors: dict[str, Tensor] = {
        **{
            f"{layer}.self_attn.{name}_proj.weight": weight(seed) for seed, name in enumerate("qkv")
        },
        **{
            f"{layer}.mlp.experts.{expert}.{name}_proj.weight": weight(10 + expert)
            for expert in range(2)
            for name in ("gate", "up", "down")
        },
        **{f"{layer}.mlp.gate.weight": weight(20, 2, 64), "model.embed_tokens.weight": weight(21)},
    }
    source = write_single(tmp_path / "m", tensors, {**CONFIG, "num_hidden_layers": 1})
    out = tmp_path / "q"
    made = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--recipe",
        tmp_path / "mine.toml",
        "-o",
        out,
        "-q",
        "--json",
    )
    assert made.code == 0, made.err
    found = run("inspect", out, "--json").json
    assert (found["healthy"], found["format"]) == (True, "mixed")
    assert {form["format"]: form["modules"] for form in found["forms"]} == {"nvfp4": 6, "fp8": 3}
    measured = run("verify", out, "--source", source, "--json").json
    assert measured["passed"]
    quality = {row["name"]: row["sqnr_db"] for row in measured["tensors"]}
    assert min(decibels for name, decibels in quality.items() if "self_attn" in name) > 30
    assert max(decibels for name, decibels in quality.items() if "experts" in name) < 25
