"""Plan quantize: what happens to each tensor, where each byte goes.

Nothing is read but headers and records, and the scalars of what input scales are taken from. A dry
run, the disk check, bounded memory and identical output from any number of workers all follow from
this one value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.encodings.base import Linear, input_scale_of
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.planning.activation_scales import UNIT_SCALE, Fed, InputScales, scales_of
from fp4convert.planning.decisions import (
    Verdict,
    decide,
    of_other_types,
    uneven_groups,
    warnings_on_four_bits,
)
from fp4convert.planning.kept_dtype import (
    carry_unread,
    draft_floats,
    expanded_spec,
    idle_keep_dtype,
    is_expanded,
    keep_tensor,
    kept_spec,
    narrowed,
    scales_of_tables,
)
from fp4convert.planning.no_effect import find_idle
from fp4convert.planning.notes import (
    NO_CONFIG,
    note_carried,
    note_left_behind,
    note_stacks,
    note_unchanged,
    note_unread_verdicts,
    note_unscaled,
    notes_on,
    notes_on_adapter,
    notes_on_names,
)
from fp4convert.planning.plan import Plan, Writing, refuse_collisions
from fp4convert.planning.steps import (
    ENGINE_ONLY,
    WRITTEN_ANEW,
    Action,
    Draft,
    Task,
    module_of,
    refuse_forgotten,
)
from fp4convert.planning.units import Units
from fp4convert.recipes.patterns import sift
from fp4convert.recipes.recipe import Recipe, ScaleGroup, scale_groups
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import DTYPE_BITS, WEIGHT, TensorRef, TensorSpec
from fp4convert.storage.source import Checkpoint

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.planning.global_scales import GlobalScales

INPUTS_TOO = (
    "engines of this dialect quantize activations to four bits, as with --activations 4, by scales"
    " that they find themselves"
)


@dataclass(frozen=True, slots=True)
class Cache:
    """The scales of a KV cache in a plan.

    drafts  by the name of the source's tensor beside which they are written
    own     names of the source's own scales, which stay in another spelling
    """

    drafts: Mapping[str, list[Draft]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scalars:
    """Scales beside the weights that come from elsewhere.

    inputs       of activations
    calibration  statistics of the inputs, to compare with
    cache        of a cache of keys and values
    weights      global scales of the weights, where a file gives them
    """

    inputs: InputScales = UNIT_SCALE
    calibration: Calibration | None = None
    cache: Cache = field(default_factory=Cache)
    weights: GlobalScales | None = None


def plan_quantize(
    checkpoint: Checkpoint, recipe: Recipe, linears: Linears, scalars: Scalars = Scalars()
) -> Plan:
    """Plan the checkpoint in the recipe's format and dialect.

    Raises  InputError for stacks of experts with an unknown layout, for forms without a place in
            the dialect, for modules without an input scale or a given global scale, or where an
            output would take the name of another tensor
    """
    dialect = dialect_to_write(recipe.target)
    refuse_other_container(checkpoint, dialect, str(recipe.target.dialect))
    linears.judged.refuse_odd_sizes(checkpoint.config)
    verdicts = decide(linears, recipe, dialect)
    fed = find_fed(verdicts, recipe, dialect)
    inputs, notes = _input_scales(fed, scalars) if fed else ({}, [])
    amaxes, more = _amaxes(verdicts, scalars.weights, recipe)
    # a step for every tensor, and its place
    units = Units(verdicts, dialect, recipe.target, inputs=inputs, amaxes=amaxes)
    linears = replace(linears, vectors=_vectors_of(linears, verdicts, dialect, checkpoint))
    drafts = _drafts_by_shard(checkpoint, linears, units, recipe, scalars.cache)
    writing = Writing(checkpoint, recipe.target, dialect)
    tasks = [writing.task(shard, own) for shard, own in zip(checkpoint.shards, drafts, strict=True)]
    every = [draft for own in drafts for draft in own]
    has_scalars = any(draft.scalar is not None for draft in every)
    outputs = refuse_collisions(tasks)
    carried = {*linears.aside, *scales_of_tables(linears, units.shapes)}
    _refuse_lookalikes(outputs, dialect, {*units.shapes, *map(module_of, carried)})
    left_out = list_left_out(linears, outputs)
    refuse_forgotten(checkpoint.tensors, tasks, left_out, linears.homes)
    # For the records and for people.
    warnings = (
        *notes_on(checkpoint),
        *notes_on_adapter(linears, checkpoint, recipe.target, scalars.calibration),
        *note_stacks(checkpoint, linears.consumed()),
        *([INPUTS_TOO] if dialect.TRAITS.correction else uneven_groups(verdicts, recipe, tasks)),
        *warnings_on_four_bits(verdicts, recipe),
        *of_other_types(tasks),
        *chain(notes, more, scalars.cache.notes),
        *note_left_behind(linears, tasks, has_scalars, scalars.inputs.is_auto, scalars.cache.own),
        *note_unchanged(verdicts, recipe),
        *note_unscaled(linears),
        *note_unread_verdicts(verdicts, recipe, checkpoint.config, dialect.TRAITS, linears.judged),
        *([] if checkpoint.config or dialect.TRAITS.container != "safetensors" else [NO_CONFIG]),
        *notes_on_names(linears.judged),
        *linears.notes,
        *note_carried(linears.aside),
    )
    idle = (*find_idle(recipe, checkpoint, linears, verdicts), *idle_keep_dtype(recipe, tasks))
    return Plan(
        recipe.target,
        tuple(tasks),
        _ignore(kept_modules(tasks), _asked_for(verdicts, recipe), verdicts, recipe),
        warnings,
        _stack_rules(linears, recipe),
        idle=idle,
        excluded=len(sift(recipe.exclude, verdicts)),
        left_out=left_out,
        **_added(linears, scalars, every),
    )


def _added(linears: Linears, scalars: Scalars, drafts: Sequence[Draft]) -> dict[str, Any]:
    """Return the fields of a plan on everything from beside the source."""
    sources = (scalars.inputs.source, scalars.weights.source if scalars.weights else None)
    return {
        "adapter": linears.adapter,
        "base": linears.base,
        "judged": linears.judged,
        "folds": linears.folds,
        "calibration": str(scalars.calibration.path) if scalars.calibration else None,
        "scale_sources": tuple(source for source in sources if source),
        "scalars": tuple((one.name, one.scalar) for one in drafts if one.scalar is not None),
        "amaxes": tuple((one.name, one.amaxes) for one in drafts if one.amaxes),
    }


def _amaxes(
    verdicts: Mapping[str, Verdict], given: GlobalScales | None, recipe: Recipe
) -> tuple[Mapping[str, float], list[str]]:
    """Return the amaxes of given global scales, by module, and notes on them."""
    if given is None:
        return {}, []
    from fp4convert.planning.global_scales import given_amaxes

    return given_amaxes(verdicts, given, recipe.target)


def _drafts_by_shard(
    checkpoint: Checkpoint, linears: Linears, units: Units, recipe: Recipe, cache: Cache
) -> list[list[Draft]]:
    """Draft a step for every tensor of each shard, in their order."""
    home = linears.by_home()
    consumed = linears.consumed() - scales_of_tables(linears, units.shapes)
    found = []
    for shard in checkpoint.shards:
        drafts: list[Draft] = []
        for ref in shard.tensors:
            if ref.name in linears.vectors:
                drafts.append(_change(linears.vectors[ref.name], ref, recipe))
            elif ref.name in home:
                drafts += _drafts_of(ref, home[ref.name], units, recipe)
            elif ref.name in linears.aside:
                drafts.append(carry_unread(linears.aside[ref.name], recipe))
            elif ref.name not in consumed:
                drafts.append(_keep(ref, recipe))
            drafts += cache.drafts.get(ref.name, ())
        found.append(drafts)
    return found


def list_left_out(linears: Linears, outputs: Collection[str]) -> dict[str, str]:
    """Return scales of packed matrices that are left out, with reasons."""
    idle = [ref for linear in linears.of.values() for ref in linear.idle]
    return {
        ref.name: WRITTEN_ANEW if ref.name in outputs else ENGINE_ONLY
        for ref in (*idle, *linears.idle)
    }


def _vectors_of(
    linears: Linears, verdicts: Mapping[str, Verdict], dialect: Dialect, checkpoint: Checkpoint
) -> dict[str, Linear]:
    """Return vectors that change, with the biases of modules in tiles."""
    vectors, table = dict(linears.vectors), dialect.TRAITS.correction
    if table:
        made = [module for module, verdict in verdicts.items() if verdict.is_made]
        tensors = {ref.name: ref for ref in checkpoint.tensors}
        from fp4convert.checkpoint.encodings.corrected import biases_in_tiles

        vectors.update(biases_in_tiles(made, tensors, table, vectors))
    return vectors


def _asked_for(verdicts: Mapping[str, Verdict], recipe: Recipe) -> list[str]:
    """List quantized modules that a rule of keep fits.

    Records must not ignore these.
    """
    asked = recipe.pick_asked_for(verdicts)
    return [
        module
        for module, verdict in verdicts.items()
        if (verdict.stays or module in asked) and verdict.is_made
    ]


def _ignore(
    kept: Iterable[str], asked: Iterable[str], verdicts: Mapping[str, Verdict], recipe: Recipe
) -> Ignored:
    """Return the modules and patterns that records ignore.

    No pattern may fit a quantized module, but a rule's pattern may fit an exception of the rule.
    """
    made = recipe.pick_doubtful([module for module in verdicts if verdicts[module].is_made])
    stays = tuple(kept)
    return Ignored(stays, recipe.patterns_to_declare(stays, [*asked, *made]))


def _drafts_of(
    ref: TensorRef, linears: list[Linear], units: Units, recipe: Recipe
) -> Iterator[Draft]:
    """Draft the steps of a stored tensor with one or more linear layers.

    The tensor stays whole where all of them stay.
    """
    own = [units.verdicts[linear.module] for linear in linears]
    if not any(
        verdict.is_made or is_expanded(verdict.linear) or verdict.linear.coding.change
        for verdict in own
    ):
        yield keep_tensor(ref, own[0].action, own[0].reason, recipe)
        return
    for verdict in own:
        linear, coding = verdict.linear, verdict.linear.coding
        if verdict.is_made:
            yield from units.draft(linear.module)
        elif not coding.is_packed and coding.change:
            yield _change(linear, ref, recipe, verdict.reason)
        else:
            spec = TensorSpec(linear.module + WEIGHT, ref.dtype, linear.shape)
            if coding.is_packed:
                spec = expanded_spec(spec.name, linear.shape, recipe)
            yield draft_floats(verdict.action, verdict.reason, linear, spec)


def _input_scales(fed: Sequence[Fed], scalars: Scalars) -> tuple[dict[str, float], list[str]]:
    """Return the input scale of every module, and notes and warnings."""
    from fp4convert.planning.input_scale_warnings import judge_scales

    inputs, notes = scales_of(fed, scalars.inputs)
    return inputs, [*notes, *judge_scales(fed, inputs, scalars.inputs, scalars.calibration)]


def find_fed(verdicts: Mapping[str, Verdict], recipe: Recipe, dialect: Dialect) -> list[Fed]:
    """Find modules with a static input scale beside their weights."""
    table, found = dialect.TRAITS.fp8, []
    groups: dict[str, ScaleGroup] | None = None
    for module, verdict in verdicts.items():
        form, linear = verdict.form, verdict.linear
        if form is None:
            continue
        is_eight = table is not None and table.has_input_scale(form)
        if form.has_input_scale or is_eight:
            groups = scale_groups(verdicts, recipe.groups) if groups is None else groups
            has_own = is_eight and input_scale_of(linear) is not None
            found.append(Fed(module, linear.shape, form, groups.get(module), has_own))
    return found


def _stack_rules(linears: Linears, recipe: Recipe) -> tuple[StackRule, ...]:
    """Return the rules by which stacks were read, an artifact's first."""
    if all(one.stack is None and one.coding.artifact is None for one in linears.of.values()):
        return ()
    from fp4convert.checkpoint.expert_stacks import rules_read

    return rules_read(linears.of, recipe)


