"""Expressions of anybody: each fits what Python's matcher says, and none takes forever."""

import re
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from checkpoints import run, write_llama
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp4convert.errors import InputError
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
    "a{" + "9" * 5000 + "}",
    "(" * 2000 + "a" + ")" * 2000,
    "(?:a|" * 300 + "b" + ")" * 300,
    "(?:" * 90 + "a" + ")+" * 90,
    "(?:" * 12 + "a" + "){2}" * 12,
    "((a{60000}){60000}){60000}",
    "x" * 20000,
    "(a|a)+$(?<!a)",
    # regex reads these as a fuzzy match, a class of POSIX, and another text than Python does
    "a{e}",
    "[[:alpha:]]",
    "(?x:a # b)\n)",
)
SECONDS = 5.0  # on a busy machine; the worst takes 0.4 s


@pytest.mark.parametrize("text", ENDLESS)
def test_what_python_matches_forever_is_matched_or_refused_soon(text):
    began = time.process_time()
    answers = set()
    for name in (NAME, "lm_head.layer", "a" * 60 + "!", "a" * 3000):
        with suppress(InputError):
            answers.add(Expression(text).match(name))
    assert time.process_time() - began < SECONDS
    assert answers <= {True, False}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_matched_in_bounded_time_is_refused(text):
    with pytest.raises(InputError) as caught:
        Expression(text).match("a" * 100)
    assert caught.value.code == "bad-pattern"
    assert len(caught.value.message) < 300


def test_required_repetitions_take_little_memory():
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    with pytest.raises(InputError):
        Expression("(?:a{1000}){1000}").match("a")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_names_share_a_limit_of_time():
    """One name takes some milliseconds; a checkpoint may have a million of them."""
    slow = Expression(r"(?:a|a)+$(?<!a)")
    began = time.process_time()
    with pytest.raises(InputError, match="takes too long"):
        any(slow.match("a" * 16) for _ in range(100_000))
    assert time.process_time() - began < 2 * SECONDS


def test_a_quick_expression_has_no_limit_of_names():
    quick = Expression(r".*mlp.*_proj$")
    assert all(quick.match(f"model.layers.{number}.mlp.up_proj") for number in range(100_000))


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
        (r"(a+)+\1", "aaaa", True),
        (r"(?>(a+)+)b", "aab", True),
        (r"(?s)(?:.+)+y", "a\ny", True),
        # of records: compressed-tensors' and ModelOpt's examples, and recipes of users
        (r".*self_attn.[qk]_proj", "model.layers.0.self_attn.q_proj", True),
        (r".*mlp.*_proj$", "model.layers.0.mlp.experts.3.up_proj", True),
        (r".*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        (r".*block_sparse_moe.gate", "model.layers.0.block_sparse_moe.gate", True),
        (r"^(?!.*(?:lm_head|vision)).*$", "model.vision_tower.fc1", False),
        (r"model\.layers\.(?:[0-9]|1[0-5])\.", "model.layers.15.mlp", True),
        (r"model\.layers\.(?:[0-9]|1[0-5])\.", "model.layers.16.mlp", False),
        (r".*layers\.\d+\.\w+_proj", "layers.0.Größe_proj", True),
    ],
)
def test_an_expression_fits(text, name, fits):
    assert Expression(text).match(name) is fits
    assert (re.match(text, name) is not None) is fits


def test_signs_that_packages_class_differently_are_refused():
    """A combining accent is a letter for regex, and none for Python."""
    with pytest.raises(InputError, match="no certain meaning"):
        Expression(r"\w+$").match("e\u0301")


def test_plain_expressions_do_without_the_package():
    """It takes 7 ms to import."""
    code = "import sys; from fp4convert.recipes.patterns import sift; "
    code += "sift(('re:.*lm_head.*$', 're:(?:.*\\.)?q_proj$'), ['a.q_proj']); "
    code += "assert 'regex' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.text("ab.1_\n", min_size=1, max_size=6))
@example("(?:|a)+$", "aa")
@example("(?<=a)b", "ab")
@example("a(?<=b)b", "ab")
@example("(?:a$)*", "a\n")
@example("a{,}b", "aab")
@example("[a&&b]", "&")
@example("[&--]", "-")
def test_it_fits_where_pythons_own_does(text, name):
    assert Expression(text).match(name) is (re.match(text, name) is not None)


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
    "pattern", [f"re:{text}" for text in (ENDLESS[0], ENDLESS[5], *REFUSED[3:5])]
)
def test_options_with_them_end(pattern, tmp_path):
    folder = write_llama(tmp_path / "m")
    outcome = run("quantize", folder, "--format", "nvfp4", "--dry-run", "--exclude", pattern)
    assert outcome.code == 2
    assert any(code in outcome.err for code in ("bad-pattern", "unmatched-pattern", "no-linears"))
