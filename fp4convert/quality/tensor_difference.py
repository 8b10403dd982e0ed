"""Name the first tensor in which two files of safetensors differ."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import WEIGHTS
from fp4convert.storage.disk import read_blocks
from fp4convert.storage.safetensors import TensorRef, read_header


def first_difference(made: Path, there: Path) -> str | None:
    """Name the first tensor whose bytes two files do not share.

    None where it is no tensor, or a file cannot be read.
    """
    if not there.is_file() or there.suffix != WEIGHTS:
        return None
    try:
        with made.open("rb", buffering=0) as own, there.open("rb", buffering=0) as other:
            return _first_tensor(own, other)
    except (InputError, OSError):
        return None


def _first_tensor(own: FileIO, other: FileIO) -> str | None:
    def read_refs(stream: FileIO) -> tuple[TensorRef, ...]:
        def read(offset: int, length: int) -> bytes:
            stream.seek(offset)
            return bytes(stream.read(length) or b"")

        return read_header(str(stream.name), os.fstat(stream.fileno()).st_size, read).tensors

    known = {ref.name: ref for ref in read_refs(other)}
    for ref in read_refs(own):
        twin = known.pop(ref.name, None)
        if twin is None or (twin.dtype, twin.shape) != (ref.dtype, ref.shape):
            return ref.name
        own.seek(ref.start)
        other.seek(twin.start)
        blocks = zip(read_blocks(own, ref.nbytes), read_blocks(other, ref.nbytes), strict=True)
        if any(mine != theirs for mine, theirs in blocks):
            return ref.name
    return next(iter(known), None)
