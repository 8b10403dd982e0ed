"""Choose the method of a target."""

from __future__ import annotations

from functools import cache

from fp4convert.makers.methods.method import GPTQ, Method
from fp4convert.makers.methods.nearest import Nearest
from fp4convert.makers.methods.returning import Returning
from fp4convert.numerics.formats import DAMPING, IMPORTANCE, Format
from fp4convert.recipes.recipe import Target


@cache
def method_for(target: Target, fmt: Format) -> Method:
    """Return the method by which a target rounds to a format.

    Each file is imported where it is chosen.
    """
    rule, statistics = target.rule_for(fmt), target.calibration
    is_unit = target.has_unit_scale and fmt.has_global_scale
    method: Method = Nearest(rule, is_unit, statistics if rule == IMPORTANCE else None)
    if target.method == GPTQ and statistics:
        from fp4convert.makers.methods.gptq import Gptq

        damping, passes = target.damping or DAMPING, int(target.passes or 0)
        method = Gptq(method, statistics, damping, passes)
    method = Returning(method, rule)
    if target.adapter:
        from fp4convert.makers.methods.protected import Protected

        method = Protected(method, target.adapter, target.method == GPTQ, statistics)
    return method
