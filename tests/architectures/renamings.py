"""The renamings that transformers applies on loading, as rows of the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

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
