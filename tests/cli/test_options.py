"""An option's name, default, help and legal words stand once: in the row that declares it."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from paths import ROOT

from fp4convert.cli.commands import COMMANDS
from fp4convert.cli.options import PLAN
from fp4convert.recipes.options import Declared, declared_in, is_required

PACKAGE = ROOT / "fp4convert"
DECLARED = [each for command in COMMANDS.values() for each in declared_in(command.options)]
TRIVIAL = (None, False, 0, "", ())  # what an option is where it says nothing
CARRIERS = ("cli", "commands", "conversion", "options")  # where options travel as what they are
MADE = "commands.functions"  # of the declarations, by docs/functions.py


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Every node of every module that a person writes, by the module's name."""
    files = {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
        for file in sorted(PACKAGE.rglob("*.py"))
    }
    del files[MADE]
    return {
        name: list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        for name, file in files.items()
    }


def texts() -> Iterator[tuple[str, str]]:
    """(module, string) of every constant that is one."""
    for name, found in nodes().items():
        for node in found:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield name, node.value


def words_in(node: ast.AST) -> frozenset[str]:
    """The strings of a literal that lists nothing else."""
    listed = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    values = [part.value for part in listed if isinstance(part, ast.Constant)]
    is_plain = len(values) == len(listed) and all(isinstance(value, str) for value in values)
    return frozenset(values) if is_plain else frozenset()


def defaults_in(module: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """(name, default) of every field and parameter that has a constant for a default."""
    for node in module:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if isinstance(node.value, ast.Constant):
                yield node.target.id, node.value.value
        elif isinstance(node, ast.FunctionDef):
            plain = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [
                *zip(plain, node.args.defaults, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for parameter, default in pairs:
                if isinstance(default, ast.Constant):
                    yield parameter.arg, default.value


def test_every_row_names_functions_that_take_its_options():
    for name, command in COMMANDS.items():
        for work in filter(None, (command.work, command.preview)):
            assert named(f"fp4convert.{work}").__annotations__["options"] == (
                command.options.__name__
            ), name
        assert callable(named(f"fp4convert.cli.{command.draw}")), name
    assert callable(named(f"fp4convert.cli.{PLAN}"))


def named(place: str) -> Any:
    """The function MODULE:NAME."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def test_help_stands_once():
    constants = Counter(text for _, text in texts())
    rows: dict[str, set[int]] = defaultdict(set)
    for each in DECLARED:
        rows[each.option.help].add(id(each.option))
        assert constants[each.option.help] <= 1, each.option.help
    assert {told for told, ids in rows.items() if len(ids) > 1} == set()


def test_legal_words_stand_once():
    wanted = {frozenset(each.option.words) for each in DECLARED if len(each.option.words) > 1}
    found = Counter(
        words for module in nodes().values() for node in module if (words := words_in(node))
    )
    assert len(wanted) >= 6  # formats, dialects, rules, methods, layouts, dtypes ...
    assert {words for words in wanted if found[words] > 1} == set()
    long = [words for words in wanted if len(words) > 3]
    spoken = [
        (name, text)
        for name, text in texts()
        if "\n" not in text  # docstrings explain them
        for words in long
        if all(word in text for word in words)
    ]
    homes = {each.option.help for each in DECLARED}
    assert [(name, text) for name, text in spoken if text not in homes] == []


def test_defaults_stand_once_where_options_travel():
    known: dict[str, list[Declared]] = defaultdict(list)
    for each in DECLARED:
        if not is_required(each) and each.default not in TRIVIAL:
            known[each.name].append(each)
    found = [
        (name, option, default)
        for name, module in nodes().items()
        if name.startswith(CARRIERS)
        for option, default in defaults_in(module)
        if any(each.default == default for each in known.get(option, ()))
    ]
    own = {(each.name, each.default) for rows in known.values() for each in rows}
    assert own >= {("device", "auto"), ("memory", 1.0), ("samples", 128)}
    twice = {pair: n for pair, n in Counter((o, d) for _, o, d in found).items() if n > 1}
    assert twice == {}, found
