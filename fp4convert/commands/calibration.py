"""calibrate(), and the text that evaluate() reads, too; needs torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fp4convert.calibration.result import Calibrated
from fp4convert.checkpoint.whole_model import open_model
from fp4convert.errors import InputError, describe_missing
from fp4convert.options.access import as_nbytes
from fp4convert.options.arguments import as_path, chosen_adapter
from fp4convert.options.measuring import CalibrateOptions, TextOptions
from fp4convert.progress import Phases

if TYPE_CHECKING:
    from fp4convert.calibration.samples import Feed


def calibrate(options: CalibrateOptions) -> Calibrated:
    """Run text through the model and keep the inputs of linear layers.

    A layer is in memory at a time.  One of text, dataset and self_generate is given: the command
    `calibrate`.
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
        return run.calibrate(
            run.Run(
                source=open_model(os.fspath(options.source), options.access()),
                output=output,
                feed=feed,
                gram=options.gram,
                has_losses=options.sensitivity,
                device=options.device,
                held_nbytes=as_nbytes(options.hold),
                is_forced=options.force,
                phases=phases,
                tell=options.tell,
                adapter=adapter,
            )
        )


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
