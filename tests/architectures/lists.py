"""Lists of a model against its config: how many children, which one alone has a part, which kinds.

All models that are built for a class are kept as what their config says and what their lists have.
What is written of a list holds in each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from layouts import Children

import configs

MOST_OFFSET = 2  # between a setting and the number of children
EXPERTS = re.compile("expert")
KNOWN = ({int}, {str})  # types of the items of lists that count
FEWEST = 3  # children, of which the first is told from the last
Kind = frozenset[str]
Kinds = dict[int, Kind]  # of a list, by number of the child
Said = dict[str, Any]  # path of a setting -> its value


@dataclass(frozen=True, slots=True)
class Built:
    """What a config says, and the lists of its model: prefix -> outer numbers -> kinds."""

    said: Said
    lists: Mapping[str, Mapping[tuple[int, ...], Kinds]]


@dataclass(slots=True)
class Record:
    """The models that were built for one class."""

    models: list[Built] = field(default_factory=list)

    def add(self, said: Said, children: Children) -> None:
        """Keep a model."""
        lists: dict[str, dict[tuple[int, ...], Kinds]] = defaultdict(lambda: defaultdict(dict))
        for name, (pattern, parts) in children.items():
            if pattern.endswith("#."):
                *outer, number = numbers_of(name, pattern)
                lists[pattern][tuple(outer)][number] = parts
        self.models.append(Built(said, lists))

    def counts(self) -> dict[str, str]:
        """Return for each list the settings that give its length."""
        varied = self._varied()
        found = {}
        for prefix in sorted({prefix for model in self.models for prefix in model.lists}):
            seen = [model for model in self.models if prefix in model.lists]
            if all(_is_whole(kinds) for model in seen for kinds in model.lists[prefix].values()):
                fitting = (each for each in _expressions(seen[0], prefix, varied))
                if first := next((one for one in fitting if _counts(one, seen, prefix)), None):
                    found[prefix] = first
        return found

    def ends(self, counts: Collection[str]) -> dict[str, list[list[Any]]]:
        """Return for lists the end that alone has parts, or alone lacks them.

        Of lists in lists it may be the end of an outer one: then the numbers behind it are said.
        A list that no setting counts is of another package, where words choose the layers.
        """
        rows: dict[tuple[str, tuple[int, ...]], list[list[Kind]]] = defaultdict(list)
        seen: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        for at, model in enumerate(self.models):
            for prefix, lists in model.lists.items():
                for key, kinds in _along_axes(lists):
                    if len(kinds) > 1:
                        whole = [kinds[number] for number in sorted(kinds)]
                        rows[prefix, key].append(whole if _is_whole(kinds) else [])
                        seen[prefix, key].add(at)
        found: dict[str, list[list[Any]]] = {}
        for (prefix, inner), lists in sorted(rows.items()):
            models = sum(prefix in model.lists for model in self.models)
            is_in_all = len(seen[prefix, inner]) == models or not inner
            outer = "#.".join(prefix.split("#.")[: prefix.count("#.") - len(inner)]) + "#."
            is_told = is_in_all and outer in counts
            if min(map(len, lists)) < 2 or max(map(len, lists)) < FEWEST or not is_told:
                continue
            for place in (0, -1):
                more, fewer = zip(*(_at_end(kinds, place) for kinds in lists), strict=True)
                for has, sets in ((True, more), (False, fewer)):
                    if parts := frozenset.intersection(*sets):
                        found.setdefault(prefix, []).append([place, has, sorted(parts), *inner])
        return found

    def words(self) -> dict[str, dict[str, dict[str, list[str]]]]:
        """Return for lists of words: prefix -> word -> the parts by which its layers are told."""
        always: dict[tuple[str, str], dict[str, Kind]] = defaultdict(dict)
        for model in self.models:
            for path, words in _lists_of_words(model.said):
                for prefix, lists in model.lists.items():
                    for kinds in lists.values():
                        if sorted(kinds) == list(range(len(words))):
                            own = always[path, prefix]
                            for number, word in enumerate(words):
                                own[word] = own.get(word, kinds[number]) & kinds[number]
        found: dict[str, dict[str, dict[str, list[str]]]] = {}
        for (path, prefix), own in sorted(always.items()):
            common = frozenset.intersection(*own.values())
            telling = {word: sorted(parts - common) for word, parts in sorted(own.items())}
            if len(told := {word: parts for word, parts in telling.items() if parts}) > 1:
                found.setdefault(path, {})[prefix] = told
        return found

    def _varied(self) -> set[str]:
        """Return the settings that had several values."""
        values: dict[str, set[str]] = defaultdict(set)
        for model in self.models:
            for path, value in model.said.items():
                values[path].add(repr(value))
        return {path for path, own in values.items() if len(own) > 1}


def probe(record: Record, root: Any, build: Callable[[Said], Any]) -> None:
    """Build models with other numbers, so that each setting is told from the others.

    build  makes a model of changes to the settings of root: path -> value
    """

    def built(probes: Iterable[tuple[Said, ...]]) -> None:
        for ways in probes:
            for changes in filter(None, ways):
                with suppress(Exception):  # of many kinds: settings that make no model
                    build(changes)
                    break

    built(_other_counts(root))
    built(_other_words(root))
    known = record.counts()
    lengths = {
        len(kinds)
        for prefix, lists in record.models[0].lists.items()
        if prefix not in known
        for kinds in lists.values()
    }
    built(_other_numbers(root, lengths - {1}))
    if record.ends(known):
        built(_other_numbers(root, set(range(FEWEST + 2))))
        built(_turned_lists(root))


def _other_counts(root: Any) -> Iterator[tuple[Said, ...]]:
    for path, node in configs.tree(root):
        for key, value in sorted(configs.layer_counts(node).items()):
            yield _longer(path, node, key, value)


def _longer(path: str, node: Any, key: str, value: int) -> tuple[Said, ...]:
    """Return ways to count one more: with longer lists beside it, and alone."""
    alone = {_at(path, key): value + 1}
    lists = {_at(path, each): [*own, own[-1]] for each, own in _lists_of(node) if len(own) == value}
    return ({**alone, **lists}, alone) if lists else (alone,)


def _other_words(root: Any) -> Iterator[tuple[Said, ...]]:
    for path, node in configs.tree(root):
        for key, value in _lists_of(node):
            if configs.KINDS.search(key) and len(words := sorted(set(map(str, value)))) > 1:
                for first in range(len(words)):
                    turned = [words[(first + at) % len(words)] for at in range(len(value))]
                    yield ({_at(path, key): turned},)


def _other_numbers(root: Any, lengths: Collection[int]) -> Iterator[tuple[Said, ...]]:
    """Yield changes of any number, and any list of numbers, that may be one of the lengths."""
    for path, node in configs.tree(root):
        counts, lists = configs.layer_counts(node), dict(_lists_of(node))
        for key, value in configs.settings_of(node).items():
            is_size = configs.SIZE.search(key) or EXPERTS.search(key)
            if type(value) is int and value in lengths and not is_size and key not in counts:
                yield _longer(path, node, key, value)
        for key, value in lists.items():
            if {type(each) for each in value} == {int} and set(value) & set(lengths):
                yield ({_at(path, key): [each + 1 + at % 2 for at, each in enumerate(value)]},)
            if len(value) in lengths:
                alike = {name: own for name, own in lists.items() if len(own) == len(value)}
                longer = {_at(path, name): [*own, own[-1]] for name, own in alike.items()}
                sizes = {name: own for name, own in longer.items() if type(own[0]) is int}
                yield (sizes, longer, {_at(path, key): [*value, value[-1]]})


def _turned_lists(root: Any) -> Iterator[tuple[Said, ...]]:
    for path, node in configs.tree(root):
        for key, value in _lists_of(node):
            if len({repr(each) for each in value}) > 1:
                yield ({_at(path, key): value[::-1]}, {_at(path, key): value[:1] * len(value)})


def _lists_of(node: Any) -> Iterator[tuple[str, list[Any]]]:
    for key, value in sorted(vars(node).items()):
        if isinstance(value, list | tuple) and value and not key.startswith("_"):
            yield key, list(value)


def _at(path: str, key: str) -> str:
    return f"{path}.{key}".lstrip(".")


def defaults(root: Any, expressions: Iterable[str]) -> dict[str, list[Any]]:
    """Return for each setting what stands where a config leaves it out, and its other names.

    A default is a value, or the path of the setting that it is taken from.
    """
    nodes = dict(configs.tree(root))
    found = {}
    names = {name for each in expressions for name in re.findall(r"[a-z_][\w.]*(?![\w.(])", each)}
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        node = nodes[path]
        others = (each for each in configs.layer_counts(node) if each != key)
        mapped = sorted(getattr(type(node), "attribute_map", {}).items())
        with suppress(Exception):  # a config that cannot do without settings
            value = getattr(type(node)(), key)
            taken = (_at(path, each) for each in others if _is_taken(type(node), key, each, value))
            default = next(taken, list(value) if isinstance(value, tuple) else value)
            if isinstance(default, list) and isinstance(default[0], str):
                default = None  # words come from old settings, too
            found[name] = [default, *(alias for alias, real in mapped if real == key)]
    return found


def _is_taken(config_class: type, key: str, other: str, value: Any) -> bool:
    """Return whether the default of a setting is what another one says."""
    if type(value) is not int:
        return False
    with suppress(Exception):
        return getattr(config_class(**{other: value + 3}), key) == value + 3
    return False


def said_by(root: Any) -> Said:
    """Return the numbers and the lists that a config and those inside it have."""
    found: Said = {}
    for path, node in configs.tree(root):
        for key, value in vars(node).items():
            if key.startswith("_"):
                continue
            if type(value) is int:
                found[_at(path, key)] = value
            elif isinstance(value, list | tuple) and {type(each) for each in value} in KNOWN:
                found[_at(path, key)] = list(value)
    return found


def numbers_of(name: str, pattern: str) -> list[int]:
    """Return the numbers that # stands for."""
    expression = re.escape(pattern).replace(re.escape("#"), r"(\d+)")
    match = re.fullmatch(expression, name)
    return [int(each) for each in match.groups()] if match else [0]


