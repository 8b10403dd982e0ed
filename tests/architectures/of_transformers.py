"""Classes of transformers on meta tensors, each a row of the table."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from conditions import Conditions, conditions_of
from flips import Flip, Settings, described
from layouts import Layout, children_of, difference, layout_of
from lists import Record, defaults, probe, said_by
from pool import limited
from renamings import free_models, inner_models, renamings_of, tied_names, ties_of
from settings import SETTINGS
from torch_names import Roles, parameters_of, side_of
from transformers import PreTrainedModel, models
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights

import configs

COUNTS = (2, 4, 6, 8, 12)
SECONDS_A_MODEL = 30
MAPPINGS = (  # what says most of a model comes first
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)
HIDDEN = re.compile(r"hidden_size$|^hidden_dim$|^d_model$|^n_embd$|^dim$|^embed_dim$|^width$")
MIDDLE = re.compile(r"intermediate_size$|^ffn_dim$|^d_ff$|^n_inner$|ffn_hidden_size$")
EXPERTS = re.compile(r"expert")
NO_COUNT = re.compile(r"per_tok|shared|top|group|size|dim|freq|period|offset|capacity")


def jobs() -> tuple[dict[type, list[type]], dict[str, str]]:
    """Return the model classes of each config class, and the files that cannot be imported."""
    get_checkpoint_conversion_mapping("")  # made once, before the processes part
    found: dict[type, list[type]] = defaultdict(list)
    failed = {}
    for package in pkgutil.iter_modules(models.__path__):
        name = f"{models.__name__}.{package.name}"
        for file in sorted(
            Path(importlib.import_module(name).__file__ or "").parent.glob("modeling_*.py")
        ):
            try:
                module = importlib.import_module(f"{name}.{file.stem}")
            except Exception as error:  # it wants a package
                failed[file.stem] = f"{type(error).__name__}: {error}"
                continue
            for made in vars(module).values():
                if _is_model(made, module.__name__):
                    found[made.config_class].append(made)
    return dict(found), failed


def _is_model(made: Any, module: str) -> bool:
    return (
        isinstance(made, type)
        and issubclass(made, PreTrainedModel)
        and made.__module__ == module
        and getattr(made, "config_class", None) is not None
        and not made.__name__.endswith("PreTrainedModel")
    )


def types(classes: Mapping[str, Any]) -> dict[str, str]:
    """Return for each model type the class of the table that says most of a model."""
    mappings = [getattr(transformers, name)._model_mapping for name in MAPPINGS]
    found = {}
    for model_type in sorted(transformers.CONFIG_MAPPING):
        for mapping in mappings:
            made = mapping.get(model_type, ())
            names = made if isinstance(made, tuple | list) else (made,)
            if listed := [name for name in names if name in classes]:
                found[model_type] = listed[0]
                break
    return found


def made_for(mapping: str, classes: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of the table that a mapping has for each model type."""
    listed = getattr(transformers, mapping)._model_mapping
    found = {}
    for model_type in sorted(transformers.CONFIG_MAPPING):
        made = listed.get(model_type, ())
        names = made if isinstance(made, tuple | list) else (made,)
        if known := [name for name in names if name in classes]:
            found[model_type] = known[0]
    return found


