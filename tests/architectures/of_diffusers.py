"""Models of diffusers on meta tensors, by their default arguments and those of settings.toml."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conditions import Conditions, conditions_of
from diffusers import ModelMixin, models
from flips import Settings, described, ways_of
from layouts import Layout, children_of, layout_of
from lists import Record, probe, said_by
from pool import limited
from settings import SETTINGS
from torch_names import Roles, parameters_of, side_of

import configs

COUNTS = (2, 4)
SECONDS_A_MODEL = 60


def jobs() -> tuple[dict[str, list[type]], dict[str, str]]:
    """Return the model classes of each module, and the modules that cannot be imported."""
    found: dict[str, list[type]] = defaultdict(list)
    failed = {}
    for package in pkgutil.walk_packages(models.__path__, f"{models.__name__}."):
        try:
            module = importlib.import_module(package.name)
        except Exception as error:  # it wants a package
            failed[package.name] = f"{type(error).__name__}: {error}"
            continue
        for made in vars(module).values():
            is_model = isinstance(made, type) and issubclass(made, ModelMixin)
            if is_model and made.__module__ == package.name and made is not ModelMixin:
                found[package.name].append(made)
    return dict(found), failed


def rows(job: tuple[str, list[type]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each class of a module."""
    module, classes = job
    torch.set_num_threads(1)
    for made_by in classes:
        head = {"class": made_by.__name__, "family": module.rpartition(".")[2]}
        try:
            row = _row(made_by)
            if row["layout"]:  # or it is a base of others
                yield {**head, **row}
        except Exception as error:  # of many kinds
            yield {**head, "error": f"{type(error).__name__}: {error}"[:300]}


def _row(made_by: type) -> dict[str, Any]:
    known = SETTINGS["diffusers"].get(made_by.__name__, {})
    base = {key: value for key, value in known.items() if key != "variants"}
    arguments = _arguments(made_by, base)
    record, tried = Record(), 0

    def build(settings: Settings) -> Layout:
        nonlocal tried
        tried += 1
        roles = _roles({**arguments, **settings})
        children = children_of(parameters_of(_model(made_by, settings), roles))
        record.add(said_by(SimpleNamespace(**{**arguments, **settings})), children)
        return layout_of(children)

    short = _short(build, arguments, base)
    conditions = _conditions(made_by)
    types = {key: str(each.annotation) for key, each in _signature(made_by).items()}
    node = SimpleNamespace(**{**arguments, **short})
    flips = (ways_of(*each) for each in configs.flips_of(node, types, conditions))
    variants = [{**short, **each} for each in known.get("variants", ())]
    layout, changes = described(build, short, variants, flips)
    probe(record, node, lambda other: build({**short, **other}))
    counts = record.counts()
    named = " ".join(counts.values())
    unexpected = getattr(made_by, "_keys_to_ignore_on_load_unexpected", None)
    return {
        "type": "",
        "base": "",
        "tied": {},
        "ties": False,
        "layout": layout,
        "flips": changes,
        "counts": counts,
        "defaults": {key: [value] for key, value in arguments.items() if key in named},
        "ends": record.ends(counts),
        "words": {},
        "renamings": [],
        "skip": [],
        "absent": [],
        "unexpected": sorted(unexpected or ()),
        "tried": tried,
    }


def _signature(made_by: type) -> dict[str, inspect.Parameter]:
    named = inspect.signature(made_by.__init__).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: each for key, each in named.items() if key != "self" and each.kind in plain}


def _arguments(made_by: type, base: Settings) -> dict[str, Any]:
    signature = _signature(made_by)
    empty = inspect.Parameter.empty
    defaults = {key: each.default for key, each in signature.items() if each.default is not empty}
    return {**defaults, **base}


def _short(build: Any, arguments: Settings, base: Settings) -> Settings:
    """Return the settings with fewest layers whose layout is that of the default."""
    whole = build(base)
    for count in COUNTS:
        sizes = {
            key: count
            for key, value in arguments.items()
            if configs.COUNT.fullmatch(key) and type(value) is int and value > count
        }
        try:
            if build({**base, **sizes}) == whole:
                return {**base, **sizes}
        except Exception:  # of many kinds: layers that go together
            continue
    return base


def _model(made_by: type, settings: Settings) -> Any:
    def made() -> Any:
        with torch.device("meta"):
            return made_by(**settings)

    return limited(SECONDS_A_MODEL, made)


def _roles(arguments: Settings) -> Roles:
    sizes = {key: value for key, value in arguments.items() if type(value) is int}
    hidden = frozenset(value for key, value in sizes.items() if "dim" in key or "hidden" in key)
    experts = frozenset(value for key, value in sizes.items() if "expert" in key and value > 1)
    return Roles(experts=experts, orientation=lambda name, shape: side_of(name, shape, hidden))


def _conditions(made_by: type) -> Conditions:
    """Return what the module asks, and those beside it and above it in diffusers.models."""
    own = Path(inspect.getfile(made_by))
    return conditions_of(sorted({own, *Path(models.__path__[0]).glob("*.py")}))
