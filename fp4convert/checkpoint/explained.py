"""Hold the names of a checkpoint against the class in its config.json.

Every tensor is a parameter of the class, or is named; every parameter of the class is there, or is
named. What an encoding has taken is not asked about.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

from fp4convert.checkpoint.architectures import EMBEDDING, LINEAR, TYPES, Architecture, Place
from fp4convert.checkpoint.encodings.base import CACHE_SCALES
from fp4convert.checkpoint.layer_lists import NO_LIST, count_before, count_of, required_parts
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
_Parameter = tuple[str, str, tuple[int, ...]]  # prefix, part, child of a Place


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

    kept          names of weights that the class does not hold as linear layers, and reasons
    is_embedding  weights of linear layers and embeddings of the class: whether the latter
    """

    unexplained: tuple[Unexplained, ...]
    lost: tuple[Lost, ...]
    kept: Mapping[str, str]
    is_embedding: Mapping[str, bool]


def explain(
    names: Collection[str],
    architecture: Architecture,
    recipe: Recipe,
    ranks: Mapping[str, int],
) -> Explained:
    """Hold names against a class.

    names  of tensors: those that no encoding has taken, and MODULE.weight of each packed one
    ranks  numbers of dimensions of tensors, as far as they are known
    """
    found: dict[str, _Children] = defaultdict(lambda: defaultdict(set))
    reasons, kept, is_embedding = dict[str, str](), dict[str, str](), dict[str, bool]()
    taken = _Taken({}, defaultdict(dict), defaultdict(lambda: ([], [])))
    drafts = set[tuple[str, tuple[int, ...]]]()  # children of lists that draft tokens
    drafting = set(sift(recipe.patterns_of(PREDICTION), names))
    beside = list[str]()  # what may stand beside parameters
    count_of_list = cache(partial(count_before, architecture.lists))
    for name in names:
        places = places_of(name, architecture, recipe.stacks)
        is_draft = name in drafting
        for place in places:
            kind = architecture.parts[place.prefix][place.part]
            if is_draft:
                drafts.add((place.prefix, place.child))
            elif (count := count_of_list(place.prefix, place.child)) is not None and not _fits(
                architecture.extra, name
            ):
                reasons[name] = f"config.json has {count} layers"
                continue
            elif why := _misfit(place, kind, architecture, ranks.get(name)):
                reasons[name] = why
                continue
            elif before := taken.note(name, place, architecture):
                reasons[name] = f"{before} is the same parameter of {architecture.name}"
            if kind[0] in (EMBEDDING, *LINEAR):
                is_embedding[name] = kind[0] == EMBEDDING
            if kind[0] not in LINEAR:
                kept[name] = f"{TYPES[kind[0]]} of {architecture.name}"
            found[place.prefix][place.child].add(place.part)
        if places or is_draft:
            continue
        if COMPUTED.search(name) or name.endswith(CACHE_SCALES):
            beside.append(name)
        elif not _fits(architecture.extra, name):
            reasons[name] = f"{architecture.name} has no such parameter"
    reasons |= taken.find_mixed()
    if beside:
        explained = set(names).difference(reasons, beside)
        reasons |= _find_alone(beside, explained, architecture.name)
    kept |= {name: f"unexplained: {why}" for name, why in reasons.items()}
    _add_lists(found)
    lost = [*_find_lost(found, drafts, architecture), *taken.find_partial()] if found else ()
    strange = tuple(map(Unexplained, reasons, reasons.values()))
    return Explained(strange, tuple(lost), kept, is_embedding)


class _Taken(NamedTuple):
    """The tensors that have become parameters.

    whole    prefix, part and child of a parameter -> the tensor
    sources  the same -> tensors that become one parameter together, by their words
    based    by prefix: names as the class has them, and with or without the base model's prefix
    """

    whole: dict[_Parameter, str]
    sources: dict[_Parameter, dict[str, tuple[str, Place]]]
    based: dict[str, tuple[list[str], list[str]]]

    def note(self, name: str, place: Place, architecture: Architecture) -> str:
        """Note a tensor; return the one that has become the same parameter, or ""."""
        key, origin = place[:3], place.origin
        if architecture.is_in_base(place):
            self.based[place.prefix][origin.is_bare].append(name)
        if not origin.is_part:
            before = self.whole.get(key, "")
            self.whole[key] = name
            return before or next((one for one, _ in self.sources.get(key, {}).values()), "")
        self.sources[key].setdefault(origin.source, (name, place))
        return self.whole.get(key, "")

    def find_mixed(self) -> dict[str, str]:
        """Find the fewer names, with the base model's prefix or without it."""
        both = (sorted(each, key=len) for each in self.based.values() if all(each))
        return {name: f"others begin as {more[0]}" for fewer, more in both for name in fewer}

    def find_partial(self) -> Iterator[Lost]:
        """Find what parameters lack that are made of several tensors."""
        for sources in self.sources.values():
            word, (name, place) = next(iter(sources.items()))
            for other in place.origin.sources:
                if other not in sources:
                    lost = other.join(name.rsplit(word, 1)).removesuffix(WEIGHT)
                    yield Lost(lost, f"it is missing, and becomes {place.name} with {word}")


