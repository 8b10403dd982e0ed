"""Find the places of folds, by the recipes' [[fold]] rows.

A row is used only if everything that it names exists in fitting shapes, and if rows name every
matrix of the layer: an unknown reader of a divided output would compute something else in silence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.scaled_weights import Divided, Folded, VectorKind
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.encodings.base import Factors, Folding, Linear
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.patterns import integer_of
from fp4convert.recipes.rules import FoldRule, FoldUse
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Checkpoint, Source

BIAS = ".bias"
FloatArray = NDArray[np.floating[Any]]
# What the words in braces stand for in the names of a rule.
_WORDS = {"{layer}": r"(?P<layer>(?:.+\.)?\d+)", "{expert}": r"(?P<expert>\d+)"}


class Fold(NamedTuple):
    """One place for factors.

    rule     of the recipe
    name     the module with the divided output
    weight   of a norm; None of a linear layer
    maker    that linear layer; None of a norm
    bias     of either
    readers  every linear layer that reads the output
    rounded  readers that are rounded to four bits, for which the factors are
    repeats  how often a head of the maker is repeated among the readers' columns
    width    of a head; of all outputs if nothing is repeated
    is_exact the factors must be powers of two, so that biases and kept matrices are not rounded
    """

    rule: FoldRule
    name: str
    weight: TensorRef | None
    maker: Linear | None
    bias: TensorRef | None
    readers: tuple[Linear, ...]
    rounded: tuple[Linear, ...] = ()
    repeats: int = 1
    width: int = 0
    is_exact: bool = False

    @property
    def kind(self) -> str:
        """Return the kind of the output: norm, norm_plus_one, linear, heads."""
        return self.rule.kind

    @property
    def vector(self) -> VectorKind:
        """Return how the weight of a norm is meant."""
        return "norm_plus_one" if self.kind == "norm_plus_one" else "norm"

    @property
    def outputs(self) -> int:
        """Count the numbers that are divided."""
        if self.weight:
            return self.weight.elements
        return self.maker.shape[0] if self.maker else 0

    def by_column(self, made: FloatArray) -> FloatArray:
        """Arrange numbers of outputs as numbers of the readers' columns."""
        return np.repeat(made.reshape(-1, 1, self.width), self.repeats, axis=1).reshape(-1)

    def by_head(self, columns: FloatArray) -> FloatArray:
        """Arrange numbers of the readers' columns by output.

        Returns  (outputs, repeats)
        """
        by_head = columns.reshape(-1, self.repeats, self.width)
        return by_head.swapaxes(1, 2).reshape(-1, self.repeats)


FindFactors = Callable[[Fold, Source], Factors]


class Refusal(NamedTuple):
    """A place that a rule speaks of and that is not used, and why.

    fold  all that a rule says of it holds, but a matrix that no rule names may read it, too
    """

    name: str
    why: str
    fold: Fold | None = None


def find_folds(
    rules: Iterable[FoldRule], checkpoint: Checkpoint, linears: Linears
) -> tuple[list[Fold], list[Refusal]]:
    """Find every place that the rules name, once.

    Returns  the usable folds, and the places that are not usable
    Raises   InputError for a rule that fits nothing
    """
    finder = _PlaceFinder(tuple(rules), checkpoint, linears)
    folds: dict[str, list[Fold]] = defaultdict(list)
    refused: list[Refusal] = []
    for rule in finder.rules:
        for name, places in finder.places(rule).items():
            if not any(places.values()):
                continue  # a layer of another kind, whose own rule speaks of it
            fold = finder.judge(rule, name, places)
            if isinstance(fold, str):
                refused.append(Refusal(name, fold))
            elif stranger := finder.find_stranger(name):
                why = f"the recipe does not list {stranger}, which may read it too"
                refused.append(Refusal(name, why, fold))
            else:
                folds[name].append(fold)
    for name, own in folds.items():
        if len(own) > 1:
            refused.append(Refusal(name, "two rules name it"))
    names = {refusal.name for refusal in refused}
    return [own[0] for name, own in folds.items() if name not in names], refused


def uses_of(folds: Iterable[Fold]) -> tuple[FoldUse, ...]:
    """Gather folds in the form of a record."""
    found: dict[tuple[FoldRule, int, int], list[str]] = defaultdict(list)
    for fold in folds:
        found[fold.rule, fold.repeats, fold.width].append(fold.name)
    return tuple(FoldUse(*key, tuple(names)) for key, names in found.items())


