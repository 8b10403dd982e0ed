"""Define the protocol of methods.

Methods wrap each other: what a wrapper adds, it adds to the panels of any method inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fp4convert.makers.maker import Tools
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.formats import Format
from fp4convert.numerics.matrices import Quantized, Weights

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
    """Rounds the members of a group; its repr is part of the key."""

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        """Find the amax that sets the global scale, before any row is rounded.

        given    an amax in place of the group's own
        Raises  NumericError where anything measured holds Inf or NaN
        """

    def panels(self, group: Group, tools: Tools, under: Under) -> Iterator[tuple[int, Quantized]]:
        """Yield (number of the member, its next panel)."""

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        """Count the memory of one caller beside that of the backend."""

    def working(self) -> AbstractContextManager[None]:
        """Let any number of threads call meanwhile."""