def _misfit(place: Place, kind: str, architecture: Architecture, rank: int | None) -> str:
    """Say why a tensor is not the parameter of its name; "" if it is."""
    if not architecture.has(place):
        return f"{architecture.name} has it under other settings than those in config.json"
    if rank is not None and kind[1:] not in ("", str(rank)) and not place.origin.is_part:
        return f"it has {rank} dimensions, and {kind[1:]} in {architecture.name}"
    return ""


def _find_alone(names: Iterable[str], others: Set[str], owner: str) -> dict[str, str]:
    """Find scales and buffers beside no module of the class."""
    modules = {""}
    for other in others:
        while (other := other.rpartition(".")[0]) and other not in modules:
            modules.add(other)
    above = {name: name.rpartition(".")[0] for name in names}
    return {
        name: f"{owner} has no module there"
        for name, module in above.items()
        if module not in modules
        and (name.endswith(CACHE_SCALES) or module.rpartition(".")[0] not in modules)
    }


def places_of(
    name: str, architecture: Architecture, stacks: Iterable[StackRule]
) -> tuple[Place, ...]:
    """Return the parameters of a tensor, or of the stack it was cut from."""
    if (places := architecture.places(name)) or not any(letter.isdigit() for letter in name):
        return places
    for rule in stacks:
        for stack in rule.tensors_of(name.removesuffix(WEIGHT)):
            if places := architecture.places(stack):
                return tuple(
                    place._replace(origin=place.origin._replace(is_part=True)) for place in places
                )
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
        needed = cache(partial(_needed, prefix, found=found, architecture=architecture))
        wrong = dict(_find_other_kinds(prefix, children, architecture))
        yield from wrong.values()
        for child, parts in children.items():
            required = required_parts(architecture.lists, prefix, child)
            fitting = [kind for kind in kinds if required <= kind] or kinds
            if child not in wrong:
                for part in _lacks(frozenset(parts), fitting, needed):
                    lacking[part].append(child)
        if not prefix:
            yield from _outside(lacking, found, architecture.name)
            continue
        if all(map(needed, kinds)):  # every child has parameters that no other gives it
            yield from _find_gaps(prefix, children, architecture.name)
            yield from _find_short(prefix, children, architecture)
        for part, without in lacking.items():
            ends = [Place(prefix, part, child).name.removesuffix(WEIGHT) for child in without]
            names = [name.removesuffix(".#") for name in ends]  # of a list inside
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


def _find_short(
    prefix: str, children: Iterable[tuple[int, ...]], architecture: Architecture
) -> Iterator[Lost]:
    """Find lists that end before the count in config.json."""
    last: dict[tuple[int, ...], int] = {}
    for *outer, number in children:
        last[tuple(outer)] = max(number, last.get(tuple(outer), 0))
    for place, number in last.items():
        count = count_of(architecture.lists, prefix, place)
        if count is not None and number + 1 < count:
            name = Place(prefix, "", (*place, number + 1)).name.removesuffix(".")
            stack = name.rpartition(".")[0]
            detail = f"config.json has {count} layers, and {stack} ends after {number + 1}"
            yield Lost(name, detail)


def _find_other_kinds(
    prefix: str, children: Mapping[tuple[int, ...], Set[str]], architecture: Architecture
) -> Iterator[tuple[tuple[int, ...], Lost]]:
    """Find layers whose parts are those of another kind than config.json says."""
    layers = architecture.lists.get(prefix, NO_LIST)
    for child, parts in children.items() if layers.words else ():
        if word := layers.word_against(child[-1], frozenset(parts)):
            name = Place(prefix, "", child).name.removesuffix(".")
            detail = f"{layers.setting} in config.json calls it {word}, and its parts are others"
            yield child, Lost(name, detail)


def _lacks(
    own: frozenset[str],
    kinds: Collection[frozenset[str]],
    needed: Callable[[frozenset[str]], frozenset[str]],
) -> Iterator[str]:
    """Yield what a child has in none of the kinds that are nearest to it.

    needed  returns the parts of a kind that no checkpoint may lack
    """
    if own in kinds or not kinds:
        return
    distances = {kind: len(needed(kind) - own) + len(own - kind) for kind in kinds}
    fewest = min(distances.values())
    nearest = [needed(kind) - own for kind in kinds if distances[kind] == fewest]
    yield from sorted(frozenset.intersection(*nearest))


def _needed(
    prefix: str,
    kind: frozenset[str],
    *,
    found: Mapping[str, _Children],
    architecture: Architecture,
) -> frozenset[str]:
    """Return the parts of a kind that no checkpoint may lack."""
    return frozenset(part for part in kind if not _may_lack(prefix, part, found, architecture))


def _may_lack(
    prefix: str, part: str, found: Mapping[str, _Children], architecture: Architecture
) -> bool:
    """Return whether checkpoints may lack a part, as one that is tied."""
    name = prefix + part
    if (
        (prefix, part) in architecture.unsure
        or COMPUTED.search(name)
        or _fits(architecture.absent, name.replace("#", "0"))
    ):
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
