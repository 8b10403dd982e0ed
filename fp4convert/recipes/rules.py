"""Rows of recipe files as values; how a tensor stacks experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from fp4convert.errors import InputError
from fp4convert.recipes.options import STACK_ORDERS
from fp4convert.recipes.patterns import integer_of, matches_any
from fp4convert.storage.safetensors import WEIGHT

NAMED = "{parent}.{expert}.{member}"
FUSED = {  # last parts of names: a gate and an up projection in one tensor
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "w13_weight": ("w1", "w3"),
}
EXPERT_WORDS = ("expert", ".moe.", "_moe.")
# Endings of names of tensors beside a stack, with a value for each expert.
BESIDE_STACKS = ("_scale", "_scales", "_scale_inv", "_bias", ".bias")
STACK_DIMENSIONS = 3


class KeepRule(NamedTuple):
    """Modules that stay as they are, and why.

    kind             embedding, router, tower, prediction, plain, or ""
    may_be_absent    records name them even where the checkpoint has none: a tied head
    is_for_accuracy  engines could read them in fewer bits; a [[format]] that names them wins
    unless           patterns of modules that are excepted
    dialects         of artifacts that the rule is for; () for all
    sizes            numbers of rows or columns, of which a module has one; () for all
    tables           patterns of embeddings that are looked up by rows; () for all
    """

    patterns: tuple[str, ...]
    reason: str
    kind: str = ""
    may_be_absent: bool = False
    is_for_accuracy: bool = False
    unless: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    tables: tuple[str, ...] = ()

    def fits(self, module: str, shape: tuple[int, ...] = ()) -> bool:
        """Return whether the rule is about a module of that shape."""
        is_of_size = not self.sizes or not set(self.sizes).isdisjoint(shape)
        is_named = matches_any(self.patterns, module) and not matches_any(self.unless, module)
        return is_named and is_of_size

    def is_table(self, module: str) -> bool:
        """Return whether a module of the rule is an embedding, looked up by rows."""
        is_named = not self.tables or matches_any(self.tables, module)
        return self.kind == "embedding" and is_named


class OnlyRule(NamedTuple):
    """The only modules that are quantized, and why."""

    patterns: tuple[str, ...]
    reason: str


class StackRule(NamedTuple):
    """Tensors that stack the matrices of experts.

    members         the modules of each expert, in the order of their rows
    is_transposed   each expert's matrix is stored as (in, out)
    is_interleaved  rows of the members take turns; else one member stands below the other
    named           template of a module's name: {parent} is the tensor's name without its last
                    part, {expert} a number from 0
    inputs_key      key of config.json with the number of inputs of a matrix, for models with
                    checkpoints in both orders
    inputs          that number
    experts_key     key of config.json with the number of experts, for a tensor
                    (experts * rows, columns)
    experts         that number
    """

    tensors: tuple[str, ...]
    members: tuple[str, ...]
    is_transposed: bool
    is_interleaved: bool
    named: str = NAMED
    inputs_key: str = ""
    inputs: int | None = None
    experts_key: str = ""
    experts: int | None = None

    def module(self, tensor: str, expert: int, member: str) -> str:
        """Return the module name of one expert in a tensor."""
        parent = tensor.removesuffix(WEIGHT).rpartition(".")[0]
        named = self.named.replace("{expert}", str(expert)).replace("{member}", member)
        return named.replace("{parent}", parent)

    def tensors_of(self, module: str) -> Iterator[str]:
        """Yield the names of stacks that one expert's module may be cut from."""
        if match := _expression_of(self.named, self.members).fullmatch(module):
            ends = ((WEIGHT if glob.endswith(WEIGHT) else "", glob) for glob in self.tensors)
            stacks = (
                f"{match['parent']}.{glob.removesuffix(end).rpartition('.')[2]}{end}"
                for end, glob in ends
            )
            yield from (name for name in stacks if matches_any(self.tensors, name))

    def of_model(self, config: Mapping[str, object]) -> StackRule:
        """Fill in the numbers of a model's config.json."""
        inputs = integer_of(config, self.inputs_key)
        return self._replace(inputs=inputs, experts=integer_of(config, self.experts_key))

    def decide(
        self, tensor: str, shape: tuple[int, ...], order: str | None, rows: str | None
    ) -> StackRule:
        """Apply --stack-order and --stack-rows, or the order that the shape shows.

        Raises  InputError where the number of inputs is on no axis, or on two
        """
        rule = self
        if order is not None:
            rule = rule._replace(is_transposed=order == "in_out")
        elif rule.inputs is not None and shape:
            axes = range(1, min(len(shape), STACK_DIMENSIONS))
            fitting = [axis for axis in axes if shape[axis] == rule.inputs]
            if len(fitting) != 1:
                detail = f"{tensor} is {list(shape)}, and {rule.inputs_key} is {rule.inputs}"
                detail += ", which does not show which axis is inputs"
                next_step = f"Say --stack-order {' or '.join(STACK_ORDERS)}."
                raise InputError("stack-order", detail, next_step, tensor)
            rule = rule._replace(is_transposed=fitting == [1])
        is_interleaved = rule.is_interleaved if rows is None else rows == "interleaved"
        return rule._replace(is_interleaved=is_interleaved and len(rule.members) > 1)


