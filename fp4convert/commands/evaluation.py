"""evaluate(), and the predictions for compare(); needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp4convert.checkpoint.adapters.peft import Adapter, open_recorded
from fp4convert.checkpoint.artifact import open_artifact, read_json
from fp4convert.checkpoint.candidates import in_names_of
from fp4convert.checkpoint.record import ADAPTER, describe_adapter, place_recorded
from fp4convert.checkpoint.whole_model import open_model
from fp4convert.commands.calibration import feed_of
from fp4convert.execution.plan_file import recorded_digest
from fp4convert.options.access import as_nbytes
from fp4convert.options.arguments import as_path, one_adapter
from fp4convert.options.measuring import CompareOptions, EvaluateOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.source import Source, name_of

if TYPE_CHECKING:
    from fp4convert.calibration.samples import Feed
    from fp4convert.calibration.side_by_side import Task
    from fp4convert.quality.evaluation import Evaluated


FEW_TOKENS = 256  # figures of fewer are chance


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
    record = as_path(options.baseline)
    gate = evaluation.EvaluationGate(
        options.max_kl,
        options.min_top1,
        options.max_ppl_ratio,
        evaluation.read_baseline(record) if record else None,
    ).checked()
    from fp4convert.calibration import side_by_side
    from fp4convert.planning.tensor_parallel import pad_as_recorded
    from fp4convert.report.evaluation_card import ANY_CARD, add_evaluation, check_card
    from fp4convert.report.html import PAGE, check_page, save_page
    from fp4convert.report.sarif import SARIF, clear_sarif, write_sarif
    from fp4convert.report.user_files import check_apart

    page, sarif, card = (as_path(one) for one in (options.report, options.sarif, options.card))
    folder = options.folder_of(options.artifact)
    check_apart({PAGE: page, SARIF: sarif, ANY_CARD: card}, folder)
    if card:
        check_card(card)
    if page:
        check_page(page)
    if sarif:
        clear_sarif(sarif)
    phases = options.phases or Phases()
    phases.begin("headers")
    artifact = open_model(os.fspath(options.artifact), options.access())
    shown = open_artifact(os.fspath(options.artifact), options.access()) if page else None
    source = _open_original(options, artifact)
    artifact = in_names_of(artifact, lambda: source)
    task = _task(options, source, [artifact], feed, phases)
    usual = evaluation.find_usual(artifact, task.source)
    gate = gate.resolved(usual)
    if gate.baseline:
        task = replace(task, check_text=gate.baseline.check_text)
    found = evaluation.evaluate(side_by_side.compare_models(task)[0], gate, usual)
    found = replace(found, digest=recorded_digest(artifact))
    if page and shown:
        original = pad_as_recorded(shown.record, source)
        options.tell(save_page(page, shown, original, evaluated=found.as_json()))
    if card:
        merged = "".join(map(name_of, one_adapter(options.lora)))
        options.tell(add_evaluation(card, found.as_json(), source, merged))
    if sarif:
        write_sarif(sarif, artifact, found.as_json()["findings"])
    return found


def predictions_of(
    options: CompareOptions, artifacts: Sequence[Source], feed: Feed, phases: Phases
) -> list[dict[str, Any]]:
    """Evaluate the artifacts of `compare` beside one run of the source.

    Returns  the figures of each, and its notes
    """
    from fp4convert.calibration import side_by_side
    from fp4convert.quality import evaluation
    from fp4convert.quality.comparison import LETTERS

    notes: list[list[str]] = [[] for _ in artifacts]

    def tell(number: int, line: str) -> None:
        notes[number - 1].append(line)
        options.tell(f"{LETTERS[number - 1]}: {line}")

    source = _open_original(options, artifacts[0])
    task = replace(_task(options, source, artifacts, feed, phases), tell=tell)
    found = []
    for number, measured in enumerate(side_by_side.compare_models(task), 1):
        usual = evaluation.find_usual(artifacts[number - 1], task.source)
        figures = evaluation.evaluate(measured, evaluation.EvaluationGate(), usual).as_json()
        if figures["tokens"] < FEW_TOKENS:
            tell(number, f"{figures['tokens']} tokens were predicted, too few to rank by")
        silent = ("findings", "passed", "baseline", "digest")
        known = {key: value for key, value in figures.items() if key not in silent}
        found.append({**known, "notes": notes[number - 1]})
    return found


def _open_original(options: EvaluateOptions | CompareOptions, artifact: Source) -> Source:
    """Open the source at the commit and in the folder of the record."""
    reference, access = os.fspath(options.source), options.original_access()
    commit, folder = place_recorded(read_json(artifact, RECORD), reference)
    access = replace(access, revision=commit, subfolder=folder or access.subfolder)
    return open_model(reference, access)


def _task(
    options: EvaluateOptions | CompareOptions,
    source: Source,
    artifacts: Sequence[Source],
    feed: Feed,
    phases: Phases,
) -> Task:
    from fp4convert.calibration.side_by_side import Task
    from fp4convert.planning.tensor_parallel import pad_as_recorded

    records = [read_json(artifact, RECORD) for artifact in artifacts]
    record = next((one for one in records if ADAPTER in one), records[0])
    return Task(
        source=pad_as_recorded(record, source),
        artifacts=artifacts,
        feed=feed,
        device=options.device,
        held_nbytes=as_nbytes(options.hold),
        phases=phases,
        tell=lambda number, line: options.tell(line),
        adapter=_adapter_of(options, record),
        is_by_layer=options.by_layer,
    )


def _adapter_of(
    options: EvaluateOptions | CompareOptions, record: Mapping[str, object]
) -> Adapter | None:
    """Open the adapter that the source is merged with; tell if it is missing."""
    if given := one_adapter(options.lora):
        return open_recorded(given[0], record, options.original_access())
    if ADAPTER in record:
        made = f"the artifact was made with {describe_adapter(record)}"
        options.tell(f"{made}: --lora ADAPTER merges the source, too, and compares with that")
    return None
