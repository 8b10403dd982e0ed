"""Run text through a model a layer at a time; write statistics.

Only one layer's weights are in memory; hidden states and finished statistics lie in a folder beside the file.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fp4convert.calibration.layers import Call, Shelf, begin, end, filled_on_demand, step
from fp4convert.calibration.model import Skeleton, import_transformers, open_skeleton
from fp4convert.calibration.observers import UNROUTED_TOKENS, Watch, opaque, unwatched, watching
from fp4convert.calibration.samples import (
    Batch,
    Feed,
    Samples,
    batches_of,
    load_samples,
    own_shape,
    read_samples,
    save_samples,
    write_samples,
)
from fp4convert.calibration.workdir import (
    SAMPLES,
    Hidden,
    Needs,
    join_parts,
    kept_state,
    needs_of,
    part_file,
    part_notes,
    remark_file,
    write_part,
)
from fp4convert.errors import DeviceError, InputError, OutputError
from fp4convert.progress import Phases, size_text, tokens_text
from fp4convert.storage.disk import told
from fp4convert.storage.json_text import unquantized
from fp4convert.storage.source import Source, stopping

GRAM_KINDS = "none, diag, block:N or full"
TEXT_FILES = (
    ".json",
    ".txt",
    ".jinja",
    ".model",
    ".tiktoken",
    ".vocab",
    ".bpe",
    ".merges",
)  # of a tokenizer
COPY_NBYTES = 1 << 20
NAMED_MODULES = 3  # in a warning that many could stand in


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be calibrated, and how.

    gram           none, diag, block:N or full
    device         auto, cpu, cuda or cuda:N
    held_nbytes    of weights that may be in memory at once, where the model writes its own text
    is_forced      a file that is there may be replaced
    tell           gets lines for people
    """

    source: Source
    output: Path
    feed: Feed
    gram: str = "diag"
    device: str = "auto"
    held_nbytes: int = 8 * 10**9
    is_forced: bool = False
    phases: Phases = field(default_factory=Phases)
    tell: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What came of it.

    output_bytes  of the file, and of the parts beside it where it is an index
    linears       modules with statistics
    unrouted      modules of experts that were fed tokens that were not routed to them
    unwatched     modules without statistics
    opaque        of these, experts that calibrate cannot see into
    """

    output: Path
    output_bytes: int
    samples: int
    tokens: int
    linears: int
    experts: int
    unrouted: tuple[str, ...]
    unwatched: tuple[str, ...]
    opaque: tuple[str, ...]
    sha256: str
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """What a person should know of it."""
        found = []
        if self.unrouted:
            what = "of experts that too few tokens were routed to; they were given tokens of the whole layer instead"
            found.append(f"{_some(self.unrouted)}: {what}; more text helps")
        if self.opaque:
            what = "experts without statistics and saliency, since transformers computes them in a way that cannot be looked into"
            found.append(f"{_some(self.opaque)}: {what}; prune does not take this file")
        known = set(self.opaque)
        if passed_by := [module for module in self.unwatched if module not in known]:
            found.append(f"{_some(passed_by)}: without statistics, since no text goes through them")
        return found

    def as_json(self) -> dict[str, object]:
        return {
            "output": str(self.output),
            "output_bytes": self.output_bytes,
            "samples": self.samples,
            "tokens": self.tokens,
            "linears": self.linears,
            "experts": self.experts,
            "unrouted": list(self.unrouted),
            "unwatched": list(self.unwatched),
            "opaque": list(self.opaque),
            "sha256": self.sha256,
            "seconds": self.seconds,
            "warnings": self.warnings,
        }


def _some(modules: Sequence[str]) -> str:
    """A number of modules and the first of their names."""
    more = ", ..." if len(modules) > NAMED_MODULES else ""
    return f"{len(modules)} linear layers ({', '.join(modules[:NAMED_MODULES])}{more})"


def calibrate(run: Run) -> Calibrated:
    """Write the calibration file of a source.

    Raises InputError for models that cannot be run a layer at a time, text that is none and activations that are not finite;
    OutputError where the file is there already or cannot be written.  An interrupted run leaves what continues it.
    """
    begun = time.monotonic()
    run.feed.check()
    _check_gram(run.gram)
    import_transformers()
    device = _device_named(run.device)
    _check_output(run)
    notes = part_notes(run.source)
    with (
        kept_state(run.output, _purpose(run, notes, device), run.tell) as state,
        stopping(run.source),
    ):
        run.phases.begin("model")
        _copy_texts(run.source, state / "model")
        skeleton = open_skeleton(run.source, state / "model", device)
        samples = _samples_of(run, skeleton, state)
        run.tell(_checked_needs(run, skeleton, state, sum(map(len, samples))).words())
        layers = _Layers(run, skeleton, state, batches_of(samples), notes)
        layers.run_layers()
        result = layers.finish(samples, begun)
    shutil.rmtree(state)
    return result


def _check_output(run: Run) -> None:
    output = run.output
    if output.is_dir():
        raise OutputError(
            "output-exists",
            f"{output} is a folder; expected the name of a new file",
            "Name one: -o FILE.",
        )
    if run.source.holds(output):
        detail = f"{output} lies inside the source, where it would be taken for weights; expected a file outside it"
        raise InputError("output-in-source", detail, "Choose another: -o FILE.")
    if output.exists() and not run.is_forced:
        detail = f"{output} is there already; nothing is written over it"
        raise OutputError(
            "output-exists", detail, "Choose another file with -o, or replace it with --force."
        )


def _checked_needs(run: Run, skeleton: Skeleton, state: Path, tokens: int) -> Needs:
    """What so many tokens take, which is there."""
    needs = needs_of(skeleton, run.gram, tokens, run.source.checkpoint.config)
    needs.check(run.output, state, skeleton.device)
    return needs


def _check_gram(gram: str) -> None:
    kind, _, width = gram.partition(":")
    is_known = gram in ("none", "diag", "full") or (
        kind == "block" and width.isdecimal() and int(width) > 0
    )
    if not is_known:
        raise InputError(
            "unknown-gram",
            f"--gram {gram!r} is not known; expected {GRAM_KINDS}",
            "Usual: block:128.",
        )


def _device_named(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    detail = f"--device {name!r} is not known; expected auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            "unknown-device", detail, "Leave it out for a GPU, else the CPU."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InputError("unknown-device", detail, "Leave it out for a GPU, else the CPU.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        detail = (
            f"--device {name}: torch {torch.__version__} finds {torch.cuda.device_count()} GPUs"
        )
        raise DeviceError("no-gpu", detail, "Use --device cpu, or see: fp4convert doctor.")
    return device


def _purpose(run: Run, notes: dict[str, str], device: torch.device) -> str:
    """What decides the file's bytes: a run with the same goes on where another ended."""
    libraries = [f"{name} {version(name)}" for name in ("fp4convert", "torch", "transformers")]
    feed = [run.feed.words(), run.feed.samples, run.feed.sequence_length]
    return json.dumps([notes, run.gram, str(device), feed, libraries])


