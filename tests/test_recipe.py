"""What stays, what becomes what, and which modules share a scale, as recipe files and the command line say it."""

import pytest

from fp4convert.errors import InputError
from fp4convert.formats import MXFP4, NVFP4
from fp4convert.recipe import Choice, Target, build_recipe


def recipe(model_type: str = "llama", include=(), exclude=(), fmt=NVFP4, rule=None):
    return build_recipe(
        Target(fmt.name, "compressed-tensors", rule), {"model_type": model_type}, Choice(None, tuple(include), tuple(exclude))
    )


@pytest.mark.parametrize("pattern", ["re:(", "re:*a", "re:[z-a]"])
def test_a_bad_expression_is_refused_before_anything_else(pattern):
    for patterns in ({"include": [pattern]}, {"exclude": [pattern]}):
        with pytest.raises(InputError) as caught:
            recipe(**patterns)
        assert caught.value.code == "bad-pattern"
        assert repr(pattern) in caught.value.message


KEPT = {
    "model.embed_tokens": "an embedding",
    "transformer.wte": "an embedding",
    "bert.embeddings.word_embeddings": "an embedding",
    "shared": "an embedding",
    "lm_head": "an output head",
    "output": "an output head",
    "score": "an output head",
    "classifier": "an output head",
    "cls.predictions.decoder": "an output head",
    "qa_outputs": "an output head",
    "model.layers.0.input_layernorm": "a norm",
    "model.norm": "a norm",
    "h.0.ln_1": "a norm",
    "model.layers.0.mlp.gate": "a router",
    "model.layers.0.block_sparse_moe.gate": "a router",
    "model.layers.0.mlp.router": "a router",
    "model.layers.0.mlp.shared_expert_gate": "a router",
    "model.layers.0.linear_attn.in_proj_a": "a small recurrent parameter",
    "model.layers.0.linear_attn.conv1d": "a small recurrent parameter",
    "mtp.layers.0.mlp.up_proj": "part of a multi-token-prediction layer",
    "model.visual.blocks.0.attn.qkv": "part of a vision or audio tower",
    "vision_tower.layers.0.fc1": "part of a vision or audio tower",
}


@pytest.mark.parametrize("module", KEPT)
def test_what_every_model_keeps(module):
    assert recipe().reason_to_keep(module) == KEPT[module]


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.experts.3.w1",
        "model.layers.0.mlp.shared_expert.up_proj",
        "bert.encoder.layer.0.attention.output.dense",
        "decoder.block.0.layer.0.SelfAttention.q",
        "transformer.h.0.attn.c_attn",
        "model.layers.0.linear_attn.in_proj_qkvz",
        "model.layers.0.linear_attn.out_proj",
        "model.layers.0.linear_attn.in_proj_qkv",
    ],
)
def test_what_is_an_ordinary_linear_layer(module):
    assert recipe().reason_to_keep(module) is None


def test_exclude_goes_before_include_before_the_recipe():
    chosen = recipe(include=["lm_head", "a.*"], exclude=["a.b"])
    assert chosen.reason_to_keep("lm_head") is None
    assert chosen.reason_to_keep("a.norm") is None
    assert chosen.reason_to_keep("a.b") == "excluded by 'a.b'"
    assert chosen.reason_to_keep("score") == "an output head"


@pytest.mark.parametrize("model_type", ["gpt2", "openai-gpt", "imagegpt", "decision_transformer"])
def test_a_family_adds_its_own_rules(model_type):
    reason = "a Conv1D, whose weight is stored (in, out)"
    for module in ("transformer.h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc"):
        assert recipe(model_type).reason_to_keep(module) == reason
    assert recipe(model_type).reason_to_keep("transformer.wpe") == "an embedding"


@pytest.mark.parametrize("model_type", ["llama", "", "GPT2"])
def test_another_model_type_has_the_common_rules_alone(model_type):
    assert recipe(model_type).reason_to_keep("h.0.attn.c_attn") is None


def test_the_layers_that_engines_fuse_share_a_scale():
    groups = set(recipe().groups)
    for names in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("to_q", "to_k", "to_v"),
    ):
        assert names in groups


def test_the_rule_is_the_formats_own_where_none_is_asked_for():
    assert recipe().target.scale_rule == "amax"
    assert recipe(fmt=MXFP4).target.scale_rule == "even"
    assert recipe(fmt=MXFP4, rule="ceil").target.scale_rule == "ceil"


@pytest.mark.parametrize(("fmt", "rule"), [(NVFP4, "even"), (MXFP4, "amax"), (NVFP4, "best")])
def test_a_rule_of_another_format_is_refused(fmt, rule):
    with pytest.raises(InputError) as caught:
        recipe(fmt=fmt, rule=rule)
    assert caught.value.code == "unknown-scale-rule"
    assert ", ".join(fmt.scale_rules) in caught.value.message
