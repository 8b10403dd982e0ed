"""Round every weight to the nearest value that its block scale offers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from fp4convert.calibration.methods.scaled_weights import moments_under
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.method import Group, Under
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.formats import global_range
from fp4convert.numerics.matrices import Quantized

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration


class Nearest(NamedTuple):
    """A scale rule.

    is_unit  the global scale is 1 whatever the weights are
    weighed  sha256 of the statistics that rule importance takes
    """

    rule: str
    is_unit: bool = False
    weighed: str | None = None

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        if self.is_unit:
            return Under(given._replace(amax=global_range(self.rule)))
        if given.amax is not None or not group.fmt.has_global_scale:
            return Under(given)
        amax = tools.backend.group_amax(group.measured)
        return Under(given if amax is None else Given(amax, is_own=True))

    def panels(self, group: Group, tools: Tools, under: Under) -> Iterator[tuple[int, Quantized]]:
        given, calibration = under.given, tools.calibration
        if self.weighed and calibration:
            importance = [
                moments_under(calibration.moments(module), weights)
                for module, weights in zip(group.modules, group.members, strict=True)
            ]
            given = given._replace(importance=importance)
        measured, members, _, fmt = group
        return tools.backend.quantize_group(measured, members, fmt, self.rule, given)

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        return 0

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()