def _copy_texts(source: Source, folder: Path) -> None:
    """The model's config and its tokenizer's files, where transformers can read them; no code is among them."""
    if not source.checkpoint.config:
        detail = (
            f"{source.name} has no config.json, without which nobody knows how the model computes"
        )
        raise InputError(
            "calibration-model", detail, "Give the folder or repository of the whole model."
        )
    with told(folder):
        folder.mkdir(exist_ok=True)
        for file in source.checkpoint.sidecars:
            if file.endswith(TEXT_FILES) and len(PurePosixPath(file).parts) == 1:
                with source.open_file(file) as stream, (folder / file).open("wb") as out:
                    shutil.copyfileobj(stream, out, COPY_NBYTES)
        (folder / "config.json").write_text(json.dumps(unquantized(source.checkpoint.config)))


def _samples_of(run: Run, skeleton: Skeleton, state: Path) -> Samples:
    """The samples, made or, in a run that goes on, as they were made."""
    kept = state / SAMPLES
    if kept.exists():
        return load_samples(kept)
    if run.feed.self_generate is None:
        samples = read_samples(run.feed, skeleton, state / "model")
    else:
        samples = _own_samples(run, skeleton, state)
    _checked_needs(run, skeleton, state, sum(map(len, samples)))
    temp = state / "tokens.new"
    with told(kept):
        save_samples(temp, samples)
        os.replace(temp, kept)
    return samples


def _own_samples(run: Run, skeleton: Skeleton, state: Path) -> Samples:
    count, length = own_shape(run.feed, skeleton)
    _checked_needs(run, skeleton, state, count * length)
    nbytes = sum(map(skeleton.nbytes, skeleton.layers))
    if nbytes > run.held_nbytes:
        words = f"the weights take {size_text(nbytes)}, more than --hold: they are read again for every token that is written"
        run.tell(f"{words}; --sequence-length N tells how many, --text FILE needs none of this")
    run.phases.begin("write", count * (length - 1), tokens_text)
    return write_samples(run.feed, skeleton, run.held_nbytes, run.phases.report)