def value_of(expression: str, said: Said, outer: tuple[int, ...]) -> int | None:
    """Return what an expression comes to; None without a setting of it."""
    total = 0
    for term in re.findall(r"[+-]?[^+-]+", expression):
        name = re.sub(r"^\+|^(?:len|sum)(?=\()|[()]|\[#\]$", "", re.sub(r"^\+", "", term))
        if re.fullmatch(r"-?\d+", name):
            total += int(name)
            continue
        value = said.get(name)
        if "len(" in term or "sum(" in term or term.endswith("[#]"):
            if not isinstance(value, list):
                return None
            if "len(" in term:
                total += len(value)
            elif "sum(" in term:
                total += sum(value)
            elif outer and outer[-1] < len(value):
                total += value[outer[-1]]
            else:
                return None
        elif type(value) is int:
            total += value
        else:
            return None
    return total


def _is_whole(kinds: Kinds) -> bool:
    return max(kinds) + 1 == len(kinds)


def _expressions(model: Built, prefix: str, varied: Iterable[str]) -> Iterator[str]:
    """Yield what may count the children of a list, the plainest first."""
    lists = model.lists[prefix]
    length = len(next(iter(lists.values())))
    names = sorted(path for path in varied if path in model.said)
    numbers = [name for name in names if type(model.said[name]) is int]
    plain = sorted(numbers, key=lambda name: model.said[name] != length)
    for name in plain:
        yield _with_offset(name, length - model.said[name])
    for name in names:
        if isinstance(value := model.said[name], list):
            if isinstance(value[0], int):
                yield from (f"{name}[#]", f"sum({name})")
            yield _with_offset(f"len({name})", length - len(value))
    counting = [name for name in numbers if configs.COUNT.fullmatch(name.rpartition(".")[2])]
    for pair in combinations(counting, 2):
        yield _with_offset("+".join(pair), length - sum(model.said[name] for name in pair))


