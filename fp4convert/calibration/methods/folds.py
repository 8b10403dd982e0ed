"""Find where factors can be folded, by the recipes' [[fold]] rows.

A row is used only where everything that it names is there in shapes that fit, and where the layer holds no matrix that no row
speaks of: a reader of a divided output that nobody knows would compute something else, and nothing would tell.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.scaled_weights import Divided, Folded, Kind
from fp4convert.checkpoint.encodings.base import Factors, Folding, Linear
from fp4convert.checkpoint.encodings.floats import MATRIX_DIMENSIONS
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.patterns import integer_of
from fp4convert.recipes.rules import FoldRule, FoldUse
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Checkpoint, Source

BIAS = ".bias"
Floats = NDArray[np.floating[Any]]
_WORDS = {"{layer}": r"(?P<layer>(?:.+\.)?\d+)", "{expert}": r"(?P<expert>\d+)"}


@dataclass(frozen=True, slots=True)
class Fold:
    """One place for factors.

    rule     that speaks of it
    name     the module whose output is divided
    weight   of a norm; None of a linear layer
    maker    that linear layer; None of a norm
    bias     of either
    readers  every linear layer that reads the output
    rounded  those of them that are rounded to four bits, which is what the factors are for
    repeats  how often each head of the maker is repeated among the readers' columns
    width    of a head; of all outputs where nothing is repeated
    is_exact the factors must be powers of two, so that what keeps its dtype is not rounded: biases, and matrices that stay
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
        """Of what is divided: norm, norm_plus_one, linear, heads."""
        return self.rule.kind

    @property
    def vector(self) -> Kind:
        """How the weight of a norm is meant."""
        return "norm_plus_one" if self.kind == "norm_plus_one" else "norm"

    @property
    def outputs(self) -> int:
        """How many numbers are divided."""
        return self.weight.elements if self.weight else self.maker.shape[0] if self.maker else 0

    def by_column(self, made: Floats) -> Floats:
        """Numbers of outputs as numbers of the readers' columns."""
        return np.repeat(made.reshape(-1, 1, self.width), self.repeats, axis=1).reshape(-1)

    def by_head(self, columns: Floats) -> Floats:
        """(outputs, repeats): numbers of the readers' columns beside each output that makes them."""
        return (
            columns.reshape(-1, self.repeats, self.width).swapaxes(1, 2).reshape(-1, self.repeats)
        )

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """All that its factors are found in."""
        made = (self.weight,) if self.weight else ()
        return (*made, *(ref for linear in self.readers for ref in linear.refs))


FindFactors = Callable[[Fold, Source], Factors]


class Refusal(NamedTuple):
    """A place that a rule speaks of and that is not used, and why."""

    name: str
    why: str


class Found(NamedTuple):
    """The places of a checkpoint."""

    folds: list[Fold]
    refused: list[Refusal]


def find_folds(rules: Iterable[FoldRule], checkpoint: Checkpoint, linears: Linears) -> Found:
    """Every place that the rules speak of, each once; InputError for a rule that cannot be meant."""
    sight = _Sight(tuple(rules), checkpoint, linears)
    folds: dict[str, list[Fold]] = defaultdict(list)
    refused: list[Refusal] = []
    for rule in sight.rules:
        for name, places in sight.places(rule).items():
            if not any(places.values()):
                continue  # a layer of another kind, whose own rule speaks of it
            fold = sight.judge(rule, name, places)
            if isinstance(fold, Fold):
                folds[name].append(fold)
            else:
                refused.append(Refusal(name, fold))
    used = {name: own[0] for name, own in folds.items() if len(own) == 1}
    refused += [
        Refusal(name, "two rules speak of it") for name, own in folds.items() if len(own) > 1
    ]
    torn = {refusal.name for refusal in refused} & used.keys()
    return Found([fold for name, fold in used.items() if name not in torn], refused)


def uses_of(folds: Iterable[Fold]) -> tuple[FoldUse, ...]:
    """Folds as a record tells them."""
    found: dict[tuple[FoldRule, int, int], list[str]] = defaultdict(list)
    for fold in folds:
        found[fold.rule, fold.repeats, fold.width].append(fold.name)
    return tuple(FoldUse(*key, tuple(names)) for key, names in found.items())


