"""Find the parameter of a model class that a tensor becomes.

class_table.py reads what the class is made of, and name_mapping.py renames tensors as transformers
does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from fp4convert.checkpoint.layer_lists import Lists
from fp4convert.checkpoint.name_mapping import Renamed, Renaming, rename

LINEAR = frozenset({"L", "X", "Y"})  # letters of linear layers, and of stacks of experts
EMBEDDING = "E"
TRANSPOSED = "a transposed linear layer"  # (in, out): no packed form holds it as it lies
TYPES = {  # letters of the table
    **{"L": "a linear layer", "b": "a bias", EMBEDDING: "an embedding", "C": "a convolution"},
    **{"N": "a norm", "H": "an output head", "R": "a router", "T": TRANSPOSED},
    **{"X": "a stack of experts", "Y": "a stack of experts", "V": "a vector"},
    **{"O": "a parameter of another type", "u": "a buffer", "-": "a list of layers"},
}
# A number that stands alone, or behind "_" at the end of a word: a child of a list, or of a dict.
_NUMBER = re.compile(r"(?<![^._])(?:0|[1-9][0-9]*)(?![^.])")
MOST_NUMBERS = 6  # in a name that is looked up
MOST_DIGITS = 9
POOLER = "pooler."  # of a model that another may build without
MARK = 1000  # times n stands for the n-th number of a name while it is renamed
_HEAD = re.compile(r".*(?<![^._])(?:0|[1-9][0-9]*)\.")  # a name up to its last number before a dot
# Prefix, part, and the number of each child: the place of a number in the name, -1 for none, and
# what is added to it.
_Match = tuple[str, str, tuple[tuple[int, int], ...]]
_Known = tuple[_Match, "Origin"]
Kinds = tuple[frozenset[str], ...]  # of the children of a list: the parts that each may have


class Origin(NamedTuple):
    """How a tensor becomes a parameter.

    source   the word for it among those that become the parameter together; "" of one alone
    sources  the words of all of them: gate_proj, up_proj
    is_part  others may become the same parameter
    is_bare  its name lacks the prefix of the base model, or has one that the class does not have
    """

    source: str = ""
    sources: tuple[str, ...] = ()
    is_part: bool = False
    is_bare: bool = False


class Place(NamedTuple):
    """A parameter of a class, and which of the class's layers holds it.

    prefix  of the innermost list, with "#" for numbers: "model.layers.#."; "" outside of lists
    part    the name behind it
    child   the numbers that "#" stands for
    """

    prefix: str
    part: str
    child: tuple[int, ...] = ()
    origin: Origin = Origin()

    @property
    def name(self) -> str:
        """Return the parameter's name in the class."""
        numbers = iter(self.child)
        return re.sub("#", lambda _: str(next(numbers, "#")), self.prefix + self.part)


