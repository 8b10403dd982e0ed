"""Tell a calibration how quantize will round: by the plan and the makers of that quantize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from fp4convert.makers.fresh import Fresh
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import (
    DAMPING,
    FORMATS,
    GPTQ,
    IMPORTANCE,
    NVFP4,
    PASSES,
    Format,
)
from fp4convert.numerics.fp8_int import Float64s
from fp4convert.planning.activation_scales import scale_beyond, typical_amax
from fp4convert.planning.method_needs import rounded


def goal_of(work: Conversion, rule: str | None, is_sequential: bool) -> Goal:
    """Return how a quantize by gptq rounds, from its plan with any method.

    is_sequential  through the quantized prefix; False: inputs alone are rounded
    """
    options, plan = work.options, work.plan
    fmt = FORMATS[plan.target.format]
    target = plan.target._replace(
        method=GPTQ,
        calibration="of a prefix",  # in no record: it is what is being made
        scale_rule=rule or IMPORTANCE,
        damping=DAMPING if options.damping is None else options.damping,
        passes=PASSES if options.passes is None else options.passes,
    )
    makers = [step.maker for step in rounded(plan)]
    fresh = [maker for maker in dict.fromkeys(makers) if isinstance(maker, Fresh)]
    groups = {
        linear.module: tuple(member.module for member in maker.measured)
        for maker in fresh
        for linear in maker.linears
    }
    settings: dict[str, object] = {
        "format": fmt.name,
        "method": GPTQ,
        "activations": target.activations,
    }
    rounding = None
    if is_sequential:
        settings["scale_rule"] = target.rule_for(fmt)
        device = choose_device(options.device, target, rounded_by(plan)).device
        made = [replace(m, method=method_for(target, m.spelling.form.format)) for m in fresh]
        rounding = _Rounding(Tools(work.source, open_backend(device)), made).values
    inputs = partial(_rounding_of_inputs, fmt) if target.activations == ACTIVATIONS_FP4 else None
    return Goal(settings, groups, inputs, rounding)


def _rounding_of_inputs(fmt: Format, amax: float, squares: Float64s) -> Round:
    """Round inputs as engines will, by the scale that quantize will choose."""
    if fmt is not NVFP4:
        return round_mxfp4
    scale = scale_beyond(amax, typical_amax(squares, fmt), fmt) or 1.0
    return partial(round_nvfp4, input_scale=scale)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """The makers of a plan, for statistics that are not in a file yet."""

    tools: Tools
    makers: Sequence[Fresh]

    def values(self, modules: Sequence[str], statistics: Calibration) -> Mapping[str, Float32s]:
        """Return the values of modules, rounded as the makers do it."""
        tools, wanted = self.tools._replace(calibration=statistics), set(modules)
        return {
            module: values
            for maker in self.makers
            if wanted & {linear.module for linear in maker.linears}
            for module, values in _values_by(maker, tools)
        }


def _values_by(maker: Fresh, tools: Tools) -> Iterator[tuple[str, Float32s]]:
    with maker.method.working():
        group = maker.group_of(tools)
        panels = maker.method.panels(group, tools, maker.method.under(group, tools))
        for number, own in groupby(panels, key=itemgetter(0)):
            values = np.concatenate([Cpu().values(q).reshape(q.shape) for _, q in own])
            yield maker.linears[number].module, values
