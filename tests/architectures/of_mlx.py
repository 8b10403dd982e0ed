"""Models of mlx-lm, by the default config that transformers has for the model type."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import transformers
from conditions import conditions_of
from flips import Settings, described, ways_of
from layouts import Layout, Parameter, children_of, layout_of
from mlx import nn
from mlx_lm import models
from pool import limited
from settings import SETTINGS
from torch_names import GATE, NORM

import configs

SMALL = {"hidden_size": 64, "vocab_size": 64, "head_dim": 16, "rope_scaling": None}
OLDER = {"linear_attention": "mamba", "full_attention": "attention"}
MOST_LAYERS = 4
SECONDS_A_MODEL = 60


def jobs() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the modules with a model, and those that cannot be imported."""
    found, failed = {}, {}
    for package in pkgutil.iter_modules(models.__path__):
        try:
            module = importlib.import_module(f"{models.__name__}.{package.name}")
        except (Exception, SystemExit) as error:  # it wants a package
            failed[package.name] = f"{type(error).__name__}: {error}"
            continue
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            found[package.name] = [package.name]
    return found, failed


def rows(job: tuple[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Yield the row of a module's model."""
    name, _ = job
    failed: list[str] = []
    for config in _configs(name):
        try:
            yield {"class": name, "family": name, **_row(name, config)}
            return
        except Exception as error:  # of many kinds
            failed.append(f"{type(error).__name__}: {error}"[:300])
    yield {"class": name, "family": name, "error": failed[0]}


def _row(name: str, config: Settings) -> dict[str, Any]:
    module = importlib.import_module(f"{models.__name__}.{name}")
    base = _filled(module.ModelArgs, config)
    tried = 0

    def build(settings: Settings) -> Layout:
        nonlocal tried
        tried += 1
        model = limited(
            SECONDS_A_MODEL, lambda: module.Model(module.ModelArgs.from_dict(dict(settings)))
        )
        experts = {
            value
            for key, value in settings.items()
            if "expert" in key and type(value) is int and value > 1
        }
        return layout_of(children_of(_parameters(model, "", (), (), experts)))

    node = SimpleNamespace(
        **{
            field.name: base.get(field.name, _default(field))
            for field in dataclasses.fields(module.ModelArgs)
        }
    )
    types = {field.name: str(field.type) for field in dataclasses.fields(module.ModelArgs)}
    conditions = conditions_of([Path(module.__file__ or "")])
    flips = (ways_of(*each) for each in configs.flips_of(node, types, conditions, "^tie_"))
    variants = (
        {**base, key: value}
        for key, value in configs.uniform(node, conditions, conditions.layer_words)
    )
    layout, changes = described(build, base, variants, flips)
    return {
        "type": name,
        "base": "",
        "tied": {},
        "ties": bool(getattr(node, "tie_word_embeddings", False)),
        "layout": layout,
        "flips": changes,
        "renamings": [],
        "skip": [],
        "absent": [],
        "unexpected": [],
        "tried": tried,
    }


def _configs(name: str) -> Iterator[dict[str, Any]]:
    """Yield configs that a model type may have: transformers' default, then in older words."""
    own = SETTINGS["mlx"].get(name, {})
    found: dict[str, Any] = {}
    for each in (name, name.replace("_", "-"), name.replace("_text", "")):
        if each in transformers.CONFIG_MAPPING:
            kind = transformers.CONFIG_MAPPING[each]
            found = kind(**configs.shortened(kind, {}, MOST_LAYERS)).to_dict()
            break
    for config in (found, _older(found)):
        yield _merged({**config, "model_type": name}, own)


def _merged(config: Settings, own: Settings) -> dict[str, Any]:
    inner = {
        key: _merged(config.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in own.items()
    }
    return {**config, **inner}


def _older(config: Any) -> Any:
    """Return a config in the words of transformers 4: kinds of layers, and settings of RoPE."""
    if isinstance(config, list):
        return [_older(each) for each in config]
    if not isinstance(config, dict):
        return OLDER.get(config, config) if isinstance(config, str) else config
    made = {key: _older(value) for key, value in config.items()}
    if rope := config.get("rope_parameters"):
        far, near = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
        made["rope_theta"] = far.get("rope_theta", 10000.0)
        made["rope_local_base_freq"] = near.get("rope_theta", 10000.0)
        made.setdefault("rope_scaling", None)
    return made


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    is_made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if is_made else None


def _filled(kind: type, config: Settings) -> dict[str, Any]:
    """Return the config and, for what the class wants beside it, small values of its type."""
    made = dict(config)
    rope = made.get("rope_parameters") or {}
    for field in dataclasses.fields(kind):
        key, said = field.name, str(field.type)
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if has_default or made.get(key) is not None:
            continue
        if key in rope or key in SMALL:
            made[key] = rope.get(key, SMALL.get(key))
        elif re.search("list", said, re.IGNORECASE) and ("int" in said or "bool" in said):
            made[key] = [0, 1] * (MOST_LAYERS // 2)  # which layers, or what each is
        elif "bool" in said:
            made[key] = False
        elif "float" in said:
            made[key] = 10000.0 if "theta" in key or "base" in key else 1.0
        elif "int" in said:
            made[key] = 4 if re.search("num|n_|layers|heads|top", key) else 64
        elif "str" in said:
            made[key] = "none"
        else:
            made[key] = None
    return made


def _parameters(
    owner: Any, name: str, parts: tuple[str, ...], is_number: tuple[bool, ...], experts: set[int]
) -> Iterator[Parameter]:
    children = enumerate(owner) if isinstance(owner, list) else sorted(owner.items())
    for key, value in children:
        numbers = isinstance(owner, list) and _are_alike(owner)
        longer, flags = (*parts, str(key)), (*is_number, numbers)
        if isinstance(value, mx.array):
            kind = _kind(owner, longer, value, experts)
            yield Parameter(longer, flags, f"{kind}{value.ndim}")
        elif isinstance(value, dict | list):
            yield from _parameters(value, str(key), longer, flags, experts)


def _are_alike(children: list[Any]) -> bool:
    return len({type(each) for each in children}) == 1 or all(
        isinstance(each, nn.Module) and each.children() for each in children
    )


def _kind(owner: Any, parts: tuple[str, ...], value: mx.array, experts: set[int]) -> str:
    made_by, leaf = type(owner).__name__, parts[-1]
    if leaf.endswith("bias"):
        return "b"
    if isinstance(owner, nn.Embedding):
        return "E"
    if "Conv" in made_by:
        return "C" if value.ndim > 2 else "V"
    if NORM.search(made_by) and value.ndim <= 2:
        return "N"
    if value.ndim == 2 and value.shape[0] in experts and GATE.search(".".join(parts[-3:])):
        return "R"
    if isinstance(owner, nn.Linear):
        return "H" if parts[-2] in ("lm_head", "output", "head") and len(parts) <= 3 else "L"
    if made_by == "SwitchLinear":
        return "X"
    return "V" if value.ndim <= 1 else "O"