def _with_offset(expression: str, offset: int) -> str:
    if abs(offset) > MOST_OFFSET:
        return ""
    return f"{expression}{offset:+d}" if offset else expression


def _counts(expression: str, models: Iterable[Built], prefix: str) -> bool:
    """Return whether an expression is the length in every model, and not always the same."""
    if not expression:
        return False
    lengths = set()
    for model in models:
        for outer, kinds in model.lists[prefix].items():
            if value_of(expression, model.said, outer) != len(kinds):
                return False
            lengths.add(len(kinds))
    return len(lengths) > 1


def _along_axes(
    lists: Mapping[tuple[int, ...], Kinds],
) -> Iterator[tuple[tuple[int, ...], Kinds]]:
    """Yield children that differ in one of their numbers, and the numbers behind it."""
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Kinds] = defaultdict(dict)
    for outer, kinds in lists.items():
        for number, kind in kinds.items():
            child = (*outer, number)
            for axis, at in enumerate(child):
                rows[child[:axis], child[axis + 1 :]][at] = kind
    for (_, inner), row in rows.items():
        yield inner, row


def _at_end(kinds: list[Kind], place: int) -> tuple[Kind, Kind]:
    """Return what one end alone has, and what it alone lacks; one of both is empty."""
    end, others = kinds[place], set(kinds[1:] if place == 0 else kinds[:-1])
    if len(others) > 1:
        return frozenset(), frozenset()
    (other,) = others
    return (end - other if end > other else Kind()), (other - end if end < other else Kind())


def _lists_of_words(said: Said) -> Iterator[tuple[str, list[str]]]:
    for path, value in said.items():
        is_of_kinds = configs.KINDS.search(path.rpartition(".")[2])
        if is_of_kinds and isinstance(value, list) and isinstance(value[0], str):
            yield path, value