def folds_used(uses: Iterable[FoldUse], checkpoint: Checkpoint, linears: Linears) -> list[Fold]:
    """Find the folds of an artifact in the checkpoint of its source.

    Raises InputError where that cannot have them
    """
    found: list[Fold] = []
    finder = _PlaceFinder(tuple(use.rule for use in uses), checkpoint, linears)
    for use in uses:
        places = finder.places(use.rule)
        for name in use.modules:
            fold = finder.fold(use.rule, name, places.get(name, {}))
            why = fold if isinstance(fold, str) else ""
            if isinstance(fold, Fold):
                columns = fold.readers[0].shape[1]
                if fold.outputs * use.repeats == columns and fold.outputs % use.width == 0:
                    found.append(fold._replace(repeats=use.repeats, width=use.width))
                    continue
                why = f"{use.repeats} heads of {use.width} do not fit"
            detail = f"the record lists a fold into {name}"
            detail += f", which {checkpoint.repo or 'the source'} does not have: {why}"
            next_step = "Give the weights that it was made from: --source SOURCE."
            raise InputError("source-differs", detail, next_step)
    return found


def changed_by(folds: Iterable[Fold], find: FindFactors) -> dict[str, Folded]:
    """Return the codings of all linear layers that folds change.

    Returns  module -> coding
    """
    found: dict[str, Folded] = {}
    for fold in folds:
        folding = _folding_of(fold, find)
        for linear in fold.readers:
            coding = found.get(linear.module) or Folded(linear.coding)
            found[linear.module] = replace(coding, columns=folding)
        if fold.maker:
            coding = found.get(fold.name) or Folded(fold.maker.coding)
            found[fold.name] = replace(coding, rows=folding)
    return found


def vectors_of(fold: Fold, find: FindFactors) -> Iterator[Linear]:
    """Return the weight of a norm and the bias, divided."""
    folding, shape = _folding_of(fold, find), (1, fold.outputs)
    if fold.weight:
        yield Linear(fold.weight.name, shape, Divided(fold.vector, folding), (fold.weight,))
    if fold.bias:
        yield Linear(fold.bias.name, shape, Divided("bias", folding), (fold.bias,))


def _folding_of(fold: Fold, find: FindFactors) -> Folding:
    """Describe a fold for the tensors it changes, by the key of its factors."""
    refs = [ref for linear in fold.readers for ref in linear.refs]
    refs = [fold.weight, *refs] if fold.weight else refs
    read = [[ref.name, ref.dtype, ref.shape, ref.file, ref.start] for ref in refs]
    rounded = [linear.module for linear in fold.rounded]
    key = hashlib.sha256(json.dumps([read, rounded, fold.is_exact]).encode()).hexdigest()
    beside = {ref.file: ref for ref in refs}
    return Folding(fold.name, key, tuple(beside.values()), lambda source: find(fold, source))


