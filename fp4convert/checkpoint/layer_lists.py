"""Read how many layers each list of a class has, and of which kinds.

What counts the layers, and which layer differs from the others, stands in the table of
architectures. A setting that config.json does not have, or has twice, says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MISSING = object()
# Of other settings than the table's: one that an older config.json has in place of it.
_COUNT = re.compile(r"(?:layers?|depths?|blocks?)$")
_TERM = re.compile(r"([+-]?\d+)(?=[+-]|$)|\+?(len\(|sum\(|)([a-zA-Z_][\w.]*)(?:\)|(\[#\]))?")


class End(NamedTuple):
    """The first or last layer of a list: it alone has parts, or lacks them.

    place  0 for the first one, -1 for the last one
    inner  numbers of lists inside the layer, whose child has the parts
    """

    place: int
    has: bool
    parts: frozenset[str]
    inner: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers under a config.json.

    count    its length; of a list in each stage, that of every stage; None if config.json is silent
    setting  the one that names the kinds of the layers, in order: words
    telling  word -> parts that its layers have, and not those of all others
    """

    count: int | tuple[int, ...] | None = None
    ends: tuple[End, ...] = ()
    setting: str = ""
    words: tuple[str, ...] = ()
    telling: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def word_against(self, number: int, parts: frozenset[str]) -> str:
        """Return the kind of a layer whose parts are those of another; else ""."""
        word = self.words[number] if number < len(self.words) else ""
        if not (own := self.telling.get(word)) or own & parts:
            return ""
        return word if any(other <= parts for other in self.telling.values()) else ""


Lists = Mapping[str, LayerList]
NO_LIST = LayerList()


def count_of(lists: Lists, prefix: str, outer: tuple[int, ...]) -> int | None:
    """Return the number of children that config.json gives a list.

    outer  the numbers of the layers that it is inside of
    """
    count = lists.get(prefix, NO_LIST).count
    if isinstance(count, tuple):
        return count[outer[-1]] if outer and outer[-1] < len(count) else None
    return count


def count_before(lists: Lists, prefix: str, child: tuple[int, ...]) -> int | None:
    """Return the length of the list that has no such child; None if all have."""
    for axis, end in enumerate(re.finditer(r"#\.", prefix)):
        count = count_of(lists, prefix[: end.end()], child[:axis])
        if count is not None and child[axis] >= count:
            return count
    return None


def required_parts(lists: Lists, prefix: str, child: tuple[int, ...]) -> frozenset[str]:
    """Return the parts that a layer has by its place at an end, or elsewhere."""
    parts = frozenset[str]()
    for end in lists.get(prefix, NO_LIST).ends:
        axis = len(child) - 1 - len(end.inner)
        if child[axis + 1 :] != end.inner:
            continue
        last: int | None = 0
        if end.place:
            stop = [one.end() for one in re.finditer(r"#\.", prefix)][axis]
            count = count_of(lists, prefix[:stop], child[:axis])
            last = None if count is None else count - 1
        if last is not None and (child[axis] == last) is end.has:
            parts |= end.parts
    return parts


def read_lists(
    row: Mapping[str, Any], block: Callable[[int], frozenset[str]], config: Mapping[str, object]
) -> dict[str, LayerList]:
    """Read the lists of a class in the table.

    row    of the class
    block  reads the set of parts of a number
    """
    is_own = config.get("model_type") in (None, "", row.get("type", ""))

    def read(path: str) -> object:
        return _read_setting(config, path, row.get("defaults", {}), is_own)

    made: dict[str, dict[str, Any]] = {
        prefix: {"count": _length(expression, read)}
        for prefix, expression in row.get("counts", {}).items()
    }
    for prefix, ends in row.get("ends", {}).items():
        made.setdefault(prefix, {})["ends"] = tuple(
            End(place, has, block(parts), tuple(inner)) for place, has, parts, *inner in ends
        )
    for path, lists in row.get("words", {}).items():
        words = value_at(config, path)
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            for prefix, telling in lists.items():
                parts = {word: block(number) for word, number in telling.items()}
                made.setdefault(prefix, {}).update(
                    {"setting": path, "words": tuple(words), "telling": parts}
                )
    return {prefix: LayerList(**one) for prefix, one in made.items()}


def value_at(config: Mapping[str, object], path: str) -> object:
    """Return a value inside a config.json; MISSING where it has none."""
    value: object = config
    for key in path.split("."):
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def _length(expression: str, read: Callable[[str], object]) -> int | tuple[int, ...] | None:
    """Return what an expression of the table comes to."""
    total, stages = 0, tuple[int, ...]()
    for number, function, name, by_stage in _TERM.findall(expression):
        if number:
            total += int(number)
            continue
        value = read(name)
        if isinstance(value, list) and (function or by_stage):
            if function != "len(" and not all(type(one) is int and one >= 0 for one in value):
                return None
            if by_stage:
                stages, value = tuple(value), 0 if value else None
            else:
                value = len(value) if function == "len(" else sum(value)
        if type(value) is not int or value < 0:
            return None
        total += value
    return tuple(one + total for one in stages) or total


def _read_setting(
    config: Mapping[str, object], path: str, defaults: Mapping[str, list[Any]], is_own: bool
) -> object:
    """Return a setting of config.json, or what stands where it is left out.

    is_own  config.json is of the class's type, whose defaults hold
    """
    above, _, key = path.rpartition(".")
    default, *aliases = defaults.get(path, [None])
    node = value_at(config, above) if above else config
    if node is MISSING:  # of a version that has no config inside the other
        node, is_own = config, False
    if not isinstance(node, Mapping):
        return None
    values = [node[name] for name in (key, *aliases) if node.get(name) is not None]
    if values:
        return values[0] if all(value == values[0] for value in values) else None
    if isinstance(default, str):
        return _read_setting(config, default, defaults, is_own)
    if key in node:  # it is null
        return None
    known = {name.rpartition(".")[2] for name in defaults}
    known |= {alias for _, *names in defaults.values() for alias in names}
    others = any(_COUNT.search(name) and type(node[name]) is int for name in node.keys() - known)
    return default if is_own and not others else None