def _change(linear: Linear, ref: TensorRef, recipe: Recipe, reason: str = "") -> Draft:
    """Draft the step of a tensor whose values or order change.

    It keeps its dtype unless it is put into tiles, or --keep-dtype names another.

    Raises  InputError where an adapter changes an expert of a stack that stays
    """
    is_folded, text = bool(linear.coding.foldings), linear.coding.change
    dtype = linear.coding.becomes
    if is_folded and not reason:
        text = "folded: divided by the factors of the layers that read it"
    elif linear.stack:
        detail = f"{linear.module} lies in the stack {ref.name}, which is kept ({reason})"
        from fp4convert.checkpoint.adapters.pairs import ALONE

        step = f"Quantize the stack, or change the weights first: {ALONE[0].lower()}{ALONE[1:]}"
        expected = "expected it to be quantized, for the adapter changes it"
        raise InputError("adapter-stack", f"{detail}; {expected}", step, linear.module)
    action: Action = "fold" if is_folded else "reorder" if dtype else "merge"
    reason, spec = f"{reason}; {text}" if reason else text, kept_spec(ref, recipe)
    if spec.dtype != ref.dtype:
        reason = f"{reason}; {narrowed(ref, recipe)}"
    elif dtype:
        spec = spec._replace(dtype=dtype)
    draft = draft_floats(action, reason, linear, spec)
    is_matrix = is_folded or len(ref.shape) == MATRIX_DIMENSIONS
    shape = linear.shape if is_matrix else ()
    return draft._replace(step=draft.step._replace(shape=shape))


