"""analyze(): study a checkpoint before it is converted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.checkpoint.whole_model import open_model
from fp4convert.options.looking import AnalyzeOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.quality import analysis


@keeping_nothing()
def analyze(options: AnalyzeOptions) -> dict[str, Any]:
    """Measure what every kind of module loses in each form, on a sample.

    The command `analyze`.

    Writes nothing.
    Returns  what `analyze --json` prints; docs/analysis.md has every key
    Raises   Fp4Error: InputError for a source, a sample or a recipe that cannot be; SourceError
             and AccessError from the Hub
    """
    phases, file = options.phases or Phases(), options.calibration
    phases.begin("plan")
    calibration = None if file is None else open_calibration(Path(file))
    nbytes = analysis.nbytes_to_sample(options.sample)
    source = open_model(os.fspath(options.source), options.access())
    return analysis.analyze(source, options, nbytes, calibration, phases)