@cache
def _expression_of(named: str, members: tuple[str, ...]) -> re.Pattern[str]:
    """Compile the expression for the modules of a StackRule."""
    words = {"{parent}": r"(?P<parent>.+)", "{expert}": r"\d+"}
    words["{member}"] = f"(?:{'|'.join(map(re.escape, members))})"
    expression = re.escape(named).replace(r"\{", "{").replace(r"\}", "}")
    for word, meaning in words.items():
        expression = expression.replace(word, meaning)
    return re.compile(expression)


def unnamed_stack(
    tensor: str, shape: tuple[int, ...], order: str | None, rows: str | None
) -> StackRule | None:
    """Return the rule of options for a stack of no recipe, or None."""
    leaf = tensor.removesuffix(WEIGHT).rpartition(".")[2]
    is_known = order is not None and (rows is not None or leaf not in FUSED)
    if not is_known or not is_expert_stack(tensor, shape):
        return None
    is_interleaved = rows == "interleaved" and leaf in FUSED
    return StackRule((tensor,), FUSED.get(leaf, (leaf,)), order == "in_out", is_interleaved)


def is_expert_stack(tensor: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor stacks the matrices of several experts.

    The name decides: convolutions have the same shapes.
    """
    is_stack = len(shape) == STACK_DIMENSIONS and not tensor.endswith(BESIDE_STACKS)
    return is_stack and any(word in tensor for word in EXPERT_WORDS)


class Patterns(tuple[str, ...]):
    """A tuple that is hashed once.

    Every module is matched with thousands of patterns, which a cache finds by their hash.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class FormatRule(NamedTuple):
    """Modules that become another format than that of --format.

    format  a name, "keep" for none, or "target" for that of --format
    """

    patterns: Patterns
    format: str


class FoldRule(NamedTuple):
    """Linear layers whose columns may be multiplied, and their producer.

    The producer is divided by the same numbers.  `{layer}` in a name is a path that ends in a
    number, `{expert}` a number; both are equal in `into` and the others, or range over all numbers
    where `into` lacks them.

    into      the producer
    kind      a word of FOLD_KINDS: how the output depends on its weights
    linears   every module that reads its output
    may_lack  those of `linears` that some layers or models lack
    aside     other matrices of a layer, with another input: a matrix that no rule names makes the
              layer unknown
    """

    into: str
    kind: str
    linears: tuple[str, ...]
    may_lack: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class ExpertsRule(NamedTuple):
    """Tensors and keys of config.json that depend on the number of experts.

    Pruning changes them beside the experts' matrices.

    counts   keys with the number of experts of a layer
    chosen   keys with the number of experts for a token
    rows     tensors with experts on the first axis: the router, biases of stacks
    columns  tensors with experts on the last axis
    """

    counts: tuple[str, ...]
    chosen: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()


class FoldUse(NamedTuple):
    """Modules whose output was divided by the scales of columns, by one rule.

    Records list them.

    repeats  and width: of heads, as in a Fold
    modules  the modules that were divided
    """

    rule: FoldRule
    repeats: int
    width: int
    modules: tuple[str, ...]