def rows(job: tuple[type, list[type]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each class of a config class; one with an error where there is no model."""
    config_class, classes = job
    torch.set_num_threads(1)
    base = SETTINGS["transformers"].get(config_class.model_type, {})
    shared: Settings | None = None
    vain: set[str] = set()
    for made_by in classes:
        head = {"class": made_by.__name__, "family": _family(made_by)}
        try:
            own = SETTINGS["transformers"].get(made_by.__name__)
            if own is None and shared is not None and (row := _tried_row(made_by, shared, vain)):
                yield {**head, **row}
                continue
            short = _short(config_class, made_by, own or base)
            row = _row(config_class, made_by, short, vain)
            shared = shared or (None if own else short)
        except Exception as error:  # of many kinds
            yield {**head, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        if row is not None:
            yield {**head, **row}


def _tried_row(made_by: Any, short: Settings, vain: set[str]) -> dict[str, Any] | None:
    try:
        return _row(made_by.config_class, made_by, short, vain)
    except Exception:  # it needs what another class does without
        return None


def _family(made_by: type) -> str:
    return made_by.__module__.rpartition(".")[2].removeprefix("modeling_")


def _short(config_class: type, made_by: type, base: Settings) -> Settings:
    """Return the settings with fewest layers whose layout is that of the default."""
    whole = None
    for each in _repaired(config_class, base):
        try:
            base, whole = each, _Builder(config_class, made_by).layout(each)
            break
        except Exception:  # of many kinds: a default that is no model
            continue
    for count in COUNTS:
        try:
            short = configs.shortened(config_class, base, count)
            layout = _Builder(config_class, made_by).layout(short)
        except Exception:
            continue
        if (whole is None and count >= 4) or layout == whole:
            return short
    if whole is None:
        _Builder(config_class, made_by).layout(base)  # raises
    return base


def _repaired(config_class: type, base: Settings) -> Iterator[Settings]:
    """Yield settings, then such that say what the default leaves out: kinds of layers, sizes."""
    yield base
    try:
        config = configs.make(config_class, base)
    except Exception:
        return
    yield from configs.variants(config_class, base, Conditions(), _kinds(config))
    filled = base
    for path, _ in configs.tree(config):
        filled = configs.with_sizes_filled(config_class, filled, path)
        yield filled
    yield from configs.variants(config_class, filled, Conditions(), _kinds(config))


def _row(
    config_class: type, made_by: type, short: Settings, vain: set[str]
) -> dict[str, Any] | None:
    builder = _Builder(config_class, made_by)
    model = builder.model(short)
    if not model.state_dict():
        return None
    config, free = model.config, free_models(model)
    variants = list(configs.variants(config_class, short, _conditions(config), _kinds(config)))
    layout, changes = described(
        builder.layout, short, variants, _flips(config_class, config, short), vain
    )
    changes += _by_sizes(builder, layout, short, config_class.model_type)
    probe(builder.record, config, lambda other: builder.layout(_changed(short, config, other)))
    counts = builder.record.counts()
    tied = tied_names(_with_other_ties(builder, model, variants))
    ties, pairs = tied.pop("", [ties_of(config), {}])
    return {
        "type": config_class.model_type,
        "base": made_by.base_model_prefix,
        "tied": pairs,
        "ties": ties,
        "tied_inside": tied,
        "layout": layout,
        "flips": changes,
        "counts": counts,
        "defaults": defaults(config, counts.values()),
        "ends": builder.record.ends(counts),
        "words": builder.record.words(),
        "renamings": builder.renamings,
        "inner": free,
        "skip": _strings(made_by._keys_to_ignore_on_save),
        "absent": _strings(made_by._keys_to_ignore_on_load_missing),
        "unexpected": _strings(made_by._keys_to_ignore_on_load_unexpected),
        "tried": builder.tried,
    }


def _changed(settings: Settings, config: Any, changes: Mapping[str, Any]) -> Settings:
    for path, value in changes.items():
        settings = configs.set_at(settings, config, path, value)
    return settings


def _by_sizes(
    builder: _Builder, layout: Layout, short: Settings, model_type: str
) -> Iterator[list[Any]]:
    """Yield what other sizes add, under a condition that no config meets: it may be there."""
    for settings in SETTINGS["sizes"].get(model_type, ()):
        with suppress(Exception):  # a class of the type that has no such part
            change = difference(layout, builder.layout({**short, **settings}))
            if change:
                yield [next(iter(settings)), "another size", change]


def _flips(config_class: type, config: Any, short: Settings) -> Iterator[Flip]:
    conditions = _conditions(config)
    for path, condition, values in configs.flips(config, conditions):
        other, wanted = configs.mirrored(config, conditions, path, str(condition))
        together = SETTINGS["together"].get(path.rpartition(".")[2], {})
        yield Flip(
            path,
            condition,
            tuple(tuple(_ways(config_class, config, path, value, together)) for value in values),
            tuple(_mirrored(config, path, other, value) for value in wanted),
        )


def _mirrored(config: Any, path: str, other: str, value: Any) -> Callable[[Settings], Settings]:
    """Return a way to set the one of two settings while the other stays as it is."""
    *inner, key = path.split(".")
    node = functools.reduce(getattr, inner, config)
    return lambda settings: configs.set_at(
        configs.set_at(settings, config, path, getattr(node, key)), config, other, value
    )


def _ways(
    config_class: type, config: Any, path: str, value: Any, together: Mapping[str, Any]
) -> Iterator[Callable[[Settings], Settings]]:
    inner = path.rpartition(".")[0]

    def alone(settings: Settings) -> Settings:
        return configs.set_at(settings, config, path, value)

    def beside(settings: Settings) -> Settings:
        for key, other in together.items():
            settings = configs.set_at(settings, config, f"{inner}.{key}".lstrip("."), other)
        return alone(settings)

    yield alone
    if together:
        yield beside
    yield lambda settings: configs.with_sizes_filled(config_class, alone(settings), inner, config)


class _Builder:
    """Makes models of one class, and remembers which way its stacks of experts lie."""

    def __init__(self, config_class: type, made_by: type) -> None:
        self.config_class, self.made_by = config_class, made_by
        self.renamings: list[list[Any]] = []
        self.record = Record()
        self.tried = 0
        self._sides: dict[str, str] | None = None
        self._settings: Settings = {}
        self._seen: set[tuple[tuple[str, str], ...]] = set()
        self._model: tuple[Settings, Any] | None = None

    def model(self, settings: Settings) -> Any:
        """Return the model of settings, without values; the last one is kept."""
        if self._model is None or self._model[0] != settings:
            self._model = settings, self._made(configs.make(self.config_class, settings))
        return self._model[1]

    def _made(self, config: Any) -> Any:
        self.tried += 1

        def made() -> Any:
            with torch.device("meta"), no_init_weights():
                return self.made_by(config)

        return limited(SECONDS_A_MODEL, made)

    def layout(self, settings: Settings) -> Layout:
        """Return the layout of settings; renamings that are new are kept."""
        model = self.model(settings)
        if (inner := inner_models(model)) not in self._seen:
            self._seen.add(inner)
            new = (each for each in renamings_of(model) if each not in self.renamings)
            self.renamings.extend(new)
        self._settings = settings
        children = children_of(parameters_of(model, self._roles(model, model.config)))
        self.record.add(said_by(model.config), children)
        return layout_of(children)

    def _roles(self, model: Any, config: Any) -> Roles:
        hidden = frozenset(_sizes(config, HIDDEN))

        def orientation(name: str, shape: tuple[int, ...]) -> str | None:
            return side_of(name, shape, hidden) or self._other_sides().get(name)

        return Roles(_heads(model), _outside(model), frozenset(_experts(config)), orientation)

    def _other_sides(self) -> dict[str, str]:
        """Build it again with a middle that no hidden size equals, where sizes do not tell."""
        if self._sides is None:
            self._sides = self._other_build(wider=3) or self._other_build(wider=1)
        return self._sides

    def _other_build(self, wider: int) -> dict[str, str]:
        sides = {}
        try:
            config = configs.make(self.config_class, self._settings)
            for _, node in configs.tree(config):
                for key, value in list(vars(node).items()):
                    if MIDDLE.search(key) and type(value) is int:
                        setattr(node, key, 416)
                    elif HIDDEN.search(key) and type(value) is int:
                        setattr(node, key, value * wider)
            hidden = frozenset(_sizes(config, HIDDEN)) - {416, 832}
            for name, tensor in self._made(config).state_dict().items():
                if tensor.dim() == 3 and (side := side_of(name, tuple(tensor.shape), hidden)):
                    sides[name] = side
        except Exception:  # of many kinds: sizes that do not go together
            return {}
        return sides


def _sizes(config: Any, names: re.Pattern[str]) -> set[int]:
    return {
        value
        for _, node in configs.tree(config)
        for key, value in vars(node).items()
        if names.search(key) and type(value) is int
    }


def _experts(config: Any) -> set[int]:
    return {
        value
        for _, node in configs.tree(config)
        for key, value in vars(node).items()
        if EXPERTS.search(key) and not NO_COUNT.search(key) and type(value) is int and value > 1
    }


def _heads(model: Any) -> frozenset[str]:
    try:
        head = model.get_output_embeddings()
    except Exception:
        return frozenset()
    weight = getattr(head, "weight", None)
    if weight is None or isinstance(head, torch.nn.Embedding):
        return frozenset()
    named = model.named_modules(remove_duplicate=False)
    return frozenset(f"{name}.weight" for name, module in named if module is head)


def _outside(model: Any) -> str | None:
    prefix = model.base_model_prefix
    inner = getattr(model, prefix, None) if prefix else None
    return f"{prefix}." if isinstance(inner, torch.nn.Module) else None


def _with_other_ties(builder: _Builder, model: Any, variants: Iterable[Settings]) -> Iterator[Any]:
    """Yield a model, and those of variants where its ties depend on its settings."""
    yield model
    if any("_tied_weights_keys" in vars(module) for module in model.modules()):
        for variant in variants:
            with suppress(Exception):  # settings that make no model
                yield builder.model(variant)


def _strings(patterns: Iterable[str] | None) -> list[str]:
    return sorted(patterns or ())


def _conditions(config: Any) -> Conditions:
    """Return what the modeling files of a config, and of those inside it, ask."""
    files, lists = set[Path](), set[Path]()
    for _, node in configs.tree(config):
        if type(node).__module__.startswith("transformers.models."):
            folder = Path(inspect.getfile(type(node))).parent
            files |= {*folder.glob("modeling_*.py")}
            lists |= {*folder.glob("configuration_*.py")}
    conditions = conditions_of(sorted(files))
    own = conditions_of(sorted(lists))  # of configs: settings that they hand on, kinds of layers
    return replace(
        conditions,
        per_layer=conditions.per_layer | own.per_layer,
        mentioned=conditions.mentioned | own.read,
    )


def _kinds(config: Any) -> list[str]:
    """Return the words that the files of a config, and of those inside it, have for layers."""
    files = (Path(inspect.getfile(type(node))).parent for _, node in configs.tree(config))
    texts = (file.read_text("utf-8") for folder in set(files) for file in folder.glob("*.py"))
    named = {word for text in texts for word in re.findall(r"[\"']([a-z_0-9]+)[\"']", text)}
    return sorted((named & set(ALLOWED_LAYER_TYPES)) | set(_conditions(config).layer_words))
