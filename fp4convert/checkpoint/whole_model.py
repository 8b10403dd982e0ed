"""Refuse sources that are no whole model: adapters, single shards."""

from __future__ import annotations

import re
from pathlib import Path

from fp4convert.checkpoint.misnamed import refuse_misnamed
from fp4convert.errors import InputError, shell_line
from fp4convert.progress import are_text
from fp4convert.storage.checkpoint_files import NUMBERED, find_index, read_index
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access, Source, read_whole, stopping

ADAPTER = "adapter_config.json"  # of PEFT
BASE = ".base_layer."  # the layer under an adapter: no adapter's file has it
# Low-rank factors as PEFT, Diffusers and ComfyUI name them.
LOW_RANK = re.compile(r"[._](lora_(A|B|down|up|embedding_A|embedding_B)|lokr_w\d|hada_w\d)\b")


def open_model(reference: str, access: Access) -> Source:
    """Open a source that has to be a whole model."""
    source = open_source(reference, access)
    with stopping(source):
        refuse_no_model(source, reference)
    return source


def refuse_no_model(source: Source, reference: str) -> None:
    """Raise InputError for a shard, an adapter, and names of no model's class."""
    refuse_one_shard(source, reference)
    refuse_adapter(source, reference)
    refuse_misnamed(source, reference)


def refuse_adapter(source: Source, reference: str) -> None:
    """Raise InputError for an adapter, which no engine loads by itself.

    A model that has low-rank factors beside its weights is none.
    """
    names = [ref.name for ref in source.checkpoint.tensors]
    factors = sum(LOW_RANK.search(name) is not None for name in names)
    if not factors or 2 * factors <= len(names) or any(BASE in name for name in names):
        return
    base: object = None
    if source.has_file(ADAPTER):
        config = parse_json_object(read_whole(source, ADAPTER), ADAPTER)
        base = config.get("base_model_name_or_path")
    is_known = isinstance(base, str) and base != ""
    detail = f"{source.name} is a LoRA adapter{f' of {base}' if is_known else ''}: {factors} of its"
    detail = f"{detail} {are_text(len(names), 'tensor')} low-rank factors; expected a whole model"
    words = ("quantize", str(base) if is_known else "BASE", "--format", "nvfp4", "--lora")
    line = shell_line("fp4convert", *words, reference)
    next_step = f"Give its base model, and merge it on the way: {line}"
    raise InputError("adapter", detail, next_step)


def refuse_one_shard(source: Source, reference: str) -> None:
    """Raise InputError for a file that is one shard of several."""
    path = Path(reference)
    if len(source.checkpoint.shards) != 1 or not path.is_file():
        return
    folder, count, where = path.parent, 1, ""
    if match := NUMBERED.fullmatch(path.name):
        count = int(match[3])
        where = f"shard {int(match[2])} of {count}"
    elif index := find_index([item.name for item in folder.iterdir()]):
        files = sorted(set(read_index((folder / index).read_bytes(), index).values()))
        if path.name in files:
            count = len(files)
            where = f"shard {files.index(path.name) + 1} of {count}"
    if count > 1:
        detail = f"{reference} is {where}; expected the whole model"
        raise InputError("one-shard", detail, f"Give the folder: {shell_line(folder)}")
