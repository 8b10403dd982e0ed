"""Choose the maker of a unit.

A new maker is a file of this folder and a row of UNITS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from fp4convert.checkpoint.dialects.forms import keeps_powers
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.makers.maker import Maker
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.unit import Unit
from fp4convert.numerics.backends.base import Backend
from fp4convert.numerics.formats import FORMATS
from fp4convert.process import memory_nbytes
from fp4convert.recipes.recipe import Target

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

# The first row that fits counts, and its file is imported then.
UNITS: tuple[tuple[str, Callable[[Unit], bool]], ...] = (
    ("carried", lambda unit: unit.action == "transcode" and unit.form.format.is_fp4),
    ("corrected", lambda unit: unit.form.rank is not None),
    (
        "exact_fp8",
        lambda unit: (
            unit.action == "quantize"
            and all(keeps_powers(one.coding.format, unit.form) for one in unit.linears.values())
        ),
    ),
    ("eight_bits", lambda unit: not unit.form.format.is_fp4),
    ("stacks", lambda unit: unit.is_stack),
    ("fresh", lambda unit: True),
)
MEMORY_SHARE = 0.5  # of the machine's, for all callers together


class MakerFile(Protocol):
    """A file of this folder that a row of UNITS names."""

    def make(self, unit: Unit) -> Maker:
        """Return the maker of a unit."""


def maker_of(unit: Unit) -> Maker:
    """Return the maker of a unit."""
    return _file(next(name for name, fits in UNITS if fits(unit))).make(unit)


@cache
def _file(name: str) -> MakerFile:
    return cast("MakerFile", import_module(f"fp4convert.makers.{name}"))


def caller_nbytes(target: Target, calibration: Calibration | None) -> int:
    """Count the memory of one caller of makers, beside that of the backend."""
    if target.format not in FORMATS:  # of ordinary weights
        return 0
    if target.dialect and dialect_named(target.dialect).TRAITS.correction:
        from fp4convert.makers.corrected import CALLER_NBYTES

        return CALLER_NBYTES
    return method_for(target, FORMATS[target.format]).caller_nbytes(calibration)


def callers(target: Target, backend: Backend, calibration: Calibration | None) -> int:
    """Count the callers that backend and memory serve at once."""
    threads, each_nbytes = backend.threads, caller_nbytes(target, calibration)
    if not each_nbytes:
        return threads
    return max(1, min(threads, int(MEMORY_SHARE * memory_nbytes() / each_nbytes)))
