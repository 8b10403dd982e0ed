"""Write many names with numbers as one pattern: layers.[0-2].

A pattern stands for exactly the names that were joined in it. It is for people and no glob: [0-61]
is a range of numbers here, and a set of characters there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product

from fp4convert.recipes.recipe import Recipe, scale_groups
from fp4convert.recipes.rules import EXPERT_WORDS

Numbers = tuple[int, ...]
# The numbers at each place of a name, all combined with each other.
Ranges = tuple[Numbers, ...]

PARAMETERS = frozenset(  # of a module
    {"bias", "e_score_correction_bias", "weight_scale", "weight_scale_inv", "input_scale"}
)
# Parts of names in the order in which people say them; others are at the empty place, by alphabet.
READING_ORDER = (
    ("q", "wq", "query", "qkv"),
    ("k", "wk", "key", "kv"),
    ("v", "wv", "value"),
    ("gate",),
    ("up",),
    (),
    ("o", "wo", "out", "down"),
)
_RANKS = {part: rank for rank, parts in enumerate(READING_ORDER) for part in parts}
_BETWEEN, _OF_ATTENTION = READING_ORDER.index(()), range(3)
# A word of its own: not that of w1, nor one with zeros before.
_NUMBER = re.compile(r"(?<![^._])(0|[1-9][0-9]{0,8})(?![^._])")


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Split a name into its numbers and the text around them."""
    parent, dot, word = name.rpartition(".")
    if not dot:
        return _split(name)
    texts, numbers = _split(parent)
    texts, own = _lengthen(texts, word)
    return texts, numbers + own


@lru_cache(1 << 12)
def _lengthen(texts: tuple[str, ...], word: str) -> tuple[tuple[str, ...], Numbers]:
    """Append a word to a split name; return all texts, and the word's numbers."""
    (after, *rest), numbers = _split(word)
    return (*texts[:-1], f"{texts[-1]}.{after}", *rest), numbers


@lru_cache(1 << 12)  # siblings follow one another, and their last words are few
def _split(name: str) -> tuple[tuple[str, ...], Numbers]:
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def join_numbers(texts: Sequence[str], ranges: Ranges) -> str:
    """Write a pattern; ranges of ascending numbers become 7, or [0-2,5-60]."""
    pattern = texts[0]
    for numbers, text in zip(ranges, texts[1:], strict=True):
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][-1] + 1:
                runs[-1][1:] = [number]
            else:
                runs.append([number])
        range_text = ",".join("-".join(map(str, run)) for run in runs)
        pattern += f"[{range_text}]{text}" if len(numbers) > 1 else f"{range_text}{text}"
    return pattern


def find_ranges(found: Iterable[Numbers]) -> list[Ranges]:
    """Find products of ranges that are together exactly these tuples.

    found  tuples of one length; first numbers with equal rests are joined
    """
    by_first: dict[int, list[Numbers]] = defaultdict(list)
    for numbers in set(found):
        if not numbers:
            return [()]
        by_first[numbers[0]].append(numbers[1:])
    alike: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first in sorted(by_first):
        alike[frozenset(by_first[first])].append(first)
    return [
        (tuple(firsts), *rest) for rests, firsts in alike.items() for rest in find_ranges(rests)
    ]


def join_names(named: Iterable[tuple[str, Hashable]]) -> Iterator[tuple[str, list[int]]]:
    """Yield (pattern, positions) for names with their verdicts.

    Names with equal verdicts share a pattern. So do siblings, whose names differ in the last word
    alone, where they have the same numbers; they are in reading order. The first position is that
    of the first sibling with the lowest numbers.
    """
    alike: dict[tuple[tuple[str, ...], Hashable], dict[Numbers, list[int]]] = defaultdict(dict)
    for position, (name, verdict) in enumerate(named):
        texts, numbers = split_numbers(name)
        alike[texts, verdict].setdefault(numbers, []).append(position)
    siblings: dict[tuple[tuple[str, ...], Ranges, Hashable], dict[str, list[int]]] = defaultdict(
        dict
    )
    known: dict[frozenset[Numbers], list[Ranges]] = {}  # siblings have the same numbers
    for (texts, verdict), held in alike.items():
        parent, word, parameter = split_leaf(texts[-1])
        found = frozenset(held)
        if found not in known:
            known[found] = find_ranges(found)
        for ranges in known[found]:
            own = [position for numbers in product(*ranges) for position in held[numbers]]
            siblings[(*texts[:-1], parent, parameter), ranges, verdict][word] = own
    for ((*texts_before, parent, parameter), ranges, _), words in siblings.items():
        ordered = sorted(words, key=reading_rank)
        pattern = join_numbers((*texts_before, f"{parent}{join_words(ordered)}{parameter}"), ranges)
        yield pattern, [position for word in ordered for position in words[word]]


def reading_rank(word: str) -> tuple[int, str, int, str]:
    """Return a key for reading order: q, k, v, o; gate, up, down; alphabet."""
    parts = word.split("_")
    at, rank = next(
        ((at, _RANKS[part]) for at, part in enumerate(parts) if part in _RANKS), (0, _BETWEEN)
    )
    if rank in _OF_ATTENTION:  # add_q, add_k and add_v before to_q, to_k and to_v
        return 0, "_".join(parts[:at]), rank, word
    return rank, "", rank, word


def split_leaf(name: str) -> tuple[str, str, str]:
    """Split a name or pattern into parent with dot, last word, and parameter."""
    parent, dot, word = name.rpartition(".")
    parameter = ""
    if dot and word in PARAMETERS:
        parameter = f".{word}"
        parent, dot, word = parent.rpartition(".")
    return f"{parent}{dot}", word, parameter


def join_words(words: Sequence[str]) -> str:
    """Write words as one, common first and last parts outside: {gate,up}_proj."""
    if len(words) == 1:
        return words[0]
    parts = [word.split("_") for word in words]
    most = min(map(len, parts)) - 1  # something is left of each
    before = next((at for at in range(most) if len({part[at] for part in parts}) > 1), most)
    after = next(
        (at for at in range(most - before) if len({part[-1 - at] for part in parts}) > 1),
        most - before,
    )
    inside = ",".join("_".join(part[before : len(part) - after]) for part in parts)
    common = parts[0]
    return "_".join([*common[:before], f"{{{inside}}}", *common[len(common) - after :]])


def part_of(module: str, recipe: Recipe) -> str:
    """Name the part of one format: a layer's experts, or a scale group."""
    if any(word in module for word in EXPERT_WORDS) and len(split_numbers(module)[1]) > 1:
        texts, _ = split_numbers(module)
        return module[: len(module) - len(texts[-1])].rpartition(".")[0]
    group = scale_groups([module], recipe.groups).get(module)
    return str(group) if group else module
