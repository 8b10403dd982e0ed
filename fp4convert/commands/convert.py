"""quantize(), dequantize(), transcode(), prune() and merge()."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.commands.checks import as_warnings
from fp4convert.engines.files import judged_as
from fp4convert.errors import InputError, OutputError, shell_line
from fp4convert.numerics.formats import GLOBAL_RANGE
from fp4convert.options.access import WorkOptions
from fp4convert.options.arguments import as_folder
from fp4convert.options.writing import QuantizeOptions
from fp4convert.progress import Phases
from fp4convert.recipes.options import Globs

if TYPE_CHECKING:  # each function loads what its own work needs
    from fp4convert.conversion.pruning import Pruning
    from fp4convert.conversion.work import Work
    from fp4convert.execution.settings import Result, Settings
    from fp4convert.options.rewriting import (
        DequantizeOptions,
        MergeOptions,
        PruneOptions,
        TranscodeOptions,
    )
    from fp4convert.storage.source import Source

LOW_SQNR = 12.0  # dB: a sixteenth of its power is noise; rounding alone leaves 17 to 22
STORED_NAME = re.compile(r"\.q?weight\w*$")  # of codes or weights, after their module's
# Options that engines' rows advise and transcode does not have.
NOT_HERE = re.compile(r"--(?:activations|exclude|format|kv-cache)\b")


def quantize(options: QuantizeOptions) -> Result:
    """Convert a checkpoint to NVFP4 or MXFP4: the command `quantize`.

    Returns  what was done, once the artifact is whole; keys of --json are its fields
    Raises   Fp4Error, of the class whose exit code the command would have.  After an InputError
             nothing is written, unless it is a NumericError, for NaN or Inf in weights: then all
             sound shards are finished
    """
    work, settings = _plan(options, is_dry=False)
    if options.is_checked_after:
        from fp4convert.commands import publish

        result = publish.carry_out(work, settings)
    else:
        result = work.carry_out(settings)
    lost = _losses(result)
    (options.warn or as_warnings)(lost)
    steps = work.next_steps()
    if settings.share:
        steps = [shell_line("fp4convert", "merge", work.options.folder)]
    engine = work.verdicts[0].as_json() if work.verdicts else None
    gpu = _describe_gpu(work)
    warnings = [*work.warnings, *lost]
    return replace(result, warnings=warnings, next=steps, engine=engine, gpu=gpu)


def _losses(result: Result) -> list[str]:
    """Return warnings of losses beyond those of rounding to four bits.

    Errors of gptq may be large: they lie where outputs feel them least.
    """
    from fp4convert.recipes.patterns import exclude_option

    lost = []
    if result.saturated:
        lost.append(
            f"{result.saturated} modules have weights larger than {GLOBAL_RANGE:g} times the"
            " --global-scale that they were given; these are cut off"
        )
    if result.erased_rows:
        lost.append(
            f"{result.erased_rows} rows of weights became zeros, too small for the global scale"
            f" (in dialect mlx it is 1); choose another dialect or --global-scale than"
            f" {result.dialect}'s, or leave these modules as they are: --exclude PATTERN"
        )
    for part in (asdict(result), *(result.components or ())):
        fidelity, where = part.get("fidelity"), f" of {part['name']}" if "name" in part else ""
        if not isinstance(fidelity, dict):
            continue
        if zeros := fidelity.get("zeros"):
            detail = f"weights{where} of zeros alone: {zeros['tensors']:,}, the first"
            lost.append(f"{detail} {zeros['first']}; is the source whole?")
        least = None if part.get("method") == "gptq" else fidelity.get("sqnr_db_min")
        if isinstance(least, float) and least < LOW_SQNR:
            module = STORED_NAME.sub("", str(fidelity.get("worst")))
            lost.append(
                f"{module}{where} lost much of its values: SQNR {least:.2f} dB, the lowest of all,"
                f" where four bits keep about 20 dB; leave it as it is: {exclude_option(module)}"
            )
    return lost


def preview_quantize(options: QuantizeOptions) -> dict[str, Any]:
    """Plan what `quantize` would do, from headers alone.

    As `quantize --dry-run --json` does.

    Writes nothing; raises as `quantize` does. Where the disk has too little room, the document
    has the error of that under "error".
    """
    from fp4convert.conversion.one_checkpoint import Conversion
    from fp4convert.quality.evaluation import forecast

    work, settings = _plan(options, is_dry=True)
    if options.push_to_hub is not None:
        from fp4convert.commands import publish

        pusher = publish.make_pusher(options, settings, work.names())
        settings = publish.leaving(work, settings, pusher)
    work.check(settings)
    found = _preview(lambda: work.check_output(settings), lambda: work.describe(settings))
    if options.no_keep:
        from fp4convert.execution.job import list_peaks

        peaks = list_peaks(work.jobs().values(), settings.shards_at_once)
        found["peak_disk_bytes"] = peaks[-1]
    if isinstance(work, Conversion) and (usual := forecast(work.plan.target, work.source)):
        found["usual_loss"] = usual
    if gpu := _describe_gpu(work):
        found["gpu"] = gpu
    if not work.verdicts:
        return found
    engines = [verdict.as_json() for verdict in work.verdicts]
    return {**found, "engine": engines[0], "engines": engines}


def _describe_gpu(work: Work) -> dict[str, Any] | None:
    """Return the key "gpu" of the document; None without --gpu."""
    if work.options.gpu is None:
        return None
    from fp4convert.engines.gpus import describe_uses, parse_gpu

    return describe_uses(parse_gpu(work.options.gpu), work.uses)


def _plan(options: QuantizeOptions, is_dry: bool) -> tuple[Work, Settings]:
    """Plan the work, and warn; of a dry run the document has the warnings."""
    from fp4convert.conversion.engine_choice import choose_options
    from fp4convert.conversion.work import prepare

    settings = options.settings(options.device, is_elsewhere=options.ray is not None)
    given_fit = options.fit
    if options.like is not None:
        from fp4convert.conversion.recorded_options import options_like

        options = options_like(options)
    if (options.fit, options.context) != (None, None):
        from fp4convert.conversion.memory_fit import fit_options

        options = fit_options(options)
    if options.gpu is not None:  # before hours of calibration
        from fp4convert.engines.gpus import parse_gpu

        parse_gpu(options.gpu)
    if options.is_checked_after or options.private or options.no_keep or options.disk is not None:
        from fp4convert.commands import publish

        publish.check_destinations(options, settings, is_dry)
    if options.ray is not None:
        from fp4convert.conversion.ray_workers import check_cluster, import_ray

        import_ray()
        if not is_dry:
            check_cluster(options.ray)
    given = options
    if options.has_text:
        from fp4convert.commands.calibration import calibrate_first

        options = calibrate_first(options, settings, is_dry)
    else:
        options = choose_options(options)
    settings.phases.begin("plan")
    with _fitting(given_fit):
        work = prepare(options, settings.phases, may_write=not is_dry)
    for line in _choice_lines(work, given.exclude):
        settings.tell(line)
    _warn(options, () if is_dry else work.warnings, settings)
    if is_dry:  # which leaves nobody a step to do
        return work, settings
    return work, replace(settings, next=tuple(work.next_steps(is_absolute=True)))


@contextmanager
def _fitting(card: float | str | None) -> Iterator[None]:
    """Raise errors of a target size as those of --fit, where that gave it."""
    try:
        yield
    except InputError as error:
        if card is None or error.code != "target-range":
            raise
        step = "Give a shorter --context, --kv-cache fp8, or a larger card."
        raise InputError(error.code, f"--fit {card}: {error.message}", step) from None


def _choice_lines(work: Work, excluded: Globs) -> Iterator[str]:
    """Yield what the engines and the card of the options mean.

    excluded  modules that were excluded before the engines' own
    """
    from fp4convert.conversion.engine_choice import added_words, choice_text

    options = work.options
    yield from judged_as(options.engine or "")
    for verdict in work.verdicts:
        yield choice_text(verdict, work.plan)
    if options.gpu is not None:
        from fp4convert.engines.gpus import lines_of

        yield from lines_of(_describe_gpu(work) or {})
    called = " or ".join(verdict.engine.called() for verdict in work.verdicts)
    if work.verdicts and (added := added_words(called, excluded, options.exclude)):
        yield added


def dequantize(options: DequantizeOptions) -> Result:
    """Turn an artifact back into a checkpoint of ordinary weights.

    The command `dequantize`.

    The values are exactly those that engines compute; FP8 and int4 of other makers are read, too.
    Raises  Fp4Error, as `quantize` does; NumericError beyond the range of fp16
    """
    from fp4convert.checkpoint.artifact import open_quantized
    from fp4convert.checkpoint.whole_model import refuse_one_shard
    from fp4convert.conversion import repacking

    settings = options.settings(options.device)
    output = as_folder(options.output, options.artifact)
    settings.phases.begin("plan")
    source, artifact = open_quantized(os.fspath(options.artifact), options.access(output))
    refuse_one_shard(source, os.fspath(options.artifact))
    plan = repacking.prepare_dequantize(source, artifact, options.dtype)
    _warn(options, plan.warnings, settings)
    result = repacking.dequantize(source, plan, output, settings)
    return replace(result, warnings=list(plan.warnings))


def transcode(options: TranscodeOptions) -> Result:
    """Spell an artifact in another dialect, never rounded again.

    The command `transcode`.

    Raises  Fp4Error, as `quantize` does; InputError for what the dialect cannot say
    """
    from fp4convert.checkpoint.artifact import open_artifact
    from fp4convert.checkpoint.misnamed import refuse_misnamed
    from fp4convert.checkpoint.whole_model import refuse_one_shard
    from fp4convert.conversion import repacking
    from fp4convert.planning.engine_facts import engine_warnings, serve_line, serving_engine
    from fp4convert.planning.no_effect import refuse_idle
    from fp4convert.storage.open import open_source

    settings = options.settings("cpu")
    output = as_folder(options.output, options.template or options.artifact)
    settings.phases.begin("plan")
    artifact = open_artifact(os.fspath(options.artifact), options.access(output))
    refuse_one_shard(artifact.source, os.fspath(options.artifact))
    refuse_misnamed(artifact.source, os.fspath(options.artifact))
    donor = open_source(os.fspath(options.template)) if options.template else None
    plan = repacking.prepare_transcode(artifact, options, donor)
    refuse_idle([plan.idle])
    checkpoint = artifact.source.checkpoint
    traps = [
        f"{line} (an option of fp4convert quantize)" if NOT_HERE.search(line) else line
        for line in engine_warnings(plan, checkpoint)
    ]
    warnings = [*plan.warnings, *traps]
    _warn(options, warnings, settings)
    result = repacking.transcode(artifact, plan, output, settings, donor)
    steps = [shell_line("fp4convert", "verify", output)]
    if engine := serving_engine(plan, checkpoint):
        steps.append(serve_line(engine, plan, checkpoint, str(output)))
    return replace(result, warnings=warnings, next=[step for step in steps if step])


def prune(options: PruneOptions) -> Result:
    """Leave out the experts that matter least (REAP): the command `prune`.

    Raises  Fp4Error, as `quantize` does
    """
    from fp4convert.conversion import pruning

    settings = options.settings("cpu")
    source, pruned = _plan_pruning(options, settings)
    _warn(options, pruned.plan.warnings, settings)
    output, again = Path(options.output), ("fp4convert", "quantize")
    after = (shell_line(*again, Path(os.path.abspath(output)), "--format", "nvfp4"),)
    result = pruning.prune(source, pruned, output, replace(settings, next=after))
    steps = [shell_line(*again, output, "--format", "nvfp4")]
    if settings.share:
        steps = [shell_line("fp4convert", "merge", output)]
    warnings = list(pruned.plan.warnings)
    return replace(result, experts=pruned.experts, warnings=warnings, next=steps)


def preview_prune(options: PruneOptions) -> dict[str, Any]:
    """Plan what `prune` would do: `prune --dry-run --json`.

    Writes nothing; raises as `prune` does, and tells of too little room as preview_quantize.
    """
    from fp4convert.conversion import pruning
    from fp4convert.execution.job import check_output

    settings = options.settings("cpu")
    source, pruned = _plan_pruning(options, settings)
    _warn(options, (), settings)
    job = pruning.pruning_job(source, pruned)
    return _preview(
        lambda: check_output(job, Path(options.output), settings),
        lambda: pruning.describe_pruning(source, pruned, settings),
    )


def _preview(check: Callable[[], None], describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the document of a dry run, with the error of a full disk in it.

    The document tells how much room is needed.
    """
    try:
        check()
    except OutputError as error:
        if error.code != "disk-full":
            raise
        return {**describe(), **error.as_json()}
    return describe()


