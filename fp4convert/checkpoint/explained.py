"""Hold the names of a checkpoint against the class in its config.json.

Every tensor is a parameter of the class, or is named; every parameter of the class is there, or is
named. What an encoding has taken is not asked about.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import NamedTuple

from fp4convert.checkpoint.architectures import LINEAR, TYPES, Architecture, Place
from fp4convert.checkpoint.encodings.base import CACHE_SCALES
from fp4convert.recipes.patterns import sift
from fp4convert.recipes.recipe import PREDICTION, Recipe
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import WEIGHT

# Buffers that engines compute, and old checkpoints hold.
COMPUTED = re.compile(
    r"(?:^|\.)(?:inv_freq|original_inv_freq|position_ids|num_batches_tracked|attn\.bias"
    r"|attn\.masked_bias)$"
)
MOST_GAPS = 5  # that are named of a list
WEIGHTLESS = ": engines refuse it, or compute with what was in memory before"
_Children = dict[tuple[int, ...], set[str]]


class Unexplained(NamedTuple):
    """A tensor of no class that no encoding has taken."""

    name: str
    reason: str


class Lost(NamedTuple):
    """What a checkpoint lacks of its class.

    name  of a parameter, or of a module with all its parameters
    """

    name: str
    detail: str


class Explained(NamedTuple):
    """What the class in config.json says of a checkpoint's names.

    kept  names of weights that the class does not hold as linear layers, and reasons
    """

    unexplained: tuple[Unexplained, ...]
    lost: tuple[Lost, ...]
    kept: Mapping[str, str]


def explain(names: Collection[str], architecture: Architecture, recipe: Recipe) -> Explained:
    """Hold names against a class.

    names  of tensors: those that no encoding has taken, and MODULE.weight of each packed one
    """
    found: dict[str, _Children] = defaultdict(lambda: defaultdict(set))
    strange, kept = list[Unexplained](), dict[str, str]()
    drafts = set[tuple[str, tuple[int, ...]]]()  # children of lists that draft tokens
    drafting = set(sift(recipe.patterns_of(PREDICTION), names))
    for name in names:
        places = places_of(name, architecture, recipe.stacks)
        for place in places:
            if (letter := architecture.parts[place.prefix][place.part]) not in LINEAR:
                kept[name] = f"{TYPES[letter]} of {architecture.name}"
            found[place.prefix][place.child].add(place.part)
            if drafting and name in drafting:
                drafts.add((place.prefix, place.child))
        if places or name in drafting or name.endswith(CACHE_SCALES):
            continue
        if not COMPUTED.search(name) and not _fits(architecture.extra, name):
            strange.append(Unexplained(name, f"{architecture.name} has no such parameter"))
            kept[name] = f"unexplained: {strange[-1].reason}"
    _add_lists(found)
    lost = _find_lost(found, drafts, architecture) if found else ()
    return Explained(tuple(strange), tuple(lost), kept)


def places_of(
    name: str, architecture: Architecture, stacks: Iterable[StackRule]
) -> tuple[Place, ...]:
    """Return the parameters of a tensor, or of the stack it was cut from."""
    if (places := architecture.places(name)) or not any(letter.isdigit() for letter in name):
        return places
    for rule in stacks:
        for stack in rule.tensors_of(name.removesuffix(WEIGHT)):
            if places := architecture.places(stack):
                return places
    return ()


def _fits(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _add_lists(found: Mapping[str, _Children]) -> None:
    """Note in each layer the lists that it has children of."""
    deepest = max((prefix.count("#") for prefix in found), default=0)
    for depth in range(deepest, 0, -1):
        for prefix in [prefix for prefix in found if prefix.count("#") == depth]:
            inner = prefix.removesuffix(".")
            outer = inner[: inner.rfind("#.") + 2] if "#." in inner else ""
            for child in found[prefix]:
                found[outer][child[:-1]].add(inner[len(outer) :])


def _find_lost(
    found: Mapping[str, _Children],
    drafts: Set[tuple[str, tuple[int, ...]]],
    architecture: Architecture,
) -> Iterator[Lost]:
    """Find the parts that children of lists lack beside the nearest kind."""
    for prefix, kinds in architecture.kinds.items():
        lacking: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        children = {
            child: parts
            for child, parts in found.get(prefix, {}).items()
            if (prefix, child) not in drafts
        }
        for child, parts in children.items():
            for part in _lacks(frozenset(parts), kinds, prefix, found, architecture):
                lacking[part].append(child)
        if not prefix:
            yield from _outside(lacking, found, architecture.name)
            continue
        if frozenset() not in kinds:  # every child has parameters
            yield from _find_gaps(prefix, children, architecture.name)
        for part, without in lacking.items():
            names = [Place(prefix, part, child).name.removesuffix(WEIGHT) for child in without]
            if len(without) == len(children) > 1:
                which = f"all {len(without)} layers of {architecture.name} have it, and none here"
                yield Lost(names[0], f"it is missing: {which}")
            else:
                for name in names:
                    yield Lost(name, f"it is missing, and {architecture.name} has it")


def _find_gaps(prefix: str, children: Iterable[tuple[int, ...]], owner: str) -> Iterator[Lost]:
    """Find the numbers that the children of a list leave out."""
    numbers: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for child in children:
        numbers[child[:-1]].add(child[-1])
    for outer, there in numbers.items():
        gaps = (number for number in range(max(there)) if number not in there)
        if missing := list(islice(gaps, MOST_GAPS + 1)):
            name = Place(prefix, "", (*outer, missing[0])).name.removesuffix(".")
            shown = ", ".join(map(str, missing[:MOST_GAPS]))
            more = ", ..." if len(missing) > MOST_GAPS else ""
            stack = name.rpartition(".")[0]
            yield Lost(name, f"{stack} lacks {shown}{more}, and {owner} has no gaps there")


def _lacks(
    own: frozenset[str],
    kinds: Collection[frozenset[str]],
    prefix: str,
    found: Mapping[str, _Children],
    architecture: Architecture,
) -> Iterator[str]:
    """Yield what a child has in none of the kinds that are nearest to it."""
    needed = [
        frozenset(part for part in kind if not _may_lack(prefix, part, found, architecture))
        for kind in kinds
    ]
    if own in kinds or not needed:
        return
    fewest = min(
        len(kind - own) + len(own - full) for kind, full in zip(needed, kinds, strict=True)
    )
    nearest = [
        kind - own
        for kind, full in zip(needed, kinds, strict=True)
        if len(kind - own) + len(own - full) == fewest
    ]
    yield from sorted(frozenset.intersection(*nearest))


def _may_lack(
    prefix: str, part: str, found: Mapping[str, _Children], architecture: Architecture
) -> bool:
    """Return whether checkpoints may lack a part, as one that is tied."""
    name = prefix + part
    if COMPUTED.search(name) or _fits(architecture.absent, name.replace("#", "0")):
        return True
    if part.endswith(".#"):  # a list all of whose parts may be absent
        inner = architecture.parts.get(f"{name}.", {})
        return bool(inner) and all(_may_lack(f"{name}.", one, found, architecture) for one in inner)
    return any(_is_there(one, found) for one in _sharing(name, architecture.tied))


def _sharing(name: str, tied: Mapping[str, str]) -> set[str]:
    """Return the parameters with whose values one may be filled."""
    if name not in tied and name not in tied.values():
        return set()
    first = tied.get(name, name)
    shared = {first, *(one for one, other in tied.items() if other == first)}
    return shared if first == name == tied.get(name) else shared - {name}


def _is_there(name: str, found: Mapping[str, _Children]) -> bool:
    end = name.rfind("#.") + 2 if "#." in name else 0
    return any(name[end:] in parts for parts in found.get(name[:end], {}).values())


def _outside(lacking: Iterable[str], found: Mapping[str, _Children], owner: str) -> Iterator[Lost]:
    """Name missing parts outside of lists by the module that is not there."""
    there = found.get("", {}).get((), set())
    above = {part[: dot.start()] for part in there for dot in re.finditer(r"\.", part)}
    modules: dict[str, int] = defaultdict(int)
    for part in lacking:
        ends = [dot.start() for dot in re.finditer(r"\.", part)]
        modules[next((part[:at] for at in ends if part[:at] not in above), part)] += 1
    for module, count in modules.items():
        more = f" ({count} parameters)" if count > 1 else ""
        yield Lost(module.removesuffix(".#"), f"it is missing{more}, and {owner} has it")
