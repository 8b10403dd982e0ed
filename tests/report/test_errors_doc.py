"""docs/errors.md explains every error that the program can raise, and no other, with its exit codes."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import hidden_characters, run

from fp4convert import errors
from fp4convert.formats import FLOAT_TYPES

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| ([0-9, ]+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
CLASSES = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.Fp4Error) and kind not in (errors.Fp4Error, errors.Interrupted)
}
OVERFLOW = "f'{kind.word}-overflow'"


class Codes(ast.NodeVisitor):
    """(code, exit code) of every error that a file makes; a code must be told where it stands, or by who calls."""

    def __init__(self, trees: dict[Path, ast.Module], file: Path) -> None:
        self.trees, self.tree, self.file = trees, trees[file], file
        self.functions: list[ast.FunctionDef] = []
        self.found: list[tuple[str, int]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
            exit_code = CLASSES[node.func.id]
            self.found += [(code, exit_code) for code in self.codes(node.args[0])]
        self.generic_visit(node)

    def codes(self, node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.IfExp):
            yield from (*self.codes(node.body), *self.codes(node.orelse))
        elif isinstance(node, ast.Name):
            yield from self.named(node.id)
        elif ast.unparse(node) == OVERFLOW:
            yield from (f"{kind.word}-overflow" for name, kind in FLOAT_TYPES.items() if name != "F32")
        else:
            assert isinstance(node, ast.Attribute), f"{self.file.name}, line {node.lineno}: the code is not told"
            assert node.attr == "code", f"{self.file.name}, line {node.lineno}: the code is not told"

    def named(self, name: str) -> list[str]:
        """What a name stands for: a parameter of the function around it, what is put there, or a constant of the package."""
        function = self.functions[-1]
        parameters = [each.arg for each in function.args.args if each.arg != "self"]
        if name in parameters:
            at = parameters.index(name)
            calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and len(node.args) > at]
            own = [call for call in calls if ast.unparse(call.func).removeprefix("self.") == function.name]
            told = [code for call in own for code in self.told(call, call.args[at])]
        else:
            inside = [
                node for tree in (function, *self.trees.values()) for node in ast.walk(tree) if isinstance(node, ast.Assign)
            ]
            first = next(node for node in inside if ast.unparse(node.targets[0]) == name)
            told = list(self.codes(first.value))
        assert told, f"{self.file.name}: nobody tells {name}"
        return told

    def told(self, call: ast.Call, given: ast.expr) -> list[str]:
        """A code that is given in a call, by the names of the function around that."""
        around = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and call in ast.walk(node)]
        before, self.functions = self.functions, around
        found = list(self.codes(given))
        self.functions = before
        return found


def raised() -> dict[str, set[int]]:
    """code -> exit codes, of every error in the source."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "fp4convert").rglob("*.py"))}
    found: dict[str, set[int]] = defaultdict(set, interrupted={130, 143})
    for file, tree in trees.items():
        visitor = Codes(trees, file)
        visitor.visit(tree)
        for code, exit_code in visitor.found:
            found[code].add(exit_code)
    return dict(found)


def explained() -> dict[str, set[int]]:
    """code -> exit codes, of every row; a code has one row."""
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    assert len({row[0] for row in rows}) == len(rows)
    return {code: set(map(int, exits.split(", "))) for code, exits, *_ in rows}


def test_the_page_lists_exactly_what_is_raised():
    assert explained() == raised()


def test_the_search_sees_codes_however_they_are_told():
    """By a constant, a condition, a parameter, a name of another module, a condition in a name, and a format's word."""
    codes = raised()
    for code in ("no-weights", "offline", "lfs-pointer", "source-corrupt", "overlap", "hole", "fp16-overflow", "cannot-write"):
        assert code in codes
    assert codes["source-unreadable"] == {3}


@pytest.mark.parametrize("code", sorted(explained()))
def test_every_error_is_explained(code):
    rows = {row[0]: row for row in ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))}
    document = run("explain", code, "--json").json
    assert document["code"] == code
    assert document["error"] == {
        "exits": [int(one) for one in rows[code][1].split(", ")],
        "meaning": rows[code][2],
        "origin": rows[code][3],
        "remedy": rows[code][4],
    }


def test_a_code_of_both_kinds_is_explained_as_both():
    told = run("explain", "scale-layout").out
    assert told.count("scale-layout: ") == 2
    for words in ("a finding (error)", "an error (exit code 2)", "what to do"):
        assert words in told
    assert run("explain", "kept-differs", "--json").json["error"] is None
    assert run("explain", "SQNR-LOW", "--json").json == run("explain", "sqnr-low", "--json").json


def test_the_list_has_every_code():
    document = run("explain", "--json").json
    assert {one["code"] for one in document["errors"]} == set(explained())
    assert len(document["findings"]) > 50
    told = run("explain").out
    assert all(f"  {one['code']} " in told for one in (*document["findings"], *document["errors"]))


def test_what_is_no_code_is_refused_with_what_is_like_it():
    refused = run("explain", "scale-layuot\x1b[31m", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unknown-code")
    assert "scale-layout" in refused.json["error"]["message"]
    assert not hidden_characters(refused.err)
