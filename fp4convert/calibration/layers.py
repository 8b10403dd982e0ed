"""Run a model a layer at a time, as the model itself runs its layers.

The model's forward starts once for every batch, and stops at every call of a layer.  That layer is
filled, run for all batches and emptied, and all forwards go on to the next.  So a layer receives
the model's arguments: masks, positions, caches, keys and values of other layers, the output of an
encoder; the code between layers runs in its place and order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from greenlet import getcurrent, greenlet
from torch.utils.weak import WeakIdKeyDictionary

from fp4convert.calibration.model import NEXT, Skeleton
from fp4convert.calibration.workdir import reading_kept
from fp4convert.errors import InputError
from fp4convert.storage.disk import write_errors_at

MODEL_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
)
PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
MAPPED_NBYTES = 1 << 16  # of a tensor that is kept in a file
REASON_LENGTH = 150  # of the words of another package in a message


@contextmanager
def filled_on_demand(skeleton: Skeleton, is_headless: bool = True) -> Iterator[Callable[[], None]]:
    """Fill what is outside the layers on first use; empty it at the end.

    is_headless  logits, the largest tensor of a model, are not computed: the head returns a part of
                 its input
    Yields       a function that empties them before the end
    """
    head = skeleton.model.get_output_embeddings() if is_headless else None
    handles: list[Any] = []
    filled: list[tuple[str, bool]] = []

    def empty() -> None:
        while filled:
            skeleton.empty(*filled.pop())

    for path, module in list(skeleton.model.named_modules()):
        if skeleton.layer_above(path) or module is head or not skeleton.state(path, False):
            continue

        def fill(module: Any, args: Any, path: str = path) -> None:
            place = (path, isinstance(module, torch.nn.MultiheadAttention))  # calls no part of it
            if any(tensor.is_meta for tensor in skeleton.state(*place).values()):
                skeleton.fill(*place)
                filled.append(place)

        handles.append(module.register_forward_pre_hook(fill))
    if head is not None:
        head.forward = lambda given: given[..., :1]
    try:
        yield empty
    finally:
        for handle in handles:
            handle.remove()
        empty()
        if head is not None:
            del head.forward


@dataclass(slots=True)
class Forward:
    """The model's forward of one batch, stopped at the call of a layer.

    inputs  of the model, by name
    layer   path of the layer that is called; None once the model is through
    args    of the call, by place
    kwargs  of the call, by name
    made    the output of the layer, or in the end of the model
    """

    inputs: Mapping[str, torch.Tensor]
    layer: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    made: Any = None
    _run: Any = None

    def go_on(self, model: Any) -> None:
        """Run the model to the next call of a layer, or to the end."""
        if self._run is None:
            self._run = greenlet(partial(model, **self.inputs))
            found = self._run.switch()
        else:
            made, self.made = self.made, None
            self.args, self.kwargs = (), {}
            found = self._run.switch(made)
        if self._run.dead:
            self.layer, self.made = None, found
        else:
            self.layer, self.args, self.kwargs = found

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the layer is called with."""
        return [
            item for item in _leaves((self.args, self.kwargs)) if isinstance(item, torch.Tensor)
        ]

    def hidden(self) -> torch.Tensor | None:
        """Return the hidden states that the layer is given, or None."""
        found = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return found if isinstance(found, torch.Tensor) else None


