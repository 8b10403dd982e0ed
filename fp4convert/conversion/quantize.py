"""Quantize one checkpoint, top to bottom.

A request becomes verdicts, units and makers; a plan places what they write; the plan is filled, and
the records are written last.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp4convert.conversion.artifact_job import artifact_job, describe_extras
from fp4convert.conversion.device_choice import choose_device, rounded_by
from fp4convert.conversion.recorded_options import refuse_harmed
from fp4convert.conversion.request import Request
from fp4convert.execution.carry_out import carry_out
from fp4convert.execution.settings import Result, Settings
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.table import callers
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import FORMATS
from fp4convert.planning.plan import Plan
from fp4convert.planning.quantize_plan import plan_quantize
from fp4convert.progress import size_text
from fp4convert.recipes.rules import FormatRule
from fp4convert.storage.source import Source, prove_all, uncollected


def prepare_quantize(request: Request, formats: tuple[FormatRule, ...] = ()) -> Plan:
    """Plan what `quantize` carries out, with everything that its records say.

    formats  of modules, before those of the recipe: a choice that was made to fit a size
    Raises   InputError for anything that the request or the source has wrong
    """
    plan = place_outputs(request, formats)
    notes = [note for check in request.checks for note in check(plan)]
    warnings = (*plan.warnings, *notes)
    return replace(plan, goal=request.goal, options=request.recorded(plan), warnings=warnings)


def place_outputs(request: Request, formats: tuple[FormatRule, ...] = ()) -> Plan:
    """Plan the outputs of a request, with these formats before the recipe's."""
    recipe = replace(request.recipe, formats=(*formats, *request.recipe.formats))
    with uncollected():
        linears = request.linears_under(recipe)
        return plan_quantize(request.source.checkpoint, recipe, linears, request.scalars)


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
    return replace(result, **describe_extras(source, plan, is_part=settings.share is not None))


def _prove_scales(plan: Plan, settings: Settings) -> None:
    """Raise SourceError where scales came otherwise than the files hold them.

    From a Hub, their shards are read whole for it, as their hashes are of whole files.
    """
    for source in plan.scale_sources:
        if source.is_streamed:
            size = size_text(sum(shard.nbytes for shard in source.checkpoint.shards))
            settings.tell(f"{source.name}: read whole ({size}), to check the scales taken of it")
        prove_all(source)
