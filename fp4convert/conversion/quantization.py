"""Plan and carry out quantize for one checkpoint.

A request and a source become a recipe, the linear layers and their scales; these become a plan, which a Quantizer carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fp4convert.calibration.methods.awq_smooth import Smoother
from fp4convert.calibration.methods.folds import uses_of
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears, find_linears
from fp4convert.conversion.artifact_job import (
    artifact_job,
    check_scalars,
    dialect_of,
    refuse_odd_scale,
)
from fp4convert.conversion.requests import Request
from fp4convert.errors import InputError
from fp4convert.execution.carried_blocks import describe_carried, stored_blocks, taken_over
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import begin, carry_out
from fp4convert.execution.plan_file import Manifest
from fp4convert.execution.quantizer import Quantizer
from fp4convert.execution.settings import Result, Settings
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import format_named
from fp4convert.planning.activation_scales import Constant, Measured, choose_scales
from fp4convert.planning.fold_plan import Merged, merge_folds
from fp4convert.planning.kv_cache_scales import check_word, plan_cache
from fp4convert.planning.method_needs import (
    FOLDING,
    open_statistics,
    reopened,
    rule_of,
    with_statistics,
)
from fp4convert.planning.quantize_plan import Scalars, plan_quantize
from fp4convert.planning.steps import Plan
from fp4convert.recipes.recipe import Choice, Recipe, Target, build_recipe
from fp4convert.recipes.rules import FormatRule
from fp4convert.storage.source import Source, uncollected


def prepare_quantize(
    source: Source, request: Request, formats: tuple[FormatRule, ...] = ()
) -> Plan:
    """The plan that `quantize` carries out; InputError for anything that the request or the source has wrong.

    formats  of modules, before those of the recipe: a choice that was made to fit a size
    """
    asked = understand(source, request)
    plan = asked.plan(source, formats)
    if asked.calibration:
        plan = with_statistics(plan, asked.calibration)
    for module, q in (
        () if source.is_streamed else stored_blocks(plan)
    ):  # from a Hub each would be a request: the run tells
        refuse_odd_scale(module, q)
        check_scalars(module, q, None, dialect_of(plan))
    return plan


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood: all that a plan is made of, and the calibration that it names."""

    recipe: Recipe
    linears: Linears
    scalars: Scalars
    calibration: Calibration | None

    def plan(self, source: Source, formats: tuple[FormatRule, ...] = ()) -> Plan:
        """The plan, with these formats of modules before the recipe's."""
        recipe = replace(self.recipe, formats=(*formats, *self.recipe.formats))
        with uncollected():
            merged = self._merged(source, recipe)
            plan = plan_quantize(source.checkpoint, recipe, merged.linears, self.scalars)
        return replace(plan, folds=uses_of(merged.folds), warnings=(*plan.warnings, *merged.notes))

    def _merged(self, source: Source, recipe: Recipe) -> Merged:
        """The linear layers under the folds of the method; as they are where it has none."""
        target = recipe.target
        if self.calibration is None or target.method not in FOLDING:
            return Merged(self.linears, (), ())
        if target.via:
            detail = f"--via {target.via} rounds weights before anything else, and --method {target.method} multiplies them first"
            raise InputError("method-via", f"{detail}; expected one of them", "Leave --via out.")
        smoother = Smoother(target, self.calibration, not isinstance(self.scalars.inputs, Constant))
        return merge_folds(
            source.checkpoint, recipe, self.linears, dialect_to_write(target), smoother.factors
        )


def understand(source: Source, request: Request) -> Asked:
    """What is asked for, for that source; InputError for anything that the request or the source has wrong."""
    calibration = open_statistics(request.method, request.scale_rule, request.calibration)
    measured = Measured(calibration) if calibration else None
    recipe = _recipe_for(source, request, calibration)
    if calibration:
        calibration.check(source)
    inputs = choose_scales(
        source, recipe.format, request.activations, request.input_scale, measured
    )
    with uncollected():
        linears = find_linears(source, recipe)
        return Asked(
            recipe,
            linears,
            Scalars(inputs, measured, plan_cache(source, linears, recipe, calibration)),
            calibration,
        )


def _recipe_for(source: Source, request: Request, calibration: Calibration | None) -> Recipe:
    """The recipe; InputError for what no format, dialect or recipe has."""
    fmt = format_named(request.format)
    check_word(request.kv_cache)
    traits = dialect_to_write(Target(fmt.name, request.dialect, kv_cache=request.kv_cache)).TRAITS
    reads_any = traits.global_scale_kind and all(
        shard.frame.reads_global_scales for shard in source.checkpoint.shards
    )
    is_unit = fmt.has_global_scale and not reads_any
    if request.via not in (None, "fp8"):
        raise InputError(
            "unknown-via", f"--via {request.via!r} is not known; expected fp8", "Leave it out."
        )
    rule = rule_of(request.method, request.scale_rule)
    target = Target(fmt.name, request.dialect, rule, request.activations, kv_cache=request.kv_cache)
    sha256 = calibration.sha256 if calibration else None
    target = replace(
        target, has_unit_scale=is_unit, via=request.via, method=request.method, calibration=sha256
    )
    stacks = (request.stack_order, request.stack_rows)
    choice = Choice(request.recipe, request.include, request.exclude, *stacks, request.keep_packed)
    return build_recipe(target, source.checkpoint.config, choice)


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_quantize; the artifact's record is written last.

    Raises DeviceError for a device that is not there; OutputError as open_output does; NumericError, after all sound shards
    are written, where weights are NaN or Inf: then neither index nor records are written.
    """
    worker = Quantizer(source, plan.target, open_backend(settings.device), reopened(plan))
    with worker.working():
        result = carry_out(artifact_job(source, plan), worker, output, settings)
    if settings.share or not any(step.action == "transcode" for step in plan.steps):
        return result
    return replace(
        result,
        carried=describe_carried(taken_over(plan), dialect_of(plan).TRAITS.global_scale_kind),
    )


def manifest_of(source: Source, plan: Plan) -> Manifest:
    """What the output folder of `quantize` remembers."""
    return artifact_job(source, plan).manifest()


def name_files(source: Source, plan: Plan) -> list[str]:
    """Every file that `quantize` writes."""
    manifest = manifest_of(source, plan)
    return [*manifest.files, manifest.last]


def begin_quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> OutputFolder:
    """The output folder with the plan in it, for other processes to join; raises what quantize does before it works."""
    return begin(artifact_job(source, plan), output, settings)