def _call_layer(path: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stop at a layer; compute it if no forward is held."""
    above = getcurrent().parent
    return above.switch((path, args, kwargs)) if above is not None else compute(*args, **kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    """Walk through tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


@dataclass(slots=True)
class Chain:
    """The forwards of all batches, each at a layer.

    inputs    of the model, by name, for every batch
    begin     called with the number of the batch that runs next
    folder    takes files of hidden states: between layers they are no program's memory but the
              system's, on a CPU
    is_plain  all layers so far ran for all batches, from the hidden states of the layer before, and
              returned nothing else: the rest can run again from these alone
    arity     0 for a layer that returns hidden states alone, else the length of its tuple
    stop      number of layers that were run
    """

    skeleton: Skeleton
    inputs: Sequence[Mapping[str, torch.Tensor]]
    folder: Path
    begin: Callable[[int], None] = lambda number: None
    forwards: list[Forward] = field(default_factory=list)
    is_plain: bool = True
    arity: int = 0
    stop: int = 0
    _handed: dict[int, torch.Tensor] = field(default_factory=dict)
    _shared: Any = field(default_factory=WeakValueDictionary)
    _seen: Any = field(default_factory=WeakIdKeyDictionary)

    @contextmanager
    def held(self, is_headless: bool = True) -> Iterator[Iterator[str]]:
        """Stop forwards at layers, in a context.

        Yields every layer that forwards have come to, in turn.  Each must be run for every batch
        that stands there before the next is asked for
        Raises what `stops_of` raises
        """
        with self.standing(is_headless) as empty:
            yield stops_of(((self, empty),), [[(self, n)] for n in range(len(self.inputs))])

    @contextmanager
    def standing(self, is_headless: bool = True) -> Iterator[Callable[[], None]]:
        """Let the model's forwards stand still at layers, for a while.

        Yields  what empties the parts outside of the layers
        """
        skeleton = self.skeleton
        self.forwards = [Forward(given) for given in self.inputs]
        layers = [(path, skeleton.module(path)) for path in skeleton.layers]
        for path, layer in layers:
            layer.forward = partial(_call_layer, path, layer.forward)
        hooks = [
            module.register_forward_hook(
                lambda module, args, made: mapped(made, iter(()), self.folder)
            )
            for path, module in skeleton.model.named_modules()
            if isinstance(module, torch.nn.Embedding) and not skeleton.layer_above(path)
        ]
        try:
            with torch.no_grad(), filled_on_demand(skeleton, is_headless) as empty:
                yield empty
        finally:
            for forward in self.forwards:
                forward._run = None
            for hook in hooks:
                hook.remove()
            for _, layer in layers:
                del layer.forward

    @property
    def kind(self) -> str:
        """Name the class of the model."""
        return type(self.skeleton.model).__name__

    def standing_at(self, path: str) -> list[int]:
        """Number the batches that have come to a layer."""
        return [number for number, each in enumerate(self.forwards) if each.layer == path]

    def go_on(self, number: int) -> None:
        """Run the model between two layers for one batch."""
        forward = self.forwards[number]
        handed = self._handed.pop(number, None)
        self.begin(number)
        try:
            forward.go_on(self.skeleton.model)
        except MODEL_ERRORS as error:
            self._refuse(error)
        if forward.layer is None:
            return
        if self.stop or handed is not None:
            others = [tensor for tensor in forward.tensors() if tensor is not handed]
            self.is_plain &= handed is not None and forward.hidden() is handed
            self.is_plain &= len(others) == len(forward.tensors()) - 1
        self.is_plain &= _is_plain((*forward.args, *forward.kwargs.values()))
        for tensor in forward.tensors():
            if tensor is not forward.hidden():
                self._share(tensor)

    def _refuse(self, error: Exception) -> None:
        why = " ".join(str(error).split())[:REASON_LENGTH] or type(error).__name__
        detail = f"{self.kind} cannot be run a layer at a time: {why}"
        raise InputError("calibration-model", detail, NEXT) from None

    def _share(self, tensor: torch.Tensor) -> None:
        """Hold a tensor once that layers of all batches are called with.

        Masks and positions are the same for most of them.
        """
        if tensor in self._seen or tensor.nbytes < MAPPED_NBYTES or tensor.device.type != "cpu":
            return
        data = tensor.detach().contiguous()
        head = f"{data.dtype} {tuple(data.shape)}".encode()
        content = data.reshape(-1).view(torch.uint8).numpy().data
        key = hashlib.sha256(head + hashlib.sha256(content).digest()).digest()
        known = self._shared.setdefault(key, tensor)
        self._seen[tensor] = None
        if known is not tensor:
            tensor.data = known.data

    def run(self, number: int, skeleton: Skeleton | None = None) -> Any:
        """Run the filled layer on the input of one batch; return its output.

        skeleton  whose layer runs in its place; None for the chain's own
        """
        forward = self.forwards[number]
        layer = (skeleton or self.skeleton).module(str(forward.layer))
        self.begin(number)
        before = [(tensor, tensor._version) for tensor in forward.tensors() if tensor in self._seen]
        try:
            made = layer(*forward.args, **forward.kwargs)
        except MODEL_ERRORS as error:
            self._refuse(error)
        if any(tensor._version != version for tensor, version in before):
            detail = f"{self.kind} cannot be run a layer at a time: {forward.layer} changes"
            raise InputError("calibration-model", f"{detail} what it is given in place", NEXT)
        return made

    def hand_on(self, number: int, made: Any) -> None:
        """Keep the output of the layer for one batch, for the rest of the model."""
        is_one = isinstance(made, torch.Tensor)
        items = (made,) if is_one else made if type(made) is tuple else ()
        self.is_plain &= bool(items) and isinstance(items[0], torch.Tensor)
        self.is_plain &= all(item is None for item in items[1:])
        self.arity = 0 if is_one else len(items)
        name = f"hidden-{(self.stop + 1) % 2}-{number:05}"
        paths = iter([self.folder / name])
        self.forwards[number].made = kept = mapped(made, paths, self.folder)
        first = kept if is_one else next(iter(kept), None) if type(kept) is tuple else None
        if isinstance(first, torch.Tensor):
            self._handed[number] = first

    def hand_on_from(self, number: int, other: int) -> None:
        """Give a forward the output of the layer for another with the same input.

        A model that changes it in place is refused
        """
        self.forwards[number].made = self.forwards[other].made
        handed = self._handed.get(other)
        if handed is not None:
            self._handed[number] = handed
            self._seen[handed] = None

    def hand_on_again(self, number: int, arity: int, is_last: bool) -> None:
        """Skip a layer of an earlier run.

        arity    of its output
        is_last  the last layer of that run, with hidden states in their file; those of earlier ones
                 are not needed
        Raises   OutputError for a missing file, or one of another size
        """
        forward = self.forwards[number]
        hidden = forward.hidden()
        assert hidden is not None, "a plain chain has hidden states"
        if is_last:
            path = self.folder / f"hidden-{(self.stop + 1) % 2}-{number:05}"
            hidden = _open_mapped(path, hidden)
        else:
            hidden = hidden.clone()
        self.arity = arity
        forward.made = (hidden, *[None] * (arity - 1)) if arity else hidden
        self._handed[number] = hidden


def stops_of(
    chains: Sequence[tuple[Chain, Callable[[], None]]],
    lanes: Sequence[Sequence[tuple[Chain, int]]],
    end: Callable[[int, int, Any], None] | None = None,
) -> Iterator[str]:
    """Yield every layer at which forwards of some chains stop.

    Where they stand at several (an image goes through more layers than text), the model's first.
    chains  of one model, with functions that empty its parts outside of the layers
    lanes   for every batch, its forwards: chain and number
    end     called with the number of a batch, of a lane, and the final output of that forward,
            which is not kept
    Raises  InputError where the model does with it what cannot be done
    """
    layers, path = chains[0][0].skeleton.layers, None
    while True:
        if path is not None:
            _go_on_together(path, lanes, end)
        else:  # embeddings are large: those of one chain at a time
            for chain, empty in chains:
                for number in range(len(chain.inputs)):
                    chain.go_on(number)
                empty()
        for _, empty in chains:
            empty()
        found = {forward.layer for chain, _ in chains for forward in chain.forwards}
        path = min(filter(None, found), key=layers.__getitem__, default=None)
        if path is None:
            return
        for chain, _ in chains:
            chain.is_plain &= len(found) == 1
        yield path
        for chain, _ in chains:
            chain.stop += 1


def _go_on_together(
    path: str, lanes: Sequence[Sequence[tuple[Chain, int]]], end: Callable[..., None] | None
) -> None:
    """Let all forwards that stand at a layer go on, batch by batch."""
    for batch, forwards in enumerate(lanes):
        for place, (chain, number) in enumerate(forwards):
            forward = chain.forwards[number]
            if forward.layer != path:
                continue
            chain.go_on(number)
            if end is not None and forward.layer is None:
                made, forward.made = forward.made, None
                end(batch, place, made)
                del made


def _is_plain(value: Any) -> bool:
    """Tell whether a layer has no argument that it could keep state in."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def mapped(value: Any, paths: Iterator[Path], folder: Path) -> Any:
    """Copy the tensors of a value to files, which are mapped into memory.

    paths  the first tensor's, which stays; files of others have no name, and go with the tensor
    """
    if isinstance(value, torch.Tensor):
        path = next(paths, None) if value.numel() else None
        if path is None and (value.nbytes < MAPPED_NBYTES or value.device.type != "cpu"):
            return value
        home = path or folder / "hidden-unnamed"
        with write_errors_at(home):
            home.unlink(missing_ok=True)
            home.write_bytes(b"")
            made = torch.from_file(str(home), shared=True, size=value.numel(), dtype=value.dtype)
            made = made.reshape(value.shape).copy_(value)
            if path is None:
                home.unlink()
        return made if value.device.type == "cpu" else value
    if type(value) in (tuple, list):
        return type(value)(mapped(item, paths, folder) for item in value)
    return value


def _open_mapped(path: Path, like: torch.Tensor) -> torch.Tensor:
    """Map hidden states of a shape and dtype that an earlier run kept."""
    with reading_kept(path):
        if (nbytes := path.stat().st_size) != like.nbytes:
            raise ValueError(f"{nbytes:,} bytes; {like.nbytes:,} hold {tuple(like.shape)}")
    found = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
    return found.reshape(like.shape).to(like.device)
