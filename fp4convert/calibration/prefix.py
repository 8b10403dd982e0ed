"""Gather the inputs of weights behind rounded layers.

Two streams run through every layer: the original's, and one through weights as quantize will round
them (the quantized prefix).  The linear layers of a layer are rounded one input after the other;
beside H of the prefix's inputs stands the correction of their targets (methods/targets.py).
With 4-bit activations inputs are rounded as engines do it; in one shot these are the original's.
Experts, layers with few tokens and those that get other tokens than their layer stay as they are in
the prefix, and have statistics of the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.activations import Round, round_call
from fp4convert.calibration.calibration_file import header_of
from fp4convert.calibration.layers import Chain, mapped
from fp4convert.calibration.methods.gptq import one_thread
from fp4convert.calibration.methods.targets import Correction, largest_of, over_gram, retargeted
from fp4convert.calibration.model import Seat, Skeleton
from fp4convert.calibration.moments import Arrays, Moments, block_width
from fp4convert.calibration.observers import Watch
from fp4convert.calibration.residual_stream import trace_stream
from fp4convert.calibration.statistics import TARGETS, Calibration, are_few
from fp4convert.calibration.workdir import write_part
from fp4convert.numerics.codec import Float32s, as_floats
from fp4convert.storage.source import Source

FULL = "full"  # the Grams beside which the residual stream is made up for; blocks overfit by it
BLEND = 0.5  # of the way to W* where inputs are rounded, too: all of it overfits


@dataclass(frozen=True, slots=True)
class Goal:
    """How quantize will round, which corrections of targets depend on.

    settings       format, scale_rule, method and activations, as the file's notes have them
    groups         module -> the modules of its scale group, itself among them
    round_inputs   makes the rounding of inputs from their largest and mean squares; None: none
    round_weights  returns the rounded values of modules by statistics of these; None: one shot, in
                   which the layers before stay exact
    """

    settings: Mapping[str, object]
    groups: Mapping[str, tuple[str, ...]]
    round_inputs: Callable[[float, NDArray[np.float64]], Round] | None = None
    round_weights: Callable[[Sequence[str], Calibration], Mapping[str, Float32s]] | None = None

    @property
    def streams(self) -> int:
        """Count the runs of every batch."""
        return 1 if self.round_weights is None else 2

    @property
    def blend(self) -> float:
        """Return how far targets move to W*."""
        return 1.0 if self.round_inputs is None else BLEND

    def notes(self) -> dict[str, str]:
        """Return the notes of a file with corrections."""
        return {TARGETS: json.dumps(self.settings)}


class _Given(NamedTuple):
    """The inputs of a linear layer in one batch.

    x, rounded  (tokens, columns): of the original, and as the prefix multiplies them
    lack        (tokens, rows): the original's residual stream less the prefix's, or None
    """

    x: torch.Tensor
    rounded: torch.Tensor
    lack: torch.Tensor | None


class _ReachedError(Exception):
    """A run has come to its linear layer, and need not go on."""


class Streams(NamedTuple):
    """The forwards that stand at a layer.

    state      folder for inputs
    originals  numbers of forwards of the original; others: of the prefix, in the same order
    """

    source: Source
    skeleton: Skeleton
    state: Path
    path: str
    originals: Sequence[int]
    others: Sequence[int]


@dataclass(slots=True)
class PrefixLayer:
    """The linear layers of a layer, corrected and rounded in their order.

    members    linear layers that may be
    inputs     linear layer that holds statistics -> (tokens, columns) by forward of the original
    residuals  linear layer that is added to the residual stream -> path of the module that is given
               the stream before, in the layer; "" for the layer itself
    streams    (that path, number of a forward) -> the stream
    """

    at: Streams
    goal: Goal
    gram: str
    watch: Watch
    members: list[str] = field(default_factory=list)
    inputs: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    residuals: dict[str, str] = field(default_factory=dict)
    streams: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        stored = self.at.skeleton.stored
        inside = self._linears()
        for module in filter(inside.__contains__, self.goal.groups):
            seat = inside[module]
            if len(stored.get(f"{seat.path}.{seat.parameter}", ())) == 1:
                self.members.append(module)

    def _linears(self) -> dict[str, Seat]:
        """Find the linear layers of the layer that are no experts."""
        seats, above = self.at.skeleton.seats, self.at.skeleton.layer_above
        return {
            module: seat
            for module, seat in seats.items()
            if seat.expert is None and above(seat.path) == self.at.path
        }

    def _owner(self, module: str) -> Any:
        """Return the module of the model that multiplies with a linear layer."""
        return self.at.skeleton.module(self.at.skeleton.seats[module].path)

    def record(self, module: str, given: torch.Tensor) -> None:
        """Keep an input of the original."""
        own = self.inputs.setdefault(module, {})
        before = own.get(self._number)
        rows = given.detach().reshape(-1, given.shape[-1])
        own[self._number] = self._keep(rows if before is None else torch.cat([before, rows.cpu()]))

    def run_originals(self, chain: Chain) -> None:
        """Run the original, and keep what linear layers are given."""
        layer, inside = self.at.skeleton.module(self.at.path), f"{self.at.path}."
        places = {self.at.skeleton.seats[m].path.removeprefix(inside): m for m in self.members}
        self.watch.record, self.watch.recorded = self.record, self._linears()
        for number in self.at.originals:
            self._number = number
            if self.at.others and self.gram == FULL and number == self.at.originals[0]:
                hidden = chain.forwards[number].hidden()
                run = partial(chain.run, number)
                made, self.residuals, streams = trace_stream(layer, hidden, places, run)
                self.streams |= {(path, number): self._keep(x) for path, x in streams.items()}
            else:
                made = self._run_keeping(chain, number)
            chain.hand_on(number, made)
        self.watch.recorded = ()

    def _keep(self, x: torch.Tensor) -> torch.Tensor:
        """Keep float32 in a file without a name, in rows."""
        rows = x.detach().reshape(-1, x.shape[-1]).float().cpu()
        made: torch.Tensor = mapped(rows, iter(()), self.at.state)
        return rows.clone() if made is rows else made

    def _run_keeping(self, chain: Chain, number: int, at: str | None = None) -> Any:
        """Run a forward, and keep the streams that linear layers are added to.

        at       ends the run at this linear layer
        Returns  the output, or the input of that linear layer
        """
        reached: list[torch.Tensor] = []

        def keep(path: str, module: Any, args: Any) -> None:
            self.streams[path, number] = self._keep(args[0])

        def stop(module: Any, args: Any, kwargs: Any) -> None:
            reached.append(next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v)))
            raise _ReachedError

        hooks = [
            self.at.skeleton.module(f"{self.at.path}.{place}").register_forward_pre_hook(
                partial(keep, place)
            )
            for place in set(self.residuals.values()) - {""}
        ]
        if at is not None:
            hooks.append(self._owner(at).register_forward_pre_hook(stop, with_kwargs=True))
        try:
            return chain.run(number)
        except _ReachedError:
            return reached[0].reshape(-1, reached[0].shape[-1])
        finally:
            _remove(hooks)

    def correct(self, chain: Chain) -> None:
        """Correct and round linear layers, and run the prefix to the end.

        Statistics of the prefix take the place of the original's; layers that are not corrected get
        their Gram matrices.
        """
        watch, goal = self.watch, self.goal
        hooks: list[Any] = []
        watch.is_looking = False
        try:
            for holder in list(self.inputs):
                modules = [m for m in self.members if watch.inputs.get(m, m) == holder]
                diagonal = watch.moments.pop(holder)
                if self._is_whole(chain, holder, modules):
                    make = goal.round_inputs(*diagonal.size()) if goal.round_inputs else None
                    given = self._gather(chain, holder, make)
                    watch.finished[holder] = self._statistics(holder, modules, given)
                    if goal.round_weights is not None:
                        self._round(holder, modules)
                    if make is not None:
                        hook = partial(round_call, make)
                        for owner in map(self._owner, modules):
                            hooks.append(owner.register_forward_pre_hook(hook, with_kwargs=True))
                else:  # statistics of the original, which have no Gram matrix yet
                    watch.moments[holder] = self._moments(holder)
                    for x in self.inputs[holder].values():
                        watch.moments[holder].add(x.to(self.at.skeleton.device))
                del self.inputs[holder]  # as large as a hidden state of all tokens
            for number in self.at.others:
                chain.hand_on(number, chain.run(number))
        finally:
            watch.is_looking = True
            _remove(hooks)

    def _is_whole(self, chain: Chain, holder: str, modules: Sequence[str]) -> bool:
        """Tell whether all tokens went through these, and they are scale groups."""
        columns = self.at.skeleton.linears[holder].shape[1]
        tokens = {
            number: 0 if hidden is None else hidden[..., 0].numel()
            for number in self.at.originals
            for hidden in [chain.forwards[number].hidden()]
        }
        seen = {number: len(x) for number, x in self.inputs[holder].items()}
        is_enough = not are_few(sum(seen.values()), block_width(self.gram, columns))
        groups = (set(self.goal.groups[module]) <= set(modules) for module in modules)
        return seen == tokens and is_enough and bool(modules) and all(groups)

    def _moments(self, holder: str) -> Moments:
        skeleton = self.at.skeleton
        return Moments(skeleton.linears[holder].shape[1], self.gram, skeleton.device)

    def _gather(self, chain: Chain, holder: str, make: Round | None) -> Iterator[_Given]:
        """Yield the inputs of a linear layer, batch by batch."""
        device = self.at.skeleton.device
        for place, number in enumerate(self.at.originals):
            x, lack = self.inputs[holder][number].to(device), None
            given = x
            if self.at.others:
                other = self.at.others[place]
                given = self._run_keeping(chain, other, holder).float()
                source = self.residuals.get(holder)
                if source is not None:
                    streams = [self._stream(chain, source, one) for one in (number, other)]
                    lack = streams[0] - streams[1]
            yield _Given(x, given if make is None else make(given), lack)

    def _stream(self, chain: Chain, source: str, number: int) -> torch.Tensor:
        kept = chain.forwards[number].hidden() if source == "" else self.streams[source, number]
        assert kept is not None, "a layer without hidden states has no stream"
        return kept.reshape(-1, kept.shape[-1]).float().to(self.at.skeleton.device)

    def _statistics(self, holder: str, modules: Sequence[str], given: Iterator[_Given]) -> Arrays:
        """Return statistics of the prefix's inputs, and corrections of targets."""
        moments, device = self._moments(holder), self.at.skeleton.device
        assert moments.products is not None, "Grams are kept"
        differences = torch.zeros_like(moments.products)
        rows, columns = self.at.skeleton.linears[holder].shape
        is_added = holder in self.residuals and [*modules] == [holder]
        lacks = torch.zeros((1, rows, columns), device=device) if is_added else None
        for x, rounded, lack in given:
            moments.add(rounded)
            moments.multiply(x - rounded, rounded, differences)
            if lack is not None and lacks is not None:
                lacks[0] += lack.T @ rounded
        tokens, h = max(1, moments.tokens), moments.products / max(1, moments.tokens)
        if lacks is None:
            inputs = self.goal.blend * over_gram(differences / tokens, h, columns)
            correction = Correction(inputs.cpu().numpy(), None)
            found: Arrays = {f"{holder}.input_correction": inputs.cpu().numpy()}
        else:
            weights = torch.from_numpy(as_floats(self._weights(holder).rows(0, rows))).to(device)
            pull = (weights @ differences + lacks) / tokens
            change = (self.goal.blend * over_gram(pull, h, columns))[0].cpu().numpy()
            correction = Correction(None, change)
            found = {f"{holder}.target_change": change}
        with one_thread():
            amaxes = {m: largest_of(retargeted(self._weights(m), correction)) for m in modules}
        for module in modules:
            amax = max(amaxes[member] for member in self.goal.groups[module])
            found[f"{module}.target_amax"] = np.asarray(amax, np.float32)
        return {**moments.arrays(holder), **found}

    def _weights(self, module: str) -> Any:
        linear = self.at.skeleton.linears[module]
        return linear.coding.weights(linear, self.at.source)

    def _round(self, holder: str, modules: Sequence[str]) -> None:
        """Give linear layers the values that quantize will make of this file."""
        assert self.goal.round_weights is not None, "only the prefix is rounded"
        path = self.at.state / "rounded.safetensors"
        write_part(path, self.watch.finished[holder], {})
        refs = {ref.name: ref for ref in header_of(path)[1]}
        inputs = {module: holder for module in modules if module != holder}
        statistics = Calibration(path, "", {"gram": self.gram}, inputs, refs)
        for module, values in self.goal.round_weights(modules, statistics).items():
            parameter = self._owner(module)._parameters[self.at.skeleton.seats[module].parameter]
            is_spread = self.at.skeleton.linears[module].coding.is_spread
            made = torch.from_numpy(values.T if is_spread else values)
            parameter.data.copy_(made.reshape(parameter.shape))
        path.unlink()


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
