"""Rows of recipe files as values; toml_files.py reads them."""

from __future__ import annotations

from typing import NamedTuple

from fp4convert.recipes.patterns import matches_any

NAMED = "{parent}.{expert}.{member}"


class KeepRule(NamedTuple):
    """Modules that stay as they are, and why.

    kind             embedding, router, tower, prediction, or ""
    may_be_absent    records name them even where the checkpoint has none: a tied head
    is_for_accuracy  engines could read them in fewer bits; a [[format]] that names them wins
    unless           patterns of modules that are excepted
    """

    patterns: tuple[str, ...]
    reason: str
    kind: str = ""
    may_be_absent: bool = False
    is_for_accuracy: bool = False
    unless: tuple[str, ...] = ()

    def fits(self, module: str) -> bool:
        """Return whether the rule is about a module."""
        return matches_any(self.patterns, module) and not matches_any(self.unless, module)


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
        parent = tensor.removesuffix(".weight").rpartition(".")[0]
        named = self.named.replace("{expert}", str(expert)).replace("{member}", member)
        return named.replace("{parent}", parent)


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

    into      the module that is divided
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
