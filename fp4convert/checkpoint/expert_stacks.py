"""Find which modules were one stack of experts, for dequantize.

The record holds the rules by which stacks were taken apart. Each is read backwards, from a module's
name to its stack's; shapes decide nothing. Without a record, stacks of a dialect lie as in
transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.class_table import RECORDS, find_architecture
from fp4convert.checkpoint.dialects.stacks import STACK_DIMENSIONS, Rows, Slot
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.record import stacks_recorded
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.patterns import matches, matches_any
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import WEIGHT

ENDING_PARTS = 3  # of a stack's name, which identify its kind: mlp.experts.gate_up_proj
_WILD = set("*?[")
Place = tuple[str, StackRule, int, str]  # tensor, rule, expert, member
_PARTS = {"parent": ".*", "expert": "0|[1-9][0-9]{0,8}"}


class ExpertStack(NamedTuple):
    """A stack of experts that is put together out of modules.

    name           of its tensor
    linears        expert by expert
    shape          (experts, rows, columns), with all rows of an expert, as (out, in)
    slots          rows of the stack, equally many slots for each expert
    is_transposed  each expert's matrix is stored as (columns, rows)
    is_flat        experts are below each other, in a tensor of two dimensions
    modules        in the stack
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
    """Return the rules of stacks in an artifact's source.

    They come from its record, or else from its dialect and transformers.
    recipe  of its model; where our own record names no stack, it tells whether the dialect's stacks
            were stacks in the source, too
    """
    rules = list(stacks_recorded(artifact.record))
    place_of, stems = _place_finder(rules), set[str]()
    has_single = _single_experts(artifact)
    for module, packed in artifact.modules.items():
        if packed.stem == module or packed.stem in stems:
            continue
        stems.add(packed.stem)
        stored = packed.refs[0].name
        if place_of(module):
            continue
        if artifact.spelling.TRAITS.has_own_stacks:
            if not has_single(module):
                rules += _stacked_as(module, recipe)
        elif rule := recipe.stack_rule(stored):  # named like a stack of floats
            rules.append(rule._replace(tensors=(ending_of(stored),)))
        elif not artifact.record or recipe.stack_rule(packed.stem):
            slot = artifact.spelling.slots(packed.stem, packed.stored_shape)[0]
            leaves = tuple(rows.module.rpartition(".")[2] for rows in slot)
            rules.append(StackRule((ending_of(packed.stem),), leaves, True, len(leaves) > 1))
    return tuple(dict.fromkeys(rules))


def _single_experts(artifact: Artifact) -> Callable[[str], bool]:
    """Return a test of whether the model's class has an expert by itself.

    Where no table has the class, it may.
    """
    config = {key: value for key, value in artifact.clues.config.items() if key not in RECORDS}
    known = find_architecture(config, artifact.tensors)
    return lambda module: known is None or bool(known.places(module + WEIGHT))


def _stacked_as(module: str, recipe: Recipe) -> Iterator[StackRule]:
    """Yield the recipe's rule for the stack of an expert's module."""
    for rule in recipe.stacks:
        if tensor := next(rule.tensors_of(module), None):
            yield rule._replace(tensors=(ending_of(tensor),))
            return


def rules_of_gguf(linears: Iterable[Linear], recipe: Recipe) -> tuple[StackRule, ...]:
    """Return the rules of stacks in GGUF's own types of blocks."""
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
) -> tuple[list[ExpertStack], list[str]]:
    """Find the stacks that linear layers belong to.

    linears  of an artifact
    rules    of its source's stacks; the first that fits a tensor counts
    Returns  the stacks, and notes on rules that do not name a stack
    Raises   InputError for a stack that lacks an expert, or whose experts have several shapes
    """
    place_of = _place_finder(rules)
    members: dict[tuple[str, StackRule], dict[tuple[int, str], Linear]] = defaultdict(dict)
    nameless: dict[StackRule, str] = {}
    for linear in linears:
        if linear.stack and not linear.coding.is_packed:
            continue  # a part of a stack of floats
        if not (place := place_of(linear.module)):
            continue
        tensor, rule, expert, member = place
        if tensor:
            members[tensor, rule][expert, member] = linear
        else:
            nameless.setdefault(rule, linear.module)
    stacks = [_as_stored(_build_stack(*key, found)) for key, found in members.items()]
    _check_counts(members)
    notes = [
        f"experts are not stacked again: the record's rule for stacks {', '.join(rule.tensors)}"
        f" does not give the name of the tensor that {module} was a part of"
        for rule, module in nameless.items()
    ]
    return stacks, notes


def are_stacked(modules: Iterable[str], rules: Sequence[StackRule]) -> bool:
    """Return whether one of these modules is named like a part of a stack."""
    place_of = _place_finder(rules)
    return any(place_of(module) for module in modules)


