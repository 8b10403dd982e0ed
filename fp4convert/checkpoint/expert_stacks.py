"""Find which modules were one stack of experts, for dequantize.

The record says by which rules stacks were taken apart: each rule is read backwards, from a module's
name to its stack's, and nothing is guessed from shapes. Where no record tells, stacks of a dialect
are what transformers takes them for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.stacks import Rows, Slot
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import STACK_DIMENSIONS
from fp4convert.checkpoint.record import stacks_recorded
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.patterns import matches, matches_any
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import WEIGHT

ENDING_PARTS = 3  # of a stack's name that tell it from others: mlp.experts.gate_up_proj
_WILD = set("*?[")
_PARTS = {"parent": ".*", "expert": "0|[1-9][0-9]{0,8}"}


class Stacked(NamedTuple):
    """A stack of experts that is put together out of modules.

    name           of its tensor
    linears        whose rows it holds, expert by expert
    shape          (experts, rows, columns): all rows of an expert, as the linear layers have them
    slots          equally many for each expert: whose rows stand below each other, or take turns
    is_transposed  each expert's matrix is stored as (columns, rows)
    is_flat        experts stand below each other, in a tensor of two dimensions
    modules        that it stands for
    """

    name: str
    linears: tuple[Linear, ...]
    shape: tuple[int, int, int]
    slots: tuple[Slot, ...]
    is_transposed: bool
    is_flat: bool
    modules: tuple[str, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of its tensor."""
        experts, rows, columns = self.shape
        outer, inner = (columns, rows) if self.is_transposed else (rows, columns)
        return (experts * outer, inner) if self.is_flat else (experts, outer, inner)


def artifact_of(linears: Mapping[str, Linear]) -> Artifact | None:
    """Return the artifact that linear layers are read from, if any."""
    return next(filter(None, (linear.coding.artifact for linear in linears.values())), None)


def rules_of(artifact: Artifact, recipe: Recipe) -> tuple[StackRule, ...]:
    """Find how stacks of experts lay in the source of an artifact.

    Its record says so; else they lay as its dialect and transformers have them.
    recipe  of its model; where our own record names no stack, it tells whether the dialect's are
            the source's, or were single matrices there
    """
    rules = list(stacks_recorded(artifact.record))
    find, stems = _Finder(rules), set[str]()
    for module, packed in artifact.modules.items():
        if packed.stem == module or packed.stem in stems:
            continue
        stems.add(packed.stem)  # with the first module of expert 0, of as many as take turns
        stored = packed.refs[0].name
        if find.place_of(module):
            continue
        if own := recipe.stack_rule(stored):  # stored under the name that floats have
            rules.append(own._replace(tensors=(ending_of(stored),)))
        elif not artifact.record or recipe.stack_rule(packed.stem):
            members = [
                rows.module for rows in artifact.spelling.slots(packed.stem, packed.stored_shape)[0]
            ]
            leaves = tuple(member.rpartition(".")[2] for member in members)
            rules.append(StackRule((ending_of(packed.stem),), leaves, True, len(leaves) > 1))
    return tuple(dict.fromkeys(rules))


def rules_of_gguf(linears: Iterable[Linear], recipe: Recipe) -> tuple[StackRule, ...]:
    """Find how stacks in GGUF's own types of blocks are stored."""
    stacks = (linear.stack for linear in linears if linear.coding.is_gguf_type)
    names = dict.fromkeys(ref.name for ref in stacks if ref)
    found = ((name, recipe.stack_rule(name)) for name in names)
    rules = (rule._replace(tensors=(ending_of(name),)) for name, rule in found if rule)
    return tuple(dict.fromkeys(rules))


def ending_of(tensor: str) -> str:
    """Return a pattern for stacks of that kind in every layer."""
    return f"*{'.'.join(tensor.split('.')[-ENDING_PARTS:])}"


