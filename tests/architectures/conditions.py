"""What modeling files ask of a config: settings in conditions, the words they are compared with."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

RUNNING = ("forward", "_init_weights")  # what they ask makes no parameter
LAYER_KIND = re.compile(r"layer_type|block_type|layers_block|layer_kind|layer_pattern")
OPERATORS = {
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="},
}
DEPTH = 2  # of names that hold names that hold a setting
INDEXES = ("layer_idx", "layer_id", "layer_index", "idx", "i", "index", "layer_number")


@dataclass(frozen=True, slots=True, order=True)
class Comparison:
    """A setting, and the number or the other setting that it is compared with."""

    left: str
    operator: str
    right: str | float


@dataclass(slots=True)
class Conditions:
    """Names of settings by how code asks for them."""

    mentioned: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)  # as attributes
    tested: set[str] = field(default_factory=set)
    per_layer: set[str] = field(default_factory=set)  # compared with the number of a layer
    words: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    defaults: dict[str, Any] = field(default_factory=dict)  # of settings that configs may lack
    other_defaults: dict[str, str] = field(default_factory=dict)  # those of other settings
    comparisons: set[Comparison] = field(default_factory=set)

    @property
    def layer_words(self) -> list[str]:
        """Return the words for kinds of layers."""
        named = (words for name, words in self.words.items() if LAYER_KIND.search(name))
        return sorted({word for words in named for word in words})


def conditions_of(files: Iterable[Path]) -> Conditions:
    """Return what the files ask, all together."""
    whole = Conditions()
    for file in files:
        one = _conditions_of(file)
        whole.mentioned |= one.mentioned
        whole.read |= one.read
        whole.tested |= one.tested
        whole.per_layer |= one.per_layer
        for name, words in one.words.items():
            whole.words[name] |= words
        whole.defaults |= one.defaults
        whole.other_defaults |= one.other_defaults
        whole.comparisons |= one.comparisons
    return whole


@cache
def _conditions_of(file: Path) -> Conditions:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    conditions = Conditions()
    tables = {
        target.id: {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    aliases = _aliases(tree)
    for node in _nodes(tree):
        conditions.mentioned |= _names(node, deep=False)
        _add_defaults(node, conditions)
        match node:
            case ast.If() | ast.IfExp() | ast.comprehension():
                tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
                conditions.tested |= {name for test in tests for name in _names(test)}
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                conditions.tested |= _names(node)
            case ast.Compare():
                names = _names(node)
                conditions.tested |= names
                if _has_index(node):
                    conditions.per_layer |= names
                else:
                    conditions.comparisons |= set(_comparisons(node, aliases))
                for word in _words(node):
                    for name in names:
                        conditions.words[name].add(word)
            case ast.Subscript(value=ast.Name(id=table)) if table in tables:
                for name in _names(node.slice):
                    conditions.words[name] |= tables[table]
    conditions.tested |= {other for name in conditions.tested for other in aliases.get(name, ())}
    return conditions


def _add_defaults(node: ast.AST, conditions: Conditions) -> None:
    """Note a setting that is read, and what getattr gives where a config lacks it."""
    match node:
        case ast.Attribute(attr=name):
            conditions.read.add(name)
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), other]):
            if isinstance(other, ast.Constant):
                conditions.defaults[name] = other.value
            elif isinstance(other, ast.Attribute):
                conditions.other_defaults[name] = other.attr


def _aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Return names that hold settings: of assignments, and of arguments of the file's classes."""
    aliases: dict[str, set[str]] = defaultdict(set)
    arguments = {
        node.name: [argument.arg for argument in made.args.args[1:]]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for made in node.body
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
    }
    for node in _nodes(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value):
                aliases[name] |= _setting(value)
            case ast.Call(func=ast.Name(id=called)) if called in arguments:
                for name, value in zip(arguments[called], node.args, strict=False):
                    aliases[name] |= _setting(value)
                for keyword in node.keywords:
                    aliases[str(keyword.arg)] |= _setting(keyword.value)
    for _ in range(DEPTH):
        for names in aliases.values():
            names |= {other for name in names for other in aliases.get(name, ())}
    return {name: names - {name} for name, names in aliases.items() if names - {name}}


def _setting(node: ast.AST) -> set[str]:
    """Return the names whose value an expression is."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return {name}
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return {name}
        case ast.IfExp(body=body, orelse=other):
            return _setting(body) | _setting(other)
        case ast.BoolOp(values=values):
            return {name for value in values for name in _setting(value)}
    return set()


def _comparisons(node: ast.Compare, aliases: Mapping[str, set[str]]) -> Iterator[Comparison]:
    operator = OPERATORS.get(type(node.ops[0]))
    if operator is None or len(node.ops) > 1:
        return
    left, right = (
        {other for name in _setting(side) for other in (name, *aliases.get(name, ()))}
        for side in (node.left, node.comparators[0])
    )
    match node.comparators[0]:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            yield from (Comparison(name, operator, number) for name in left)
        case _:
            yield from (Comparison(one, operator, other) for one in left for other in right)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a model is made; a condition that only raises is no condition."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in RUNNING:
            continue
        if isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body):
            yield from _nodes(ast.Module(body=node.orelse, type_ignores=[]))
            continue
        yield node
        yield from _nodes(node)


def _names(node: ast.AST, *, deep: bool = True) -> set[str]:
    names = set()
    for each in ast.walk(node) if deep else [node]:
        match each:
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.Name(id=name):
                names.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                names.add(name)
    return names


def _has_index(node: ast.AST) -> bool:
    names = (
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    )
    return any(name in INDEXES for name in names)


def _words(node: ast.AST) -> set[str]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
