"""Run the layers of a model one by one.

The model's own forward is run with its layers held still, so that every layer gets the masks,
positions and whatever else the model means for it; then each layer can be run by itself on what the
layer before it gave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fp4convert.calibration.model import NEXT, Skeleton
from fp4convert.errors import InputError

MODEL_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
)
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

# What a layer is called with beside the hidden states: arguments by place and by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]
# Tensors that layers are called with, by the sha256 of their content: masks and positions are the
# same for most samples and layers.
SharedTensors = dict[bytes, torch.Tensor]


class _Caught(Exception):  # noqa: N818 - no failure: the last layer was reached
    pass


def _share_tensors(value: Any, known: SharedTensors) -> Any:
    """Return the same value, its tensors shared with those known before.

    Raises InputError for what no layer should be handed
    """
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().cpu()
        head = f"{data.dtype} {tuple(data.shape)}".encode()
        content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return known.setdefault(hashlib.sha256(head + content).digest(), value)
    if isinstance(value, tuple | list):
        return type(value)(_share_tensors(item, known) for item in value)
    if type(value) is dict:
        return {key: _share_tensors(item, known) for key, item in value.items()}
    if isinstance(value, PLAIN):
        return value
    detail = f"layers pass {type(value).__name__} to each other besides hidden states"
    raise InputError(
        "calibration-model", f"{detail}; expected layers that need only hidden states", NEXT
    )


@contextmanager
def filled_on_demand(skeleton: Skeleton, is_headless: bool = True) -> Iterator[None]:
    """Fill what is outside the layers on first use; empty it at the end.

    is_headless  logits, the largest tensor of a model, are not computed: what makes them gives back
                 a part of what it is given
    """
    head = skeleton.model.get_output_embeddings() if is_headless else None
    handles, filled = [], []
    for path, module in list(skeleton.model.named_modules()):
        is_inside = any(f"{path}.".startswith(f"{layer}.") for layer in skeleton.layers)
        if is_inside or module is head or not module._parameters:
            continue

        def fill(module: Any, args: Any, path: str = path) -> None:
            if any(tensor is not None and tensor.is_meta for tensor in module._parameters.values()):
                skeleton.fill(path, is_deep=False)
                filled.append(path)

        handles.append(module.register_forward_pre_hook(fill))
    if head is not None:
        head.forward = lambda given: given[..., :1]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for path in filled:
            skeleton.empty(path, is_deep=False)
        if head is not None:
            del head.forward


@contextmanager
def _replaced_layers(skeleton: Skeleton, compute: Callable[..., Any]) -> Iterator[None]:
    """Let layers compute something else, for a while.

    compute  is called with the number of the layer, and what the layer is called with
    """
    layers = [skeleton.module(path) for path in skeleton.layers]
    for number, layer in enumerate(layers):
        layer.forward = partial(compute, number)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def begin(
    skeleton: Skeleton, ids: torch.Tensor, known: SharedTensors
) -> tuple[torch.Tensor, list[Call]]:
    """Record what the first layer is given, and all layers are called with.

    ids     (samples, length) tokens
    known   tensors that layers were called with before; takes in those of this call
    Raises  InputError where layers are not run one after the other, each on what the one before
            gave and nothing else
    """
    kind = type(skeleton.model).__name__
    calls: list[Call] = []
    kept: list[torch.Tensor] = []  # alive, so that no other tensor gets the id of one of them
    handed_ids: set[int] = set()

    def record(number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        is_handed = any(id(item) in handed_ids for item in named)
        if number != len(calls) or is_handed or hidden.shape[:2] != ids.shape:
            detail = f"{kind} does not run its layers one after the other"
            raise InputError("calibration-model", f"{detail} on hidden states only", NEXT)
        kept.append(hidden)
        calls.append((_share_tensors(args, known), _share_tensors(kwargs, known)))
        if len(calls) == len(skeleton.layers):
            raise _Caught
        handed = hidden.clone()
        handed_ids.add(id(handed))
        kept.append(handed)
        return handed

    with torch.no_grad(), _replaced_layers(skeleton, record):
        try:
            skeleton.model(input_ids=ids)
        except _Caught:
            return kept[0], calls
        except MODEL_ERRORS as error:  # the model does more with what a layer gives
            why = str(error).split("\n")[0][:150]
            detail = f"{kind} cannot be run a layer at a time: {why}"
            raise InputError("calibration-model", detail, NEXT) from None
    detail = f"{kind} does not run all of its {len(skeleton.layers)} layers"
    raise InputError("calibration-model", detail, NEXT)


def step(
    skeleton: Skeleton, number: int, hidden: torch.Tensor, call: Call
) -> tuple[torch.Tensor, bool]:
    """Run one layer, filled, on hidden states.

    Returns  what it makes of them, and whether that was the first of several things
    """
    args, kwargs = call
    made = skeleton.module(skeleton.layers[number])(hidden, *args, **kwargs)
    return (made[0], True) if isinstance(made, tuple) else (made, False)


def end(skeleton: Skeleton, ids: torch.Tensor, hidden: torch.Tensor, is_tuple: bool) -> None:
    """Run what is before and after the layers, whose last one gave `hidden`."""

    def give(number: int, own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = hidden if number == len(skeleton.layers) - 1 else own
        return (made,) if is_tuple else made

    with torch.no_grad(), _replaced_layers(skeleton, give):
        skeleton.model(input_ids=ids)
