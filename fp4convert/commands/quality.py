"""inspect(), verify(), compare() and analyze()."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.record import ADAPTER, place_recorded
from fp4convert.checkpoint.whole_model import open_model, refuse_one_shard
from fp4convert.engines.files import parse_engines
from fp4convert.errors import Finding, Fp4Error, InputError, Level, shell_line
from fp4convert.options.arguments import as_path, one_adapter
from fp4convert.options.looking import AnalyzeOptions, InspectOptions, VerifyOptions
from fp4convert.options.measuring import CompareOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.recipes.options import Reference
from fp4convert.storage.open import as_file_of, open_original
from fp4convert.storage.source import Source, uncollected

if TYPE_CHECKING:
    from fp4convert.quality.verification import Verified


@keeping_nothing()
@uncollected()
def inspect(options: InspectOptions) -> dict[str, Any]:
    """Tell what an artifact is and whether it is healthy.

    The command `inspect`.

    Returns  what `inspect --json` prints; `healthy` is False where the command exits with 6
    Raises   Fp4Error: InputError where it is no artifact, SourceError and AccessError from the Hub
    """
    from fp4convert.quality import inspection

    sarif = as_path(options.sarif)
    if sarif:
        from fp4convert.report.sarif import SARIF, clear_sarif, write_sarif
        from fp4convert.report.user_files import check_apart

        check_apart({SARIF: sarif}, options.folder_of(options.artifact))
        clear_sarif(sarif)
    engines = () if options.engine is None else parse_engines(options.engine)
    phases = _begin(options)
    artifact = _open_first(options, options.artifact)
    original = _open_recorded(options, artifact.record) if options.source else None
    description = inspection.inspect(artifact, original, options.full, phases, engines)
    if options.gpu is not None:
        _judge_gpu(options, artifact, description)
    if sarif:
        write_sarif(sarif, artifact, description["findings"])
    return description


def _judge_gpu(options: InspectOptions, artifact: Artifact, description: dict[str, Any]) -> None:
    """Add the kernels on the card of --gpu, and a finding where there is none."""
    from fp4convert.engines import gpus
    from fp4convert.quality.engine_check import artifact_contents

    gpu, contents = gpus.parse_gpu(str(options.gpu)), artifact_contents(artifact, ())
    uses = gpus.uses_of(gpu, gpus.readers(options.engine, contents), contents)
    description["gpu"] = gpus.describe_uses(gpu, uses)
    details = gpus.find_warnings(uses)
    findings: list[tuple[Level, str]] = [("warning", detail) for detail in details]
    if fault := gpus.find_fault(gpu, uses, contents.dialect, options.engine is not None):
        findings, description["healthy"] = [("error", "; ".join(fault))], False
    description["findings"] += [
        asdict(Finding(level, "gpu-kernel", None, detail)) for level, detail in findings
    ]


@keeping_nothing()
def verify(options: VerifyOptions) -> Verified:
    """Hash every file again and read every scale; measure with a source.

    The command `verify`.

    Returns   tensors, summary and findings; `passed` is False where the command exits with 6
    Raises    Fp4Error, as `inspect` does; InputError for a gate without a source
    """
    from fp4convert.calibration.calibration_file import open_calibration
    from fp4convert.quality import verification
    from fp4convert.report.html import PAGE, check_page, save_page
    from fp4convert.report.sarif import SARIF, clear_sarif, write_sarif
    from fp4convert.report.user_files import check_apart

    page, sarif = as_path(options.report), as_path(options.sarif)
    check_apart({PAGE: page, SARIF: sarif}, options.folder_of(options.artifact))
    if page:
        check_page(page)
    if sarif:
        clear_sarif(sarif)
    calibration = as_path(options.calibration)
    known = None if calibration is None else open_calibration(calibration)
    engines = () if options.engine is None else parse_engines(options.engine)
    phases = _begin(options)
    artifact = _with_adapter(_open_first(options, options.artifact), options)
    original = _open_recorded(options, artifact.record) if options.source else None
    errors = (options.min_sqnr, options.max_nmse, options.max_output_error)
    gate = verification.Gate(*errors, engines, as_path(options.public_key))
    verified, judged = verification.verify_judged(artifact, original, gate, known, phases)
    if page:
        shown = save_page(page, artifact, original, verified=verified, judged=judged)
        options.tell(shown)
    if sarif:
        write_sarif(sarif, artifact, verified.as_json()["findings"])
    return verified


@keeping_nothing()
def compare(options: CompareOptions) -> dict[str, Any]:
    """Rank artifacts and other tools' weights of one source.

    The command `compare`.

    They may be of any formats, dialects and makers; a revision is that of all.
    Returns  what `compare --json` prints
    Raises   Fp4Error, as `inspect` does; InputError for fewer than two, for an artifact that is
             not sound, or of another source; with a text what `evaluate` raises
    """
    from fp4convert.calibration.calibration_file import open_calibration
    from fp4convert.checkpoint.record import PADDING
    from fp4convert.commands.calibration import feed_of, has_text
    from fp4convert.quality import comparison

    given = tuple(options.artifacts)
    if not 2 <= len(given) <= len(comparison.LETTERS):
        detail = f"artifacts given: {len(given)}; expected 2 to {len(comparison.LETTERS)}"
        raise InputError("usage", detail, "Name them: fp4convert compare A B --source SOURCE.")
    page = as_path(options.report)
    if page:
        from fp4convert.report.comparison_page import check_comparison

        check_comparison(page, [options.folder_of(one) for one in given])
    feed = feed_of(options, "compare --text") if has_text(options) else None
    calibration = as_path(options.calibration)
    known = None if calibration is None else open_calibration(calibration)
    phases = _begin(options)
    with uncollected():
        opened = _with_adapters([_open_first(options, each) for each in given], options)
        source = _open_recorded(options, opened[0].record)
        paddings = [artifact.record.get(PADDING) for artifact in opened]
        for at, padding in enumerate(paddings):
            if padding != paddings[0]:
                detail = f"{given[0]} and {given[at]} have zeros for different ranks"
                detail = f"{detail} of tensor parallelism"
                raise InputError("pad-differs", f"{detail}; expected artifacts of the same sizes")
        paired, compared = comparison.pair_all(opened, source, known)
    predictions: list[dict[str, Any]] = []
    if feed is not None:
        from fp4convert.commands.evaluation import predictions_of

        sources = [artifact.source for artifact in opened]
        predictions = predictions_of(options, sources, feed, phases)
        phases.begin("headers")
    with uncollected():
        found = comparison.compare(paired, compared, phases, predictions)
    if page:
        from fp4convert.report.comparison_page import save_comparison

        options.tell(save_comparison(page, found))
    return found


@keeping_nothing()
def analyze(options: AnalyzeOptions) -> dict[str, Any]:
    """Measure what every kind of module loses in each form, on a sample.

    The command `analyze`.

    Writes nothing.
    Returns  what `analyze --json` prints; docs/methods.md has every key
    Raises   Fp4Error: InputError for a source, a sample or a recipe that cannot be; SourceError
             and AccessError from the Hub
    """
    from fp4convert.calibration.calibration_file import open_calibration
    from fp4convert.quality import analysis

    phases, file = options.phases or Phases(), options.calibration
    phases.begin("plan")
    calibration = None if file is None else open_calibration(Path(file))
    nbytes = analysis.nbytes_to_sample(options.sample)
    source = open_model(os.fspath(options.source), options.access())
    return analysis.analyze(source, options, nbytes, calibration, phases)


def _begin(options: InspectOptions | VerifyOptions | CompareOptions) -> Phases:
    """Begin with the headers, which the Hub may take a while to send."""
    phases = options.phases or Phases()
    phases.begin("headers")
    return phases


def _with_adapter(artifact: Artifact, options: VerifyOptions | CompareOptions) -> Artifact:
    """Add the adapter that its source was merged with to an artifact."""
    given = one_adapter(options.lora)
    if not given:
        return artifact
    if options.source is None:
        detail = "--lora says what a source was merged with; expected --source BASE, too"
        raise InputError("usage", detail, "Name the base model: --source BASE.")
    from fp4convert.checkpoint.adapters.peft import open_recorded

    access = options.original_access()
    return artifact._replace(adapter=open_recorded(given[0], artifact.record, access))


def _with_adapters(artifacts: list[Artifact], options: CompareOptions) -> list[Artifact]:
    """Add the adapter to artifacts made with one, else to the first."""
    if not any(ADAPTER in artifact.record for artifact in artifacts):
        return [_with_adapter(artifacts[0], options), *artifacts[1:]]
    return [
        _with_adapter(artifact, options) if ADAPTER in artifact.record else artifact
        for artifact in artifacts
    ]


def _open_recorded(
    options: InspectOptions | VerifyOptions | CompareOptions, record: Mapping[str, object]
) -> Source:
    """Open the source by its record: its commit, folder and zeros."""
    from fp4convert.planning.tensor_parallel import pad_as_recorded

    reference = os.fspath(options.source or "")
    commit, folder = place_recorded(record, reference)
    access = replace(options.original_access(), revision=commit)
    source = open_original(reference, access, folder)
    dialect = str(record.get("dialect", "gguf"))  # without a record nothing is viewed
    source = as_file_of(source, dialect_named(dialect).TRAITS.container)
    return pad_as_recorded(record, source)


def _open_first(
    options: InspectOptions | VerifyOptions | CompareOptions, reference: Reference
) -> Artifact:
    """Open an artifact; InputError if it is swapped with, or is, its source.

    One shard alone is for inspect, and weights of other tools for compare.
    """
    given, name, access = options.source, os.fspath(reference), options.access()
    try:
        if isinstance(options, CompareOptions):
            from fp4convert.checkpoint.candidates import open_candidate

            artifact = open_candidate(name, access, partial(_open_recorded, options, {}))
        else:
            artifact = open_artifact(name, access)
    except InputError as error:
        if error.code != "not-an-artifact" or given is None:
            raise
        try:
            open_artifact(os.fspath(given), options.original_access())
        except Fp4Error:
            raise error from None
        step = f"{given} is an artifact: give it first, and {shell_line('--source', reference)}"
        raise InputError(error.code, error.message, step) from None
    if not isinstance(options, InspectOptions):
        refuse_one_shard(artifact.source, os.fspath(reference))
    are_here = given is not None and os.path.exists(given) and os.path.exists(reference)
    if are_here and os.path.samefile(str(given), reference):
        detail = f"{reference} is given as the artifact and as its source, which shows no loss"
        step = "Name the weights that it was made from: --source SOURCE."
        raise InputError("usage", detail, step)
    return artifact
