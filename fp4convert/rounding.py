"""How the weights of a scale group become blocks: by which rule and which method, with which statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp4convert.backends import Backend
from fp4convert.calibration_file import Calibration
from fp4convert.formats import GLOBAL_RANGE, Format, Quantized, Weights
from fp4convert.methods import IMPORTANCE
from fp4convert.recipe import Target


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds as the target says.

    calibration  None where neither method nor rule takes statistics
    """

    target: Target
    backend: Backend
    calibration: Calibration | None = None

    def panels(
        self, measured: Sequence[Weights], members: Sequence[Weights], modules: Sequence[str], fmt: Format
    ) -> Iterator[tuple[int, Quantized]]:
        """(number of the member, its next panel), member by member, under one amax; as Backend.quantize_group.

        modules  whose statistics are those of each member's inputs
        """
        given_amax = GLOBAL_RANGE if self.target.has_unit_scale else None
        return self.backend.quantize_group(measured, members, fmt, self._rule(fmt), given_amax)

    def _rule(self, fmt: Format) -> str:
        """The target's own, where the format is or has it."""
        rule = self.target.scale_rule
        is_own = fmt.name == self.target.format or rule == IMPORTANCE
        return rule if rule and is_own else fmt.default_rule
