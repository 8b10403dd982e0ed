"""Find the places of tensors in a model, by their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from fp4convert.checkpoint.module_names import Numbers, reading_rank, split_numbers
from fp4convert.storage.safetensors import WEIGHT

ANY = "*"  # stands for a number
EXPERTS = "expert"  # in the name of a list of them
ATTENTION = "att"  # stands before the rest of its layer


class Place(NamedTuple):
    """The place of one tensor in a model.

    tower   the path of the layers, with stars for numbers: model.layers; "" outside of layers
    layer   the numbers of its layer, one for a level of nested lists
    module  the name in its layer, with a star for the number of an expert
    expert  this number
    """

    tower: str
    layer: Numbers
    module: str
    expert: int | None = None


def find_places(names: Sequence[str]) -> list[Place]:
    """Find the places of tensors by name; NAME and NAME.weight share one.

    Numbers in a name are places in lists. The innermost list with several tensors in a member is
    that of layers, but for experts: `blocks.0.attentions.1.to_out.0` is the module `to_out.0` of
    layer 0.1. The outermost list is always one of layers.
    """
    split = [split_numbers(name.removesuffix(WEIGHT)) for name in names]
    held: dict[tuple[tuple[str, ...], Numbers], int] = defaultdict(int)
    for texts, numbers in split:
        for depth in range(1, len(numbers) + 1):
            held[texts[:depth], numbers[:depth]] += 1
    layered = {texts for (texts, _), count in held.items() if count > 1}
    places = []
    for texts, numbers in split:
        # The first list of experts, and how many lists before it count layers.
        experts = next((at for at in range(len(numbers)) if EXPERTS in texts[at]), len(numbers))
        counting = (at + 1 for at in range(experts) if at == 0 or texts[: at + 1] in layered)
        depth = max(counting, default=0)
        # The name around the layers, and the rest of it; both without the dots between them.
        tower = "".join(f"{text}{ANY}" for text in texts[:depth])
        rest = texts[depth]
        for at in range(depth, len(numbers)):
            rest += f"{ANY if at == experts else numbers[at]}{texts[at + 1]}"
        places.append(
            Place(
                tower[:-2],  # without a separator and the star
                numbers[:depth],
                rest[1:] if depth else rest,
                numbers[experts] if experts < len(numbers) else None,
            )
        )
    return places


def group_names(names: Sequence[str], room: int, held: int) -> list[tuple[str, list[int]]]:
    """Group tensors until their rows fit into a page.

    room     bytes for all rows
    held     bytes of a row beside its name
    Returns  a label and the places in `names` of each group, in their order. Where each alone is
             too much, experts of a module are one; then modules of neighbouring layers, 2, 4 and so
             on; then all of one name but for its numbers; at last neighbours
    """
    rows, places = [(name, [at]) for at, name in enumerate(names)], find_places(names)
    if _nbytes(rows, places, held) <= room:
        return rows
    layers: dict[str, dict[Numbers, int]] = {}
    for tower in dict.fromkeys(place.tower for place in places):
        each = sorted({place.layer for place in places if place.tower == tower})
        layers[tower] = {layer: rank for rank, layer in enumerate(each)}
    deepest, step = max(map(len, layers.values())), 1
    while True:
        groups: dict[object, list[int]] = defaultdict(list)
        for at, place in enumerate(places):
            rank = layers[place.tower][place.layer] // step
            module = place.module if step <= deepest else ANY.join(split_numbers(names[at])[0])
            groups[place.tower, rank, module].append(at)
        rows = [(_label([names[at] for at in group]), group) for group in groups.values()]
        if step > deepest or _nbytes(rows, places, held) <= room:
            break
        step *= 2
    while len(rows) > 1 and _nbytes(rows, places, held) > room:
        pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
        merged = [[at for _, group in pair for at in group] for pair in pairs]
        rows = [(f"{names[group[0]]}, and {len(group) - 1:,} more", group) for group in merged]
    return rows


def _nbytes(rows: Sequence[tuple[str, list[int]]], places: Sequence[Place], held: int) -> int:
    """Count the bytes of rows, and of the modules that they name."""
    modules = {places[group[0]][::2] for _, group in rows}
    return sum(len(label) + held for label, _ in rows) + sum(map(len, chain(*modules)))


def _label(names: Sequence[str]) -> str:
    """Name tensors alike in all but numbers, with stars where these differ."""
    if len(names) == 1:
        return names[0]
    texts, first = split_numbers(names[0])
    others = [split_numbers(name)[1] for name in names[1:]]
    label = texts[0]
    for at, text in enumerate(texts[1:]):
        same = all(at < len(other) and other[at] == first[at] for other in others)
        label += f"{first[at] if same else ANY}{text}"
    return f"{label} ({len(names):,} of them)"


def reading_order(modules: Iterable[str]) -> list[str]:
    """Sort the modules of a layer as people say them.

    Attention first, q, k, v and o; then gate, up and down.
    """

    def rank(module: str) -> tuple[bool, str, tuple[int, str, int, str]]:
        parent, _, leaf = module.rpartition(".")
        return ATTENTION not in module, parent, reading_rank(leaf)

    return sorted(modules, key=rank)
