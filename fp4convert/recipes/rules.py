"""The rows of recipe files as values.

toml_files.py reads them.
"""

from __future__ import annotations

from typing import NamedTuple

from fp4convert.recipes.patterns import matches_any

NAMED = "{parent}.{expert}.{member}"


class KeepRule(NamedTuple):
    """Modules that stay as they are, and why.

    kind             what they are, where it matters: embedding, router, tower, prediction; or ""
    may_be_absent    engines must know of them even where the checkpoint holds none: a tied head
    is_for_accuracy  engines could read them in fewer bits, and a [[format]] that names them goes
                     before this rule
    unless           patterns of modules that it does not mean
    """

    patterns: tuple[str, ...]
    reason: str
    kind: str = ""
    may_be_absent: bool = False
    is_for_accuracy: bool = False
    unless: tuple[str, ...] = ()

    def fits(self, module: str) -> bool:
        """Tell whether it means that module."""
        return matches_any(self.patterns, module) and not matches_any(self.unless, module)


class OnlyRule(NamedTuple):
    """Modules outside of which everything stays, for that reason."""

    patterns: tuple[str, ...]
    reason: str


class StackRule(NamedTuple):
    """Tensors that hold one matrix, or several, for each expert.

    members         the modules of each expert, in the order of their rows
    is_transposed   each expert's matrix is stored as (in, out)
    is_interleaved  rows of the members take turns; else one member stands below the other
    named           of a module: {parent} is the tensor's name without its last part, {expert} a
                    number from 0
    inputs_key      of config.json, where checkpoints of both orders are in use: it says how many
                    inputs each matrix has
    inputs          that number
    experts_key     of config.json, for a tensor (experts * rows, columns) with experts below each
                    other: it says how many there are
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
        """Name the module of one expert out of a tensor."""
        parent = tensor.removesuffix(".weight").rpartition(".")[0]
        named = self.named.replace("{expert}", str(expert)).replace("{member}", member)
        return named.replace("{parent}", parent)


class Patterns(tuple[str, ...]):
    """A tuple that is hashed once.

    Every module is asked about thousands of patterns, which are looked up by their hash.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class FormatRule(NamedTuple):
    """Modules that become another format than the one asked for.

    "keep" and "target" are words for none and that one.
    """

    patterns: Patterns
    format: str


class FoldRule(NamedTuple):
    """Linear layers whose columns may be multiplied.

    What makes their input is divided by the same numbers.  `{layer}` and `{expert}` in names stand
    for a path that ends in a number, and for a number; those that `into` has are the same in the
    others, and all numbers are meant where it has none.

    into      the module that is divided
    kind      of it, a word of FOLD_KINDS: how its output depends on it
    linears   every module that reads its output; what is lacking there is none of them
    may_lack  of these, those that some layers or models do not have
    aside     other matrices of a layer, which read something else: with a matrix that no rule
              names, a layer is not what it seems
    """

    into: str
    kind: str
    linears: tuple[str, ...]
    may_lack: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class ExpertsRule(NamedTuple):
    """What in a model depends on the number of its routed experts.

    Pruning has to change it, beside the experts' own matrices.

    counts   keys of config.json that say how many experts a layer has
    chosen   keys that say how many of them a token is sent to
    rows     tensors whose first axis is the experts: the router, biases of stacks
    columns  tensors whose last axis is the experts
    """

    counts: tuple[str, ...]
    chosen: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()


class FoldUse(NamedTuple):
    """Places of one kind where scales of columns were divided out.

    An artifact's record tells of them.

    rule     that speaks of them
    repeats  and width: of heads, as a Fold has them
    modules  that are divided
    """

    rule: FoldRule
    repeats: int
    width: int
    modules: tuple[str, ...]