def _keep(ref: TensorRef, recipe: Recipe) -> Draft:
    """Draft the step of a tensor that is no linear layer, with the reason."""
    action: Action = "copy"
    if not ref.name.endswith(WEIGHT):
        reason = "not a linear layer's weight"
    elif len(ref.shape) != MATRIX_DIMENSIONS:
        reason = f"{len(ref.shape)}-dimensional, not a matrix"
    elif not (reason := recipe.reason_to_keep(module_of(ref.name)) or ""):
        from fp4convert.storage.gguf import BLOCK_TYPES

        read = FLOAT_TYPES if ref.dtype in DTYPE_BITS else (*FLOAT_TYPES, *BLOCK_TYPES)
        action, reason = "skip", f"{ref.dtype}, not one of {', '.join(read)}"
    return keep_tensor(ref, action, reason, recipe)


def kept_modules(tasks: Iterable[Task]) -> list[str]:
    """List modules that are not quantized and have a matrix or a stack."""
    kept: set[str] = set()
    made = {""}
    for task in tasks:
        for step in task.steps:
            if step.is_made:
                made.add(step.module)
                made.update([module_of(ref.name) for ref in step.outputs])
            else:
                kept.update(
                    module_of(ref.name)
                    for ref in step.outputs
                    if len(ref.shape) >= MATRIX_DIMENSIONS
                )
    return sorted(kept - made)


