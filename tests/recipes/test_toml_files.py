"""Recipe files: what configs/ holds, what a user's file may say, and what is refused with file, key
and what was expected.
"""

import re

import pytest
from checkpoints import run
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from fp4convert.errors import InputError
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import compiled
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.recipes.rules import KeepRule, StackRule
from fp4convert.recipes.toml_files import (
    NO_RECIPES,
    RecipeFile,
    chosen_files,
    families_of,
    known_file,
    known_names,
    parse,
)

CONFIGS = ROOT / "configs"
MODES = ("all", "mlp_only", "experts_only", "omlp_only")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml") if path.name not in NO_RECIPES)
NUMBERS = {
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 2,
    "num_layers": 8,
    "hidden_size": 64,
}
STACK = '[[stack]]\ntensors = ["*.e"]\nmembers = ["a"]\n'


@pytest.mark.parametrize("name", NAMES)
def test_every_file_loads_says_what_it_is_and_names_its_sources(name):
    text = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert re.search(r"\bSources?:", comment), "a comment that begins with Source: or Sources:"
    file = known_file(name)
    assert file.about
    recipe = build_recipe(Target("nvfp4"), NUMBERS, RecipeOptions(recipe=name))
    patterns = [
        pattern
        for rule in (*recipe.keep, *recipe.only, *recipe.formats)
        for pattern in rule.patterns
    ]
    for pattern in (*patterns, *(pattern for rule in recipe.stacks for pattern in rule.tensors)):
        compiled(pattern)
        assert "{" not in pattern


def test_modes_and_default_are_there_and_no_model_belongs_to_two_files():
    assert set(MODES) < set(known_names())
    assert "default" not in known_names()
    kinds = [
        kind
        for name in NAMES
        for kind in (*known_file(name).model_types, *known_file(name).class_names)
    ]
    assert len(kinds) == len(set(kinds)) > 100
    assert all(known_file(name).is_mode for name in MODES)


def test_families_are_found_by_any_model_type_and_by_the_class_of_a_pipelines_part():
    assert [file.name for file in families_of(["kimi_k25", "kimi_k2"])] == ["deepseek", "kimi_k2"]
    assert [file.name for file in families_of(["WanTransformer3DModel"])] == ["wan"]
    assert families_of(["never_heard_of"]) == []
    assert [file.name for file in families_of(["dbrx", "aria"])] == ["aria", "dbrx"]
    for config in (
        {"text_config": {"model_type": "deepseek_v3"}},
        {"_class_name": "WanTransformer3DModel", "model_type": 3},
    ):
        recipe = build_recipe(Target("nvfp4"), {"num_layers": 8, **config})
        assert recipe.reason_to_keep("blocks.0.self_attn.o_proj")
        assert recipe.reason_to_keep("blocks.0.mlp.up_proj") is None or "_class_name" in config


def test_a_plan_reads_the_files_of_its_model_alone():
    known_file.cache_clear()
    build_recipe(Target("nvfp4"), {"model_type": "kimi_k2"})
    assert known_file.cache_info().currsize == 3  # default, deepseek, kimi_k2


def test_a_config_of_any_depth_is_searched():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 3}
    for _ in range(20_000):
        config = {"inner": config}
    made = build_recipe(Target("nvfp4"), config)
    assert (
        made.reason_to_keep("model.layers.3.mlp.up_proj")
        == "part of a multi-token-prediction layer"
    )


