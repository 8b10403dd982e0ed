"""Where the weights come from: every module here offers a Source, and nothing above asks which."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

from fp4convert.checkpoint import Checkpoint
from fp4convert.errors import InputError
from fp4convert.shard import TensorRef


class Source(Protocol):
    """A checkpoint and the bytes behind it."""

    @property
    def name(self) -> str:
        """What a person calls it: the last part of its path."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    def read(self, ref: TensorRef) -> memoryview:
        """The bytes of one tensor, read-only, valid until `close`."""

    def has_file(self, file: str) -> bool:
        """True where the source's folder holds that file."""

    def open_file(self, file: str) -> BinaryIO:
        """A file of the source, opened for reading."""

    def close(self) -> None: ...


def open_source(reference: str, may_be_empty: bool = False) -> Source:
    """The source of that name: a folder or one .safetensors file.

    may_be_empty  accept a folder without weights: a conversion that has not got to its first shard
    Raises        InputError where it is neither, or is not a sound checkpoint
    """
    path = Path(reference)
    if not path.exists():
        detail = f"{reference}: no such file or folder; expected a checkpoint on this disk"
        raise InputError("no-source", detail, f"From the Hub, first: hf download {reference} --local-dir FOLDER")
    from fp4convert.sources.local import LocalSource

    return LocalSource(path, may_be_empty)
