"""calibrate(), and the text that evaluate() reads, too; needs torch."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.calibration.result import Calibrated
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4
from fp4convert.checkpoint.record import ADAPTER, OPTIONS
from fp4convert.checkpoint.whole_model import open_model
from fp4convert.errors import InputError, OutputError, describe_missing, shell_line
from fp4convert.numerics.formats import FP4_FORMATS, GPTQ, METHODS, check_rule, format_named
from fp4convert.options.access import as_nbytes
from fp4convert.options.arguments import as_path, chosen_adapter
from fp4convert.options.measuring import CalibrateOptions, TextOptions
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.method_needs import rounded
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.json_text import parse_json_object, read_text_file

if TYPE_CHECKING:
    from fp4convert.calibration.prefix import Goal
    from fp4convert.calibration.samples import Feed
    from fp4convert.conversion.work import Work
    from fp4convert.execution.settings import Settings

MOST_FULL_NBYTES = 16 * 10**9  # of the Gram matrices of all linear layers
NEEDING: dict[str, Any] = dict.fromkeys(  # options that may need statistics
    ("target_bits", "target_size", "scale_rule", "kv_cache", "damping", "passes")
)
CHOSEN = ("dialect", "format", "activations", "exclude", "include")  # by --for
METHODLESS_GRAM = "diag"  # where no method is said
TEXTS = ("text", "dataset", "self_generate")
SHARED = (  # options of a quantize and its calibration
    *(*TEXTS, "lora", "lora_scale", "device", "tell"),
    *("revision", "subfolder", "token", "memory", "config", "follow_links"),
)


def calibrate(options: CalibrateOptions, goal: Goal | None = None) -> Calibrated:
    """Run text through the model and keep the inputs of linear layers.

    A layer is in memory at a time.  One of text, dataset and self_generate is given: the command
    `calibrate`.
    goal     how quantize will round, where its options say that
    Returns  what was written; `warnings` says what a person should know of it
    Raises   Fp4Error: InputError for text or a model that cannot be used, or without the packages
             that run it, OutputError for a file that cannot be written
    """
    feed = feed_of(options, "calibrate")
    from fp4convert.calibration import run
    from fp4convert.calibration.workdir import interruptible

    output, phases = Path(options.output), options.phases or Phases()
    with interruptible(output):
        phases.begin("plan")
        adapter = chosen_adapter(options.lora, options.lora_scale, options.access())
        source = open_model(os.fspath(options.source), options.access())
        gram = options.gram or METHODLESS_GRAM
        if goal is None and _has_goal(options):
            goal, gram = _find_goal(options)
        return run.calibrate(
            run.Run(
                source=source,
                output=output,
                feed=feed,
                gram=gram,
                has_losses=options.sensitivity,
                device=options.device,
                held_nbytes=as_nbytes(options.hold),
                is_forced=options.force,
                phases=phases,
                tell=options.tell,
                adapter=adapter,
                goal=goal,
            )
        )


def _has_goal(options: CalibrateOptions) -> bool:
    """Tell whether statistics are for one way to round; refuse idle options."""
    is_rounded = int(options.activations) != 16
    idle = {"format": options.for_method or is_rounded, "scale_rule": options.for_method}
    for name, has_use in idle.items():
        word = getattr(options, name)
        if word is not None and not has_use:
            detail = f"--{name.replace('_', '-')} {word} is for --for-method, which is not given"
            raise InputError("idle-option", detail, f"Add --for-method {GPTQ}, or leave it out.")
    return options.for_method is not None or is_rounded


def _find_goal(options: CalibrateOptions) -> tuple[Goal, str]:
    """Plan the quantize that statistics are for; return its Gram, too."""
    from fp4convert.conversion.one_checkpoint import Conversion
    from fp4convert.conversion.rounding_goal import goal_of
    from fp4convert.conversion.work import prepare

    option = f"--for-method {GPTQ}" if options.for_method else "--activations 4"
    if options.format is None:
        detail = f"{option} is for one format of weights; expected --format with it"
        raise InputError("usage", detail, f"Add one: {option} --format {next(iter(FP4_FORMATS))}.")
    if options.gram in ("none", METHODLESS_GRAM):
        detail = f"{option} needs Gram matrices, and --gram is {options.gram}"
        raise InputError("no-gram", f"{detail}; expected block:N or full", "Leave --gram out.")
    shared = {name: getattr(options, name) for name in SHARED if name not in TEXTS}
    chosen = {name: getattr(options, name) for name in ("format", "activations")}
    asked = QuantizeOptions(options.source, **shared, **chosen, method=METHODS[0])
    work = prepare(asked, may_write=False)
    assert isinstance(work, Conversion), "a pipeline is no model"
    if options.scale_rule is not None:
        check_rule(format_named(options.format), options.scale_rule)
    goal = goal_of(work, options.scale_rule, options.for_method is not None)
    return goal, options.gram or _choose_gram(work)


def feed_of(options: TextOptions, command: str) -> Feed:
    """Return the text of a command; InputError without torch, which reads it."""
    if find_spec("torch") is None:
        needing = f"{command} needs the package torch"
        raise InputError("no-torch", *describe_missing(needing, "calibrate"))
    from fp4convert.calibration.samples import Feed

    text = options.text
    files = (text,) if isinstance(text, str | os.PathLike) else text or ()
    feed = Feed(
        text=tuple(map(Path, files)),
        dataset=as_path(options.dataset),
        self_generate=options.self_generate,
        samples=options.samples,
        sequence_length=options.sequence_length,
        usual=options.USUAL_LENGTH,
    )
    feed.check()
    _refuse_idle(options)
    return feed


def calibrate_first(options: QuantizeOptions, settings: Settings, is_dry: bool) -> QuantizeOptions:
    """Calibrate with the text of a quantize; return options with the file.

    What can be refused without statistics is refused before the model reads the text. A file of the
    same text and Gram is used again, and an interrupted calibration goes on. A dry run plans as
    without statistics.
    """
    from fp4convert.conversion.engine_choice import choose_options
    from fp4convert.conversion.one_checkpoint import Conversion
    from fp4convert.conversion.work import prepare

    _refuse_beside_text(options, settings)
    shared = {name: getattr(options, name) for name in SHARED}
    asked = CalibrateOptions(source=options.source, output=options.source, **shared)
    feed = feed_of(asked, "quantize with a text")
    silent: dict[str, Any] = dict.fromkeys(TEXTS)
    untried = choose_options(replace(options, method=METHODS[0], **silent, **NEEDING))
    chosen = {name: getattr(untried, name) for name in CHOSEN}
    plain = replace(options, method=METHODS[0], **silent, **chosen)
    is_fitted = (options.target_bits, options.target_size) != (None, None)
    method = options.method or (GPTQ if format_named(str(plain.format)).is_fp4 else METHODS[0])
    file = plain.folder.with_name(f"{plain.folder.name}.calibration.safetensors")
    work = prepare(untried, may_write=False)
    is_there = file.exists() and not options.force
    if not is_there:
        work.check_output(settings)
        _refuse_uncalibrated(plain.folder, settings)
    asked = replace(
        asked,
        output=file,
        gram=_choose_gram(work) if method == GPTQ else METHODLESS_GRAM,
        sensitivity=is_fitted,
        force=options.force,
        phases=settings.phases,
    )
    goal, words = None, f"{feed.words()}, --gram {asked.gram}"
    # Formats that a size decides come later: no prefix is known. Nor is one of given scales.
    is_known = not is_fitted or untried.activations == ACTIVATIONS_FP4
    is_known &= (options.global_scale, options.via) == (None, None)
    if method == GPTQ and is_known and isinstance(work, Conversion):
        from fp4convert.conversion.rounding_goal import goal_of

        goal = goal_of(work, options.scale_rule, is_sequential=not is_fitted)
        words += f", --activations {ACTIVATIONS_FP4}" if is_fitted else f", --for-method {GPTQ}"
    if is_there:
        _check_same(file, feed, asked, goal)
    if is_dry:
        settings.tell(f"calibrates first: {words}; then rounds by {method}")
        return plain
    if not is_there:
        settings.tell(f"calibrates first: {words}; {file} keeps the statistics")
        for line in calibrate(asked, goal).warnings:
            settings.tell(line)
    settings.tell(f"rounds by {method} with {file}")
    return replace(plain, calibration=file, method=method)


def _refuse_beside_text(options: QuantizeOptions, settings: Settings) -> None:
    """Raise InputError for options that do not go with a text."""
    if options.calibration is not None:
        detail = "a text and --calibration are given: the text makes the statistics that the file"
        raise InputError("usage", f"{detail} has; expected one of them")
    if settings.share or settings.is_joining or options.ray is not None:
        detail = "several processes share this work, and one has to calibrate before them"
        line = shell_line("fp4convert", "calibrate", options.source, "-o", "FILE.safetensors")
        step = f"First {line} --gram block:128 and the text; then --calibration FILE.safetensors."
        raise InputError("usage", detail, step)


def _refuse_uncalibrated(folder: Path, settings: Settings) -> None:
    """Raise OutputError where a result of no statistics is finished."""
    if settings.is_forced or not (folder / RECORD).is_file():
        return
    record = parse_json_object(read_text_file(folder / RECORD).encode(), RECORD)
    given = record.get(OPTIONS)
    if isinstance(given, dict) and "calibration" not in given:
        detail = f"{folder} holds a finished result, made without statistics"
        step = "Choose another folder with -o, or discard its files with --force."
        raise OutputError("other-plan", detail, step)


def _choose_gram(work: Work) -> str:
    """Choose full Gram matrices, or blocks where those take much room."""
    jobs = work.conversions.values() if hasattr(work, "conversions") else (work,)
    columns = (
        linear.shape[1] for job in jobs for step in rounded(job.plan) for linear in step.linears
    )
    is_small = sum(4 * count**2 for count in columns) <= MOST_FULL_NBYTES
    return "full" if is_small else "block:128"


def _check_same(file: Path, feed: Feed, asked: CalibrateOptions, goal: Goal | None) -> None:
    """Raise OutputError for statistics that another calibration made."""
    from fp4convert.calibration.calibration_file import is_calibration, open_calibration

    known, wanted = None, f"--gram {asked.gram}{' --sensitivity' if asked.sensitivity else ''}"
    adapter = chosen_adapter(asked.lora, asked.lora_scale, asked.access())
    wanted += f" --lora {adapter.name}" if adapter else ""
    settings = goal.settings if goal else {}
    wanted += "".join(f" --{name.replace('_', '-')} {word}" for name, word in settings.items())
    if is_calibration(file):
        known = open_calibration(str(file))
    if (
        known is None
        or (known.notes["text"], known.gram_kind) != (feed.words(), asked.gram)
        or known.targets != settings
        or known.notes.get(ADAPTER) != (adapter.key if adapter else None)
        or (asked.sensitivity and not known.loss_formats)
    ):
        detail = f"{file} is there already, and not of this text and {wanted}"
        step = f"Replace it with --force, or round with it: {shell_line('--calibration', file)}"
        raise OutputError("output-exists", f"{detail}; nothing is written over it", step)


def has_text(options: TextOptions) -> bool:
    """Tell whether a text is given; InputError for its options without it."""
    if any(one is not None for one in (options.text, options.dataset, options.self_generate)):
        return True
    for name in ("samples", "sequence_length", "device", "hold", "by_layer"):
        if getattr(options, name) != getattr(type(options), name):
            detail = f"--{name.replace('_', '-')} is for predictions, and there is no text"
            raise InputError("idle-option", detail, "Add --text FILE, or leave it out.")
    return False


def _refuse_idle(options: TextOptions) -> None:
    """Raise InputError for an option of the other way to get text."""
    samples, hold = options.samples, options.hold
    if options.self_generate is None:
        if hold != TextOptions.hold:
            detail = f"--hold {hold:g} is for --self-generate, which is not given"
            raise InputError("idle-option", detail, "Leave --hold out.")
    elif samples != TextOptions.samples:
        detail = f"--samples {samples} is for --text and --dataset, and --self-generate is given"
        step = f"Write --self-generate {samples}, without --samples."
        raise InputError("idle-option", detail, step)
