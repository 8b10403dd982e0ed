"""Plan and carry out prune.

A pruned checkpoint is an ordinary one: the tensors of experts that stay are numbered anew, stacks and routers lose the parts of
the others, config.json counts what is left, and all else is copied.  Which experts stay, experts.py decides.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fp4convert.calibration.statistics import Calibration, check_source
from fp4convert.checkpoint.dialects.base import Ignored
from fp4convert.conversion.artifact_job import index_text
from fp4convert.conversion.dry_run import BASE_NBYTES, Sized, describe_steps, estimate_seconds
from fp4convert.conversion.experts import (
    Mixture,
    Routing,
    check_mixture,
    choose_kept,
    find_mixtures,
    kept_columns,
    kept_rows,
    read_routing,
)
from fp4convert.errors import InputError
from fp4convert.execution.folder import TaskWriter
from fp4convert.execution.job import Job, carry_out
from fp4convert.execution.repacker import copy_steps
from fp4convert.execution.settings import Result, Settings
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.base import processors
from fp4convert.planning.quantize_plan import notes_on
from fp4convert.planning.steps import (
    Action,
    Draft,
    Plan,
    Step,
    Task,
    Writing,
    module_of,
    refuse_collisions,
)
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import Target, model_recipe
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.json_text import as_text
from fp4convert.storage.safetensors import TensorRef, TensorSpec
from fp4convert.storage.source import Checkpoint, Source, uncollected

PRUNED = "pruned"
PRUNING = "expert_pruning.json"  # our record of what stayed
PREDICTION_KEYS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)  # how many layers predict further tokens
PREDICTION = "prediction"  # the recipes' word for such layers
RANKS = (2, 4, 8)  # of expert parallelism
FEW_TOKENS = 100  # routed to an expert: below, its saliency is little more than chance
_ONE_EXPERT = re.compile(r"experts\\*\.\d")
_QUANTIZATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Pruning:
    """What `prune` will do.

    config  config.json of the result
    kept    experts that stay, by mixture, as the source numbers them
    """

    plan: Plan
    routing: Routing
    config: dict[str, object]
    kept: Mapping[str, tuple[int, ...]]
    record: dict[str, object]

    @property
    def experts(self) -> dict[str, int]:
        """How many a layer had and has, and in how many layers."""
        return {"before": self.routing.experts, "kept": self.routing.keep, "layers": len(self.kept)}


def prepare_prune(
    source: Source, calibration: Calibration, keep: int, recipe: str | None = None
) -> Pruning:
    """What `prune` carries out.

    keep    experts that stay in every layer that has some
    recipe  as --recipe names it; None for the model's own
    Raises  InputError for a model whose experts no recipe tells, a number that its router cannot work with, or a calibration
            that is of another checkpoint or lacks a layer
    """
    checkpoint = source.checkpoint
    _refuse_artifact(source)
    rules = model_recipe(checkpoint.config, RecipeOptions(recipe=recipe))
    with uncollected():
        mixtures = find_mixtures(tuple(checkpoint.tensors), rules)
    rule = rules.experts[0]
    routing = read_routing(checkpoint.config, rule, keep)
    check_source(calibration, source)
    further = rules.patterns_of(PREDICTION)  # layers that the model itself does not run
    ahead = [one for one in mixtures if matches_any(further, one.name)]
    is_shorter = not all(calibration.has(one.name, "expert_saliency") for one in ahead)
    seen = [one for one in mixtures if not is_shorter or one not in ahead]
    if seen and not any(calibration.has(one.name, "expert_saliency") for one in seen):
        raise _sees_none(calibration, seen[0], checkpoint)
    for mixture in seen:
        check_mixture(mixture, rule, routing.experts)
    kept = {one.name: _kept_of(calibration, one, routing) for one in seen}
    gone = {
        ref.name
        for ref in checkpoint.tensors
        if is_shorter and matches_any(further, module_of(ref.name))
    }
    notes = (
        *notes_on(checkpoint),
        *_left_out(gone),
        *_ranks(routing),
        *_few_tokens(calibration, kept),
    )
    changed = {
        name: draft for one in seen for name, draft in _drafts(one, kept[one.name], routing.experts)
    }
    plan = Plan(Target(PRUNED), _tasks(checkpoint, changed, gone), Ignored((), ()), notes)
    record = _record(source, calibration, routing, kept, gone)
    config = _recounted(checkpoint.config, rule.counts, routing, is_shorter)
    return Pruning(plan, routing, config, kept, record)


def prune(source: Source, pruning: Pruning, output: Path, settings: Settings) -> Result:
    """Carry out what prepare_prune says; config.json is written last.

    Raises OutputError as open_output does; SourceError where the source changed or is gone.
    """
    return carry_out(pruning_job(source, pruning), Pruner(source), output, settings)


def pruning_job(source: Source, pruning: Pruning) -> Job:
    """The conversion whose result is a checkpoint with fewer experts."""
    texts = {
        **index_text(pruning.plan),
        PRUNING: as_text(pruning.record),
        "config.json": as_text(pruning.config),
    }
    return Job(source, pruning.plan, texts, None, "config.json", frozenset(texts))


class Pruner:
    """Writes the parts of tensors that stay, one after the other."""

    action: Action = "prune"
    made = PRUNED
    device = "cpu"

    def __init__(self, source: Source) -> None:
        self.source = source
        self.threads = processors()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        copy_steps(self.source, steps, writer, stop)


def describe_pruning(source: Source, pruning: Pruning, settings: Settings) -> dict[str, object]:
    """The document of `prune --dry-run --json`: that of `quantize`, and which experts stay."""
    plan = pruning.plan
    sized = [Sized(step, step.source_bytes, step.output_bytes) for step in plan.steps]
    return {
        "format": PRUNED,
        "dialect": None,
        "experts": pruning.experts,
        "kept": pruning.kept,
        "source_bytes": sum(shard.nbytes for shard in source.checkpoint.shards),
        "output_bytes": plan.output_bytes,
        "bits_per_weight": None,
        "added_bytes": 0,
        "peak_memory_bytes": BASE_NBYTES + min(source.held_nbytes, source.checkpoint.nbytes),
        "peak_disk_bytes": pruning_job(source, pruning).output_nbytes,
        "seconds_estimated": estimate_seconds(source, plan, open_backend("cpu"), settings.workers),
        **describe_steps(sized, lambda step: step.outputs[0].name),
        "warnings": list(plan.warnings),
    }


def _refuse_artifact(source: Source) -> None:
    """InputError for files and records that a checkpoint with other experts would contradict."""
    checkpoint = source.checkpoint
    if any(shard.frame.container != "safetensors" for shard in checkpoint.shards):
        raise InputError(
            "prune-source",
            f"{source.name} is a GGUF file; expected safetensors",
            "Prune the model it was made from.",
        )
    if source.has_file(RECORD):
        detail = f"{source.name} is an artifact of fp4convert, whose records hold every file as it is; expected its source"
        raise InputError("prune-source", detail, "Prune that, and quantize the result.")
    records = {key: checkpoint.config[key] for key in _QUANTIZATION if key in checkpoint.config}
    if found := _ONE_EXPERT.search(json.dumps(records)):
        detail = f"config.json: the record of quantization names single experts ({found[0]}...), which get other numbers"
        raise InputError(
            "prune-source", detail, "Prune the original weights, and quantize the result."
        )


def _sees_none(calibration: Calibration, first: Mixture, checkpoint: Checkpoint) -> InputError:
    detail = f"{calibration.path} has no expert_saliency of {first.name}, nor of any other layer"
    detail = f"{detail}: fp4convert calibrate does not see into the experts of {checkpoint.config.get('model_type')} models"
    next_step = "docs/pruning.md lists those that it does, and what a file of your own has to hold."
    return InputError("calibration-missing", detail, next_step, first.name)


def _kept_of(calibration: Calibration, mixture: Mixture, routing: Routing) -> tuple[int, ...]:
    """The experts of a mixture that stay; InputError where the calibration does not tell."""
    again = "Calibrate again: fp4convert calibrate SOURCE -o FILE."
    if not calibration.has(mixture.name, "expert_saliency"):
        detail = f"{calibration.path} has no expert_saliency of {mixture.name}; expected it of every layer with experts"
        raise InputError("calibration-missing", detail, again, mixture.name)
    found = calibration.experts(mixture.name)
    for table in (found.saliency, found.tokens):
        if table.shape != (routing.experts,):
            detail = f"{calibration.path}: {mixture.name} has statistics of the shape {list(table.shape)}"
            raise InputError(
                "calibration-shape",
                f"{detail}; expected {routing.experts} experts",
                again,
                mixture.name,
            )
    return choose_kept(found.saliency.tolist(), routing)


def _tasks(
    checkpoint: Checkpoint, changed: Mapping[str, Draft | None], gone: Collection[str]
) -> tuple[Task, ...]:
    """Every tensor of the result at its place, each in the shard that it was in."""
    writing = Writing(checkpoint, Target(PRUNED))
    tasks: list[Task] = []
    for shard in checkpoint.shards:
        drafts = [
            changed[ref.name] if ref.name in changed else _copied(ref)
            for ref in shard.tensors
            if ref.name not in gone
        ]
        if staying := [
            draft for draft in drafts if draft
        ]:  # a shard of which nothing is left is none
            tasks.append(writing.task(shard, staying))
    refuse_collisions(tasks)
    return tuple(tasks)


def _copied(ref: TensorRef) -> Draft:
    return Draft(
        "copy", "no part of experts", (ref,), (TensorSpec(ref.name, ref.dtype, ref.shape),)
    )


def _drafts(
    mixture: Mixture, kept: Sequence[int], experts: int
) -> Iterator[tuple[str, Draft | None]]:
    """What becomes of every tensor of a mixture; None of those that go."""
    place = {expert: number for number, expert in enumerate(kept)}
    for ref, expert, rest in mixture.singles:
        if expert in place:
            spec = TensorSpec(mixture.renamed(place[expert], rest), ref.dtype, ref.shape)
            yield (
                ref.name,
                Draft("prune", "an expert that stays, numbered anew", (ref,), (spec,), ref.shape),
            )
        else:
            yield ref.name, None
    for ref in (*mixture.stacks, *mixture.rows):
        shape = (ref.shape[0] // experts * len(kept), *ref.shape[1:])
        parts = kept_rows(ref, kept, experts)
        yield (
            ref.name,
            Draft(
                "prune",
                "the experts that stay",
                parts,
                (TensorSpec(ref.name, ref.dtype, shape),),
                shape,
            ),
        )
    for ref in mixture.columns:
        shape = (*ref.shape[:-1], len(kept))
        parts = kept_columns(ref, kept, experts)
        yield (
            ref.name,
            Draft(
                "prune",
                "the experts that stay",
                parts,
                (TensorSpec(ref.name, ref.dtype, shape),),
                shape,
            ),
        )


def _recounted(
    config: Mapping[str, object], counts: Collection[str], routing: Routing, is_shorter: bool
) -> dict[str, object]:
    """A config.json, or what is nested in it, with as many experts as stay.

    is_shorter  layers that predict further tokens are left out
    """
    made: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = _recounted(value, counts, routing, is_shorter)
        elif key in counts:
            made[key] = routing.keep
        else:
            made[key] = 0 if is_shorter and key in PREDICTION_KEYS else value
    return made


def _record(
    source: Source,
    calibration: Calibration,
    routing: Routing,
    kept: Mapping[str, tuple[int, ...]],
    gone: Collection[str],
) -> dict[str, object]:
    """What was done, for whoever wants to check it."""
    return {
        "method": "reap",
        "experts": {"before": routing.experts, "kept": routing.keep},
        "kept": kept,
        "left_out": sorted(gone),
        "calibration": {
            "sha256": calibration.sha256,
            "samples": calibration.samples,
            "tokens": calibration.tokens,
        },
        "source": {"repo": source.checkpoint.repo, "revision": source.checkpoint.revision},
        "producer": {"name": "fp4convert", "version": version("fp4convert")},
    }


def _left_out(gone: Collection[str]) -> Iterator[str]:
    if gone:
        detail = f"{len(gone)} tensors of layers that predict further tokens are left out, the first {min(gone)!r}: the calibration"
        yield f"{detail} does not say which of their experts to keep; the model computes the same, and cannot speculate with them"


def _ranks(routing: Routing) -> Iterator[str]:
    if uneven := [str(ranks) for ranks in RANKS if routing.keep % ranks]:
        yield f"{routing.keep} experts cannot be dealt out evenly among {' or '.join(uneven)} ranks of expert parallelism"


def _few_tokens(calibration: Calibration, kept: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """A warning of experts that were judged by little."""
    few = {name: calibration.experts(name).tokens < FEW_TOKENS for name in kept}
    if layers := [name for name, those in few.items() if those.any()]:
        count = sum(int(those.sum()) for those in few.values())
        stay = sum(int(few[name][list(kept[name])].sum()) for name in layers)
        detail = f"{count} experts in {len(layers)} layers got fewer than {FEW_TOKENS} tokens, {stay} of which stay, first in"
        yield f"{detail} {layers[0]}: their saliency is little more than chance; calibrate with more text"
