"""Every error code that the package can raise, found in its source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import ROOT

from fp4convert import errors
from fp4convert.numerics.formats import FLOAT_TYPES

CLASSES = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.Fp4Error)
    and kind not in (errors.Fp4Error, errors.Interrupted)
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
            yield from (
                f"{kind.word}-overflow" for name, kind in FLOAT_TYPES.items() if name != "F32"
            )
        else:
            assert isinstance(node, ast.Attribute), (
                f"{self.file.name}, line {node.lineno}: the code is not told"
            )
            assert node.attr == "code", (
                f"{self.file.name}, line {node.lineno}: the code is not told"
            )

    def named(self, name: str) -> list[str]:
        """What a name stands for: a parameter of the function around it, what is put there, or a constant of the package."""
        function = self.functions[-1]
        parameters = [each.arg for each in function.args.args if each.arg != "self"]
        if name in parameters:
            at = parameters.index(name)
            calls = [
                node
                for node in ast.walk(self.tree)
                if isinstance(node, ast.Call) and len(node.args) > at
            ]
            own = [
                call
                for call in calls
                if ast.unparse(call.func).removeprefix("self.") == function.name
            ]
            told = [code for call in own for code in self.told(call, call.args[at])]
        else:
            inside = [
                node
                for tree in (function, *self.trees.values())
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
            ]
            first = next(node for node in inside if ast.unparse(node.targets[0]) == name)
            told = list(self.codes(first.value))
        assert told, f"{self.file.name}: nobody tells {name}"
        return told

    def told(self, call: ast.Call, given: ast.expr) -> list[str]:
        """A code that is given in a call, by the names of the function around that."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef) and call in ast.walk(node)
        ]
        before, self.functions = self.functions, around
        found = list(self.codes(given))
        self.functions = before
        return found


@cache
def raised() -> dict[str, set[int]]:
    """code -> exit codes, of every error in the source."""
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "fp4convert").rglob("*.py"))
    }
    found: dict[str, set[int]] = defaultdict(set, interrupted={130, 143})
    for file, tree in trees.items():
        visitor = Codes(trees, file)
        visitor.visit(tree)
        for code, exit_code in visitor.found:
            found[code].add(exit_code)
    return dict(found)