def folds_used(uses: Iterable[FoldUse], checkpoint: Checkpoint, linears: Linears) -> list[Fold]:
    """The folds of an artifact, in the checkpoint that it was made from; InputError where that cannot have them."""
    found: list[Fold] = []
    sight = _Sight(tuple(use.rule for use in uses), checkpoint, linears)
    for use in uses:
        places = sight.places(use.rule)
        for name in use.modules:
            fold = sight.fold(use.rule, name, places.get(name, {}))
            if (
                isinstance(fold, str)
                or fold.outputs * use.repeats != fold.readers[0].shape[1]
                or fold.outputs % use.width
            ):
                why = (
                    fold
                    if isinstance(fold, str)
                    else f"{use.repeats} heads of {use.width} do not fit"
                )
                detail = f"the record tells of a fold into {name}, which {checkpoint.repo or 'the source'} does not have: {why}"
                raise InputError(
                    "source-differs",
                    detail,
                    "Give the weights that it was made from: --source SOURCE.",
                )
            found.append(replace(fold, repeats=use.repeats, width=use.width))
    return found


def changed_by(folds: Iterable[Fold], find: FindFactors) -> dict[str, Folded]:
    """The codings of all linear layers that some fold changes, by module."""
    found: dict[str, Folded] = {}
    for fold in folds:
        folding = folding_of(fold, find)
        for linear in fold.readers:
            found[linear.module] = replace(
                found.get(linear.module) or Folded(linear.coding), columns=folding
            )
        if fold.maker:
            found[fold.name] = replace(
                found.get(fold.name) or Folded(fold.maker.coding), rows=folding
            )
    return found


def vectors_of(fold: Fold, find: FindFactors) -> Iterator[Linear]:
    """The weight of a norm and the bias, divided."""
    folding = folding_of(fold, find)
    if fold.weight:
        yield Linear(
            fold.weight.name, (1, fold.outputs), Divided(fold.vector, folding), (fold.weight,)
        )
    if fold.bias:
        yield Linear(fold.bias.name, (1, fold.outputs), Divided("bias", folding), (fold.bias,))


def folding_of(fold: Fold, find: FindFactors) -> Folding:
    """The fold, as the tensors that it changes know it."""
    read = [[ref.name, ref.dtype, ref.shape, ref.file, ref.start] for ref in fold.refs]
    key = hashlib.sha256(
        json.dumps([read, [linear.module for linear in fold.rounded], fold.is_exact]).encode()
    ).hexdigest()
    beside = {ref.file: ref for ref in fold.refs}
    return Folding(fold.name, key, tuple(beside.values()), lambda source: find(fold, source))