@dataclass(slots=True)
class _Layers:
    """The layers of one model, one after the other."""

    run: Run
    skeleton: Skeleton
    state: Path
    batches: list[Batch]
    notes: dict[str, str]
    is_tuple: bool = False
    _calls: list[list[Call]] = field(default_factory=list)
    _shape: tuple[int, ...] = ()
    _dtype: Any = torch.float32

    @property
    def device(self) -> torch.device:
        return self.skeleton.device

    def run_layers(self) -> None:
        """Statistics of everything, part by part; what an earlier run finished is skipped."""
        self._begin()
        nbytes = {path: self.skeleton.nbytes(path) for path in self.skeleton.layers}
        self.run.phases.begin("calibrate", sum(nbytes.values()))
        for number, path in enumerate(self.skeleton.layers):
            if remark_file(self.state, number).exists():
                self.is_tuple = bool(
                    json.loads(remark_file(self.state, number).read_text())["is_tuple"]
                )
                self.run.phases.skip(nbytes[path])
                continue
            watch = self._run_layer(number)
            self._keep(number, watch)
            self.run.phases.report(path, nbytes[path])
        if not remark_file(self.state, len(self.skeleton.layers)).exists():
            self._keep(len(self.skeleton.layers), self._run_rest())

    def _ids(self, batch: Batch) -> torch.Tensor:
        return torch.from_numpy(batch.ids).to(self.device)

    def _begin(self) -> None:
        """What every layer is called with, and the first hidden states."""
        shelf = Shelf()
        is_first = not remark_file(self.state, 0).exists()
        with (
            filled_on_demand(self.skeleton),
            watching(Watch(self.skeleton, "none", {}, is_looking=False)),
        ):
            for number, batch in enumerate(self.batches):
                hidden, calls = begin(self.skeleton, self._ids(batch), shelf)
                self._calls.append(calls)
                self._shape, self._dtype = tuple(hidden.shape[2:]), hidden.dtype
                if is_first:
                    self._hidden(0).put(number, hidden)

    def _hidden(self, layer: int) -> Hidden:
        """What that layer is given."""
        return Hidden(self.state / f"hidden-{layer % 2}", [batch.tokens for batch in self.batches])

    def _get(self, layer: int, number: int) -> torch.Tensor:
        shape = (*self.batches[number].ids.shape, *self._shape)
        return self._hidden(layer).get(number, shape).to(self.device, self._dtype)

    def _run_layer(self, layer: int) -> tuple[Watch, list[str]]:
        path = self.skeleton.layers[layer]
        mine = {
            module: seat
            for module, seat in self.skeleton.seats.items()
            if self.skeleton.layer_of(seat) == path
        }
        watch = Watch(self.skeleton, self.run.gram, mine)
        self.skeleton.fill(path)
        with watching(watch):
            for number, batch in enumerate(self.batches):
                watch.begin(batch.first)
                made, self.is_tuple = step(
                    self.skeleton, layer, self._get(layer, number), self._calls[number][layer]
                )
                self._hidden(layer + 1).put(number, made)
            unrouted, fed = watch.feed_starving(), 0
            for number, batch in enumerate(self.batches if unrouted else ()):
                if fed < UNROUTED_TOKENS:
                    watch.begin(batch.first)
                    step(self.skeleton, layer, self._get(layer, number), self._calls[number][layer])
                    fed += batch.tokens
        self.skeleton.empty(path)
        return watch, unrouted

    def _run_rest(self) -> tuple[Watch, list[str]]:
        rest = {
            module: seat
            for module, seat in self.skeleton.seats.items()
            if self.skeleton.layer_of(seat) is None
        }
        watch = Watch(self.skeleton, self.run.gram, rest)
        with filled_on_demand(self.skeleton), watching(watch):
            for number, batch in enumerate(self.batches):
                watch.begin(batch.first)
                end(
                    self.skeleton,
                    self._ids(batch),
                    self._get(len(self.skeleton.layers), number),
                    self.is_tuple,
                )
        return watch, []

    def _keep(self, number: int, found: tuple[Watch, list[str]]) -> None:
        """Put what a part came to on the disk; the remark is written last and makes it count."""
        watch, unrouted = found
        write_part(part_file(self.state, number), watch.arrays(), self.notes)
        remark = {
            "inputs": watch.inputs,
            "unrouted": unrouted,
            "is_tuple": self.is_tuple,
            "seen": [*watch.moments, *watch.inputs],
        }
        temp = self.state / "remark.new"
        with told(temp):
            temp.write_text(
                json.dumps({**remark, "experts": sum(len(r.tokens) for r in watch.routed.values())})
            )
            os.replace(temp, remark_file(self.state, number))

    def finish(self, samples: Samples, begun: float) -> Calibrated:
        """Join the parts to the file."""
        numbers = range(len(self.skeleton.layers) + 1)
        remarks = [json.loads(remark_file(self.state, number).read_text()) for number in numbers]
        seen = {module for remark in remarks for module in remark["seen"]}
        unrouted = tuple(module for remark in remarks for module in remark["unrouted"])
        checkpoint, tokens = self.run.source.checkpoint, sum(map(len, samples))
        notes = {
            **self.notes,
            "source": json.dumps({"repo": checkpoint.repo, "revision": checkpoint.revision}),
            "samples": str(len(samples)),
            "tokens": str(tokens),
            "gram": self.run.gram,
            "text": self.run.feed.words(),
            "inputs": json.dumps(
                {
                    module: holder
                    for remark in remarks
                    for module, holder in remark["inputs"].items()
                }
            ),
            "unrouted": json.dumps(unrouted),
        }
        missed = unwatched(self.skeleton, dict.fromkeys(seen))
        self.run.phases.begin("join")
        joined = join_parts(
            self.run.output, [part_file(self.state, number) for number in numbers], notes
        )
        return Calibrated(
            output=self.run.output,
            output_bytes=joined.nbytes,
            samples=len(samples),
            tokens=tokens,
            linears=len(seen),
            experts=sum(remark["experts"] for remark in remarks),
            unrouted=unrouted,
            unwatched=tuple(missed),
            opaque=tuple(opaque(self.skeleton, missed)),
            sha256=joined.sha256,
            seconds=round(time.monotonic() - begun, 3),
        )