def find_stacks(
    linears: Iterable[Linear], rules: Sequence[StackRule]
) -> tuple[list[Stacked], list[str]]:
    """Find the stacks that linear layers belong to.

    Returns them, and what a person should know of those that stay apart.
    linears  of an artifact
    rules    by which its source's stacks were taken apart; the first that fits a tensor counts
    Raises   InputError for a stack that lacks an expert, or whose experts have several shapes
    """
    find = _Finder(rules)
    members: dict[tuple[str, StackRule], dict[tuple[int, str], Linear]] = defaultdict(dict)
    nameless: dict[StackRule, str] = {}
    for linear in linears:
        if linear.stack and not linear.coding.is_packed:
            continue  # its stack is there
        if not (place := find.place_of(linear.module)):
            continue
        tensor, rule, expert, member = place
        if tensor:
            members[tensor, rule][expert, member] = linear
        else:
            nameless.setdefault(rule, linear.module)
    stacks = [_whole(_put_together(name, rule, found)) for (name, rule), found in members.items()]
    _check_counts(members)
    notes = [
        f"experts are not stacked again: the record's rule for stacks {', '.join(rule.tensors)}"
        " does not give the name of the tensor that"
        f" {module} was a part of"
        for rule, module in nameless.items()
    ]
    return stacks, notes


def are_stacked(modules: Iterable[str], rules: Sequence[StackRule]) -> bool:
    """Tell whether one of these modules looks like a part of a stack."""
    find = _Finder(rules)
    return any(find.place_of(module) for module in modules)


class _Finder:
    """Rules for stacks, read backwards, once for every parent."""

    def __init__(self, rules: Sequence[StackRule]) -> None:
        self._rules = rules
        self._spelled: dict[tuple[str, tuple[str, ...]], list[StackRule]] = defaultdict(list)
        for rule in rules:
            self._spelled[rule.named, rule.members].append(rule)
        self._stacks_below = cache(self._find_stacks)

    def place_of(self, module: str) -> tuple[str, StackRule, int, str] | None:
        """Find where in which stack a module belongs by the first rule that fits.

        Returns (tensor, rule, expert, member); the tensor is "" where the rule does not name it
        """
        nameless = None
        for named, members in self._spelled:
            match = _expression(named, members).fullmatch(module)
            if match is None:
                continue
            found = {"member": members[0], **match.groupdict()}
            expert, member = int(found["expert"]), found["member"]
            for tensor, rule in self._stacks_below(named, members, found.get("parent")):
                place = (tensor, rule, expert, member)
                if not tensor:
                    nameless = nameless or place
                elif rule.module(tensor, expert, member) == module:
                    return place
        return nameless

    def _find_stacks(
        self, named: str, members: tuple[str, ...], parent: str | None
    ) -> list[tuple[str, StackRule]]:
        """Find the stacks below that parent by the rules of such names.

        "" stands for a stack whose rule does not tell its name.
        """
        found = []
        for rule in self._spelled[named, members]:
            tensors = [_tensor_below(pattern, parent) for pattern in rule.tensors]
            for pattern, tensor in zip(rule.tensors, tensors, strict=True):
                if tensor is None or not matches(pattern, tensor):
                    continue
                first = (one for one in self._rules if matches_any(one.tensors, tensor))
                if next(first, None) is rule:
                    found.append((tensor, rule))
                    break
            else:
                if None in tensors:
                    found.append(("", rule))
        return found


@cache
def _expression(named: str, members: tuple[str, ...]) -> re.Pattern[str]:
    """Build what fits the names of a rule's modules.

    Nothing fits where their names do not tell the expert.
    """
    parts = {**_PARTS, "member": "|".join(map(re.escape, members))}
    if "{expert}" not in named or (len(members) > 1 and "{member}" not in named):
        return re.compile(r"(?!)")
    text, seen = "", set[str]()
    for number, piece in enumerate(re.split(r"\{(parent|expert|member)\}", named)):
        if number % 2 == 0:
            text += re.escape(piece)
        else:
            text += f"(?P={piece})" if piece in seen else f"(?P<{piece}>{parts[piece]})"
            seen.add(piece)
    return re.compile(text)


def _tensor_below(pattern: str, parent: str | None) -> str | None:
    """Name the tensor that a pattern means below that parent.

    None where its last part is no name, or nobody knows the parent.
    """
    if pattern.startswith("re:"):
        return None
    if not _WILD & set(pattern):
        return pattern
    stem = pattern.removesuffix(WEIGHT)
    _, dot, leaf = stem.rpartition(".")
    if parent is None or not dot or _WILD & set(leaf):
        return None
    return f"{parent}.{leaf}{pattern[len(stem) :]}"


