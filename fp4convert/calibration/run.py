"""Run text through a model a layer at a time; write statistics.

Only one layer's weights are in memory; hidden states and finished statistics lie in a folder beside
the file.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fp4convert.calibration.calibration_file import is_calibration
from fp4convert.calibration.layers import Chain
from fp4convert.calibration.model import NEXT, Skeleton, import_transformers, open_skeleton
from fp4convert.calibration.moments import merge_statistics
from fp4convert.calibration.observers import UNROUTED_TOKENS, Watch, find_unwatched, watching
from fp4convert.calibration.output_losses import LossRun, as_arrays, measure_losses
from fp4convert.calibration.prefix import Goal, PrefixLayer, Streams
from fp4convert.calibration.result import Calibrated
from fp4convert.calibration.samples import (
    Batch,
    Feed,
    Samples,
    batches_of,
    inputs_of,
    load_samples,
    own_shape,
    read_samples,
    save_samples,
    write_samples,
)
from fp4convert.calibration.setup import check_reads_text, copy_texts, find_device
from fp4convert.calibration.workdir import (
    AROUND,
    LOSSES,
    SAMPLES_FILE,
    Needs,
    join_parts,
    kept_state,
    needs_of,
    part_file,
    part_notes,
    read_part,
    reading_kept,
    remark_file,
    write_part,
)
from fp4convert.checkpoint.adapters.peft import Adapter
from fp4convert.checkpoint.encodings.floats import advise_on_types
from fp4convert.checkpoint.record import ADAPTER
from fp4convert.errors import InputError, OutputError, did_you_mean
from fp4convert.numerics.formats import FLOAT_TYPES, GRAMS
from fp4convert.progress import Phases, size_text, tokens_text
from fp4convert.recipes.options import one_of
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.disk import replace_file, write_errors_at
from fp4convert.storage.source import Source, stopping

# Of a tokenizer.


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a calibration.

    gram           none, diag, block:N or full
    has_losses     losses of outputs by part and format are measured, too
    device         auto, cpu, cuda or cuda:N
    held_nbytes    of weights in memory at once while the model writes its text
    is_forced      an existing file may be replaced
    tell           gets lines for people
    adapter        that the source is merged with
    goal           how quantize will round, for corrections of targets; None: none
    """

    source: Source
    output: Path
    feed: Feed
    gram: str = "diag"
    has_losses: bool = False
    device: str = "auto"
    held_nbytes: int = 8 * 10**9
    is_forced: bool = False
    phases: Phases = field(default_factory=Phases)
    tell: Callable[[str], None] = lambda line: None
    adapter: Adapter | None = None
    goal: Goal | None = None

    def needs(self, skeleton: Skeleton, tokens: int) -> Needs:
        """Estimate the room for so many tokens."""
        streams = self.goal.streams if self.goal else 0
        return needs_of(skeleton, self.gram, tokens, self.source.checkpoint.config, streams)

    def check(self) -> None:
        """Raise an error for text, Gram or output that cannot be."""
        self.feed.check()
        kind, _, width = self.gram.partition(":")
        is_block = kind == "block" and width.isdecimal() and int(width) > 0
        if (self.gram not in GRAMS or width) and not is_block:
            detail = f"--gram {self.gram!r} is not known; expected {one_of(GRAMS)}"
            detail += did_you_mean(self.gram, GRAMS)
            raise InputError("unknown-gram", detail, "Usual: block:128.")
        import_transformers()
        find_device(self.device)
        output = self.output
        if output.is_dir():
            detail = f"{output} is a folder; expected the name of a new file"
            raise OutputError("output-exists", detail, "Name one: -o FILE.")
        if self.source.holds(output):
            detail = f"{output} lies inside the source, where it would be taken for weights"
            detail += "; expected a file outside it"
            raise InputError("output-in-source", detail, "Choose another: -o FILE.")
        if output.exists() and not self.is_forced:
            detail = f"{output} is there already; nothing is written over it"
            next_step = "Choose another file with -o, or replace it with --force."
            raise OutputError("output-exists", detail, next_step)
        if output.exists() and not is_calibration(output):
            detail = f"{output} is there already, and is no calibration file; expected a new file"
            next_step = "--force replaces only what calibrate wrote. Choose another: -o FILE."
            raise OutputError("foreign-output", detail, next_step)


