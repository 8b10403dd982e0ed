"""Measure what the outputs of a model lose when one part of it is rounded.

A part changes its format as one (checkpoint/module_names.py).  Text runs through the model, and
once more for every part and format, with the weights of this part rounded to nearest.  The loss is
KL(model || rounded) in nats a token; for a model without predictions it is the squared error of its
output over the square.

One layer is in memory at a time.  The run of a part takes the model's hidden states up to the layer
of the part, and computes from there on.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.activations import Rounding, round_alone, round_call
from fp4convert.calibration.experts import FIRST_PARAMETERS
from fp4convert.calibration.layers import Chain, stops_of
from fp4convert.calibration.model import Lazy, Skeleton
from fp4convert.calibration.multimodal import placeholders_of
from fp4convert.calibration.observers import Watch, watching
from fp4convert.calibration.samples import Batch, Samples, batches_of, inputs_of
from fp4convert.calibration.statistics import KL, OUTPUT
from fp4convert.calibration.workdir import reading_kept
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.module_names import part_of
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_matrix
from fp4convert.numerics.formats import FORMATS, Format
from fp4convert.numerics.fp8_rounding import find_scales, round_to_fp8
from fp4convert.numerics.matrices import InMemory
from fp4convert.progress import Phases
from fp4convert.recipes.recipe import Recipe
from fp4convert.storage.disk import replace_file

MOST_TOKENS = 8192  # of the samples, spread evenly over them
HIDDEN_NBYTES = 8 * 10**9  # of hidden states of all runs that go on together
CHUNK_NBYTES = 1 << 25  # of log-probabilities in float64, each of two
SOURCE = 0  # the run of the model as it is

Losses = dict[str, dict[str, float]]
"""{module: {format: its share of the loss of its part}}"""


class Part(NamedTuple):
    """Modules that change their format as one, in one layer of the model."""

    layer: str
    modules: tuple[str, ...]


class Lane(NamedTuple):
    """A run with one part in a format."""

    part: Part
    format: Format


@dataclass(frozen=True, slots=True)
class LossRun:
    """The model and the samples of a measurement of outputs.

    samples  of the calibration; some are used
    state    folder for measurements and hidden states
    rounds_inputs  of a part in four bits its inputs are rounded, too, as engines do
    """

    skeleton: Skeleton
    recipe: Recipe
    samples: Samples
    state: Path
    phases: Phases = field(default_factory=Phases)
    rounds_inputs: bool = False

    @property
    def kind(self) -> str:
        """Return the kind of losses: of predictions, if the model has some."""
        return KL if self.skeleton.model.can_generate() else OUTPUT

    @property
    def hidden_nbytes(self) -> int:
        """Count the bytes of hidden states of all runs that go on together."""
        return self._run_nbytes * max(1 + len(lanes) for lanes in self.rounds())

    @property
    def _run_nbytes(self) -> int:
        """Count the bytes of one run: embedded, input and output of a layer."""
        hidden = int(getattr(self.skeleton.model.config.get_text_config(), "hidden_size", 0))
        return 3 * 4 * hidden * sum(map(len, self.chosen()))

    def chosen(self) -> Samples:
        """Choose samples of so many tokens, spread evenly; one at least."""
        mean = sum(map(len, self.samples)) / len(self.samples)
        count = min(len(self.samples), max(1, int(MOST_TOKENS / mean)))
        return [self.samples[number * len(self.samples) // count] for number in range(count)]

    def parts(self) -> list[Part]:
        """Find the parts in layers that the recipe does not keep, in their order."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for module, seat in self.skeleton.seats.items():
            layer = self.skeleton.layer_above(seat.path)
            if layer is not None and self.recipe.reason_to_keep(module) is None:
                found[layer, part_of(module, self.recipe)].append(module)
        order = self.skeleton.layers
        parts = (Part(layer, tuple(modules)) for (layer, _), modules in found.items())
        return sorted(parts, key=lambda part: order[part.layer])

    def rounds(self) -> list[list[Lane]]:
        """Divide the runs so that hidden states take bounded room."""
        most = max(1, HIDDEN_NBYTES // max(1, self._run_nbytes))
        lanes = [Lane(part, fmt) for part in self.parts() for fmt in FORMATS.values()]
        return [lanes[first : first + most] for first in range(0, len(lanes), most)] or [[]]

    def words(self) -> str:
        """Describe the cost for a person."""
        rounds, tokens = self.rounds(), sum(map(len, self.chosen()))
        text = f"sensitivity: {len(self.parts())} parts in {len(FORMATS)} formats, a run of"
        text += f" {tokens:,} tokens for each, from its layer on"
        return text if len(rounds) == 1 else f"{text}; weights are read {len(rounds)} times for it"

    def notes(self) -> dict[str, str]:
        """Return the notes of a file that holds such losses."""
        return {
            "loss": self.kind,
            "loss_formats": json.dumps(list(FORMATS)),
            "loss_tokens": str(sum(map(len, self.chosen()))),
        }


def as_arrays(losses: Losses) -> dict[str, NDArray[np.generic]]:
    """Return the statistics of a calibration file, as its head has them."""
    return {
        f"{module}.output_losses": np.array([own[name] for name in FORMATS], np.float32)
        for module, own in losses.items()
    }


def measure_losses(run: LossRun) -> Losses:
    """Measure every part in every format, after those of an earlier run.

    Raises InputError for a model that cannot run a layer at a time, or computes NaN
    """
    losses: Losses = {}
    batches, rounds = batches_of(run.chosen()), run.rounds()
    layers = len(rounds) * len(run.skeleton.layers)
    run.phases.begin("sensitivity", layers, lambda count: f"{count:.0f} layers")
    for number, lanes in enumerate(rounds):
        kept = run.state / f"losses-{number:05}.json"
        if kept.exists():
            with reading_kept(kept):
                found = [float(value) for value in json.loads(kept.read_text())]
        else:
            folder = run.state / "runs"
            folder.mkdir(exist_ok=True)
            found = _Runs(run, lanes, batches, folder).measure()
            replace_file(kept, json.dumps(found).encode())
        for lane, loss in zip(lanes, found, strict=True):
            for module in lane.part.modules:
                own = losses.setdefault(module, {})
                own[lane.format.name] = loss / len(lane.part.modules)
    return losses


@dataclass(slots=True)
class _Runs:
    """The runs of some parts, beside the run of the model.

    _done  layers that were run
    _watch  runs experts one by one
    _kept  the model's output for the batch that ends
    _sums  of every lane: of losses, and of their divisors
    """

    run: LossRun
    lanes: Sequence[Lane]
    batches: Sequence[Batch]
    folder: Path
    _done: set[str] = field(default_factory=set)
    _watch: Watch | None = None
    _kept: Any = None
    _sums: list[list[float]] = field(default_factory=list)

    def measure(self) -> list[float]:
        """Run everything, a layer at a time."""
        skeleton, width = self.run.skeleton, 1 + len(self.lanes)
        self._sums = [[0.0, 0.0] for _ in range(width)]
        inputs = [inputs_of(skeleton, batch) for batch in self.batches]
        chain = Chain(skeleton, [each for each in inputs for _ in range(width)], self.folder)
        forwards = [
            [(chain, batch * width + lane) for lane in range(width)] for batch in range(len(inputs))
        ]
        self._watch = Watch(skeleton, "none", {}, is_looking=False)
        with watching(self._watch), chain.standing(is_headless=False) as empty:
            for path in stops_of(((chain, empty),), forwards, self._end):
                self._run_layer(chain, path)
                self.run.phases.report(path, 0 if path in self._done else 1)
                self._done.add(path)
        # rounding makes it -1e-17; outputs that are all zero lose nothing
        return [max(loss, 0.0) / (over or 1.0) for loss, over in self._sums[1:]]

    def _run_layer(self, chain: Chain, path: str) -> None:
        """Run one layer for the model, and for runs whose part has begun."""
        skeleton, width = self.run.skeleton, 1 + len(self.lanes)
        skeleton.fill(path)
        here = chain.standing_at(path)
        for number in here:
            if number % width == SOURCE:
                chain.hand_on(number, chain.run(number))
        for place, lane in enumerate(self.lanes, 1):
            numbers = [number for number in here if number % width == place]
            is_later = lane.part.layer != path and lane.part.layer not in self._done
            if is_later and chain.is_plain:
                for number in numbers:
                    chain.hand_on_from(number, number - place)
            elif lane.part.layer == path:
                weights = rounded_part(skeleton, lane.part.modules, lane.format)
                with weights, self._rounded_inputs(lane):
                    for number in numbers:
                        chain.hand_on(number, chain.run(number))
            else:
                for number in numbers:
                    chain.hand_on(number, chain.run(number))
        skeleton.empty(path)

    @contextmanager
    def _rounded_inputs(self, lane: Lane) -> Iterator[None]:
        """Round what a part in four bits is given, for a while."""
        watch, hooks = self._watch, []
        assert watch is not None, "layers run inside of it"
        if self.run.rounds_inputs and lane.format.is_fp4:
            skeleton, make = self.run.skeleton, partial(round_alone, lane.format)
            seats = [skeleton.seats[module] for module in lane.part.modules]
            keys = [(s.path, s.parameter in FIRST_PARAMETERS, s.expert) for s in seats]
            experts = {(path, one, n): make for path, one, n in keys if n is not None}
            watch.rounding = Rounding(experts=experts)
            hooks = [
                skeleton.module(path).register_forward_pre_hook(
                    partial(round_call, make), with_kwargs=True
                )
                for path in {seat.path for seat in seats if seat.expert is None}
            ]
        try:
            yield
        finally:
            watch.rounding = Rounding()
            for hook in hooks:
                hook.remove()

    def _end(self, batch: int, place: int, made: Any) -> None:
        """Compare the final output of a run with the model's."""
        is_kl, skeleton = self.run.kind == KL, self.run.skeleton
        given = predictions_of(made, self.batches[batch], skeleton)[0] if is_kl else made[0]
        if torch.isnan(given).any() or (given == math.inf).any():
            detail = "the model computes NaN or Inf for this text; expected finite outputs"
            raise InputError("evaluate-nan", detail, "Choose other text, or mend the weights.")
        given = given.flatten(0, -2)
        if place == SOURCE:
            self._kept = given
            return
        sums = self._sums[place]
        step = max(1, CHUNK_NBYTES // (8 * given.shape[-1]))
        for first in range(0, len(given), step):
            ours, theirs = (each[first : first + step].double() for each in (self._kept, given))
            if self.run.kind == KL:
                p, q = (torch.log_softmax(each, -1) for each in (ours, theirs))
                sums[0] += float(kl_of(p, q).sum())
                sums[1] += len(ours)
            else:
                sums[0] += float((theirs - ours).square().sum())
                sums[1] += float(ours.square().sum())


@contextmanager
def rounded_part(skeleton: Skeleton, modules: Sequence[str], fmt: Format) -> Iterator[None]:
    """Fill some modules of the model with rounded weights, for a while."""
    names: dict[str, Linear] = {}  # of stored tensors
    paths: dict[str, None] = {}  # of what multiplies with them
    for module in modules:
        seat, linear = skeleton.seats[module], skeleton.linears[module]
        paths[seat.path] = None
        stored = skeleton.stored[".".join(filter(None, (seat.path, seat.parameter)))]
        own = [name for name in (linear.home.name, f"{module}.weight") if name in stored]
        names |= dict.fromkeys(own or stored, linear)
    original = {name: skeleton.tensors[name] for name in names}
    for name, linear in names.items():
        read = partial(_read_rounded, original[name], linear, fmt)
        skeleton.tensors[name] = Lazy(read)
    try:
        _refill(skeleton, paths)
        skeleton.tensors |= original
        yield
    finally:
        skeleton.tensors |= original
        _refill(skeleton, paths)


def _refill(skeleton: Skeleton, paths: Mapping[str, None]) -> None:
    for path in paths:
        skeleton.fill(path, is_deep=False)


def _read_rounded(original: Lazy, linear: Linear, fmt: Format) -> torch.Tensor:
    """Read a stored tensor, a matrix or a stack of them, rounded to nearest."""
    stored = original.read()
    columns = linear.shape[1]
    is_transposed = linear.coding.is_spread or stored.shape[-1] != columns
    values = stored.mT if is_transposed else stored
    if fmt.is_fp4 and values.shape[-1] % fmt.block_size:
        return stored  # it stays in this format
    matrices = values.float().reshape(-1, *values.shape[-2:])
    made = torch.stack([torch.from_numpy(_round(one.numpy(), fmt)) for one in matrices])
    made = made.reshape(values.shape)
    return (made.mT if is_transposed else made).contiguous()


def _round(x: Float32s, fmt: Format) -> Float32s:
    """Round a matrix by the default rule of a format; return its values."""
    x = np.ascontiguousarray(x)
    if fmt.is_fp4:
        amax = float(np.abs(x).max(initial=0))
        return Cpu().values(Cpu().quantize(as_matrix(x), fmt, fmt.default_rule, amax, None))
    weights, block = InMemory(as_matrix(x)), (1, fmt.block_size or x.shape[1])
    scales = find_scales(weights, block, fmt, fmt.default_rule)
    return round_to_fp8(weights, scales, block)


def predictions_of(
    made: Any, batch: Batch, skeleton: Skeleton
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a forward, and the tokens that they predict.

    Returns  (samples, tokens, vocabulary) and (samples, tokens)
    """
    logits, ids = made.logits, torch.from_numpy(batch.ids)
    if not skeleton.model.config.is_encoder_decoder:
        logits, ids = logits[:, :-1], ids[:, 1:]  # each says what the next token is
    if batch.inputs:  # where an image is put in, no token is predicted
        placeholders = torch.tensor(placeholders_of(skeleton.model), dtype=ids.dtype)
        is_text = ~torch.isin(ids[0], placeholders)
        logits, ids = logits[:, is_text.to(logits.device)], ids[:, is_text]
    return logits, ids


def kl_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the KL of each token of two log probabilities, in nats.

    A token that the model rules out (-inf) adds nothing.

    p, q  (tokens, vocabulary) float64: of the model, and of the compared one
    """
    return torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1)
