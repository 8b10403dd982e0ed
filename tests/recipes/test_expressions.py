"""Expressions of anybody: each fits what Python's matcher says, and none takes forever."""

import re
import time
from contextlib import suppress

import pytest
from checkpoints import run, write_llama
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp4convert.errors import InputError
from fp4convert.recipes import expressions
from fp4convert.recipes.expressions import Expression

NAME = "model.layers.0." + "a" * 200 + ".x"
ENDLESS = (
    "(a|a)+$",
    "((a+)b?)+$",
    "(?:a+){2,}$",
    "(?:a?){40}a{40}$",
    "a?" * 40 + "a" * 40 + "$",
    "(?:(?:.?){30}){30}y",
    "(?:(?:(?:.?){30}){30}){30}y",
    "(?:a|a)" * 60 + "b",
    ".*.*.*.*.*.*.*.*.*y$",
    ".*a" * 12 + "y",
    r"(\w+\s?)+$",
    "(?:.*a){11}y",
    "((a*)*)*$",
    ".*" * 103 + "down_oz",  # more loops than a name has letters
    "(((((a+)+)+)+)+)+$",
    "(?=(a+)+$)b",
    "(?!(?:a|aa)+$)(?:a|aa)+y",
    r"(?:a{1000}){1000}",
    r"((a{60000}){60000}){60000}",
    r"(?:(?:a?){60000}){60000}b",
)
REFUSED = (
    "(",
    "a**",
    "a{99999999999}",
    "(" * 2000 + "a" + ")" * 2000,
    "(?:" * 90 + "a" + ")+" * 90,
    "x" * 20000,
    r"(a+)+\1",
    "(?>(a+)+)b",
    "(?i:(a|b)+)+c",
    "(?s)(?:.+)+y",
)
SECONDS = 5.0  # on a busy machine; the worst takes 0.2 s


@pytest.mark.parametrize("text", ENDLESS)
def test_what_python_matches_forever_is_matched_or_refused_soon(text):
    began = time.monotonic()
    found = set()
    for name in (NAME, "lm_head.layer", "a" * 60 + "!", "a" * 3000):
        with suppress(InputError):
            found.add(Expression(text).match(name))
    assert time.monotonic() - began < SECONDS
    assert found <= {True, False}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_matched_in_bounded_time_is_refused(text):
    with pytest.raises(InputError) as caught:
        Expression(text).match("a" * 100)
    assert caught.value.code == "bad-pattern"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "name", "fits"),
    [
        (r"(?!.*lm_head).*", "model.layers.0", True),
        (r"(?!.*lm_head).*", "model.lm_head", False),
        (r".*(?<!shared_)experts\..*_proj.*\d.*", "m.experts.3.up_proj.0", True),
        (r".*(?<!shared_)experts\..*_proj.*\d.*", "m.shared_experts.3.up_proj.0", False),
        (r"(?:a|aa)+$", "a" * 20, True),
        (r"(?:a|aa)+$", "a" * 20 + "b", False),
        (r"(?:\d+\.)*mlp", "0.1.22.mlp", True),
        (r"(?i:(?:A)+)$", "aaa", True),
    ],
)
def test_an_expression_fits(text, name, fits):
    assert Expression(text).match(name) is fits
    assert (re.match(text, name) is not None) is fits


PARTS = st.sampled_from(
    ("a", "b", ".", "\\.", "[ab]", "[^a.]", "\\d", "\\W", "$", "^", "\\b", "\\B", "\\Z", "_")
)
LOOPS = st.sampled_from(("*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "+?"))
AHEAD = st.sampled_from(("(?=%s)", "(?!%s)", "(?:%s)", "(%s)"))
TEXTS = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, LOOPS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
        st.tuples(AHEAD, inner).map(lambda pair: pair[0] % pair[1]),
    ),
    max_leaves=8,
)


@settings(max_examples=600)
@given(TEXTS, st.text("ab.1_\n", min_size=1, max_size=6))
@example("(?:|a)+$", "aa")
@example("(?<=a)b", "ab")
@example("a(?<=b)b", "ab")
@example("(?:a$)*", "a\n")
@pytest.mark.slow
def test_it_fits_where_pythons_own_does(text, name):
    expression = Expression(text)
    before = expressions.FEW_WAYS, expressions.MOST_WAYS
    expressions.FEW_WAYS = expressions.MOST_WAYS = -1e9
    try:
        assert expression.match(name) is (re.match(text, name) is not None)
    finally:
        expressions.FEW_WAYS, expressions.MOST_WAYS = before


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(LOOPS, min_size=1, max_size=4), st.sampled_from(("a", "ab", "a.")))
def test_no_nest_of_loops_takes_forever(text, loops, letters):
    for loop in loops:
        text = f"(?:{text}){loop}"
    began = time.monotonic()
    with suppress(InputError):
        Expression(f"{text}y$").match(letters * 100)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "pattern", [f"re:{text}" for text in (ENDLESS[0], ENDLESS[5], *REFUSED[2:4])]
)
def test_options_with_them_end(pattern, tmp_path):
    folder = write_llama(tmp_path / "m")
    outcome = run("quantize", folder, "--format", "nvfp4", "--dry-run", "--exclude", pattern)
    assert outcome.code == 2
    assert any(code in outcome.err for code in ("bad-pattern", "unmatched-pattern", "no-linears"))
