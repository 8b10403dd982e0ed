"""Names of parameters as part sets: what the children of each list of a model are made of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Layout = dict[str, list[list[str]]]
"""Prefix -> kinds of part sets, all sorted; JSON keeps it as it is."""
Children = dict[str, tuple[str, frozenset[str]]]
"""Name of a list's child, with a dot behind it -> its prefix and its parts; "" is the model."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A name in parts, which of them number the children of a list, and what it is."""

    parts: tuple[str, ...]
    is_number: tuple[bool, ...]
    kind: str  # with the rank: L2


def pattern_of(parameter: Parameter) -> str:
    """Return the name with # for the numbers of children."""
    return ".".join(
        _written(*each) for each in zip(parameter.parts, parameter.is_number, strict=True)
    )


def children_of(parameters: Iterable[Parameter]) -> Children:
    """Return the part sets of every list's children; a list inside a child is a part of its."""
    sets: dict[str, set[str]] = defaultdict(set)
    patterns = {"": ""}
    for parameter in parameters:
        child = name = rest = ""  # the innermost child of a list, what was read, what is behind it
        for part, is_number in zip(parameter.parts, parameter.is_number, strict=True):
            name += part + "."
            rest += _written(part, is_number)
            if is_number:
                sets[child].add(f"- {rest}")
                patterns[name] = f"{patterns[child]}{rest}."
                child, rest = name, ""
            else:
                rest += "."
        sets[child].add(f"{parameter.kind} {rest[:-1]}")
    return {child: (patterns[child], frozenset(parts)) for child, parts in sets.items()}


def layout_of(children: Children) -> Layout:
    """Return the part sets that the children of each list have."""
    kinds: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for pattern, parts in children.values():
        kinds[pattern].add(tuple(sorted(parts)))
    for child in _lists_with_gaps(children):
        kinds[children[child][0]].add(())  # of a function, which has no parameters
    return _sorted(kinds)


def _lists_with_gaps(children: Iterable[str]) -> Iterator[str]:
    """Yield a child of each list of which some children have no parameters."""
    numbers: dict[str, dict[int, str]] = defaultdict(dict)
    for child in children:
        if match := re.fullmatch(r"(.*?)(\d+)\.", child):
            numbers[match[1]][int(match[2])] = child
    for own in numbers.values():
        if max(own) >= len(own):
            yield own[max(own)]


def _sorted(kinds: dict[str, set[tuple[str, ...]]]) -> Layout:
    return {prefix: [list(kind) for kind in sorted(kinds[prefix])] for prefix in sorted(kinds)}


def union(layouts: Iterable[Layout]) -> Layout:
    """Return the kinds that any of the layouts has."""
    kinds: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for layout in layouts:
        for prefix, sets in layout.items():
            kinds[prefix] |= {tuple(each) for each in sets}
    return _sorted(kinds)


def difference(layout: Layout, other: Layout) -> Layout:
    """Return the prefixes that differ as the other has them; [] for what it lacks."""
    prefixes = sorted(layout.keys() | other.keys())
    return {each: other.get(each, []) for each in prefixes if layout.get(each) != other.get(each)}


def _written(part: str, is_number: bool) -> str:
    return re.sub(r"\d+$", "#", part) if is_number else part
