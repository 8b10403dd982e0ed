"""Warn of what a person should know of an adapter that is merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR
from fp4convert.checkpoint.linears import Linears
from fp4convert.checkpoint.record import ADAPTER
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Checkpoint

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

LOST_BY_RTN = "9 dB"  # of an adapter on average, as docs/adapters.md measures it


def notes_on_adapter(
    linears: Linears, checkpoint: Checkpoint, target: Target, calibration: Calibration | None
) -> Iterator[str]:
    """Warn of another base model, of other names, of a method that loses it."""
    adapter = linears.adapter
    if adapter is None:
        return
    if checkpoint.repo and adapter.base and checkpoint.repo != adapter.base:
        yield f"{adapter.name} was made for {adapter.base}, and is merged into {checkpoint.repo}"
    old, new = linears.renamed
    if old != new:
        yield (
            f"{adapter.name}: names that begin with {old or 'nothing'!r} are those that begin with"
            f" {new or 'nothing'!r} in the model"
        )
    if calibration and ADAPTER not in calibration.notes:
        yield (
            f"{calibration.path} was made without the adapter, whose inputs are others: calibrate"
            " with --lora, and less is lost (docs/adapters.md)"
        )
    # Beside low-rank corrections there is no other method.
    if target.method == "rtn" and target.dialect not in ALWAYS_FOUR:
        yield (
            f"--method rtn leaves about {LOST_BY_RTN} less of an adapter than the default does, as"
            " measured (docs/adapters.md)"
        )
