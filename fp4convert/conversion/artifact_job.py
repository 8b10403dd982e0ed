"""Add to a plan the records that make its result an artifact.

The records are those that engines read, the index of the shards, and our own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp4convert.checkpoint.artifact import params_unquantized
from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.forms import Group, with_fused
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.record import (
    BASE,
    PADDING,
    TABLE_SIGN,
    RecordContents,
    declare_tables,
    make_record,
)
from fp4convert.engines.module_names import engine_names
from fp4convert.execution.job import Job
from fp4convert.planning.plan import Plan
from fp4convert.recipes.patterns import configs_in, matches, sift
from fp4convert.storage.checkpoint_files import (
    CARD,
    ENGINE_RECORD,
    GGUF,
    PAGE,
    RECORD,
    REPORT,
    index_file,
)
from fp4convert.storage.json_text import as_text, unquantized
from fp4convert.storage.source import Source, read_whole
from fp4convert.version import __version__

ENGINE_RECORDS = frozenset(  # of any dialect: a source's own would contradict ours
    {RECORD, ENGINE_RECORD, REPORT, PAGE}
)
CARD_LEFT = f"{CARD} is left out: fp4convert wrote it for the artifact that this is made from"
# How report/model_card.py begins a card, and how it brackets one of an evaluation alone.
_OWN_CARD = re.compile(rb"\s*# .*\s+.*, made by fp4convert ")
_EVALUATED = re.compile(
    rb"<!-- made: fp4convert evaluate -->.*<!-- end: fp4convert evaluate -->", re.S
)


def own_card(source: Source) -> frozenset[str]:
    """Name the model card of an artifact where fp4convert wrote it.

    What it says of dialect, command and figures is not true of what is made from the artifact.
    """
    if CARD not in source.checkpoint.sidecars or not source.has_file(RECORD):
        return frozenset()
    text = read_whole(source, CARD).replace(b"\r\n", b"\n").strip()
    head, _, body = text.partition(b"\n---\n")
    is_ours = b"- fp4convert" in head.split(b"\n") and _OWN_CARD.match(body)
    return frozenset({CARD} if is_ours or _EVALUATED.fullmatch(text) else ())


def describe_extras(source: Source, plan: Plan, is_part: bool) -> dict[str, Any]:
    """Return the fields of a Result on a merged adapter and on carried blocks.

    is_part  of several processes: only the whole knows of carried blocks
    """
    facts: dict[str, Any] = {"adapter": describe_adapter(plan)} if plan.adapter else {}
    if is_part:
        return facts
    facts["unexplained"] = [one._asdict() for one in plan.judged.unexplained]
    if not any(step.maker.carries for step in plan.steps):
        return facts
    from fp4convert.conversion.carried_blocks import describe_carried

    return {**facts, "carried": describe_carried(plan, source)}


def describe_adapter(plan: Plan) -> dict[str, object] | None:
    """Name the adapter that a plan merges, and count the tensors it changes."""
    adapter = plan.adapter
    if adapter is None:
        return None
    changed = [step for step in plan.steps for one in step.linears if one.coding.change]
    rounded = sum(step.is_made for step in changed)
    merged = {"rounded": rounded, "kept": len(changed) - rounded}
    return {"name": adapter.name, **adapter.as_record(), "merged": merged}


def _origin_of(source: Source) -> dict[str, object]:
    """Return the repository of the weights; of one GGUF file, its name, too."""
    checkpoint = source.checkpoint
    found: dict[str, object] = {"repo": checkpoint.repo, "revision": checkpoint.revision}
    files = [shard.file for shard in checkpoint.shards]
    if checkpoint.repo and files == [f"{source.name}{GGUF}"]:
        found["file"] = files[0]
    return found


def artifact_job(source: Source, plan: Plan, origin: dict[str, object] | None = None) -> Job:
    """Make the job of shards, then of engines' records, last of our own.

    origin  of the weights; None where it is the source
    """
    spelling = dialect_of(plan)
    groups = plan.groups
    named = list(groups)
    if not spelling.TRAITS.correction:  # whose engines look every name up
        named = [Group(group.form, with_fused(group.modules)) for group in groups]
    records = spelling.records(named, ignored_by_engines(plan, source.checkpoint.config))
    config = unquantized(source.checkpoint.config)
    if any(TABLE_SIGN in part for part in configs_in(config)):
        config = declare_tables(config, [ref for task in plan.tasks for ref in task.outputs])
    if "config.json" in records or (config and spelling.TRAITS.container == "safetensors"):
        records["config.json"] = {**config, **records.get("config.json", {})}
    # Written in this order: the index first.
    texts = {**index_text(plan), **{file: as_text(record) for file, record in records.items()}}
    texts = {**params_unquantized(source), **texts}
    producer = {"name": "fp4convert", "version": __version__}
    origin = origin or _origin_of(source)
    contents = RecordContents(groups, plan.ignored, plan.shapes, plan.stacks, plan.folds)
    contents = contents._replace(goal=plan.goal, options=plan.options)
    if plan.adapter:
        contents = contents._replace(adapter=plan.adapter.as_record())
    record = make_record(plan.target, contents, producer, origin)
    if plan.base:
        record[BASE] = plan.base.as_record()
    if padding := source.checkpoint.padding:
        record[PADDING] = padding.record
    replaced = ENGINE_RECORDS | texts.keys() | own_card(source)
    return Job(source, plan, texts, record, RECORD, replaced)


def ignored_by_engines(plan: Plan, config: Mapping[str, object]) -> Ignored:
    """Return the modules that records ignore, by every engine's names.

    A pattern that also fits an engine's name of a quantized module is left out.
    """
    quantized = [module for group in plan.groups for module in group.modules]
    kept, patterns = plan.ignored.modules, plan.ignored.patterns
    renamed = engine_names(config, (*kept, *quantized))
    if renamed:
        taken = {name for module in quantized for name in renamed.get(module, ())}
        fitted = sift(patterns, taken)
        patterns = tuple(
            pattern for pattern in patterns if not any(matches(pattern, name) for name in fitted)
        )
    return Ignored(with_fused(kept), with_fused(patterns), renamed)


def dialect_of(plan: Plan) -> Dialect:
    """Return the dialect that a plan writes."""
    if plan.target.dialect is None:
        raise RuntimeError("a plan of ordinary weights has no dialect")
    return dialect_named(plan.target.dialect)


def index_text(plan: Plan) -> dict[str, str]:
    """Return the index of several shards, or of one named as one of several."""
    files = [shard.file for shard in plan.shards]
    is_alone = len(files) == 1 and "-of-" not in files[0]
    return {} if is_alone else {index_file(files): as_text(plan.index)}
