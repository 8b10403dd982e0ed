"""evaluate(): compare what two models answer; needs torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.checkpoint.whole_model import open_model
from fp4convert.commands.calibration import feed_of
from fp4convert.commands.options import EvaluateOptions, as_path, public
from fp4convert.commands.quality import folder_of
from fp4convert.conversion.work_options import as_nbytes
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases

if TYPE_CHECKING:
    from fp4convert.quality.evaluation import Evaluated


@public(EvaluateOptions)
@keeping_nothing()
def evaluate(options: EvaluateOptions) -> Evaluated:
    """Measure how an artifact's predictions differ from its source's.

    A layer of each is in memory at a time.  One of text, dataset and self_generate is given: the
    command `evaluate`.
    Returns  the figures; `passed` is False where the command exits with 6
    Raises   Fp4Error: InputError for text or models that cannot be used or are not one model, or
             without the packages that run them
    """
    from fp4convert.quality import evaluation

    feed = feed_of(options, "evaluate")
    gate = evaluation.EvaluationGate(options.max_kl, options.min_top1, options.max_ppl_ratio)
    gate.check()
    from fp4convert.calibration import side_by_side
    from fp4convert.report.html import PAGE, check_page, save_page
    from fp4convert.report.sarif import SARIF, clear_sarif, write_sarif
    from fp4convert.report.user_files import check_apart

    page, sarif = as_path(options.report), as_path(options.sarif)
    check_apart({PAGE: page, SARIF: sarif}, folder_of(options))
    if page:
        check_page(page)
    if sarif:
        clear_sarif(sarif)
    phases = options.phases or Phases()
    phases.begin("headers")
    artifact = open_model(os.fspath(options.artifact), options.access())
    shown = open_artifact(os.fspath(options.artifact), options.access()) if page else None
    source = open_model(os.fspath(options.source), options.original_access())
    task = side_by_side.Task(
        source=source,
        artifact=artifact,
        feed=feed,
        device=options.device,
        is_by_layer=options.by_layer,
        held_nbytes=as_nbytes(options.hold),
        phases=phases,
        tell=options.tell,
    )
    found = evaluation.evaluate(side_by_side.compare_models(task), gate)
    if page and shown:
        options.tell(save_page(page, shown, source, evaluated=found.as_json()))
    if sarif:
        write_sarif(sarif, artifact, found.as_json()["findings"])
    return found
