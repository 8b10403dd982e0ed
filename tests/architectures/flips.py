"""One class described: the union of its layer kinds, and what single settings change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from layouts import Layout, difference, union

from fp4convert.checkpoint.architectures import Kinds
from fp4convert.checkpoint.class_table import combine

Settings = Mapping[str, Any]
Build = Callable[[Settings], Layout]
"""Returns the layout of a class under settings; raises where they make no model."""
Way = Callable[[Settings], Settings]
MOST_FLIPS, MOST_PAIRS, MOST_TOGETHER = 160, 40, 120


@dataclass(frozen=True, slots=True)
class Flip:
    """A setting by its path, the condition that a config has to meet, and how to meet it."""

    path: str
    condition: bool | str
    ways: tuple[tuple[Way, ...], ...]
    """For each value the ways to set it, in turn until one makes a model."""
    mirrored: tuple[Way, ...] = ()
    """Ways to meet the condition by the other setting, which change the same."""

    @property
    def text(self) -> str:
        """Return the path and the condition."""
        return f"{self.path} {self.condition}"


@dataclass(frozen=True, slots=True)
class Change:
    """A flip that changes a layout, and the way in which it made a model."""

    flip: Flip
    layout: Layout
    way: Way


def described(
    build: Build,
    base: Settings,
    variants: Iterable[Settings],
    flips: Iterable[Flip],
    vain: set[str] | None = None,
) -> tuple[Layout, list[list[Any]]]:
    """Return the layout and the flips that change it, alone and two together.

    vain  what other classes of the config have tried in vain; more is added
    """
    layout, telling = build(base), [base]

    def add(settings: Settings) -> None:
        nonlocal layout
        if (made := _tried(build, settings)) and (whole := union([layout, made])) != layout:
            layout = whole
            telling.append(settings)

    for variant in variants:
        add(variant)
    for one, other in list(combinations(telling[1:], 2))[:MOST_PAIRS]:
        add(both(base, one, other))  # one chooses an attention, say, and one an MLP
    changes, others = list[Change](), list[Flip]()
    for flip in list(flips)[:MOST_FLIPS]:
        change = _change(build, layout, telling, flip)
        if change is None:
            others.append(flip)
        elif change.layout and not any(_is_same(change, other) for other in changes):
            changes.append(change)
    alone = [[one.flip.path, one.flip.condition, one.layout] for one in changes]
    vain = set() if vain is None else vain
    hidden = list(_hidden(build, base, changes, [one for one in others if one.text not in vain]))
    vain |= {one.text for one in others} - {one.flip.text for one in hidden}
    pairs = [*combinations(changes, 2), *product(changes, hidden)]
    return layout, [*alone, *_together(build, layout, telling, pairs, vain)]


def _change(build: Build, layout: Layout, telling: list[Settings], flip: Flip) -> Change | None:
    """Return what a flip changes; nothing where None and [] do not say the same.

    A comparison that the other setting does not confirm is of other settings, and changes nothing.
    """
    found: list[Change] = []
    for ways in flip.ways:
        for way in ways:
            if made := _flipped(build, telling, way):
                found.append(Change(flip, difference(layout, union(made)), way))
                break
        if flip.condition is not False and found and found[-1].layout:
            made = next(
                filter(None, (_flipped(build, telling, way) for way in flip.mirrored)), None
            )
            is_same = made is None or difference(layout, union(made)) == found[-1].layout
            return found[-1] if is_same else replace(found[-1], layout={})
    if flip.condition is not False or not found or not found[0].layout:
        return None
    return found[0] if all(each.layout == found[0].layout for each in found) else None


def _is_same(change: Change, other: Change) -> bool:
    """Return whether a change is that of no value at all, under "<= 0"."""
    return (
        str(change.flip.condition).endswith(" 0")
        and other.flip.path == change.flip.path
        and other.layout == change.layout
    )


def _hidden(
    build: Build, base: Settings, changes: Iterable[Change], others: Iterable[Flip]
) -> Iterator[Change]:
    """Yield flips that change something only where others are set, too."""
    settings = base
    for change in changes:
        if _tried(lambda each, way=change.way: build(way(each)), settings) is not None:
            settings = change.way(settings)
    if settings == base:
        return
    layout = build(settings)
    for flip in others:
        for way in (way for ways in flip.ways for way in ways):
            made = _tried(lambda each, way=way: build(way(each)), settings)
            if made is not None and made != layout:
                yield Change(flip, {}, way)
                break


def _together(
    build: Build,
    layout: Layout,
    telling: list[Settings],
    pairs: Iterable[tuple[Change, Change]],
    vain: set[str],
) -> Iterator[list[Any]]:
    """Yield what two flips change that the reader does not expect of each."""
    for one, other in list(pairs)[:MOST_TOGETHER]:
        text = f"{one.flip.text} {other.flip.text}"
        if one.flip.path == other.flip.path or text in vain:
            continue
        whole = union(_flipped(build, telling, lambda each, a=one, b=other: b.way(a.way(each))))
        change = {}
        for prefix, kinds in whole.items():
            changed = [each.layout[prefix] for each in (one, other) if prefix in each.layout]
            expected = combine(kinds_of(layout.get(prefix, [])), map(kinds_of, changed))
            if not set(kinds_of(kinds)) <= set(expected):
                change[prefix] = kinds
        if change:
            flips = one.flip, other.flip
            yield [[each.path for each in flips], [each.condition for each in flips], change]
        else:
            vain.add(text)


def kinds_of(kinds: Iterable[Iterable[str]]) -> Kinds:
    """Return kinds as the reader has them."""
    return tuple(frozenset(kind) for kind in kinds)


def ways_of(key: str, condition: bool | str, values: Iterable[Any]) -> Flip:
    """Return the flip of a setting that stands at the top."""
    ways = tuple((lambda settings, value=value: {**settings, key: value},) for value in values)
    return Flip(key, condition, ways)


def both(base: Settings, one: Settings, other: Settings) -> Settings:
    """Return settings with what two others say beside the base."""
    made = dict(one)
    for key, value in other.items():
        before, inside = base.get(key), made.get(key)
        if isinstance(value, Mapping) and isinstance(inside, Mapping):
            made[key] = both(before if isinstance(before, Mapping) else {}, inside, value)
        elif value != before:
            made[key] = value
    return made


def _flipped(
    build: Build, telling: Iterable[Settings], way: Callable[[Settings], Settings]
) -> list[Layout]:
    made = (_tried(lambda each: build(way(each)), settings) for settings in telling)
    return [layout for layout in made if layout is not None]


def _tried(build: Build, settings: Settings) -> Layout | None:
    try:
        return build(settings)
    except Exception:  # of many kinds: settings that make no model
        return None


def changed(settings: Settings, path: str, value: Any) -> Settings:
    """Return settings with one more, inside the part of the config that its path names."""
    key, _, rest = path.partition(".")
    inner = changed(settings.get(key, {}), rest, value) if rest else value
    return {**settings, key: inner}
