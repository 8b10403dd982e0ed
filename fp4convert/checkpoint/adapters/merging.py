"""Match an adapter with its base model; merge it where weights are read.

A merged weight has the bytes of PEFT's merge_and_unload on a CPU (PEFT 0.21, layer.py): W + s B A
in float32, rounded once to the dtype of W; for embeddings s B A is rounded to it first.  Packed
weights are decoded, and the sum stays float32 until it is rounded to four bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fp4convert.checkpoint.adapters.other_layouts import ENCODERS, KOHYA
from fp4convert.checkpoint.adapters.pairs import LoraPair
from fp4convert.checkpoint.adapters.peft import Adapter
from fp4convert.checkpoint.encodings.base import ChangedCoding, Coding, Linear
from fp4convert.checkpoint.encodings.floats import as_row
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError, did_you_mean
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_floats
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.low_rank import Directions, directions_of
from fp4convert.numerics.matrices import Matrix, RowReader, Weights
from fp4convert.recipes.patterns import configs_in
from fp4convert.recipes.recipe import model_recipe
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.source import Checkpoint, Source

BIAS, BASE_LAYER = ".bias", ".base_layer"
HEADS = ("lm_head", "embed_out", "output")  # last parts of the names of output layers
TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
MOST_NEAR = 5000  # modules: among more a search takes too long
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LowRank:
    """W + scaling * left right, in the order in which W is stored.

    left, right       (rows, rank) and (rank, columns) float32
    is_rounded_first  the product takes the dtype of W before it is added
    """

    left: Float32s = field(repr=False)
    right: Float32s = field(repr=False)
    scaling: float
    is_rounded_first: bool = False

    def apply(self, own: Float32s, first: int, dtype: str) -> Float32s:
        """Return changed rows from `first` on, not rounded yet.

        dtype  that the result will be rounded to
        """
        product = Cpu().multiply(self.left[first : first + len(own)], self.right)
        with np.errstate(over="ignore"):  # Inf is refused where it is rounded
            delta = product * np.float32(self.scaling)
            return own + (_rounded(delta, dtype) if self.is_rounded_first else delta)

    @cached_property
    def directions(self) -> Directions:
        """Return the directions of inputs that the change responds to."""
        return directions_of(self.right)

    @cached_property
    def gram(self) -> Float32s:
        """Return the products of its inputs, (rank, rank)."""
        return Cpu().multiply(self.right, np.ascontiguousarray(self.right.T))


@dataclass(frozen=True, eq=False)
class Whole:
    """The adapter's values, in place of the model's."""

    values: Float32s = field(repr=False)

    def apply(self, own: Float32s, first: int, dtype: str) -> Float32s:
        return self.values[first : first + len(own)]


@dataclass(frozen=True, eq=False)
class Added:
    """The model's bias, as one row, plus the adapter's."""

    values: Float32s = field(repr=False)

    def apply(self, own: Float32s, first: int, dtype: str) -> Float32s:
        with np.errstate(over="ignore"):
            return own + self.values


AdapterChange = LowRank | Whole | Added


@dataclass(frozen=True, slots=True)
class MergedCoding(ChangedCoding):
    """A matrix, or a vector as one row, that an adapter changes."""

    stored: Coding
    by: AdapterChange
    change = "merged with the adapter"
    format = None

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True  # and merged

    def weights(self, linear: Linear, source: Source) -> Weights:
        return MergedRows(self.stored.weights(linear, source), self.by)


@dataclass(frozen=True, slots=True)
class MergedRows(RowReader):
    """Weights under a change, in the dtype of the model's."""

    stored: Weights
    by: AdapterChange

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def rows(self, first: int, last: int) -> Matrix:
        own = as_floats(self.stored.rows(first, last))
        values = self.by.apply(own, first, self.dtype)
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values).astype(FLOAT_DTYPES[self.dtype])
        return Matrix(data.reshape(-1).view(np.uint8).data, self.dtype, values.shape)


def merge_adapter(linears: Linears, adapter: Adapter, checkpoint: Checkpoint) -> Linears:
    """Apply an adapter to linear layers, and to the vectors beside them."""
    return _Merger(linears, adapter, checkpoint).merged()


