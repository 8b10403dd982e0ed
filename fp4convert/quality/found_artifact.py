"""Find the record and the files of an artifact, and compare two files."""

from __future__ import annotations

import os
from collections.abc import Collection
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert.errors import InputError, shell_line
from fp4convert.storage.checkpoint_files import (
    ENGINE_RECORD,
    HUB_FILE,
    INDEX,
    PIPELINE,
    RECORD,
    SIGNATURE,
    UNDIGESTED,
    WEIGHTS,
    holds_weights,
    no_subfolder,
    recorded_hashes,
)
from fp4convert.storage.disk import (
    SHA256_DIGITS,
    hash_file,
    hash_stream,
    nbytes_there,
    open_regular,
    read_blocks,
)
from fp4convert.storage.json_text import TEXT_LIMIT, parse_json_object
from fp4convert.storage.open import open_source
from fp4convert.storage.safetensors import TensorRef, read_header
from fp4convert.storage.source import Access, Source, read_whole, subfolder_of


class FoundArtifact(NamedTuple):
    """The record and the files of an artifact.

    names   of all its files; none for a record alone
    folder  of the files on this disk
    source  repository of the files
    """

    record: dict[str, Any]
    names: Collection[str] = ()
    folder: Path | None = None
    source: Source | None = None

    @property
    def unrecorded(self) -> list[str]:
        """Name the files that the record should name, and does not."""
        own = {*recorded_hashes(self.record), RECORD, SIGNATURE, *UNDIGESTED}
        return sorted(set(self.names) - own)

    @property
    def added(self) -> list[str]:
        """Name unrecorded files that change the weights an engine loads."""
        return [
            name
            for name in self.unrecorded
            if holds_weights(name)
            or name.endswith(INDEX)
            or PurePosixPath(name).name == ENGINE_RECORD
        ]

    def read(self, file: str) -> bytes | None:
        """Return the bytes of a small file; None if it is missing."""
        if self.folder and nbytes_there(self.folder / file) is not None:
            with open_regular(self.folder / file, -1) as stream:
                return stream.read(TEXT_LIMIT)
        is_there = self.source and self.source.has_file(file)
        return read_whole(self.source, file) if self.source and is_there else None

    def hash_of(self, file: str, alone: str) -> str | None:
        """Return the sha256 of one of its files; None if it is missing.

        alone  the answer for a record without files
        """
        if self.folder:
            try:
                return hash_file(self.folder / file)
            except OSError:
                return None
        if not self.source:
            return alone
        return hash_in(self.source, file) if self.source.has_file(file) else None


def find_artifact(reference: str, access: Access) -> FoundArtifact:
    """Read our record of an artifact, and list its files.

    reference  a folder, a record, or a repository
    Raises     InputError without a record; errors of open_source
    """
    place = Path(reference)
    below = subfolder_of(access)
    folder = place / below if place.is_dir() else place.parent
    if place.is_dir() and not folder.is_dir():
        raise no_subfolder(place, below, (each.name for each in place.iterdir() if each.is_dir()))
    if place.exists():
        file = place if place.suffix == ".json" else folder / RECORD
        try:
            with open_regular(file, -1) as stream:
                text = stream.read(TEXT_LIMIT + 1)
            if len(text) > TEXT_LIMIT:
                raise _no_record(reference, f"it is longer than {TEXT_LIMIT:,} bytes")
            record = parse_json_object(text, file.name)
        except OSError as error:
            parts = sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
            if parts and (folder / PIPELINE).is_file():
                detail = f"{reference} is a pipeline of {' and '.join(each.name for each in parts)}"
                step = f"Name the folder: {shell_line('fp4convert', 'reproduce', parts[0])}"
                raise InputError("pipeline", f"{detail}; expected one artifact", step) from None
            raise _no_record(reference, error.strerror) from None
        names = _files_in(folder)
        shards = {name for name in recorded_hashes(record) if holds_weights(name)}
        # A record by another name may lie anywhere; by its own, it is that of weights beside it.
        if place.name == RECORD:
            shards |= {name for name in names if "/" not in name and holds_weights(name)}
        if file == place and not any(nbytes_there(folder / name) is not None for name in shards):
            return FoundArtifact(record)
        if nbytes_there(folder / HUB_FILE) is not None:
            open_source(os.fspath(folder))  # says where shards have gone
        return FoundArtifact(record, names, folder)
    source = open_source(reference, access)
    if not source.has_file(RECORD):
        raise _no_record(reference, "none is there")
    known = source.checkpoint
    listed = (*(shard.file for shard in known.shards), *known.left_out, *known.sidecars)
    return FoundArtifact(
        parse_json_object(read_whole(source, RECORD), RECORD), listed, source=source
    )


def _files_in(folder: Path) -> list[str]:
    """Name every file below a folder but hidden ones; links are not followed."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        names = (Path(place, name) for name in [*files, *links] if not name.startswith("."))
        found += [path.relative_to(folder).as_posix() for path in names]
    return found


def _no_record(reference: str, why: str | None) -> InputError:
    detail = f"{reference}: its {RECORD} cannot be read ({why})"
    step = "Give an artifact by quantize, of a pipeline one of its folders."
    return InputError("not-reproducible", f"{detail}; expected the record of an artifact", step)


def hash_in(source: Source, file: str) -> str:
    """Return the sha256 of a file: the Hub knows that of large ones."""
    known = source.checkpoint.stamps.get(file, "") if source.is_streamed else ""
    if len(known) == SHA256_DIGITS:
        return known
    with source.open_file(file) as stream:
        return hash_stream(stream)


def first_difference(made: Path, there: Path) -> str | None:
    """Name the first tensor in which two files of safetensors differ.

    None for another kind of difference, or a file that cannot be read.
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