def _put_together(name: str, rule: StackRule, found: Mapping[tuple[int, str], Linear]) -> Stacked:
    """Put a stack together out of these (expert, member).

    Raises InputError unless all of them are there and of one shape.
    """
    experts = rule.experts or len({expert for expert, _ in found})
    wanted = ((expert, member) for expert in range(experts) for member in rule.members)
    if lacking := next((each for each in wanted if each not in found), None):
        module = rule.module(name, *lacking)
        detail = f"{module} is not there, and {len(found)} other matrices of {name} are"
        raise InputError(
            "stack-experts", f"{detail}; expected every expert from 0 on", tensor=module
        )
    if len(found) > experts * len(rule.members):
        detail = (
            f"{name} was a stack of {experts} experts, as the record says; found matrices of"
            f" more, {len(found)} in all"
        )
        raise InputError("stack-experts", detail, tensor=name)
    linears = tuple([found[expert, member] for expert in range(experts) for member in rule.members])
    rows, columns = linears[0].shape
    if odd := next((linear for linear in linears if linear.shape != (rows, columns)), None):
        detail = (
            f"{odd.module} is {list(odd.shape)}, and {linears[0].module} {[rows, columns]}; both"
            f" were parts of {name}"
        )
        raise InputError("stack-experts", f"{detail}, expected one shape", tensor=odd.module)
    count = len(rule.members)
    held = [Rows(linear.module, 0, rows) for linear in linears]
    width = count if rule.is_interleaved else 1  # of a slot: modules whose rows take turns
    slots = tuple(tuple(held[first : first + width]) for first in range(0, len(held), width))
    shape = (experts, rows * count, columns)
    modules = tuple([linear.module for linear in linears])
    return Stacked(name, linears, shape, slots, rule.is_transposed, bool(rule.experts), modules)


def _check_counts(
    members: Mapping[tuple[str, StackRule], Mapping[tuple[int, str], Linear]],
) -> None:
    """Raise InputError where stacks of the same experts differ in number."""
    counts: dict[str, tuple[str, int]] = {}
    for (name, rule), found in members.items():
        parent = rule.module(name, 0, rule.members[0]).rpartition(".0.")[0]
        count = len(found) // len(rule.members)
        other, there = counts.setdefault(parent, (name, count))
        if there != count:
            detail = (
                f"{name} would have {count} experts, and {other} has {there}; expected every"
                " expert in both"
            )
            raise InputError("stack-experts", detail, tensor=name)


def _whole(stack: Stacked) -> Stacked:
    """Read the stack as it is stored, where a dialect keeps its rows so."""
    coding, first = stack.linears[0].coding, stack.linears[0].module
    if coding.artifact is None:
        return stack
    packed = coding.artifact.packed[first]
    stem, shape = packed.stem, packed.stored_shape
    if stem == first or coding.artifact.spelling.slots(stem, shape) != stack.slots:
        return stack
    experts, rows, columns = stack.shape
    linear = Linear(stem, (experts * rows, columns), coding, packed.refs)
    slots = tuple((Rows(stem, begin, begin + rows),) for begin in range(0, experts * rows, rows))
    return stack._replace(linears=(linear,), slots=slots)


def rules_read(linears: Mapping[str, Linear], recipe: Recipe) -> tuple[StackRule, ...]:
    """Say how stacks were read: those of an artifact, then others.

    The latter by the ends of their names, or by whole names where matrices that stand alone would
    be taken for others of them.
    """
    every = (linear.stack for linear in linears.values() if linear.stack)
    stacks = {stack.name: stack for stack in every if stack.dtype in FLOAT_TYPES}
    found = ((ref, recipe.stack_rule(name, ref.shape)) for name, ref in stacks.items())
    used = [
        (ref, rule if len(ref.shape) < STACK_DIMENSIONS else rule._replace(experts=None))
        for ref, rule in found
        if rule
    ]
    rules = tuple(
        dict.fromkeys(rule._replace(tensors=(ending_of(ref.name),)) for ref, rule in used)
    )
    alone = (
        module
        for module, linear in linears.items()
        if not linear.stack and not linear.coding.is_packed
    )
    if rules and are_stacked(alone, rules):
        rules = tuple(rule._replace(tensors=(ref.name,)) for ref, rule in used)
    artifact = artifact_of(linears)
    return (*(rules_of(artifact, recipe) if artifact else ()), *rules)
