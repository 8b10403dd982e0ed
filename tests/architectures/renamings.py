"""The renamings that transformers applies on loading, and the names that share values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from layouts import pattern_of
from torch_names import named_parameters

import configs

KINDS = {
    "WeightRenaming": "rename",
    "WeightConverter": "merge",
    "PrefixChange": "prefix",
    "GroupWeightRename": "group",
    "Inkling2IndexOffsetWeightRename": "offset",
}


def renamings_of(model: Any) -> list[list[Any]]:
    """Return [kind, regex, targets, scope, base, extra] in the order of application."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return _rows(get_model_conversion_mapping(model, add_legacy=False))


def legacy() -> list[list[Any]]:
    """Return the renamings of every class: names of old versions of torch and TensorFlow."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return _rows(get_checkpoint_conversion_mapping("legacy") or ())


def _rows(renamings: Iterable[Any]) -> list[list[Any]]:
    return [
        [
            KINDS[type(each).__name__],
            each.compiled_sources.pattern,
            list(each.target_patterns),
            each.scope_prefix,
            each.base_model_prefix,
            getattr(each, "offset", None),
        ]
        for each in renamings
    ]


def tied_names(made: Iterable[Any]) -> dict[str, list[Any]]:
    """Return of each config whether it ties, and the names that share values.

    A name that shares values with its like in other layers has itself.
    """
    from transformers import PreTrainedModel

    tied: dict[str, list[Any]] = {}
    for model in made:
        paths = {id(node): path for path, node in reversed(list(configs.tree(model.config)))}
        names = {name: pattern_of(each) for name, each in named_parameters(model).items()}
        for place, module in model.named_modules(remove_duplicate=False):
            if not isinstance(module, PreTrainedModel):
                continue
            path = paths.get(id(module.config), "")  # "" is of a copy, too
            _, pairs = tied.setdefault(path, [ties_of(module.config), {}])
            for both in _pairs(module).items():
                left, right = (f"{place}.{name}".lstrip(".") for name in both)
                one, other = names.get(left, left), names.get(right, right)
                if left != right and (one != other or one not in pairs):
                    pairs[one] = other
    return {
        path: [ties, dict(sorted(pairs.items()))] for path, (ties, pairs) in tied.items() if pairs
    }


def _pairs(module: Any) -> dict[str, str]:
    """Return the names that share values where the module's config ties any."""
    said = vars(module.config)
    before = said.get("tie_word_embeddings")
    module.config.tie_word_embeddings = True
    try:
        return module.get_expanded_tied_weights_keys()
    except Exception:  # names that these few layers do not have
        return dict(module._tied_weights_keys or {})
    finally:
        module.config.tie_word_embeddings = before


def ties_of(config: Any) -> bool:
    """Return whether a config ties the output head to the embedding."""
    try:
        text = config.get_text_config()
    except ValueError:  # there are two: the decoder's head counts
        text = config.get_text_config(decoder=True)
    return bool(getattr(text, "tie_word_embeddings", False))


def inner_models(model: Any) -> tuple[tuple[str, str], ...]:
    """Return the models inside a model, on which its renamings depend."""
    from transformers import PreTrainedModel

    return tuple(
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    )


def free_models(model: Any) -> dict[str, list[str]]:
    """Return the models inside whose class their own config chooses.

    Returns  module -> path of its config, its model type, and whether it has a head: the key of the
             index's classes, "bases" or "causal"
    """
    import transformers
    from transformers import PreTrainedModel

    inside = list(_free_configs(model.config))
    bases = transformers.MODEL_MAPPING
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not name or not isinstance(module, PreTrainedModel):
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        for path, config in inside:
            if module.config is config:
                base = bases.get(type(config), None)
                classes = base if isinstance(base, tuple) else (base,)
                is_base = type(module) in classes
                found[name] = [path, config.model_type, "bases" if is_base else "causal"]
    return found


def _free_configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield configs of any type inside a config, with their paths."""
    from transformers import AutoConfig

    for key, kind in sorted((getattr(type(config), "sub_configs", None) or {}).items()):
        inner = getattr(config, key, None)
        if not hasattr(inner, "model_type"):
            continue
        place = f"{path}.{key}" if path else key
        if kind is AutoConfig:
            yield place, inner
        else:
            yield from _free_configs(inner, place)
