"""The renamings that transformers applies on loading, as rows of the table."""

from __future__ import annotations

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

    return [
        [
            KINDS[type(each).__name__],
            each.compiled_sources.pattern,
            list(each.target_patterns),
            each.scope_prefix,
            each.base_model_prefix,
            getattr(each, "offset", None),
        ]
        for each in get_model_conversion_mapping(model, add_legacy=False)
    ]


def inner_models(model: Any) -> tuple[tuple[str, str], ...]:
    """Return the models inside a model, on which its renamings depend."""
    from transformers import PreTrainedModel

    return tuple(
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    )
