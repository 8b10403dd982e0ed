"""Measure how the predictions of a source and of artifacts differ (KL).

All are given the same text, and the source is run once.  Of each, one layer's weights are in memory
at a time; logits are compared batch by batch, and kept by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.activations import Rounding, rounding_of
from fp4convert.calibration.layers import Chain, stops_of
from fp4convert.calibration.model import Skeleton, import_transformers, open_skeleton
from fp4convert.calibration.observers import Watch, watching
from fp4convert.calibration.output_losses import kl_of, predictions_of
from fp4convert.calibration.samples import (
    Batch,
    Feed,
    Samples,
    batches_of,
    hash_samples,
    inputs_of,
    own_shape,
    read_samples,
    write_samples,
)
from fp4convert.calibration.setup import check_reads_text, copy_texts, find_device
from fp4convert.checkpoint.adapters.peft import Adapter
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, ACTIVATIONS_FP8
from fp4convert.checkpoint.expert_stacks import artifact_of
from fp4convert.errors import InputError, named
from fp4convert.progress import Phases, tokens_text
from fp4convert.storage.disk import temporary_folder
from fp4convert.storage.json_text import unquantized
from fp4convert.storage.source import Source, stopping

SOURCE = 0  # among the models; artifacts follow
CHUNK_NBYTES = 1 << 25  # of log-probabilities in float64, each of two
AROUND = "outside the layers"  # what a row of by_layer calls embeddings, the last norm, the head
# Of config.json: what says nothing of how the model computes.
SILENT = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
SILENT_ENDINGS = ("_token_id", "_name_or_path")
SAME_MODEL = "Give the weights that it was made from: --source SOURCE."
PADDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # ends of such keys
PADDED_MODEL = "Of weights with zeros by --pad-for-tp, evaluate the artifact: its record has them."


@dataclass(frozen=True, slots=True)
class Task:
    """The models, the text and the settings of a comparison.

    is_by_layer  layers of the artifact alone and cumulated, too
    held_nbytes  of weights in memory at once while the source writes its text
    tell         gets lines for people, with the number of the artifact that they are about
    adapter      that the source is merged with
    check_text   gets the sha256 and the number of windows before the models run
    """

    source: Source
    artifacts: Sequence[Source]
    feed: Feed
    device: str = "auto"
    is_by_layer: bool = False
    held_nbytes: int = 8 * 10**9
    phases: Phases = field(default_factory=Phases)
    tell: Callable[[int, str], None] = lambda number, line: None
    adapter: Adapter | None = None
    check_text: Callable[[str, int], None] = lambda sha256, windows: None


class LayerLoss(NamedTuple):
    """The mean KL that one layer of the artifact brings.

    alone      in the source, where every other layer stays
    cumulated  with all layers before it
    """

    layer: str
    alone: float
    cumulated: float


class Measured(NamedTuple):
    """The predictions of both models for every token with text before it.

    windows  number of predicted tokens in every window of text; tokens are in its order
    kl       KL(source || artifact) of the distributions of the token, in nats
    agrees   whether the likeliest token is the same
    likeliest  probability that the source gives its likeliest token
    losses   -ln of the probability of the token, by the source and by the artifact
    activations, kv_cache  of the artifact in the run: 4, "fp8"
    """

    windows: NDArray[np.int64]
    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    likeliest: NDArray[np.float64]
    losses: tuple[NDArray[np.float64], NDArray[np.float64]]
    text_sha256: str = ""
    by_layer: tuple[LayerLoss, ...] = ()
    activations: int = 16
    kv_cache: str | None = None


def compare_models(task: Task) -> list[Measured]:
    """Run the source and all artifacts on the same text.

    Raises InputError for models that are not the same, that cannot be run a layer at a time or
    give no probabilities of a next token, and for text that is none
    """
    task.feed.check()
    import_transformers()
    device = find_device(task.device)
    with ExitStack() as stack:
        for source in (task.source, *task.artifacts):
            stack.enter_context(stopping(source))
        folder = stack.enter_context(temporary_folder())
        task.phases.begin("model")
        models = _open_all(task, folder, device)
        samples = _find_samples(task, models[SOURCE], folder / "source")
        sha256 = hash_samples(samples)
        task.check_text(sha256, len(samples))
        return _Run(task, models, batches_of(samples), folder).measure(sha256)


def _open_all(task: Task, folder: Path, device: torch.device) -> list[Skeleton]:
    """Build all models; InputError unless they are the same."""
    copy_texts(task.source, folder / "source")
    source = open_skeleton(task.source, folder / "source", device, adapter=task.adapter)
    check_reads_text(source)
    if not source.model.can_generate():
        detail = f"{type(source.model).__name__} gives no probabilities of a next token"
        step = "Measure the outputs of its layers: fp4convert verify ARTIFACT --source SOURCE"
        step = f"{step} --calibration FILE."
        raise InputError("evaluate-model", f"{detail}; expected a model that writes text", step)
    models = [source]
    for number, given in enumerate(task.artifacts, 1):
        theirs = folder / f"artifact-{number}"
        if unquantized(given.checkpoint.config):
            copy_texts(given, theirs)
        else:  # a file of weights alone
            theirs = folder / "source"
        with named(given.name) if len(task.artifacts) > 1 else nullcontext():
            artifact = open_skeleton(given, theirs, device, is_exact=True)
            if not artifact.stored:
                kind = type(source.model).__name__
                detail = f"no tensor of {given.name} has a name of {kind}; expected its weights"
                raise InputError("evaluate-model", detail, SAME_MODEL)
            _check_same(source.model, artifact.model)
        models.append(artifact)
    return models


def _check_same(source: Any, artifact: Any) -> None:
    """Raise InputError unless both compute the same, but for weights."""
    kinds = [type(model).__name__ for model in (source, artifact)]
    if kinds[0] != kinds[1]:
        detail = f"the artifact is a {kinds[1]}, and the source a {kinds[0]}"
        raise InputError("evaluate-model", f"{detail}; expected one model", SAME_MODEL)
    settings = [dict(_settings(model.config.to_dict())) for model in (source, artifact)]
    for name in sorted(settings[0].keys() | settings[1].keys()):
        own, other = (side.get(name) for side in settings)
        if own != other:
            detail = f"config.json: {name} is {other!r} in the artifact, and {own!r} in the source"
            # Ordinary weights have no record that says which zeros the source has to get.
            is_padded = name.endswith(PADDED) and type(own) is type(other) is int and other > own
            step = f"{SAME_MODEL} {PADDED_MODEL}" if is_padded else SAME_MODEL
            raise InputError("evaluate-model", f"{detail}; expected one model", step)


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config that change the computation, by name."""
    for key, value in config.items():
        name = str(key)
        if name in SILENT or name.endswith(SILENT_ENDINGS) or name.startswith("_"):
            continue
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        elif name != "quantization_config":
            yield f"{prefix}{name}", value


