"""Quantize one checkpoint, top to bottom.

A request becomes verdicts, units and makers; a plan places what they write; the plan is filled, and
the records are written last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp4convert.conversion.artifact_job import (
    CARD_LEFT,
    artifact_job,
    check_scalars,
    dialect_of,
    own_card,
    refuse_odd_scale,
)
from fp4convert.conversion.device_choice import choose_device, rounded_by
from fp4convert.conversion.recorded_options import refuse_harmed
from fp4convert.conversion.request import Request, take_apart
from fp4convert.execution.carry_out import carry_out
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import begin
from fp4convert.execution.settings import Result, Settings
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.table import callers
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import AWQ, FORMATS
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.engine_facts import engine_warnings
from fp4convert.planning.plan import Plan
from fp4convert.planning.quantize_plan import plan_quantize
from fp4convert.progress import size_text
from fp4convert.recipes.recipe import model_recipe
from fp4convert.recipes.rules import FormatRule
from fp4convert.storage.source import Source, prove_all, uncollected


def prepare_quantize(
    source: Source, options: QuantizeOptions, formats: tuple[FormatRule, ...] = ()
) -> Plan:
    """Plan what `quantize` carries out.

    formats  of modules, before those of the recipe: a choice that was made to fit a size
    Raises   InputError for anything that the options or the source have wrong
    """
    return plan_request(take_apart(source, options), formats)


def plan_request(request: Request, formats: tuple[FormatRule, ...] = ()) -> Plan:
    """Plan a request, and collect what a person should know of the result."""
    source, scalars = request.source, request.scalars
    plan = plan_with(request, formats)
    statistics: Iterable[str] = ()
    if scalars.calibration:
        from fp4convert.planning.method_needs import check_statistics

        statistics = check_statistics(plan, scalars.calibration, request.is_fitted)
    padding = [source.checkpoint.padding.note] if source.checkpoint.padding else []
    if padding:
        from fp4convert.planning.tensor_parallel import refuse_bad_splits

        refuse_bad_splits(plan, request.ranks)
    traps = engine_warnings(plan, source.checkpoint) if request.has_traps else []
    card = [CARD_LEFT] if own_card(source) else []
    given = [scalars.inputs.source, scalars.weights.source if scalars.weights else None]
    plan = replace(
        plan,
        folds=tuple(dict.fromkeys((*request.folds, *plan.folds))),
        goal=request.goal,
        calibration=str(scalars.calibration.path) if scalars.calibration else None,
        options=request.recorded(plan),
        scale_sources=tuple(filter(None, given)),
        warnings=(*plan.warnings, *statistics, *traps, *card, *padding),
    )
    is_carried = any(step.action == "transcode" for step in plan.steps)
    if is_carried and not source.is_streamed:  # from a Hub each would be a request: the run tells
        from fp4convert.conversion.carried_blocks import stored_blocks

        for module, q in stored_blocks(plan):
            refuse_odd_scale(module, q)
            check_scalars(module, q, None, dialect_of(plan))
    return plan


def plan_with(request: Request, formats: tuple[FormatRule, ...] = ()) -> Plan:
    """Plan with these formats of modules before the recipe's."""
    recipe = replace(request.recipe, formats=(*formats, *request.recipe.formats))
    checkpoint, linears, scalars = request.source.checkpoint, request.linears, request.scalars
    method, calibration = recipe.target.method, scalars.calibration
    with uncollected():
        if calibration is None or method != AWQ:
            return plan_quantize(checkpoint, recipe, linears, scalars)
        from fp4convert.planning.fold_plan import fold_layers

        folded = fold_layers(checkpoint, recipe, linears, calibration, scalars.inputs.is_constant)
        plan = plan_quantize(checkpoint, recipe, folded.linears, scalars)
    warnings = (*plan.warnings, *folded.notes)
    return replace(plan, folds=folded.uses, warnings=warnings)


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_quantize; write the record last.

    Raises  DeviceError for a device that is not there; OutputError as open_output does;
            NumericError, after all sound shards are written, where weights are NaN or Inf: then
            neither index nor records are written
    """
    refuse_harmed(source, output, settings)
    calibration = None
    if plan.calibration:
        from fp4convert.planning.method_needs import reopened

        calibration = reopened(plan)
    choice = choose_device(settings.device, plan.target, rounded_by(plan))
    if choice.reason:
        settings.tell(choice.reason)
    backend = open_backend(choice.device)
    tools = Tools(source, backend, calibration, callers(plan.target, backend, calibration))
    _prove_scales(plan, settings)
    with method_for(plan.target, FORMATS[plan.target.format]).working():
        result = carry_out(artifact_job(source, plan), tools, output, settings)
    if plan.adapter:
        result = replace(result, adapter=describe_adapter(plan))
    if settings.share or not any(step.action == "transcode" for step in plan.steps):
        return result
    from fp4convert.conversion.carried_blocks import describe_carried, taken_over

    is_draft = model_recipe(source.checkpoint.config).is_draft
    kind = dialect_of(plan).TRAITS.global_scale_kind
    return replace(result, carried=describe_carried(taken_over(plan), kind, is_draft))


def _prove_scales(plan: Plan, settings: Settings) -> None:
    """Raise SourceError where scales came otherwise than the files hold them.

    From a Hub, their shards are read whole for it, as their hashes are of whole files.
    """
    for source in plan.scale_sources:
        if source.is_streamed:
            size = size_text(sum(shard.nbytes for shard in source.checkpoint.shards))
            settings.tell(f"{source.name}: read whole ({size}), to check the scales taken of it")
        prove_all(source)


def describe_adapter(plan: Plan) -> dict[str, object] | None:
    """Say which adapter a plan merges, and how many tensors it changes."""
    adapter = plan.adapter
    if adapter is None:
        return None
    changed = [step for step in plan.steps for one in step.linears if one.coding.change]
    rounded = sum(step.is_made for step in changed)
    merged = {"rounded": rounded, "kept": len(changed) - rounded}
    return {"name": adapter.name, **adapter.as_record(), "merged": merged}


def begin_quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> OutputFolder:
    """Begin the output folder with the plan in it, for others to join.

    Raises  what quantize raises before it works
    """
    return begin(artifact_job(source, plan), output, settings)