def _place_finder(rules: Sequence[StackRule]) -> Callable[[str], Place | None]:
    """Make a function from a module to its place, by rules read backwards.

    The first rule that fits counts; the tensor is "" where it does not name one.
    """
    spelled: dict[tuple[str, tuple[str, ...]], list[StackRule]] = defaultdict(list)
    for rule in rules:
        spelled[rule.named, rule.members].append(rule)

    @cache  # modules of a layer have one parent
    def stacks_below(
        named: str, members: tuple[str, ...], parent: str | None
    ) -> list[tuple[str, StackRule]]:
        found = []
        for rule in spelled[named, members]:
            tensors = [_tensor_below(pattern, parent) for pattern in rule.tensors]
            for pattern, tensor in zip(rule.tensors, tensors, strict=True):
                if tensor is None or not matches(pattern, tensor):
                    continue
                first = (other for other in rules if matches_any(other.tensors, tensor))
                if next(first, None) is rule:
                    found.append((tensor, rule))
                    break
            else:
                if None in tensors:
                    found.append(("", rule))
        return found

    def place_of(module: str) -> Place | None:
        nameless = None
        for named, members in spelled:
            match = _expression(named, members).fullmatch(module)
            if match is None:
                continue
            found = {"member": members[0], **match.groupdict()}
            expert, member = int(found["expert"]), found["member"]
            for tensor, rule in stacks_below(named, members, found.get("parent")):
                place = (tensor, rule, expert, member)
                if not tensor:
                    nameless = nameless or place
                elif rule.module(tensor, expert, member) == module:
                    return place
        return nameless

    return place_of


@cache
def _expression(named: str, members: tuple[str, ...]) -> re.Pattern[str]:
    """Build the expression that fits the names of a rule's modules."""
    parts = {**_PARTS, "member": "|".join(map(re.escape, members))}
    if "{expert}" not in named or (len(members) > 1 and "{member}" not in named):
        return re.compile(r"(?!)")  # fits nothing: names do not give the expert or member
    text = re.escape(named)
    for part, fitting in parts.items():
        place = re.escape(f"{{{part}}}")
        text = text.replace(place, f"(?P<{part}>{fitting})", 1).replace(place, f"(?P={part})")
    return re.compile(text)


def _tensor_below(pattern: str, parent: str | None) -> str | None:
    """Return the tensor of a pattern below that parent, if it is known."""
    if pattern.startswith("re:"):
        return None
    if not _WILD & set(pattern):
        return pattern
    stem = pattern.removesuffix(WEIGHT)
    _, dot, leaf = stem.rpartition(".")
    if parent is None or not dot or _WILD & set(leaf):
        return None
    return f"{parent}.{leaf}{pattern[len(stem) :]}"


def _build_stack(
    name: str, rule: StackRule, found: Mapping[tuple[int, str], Linear]
) -> ExpertStack:
    """Build a stack of matrices by (expert, member); all must be there."""
    experts = rule.experts or len({expert for expert, _ in found})
    wanted = [(expert, member) for expert in range(experts) for member in rule.members]
    if lacking := next((key for key in wanted if key not in found), None):
        module = rule.module(name, *lacking)
        detail = f"{module} is not there, and {len(found)} other matrices of {name} are; expected"
        raise InputError("stack-experts", f"{detail} every expert from 0 on", tensor=module)
    if len(found) > len(wanted):
        detail = f"{name} was a stack of {experts} experts, as the record says; found matrices of"
        raise InputError("stack-experts", f"{detail} more, {len(found)} in all", tensor=name)
    linears = tuple([found[key] for key in wanted])
    rows, columns = linears[0].shape
    if odd := next((linear for linear in linears if linear.shape != (rows, columns)), None):
        detail = f"{odd.module} is {list(odd.shape)}, and {linears[0].module} {[rows, columns]};"
        detail = f"{detail} both were parts of {name}, expected one shape"
        raise InputError("stack-experts", detail, tensor=odd.module)
    count = len(rule.members)
    held = [Rows(linear.module, 0, rows) for linear in linears]
    width = count if rule.is_interleaved else 1  # of a slot: modules whose rows take turns
    slots = tuple(tuple(held[first : first + width]) for first in range(0, len(held), width))
    shape = (experts, rows * count, columns)
    modules = tuple([linear.module for linear in linears])
    return ExpertStack(name, linears, shape, slots, rule.is_transposed, bool(rule.experts), modules)


def _check_counts(
    members: Mapping[tuple[str, StackRule], Mapping[tuple[int, str], Linear]],
) -> None:
    """Raise InputError where stacks of the same layer differ in experts."""
    counts: dict[str, tuple[str, int]] = {}
    for (name, rule), found in members.items():
        parent = rule.module(name, 0, rule.members[0]).rpartition(".0.")[0]
        count = len(found) // len(rule.members)
        other, there = counts.setdefault(parent, (name, count))
        if there != count:
            detail = f"{name} would have {count} experts, and {other} has {there}; expected every"
            raise InputError("stack-experts", f"{detail} expert in both", tensor=name)


def _as_stored(stack: ExpertStack) -> ExpertStack:
    """Read a stack in one piece if its dialect stores rows in this order."""
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
    """Return the rules by which stacks were read: those of an artifact first.

    Other rules have the ends of tensors' names, or whole names where ends would fit matrices that
    are no part of a stack.
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
