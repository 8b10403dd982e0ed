"""What stays, what becomes what, and which modules share a scale, as recipe files and the command
line say it.
"""

from dataclasses import replace

import pytest
from families import FAMILIES
from family_tables import LAYERS

from fp4convert.errors import InputError
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe, scale_groups
from fp4convert.recipes.rules import FormatRule, Patterns
from fp4convert.recipes.toml_files import known_names


def recipe(model_type: str = "llama", include=(), exclude=(), fmt=NVFP4, rule=None):
    return build_recipe(
        Target(fmt.name, "compressed-tensors", rule),
        {"model_type": model_type},
        RecipeOptions(include=include, exclude=exclude),
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


KEEP_OUTPUTS = (
    FormatRule(Patterns(("*.o_proj",)), "keep"),
    FormatRule(Patterns(("*.q_proj",)), "fp8"),
)
OF_FAMILIES = dict.fromkeys(
    module for family in FAMILIES for group in family.groups for module in group
)


def of_file(name):
    return build_recipe(
        Target("nvfp4"), {"model_type": "llama", **LAYERS}, RecipeOptions(recipe=name)
    )


@pytest.mark.parametrize(
    "made",
    [
        recipe(include=["lm_head", "*.gate"], exclude=["re:.*up_proj$"]),
        replace(recipe(), formats=KEEP_OUTPUTS),
        *map(of_file, known_names()),
    ],
    ids=("chosen", "formats", *known_names()),
)
def test_whatever_has_a_reason_to_stay_is_among_what_is_doubtful(made):
    named = [
        pattern.replace("*", "x.7")
        for pattern in made.kept_patterns
        if not pattern.startswith("re:")
    ]
    modules = dict.fromkeys([*KEPT, *OF_FAMILIES, *named])
    stay = {module for module in modules if made.reason_to_keep(module)}
    assert stay
    assert stay <= made.pick_doubtful(modules) <= set(modules)


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
    assert recipe().target.scale_rule == "mse"
    assert recipe(fmt=MXFP4).target.scale_rule == "even"
    assert recipe(fmt=MXFP4, rule="ceil").target.scale_rule == "ceil"


@pytest.mark.parametrize(("fmt", "rule"), [(NVFP4, "even"), (MXFP4, "amax"), (NVFP4, "best")])
def test_a_rule_of_another_format_is_refused(fmt, rule):
    with pytest.raises(InputError) as caught:
        recipe(fmt=fmt, rule=rule)
    assert caught.value.code == "unknown-scale-rule"
    assert ", ".join(fmt.scale_rules) in caught.value.message
    usual = {NVFP4: "mse", MXFP4: "even"}[fmt]
    assert caught.value.next_step == f"Choose one of these, or leave it out for {usual}."


def chosen(folder, text, model=None, **choice):
    """The recipe of a user's file for a model of that config.json."""
    path = folder / "mine.toml"
    path.write_text(text)
    return build_recipe(
        Target("nvfp4", "compressed-tensors"),
        model or {"model_type": "llama"},
        RecipeOptions(recipe=str(path), **choice),
    )


MLP, ATTENTION, EXPERT = (
    "model.layers.3.mlp.up_proj",
    "model.layers.3.self_attn.o_proj",
    "model.layers.3.mlp.experts.7.up_proj",
)
QUERY = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("mode", "quantized"),
    [
        ("all", {MLP, ATTENTION, EXPERT, QUERY}),
        ("mlp_only", {MLP, EXPERT}),
        ("experts_only", {EXPERT}),
        ("omlp_only", {MLP, EXPERT, ATTENTION}),
    ],
)
def test_a_mode_says_what_may_be_quantized(mode, quantized):
    made = build_recipe(Target("nvfp4"), {"model_type": "llama"}, RecipeOptions(recipe=mode))
    assert {
        module for module in (MLP, ATTENTION, EXPERT, QUERY) if made.reason_to_keep(module) is None
    } == quantized
    assert made.reason_to_keep("lm_head") == "an output head"
    assert made.reason_to_keep("model.layers.3.mlp.gate") == "a router"
    if mode != "all":
        assert mode in made.reason_to_keep(QUERY)
    assert (
        build_recipe(
            Target("nvfp4"), {}, RecipeOptions(recipe=mode, include=(QUERY,))
        ).reason_to_keep(QUERY)
        is None
    )


def test_what_a_family_keeps_for_accuracy_a_mode_or_a_file_may_ask_for(tmp_path):
    model = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
    multi = "model.layers.61.self_attn.o_proj"
    plain = build_recipe(Target("nvfp4"), model)
    assert plain.reason_to_keep(ATTENTION) == "attention, kept for accuracy"
    assert plain.reason_to_keep(multi) == "part of a multi-token-prediction layer"
    asked = "[[format]]\nmodules = ['*.self_attn.*', 'lm_head']\nformat = 'fp8'"
    for made in (
        build_recipe(Target("nvfp4"), model, RecipeOptions(recipe="all")),
        chosen(tmp_path, asked, model),
    ):
        assert made.reason_to_keep(ATTENTION) is None
        assert made.reason_to_keep(multi) == "part of a multi-token-prediction layer"
        assert made.reason_to_keep("lm_head") == "an output head"
        assert made.pick_asked_for([ATTENTION]) == {ATTENTION}
    assert chosen(tmp_path, asked, model).format_of(ATTENTION) == "fp8"
    assert (
        build_recipe(Target("nvfp4"), model, RecipeOptions(recipe="all")).format_of(ATTENTION)
        == "nvfp4"
    )