class _Sight:
    """A checkpoint's names, as the rules see them."""

    def __init__(
        self, rules: tuple[FoldRule, ...], checkpoint: Checkpoint, linears: Linears
    ) -> None:
        self.rules = rules
        self._config = checkpoint.config
        self._linears = linears.of
        self._tensors = {ref.name: ref for ref in checkpoint.tensors}
        consumed = linears.consumed()
        others = [
            ref
            for ref in self._tensors.values()
            if len(ref.shape) >= MATRIX_DIMENSIONS and ref.name not in consumed
        ]
        self._matrices = {
            **dict.fromkeys(linears.of),
            **dict.fromkeys(ref.name.removesuffix(WEIGHT) for ref in others),
        }
        self._norms = [
            name.removesuffix(WEIGHT) for name, ref in self._tensors.items() if _is_norm(ref)
        ]
        self._strange = self._find_strange()

    def places(self, rule: FoldRule) -> dict[str, dict[str, list[str]]]:
        """For every module that `into` fits: the modules of each of its linears."""
        makers = _matching(
            rule.into, self._norms if rule.kind.startswith("norm") else self._matrices
        )
        words = _words(rule.into)
        found: dict[str, dict[str, list[str]]] = {}
        at = {tuple(values[word] for word in words): name for name, values in makers}
        for name in at.values():
            found[name] = {place: [] for place in rule.linears}
        for place in rule.linears:
            if not set(words) <= set(_words(place)):
                detail = f"[[fold]] into {rule.into}: {place} does not name {' and '.join(words)}, which `into` does"
                raise InputError("recipe-file", detail, "See: docs/recipes.md.")
            for name, values in _matching(place, self._matrices):
                if maker := at.get(tuple(values[word] for word in words)):
                    found[maker][place].append(name)
        return found

    def judge(self, rule: FoldRule, name: str, places: Mapping[str, list[str]]) -> Fold | str:
        """The fold, or why it cannot be one."""
        if lacking := [
            place for place, modules in places.items() if not modules and place not in rule.may_lack
        ]:
            return f"{lacking[0]} is not there"
        for layer, strangers in self._strange.items():
            if name.startswith(f"{layer}."):
                return f"the recipe does not know {strangers[0]}, which may read it, too"
        fold = self.fold(rule, name, places)
        return fold if isinstance(fold, str) else self._fitted(fold)

    def fold(self, rule: FoldRule, name: str, places: Mapping[str, list[str]]) -> Fold | str:
        """The fold without its heads, or what it lacks."""
        modules = [module for own in places.values() for module in own]
        if not modules:
            return "it has no readers"
        if unreadable := [module for module in modules if module not in self._linears]:
            return f"{unreadable[0]} is no matrix that is read here"
        readers = tuple(self._linears[module] for module in modules)
        weight = self._tensors.get(name + WEIGHT) if rule.kind.startswith("norm") else None
        maker = None if weight else self._linears.get(name)
        bias = self._tensors.get(name + BIAS)
        return Fold(rule, name, weight, maker, bias, readers)

    def _fitted(self, fold: Fold) -> Fold | str:
        """The fold with its heads, or what does not fit."""
        outputs = fold.outputs
        if fold.bias and (fold.bias.shape != (outputs,) or fold.bias.dtype not in FLOAT_TYPES):
            return f"{fold.bias.name} is {fold.bias.dtype} {list(fold.bias.shape)}; expected {outputs} floats"
        repeats = fold.readers[0].shape[1] // max(outputs, 1) if fold.kind == "heads" else 1
        for linear in fold.readers:
            if not outputs or linear.shape[1] != repeats * outputs:
                return f"{linear.module} has {linear.shape[1]} columns, and expected {max(repeats, 1)} for each of {outputs} outputs"
        if repeats == 1:
            return replace(fold, width=outputs)
        heads, own = (
            integer_of(self._config, key) for key in ("num_attention_heads", "num_key_value_heads")
        )
        if not heads or not own or heads != repeats * own or outputs % own:
            told = f"num_attention_heads {heads} and num_key_value_heads {own}"
            return f"{told} of config.json do not say how {outputs} outputs become {repeats * outputs} columns"
        return replace(fold, repeats=repeats, width=outputs // own)

    def _find_strange(self) -> dict[str, list[str]]:
        """The matrices of each layer that no rule speaks of; layers are those that rules speak of."""
        spoken: set[str] = set()
        layers: set[str] = set()
        for rule in self.rules:
            for name, values in _matching(rule.into, [*self._norms, *self._matrices]):
                layers.add(values["layer"])
                spoken.add(name)
            for place in (*rule.linears, *rule.aside):
                spoken.update(name for name, _ in _matching(place, self._matrices))
        strange: dict[str, list[str]] = defaultdict(list)
        for name in self._matrices:
            if name not in spoken:
                parts = name.split(".")
                for end in range(1, len(parts)):
                    if (layer := ".".join(parts[:end])) in layers:
                        strange[layer].append(name)
        return strange


def _is_norm(ref: TensorRef) -> bool:
    return len(ref.shape) == 1 and ref.name.endswith(WEIGHT) and ref.dtype in FLOAT_TYPES


def _words(place: str) -> tuple[str, ...]:
    """The words in braces of a name: layer, expert."""
    return tuple(word.strip("{}") for word in _WORDS if word in place)


@cache
def _expression(place: str) -> re.Pattern[str]:
    text = re.escape(place)
    for word, meaning in _WORDS.items():
        text = text.replace(re.escape(word), meaning, 1)
    return re.compile(text)


def _matching(place: str, names: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The names that a place stands for, and what its words stand for in each."""
    end, expression = place.rpartition("}")[2], _expression(place)
    for name in names:
        if name.endswith(end) and (found := expression.fullmatch(name)):
            yield name, found.groupdict()