class _Merger:
    """Matches the adapter's names with tensors of the model."""

    def __init__(self, linears: Linears, adapter: Adapter, checkpoint: Checkpoint) -> None:
        self._linears, self._adapter, self._config = linears, adapter, checkpoint.config
        self._refs = {ref.name: ref for ref in checkpoint.tensors}
        self._flat = _flat_names(linears.of) if any(map(_is_flat, adapter.pairs)) else {}
        self._lacking: list[str] = []
        known = [*linears.of, *(name.rpartition(".")[0] for name in self._refs)]
        named = [name for name in adapter.pairs if not name.startswith((*KOHYA, *ENCODERS))]
        named += (name.rpartition(".")[0] for name in adapter.tensors)
        self._old, self._new = _find_prefixes(named, dict.fromkeys(known), adapter)

    def merged(self) -> Linears:
        of, vectors = dict(self._linears.of), dict(self._linears.vectors)
        for name, values in self._adapter.tensors.items():
            module, leaf = name.rpartition(".")[::2]
            here = self._name(module)
            self._refuse_tied(here, is_table=here.rpartition(".")[2] in TABLES)
            if leaf == "weight" and here in of:
                linear = of[here]
                self._check_shape(name, values.shape, linear.shape)
                of[here] = linear._replace(coding=MergedCoding(linear.coding, Whole(values)))
            else:
                linear = self._vector(f"{here}.{leaf}", name, values.shape)
                flat = Whole(values.reshape(1, -1))
                vectors[linear.name] = linear._replace(coding=MergedCoding(linear.coding, flat))
        for module, pair in self._adapter.pairs.items():
            for here, change in self._changes(module, pair):
                linear = of[here]
                of[here] = linear._replace(coding=MergedCoding(linear.coding, change))
        for module, values in self._adapter.biases.items():
            linear = self._vector(self._name(module) + BIAS, module + BIAS, values.shape)
            added = MergedCoding(linear.coding, Added(values.reshape(1, -1)))
            vectors[linear.name] = linear._replace(coding=added)
        renamed, notes = (self._old, self._new), self._linears.notes
        if self._lacking and len(self._lacking) == len(self._adapter.pairs):
            raise self._unmatched(self._lacking[0])
        if self._lacking:
            note = (
                f"{len(self._lacking)} pairs of the adapter, the first {self._lacking[0]}, are for"
            )
            notes = (*notes, f"{note} text encoders that are not here: merge it with them, too")
        done = replace(self._linears, of=of, vectors=vectors, adapter=self._adapter)
        return replace(done, renamed=renamed, notes=notes)

    def _changes(self, module: str, pair: LoraPair) -> Iterator[tuple[str, LowRank]]:
        """Yield the modules that a pair changes, and their changes."""
        here, of = self._name(module), self._linears.of
        self._refuse_tied(here, pair.is_embedding)
        if here in of and pair.experts == 1:
            yield here, self._low_rank(module, pair, of[here].shape)
        elif self._adapter.parameters:
            yield from self._of_experts(module, here.replace(BASE_LAYER, ""), pair)
        elif module.startswith(ENCODERS):
            self._lacking.append(module)
        else:
            raise self._unmatched(module)

    def _of_experts(
        self, module: str, parent: str, pair: LoraPair
    ) -> Iterator[tuple[str, LowRank]]:
        """Yield the experts of a parameter, as PEFT's ParamWrapper computes them.

        Of several parameters of one module the factors do not name theirs: sizes decide.
        """
        recipe, rank, fitting = model_recipe(self._config), len(pair.a) // pair.experts, []
        for parameter in dict.fromkeys(self._adapter.parameters):
            tensor = f"{parent}.{parameter}"
            rule = recipe.stack_rule(tensor) or _usual_rule(parameter)
            names = [
                [rule.module(tensor, expert, member) for member in rule.members]
                for expert in range(pair.experts)
            ]
            linears = [self._linears.of.get(name) for row in names for name in row]
            rows = len(pair.b) // len(rule.members)
            if {one and one.shape for one in linears} == {(rows, pair.a.shape[1])}:
                fitting.append((rule, names, rows))
        if len(fitting) != 1:
            raise self._unmatched(module)
        rule, names, rows = fitting[0]
        for expert, row in enumerate(names):
            right = np.ascontiguousarray(pair.a[expert * rank : (expert + 1) * rank])
            for number, name in enumerate(row):
                part = slice(number * rows, (number + 1) * rows)
                if rule.is_interleaved:
                    part = slice(number, None, len(row))
                left = np.ascontiguousarray(pair.b[part, expert :: pair.experts])
                yield name, LowRank(left, right, pair.scaling, is_rounded_first=True)

    def _name(self, module: str) -> str:
        """Return the model's name for a module of the adapter."""
        if module in self._flat:
            return self._flat[module]
        if module in self._linears.of or not module.startswith(self._old):
            return module
        return self._new + module.removeprefix(self._old)

    def _vector(self, name: str, adapters_name: str, shape: Shape) -> Linear:
        """Return a tensor that is no matrix of a linear layer, as one row."""
        ref = self._refs.get(name)
        if ref is None or ref.dtype not in FLOAT_TYPES:
            raise self._unmatched(adapters_name)
        self._check_shape(adapters_name, shape, ref.shape)
        return self._linears.vectors.get(name) or as_row(ref)

    def _low_rank(self, module: str, pair: LoraPair, shape: tuple[int, int]) -> LowRank:
        """Orient a pair as the model stores its matrix."""
        straight, turned = (len(pair.b), pair.a.shape[1]), (pair.a.shape[1], len(pair.b))
        is_turned = pair.is_embedding or (self._adapter.is_transposed and shape == turned)
        self._check_shape(module, turned if is_turned else straight, shape)
        left, right = (pair.a.T, pair.b.T) if is_turned else (pair.b, pair.a)
        factors = np.ascontiguousarray(left), np.ascontiguousarray(right)
        return LowRank(*factors, pair.scaling, pair.is_embedding or pair.is_rounded_first)

    def _check_shape(self, name: str, found: Shape, expected: Shape) -> None:
        if found != expected:
            detail = f"{self._adapter.name}: {name} is for a tensor of {list(found)}, and the model"
            detail += f" has {list(expected)}; expected the model that it was made for"
            raise InputError("adapter-mismatch", detail, self._next_step(), name)

    def _unmatched(self, name: str) -> InputError:
        detail = f"{self._adapter.name}: {name} changes what the model does not have"
        near = did_you_mean(name, self._linears.of) if len(self._linears.of) < MOST_NEAR else ""
        detail = f"{detail}; expected a tensor of the model for each of the adapter's{near}"
        return InputError("adapter-mismatch", detail, self._next_step(), name)

    def _next_step(self) -> str:
        base = self._adapter.base
        return f"It was made for {base}: give that." if base else ""

    def _refuse_tied(self, module: str, is_table: bool) -> None:
        """Raise InputError for a matrix that the model uses at both ends."""
        heads = [name for name in self._linears.of if name.rpartition(".")[2] in HEADS]
        tied = [config.get("tie_word_embeddings") for config in configs_in(self._config)]
        is_tied = True in tied or (False not in tied and not heads)
        is_head = module.rpartition(".")[2] in HEADS
        if (is_table or is_head) and is_tied:
            other = "the output layer" if is_table else "the embedding"
            saved = {name.rpartition(".")[0] for name in self._adapter.tensors}
            last = {name.rpartition(".")[2] for name in saved}
            has_both = not last.isdisjoint(HEADS) and not last.isdisjoint(TABLES)
            why = "which it was not made to change"
            if has_both:
                why = "and the adapter has one for each"
            detail = f"{self._adapter.name}: {module} is one matrix with {other}, {why}"
            step = "Give both a tensor of their own, with tie_word_embeddings false, and try again."
            raise InputError("adapter-tied", detail, step, module)