class _PlaceFinder:
    """Finds the places of rules among a checkpoint's names."""

    def __init__(
        self, rules: tuple[FoldRule, ...], checkpoint: Checkpoint, linears: Linears
    ) -> None:
        self.rules = rules
        self._config = checkpoint.config
        self._linears = linears.of
        self._tensors = {ref.name: ref for ref in checkpoint.tensors}
        # Matrices that a rule may name: linear layers, and whatever else is one.
        consumed = linears.consumed()
        self._matrices = dict.fromkeys(linears.of)
        self._norms = []
        for name, ref in self._tensors.items():
            if len(ref.shape) >= MATRIX_DIMENSIONS and name not in consumed:
                self._matrices[name.removesuffix(WEIGHT)] = None
            elif len(ref.shape) == 1 and name.endswith(WEIGHT) and ref.dtype in FLOAT_TYPES:
                self._norms.append(name.removesuffix(WEIGHT))
        self._strange = self._find_strange()

    def _find_strange(self) -> dict[str, list[str]]:
        """Find the matrices of layers that no rule names."""
        spoken: set[str] = set()
        layers: set[str] = set()
        for rule in self.rules:
            for name, values in _match(rule.into, [*self._norms, *self._matrices]):
                layers.add(values["layer"])
                spoken.add(name)
            for place in (*rule.linears, *rule.aside):
                spoken.update(name for name, _ in _match(place, self._matrices))
        strange: dict[str, list[str]] = defaultdict(list)
        for name in self._matrices:
            if name in spoken:
                continue
            parts = name.split(".")
            for end in range(1, len(parts)):
                if (layer := ".".join(parts[:end])) in layers:
                    strange[layer].append(name)
        return strange

    def places(self, rule: FoldRule) -> dict[str, dict[str, list[str]]]:
        """Find every module that `into` fits, and its linears' modules.

        Returns  module -> each of the rule's linears -> modules that it stands for
        """
        into, words = rule.into, _words_in(rule.into)
        makers = _match(into, self._norms if rule.kind.startswith("norm") else self._matrices)
        by_words = {tuple(values[word] for word in words): name for name, values in makers}
        found: dict[str, dict[str, list[str]]] = {
            name: {place: [] for place in rule.linears} for name in by_words.values()
        }
        for place in rule.linears:
            if not set(words) <= set(_words_in(place)):
                detail = f"[[fold]] into {into}: {place} does not name {' and '.join(words)}"
                next_step = "See: docs/recipes.md."
                raise InputError("recipe-file", f"{detail}, which `into` does", next_step)
            for name, values in _match(place, self._matrices):
                if maker := by_words.get(tuple(values[word] for word in words)):
                    found[maker][place].append(name)
        return found

    def find_stranger(self, name: str) -> str | None:
        """Return a matrix of a module's layer that no rule names."""
        layers = (layer for layer in self._strange if name.startswith(f"{layer}."))
        return next((self._strange[layer][0] for layer in layers), None)

    def judge(self, rule: FoldRule, name: str, places: Mapping[str, list[str]]) -> Fold | str:
        """Return the fold with its heads, or why it cannot be one."""
        for place, modules in places.items():
            if not modules and place not in rule.may_lack:
                return f"{place} is not there"
        fold = self.fold(rule, name, places)
        if isinstance(fold, str):
            return fold
        # Shapes that fit: the bias, and the columns of every reader.
        outputs, bias = fold.outputs, fold.bias
        if bias and (bias.shape != (outputs,) or bias.dtype not in FLOAT_TYPES):
            return f"{bias.name} is {bias.dtype} {list(bias.shape)}; expected {outputs} floats"
        repeats = fold.readers[0].shape[1] // max(outputs, 1) if fold.kind == "heads" else 1
        for linear in fold.readers:
            if not outputs or linear.shape[1] != repeats * outputs:
                why = f"{linear.module} has {linear.shape[1]} columns"
                return f"{why}, and expected {max(repeats, 1)} for each of {outputs} outputs"
        if repeats == 1:
            return fold._replace(width=outputs)
        # Heads that are repeated are those that config.json tells of.
        heads = integer_of(self._config, "num_attention_heads")
        own = integer_of(self._config, "num_key_value_heads")
        if not heads or not own or heads != repeats * own or outputs % own:
            why = f"num_attention_heads {heads} and num_key_value_heads {own} of config.json"
            return f"{why} do not say how {outputs} outputs become {repeats * outputs} columns"
        return fold._replace(repeats=repeats, width=outputs // own)

    def fold(self, rule: FoldRule, name: str, places: Mapping[str, list[str]]) -> Fold | str:
        """Return the fold without its heads, or the name of a missing module."""
        modules = [module for own in places.values() for module in own]
        if not modules:
            return "it has no readers"
        if unreadable := [module for module in modules if module not in self._linears]:
            return f"{unreadable[0]} is not a matrix that fp4convert reads"
        readers = tuple(self._linears[module] for module in modules)
        weight = self._tensors.get(name + WEIGHT) if rule.kind.startswith("norm") else None
        maker = None if weight else self._linears.get(name)
        return Fold(rule, name, weight, maker, self._tensors.get(name + BIAS), readers)


def _words_in(place: str) -> tuple[str, ...]:
    """Return the words in braces of a name: layer, expert."""
    return tuple(word.strip("{}") for word in _WORDS if word in place)


@cache
def _expression(place: str) -> re.Pattern[str]:
    text = re.escape(place)
    for word, meaning in _WORDS.items():
        text = text.replace(re.escape(word), meaning, 1)
    return re.compile(text)


def _match(place: str, names: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Find the names that a place stands for, and the values of its words."""
    end, expression = place.rpartition("}")[2], _expression(place)
    for name in names:
        if name.endswith(end) and (found := expression.fullmatch(name)):
            yield name, found.groupdict()
