"""Turn the memory of a card into the largest size of an artifact: --fit.

weights = card x SHARE - cache of keys and values for one context; a serving engine keeps the rest
for its kernels, activations and graphs: a tenth is this project's assumption.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp4convert.engines.gpus import find_gpu
from fp4convert.errors import InputError
from fp4convert.options.access import MOST_MEMORY, read_gigabytes
from fp4convert.options.writing import QuantizeOptions
from fp4convert.progress import size_text, tokens_text
from fp4convert.storage.open import open_with_components
from fp4convert.storage.source import stopping

SHARE = 0.9
USUAL_CONTEXT = 32_768  # tokens, or as many as the model has positions for
BITS = {None: 16.0, "fp8": 8.0, "nvfp4": 4.5}  # of an element of the cache, with its scales
GROWING, SLIDING = frozenset({"full_attention", "attention"}), frozenset({"sliding_attention"})


def fit_options(options: QuantizeOptions) -> QuantizeOptions:
    """Return the options with a target size in the place of --fit.

    Raises  InputError beside another target, for a model whose cache config.json does not tell, and
            where the cache alone fills the card
    """
    if options.fit is None:
        if options.context is not None:
            detail = f"--context {options.context} is for --fit, which is not given"
            raise InputError("idle-option", detail, "Add --fit GB, or leave it out.")
        return options
    if (options.target_size, options.target_bits) != (None, None):
        detail = "--fit and a target are given; expected one of them"
        raise InputError("target-twice", detail, "Leave one out.")
    card = _as_nbytes(options.fit)
    source, _ = open_with_components(os.fspath(options.source), options.access())
    with stopping(source):
        config = source.checkpoint.config
    source.stop()
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    positions = text.get("max_position_embeddings")
    most = positions if isinstance(positions, int) else USUAL_CONTEXT
    context = options.context or min(USUAL_CONTEXT, most)
    cache = cache_nbytes(text, context, options.kv_cache)
    if cache is None:
        detail = f"{source.name}: config.json does not tell what its cache of keys and values holds"
        step = "Give the size of the artifact itself: --target-size GB."
        raise InputError("target-range", f"{detail}, which --fit has to leave room for", step)
    left = int(card * SHARE) - cache
    words = f"{size_text(card)} x {SHARE:g} - {size_text(cache)} for the cache of"
    words = f"{words} {tokens_text(context)}"
    if left <= 0:
        detail = f"--fit {options.fit}: {words} leaves nothing for weights"
        raise InputError("target-range", detail, "Give a shorter --context, or --kv-cache fp8.")
    options.tell(f"fits: {words} = {size_text(left)} for the artifact")
    gpu = options.gpu or (str(options.fit) if find_gpu(str(options.fit)) else None)
    return replace(options, fit=None, context=None, gpu=gpu, target_size=left / 1e9)


def _as_nbytes(card: float | str) -> int:
    """Return the bytes of 24, "24GB", "24 GiB" or "rtx3090"; else raise."""
    if gpu := find_gpu(str(card)):
        return gpu.memory * 10**9
    try:
        number = read_gigabytes(str(card))
    except ValueError:
        number = 0.0
    if not 0 < number < MOST_MEMORY:
        detail = f"--fit {card}; expected a card or a number of GB: rtx5090, 24GB"
        raise InputError("target-range", detail, "Give the memory of the card: --fit 24GB.")
    return int(number * 10**9)


def cache_nbytes(config: Mapping[str, Any], context: int, cache: str | None) -> int | None:
    """Count the bytes of keys and values of one sequence; None where unknown.

    config   of the language model
    Formula  layers x 2 x key and value heads x head size x tokens x bits / 8; with latent attention
             (kv_lora_rank) one vector of kv_lora_rank + qk_rope_head_dim a layer; layers that slide
             keep their window, other kinds of layer_types keep no cache that grows
    """

    def number(*names: str) -> int | None:
        values = (config.get(name) for name in names)
        return next((one for one in values if type(one) is int and one > 0), None)

    layers, heads = number("num_hidden_layers", "n_layer"), number("num_attention_heads", "n_head")
    width = number("hidden_size", "n_embd")
    if layers is None or heads is None or width is None:
        return None
    kinds = config.get("layer_types")
    windows = [context] * layers
    if isinstance(kinds, list) and len(kinds) == layers:
        window = min(context, number("sliding_window") or context)
        growing = {**dict.fromkeys(GROWING, context), **dict.fromkeys(SLIDING, window)}
        windows = [growing.get(str(kind), 0) for kind in kinds]
    elif any(key.startswith(("mamba", "ssm", "linear_")) for key in config):
        return None
    if rank := number("kv_lora_rank"):
        elements = rank + (number("qk_rope_head_dim") or 0)
    else:
        stored = number("num_key_value_heads") or heads
        elements = 2 * stored * (number("head_dim") or width // heads)
    return int(sum(windows) * elements * BITS[cache] / 8)
