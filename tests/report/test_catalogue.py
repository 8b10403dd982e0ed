"""Every code that the program gives is in report/catalogue.toml, and no other;
`explain` tells it.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from checkpoints import hidden_characters, run
from paths import ROOT

from fp4convert import errors
from fp4convert.checkpoint.soundness import CLEAR_ENOUGH
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.report.text import explanations

EXITS = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.Fp4Error)
}
OVERFLOWS = {f"{kind.word}-overflow" for name, kind in FLOAT_TYPES.items() if name != "F32"}


@cache
def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """(name, call) of every call of a function, method or class by its name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(getattr(one.func, "attr", getattr(one.func, "id", "")), one) for one in found]


@cache
def places(tree: ast.Module) -> list[ast.Assign | ast.FunctionDef]:
    """Where a name is given something."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.FunctionDef))]


def codes(node: ast.expr, trees: tuple[ast.Module, ast.Module]) -> set[str]:
    """The codes that an argument stands for.

    trees  of its own file, and of errors.py, which has constants
    """
    if isinstance(node, ast.Constant):
        return {node.value}
    if isinstance(node, ast.IfExp):
        return codes(node.body, trees) | codes(node.orelse, trees)
    if ast.unparse(node) == "f'{kind.word}-overflow'":
        return OVERFLOWS
    if not isinstance(node, ast.Name):
        assert ast.unparse(node).endswith(".code"), f"no code that can be seen: {ast.unparse(node)}"
        return set()  # of an error that is raised again
    given = []
    for each in (one for tree in trees for one in places(tree)):
        if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", None) == node.id:
            given.append(each.value)
        if isinstance(each, ast.FunctionDef):
            parameters = [one.arg for one in each.args.args if one.arg != "self"]
            if node.id in parameters:
                at = parameters.index(node.id)
                callers = calls(trees[0]) if each.name.startswith("_") else all_calls()
                own = (call for name, call in callers if name == each.name)
                given += [call.args[at] for call in own if len(call.args) > at]
    found = set().union(*(codes(each, trees) for each in given))
    assert found, f"nobody says what {node.id} is"
    return found


@cache
def parsed() -> dict[Path, ast.Module]:
    files = (ROOT / "fp4convert").rglob("*.py")
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def all_calls() -> list[tuple[str, ast.Call]]:
    """Those of the whole package: whoever calls a public function is there."""
    return [call for tree in parsed().values() for call in calls(tree)]


def test_the_catalogue_has_exactly_the_codes_that_the_program_gives():
    raised: dict[str, set[int]] = defaultdict(set, interrupted={130, 143})
    found: dict[str, set[str]] = defaultdict(set)
    trees = parsed()
    constants = trees[ROOT / "fp4convert" / "errors.py"]
    for file, tree in trees.items():
        for name, call in calls(tree):
            if name in EXITS and name != "Interrupted" and call.args:
                for code in codes(call.args[0], (tree, constants)):
                    raised[code].add(EXITS[name])
            if name == "Finding":
                level, code = call.args[:2]
                assert isinstance(code, ast.Constant), f"{file.name}: a code is written out"
                words = {each.value for each in ast.walk(level) if isinstance(each, ast.Constant)}
                found[code.value] |= words or {"error", "warning"}
    assert {code: set(row["exits"]) for code, row in explanations("errors").items()} == raised
    assert {code: set(row["levels"]) for code, row in explanations("findings").items()} == found
    assert {"no-weights", "offline", "source-corrupt", "overlap", "fp16-overflow"} <= raised.keys()


def test_every_row_has_its_words_and_a_code_has_one_row():
    for kind, keys in (
        ("errors", ["exits", "meaning", "origin", "remedy"]),
        ("findings", ["levels", "meaning", "seen", "remedy"]),
    ):
        rows = explanations(kind)
        assert len(rows) == sum(len(topic["codes"]) for topic in errors.read_catalogue()[kind])
        assert all(list(row) == keys and all(row.values()) for row in rows.values())
        assert not [code for code, row in rows.items() if "|" in f"{row}"]  # they stand in tables


def test_the_list_has_every_code_in_the_words_of_the_catalogue():
    document = run("explain", "--json").json
    for kind in ("errors", "findings"):
        assert document[kind] == [
            {"code": code, **row, "subject": topic["heading"]}
            for topic in errors.read_catalogue()[kind]
            for code, row in topic["codes"].items()
        ]


def test_the_list_for_people_is_of_subjects_and_of_one_of_them_has_every_code():
    headings = [topic["heading"] for kind in ("findings", "errors") for topic in known_topics(kind)]
    overview = run("explain").out.splitlines()
    assert len(overview) <= len(headings) + 4
    assert all(any(line.startswith(f"  {each} ") for line in overview) for each in headings)
    for heading in headings:
        told = run("explain", heading).out
        codes = [
            code
            for kind in ("findings", "errors")
            for topic in known_topics(kind)
            if topic["heading"] == heading
            for code in topic["codes"]
        ]
        assert all(f"  {code} " in told for code in codes)
        assert len(told.splitlines()) <= 30
    hub = run("explain", "hub", "--json").json
    assert {one["subject"] for one in (*hub["findings"], *hub["errors"])} == {"The Hub"}


def known_topics(kind):
    return errors.read_catalogue()[kind]


def test_a_code_of_both_kinds_is_explained_as_both():
    told = run("explain", "scale-layout").out
    assert told.count("scale-layout: ") == 2
    for words in ("a finding (error)", "an error (exit code 2)", "what to do"):
        assert words in told
    both = run("explain", "scale-layout", "--json").json
    assert both == {
        "code": "scale-layout",
        "finding": explanations("findings")["scale-layout"],
        "error": explanations("errors")["scale-layout"],
    }
    assert run("explain", "kept-differs", "--json").json["error"] is None
    assert run("explain", "SQNR-LOW", "--json").json == run("explain", "sqnr-low", "--json").json


def test_what_is_no_code_is_refused_with_what_is_like_it():
    refused = run("explain", "scale-layuot\x1b[31m", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unknown-code")
    assert "scale-layout" in refused.json["error"]["message"]
    assert not hidden_characters(refused.err)


def test_no_remedy_is_a_command_that_refuses_the_artifact():
    for code, row in explanations("findings").items():
        if row["levels"] == ["error"] and code not in CLEAR_ENOUGH:
            assert not re.search("transcode|dequantize", str(row["remedy"])), code


@pytest.mark.parametrize("word", ["e", "s", "a", "of", "the", "cale", "sca", "layout", "", " "])
def test_letters_inside_of_words_list_nothing(word):
    refused = run("explain", word, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unknown-code")


@pytest.mark.parametrize(("word", "near"), [("sca", "scale-layout"), ("offlne", "offline")])
def test_a_beginning_and_a_slip_are_answered_with_codes(word, near):
    message = run("explain", word, "--json").json["error"]["message"]
    assert "; did you mean " in message
    assert near in message


@pytest.mark.parametrize("word", ["global-scale", "sqnr", "no", "no-", "prune"])
def test_the_words_that_codes_begin_with_list_them(word):
    told = run("explain", word, "--json").json
    if "code" in told:  # it is a code itself
        assert told["code"] == word
        return
    listed = {one["code"] for one in (*told["findings"], *told["errors"])}
    begun = {
        code
        for kind in ("findings", "errors")
        for code in explanations(kind)
        if code.startswith(f"{word.removesuffix('-')}-")
    }
    assert begun
    assert begun <= listed
    assert len(listed) < 40