def _refuse_lookalikes(
    outputs: Mapping[str, TensorRef], dialect: Dialect, chosen: Collection[str]
) -> None:
    """Raise InputError where a kept tensor looks like a four-bit one."""
    if others := sorted(set(dialect.find(outputs)) - set(chosen)):
        detail = (
            f"{others[0]} is kept, and its tensors have the names and types of four-bit ones in"
            " this dialect"
        )
        raise InputError("name-collision", detail, "Choose another --dialect.", others[0])


def refuse_other_container(checkpoint: Checkpoint, dialect: Dialect, name: str) -> None:
    """Raise InputError where the dialect belongs to another kind of file."""
    for shard in checkpoint.shards:
        if shard.frame.container == dialect.TRAITS.container:
            continue
        if dialect.TRAITS.container == "gguf":
            detail = (
                f"{shard.file}: --dialect gguf needs a GGUF file as its source, with llama.cpp's"
                " names and metadata; expected one"
            )
            next_step = (
                "Make it with llama.cpp's script: python convert_hf_to_gguf.py MODEL --outtype bf16"
                " --outfile model-bf16.gguf, and quantize that."
            )
        else:
            detail = (
                f"{shard.file}: a GGUF file has llama.cpp's names and order of rows, which dialect"
                f" {name} does not read"
            )
            next_step = (
                "Use --dialect gguf, or give the folder of the model's config.json: --config DIR."
            )
        raise InputError("dialect-container", detail, next_step)