def test_what_a_file_may_say():
    text = """
    about = "mine"
    base = "mlp_only"
    [[keep]]
    reason = "a toy"
    modules = ["a", "b.*"]
    kind = "router"
    may_be_absent = true
    for_accuracy = true
    unless = ["b.0"]
    [[stack]]
    tensors = ["*.w13"]
    members = ["w1", "w3"]
    order = "in_out"
    rows = "interleaved"
    named = "{parent}.x.{expert}.{member}"
    inputs = "hidden_size"
    experts = "moe_num_experts"
    """
    file = parse(text, "mine.toml", is_users=True)
    assert (file.about, file.bases, file.is_mode) == ("mine", ("mlp_only",), True)
    assert file.keep == (KeepRule(("a", "b.*"), "a toy", "router", True, True, ("b.0",)),)
    named = "{parent}.x.{expert}.{member}"
    keys = {"inputs_key": "hidden_size", "experts_key": "moe_num_experts"}
    assert file.stacks == (StackRule(("*.w13",), ("w1", "w3"), True, True, named, **keys),)


def test_ranges_are_filled_where_a_rule_makes_exceptions(tmp_path):
    """They were left as they are, and fitted nothing."""
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[keep]]\nreason = "x"\nmodules = ["*.up_proj"]\nunless = ["layers.{0:2}.*"]\n'
    )
    made = build_recipe(Target("nvfp4"), {"num_hidden_layers": 3}, RecipeOptions(recipe=path))
    kept = [made.reason_to_keep(f"layers.{number}.up_proj") for number in range(3)]
    assert kept == [None, None, "x"]


