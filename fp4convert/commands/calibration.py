"""calibrate(): run text through a model; needs torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Unpack

from fp4convert.calibration import run
from fp4convert.calibration.run import Calibrated
from fp4convert.calibration.samples import Feed
from fp4convert.calibration.workdir import interruptible
from fp4convert.commands.options import (
    AccessOptions,
    Reference,
    access_of,
    as_path,
    check_words,
    words_of,
)
from fp4convert.progress import Phases
from fp4convert.storage.open import open_source


class CalibrateOptions(AccessOptions, total=False):
    """What `calibrate` is told beside source, output and text.

    self_generate    no data: so many sequences are written by the model
    samples          at most so many, evenly spread over the data; default 128
    sequence_length  tokens of each; default: what the model takes, up to 2048, or 512 of its own
    gram             none, diag (default: second moments), block:N or full
    device           auto (default: a GPU, else the CPU), cpu, cuda or cuda:N
    hold             GB of weights held at once, with self_generate; default 8
    force            replace a file that is there
    phases           learns how far the work is
    """

    self_generate: int | None
    samples: int
    sequence_length: int | None
    gram: str
    device: str
    hold: float
    force: bool
    phases: Phases


def calibrate(
    source: Reference,
    output: Reference,
    *,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    **options: Unpack[CalibrateOptions],
) -> Calibrated:
    """Run text through the model, a layer at a time, and keep what every linear layer is given: the command `calibrate`.

    output   new safetensors file
    text     files of plain text
    dataset  jsonl or parquet with 'text' or 'messages' in each record; one of text, dataset and self_generate is given
    options  as CalibrateOptions says
    Returns  what was written; `warnings` says what a person should know of it
    Raises   Fp4Error: InputError for text or a model that cannot be used, OutputError for a file that cannot be written
    """
    check_words(options, CalibrateOptions)
    target, phases = Path(output), options.get("phases") or Phases()
    texts = (text,) if isinstance(text, str | os.PathLike) else text or ()
    feed = Feed(text=tuple(map(Path, texts)), dataset=as_path(dataset), **words_of(Feed, options))
    feed.check()
    with interruptible(target):
        phases.begin("plan")
        opened = open_source(os.fspath(source), access_of(options))
        how = words_of(run.Run, options, held_nbytes="hold", is_forced="force") | {"phases": phases}
        return run.calibrate(run.Run(source=opened, output=target, feed=feed, **how))
