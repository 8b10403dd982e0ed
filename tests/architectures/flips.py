"""One class described: the union of its layer kinds, and what single settings change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layouts import Layout, difference, union

Settings = Mapping[str, Any]
Build = Callable[[Settings], Layout]
"""Returns the layout of a class under settings; raises where they make no model."""
MOST_FLIPS = 120


@dataclass(frozen=True, slots=True)
class Flip:
    """A setting by its path, the condition that a config has to meet, and how to meet it."""

    path: str
    condition: bool | str
    ways: tuple[tuple[Callable[[Settings], Settings], ...], ...]
    """For each value the ways to set it, in turn until one makes a model."""


def described(
    build: Build, base: Settings, variants: Iterable[Settings], flips: Iterable[Flip]
) -> tuple[Layout, list[list[Any]]]:
    """Return the layout and the flips that change it."""
    layout, telling = build(base), [base]
    for variant in variants:
        if (made := _tried(build, variant)) and (whole := union([layout, made])) != layout:
            layout = whole
            telling.append(variant)
    changes = []
    for flip in list(flips)[:MOST_FLIPS]:
        if change := _change(build, layout, telling, flip):
            changes.append([flip.path, flip.condition, change])
    return layout, changes


def _change(build: Build, layout: Layout, telling: list[Settings], flip: Flip) -> Layout:
    """Return what a flip changes; nothing where None and [] do not say the same."""
    found: list[Layout] = []
    for ways in flip.ways:
        made = next(filter(None, (_flipped(build, telling, way) for way in ways)), [])
        if not made:
            continue
        found.append(difference(layout, union(made)))
        if flip.condition is not False and found[-1]:
            return found[-1]
    if flip.condition is False and found and all(each == found[0] for each in found):
        return found[0]
    return {}


def ways_of(key: str, condition: bool | str, values: Iterable[Any]) -> Flip:
    """Return the flip of a setting that stands at the top."""
    ways = tuple((lambda settings, value=value: {**settings, key: value},) for value in values)
    return Flip(key, condition, ways)


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