def _is_flat(module: str) -> bool:
    """Return whether a name of kohya has _ in place of dots."""
    return module.startswith(tuple(KOHYA))


def _flat_names(modules: Iterable[str]) -> dict[str, str]:
    """Return the modules of a model by kohya's names."""
    return {
        kohya + module.removeprefix(place).replace(".", "_"): module
        for module in modules
        for kohya, places in KOHYA.items()
        for place in places
        if module.startswith(place)
    }


def _usual_rule(parameter: str) -> StackRule:
    """Return the rule of stacks as transformers 5 joins experts."""
    members = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else (parameter,)
    return StackRule((), members, is_transposed=False, is_interleaved=False)


def _find_prefixes(
    named: Collection[str], known: Mapping[str, None], adapter: Adapter
) -> tuple[str, str]:
    """Return the adapter's prefix of names, and the model's.

    They differ for GPT-2, whose checkpoint leaves out `transformer.`. The first name that the model
    lacks decides, where exactly one of the model's has its ending, from its first number on.
    """
    missing = next((name for name in named if name not in known), None)
    if missing is None:
        return "", ""
    parts = missing.split(".")
    numbered = [len(parts) - at for at, part in enumerate(parts) if part.isdecimal()]
    for count in range(len(parts), max(numbered, default=1) - 1, -1):
        tail = ".".join(parts[-count:])
        ending = [name for name in known if name == tail or name.endswith(f".{tail}")]
        if len(ending) == 1:
            return missing.removesuffix(tail), ending[0].removesuffix(tail)
        if ending:
            detail = f"{adapter.name}: {missing} may be {ending[0]} or {ending[1]} of the model"
            step = "Rename its tensors as the model has them."
            raise InputError("adapter-mismatch", f"{detail}; expected one", step, missing)
    return "", ""


def _rounded(values: Float32s, dtype: str) -> Float32s:
    return values.astype(FLOAT_DTYPES[dtype]).astype(np.float32)
