"""Define the protocol of methods, and choose the method of a target.

Methods wrap each other: what a wrapper adds, it adds to the panels of any method inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fp4convert.makers.maker import Tools
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.formats import DAMPING, IMPORTANCE, Format
from fp4convert.numerics.matrices import Quantized, Weights
from fp4convert.recipes.recipe import Target

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

GPTQ = "gptq"


class Group(NamedTuple):
    """Weights that are rounded under one amax.

    measured  all rows that set the amax
    members   the rows that are rounded
    modules   whose inputs the members multiply, for statistics
    """

    measured: Sequence[Weights]
    members: Sequence[Weights]
    modules: Sequence[str]
    fmt: Format


class Under(NamedTuple):
    """What a group is rounded under.

    is_exact  the weights are values of the format already, by a glance at some rows
    """

    given: Given = OWN
    is_exact: bool = False


class Method(Protocol):
    """Rounds the members of a group; a frozen value whose repr is part of the key."""

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        """Find the amax that sets the global scale, before any row is rounded.

        given    an amax in place of the group's own
        Raises  NumericError where anything measured holds Inf or NaN
        """

    def panels(self, group: Group, tools: Tools, under: Under) -> Iterator[tuple[int, Quantized]]:
        """Yield (number of the member, its next panel), as Backend.quantize_group does."""

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        """Count the memory of one caller beside that of the backend."""

    def working(self) -> AbstractContextManager[None]:
        """Let any number of threads call meanwhile."""


@cache
def method_for(target: Target, fmt: Format) -> Method:
    """Return the method by which a target rounds to a format.

    Each file is imported where it is chosen.
    """
    from fp4convert.makers.methods.nearest import Nearest
    from fp4convert.makers.methods.returning import Returning

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
