"""Plan and carry out prune.

A pruned checkpoint is an ordinary one: the tensors of experts that stay are numbered anew, stacks
and routers lose the parts of the others, config.json counts what is left, and all else is copied.
Which experts stay, experts.py decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fp4convert.calibration.fingerprint import check_source
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.base import Ignored
from fp4convert.conversion.artifact_job import index_text
from fp4convert.conversion.dry_run import (
    BASE_NBYTES,
    Sized,
    describe_left_out,
    describe_steps,
    estimate_seconds,
)
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
from fp4convert.execution.carry_out import carry_out
from fp4convert.execution.job import Job
from fp4convert.execution.settings import Result, Settings
from fp4convert.makers.maker import Tools
from fp4convert.numerics.backends import open_backend
from fp4convert.planning.kept_dtype import copy_as, keep_tensor
from fp4convert.planning.notes import notes_on
from fp4convert.planning.plan import Plan, Writing, refuse_collisions
from fp4convert.planning.steps import Draft, Task, module_of, refuse_forgotten
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import PREDICTION, Target, model_recipe
from fp4convert.storage.checkpoint_files import RECORD, REPORT
from fp4convert.storage.json_text import as_text
from fp4convert.storage.safetensors import TensorSpec
from fp4convert.storage.source import Checkpoint, Source, uncollected
from fp4convert.version import __version__

PRUNED = "pruned"
PRUNING = "expert_pruning.json"  # our record of what stayed
# How many layers predict further tokens.
PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
RANKS = (2, 4, 8)  # of expert parallelism
FEW_TOKENS = 100  # routed to an expert: below, its saliency is little more than chance
_ONE_EXPERT = re.compile(r"experts\\*\.\d")
_QUANTIZATION = ("quantization_config", "compression_config")


class Pruning(NamedTuple):
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
        """Count the experts of a layer before and after, and the layers."""
        return {"before": self.routing.experts, "kept": self.routing.keep, "layers": len(self.kept)}


def prepare_prune(
    source: Source, calibration: Calibration, keep: int, recipe: str | None = None
) -> Pruning:
    """Plan what `prune` carries out.

    keep    experts that stay in every layer that has some
    recipe  as --recipe names it; None for the model's own
    Raises  InputError for a model whose experts no recipe tells, a number that its router cannot
            work with, or a calibration that is of another checkpoint or lacks a layer
    """
    checkpoint = source.checkpoint
    _refuse_artifact(source)
    rules = model_recipe(checkpoint.config, RecipeOptions(recipe=recipe))
    with uncollected():
        mixtures = find_mixtures(tuple(checkpoint.tensors), rules)
    rule = rules.experts[0]
    routing = read_routing(checkpoint.config, rule, keep)
    check_source(calibration, source)
    # Layers that predict further tokens stay only where the calibration has seen all of them: the
    # model itself does not run them.
    further = rules.patterns_of(PREDICTION)
    ahead = [one for one in mixtures if matches_any(further, one.name)]
    is_shorter = not all(calibration.has(one.name, "expert_saliency") for one in ahead)
    seen = [one for one in mixtures if not is_shorter or one not in ahead]
    if seen and not any(calibration.has(one.name, "expert_saliency") for one in seen):
        first, family = seen[0].name, checkpoint.config.get("model_type")
        detail = f"{calibration.path} has no expert_saliency of {first}, nor of any other layer"
        unseen = f"fp4convert calibrate cannot observe the experts of {family} models"
        next_step = "docs/special.md lists models that it can, and what your own file must hold."
        raise InputError("calibration-missing", f"{detail}: {unseen}", next_step, first)
    for mixture in seen:
        check_mixture(mixture, rule, routing.experts)
    kept = {one.name: _choose_experts(calibration, one, routing) for one in seen}
    gone = {
        ref.name
        for ref in checkpoint.tensors
        if is_shorter and matches_any(further, module_of(ref.name))
    }
    changed = {
        name: draft for one in seen for name, draft in _drafts(one, kept[one.name], routing.experts)
    }
    warnings = (*notes_on(checkpoint), *_warn(calibration, routing, kept, gone))
    tasks = _make_tasks(checkpoint, changed, gone)
    left_out = _list_left_out(checkpoint, changed, gone, tasks)
    plan = Plan(Target(PRUNED), tasks, Ignored((), ()), warnings, left_out=left_out)
    record: dict[str, object] = {
        "method": "reap",
        "experts": {"before": routing.experts, "kept": routing.keep},
        "kept": kept,
        "left_out": sorted(gone),
        "calibration": {
            "sha256": calibration.sha256,
            "samples": calibration.samples,
            "tokens": calibration.tokens,
        },
        "source": {"repo": checkpoint.repo, "revision": checkpoint.revision},
        "producer": {"name": "fp4convert", "version": __version__},
    }
    config = _recount(checkpoint.config, rule.counts, routing, is_shorter)
    return Pruning(plan, routing, config, kept, record)


def prune(source: Source, pruning: Pruning, output: Path, settings: Settings) -> Result:
    """Carry out what prepare_prune says; config.json is written last.

    Raises OutputError as open_output does; SourceError where the source changed or is gone.
    """
    tools = Tools(source, open_backend("cpu"))
    return carry_out(pruning_job(source, pruning), tools, output, settings)


def pruning_job(source: Source, pruning: Pruning) -> Job:
    """Make the conversion whose result is a checkpoint with fewer experts."""
    texts = {
        **index_text(pruning.plan),
        PRUNING: as_text(pruning.record),
        "config.json": as_text(pruning.config),
    }
    replaced = frozenset({*texts, REPORT})
    return Job(source, pruning.plan, texts, None, "config.json", replaced, "prune")


def describe_pruning(source: Source, pruning: Pruning, settings: Settings) -> dict[str, object]:
    """Make the document of `prune --dry-run --json`.

    That of `quantize`, and which experts stay
    """
    plan = pruning.plan
    sized = [Sized(step, step.source_bytes, step.output_bytes) for step in plan.steps]
    return {
        "format": PRUNED,
        "dialect": None,
        "experts": pruning.experts,
        "kept": pruning.kept,
        "source_bytes": source.checkpoint.nbytes,
        "output_bytes": pruning_job(source, pruning).result_nbytes,
        "bits_per_weight": None,
        "added_bytes": 0,
        "peak_memory_bytes": BASE_NBYTES + source.held_nbytes((), 1),
        "peak_disk_bytes": pruning_job(source, pruning).peak_nbytes,
        "seconds_estimated": estimate_seconds(source, plan, open_backend("cpu"), settings.workers),
        **describe_steps(sized, lambda step: step.outputs[0].name),
        "left_out": describe_left_out(plan),
        "warnings": list(plan.warnings),
    }


def _refuse_artifact(source: Source) -> None:
    """Raise InputError for files that other experts would contradict."""
    checkpoint = source.checkpoint
    if any(shard.frame.container != "safetensors" for shard in checkpoint.shards):
        detail = f"{source.name} is a GGUF file; expected safetensors"
        raise InputError("prune-source", detail)
    if source.has_file(RECORD):
        detail = f"{source.name} is an artifact of fp4convert, whose records name every file"
        detail = f"{detail} with its hash; expected its source"
        raise InputError("prune-source", detail, "Prune its source, and quantize the result.")
    records = {key: checkpoint.config[key] for key in _QUANTIZATION if key in checkpoint.config}
    if found := _ONE_EXPERT.search(json.dumps(records)):
        detail = "config.json: the quantization record names single experts"
        detail = f"{detail} ({found[0]}...), which pruning renumbers"
        next_step = "Prune the original weights, and quantize the result."
        raise InputError("prune-source", detail, next_step)


def _choose_experts(
    calibration: Calibration, mixture: Mixture, routing: Routing
) -> tuple[int, ...]:
    """Choose the experts of a mixture that stay, by their saliency."""
    again = "Calibrate again: fp4convert calibrate SOURCE -o FILE."
    if not calibration.has(mixture.name, "expert_saliency"):
        detail = f"{calibration.path} has no expert_saliency of {mixture.name}"
        detail = f"{detail}; expected it of every layer with experts"
        raise InputError("calibration-missing", detail, again, mixture.name)
    found = calibration.experts(mixture.name)
    for table in (found.saliency, found.tokens):
        if table.shape != (routing.experts,):
            shape = list(table.shape)
            detail = f"{calibration.path}: {mixture.name} has statistics of the shape {shape}"
            detail = f"{detail}; expected {routing.experts} experts"
            raise InputError("calibration-shape", detail, again, mixture.name)
    return choose_kept(found.saliency.tolist(), routing)


def _make_tasks(
    checkpoint: Checkpoint, changed: Mapping[str, Draft | None], gone: Collection[str]
) -> tuple[Task, ...]:
    """Place every tensor of the result in the shard that it was in."""
    writing = Writing(checkpoint, Target(PRUNED))
    tasks: list[Task] = []
    for shard in checkpoint.shards:
        drafts = []
        for ref in shard.tensors:
            if ref.name in gone:
                continue
            if ref.name in changed:
                drafts.append(changed[ref.name])
            else:
                drafts.append(keep_tensor(ref, "copy", "not part of an expert", None))
        # A shard of which nothing is left is none.
        if staying := [draft for draft in drafts if draft]:
            tasks.append(writing.task(shard, staying))
    refuse_collisions(tasks)
    return tuple(tasks)


def _list_left_out(
    checkpoint: Checkpoint,
    changed: Mapping[str, Draft | None],
    gone: Collection[str],
    tasks: Sequence[Task],
) -> dict[str, str]:
    """Say of tensors that go why; InputError where one is forgotten."""
    left_out = dict.fromkeys(gone, "of a layer that predicts further tokens")
    left_out |= {name: "of an expert that goes" for name, draft in changed.items() if draft is None}
    # Of a table, the parts of the experts that stay.
    parts = {name: draft.step.refs for name, draft in changed.items() if draft}
    wanted = (part for ref in checkpoint.tensors for part in parts.get(ref.name, (ref,)))
    refuse_forgotten(wanted, tasks, left_out, {})
    return left_out


def _drafts(
    mixture: Mixture, kept: Sequence[int], experts: int
) -> Iterator[tuple[str, Draft | None]]:
    """Decide what becomes of every tensor of a mixture; None: it goes."""
    place = {expert: number for number, expert in enumerate(kept)}
    for ref, expert, rest in mixture.singles:
        if expert not in place:
            yield ref.name, None
            continue
        spec = TensorSpec(mixture.renamed(place[expert], rest), ref.dtype, ref.shape)
        reason = "a kept expert, renumbered"
        yield ref.name, copy_as("prune", reason, (ref,), spec, ref.shape)
    tables = [
        *(
            (ref, (ref.shape[0] // experts * len(kept), *ref.shape[1:]), kept_rows)
            for ref in (*mixture.stacks, *mixture.rows)
        ),
        *((ref, (*ref.shape[:-1], len(kept)), kept_columns) for ref in mixture.columns),
    ]
    for ref, shape, kept_parts in tables:
        spec = TensorSpec(ref.name, ref.dtype, shape)
        parts = kept_parts(ref, kept, experts)
        yield ref.name, copy_as("prune", "the kept experts", parts, spec, shape)


def _recount(
    config: Mapping[str, object], counts: Collection[str], routing: Routing, is_shorter: bool
) -> dict[str, object]:
    """Write the new number of experts into a config.json and into nested ones.

    is_shorter  layers that predict further tokens are left out
    """
    made: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = _recount(value, counts, routing, is_shorter)
        elif key in counts:
            made[key] = routing.keep
        else:
            made[key] = 0 if is_shorter and key in PREDICTION_KEYS else value
    return made


def _warn(
    calibration: Calibration,
    routing: Routing,
    kept: Mapping[str, tuple[int, ...]],
    gone: Collection[str],
) -> Iterator[str]:
    """Warn of layers left out, uneven ranks, and experts judged by little."""
    if gone:
        detail = f"{len(gone)} tensors of multi-token-prediction layers are left out"
        detail = f"{detail}, the first {min(gone)!r}: the calibration does not say which of their"
        detail = f"{detail} experts to keep; the model computes the same, but cannot be used for"
        yield f"{detail} speculative decoding with them"
    if uneven := [str(ranks) for ranks in RANKS if routing.keep % ranks]:
        detail = f"{routing.keep} experts cannot be divided evenly among {' or '.join(uneven)}"
        yield f"{detail} ranks of expert parallelism"
    few = {name: calibration.experts(name).tokens < FEW_TOKENS for name in kept}
    if layers := [name for name, those in few.items() if those.any()]:
        count = sum(int(those.sum()) for those in few.values())
        stay = sum(int(few[name][list(kept[name])].sum()) for name in layers)
        detail = f"{count} experts in {len(layers)} layers got fewer than {FEW_TOKENS} tokens"
        detail = f"{detail}, {stay} of them kept, first in {layers[0]}"
        yield f"{detail}: their saliency is unreliable; calibrate with more text"
