"""Tell a calibration how quantize will round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from fp4convert.calibration.activations import Round, round_mxfp4, round_nvfp4
from fp4convert.calibration.prefix import Goal
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4
from fp4convert.conversion.device_choice import choose_device, rounded_by
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import DAMPING, FORMATS, GPTQ, IMPORTANCE, NVFP4, PASSES, Format
from fp4convert.numerics.fp8_int import Float64s
from fp4convert.planning.activation_scales import scale_beyond, typical_amax
from fp4convert.planning.method_needs import rounded
from fp4convert.planning.steps import Step
from fp4convert.recipes.recipe import Target


def goal_of(work: Conversion, rule: str | None, is_sequential: bool) -> Goal:
    """Return how a quantize by gptq rounds, from its plan with any method.

    is_sequential  through the quantized prefix; False: inputs alone are rounded
    """
    options, plan, fmt = work.options, work.plan, FORMATS[work.plan.target.format]
    target = plan.target._replace(
        method=GPTQ,
        calibration="of a prefix",  # in no record: it is what is being made
        scale_rule=rule or IMPORTANCE,
        damping=DAMPING if options.damping is None else options.damping,
        passes=PASSES if options.passes is None else options.passes,
    )
    steps = {step.module: step for step in rounded(plan) if len(step.linears) == 1}
    sharing: dict[str, list[str]] = defaultdict(list)
    for module, step in steps.items():
        sharing[step.group or module].append(module)
    groups = {module: tuple(sharing[step.group or module]) for module, step in steps.items()}
    bits = target.activations
    settings: dict[str, object] = {"format": fmt.name, "method": GPTQ, "activations": bits}
    round_weights = None
    if is_sequential:
        settings["scale_rule"] = target.rule_for(fmt)
        device = choose_device(options.device, target, rounded_by(plan)).device
        tools = Tools(work.source, open_backend(device))
        round_weights = partial(_round_weights, tools, target, steps)
    round_inputs = partial(_rounding_of_inputs, fmt) if bits == ACTIVATIONS_FP4 else None
    return Goal(settings, groups, round_inputs, round_weights)


def _rounding_of_inputs(fmt: Format, amax: float, squares: Float64s) -> Round:
    """Round inputs as engines will, by the scale that quantize will choose."""
    if fmt is not NVFP4:
        return round_mxfp4
    scale = scale_beyond(amax, typical_amax(squares, fmt), fmt) or 1.0
    return partial(round_nvfp4, input_scale=scale)


def _round_weights(
    tools: Tools,
    target: Target,
    steps: Mapping[str, Step],
    modules: Sequence[str],
    statistics: Calibration,
) -> dict[str, Float32s]:
    """Return the values of modules of scale groups, as makers round them."""
    tools, made = tools._replace(calibration=statistics), {}
    for module in modules:
        (linear,), form = steps[module].linears, steps[module].form
        assert form is not None, "it is rounded"
        weights, method = (
            linear.coding.weights(linear, tools.source),
            method_for(target, form.format),
        )
        group = Group([weights], [weights], [module], form.format)
        with method.working():
            panels = method.panels(group, tools, method.under(group, tools))
            for _, own in groupby(panels, key=itemgetter(0)):
                made[module] = np.concatenate([Cpu().values(q).reshape(q.shape) for _, q in own])
    return made