def calibrate(run: Run) -> Calibrated:
    """Write the calibration file of a source.

    An interrupted run leaves a folder from which the next one continues.
    Raises InputError for models that cannot be run a layer at a time, text that is none and
    activations that are not finite; OutputError where the file is there already or cannot be
    written
    """
    begun = time.monotonic()
    run.check()
    device, notes = find_device(run.device), part_notes(run.source)
    if run.adapter:
        notes[ADAPTER] = run.adapter.key
    # What decides the file's bytes: a run with the same goes on where another ended.
    libraries = [f"{name} {version(name)}" for name in ("fp4convert", "torch", "transformers")]
    feed = [run.feed.words(), run.feed.samples, run.feed.sequence_length]
    settings = run.goal.settings if run.goal else None
    purpose = json.dumps([notes, run.gram, run.has_losses, str(device), feed, libraries, settings])
    with kept_state(run.output, purpose, run.tell) as state, stopping(run.source):
        run.phases.begin("model")
        copy_texts(run.source, state / "model")
        skeleton = open_skeleton(run.source, state / "model", device, adapter=run.adapter)
        check_reads_text(skeleton)
        if not skeleton.linears:
            detail = f"{run.source.name} has no matrix of {', '.join(FLOAT_TYPES)}; expected some"
            next_step = advise_on_types(run.source.checkpoint.tensors, NEXT)
            raise InputError("calibration-model", detail, next_step)
        samples = _find_samples(run, skeleton, state)
        needs = run.needs(skeleton, sum(map(len, samples)))
        losses = None
        if run.has_losses:
            recipe = model_recipe(run.source.checkpoint.config)
            rounds_inputs = run.goal is not None and run.goal.round_inputs is not None
            losses = LossRun(skeleton, recipe, samples, state, run.phases, rounds_inputs)
            needs = needs._replace(hidden_nbytes=max(needs.hidden_nbytes, losses.hidden_nbytes))
            run.tell(losses.words())
        needs.check(run.output, state, device)
        run.tell(needs.words())
        layers = _LayerRun(run, skeleton, state, batches_of(samples), notes, losses)
        layers.run_layers()
        result = layers.finish(samples, begun)
    shutil.rmtree(state)
    return result


def _find_samples(run: Run, skeleton: Skeleton, state: Path) -> Samples:
    """Make the samples; a run that goes on loads them."""
    kept = state / SAMPLES_FILE
    if kept.exists():
        with reading_kept(kept):
            return load_samples(kept)
    if run.feed.self_generate is None:
        samples = read_samples(run.feed, skeleton, state / "model")
    else:
        # The model writes them; there must be room for what comes after.
        count, length = own_shape(run.feed, skeleton)
        needs = run.needs(skeleton, count * length)
        needs.check(run.output, state, skeleton.device)
        nbytes = sum(map(skeleton.nbytes, skeleton.layers))
        if nbytes > run.held_nbytes:
            words = f"the weights take {size_text(nbytes)}, more than --hold"
            words += ": they are read again for every generated token"
            words += "; --sequence-length N sets how many, --text FILE generates none"
            run.tell(words)
        run.phases.begin("write", count * (length - 1), tokens_text)
        samples = write_samples(run.feed, skeleton, run.held_nbytes, run.phases.report)
    needs = run.needs(skeleton, sum(map(len, samples)))
    needs.check(run.output, state, skeleton.device)
    temp = state / "tokens.new"
    with write_errors_at(kept):
        save_samples(temp, samples)
        os.replace(temp, kept)
    return samples


