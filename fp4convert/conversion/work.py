"""Plan everything that one quantize does, for a checkpoint or a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fp4convert.checkpoint.misnamed import refuse_misnamed
from fp4convert.checkpoint.whole_model import refuse_no_model
from fp4convert.conversion.engine_choice import check_plan
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import source_as_asked, take_apart
from fp4convert.engines.verdicts import Verdict
from fp4convert.errors import InputError, named, shell_line
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.no_effect import refuse_empty, refuse_idle
from fp4convert.planning.plan import Plan
from fp4convert.progress import Phases
from fp4convert.storage.open import open_with_components
from fp4convert.storage.source import Source, stopping

if TYPE_CHECKING:
    from fp4convert.conversion.diffusers import PipelineConversion
    from fp4convert.engines.gpus import Use

Work: TypeAlias = "Conversion | PipelineConversion"
"""Everything that one `quantize` does."""


def prepare(options: QuantizeOptions, phases: Phases | None = None, may_write: bool = True) -> Work:
    """Plan what is asked for; for a target size, measure the weights first.

    may_write  what is measured is kept in the output folder
    Raises     what open_source, fit and prepare_quantize raise
    """
    goal, output = None, options.folder
    refusal: AbstractContextManager[None] = nullcontext()
    if (options.target_size, options.target_bits) != (None, None):
        from fp4convert.conversion.mixed_precision import fit, goal_of
        from fp4convert.conversion.weight_losses import removed_if_refused

        refusal = removed_if_refused(output)
        goal = goal_of(options.target_size, options.target_bits)
    access = options.access(output)
    source, components = open_with_components(os.fspath(options.source), access)
    if not components:
        with stopping(source):
            refuse_no_model(source, os.fspath(options.source))
            source = source_as_asked(source, options)
        fitted = None
        with refusal:
            request = take_apart(source, options)
            source = request.source
            if goal:
                settings = Settings(options.device, options.workers, tell=options.tell)
                settings = replace(settings, phases=phases) if phases else settings
                fitted = fit(request, goal, output, settings, may_write)
            plan = prepare_quantize(request, fitted.rules if fitted else ())
            with stopping(source):
                refuse_idle([plan.idle])
                refuse_empty(source.name, [plan])
                verdicts = _check_plan(plan, source, options)
                uses = _check_gpu(plan, source, options)
        return Conversion(options, source, plan, fitted, verdicts, uses)
    return _prepare_pipeline(options, source, components, bool(goal))


def _prepare_pipeline(
    options: QuantizeOptions, source: Source, components: Mapping[str, Source], is_fitted: bool
) -> Work:
    """Plan every component of a pipeline."""
    from fp4convert.conversion.diffusers import PipelineConversion, component_options
    from fp4convert.planning.tensor_parallel import OPTION

    if options.lora or options.base or options.pad_for_tp or is_fitted:
        source.stop()
        detail = f"{options.source} is a pipeline of several checkpoints; expected one, for"
        step = f"Name one: {shell_line('--subfolder', next(iter(components)))}"
        if options.lora:
            raise InputError("adapter-option", f"{detail} --lora", step)
        if options.base:
            raise InputError("base-mismatch", f"{detail} --base", step)
        if options.pad_for_tp:
            raise InputError("pad-option", f"{detail} {OPTION}", step)
        raise InputError("target-pipeline", f"{detail} a size that is asked for", step)
    conversions = {}
    for name, component in components.items():
        with named(name):
            refuse_misnamed(component, str(options.source))
            own = component_options(options, source, name)
            plan = prepare_quantize(take_apart(component, own))
            verdicts = _check_plan(plan, component, own)
            uses = _check_gpu(plan, component, own)
            conversions[name] = Conversion(own, component, plan, None, verdicts, uses)
    plans = [conversion.plan for conversion in conversions.values()]
    refuse_idle([plan.idle for plan in plans])
    refuse_empty(source.name, plans)
    return PipelineConversion(options, source, conversions)


def _check_plan(plan: Plan, source: Source, options: QuantizeOptions) -> tuple[Verdict, ...]:
    """Judge a plan by the engines of --for."""
    option = "--target-bits" if options.target_size is None else "--target-size"
    return check_plan(plan, source.checkpoint, options.engine, option)


def _check_gpu(plan: Plan, source: Source, options: QuantizeOptions) -> tuple[Use, ...]:
    """Find the kernels on the card of --gpu; InputError where there is none.

    Of the engines of --for, or of those that were looked at and read the dialect.
    """
    if options.gpu is None:
        return ()
    from fp4convert.engines import gpus
    from fp4convert.planning.engine_facts import plan_contents

    gpu, contents = gpus.parse_gpu(options.gpu), plan_contents(plan, source.checkpoint)
    engines = gpus.readers(options.engine, contents)
    uses = gpus.uses_of(gpu, engines, contents)
    if fault := gpus.find_fault(gpu, uses, contents.dialect, options.engine is not None):
        raise InputError("engine-refuses", *fault)
    return tuple(uses)
