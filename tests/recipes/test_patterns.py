"""Globs, expressions, many of them at once, and ranges of layers that config.json fills."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp4convert.errors import InputError
from fp4convert.recipes.patterns import (
    expand,
    integer_of,
    matches,
    matches_any,
    pick_fitting,
    sift,
)
from fp4convert.recipes.rules import Patterns


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("*lm_head", "model.lm_head", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj.lora", False),
        ("model.layers.[01].*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.[01].*", "model.layers.2.mlp.up_proj", False),
        ("model.layers.?.mlp", "model.layers.12.mlp", False),
        ("model.layers.0", "model.layers.01", False),
        ("modelxlayers", "model.layers", False),
        ("re:model", "model.layers.0", True),
        ("re:layers", "model.layers.0", False),
        (r"re:.*\.(q|k)_proj$", "a.k_proj", True),
        (r"re:.*\.(q|k)_proj$", "a.k_proj.x", False),
        ("re:", "anything", True),
        ("Lm_Head", "lm_head", False),
    ],
)
def test_a_glob_fits_the_whole_name_and_an_expression_its_beginning(pattern, module, fits):
    assert matches(pattern, module) is fits


@given(st.lists(st.text("ab.*?[]", max_size=4), max_size=4), st.text("ab.*\n", max_size=5))
@example(["*"], "")
@example([""], "")
@example(["**a*"], "ba")
@example(["re:a.b"], "axbc")
@example(["*1*"], "\udcff1")  # no UTF-8, as a word of a command line may be
def test_many_patterns_at_once_match_what_one_of_them_matches(patterns, module):
    assert matches_any(tuple(patterns), module) is any(
        matches(pattern, module) for pattern in patterns
    )


WORDS = st.sampled_from(
    (
        "a",
        "b",
        ".",
        "\\.",
        "\\*",
        ".*",
        "(?:.*\\.)?",
        "$",
        "^",
        "|",
        "a?",
        "_",
        "-",
        "[ab]",
        "\\d",
        "\\$",
    )
)


@given(
    st.lists(st.lists(WORDS, max_size=6).map(lambda words: f"re:{''.join(words)}"), max_size=3),
    st.text("ab.*\n_-$1", max_size=6),
)
@example([r"re:(?:.*\.)?a\.b$"], "x.a.b")
@example([r"re:(?:.*\.)?a\.b$"], "a.b")
@example([r"re:(?:.*\.)?a\.b$"], "xa.b")
@example([r"re:.*\.a\..*$"], "x.a.b")
@example([r"re:.*\.a$"], "x.a\n")
@example([r"re:.*\.a$"], "x\n.a")
@example([r"re:a\*$"], "ab")
def test_many_expressions_at_once_match_what_one_of_them_matches(patterns, module):
    try:
        fits = [matches(pattern, module) for pattern in patterns]
    except InputError:
        return
    assert matches_any(tuple(patterns), module) is any(fits)


@given(
    st.lists(
        st.text("a1.*?[]", max_size=5)
        | st.sampled_from(("a[0-1]*", "*a1", "*a1*", "re:a\\d", "re:a1$", "re:.*1")),
        max_size=4,
    ),
    st.lists(st.text("a012.\n", max_size=5), max_size=4),
)
@example(["*a1"], ["a0", "a1", "a11", "a2"])
@example(["*a0"], ["a0", "a1", "a00"])  # a shape has a zero for every digit
@example(["a[0-1]*"], ["a0", "a1", "a2", "b0"])
@example(["re:a1$"], ["a0", "a1", "a\n1"])
def test_modules_that_differ_in_numbers_alone_are_sifted_as_if_asked_one_by_one(patterns, modules):
    fitting = [
        module for module in modules if any(matches(pattern, module) for pattern in patterns)
    ]
    assert sift(tuple(patterns), modules) == fitting
    assert [module for module in modules if matches_any(tuple(patterns), module)] == fitting
    used = {pattern for pattern in patterns if any(matches(pattern, one) for one in modules)}
    assert pick_fitting(patterns, modules) == used


CONFIG = {
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 2,
    "first_k_dense_replace": 3,
    "vision_config": {"num_hidden_layers": 27, "depth": 5, "is_wide": True, "name": "7"},
    "text_config": {"num_hidden_layers": 48, "depth": 6},
}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.mlp", ("*.mlp",)),
        ("layers.{0:2}.*", ("layers.0.*", "layers.1.*")),
        ("layers.{2:2}.*", ()),
        ("layers.{3:1}.*", ()),
        ("layers.{0:first_k_dense_replace}.mlp", ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")),
        ("layers.{num_hidden_layers:num_hidden_layers+1}.*", ("layers.61.*",)),
        (
            "layers.{num_hidden_layers:num_hidden_layers+num_nextn_predict_layers}.*",
            ("layers.61.*", "layers.62.*"),
        ),
        ("layers.{num_hidden_layers-1:num_hidden_layers}.*", ("layers.60.*",)),
        ("layers.{depth-1:depth}.*", ("layers.5.*",)),
        ("layers.{0:absent}.*", ()),
        ("layers.{num_hidden_layers:num_hidden_layers+absent}.*", ()),
        ("layers.{0:is_wide}.*", ()),
        ("layers.{0:name}.*", ()),
        ("a.{0:2}.b.{4:6}", ("a.0.b.4", "a.0.b.5", "a.1.b.4", "a.1.b.5")),
        (r"re:.*\.{0:2}\.", (r"re:.*\.0\.", r"re:.*\.1\.")),
        (r"re:a{1,2}", (r"re:a{1,2}",)),
    ],
)
def test_a_range_is_one_pattern_for_each_layer(pattern, names):
    assert expand(pattern, CONFIG) == names


def test_a_text_models_numbers_go_before_those_of_other_nested_configs():
    nested = {key: CONFIG[key] for key in ("vision_config", "text_config")}
    assert integer_of(CONFIG, "num_hidden_layers") == 61
    assert integer_of(nested, "num_hidden_layers") == 48
    assert (
        integer_of({"thinker_config": {"audio_config": {"n": 1}, "text_config": {"n": 2}}}, "n")
        == 2
    )
    assert integer_of({"a": {"b": {"n": 3}}}, "n") == 3
    assert integer_of({"n": None, "a": {"n": 4.0}}, "n") is None


@pytest.mark.parametrize(
    "pattern", ["{:2}", "{0:}", "{0:1.5}", "{a b:2}", "{0:+}", "{0:1*2}", "{0:a b}", "{1 2:3}"]
)
def test_a_range_of_anything_else_is_refused(pattern):
    with pytest.raises(InputError) as caught:
        expand(f"layers.{pattern}.*", CONFIG)
    assert caught.value.code == "bad-pattern"
    assert pattern in caught.value.message


@pytest.mark.parametrize(
    ("first", "end"), [("0", "4097"), ("0-1", "2"), ("huge", "huge+1"), ("0", "huge")]
)
def test_layers_beyond_belief_are_refused(first, end):
    with pytest.raises(InputError) as caught:
        expand(f"layers.{{{first}:{end}}}.*", {"huge": 10**12})
    assert caught.value.code == "layer-range"


def test_many_patterns_are_hashed_once():
    hashed = []

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed.append(self)
            return super().__hash__()

    names = Patterns(Name(f"layers.{number}.up") for number in range(1000))
    assert matches_any(names, "layers.1.up")
    hashed.clear()
    assert all(
        matches_any(names, f"layers.{number}.up") == (number < 1000) for number in range(2000)
    )
    assert hashed == []
    plain = tuple(map(str, names))
    assert (names, hash(names)) == (plain, hash(plain))
