"""analyze(): study a checkpoint before it is converted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Unpack

from fp4convert.calibration.statistics import open_calibration
from fp4convert.commands.options import (
    AccessOptions,
    Patterns,
    Reference,
    access_of,
    check_words,
    words_of,
)
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.quality import analysis
from fp4convert.recipes.recipe import Choice
from fp4convert.storage.open import open_source


class AnalyzeOptions(AccessOptions, total=False):
    """What `analyze` is told beside the source; as QuantizeOptions has them.

    phases  learns how far the work is
    """

    include: Patterns
    exclude: Patterns
    recipe: str | None
    stack_order: str | None
    stack_rows: str | None
    phases: Phases


@keeping_nothing()
def analyze(
    source: Reference,
    *,
    calibration: Reference | None = None,
    sample: float | None = None,
    **options: Unpack[AnalyzeOptions],
) -> dict[str, Any]:
    """What every kind of module loses in each form, on a sample of the weights: the command `analyze`.  Writes nothing.

    calibration  file that `calibrate` made: the inputs that errors count
    sample       GB of the source to read; default 0.02
    Returns      what `analyze --json` prints; docs/analysis.md has every key
    Raises       Fp4Error: InputError for a source, a sample or a recipe that cannot be; SourceError and AccessError from the Hub
    """
    check_words(options, AnalyzeOptions)
    phases = options.get("phases") or Phases()
    phases.begin("plan")
    choice = Choice(**words_of(Choice, options))
    known = None if calibration is None else open_calibration(Path(calibration))
    study = analysis.Study(choice, analysis.sample_nbytes(sample), known)
    return analysis.analyze(open_source(os.fspath(source), access_of(options)), study, phases)