@dataclass(slots=True)
class _LayerRun:
    """The layers of one model, run one after the other.

    Parts of the file are numbered as layers are run; what is outside of all is the last.
    _parts  layer -> the last part that holds statistics of it
    """

    run: Run
    skeleton: Skeleton
    state: Path
    batches: list[Batch]
    notes: dict[str, str]
    losses: LossRun | None = None
    _parts: dict[str, int] = field(default_factory=dict)

    def run_layers(self) -> None:
        """Write the statistics of all layers, and of the model around them.

        Layers of an earlier run are skipped; if layers hand on more than hidden states, these are
        computed again without statistics.
        """
        if remark_file(self.state, AROUND).exists():
            return
        skeleton, phases = self.skeleton, self.run.phases
        watch, goal = Watch(skeleton, self.run.gram, skeleton.seats), self.run.goal
        inputs = [inputs_of(skeleton, batch) for batch in self.batches]
        inputs *= goal.streams if goal else 1
        firsts = [batch.first for batch in self.batches]
        chain = Chain(skeleton, inputs, self.state, lambda n: watch.begin(firsts[n % len(firsts)]))
        nbytes = {path: skeleton.nbytes(path) for path in skeleton.layers}
        phases.begin("calibrate", sum(nbytes.values()))
        done = self._finished()
        is_plain = bool(done) and bool(done[-1]["is_plain"])
        with watching(watch), chain.held() as stops:
            for number, path in enumerate(stops):
                if number >= len(done):
                    unrouted = self._run_layer(chain, watch, path)
                    shape = {"is_plain": chain.is_plain, "arity": chain.arity}
                    self._write_part(number, path, watch, unrouted, shape)
                elif is_plain:
                    is_last = number == len(done) - 1
                    for batch in range(len(inputs)):
                        chain.hand_on_again(batch, int(done[number]["arity"]), is_last)
                else:
                    # The weights of a prefix are found again, by the same statistics.
                    watch.is_looking = goal is not None
                    self._run_layer(chain, watch, path)
                    watch.take(path)
                    watch.is_looking = True
                phases.report(path, nbytes[path] if path not in self._parts else 0)
                self._parts[path] = number
        self._write_part(AROUND, None, watch, [], {})

    def _finished(self) -> list[dict[str, Any]]:
        """Read the remarks on layers that an earlier run finished."""
        found: list[dict[str, Any]] = []
        while (remark := remark_file(self.state, len(found))).exists():
            with reading_kept(remark):
                found.append(json.loads(remark.read_text()))
        return found

    def _run_layer(self, chain: Chain, watch: Watch, path: str) -> list[str]:
        """Run one layer, and gather statistics of inputs in it.

        Returns  the modules of experts with tokens of other experts
        """
        self.skeleton.fill(path)
        here, count = chain.standing_at(path), len(self.batches)
        numbers, others = ([n for n in here if (n >= count) == is_other] for is_other in (0, 1))
        # A layer that runs again is corrected by its first run alone.
        goal = self.run.goal if path not in self._parts else None
        prefix = None
        if goal:
            place = Streams(self.run.source, self.skeleton, self.state, path, numbers, others)
            prefix = PrefixLayer(place, goal, self.run.gram, watch)
        if prefix and prefix.members:
            prefix.run_originals(chain)
        else:
            for number in numbers:
                chain.hand_on(number, chain.run(number))
        # Experts with too few tokens are fed some that were not routed to them.
        unrouted, fed = watch.feed_starving(), 0
        for number in numbers if unrouted else ():
            if fed < UNROUTED_TOKENS:
                chain.run(number)
                fed += self.batches[number].ids.size
        watch.unfed = None
        if prefix and prefix.members:
            prefix.correct(chain)
        elif others:
            watch.is_looking = False
            for number in others:
                chain.hand_on(number, chain.run(number))
            watch.is_looking = True
        self.skeleton.empty(path)
        return unrouted

    def _write_part(
        self,
        number: int,
        path: str | None,
        watch: Watch,
        unrouted: list[str],
        shape: dict[str, int],
    ) -> None:
        """Write the statistics of a part, and last the remark that ends it.

        For a layer that the model runs several times, the statistics of all runs are merged.
        path   of the layer; None for what is outside of all
        shape  of what the layer gave, for a run that goes on
        """
        inputs, arrays = watch.take(path)
        if path in self._parts:
            earlier = self._parts[path]
            before = json.loads(remark_file(self.state, earlier).read_text())
            inputs = {**before["inputs"], **inputs}
            unrouted = [*dict.fromkeys([*before["unrouted"], *unrouted])]
            known = read_part(part_file(self.state, earlier))
            held = {name.removesuffix(".target_amax") for name in known}
            arrays = {k: v for k, v in arrays.items() if k.rpartition(".")[0] not in held}
            arrays = merge_statistics(known, arrays)
        write_part(part_file(self.state, number), arrays, self.notes)
        linears = [name.removesuffix(".input_amax") for name in arrays if name.endswith("_amax")]
        remark = {
            "layer": path,
            "inputs": inputs,
            "unrouted": unrouted,
            **shape,
            "seen": [*(name for name in linears if f"{name}.tokens" in arrays), *inputs],
            "experts": sum(len(v) for k, v in arrays.items() if k.endswith(".expert_tokens")),
        }
        replace_file(remark_file(self.state, number), json.dumps(remark).encode())

    def finish(self, samples: Samples, begun: float) -> Calibrated:
        """Join the parts to the file."""
        # Of a layer that runs several times the last part says it all.
        last = {remark["layer"]: number for number, remark in enumerate(self._finished())}
        numbers = [*last.values(), AROUND]
        remarks = [json.loads(remark_file(self.state, number).read_text()) for number in numbers]
        seen = dict.fromkeys(module for remark in remarks for module in remark["seen"])
        unrouted = tuple(module for remark in remarks for module in remark["unrouted"])
        inputs: dict[str, str] = {}
        for remark in remarks:
            inputs |= remark["inputs"]
        checkpoint, tokens = self.run.source.checkpoint, sum(map(len, samples))
        notes = {
            **self.notes,
            "source": json.dumps({"repo": checkpoint.repo, "revision": checkpoint.revision}),
            "samples": str(len(samples)),
            "tokens": str(tokens),
            "gram": self.run.gram,
            "text": self.run.feed.words(),
            "inputs": json.dumps(inputs),
            "unrouted": json.dumps(unrouted),
        }
        missed, opaque = find_unwatched(self.skeleton, seen)
        parts = [part_file(self.state, number) for number in numbers]
        if self.run.goal:
            notes |= self.run.goal.notes()
        if self.losses:
            arrays = as_arrays(measure_losses(self.losses))
            parts.append(part_file(self.state, LOSSES))
            write_part(parts[-1], arrays, self.notes)
            notes |= self.losses.notes()
        self.run.phases.begin("join")
        sha256, nbytes = join_parts(self.run.output, parts, notes)
        return Calibrated(
            output=self.run.output,
            output_bytes=nbytes,
            samples_asked=self.run.feed.self_generate or self.run.feed.samples,
            samples=len(samples),
            tokens=tokens,
            linears=len(seen),
            experts=sum(remark["experts"] for remark in remarks),
            unrouted=unrouted,
            unwatched=tuple(missed),
            opaque=tuple(opaque),
            sha256=sha256,
            seconds=round(time.monotonic() - begun, 3),
        )
