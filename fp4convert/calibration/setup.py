"""Find the device of a run, and lay out the texts of its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath

import torch

from fp4convert.calibration.model import NEXT, Skeleton
from fp4convert.calibration.multimodal import listens
from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends.base import expected_device
from fp4convert.storage.disk import write_errors_at
from fp4convert.storage.json_text import unquantized
from fp4convert.storage.source import Source

TEXT_FILES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".bpe", ".merges")
COPY_NBYTES = 1 << 20


def find_device(name: str) -> torch.device:
    """Find the torch device of a name, or raise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    detail = f"--device {name!r} is not known; expected {expected_device(name)}"
    try:
        device = torch.device(name)
        is_known = device.type in ("cpu", "cuda")
    except RuntimeError:
        is_known = False
    if not is_known:
        raise InputError("no-device", detail, "Leave it out for a GPU, else the CPU.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        detail = f"--device {name}: torch {torch.__version__} finds"
        detail += f" {torch.cuda.device_count()} GPUs"
        raise DeviceError("no-device", detail, "Use --device cpu, or see: fp4convert doctor.")
    return device


def copy_texts(source: Source, folder: Path) -> None:
    """Copy config.json and the tokenizer's files; no code is among them."""
    if not unquantized(source.checkpoint.config):
        detail = f"{source.name} has no config.json"
        detail += "; expected one, which says how the model computes"
        next_step = "Give the folder or repository of the whole model."
        raise InputError("calibration-model", detail, next_step)
    with write_errors_at(folder):
        folder.mkdir(exist_ok=True)
        for file in source.checkpoint.sidecars:
            if file.endswith(TEXT_FILES) and len(PurePosixPath(file).parts) == 1:
                with source.open_file(file) as stream, (folder / file).open("wb") as out:
                    shutil.copyfileobj(stream, out, COPY_NBYTES)
        (folder / "config.json").write_text(json.dumps(unquantized(source.checkpoint.config)))


def check_reads_text(skeleton: Skeleton) -> None:
    """Raise InputError for a model that neither reads nor writes text."""
    name = getattr(skeleton.model, "main_input_name", "input_ids")
    if name != "input_ids" and not listens(skeleton.model):
        detail = f"{type(skeleton.model).__name__} reads {name}; expected a model that reads text"
        raise InputError("calibration-model", detail, NEXT)