FORMATS = """
base = "experts_only"
[[format]]
modules = ["*.q_proj"]
format = "keep"
[[format]]
modules = ["*.self_attn.*"]
format = "fp8"
[[format]]
modules = ["*.experts.7.*"]
format = "target"
[[format]]
modules = ["*.experts.*"]
format = "mxfp4"
"""


def test_the_first_format_that_fits_counts_also_outside_of_a_mode(tmp_path):
    made = chosen(tmp_path, FORMATS, include=("a.lone",))
    assert made.reason_to_keep(QUERY) == "kept by a [[format]] of the recipe"
    assert (made.reason_to_keep(ATTENTION), made.format_of(ATTENTION)) == (None, "fp8")
    assert (made.reason_to_keep(EXPERT), made.format_of(EXPERT)) == (None, "nvfp4")
    other = EXPERT.replace("7", "8")
    assert (made.reason_to_keep(other), made.format_of(other)) == (None, "mxfp4")
    assert "experts_only" in made.reason_to_keep(MLP)
    assert (made.reason_to_keep("a.lone"), made.format_of("a.lone")) == (None, "nvfp4")
    asked = chosen(tmp_path, FORMATS, include=(QUERY,), exclude=(ATTENTION,))
    assert (asked.reason_to_keep(QUERY), asked.format_of(QUERY)) == (None, "nvfp4")
    assert asked.reason_to_keep(ATTENTION) == f"excluded by {ATTENTION!r}"


def test_what_a_format_keeps_is_declared_and_what_it_quantizes_is_not(tmp_path):
    made = chosen(tmp_path, FORMATS)
    assert "*.q_proj" in made.patterns_to_declare([QUERY], [])
    model = {"model_type": "deepseek_v3"}
    asked = chosen(tmp_path, "[[format]]\nmodules = ['*.o_proj']\nformat = 'nvfp4'", model)
    assert "*.self_attn.*" in asked.patterns_to_declare([QUERY], [])
    assert "*.self_attn.*" not in asked.patterns_to_declare([QUERY], [ATTENTION])


def test_a_users_file_goes_before_a_familys_groups_and_stacks(tmp_path):
    text = """
    [[group]]
    members = ["w1", "v1", "z1"]
    [[stack]]
    tensors = ["*.experts.gate_up_proj"]
    members = ["gate_proj", "up_proj"]
    order = "out_in"
    """
    model = {"model_type": "gpt_oss"}
    made = chosen(tmp_path, text, model)
    assert scale_groups(["a.w1"], made.groups) == {"a.w1": ("a", ("w1", "v1", "z1"))}
    own = build_recipe(Target("nvfp4"), {"model_type": "dbrx"}).groups
    assert scale_groups(["a.w1"], own) == {"a.w1": ("a", ("w1", "v1"))}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert made.stack_rule(name).is_transposed is False
    own = build_recipe(Target("nvfp4"), model).stack_rule(name)
    assert (own.is_transposed, own.is_interleaved, own.members) == (
        True,
        True,
        ("gate_proj", "up_proj"),
    )


@pytest.mark.parametrize(
    ("tensor", "order", "rows", "found"),
    [
        ("a.experts.gate_up_proj", None, None, None),
        ("a.experts.gate_up_proj", "in_out", None, None),
        ("a.experts.gate_up_proj", "in_out", "interleaved", (("gate_proj", "up_proj"), True, True)),
        (
            "a.experts.gate_up_proj.weight",
            "out_in",
            "concatenated",
            (("gate_proj", "up_proj"), False, False),
        ),
        ("a.experts.w13_weight", "out_in", "interleaved", (("w1", "w3"), False, True)),
        ("a.experts.down_proj", "in_out", None, (("down_proj",), True, False)),
        ("a.experts.down_proj", "out_in", "interleaved", (("down_proj",), False, False)),
        ("a.experts.down_proj", None, None, None),
    ],
)
def test_a_person_settles_a_stack_that_no_recipe_names(tensor, order, rows, found):
    choice = RecipeOptions(stack_order=order, stack_rows=rows)
    rule = build_recipe(Target("nvfp4"), {"model_type": "unheard_of"}, choice).stack_rule(
        tensor, (2, 32, 64)
    )
    assert found == (rule and (rule.members, rule.is_transposed, rule.is_interleaved))


def test_a_person_goes_before_a_recipe_and_one_member_takes_no_turns():
    options = RecipeOptions(stack_order="out_in", stack_rows="interleaved")
    made = build_recipe(Target("nvfp4"), {"model_type": "gpt_oss"}, options)
    for leaf, turns in (("gate_up_proj", True), ("down_proj", False)):
        rule = made.stack_rule(f"model.layers.0.mlp.experts.{leaf}")
        assert (rule.is_transposed, rule.is_interleaved) == (False, turns)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("audio.conv1.weight", (8, 1, 3)),
        ("a.experts.gate_up_proj_bias", (2, 64)),
        ("a.experts.down_proj_scale_inv", (2, 1, 1)),
    ],
)
def test_what_is_no_stack_of_experts_stays_none_whatever_a_person_says(tensor, shape):
    choice = RecipeOptions(stack_order="out_in", stack_rows="interleaved")
    assert (
        build_recipe(Target("nvfp4"), {"model_type": "unheard_of"}, choice).stack_rule(
            tensor, shape
        )
        is None
    )


@pytest.mark.parametrize(
    ("order", "rows"), [("oi", None), ("", None), ("out_in", "mixed"), (None, "interleaved")]
)
def test_other_words_for_stacks_are_refused(order, rows):
    with pytest.raises(InputError) as caught:
        build_recipe(Target("nvfp4"), {}, RecipeOptions(stack_order=order, stack_rows=rows))
    assert caught.value.code == "unknown-stack"
    assert "expected" in caught.value.message
