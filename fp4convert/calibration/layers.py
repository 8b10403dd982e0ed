"""Run the layers of a model one by one.

The model's own forward is run with its layers held still, so that every layer gets the masks, positions and whatever else the
model means for it; then each layer can be run by itself on what the layer before it gave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """What a layer is called with, beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Caught(Exception):  # noqa: N818 - no failure: the last layer was reached
    pass


@dataclass(slots=True)
class Shelf:
    """Tensors that layers are called with, each content once: masks and positions are the same for most samples and layers."""

    _known: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def put(self, value: Any) -> Any:
        """The same value, its tensors shared with what was put here before; InputError for what no layer should be handed."""
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().cpu()
            head = f"{data.dtype} {tuple(data.shape)}".encode()
            key = hashlib.sha256(
                head + data.reshape(-1).view(torch.uint8).numpy().tobytes()
            ).digest()
            return self._known.setdefault(key, value)
        if isinstance(value, tuple | list):
            return type(value)(self.put(item) for item in value)
        if type(value) is dict:
            return {key: self.put(item) for key, item in value.items()}
        if isinstance(value, PLAIN):
            return value
        detail = f"layers hand on {type(value).__name__} to each other beside hidden states; expected layers that stand alone"
        raise InputError("calibration-model", detail, NEXT)


@contextmanager
def filled_on_demand(skeleton: Skeleton, is_headless: bool = True) -> Iterator[None]:
    """Meanwhile what is outside the layers is filled when it is first used, and emptied in the end.

    is_headless  logits, the largest tensor of a model, are not computed: what makes them gives back a part of what it is given
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
def _replaced(skeleton: Skeleton, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile layer number i computes what make(i) says."""
    layers = [skeleton.module(path) for path in skeleton.layers]
    for number, layer in enumerate(layers):
        layer.forward = make(number)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def begin(skeleton: Skeleton, ids: torch.Tensor, shelf: Shelf) -> tuple[torch.Tensor, list[Call]]:
    """What the first layer is given for these tokens (samples, length), and what every layer is called with.

    Raises InputError where layers are not run one after the other, each on what the one before gave and nothing else
    """
    calls: list[Call] = []
    first: list[torch.Tensor] = []
    given: set[int] = set()

    def make(number: int) -> Callable[..., Any]:
        def catch(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            named = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
            if (
                number != len(calls)
                or any(id(item) in given for item in named)
                or hidden.shape[:2] != ids.shape
            ):
                detail = f"{type(skeleton.model).__name__} does not run its layers one after the other on hidden states alone"
                raise InputError("calibration-model", detail, NEXT)
            first.append(hidden)
            calls.append(Call(shelf.put(args), shelf.put(kwargs)))
            if len(calls) == len(skeleton.layers):
                raise _Caught
            handed = hidden.clone()
            given.add(id(handed))
            first.append(handed)
            return handed

        return catch

    with torch.no_grad(), _replaced(skeleton, make):
        try:
            skeleton.model(input_ids=ids)
        except _Caught:
            return first[0], calls
        except (
            MODEL_ERRORS
        ) as error:  # what it does with what a layer gives is beyond one hidden state
            detail = f"{type(skeleton.model).__name__} cannot be run a layer at a time: {str(error).split(chr(10))[0][:150]}"
            raise InputError("calibration-model", detail, NEXT) from None
    detail = (
        f"{type(skeleton.model).__name__} does not run all of its {len(skeleton.layers)} layers"
    )
    raise InputError("calibration-model", detail, NEXT)


def step(
    skeleton: Skeleton, number: int, hidden: torch.Tensor, call: Call
) -> tuple[torch.Tensor, bool]:
    """What a layer, filled, makes of hidden states; whether it gives it as the first of several things."""
    made = skeleton.module(skeleton.layers[number])(hidden, *call.args, **call.kwargs)
    return (made[0], True) if isinstance(made, tuple) else (made, False)


def end(skeleton: Skeleton, ids: torch.Tensor, hidden: torch.Tensor, is_tuple: bool) -> None:
    """Run what is before and after the layers, whose last one gave `hidden`."""

    def make(number: int) -> Callable[..., Any]:
        def give(own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = hidden if number == len(skeleton.layers) - 1 else own
            return (made,) if is_tuple else made

        return give

    with torch.no_grad(), _replaced(skeleton, make):
        skeleton.model(input_ids=ids)