def test_ranges_are_filled_where_a_rule_names_routers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[experts]]\ncounts = ["n"]\nchosen = ["k"]\n'
        'rows = ["layers.{1:num_hidden_layers}.gate"]\ncolumns = ["layers.{0:1}.bias"]\n'
    )
    made = build_recipe(Target("nvfp4"), {"num_hidden_layers": 3}, RecipeOptions(recipe=path))
    assert made.experts[0].rows == ("layers.1.gate", "layers.2.gate")
    assert made.experts[0].columns == ("layers.0.bias",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = [", ("not valid TOML",)),
        ("a = " + "1" * 5000, ("not valid TOML",)),
        ("a = " + "[" * 5000 + "]" * 5000, ("not valid TOML",)),
        ("keeps = 1", ("'keeps'", "about, model_types")),
        ("about = 3", ("about is 3", "a text")),
        ("base = 3", ("base is 3", "a name, or a list of names")),
        ("base = []", ("base is []",)),
        ("base = [1]", ("base is [1]",)),
        ("[keep]\nreason = 'x'", ("keep is", "double brackets")),
        ("keep = [3]", ("[[keep]] 1 is not a table",)),
        ("[[keep]]\nmodules = ['a']", ("[[keep]] 1", "reason is missing", "a text")),
        ("[[keep]]\nreason = 'x'", ("[[keep]] 1", "modules is missing", "a list of texts")),
        ("[[keep]]\nreason = 'x'\nmodules = []", ("modules is []",)),
        ("[[keep]]\nreason = 'x'\nmodules = 'a'", ("modules is 'a'",)),
        ("[[keep]]\nreason = ''\nmodules = ['a']", ("reason is ''",)),
        (
            "[[keep]]\nreason = 'x'\nmodules = ['a']\nkind = 'toy'",
            ("kind is 'toy'", "'embedding' or 'router' or 'tower' or 'prediction'"),
        ),
        (
            "[[keep]]\nreason = 'x'\nmodules = ['a']\nmay_be_absent = 1",
            ("may_be_absent is 1", "true or false"),
        ),
        (
            "[[keep]]\nreason = 'x'\nmodules = ['a']\n[[keep]]\nreasons = 'y'",
            ("[[keep]] 2", "'reasons'"),
        ),
        ("[[only]]\nmodules = ['a']", ("[[only]] 1", "reason is missing")),
        ("[[group]]\nmembers = 'a'", ("[[group]] 1", "members is 'a'")),
        (STACK, ("[[stack]] 1", "order is missing", "'out_in' or 'in_out'")),
        (f"{STACK}order = 'oi'", ("order is 'oi'",)),
        (
            f"{STACK}order = 'out_in'\nrows = 'mixed'",
            ("rows is 'mixed'", "'concatenated' or 'interleaved'"),
        ),
        (f"{STACK}order = 'out_in'\nnamed = '{{parent}}.x'", ("named is", "{expert}")),
        (f"{STACK}order = 'out_in'\nnamed = '{{expert}}.{{layer}}'", ("named is",)),
        (
            "[[format]]\nmodules = ['a']\nformat = 'int4'",
            ("format is 'int4'", "'nvfp4' or 'mxfp4' or 'fp8' or 'mxfp8' or 'keep'"),
        ),
        ("model_types = ['llama']", ("model_types", "own files")),
        ("class_names = ['Flux']", ("class_names", "own files")),
    ],
)
def test_a_wrong_file_is_refused_with_what_was_expected(text, words, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        chosen_files(str(path))
    assert caught.value.code == "recipe-file"
    for word in (str(path), *words):
        assert word in caught.value.message


VALUES = st.recursive(
    st.sampled_from(
        [
            "true",
            "3",
            "1.5",
            "''",
            "'a'",
            "'keep'",
            "'out_in'",
            "1979-05-27",
            "'{expert}'",
            "'re:('",
        ]
    ),
    lambda inner: st.lists(inner, max_size=2).map(lambda values: f"[{', '.join(values)}]"),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [
        "about",
        "base",
        "keep",
        "only",
        "modules",
        "reason",
        "kind",
        "tensors",
        "members",
        "order",
        "named",
        "x",
    ]
)
LINES = st.one_of(
    st.builds("{} = {}".format, KEYS, VALUES),
    st.sampled_from(
        ["[[keep]]", "[[only]]", "[[group]]", "[[stack]]", "[[format]]", "[keep]", "[stack]"]
    ),
)


@given(st.lists(LINES, max_size=6))
def test_any_file_is_taken_or_refused(lines):
    try:
        found = parse("\n".join(lines), "mine.toml")
    except InputError as error:
        found = error
    assert isinstance(found, RecipeFile) or (
        found.code == "recipe-file" and "mine.toml" in found.message
    )


@pytest.mark.parametrize(
    ("recipe", "code", "word"),
    [
        ("nothing", "unknown-recipe", "expected the name of one of the"),
        ("ALL", "unknown-recipe", "did you mean all?"),
        ("", "unknown-recipe", "expected the name of one of the"),
        ("x" * 5000, "unknown-recipe", "expected the name of one of the"),
        ("x" * 5000 + ".toml", "recipe-file", "cannot be read"),
        ("nul.toml", "recipe-file", "cannot be read"),
        ("absent.toml", "recipe-file", "absent.toml"),
        ("folder.toml", "recipe-file", "folder.toml"),
        ("latin.toml", "recipe-file", "latin.toml"),
        ("self.toml", "recipe-cycle", "self.toml -> self.toml"),
        ("one.toml", "recipe-cycle", "one.toml -> two.toml -> one.toml"),
        ("lost.toml", "unknown-recipe", "'nobody'"),
    ],
)
def test_a_recipe_that_is_not_there_or_builds_on_itself(recipe, code, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"about = '\xff'")
    (tmp_path / "nul.toml").write_text('base = "a\\u0000.toml"')
    for name, base in (
        ("self", "self.toml"),
        ("one", "two.toml"),
        ("two", "one.toml"),
        ("lost", "nobody"),
    ):
        (tmp_path / f"{name}.toml").write_text(f"base = ['{base}']")
    with pytest.raises(InputError) as caught:
        chosen_files(recipe)
    assert caught.value.code == code
    assert word in caught.value.message


@pytest.mark.parametrize("rule", ["keep", "only", "format", "stack"])
def test_a_bad_pattern_is_refused_with_the_file_that_has_it(rule, tmp_path):
    rest = {
        "keep": "reason = 'x'",
        "only": "reason = 'x'",
        "format": "format = 'fp8'",
        "stack": "members = ['a']\norder = 'in_out'",
    }
    path = tmp_path / "mine.toml"
    path.write_text(
        f"[[{rule}]]\n{'tensors' if rule == 'stack' else 'modules'} = ['re:(']\n{rest[rule]}"
    )
    with pytest.raises(InputError) as caught:
        build_recipe(Target("nvfp4"), {}, RecipeOptions(recipe=str(path)))
    assert caught.value.code == "bad-pattern"
    assert str(path) in caught.value.message


def test_bases_are_read_once_each_before_what_builds_on_them_and_beside_the_file(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "one.toml").write_text("base = ['omlp_only', 'two.toml']")
    (folder / "two.toml").write_text("base = 'mlp_only'")
    names = [file.name for file in chosen_files(str(folder / "one.toml"))]
    assert names == ["mlp_only", "omlp_only", str(folder / "two.toml"), str(folder / "one.toml")]


def test_a_file_builds_on_twenty_others_one_upon_another_and_no_more(tmp_path):
    for number in range(30):
        base = f"base = '{number + 1}.toml'" if number < 29 else ""
        (tmp_path / f"{number}.toml").write_text(base)
    assert len(chosen_files(str(tmp_path / "9.toml"))) == 21
    with pytest.raises(InputError) as caught:
        chosen_files(str(tmp_path / "8.toml"))
    assert caught.value.code == "recipe-cycle"


def test_the_command_lists_modes_first_and_shows_one_with_its_bases():
    listed = run("recipes", "--json").json["recipes"]
    assert [recipe["name"] for recipe in listed][:1] == ["default"]
    assert {recipe["name"] for recipe in listed} == set(NAMES)
    first_family = next(n for n, recipe in enumerate(listed) if recipe["model_types"])
    assert {recipe["name"] for recipe in listed[:first_family]} >= set(MODES)
    shown = run("recipes", "kimi_k2", "--json").json
    assert (shown["name"], shown["base"], shown["model_types"]) == (
        "kimi_k2",
        ["deepseek"],
        ["kimi_k2", "kimi_k25"],
    )
    assert {
        "reason": "attention, kept for accuracy",
        "modules": ["*.self_attn.*"],
        "for_accuracy": True,
    } in shown["keep"]
    assert ["q_a_proj", "kv_a_proj_with_mqa"] in shown["groups"]
    stacks = run("recipes", "gpt_oss", "--json").json["stacks"]
    assert [(stack["order"], stack["rows"]) for stack in stacks] == [
        ("in_out", "interleaved"),
        ("in_out", "concatenated"),
    ]


def test_the_command_draws_them_for_a_person(tmp_path):
    listed = run("recipes")
    assert (listed.code, listed.err) == (0, "")
    assert re.search(r"^mlp_only +MLPs and experts", listed.out, re.M)
    assert re.search(r"^ +for deepseek_v2, deepseek_v3, deepseek_v32$", listed.out, re.M)
    for name in NAMES:
        assert run("recipes", name).code == 0
    path = tmp_path / "mine.toml"
    path.write_text("base = 'experts_only'\n[[format]]\nmodules = ['*self_attn*']\nformat = 'fp8'")
    shown = run("recipes", path).out
    assert "builds on experts_only" in shown
    assert "quantizes only *.experts.*" in shown
    assert "makes fp8 of *self_attn*" in shown
    assert run("recipes", "nothing").code == 2


@pytest.mark.parametrize(
    "members", ['["gate_proj", "gate_proj"]', '["gate_proj", "../up"]', '[""]']
)
def test_members_of_a_stack_are_different_names(members, tmp_path):
    """The same name twice would lose half of the weights."""
    text = (
        f'[[stack]]\ntensors = ["*.gate_up_proj"]\nmembers = {members}\norder = '
        '"out_in"\nrows = "concatenated"\n'
    )
    with pytest.raises(InputError) as caught:
        parse(text, "mine.toml", is_users=True)
    assert (caught.value.code, "members" in caught.value.message) == ("recipe-file", True)
