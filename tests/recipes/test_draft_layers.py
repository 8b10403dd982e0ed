"""Which modules of draft layers have a counterpart in the body, and which formats engines trip
over: names typed by hand as publishers write them.
"""

from dataclasses import replace

import pytest

from fp4convert.recipes.draft_layers import find_differing, find_drafts
from fp4convert.recipes.recipe import model_recipe

V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
BODIES = {
    "deepseek_v4": ({"model_type": "deepseek_v4"}, "layers.3.ffn.experts.7.w1", "mtp.0"),
    "deepseek_v3": (V3, "model.layers.60.mlp.experts.7.up_proj", "model.layers.61"),
    "qwen3_next": (
        {"model_type": "qwen3_next"},
        "model.layers.3.mlp.experts.7.up_proj",
        "mtp.layers.0",
    ),
    "glm4_moe": (
        {"model_type": "glm4_moe", "num_hidden_layers": 92, "num_nextn_predict_layers": 1},
        "model.layers.91.mlp.experts.7.down_proj",
        "model.layers.92",
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h"},
        "backbone.layers.4.mixer.experts.7.up_proj",
        "mtp.layers.1",
    ),
}


@pytest.mark.parametrize("family", BODIES)
def test_a_counterpart_in_the_body_makes_a_draft_module_one_of_its_kind(family):
    config, body, layer = BODIES[family]
    place = body.partition(".ffn.")[2] or body.split(".", 3)[3]
    draft = f"{layer}.{'ffn.' if '.ffn.' in body else ''}{place}"
    alone = [f"{layer}.eh_proj", f"{layer}.e_proj", f"{layer}.shared_head.head", "mtp.fc"]
    modules = [body, draft, draft.replace("experts.7", "experts.12"), *alone]
    assert find_drafts(modules, model_recipe(config)) == set(modules[1:3])
    assert find_drafts([draft, *alone], model_recipe(config)) == frozenset()
    assert find_drafts([body], model_recipe(config)) == frozenset()


def differing(config, draft_word, body_word="nvfp4"):
    words = {
        "layers.0.ffn.experts.0.w1": body_word,
        "layers.1.ffn.experts.0.w1": body_word,
        "layers.0.attn.wq_a": "",
        "mtp.0.attn.wq_a": "",
        "mtp.0.e_proj": "fp8",
        "mtp.0.ffn.experts.0.w1": draft_word,
        "mtp.0.ffn.experts.1.w1": draft_word,
    }
    return find_differing(words, config)


@pytest.mark.parametrize(
    ("draft", "word", "level"),
    [
        ("same", "nvfp4", None),
        ("same", "mxfp4", "warning"),
        ("same", "", "warning"),
        ("keep", "nvfp4", "note"),
        ("keep", "mxfp4", "warning"),
        ("keep", "", None),
        ("", "nvfp4", None),
        ("", "fp8 128x128", "warning"),
        ("", "", None),
    ],
)
def test_formats_that_engines_do_not_expect(draft, word, level):
    recipe = replace(model_recipe({"model_type": "any"}), draft=draft)
    found = differing(recipe, word)
    assert [("warning", "note")[one.is_note] for one in found] == [level] * (level is not None)
    for one in found:
        assert one.modules == ("mtp.0.ffn.experts.0.w1", "mtp.0.ffn.experts.1.w1")
        assert (one.word, one.body) == (word, "nvfp4")
        assert "2 modules" in str(one)
    assert differing(recipe, word, body_word="") == [] or not word


def test_recipes_say_what_engines_want():
    kinds = {"deepseek_v4": "same", "deepseek_v3": "keep", "qwen3_5_moe": "keep", "llama": ""}
    for kind, draft in kinds.items():
        assert model_recipe({"model_type": kind}).draft == draft
    assert model_recipe({"model_type": "deepseek_v4"}).takes_drafts
    assert not model_recipe({"model_type": "llama"}).takes_drafts
