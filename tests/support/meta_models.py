"""Models that transformers makes of its own configs, with few layers and no values."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

MOST_LAYERS = 4
LAYERS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
MAPPINGS = (  # what says most of a model comes first
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)


LACKING = {  # what transformers' own config of a model type says nothing of, and its class reads
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
}


def model_of(model_type: str) -> Any:
    """The model of a model type; LookupError where transformers has no class for it."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**LACKING.get(model_type, {}))
    _shorten(config)
    mappings = [getattr(transformers, name) for name in MAPPINGS]
    made_by = next((each[type(config)] for each in mappings if type(config) in each), None)
    if made_by is None:
        raise LookupError(model_type)
    with torch.device("meta"):
        return (made_by[0] if isinstance(made_by, tuple) else made_by)(config)


def _shorten(config: Any) -> None:
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            _shorten(value)
    for key in LAYERS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(getattr(config, key), MOST_LAYERS))
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:MOST_LAYERS]


def model_classes() -> Iterator[type]:
    """Every class of transformers that is a model with a config of its own."""
    from transformers import PreTrainedModel, models

    for found in pkgutil.iter_modules(models.__path__):
        name = f"{models.__name__}.{found.name}.modeling_{found.name}"
        try:
            module = importlib.import_module(name)
        except ImportError:  # it has another name, or wants a package
            continue
        for made in vars(module).values():
            is_model = isinstance(made, type) and issubclass(made, PreTrainedModel)
            if is_model and made.__module__ == name and getattr(made, "config_class", None):
                yield made


def default_model(of: Any) -> Any:
    """The model of a class and its default config."""
    import torch

    config = of.config_class()
    _shorten(config)
    with torch.device("meta"):
        return of(config)
