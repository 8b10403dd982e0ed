"""What modeling files ask of a config: settings in conditions, the words they are compared with."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

RUNNING = ("forward", "_init_weights")  # what they ask makes no parameter
LAYER_KIND = re.compile(r"layer_type|block_type|layers_block|layer_kind|layer_pattern")
INDEXES = ("layer_idx", "layer_id", "layer_index", "idx", "i", "index", "layer_number")


@dataclass(slots=True)
class Conditions:
    """Names of settings by how code asks for them."""

    mentioned: set[str] = field(default_factory=set)
    tested: set[str] = field(default_factory=set)
    per_layer: set[str] = field(default_factory=set)  # compared with the number of a layer
    words: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

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
        whole.tested |= one.tested
        whole.per_layer |= one.per_layer
        for name, words in one.words.items():
            whole.words[name] |= words
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
    for node in _nodes(tree):
        conditions.mentioned |= _names(node, deep=False)
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
                for word in _words(node):
                    for name in names:
                        conditions.words[name].add(word)
            case ast.Subscript(value=ast.Name(id=table)) if table in tables:
                for name in _names(node.slice):
                    conditions.words[name] |= tables[table]
    return conditions


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