def _plan_pruning(options: PruneOptions, settings: Settings) -> tuple[Source, Pruning]:
    """Open the source and plan which experts stay."""
    from fp4convert.calibration.calibration_file import open_calibration
    from fp4convert.checkpoint.whole_model import open_model
    from fp4convert.conversion import pruning

    settings.phases.begin("plan")
    output = as_folder(options.output, options.source)
    source = open_model(os.fspath(options.source), options.access(output))
    calibration = open_calibration(Path(options.calibration))
    return source, pruning.prepare_prune(source, calibration, options.keep, options.recipe)


def merge(options: MergeOptions) -> dict[str, Any]:
    """Finish a conversion whose parts are done: the command `merge`.

    Every shard is checked, scale groups are compared, the records are written.  Shards that no
    seal proves untouched are read again (docs/machines.md).
    Returns  what `merge --json` prints
    Raises   InputError where it holds no plan; OutputError where a shard is missing or damaged
    """
    from fp4convert.execution import finish

    return finish.merge(Path(options.output), options.phases or Phases(), options.tell)


def _warn(options: WorkOptions, warnings: Iterable[str], settings: Settings) -> None:
    """Warn, and tell the part that this process does."""
    (options.warn or as_warnings)(list(warnings))
    if settings.share:
        from fp4convert.execution.share import describe

        settings.tell(describe(settings.share))