@dataclass(frozen=True)
class Architecture:
    """The parameters of a class under a model's config.json.

    parts     by prefix: the part -> its letter in TYPES and its number of dimensions, "L2", over
              all settings; "L" where that number differs
    kinds     by prefix: the sets of parts that children have under the settings of config.json
    base      the module that holds the model without its head; names may lack it
    tied      parameter -> the one that it may share; itself, where layers share one
    absent    expressions for names that checkpoints may lack
    extra     expressions for names that checkpoints may have beside those of the class
    optional  prefixes and parts that some models have under these settings
    unsure    those of them that a third setting adds, or takes away
    lists     by prefix: how many layers config.json has there, and of which kinds
    """

    name: str
    parts: Mapping[str, Mapping[str, str]]
    kinds: Mapping[str, Kinds]
    renamings: tuple[Renaming, ...] = ()
    base: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[re.Pattern[str], ...] = ()
    extra: tuple[re.Pattern[str], ...] = ()
    optional: frozenset[tuple[str, str]] = frozenset()
    unsure: frozenset[tuple[str, str]] = frozenset()
    lists: Lists = field(default_factory=dict)
    _heads: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _known: dict[tuple[str, str], tuple[_Known, ...]] = field(default_factory=dict, init=False)

    def places(self, tensor: str) -> tuple[Place, ...]:
        """Return the parameters that a tensor of a checkpoint becomes.

        A tensor may become several parameters, several tensors may become one, and () stands for a
        tensor that the class does not have.
        """
        end = match.end() if (match := _HEAD.match(tensor)) else 0
        head, tail = tensor[:end], tensor[end:]
        if head not in self._heads:
            self._heads[head] = self._read_head(head)
        key, numbers = self._heads[head]
        if head and not key:
            return ()
        if (key, tail) not in self._known:
            self._known[key, tail] = self._find(key + tail)
        return tuple(
            [
                Place(
                    prefix,
                    part,
                    tuple([numbers[at] + more if at >= 0 else more for at, more in child]),
                    origin,
                )
                for (prefix, part, child), origin in self._known[key, tail]
            ]
        )

    def has(self, place: Place) -> bool:
        """Return whether the class has it under the settings of config.json."""
        return place.part in self._current[place.prefix] or place[:2] in self.optional

    @cached_property
    def _current(self) -> dict[str, frozenset[str]]:
        return {prefix: frozenset().union(*kinds) for prefix, kinds in self.kinds.items()}

    def _read_head(self, head: str) -> tuple[str, tuple[int, ...]]:
        """Return a name's beginning with marks for numbers, and its numbers."""
        texts = _NUMBER.findall(head)
        if len(texts) > MOST_NUMBERS or any(len(text) > MOST_DIGITS for text in texts):
            return "", ()  # of no class
        numbers = tuple(map(int, texts))
        marks = (
            str(number if number < self._literals else MARK * at)
            for at, number in enumerate(numbers, 1)
        )
        return _NUMBER.sub(lambda _: next(marks), head), numbers

    def knowing(self, place: str, other: Architecture) -> Architecture:
        """Return the class that may have the parts of another at a place, too."""
        parts = {prefix: dict(own) for prefix, own in self.parts.items()}
        for prefix, own in other.parts.items():
            if prefix:
                inner = parts.setdefault(f"{place}.{prefix}", {})
                parts[f"{place}.{prefix}"] = {**own, **inner}
            else:
                named = {f"{place}.{part}": letter for part, letter in own.items()}
                parts[""] = named | parts.get("", {})
        kinds = dict.fromkeys(parts.keys() - self.kinds.keys(), ())
        return replace(
            self,
            parts=parts,
            kinds={**self.kinds, **kinds},
            optional=self.optional | other.everything_at(place),
            unsure=self.unsure | _inside(place, other.unsure),
        )

    def everything_at(self, place: str) -> frozenset[tuple[str, str]]:
        """Return the parts under the settings, inside another class."""
        inside = [(prefix, part) for prefix, parts in self._current.items() for part in parts]
        return _inside(place, (*inside, *self.optional))

    def holding(self, place: str, other: Architecture | None) -> Architecture:
        """Replace the model at a place by another class.

        other  None for a class of no table: names there may be any
        """
        start = f"{place}."
        parts = {
            prefix: {part: letter for part, letter in own.items() if not part.startswith(start)}
            for prefix, own in self.parts.items()
            if not prefix.startswith(start)
        }
        kinds = {
            prefix: tuple(frozenset(parts[prefix].keys() & kind) for kind in self.kinds[prefix])
            for prefix in parts
        }
        lists = {prefix: one for prefix, one in self.lists.items() if prefix in parts}
        if other is None:
            free = re.compile(rf"(?:^|\.){re.escape(start)}")
            extra = (*self.extra, free)
            return replace(self, parts=parts, kinds=kinds, lists=lists, extra=extra)
        for prefix, own in other.parts.items():
            if prefix:
                parts[start + prefix], kinds[start + prefix] = dict(own), other.kinds[prefix]
        inside = {start + part: letter for part, letter in other.parts.get("", {}).items()}
        always = [
            {start + part for part in kind if not part.startswith(POOLER)}
            for kind in other.kinds.get("", ())
        ] or [set()]
        parts[""] = parts.get("", {}) | inside
        kinds[""] = tuple(a | b for a in kinds.get("", (frozenset(),)) for b in always)
        return replace(
            self,
            parts=parts,
            kinds=kinds,
            renamings=(*self.renamings, *(one.within(place) for one in other.renamings)),
            tied={**self.tied, **{start + a: start + b for a, b in other.tied.items()}},
            absent=(*self.absent, *other.absent),
            extra=(*self.extra, *other.extra),
            optional=self.optional | other.everything_at(place),
            unsure=self.unsure | _inside(place, other.unsure),
            lists=lists | {start + prefix: one for prefix, one in other.lists.items()},
        )

    @cached_property
    def _shapes(self) -> frozenset[str]:
        """Return all names with "#" for every number: few others fit."""
        names = (prefix + part for prefix, parts in self.parts.items() for part in parts)
        return frozenset(_NUMBER.sub("#", name) for name in names)

    @cached_property
    def _literals(self) -> int:
        """Return the number from which on numbers in names are all alike."""
        names = (prefix + part for prefix, parts in self.parts.items() for part in parts)
        texts = (*names, *(one.text for one in self.renamings))
        return 1 + max(
            (int(text) for one in texts for text in re.findall(r"\d{1,2}", one)), default=-1
        )

    def _find(self, name: str) -> tuple[_Known, ...]:
        start = f"{self.base}."
        for renamed in (rename(self.renamings, name), Renamed((name,))):
            without = tuple(each.removeprefix(start) for each in renamed.names)
            with_base = tuple(start + each for each in renamed.names)
            variants = {renamed.names: self._is_base and name.startswith(start)}
            if self._is_base or name not in renamed.names:  # renamings may add the prefix
                variants.setdefault(without, name.startswith(start))
            if self.base and not self._is_base:
                variants.setdefault(with_base, True)
            for names, is_bare in variants.items():
                matches = [self._match(each) for each in names]
                if all(matches):
                    origin = Origin(renamed.source, renamed.sources, renamed.is_part, is_bare)
                    return tuple((each, origin) for each in matches if each)
        return ()

    def is_in_base(self, place: Place) -> bool:
        """Return whether a name may have or lack the base model's prefix."""
        return bool(self.base) and (
            self._is_base or (place.prefix + place.part).startswith(f"{self.base}.")
        )

    @cached_property
    def _is_base(self) -> bool:
        return not any(name.startswith(f"{self.base}.") for name in self._shapes)

    def _match(self, name: str) -> _Match | None:
        """Find a name in the table, whose numbers are of children or literal."""
        if _NUMBER.sub("#", name) not in self._shapes:
            return None
        texts, numbers = _NUMBER.split(name), _NUMBER.findall(name)
        if len(numbers) > MOST_NUMBERS or any(len(text) > MOST_DIGITS for text in numbers):
            return None
        every, other = range(len(numbers)), None
        for count in range(len(numbers), -1, -1):
            for chosen in combinations(every, count):
                words = ["#" if at in chosen else numbers[at] for at in every]
                pattern = "".join(a + b for a, b in zip(texts, (*words, ""), strict=True))
                end = pattern.rfind("#.") + 2 if "#." in pattern else 0
                prefix, part = pattern[:end], pattern[end:]
                if part in self.parts.get(prefix, ()):
                    marks = (divmod(int(numbers[at]), MARK) for at in chosen)
                    match = prefix, part, tuple((at - 1, more) for at, more in marks)
                    if self.has(Place(prefix, part)):
                        return match
                    other = other or match  # of other settings than the model's
        return other


def _inside(place: str, parts: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return prefixes and parts of a model that another holds at a place."""
    return frozenset(
        (f"{place}.{prefix}", part) if prefix else ("", f"{place}.{part}") for prefix, part in parts
    )