def _find_samples(task: Task, skeleton: Skeleton, folder: Path) -> Samples:
    """Read the text, or let the source write it."""
    if task.feed.self_generate is None:
        return read_samples(task.feed, skeleton, folder)
    count, length = own_shape(task.feed, skeleton)
    task.phases.begin("write", count * (length - 1), tokens_text)
    return write_samples(task.feed, skeleton, task.held_nbytes, task.phases.report)


class _Lane(NamedTuple):
    """One forward of every batch.

    model    whose parts outside of the layers it runs
    place    among the lanes of that model
    other    the model that runs the layers it borrows
    borrows  whether a layer of that path is run by the other model
    """

    model: int
    place: int = 0
    other: int = SOURCE
    borrows: Callable[[str], bool] = lambda path: False

    @property
    def is_artifact(self) -> bool:
        """Return whether it is an artifact as it is."""
        return self.model != SOURCE and self.place == 0

    def runner(self, path: str) -> int:
        """Return the model that runs a layer."""
        return self.other if self.borrows(path) else self.model


@dataclass(slots=True)
class _Run:
    """A source and artifacts on the same batches.

    _kept     the source's logits of the batch that comes to its end
    _visited  the layers that text came through
    """

    task: Task
    models: list[Skeleton]
    batches: list[Batch]
    folder: Path
    _lanes: list[_Lane] = field(default_factory=list)
    _found: list[list[tuple[NDArray[Any], ...]]] = field(default_factory=list)
    _windows: list[int] = field(default_factory=list)
    _kept: Any = None
    _roundings: list[Rounding] = field(default_factory=list)
    _visited: list[str] = field(default_factory=list)

    def measure(self, text_sha256: str) -> list[Measured]:
        """Run all models, a layer of each at a time."""
        layers = tuple(self.models[SOURCE].layers) if self.task.is_by_layer else ()
        self._lanes = list(_lanes_of(layers, len(self.models) - 1))
        self._found = [[] for _ in self._lanes]
        self._roundings = [Rounding(), *map(self._find_rounding, range(1, len(self.models)))]
        self._run_layers()
        return [
            self._gather(at, layers, text_sha256)
            for at, lane in enumerate(self._lanes)
            if lane.is_artifact
        ]

    def _find_rounding(self, number: int) -> Rounding:
        """Find the rounding of an artifact's inputs; say what is left out."""
        artifact = artifact_of(self.models[number].linears)
        rounding = rounding_of(self.models[number], artifact)
        if rounding.kind and rounding.cache is None:
            self.task.tell(number, f"a KV cache in {rounding.kind} is not computed with")
        packed = artifact.packed if artifact else {}
        if eight_bit := [n for n, p in packed.items() if p.form.activations == ACTIVATIONS_FP8]:
            words = f"{len(eight_bit)} linear layers have 8-bit activations in engines, and 16-bit"
            self.task.tell(number, f"{words} ones here; the first is {eight_bit[0]}")
        return rounding

    def _gather(self, at: int, layers: Sequence[str], text_sha256: str) -> Measured:
        """Gather the figures of the artifact whose lane is `at`."""
        kl, agrees, likeliest, *losses = map(np.concatenate, zip(*self._found[at], strict=True))
        rounding = self._roundings[self._lanes[at].model]
        by_layer = []
        if layers:  # its lanes follow: all that is outside, then each alone and cumulated
            means = [
                float(np.concatenate([kl for kl, *_ in found]).mean())
                for found in self._found[at + 1 : at + 2 + 2 * len(layers)]
            ]
            by_layer = [
                LayerLoss(path, *means[1 + 2 * number : 3 + 2 * number])
                for number, path in enumerate(layers)
                if path in self._visited
            ]
            by_layer.append(LayerLoss(AROUND, means[0], float(kl.mean())))
        return Measured(
            np.array(self._windows),
            kl,
            agrees,
            likeliest,
            (losses[0], losses[1]),
            text_sha256,
            tuple(by_layer),
            ACTIVATIONS_FP4 if rounding.linears or rounding.experts else 16,
            None if rounding.cache is None else rounding.kind,
        )

    def _run_layers(self) -> None:
        """Run all layers."""
        phases, sides = self.task.phases, range(len(self.models))
        inputs = [inputs_of(self.models[SOURCE], batch) for batch in self.batches]
        widths = [sum(lane.model == side for lane in self._lanes) for side in sides]
        with ExitStack() as stack:
            chains = [
                stack.enter_context(self._chain(side, [each for each in inputs for _ in range(n)]))
                for side, n in enumerate(widths)
            ]
            standing = [
                (chain, stack.enter_context(chain.standing(is_headless=False))) for chain in chains
            ]
            forwards = [
                [
                    (chains[lane.model], batch * widths[lane.model] + lane.place)
                    for lane in self._lanes
                ]
                for batch in range(len(inputs))
            ]
            nbytes = {path: self.models[SOURCE].nbytes(path) for path in self.models[SOURCE].layers}
            phases.begin("evaluate", len(sides) * sum(nbytes.values()))
            for path in stops_of(standing, forwards, self._end):
                for side in sides:
                    self._run_layer(path, side, forwards)
                    phases.report(path, 0 if path in self._visited else nbytes[path])
                self._visited.append(path)

    @contextmanager
    def _chain(self, side: int, inputs: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[Chain]:
        """Make the forwards of one model, with experts one by one."""
        folder = self.folder / f"hidden-{side}"
        folder.mkdir()
        skeleton = self.models[side]
        rounding = self._roundings[side]
        watch = Watch(skeleton, "none", {}, is_looking=False, rounding=rounding)
        with watching(watch):
            yield Chain(skeleton, inputs, folder)
        missed = [path for path in rounding.linears if path not in watch.rounded]
        if missed := [path for path in missed if skeleton.layer_above(path) in self._visited]:
            words = f"{len(missed)} linear layers got 16-bit inputs, for the model multiplies with"
            words = f"{words} them in a way of its own; the first is {missed[0]}"
            self.task.tell(side, words)

    def _run_layer(
        self, path: str, side: int, forwards: Sequence[Sequence[tuple[Chain, int]]]
    ) -> None:
        """Run one layer of one model, for every lane that it is to run for."""
        skeleton = self.models[side]
        skeleton.fill(path)
        for batch in forwards:
            for lane, (chain, number) in zip(self._lanes, batch, strict=True):
                is_here = chain.forwards[number].layer == path
                if is_here and lane.runner(path) == side:
                    chain.hand_on(number, chain.run(number, skeleton))
        skeleton.empty(path)

    def _end(self, batch: int, place: int, made: Any) -> None:
        """Compare the final output of a forward with the source's."""
        logits, ids = predictions_of(made, self.batches[batch], self.models[SOURCE])
        if place == SOURCE:
            self._kept = logits
            return
        rows: list[list[torch.Tensor]] = [[], [], [], [], []]
        step = max(1, CHUNK_NBYTES // (8 * logits.shape[-1]))
        for ours, theirs, tokens in zip(self._kept, logits, ids, strict=True):
            for first in range(0, len(tokens), step):
                part = slice(first, first + step)
                made_of = _compare_logits(ours[part], theirs[part], tokens[part].to(ours.device))
                for row, values in zip(rows, made_of, strict=True):
                    row.append(values.cpu())
        kl, *others = (torch.cat(row).numpy() for row in rows)
        for name, loss in zip(("source", "artifact"), others[2:], strict=True):
            if not np.isfinite(loss).all():
                detail = f"the {name} computes NaN or Inf for this text; expected finite logits"
                raise InputError("evaluate-nan", detail)
        kl = np.maximum(kl, 0.0)  # rounding makes it -1e-17
        self._found[place].append((kl, *others) if self._lanes[place].is_artifact else (kl,))
        if place == 1:  # the first artifact's: windows are those of all
            self._windows += [len(tokens) for tokens in ids]


def _lanes_of(layers: Sequence[str], artifacts: int) -> Iterator[_Lane]:
    """Yield the source's lane, each artifact's, and those of its layers.

    Of a layer alone and cumulated, in turn; before them everything outside of layers.
    """
    yield _Lane(SOURCE)
    places = count(1)
    for artifact in range(1, artifacts + 1):
        yield _Lane(artifact)
        if layers:
            yield _Lane(artifact, 1, SOURCE, lambda path: True)
        for number, layer in enumerate(layers):
            before = frozenset(layers[: number + 1])
            yield _Lane(SOURCE, next(places), artifact, layer.__eq__)
            yield _Lane(SOURCE, next(places), artifact, before.__contains__)


def _compare_logits(
    ours: torch.Tensor, theirs: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the figures of some tokens, in float64.

    They are KL, agreement, the source's largest probability, and the losses of both.
    ours, theirs  (tokens, vocabulary) logits
    """
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (ours, theirs))
    losses = [-each.gather(1, tokens[:, None])[:, 0] for each in (p, q)]
    agrees = p.argmax(-1) == q.argmax(-1)
    return kl_of(p, q), agrees, p.amax(-1).exp(), losses[0], losses[1]
