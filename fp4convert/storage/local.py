"""Read a checkpoint on this disk: a folder or one file."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, NoReturn

from fp4convert.errors import InputError, SourceError
from fp4convert.storage.checkpoint_files import (
    GGUF,
    PIPELINE,
    WEIGHTS,
    check_index,
    choose_shards,
    find_components,
    find_homes,
    find_index,
    no_subfolder,
    no_weights,
    read_index,
    sort_others,
    sort_pipeline,
)
from fp4convert.storage.disk import Mark
from fp4convert.storage.gguf import read_gguf_header
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header, TensorRef
from fp4convert.storage.safetensors_header import read_header
from fp4convert.storage.source import Checkpoint, name_of

SCALAR_NBYTES = 8


class LocalSource:
    """Maps shards into memory; a tensor's bytes are read when they are touched and belong to the page cache."""

    is_streamed = False
    held_nbytes = 0

    def __init__(self, path: Path, may_be_empty: bool = False, subfolder: str = "") -> None:
        self._root = path if path.is_dir() else path.parent
        self._folder = self._root / subfolder
        self._single = None if path.is_dir() else path.name
        if subfolder and (self._single or not self._folder.is_dir()):
            raise no_subfolder(path, subfolder, () if self._single else _folders_of(path))
        self.name = name_of(str(path))
        self._maps: dict[str, mmap.mmap] = {}
        self._streams: dict[str, BinaryIO] = {}
        self._lock = threading.Lock()
        self._stamps: dict[str, str] = {}  # of what was there when headers were read
        self.checkpoint = self._open(may_be_empty)
        self._stamps = self.checkpoint.stamps

    def read(self, ref: TensorRef) -> memoryview:
        return self._mapped(ref.file)[ref.start : ref.start + ref.nbytes]

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        if stop - start > SCALAR_NBYTES:
            return self._mapped(ref.file)[ref.start + start : ref.start + stop]
        buffer = memoryview(
            bytearray(stop - start)
        )  # through a mapping, the system would fetch much around it
        self.read_into(ref, start, buffer)
        return buffer

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        with self._lock:
            if ref.file not in self._streams:
                self._streams[ref.file] = self.open_file(ref.file)
        done, fd = 0, self._streams[ref.file].fileno()
        while done < buffer.nbytes:
            try:
                count = os.preadv(fd, [buffer[done:]], ref.start + start + done)
            except OSError as error:
                raise SourceError(
                    "source-unreadable",
                    f"{ref.file} cannot be read: {error.strerror}",
                    "Run it again.",
                ) from error
            if not count:
                detail = f"{ref.file} changed while it was read: it ends inside {ref.name!r}"
                raise SourceError(
                    "source-changed", detail, "Run the command again once it stays as it is."
                )
            done += count

    def _mapped(self, file: str) -> memoryview:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = self._map(file)
            return memoryview(self._maps[file])

    def _map(self, file: str) -> mmap.mmap:
        with self.open_file(file) as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        expected = next(shard.nbytes for shard in self.checkpoint.shards if shard.file == file)
        if len(mapped) != expected:
            detail = f"{file} changed while it was read: it had {expected} bytes and now has {len(mapped)}"
            raise SourceError(
                "source-changed", detail, "Run the command again once it stays as it is."
            )
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # read ahead of a page that is missing, not around it
        return mapped

    def has_file(self, file: str) -> bool:
        return self._single is None and (self._folder / file).exists()

    def open_file(self, file: str) -> BinaryIO:
        try:
            return _regular(self._folder, file).open("rb")
        except OSError as error:
            raise self._lost(file, _unreadable(file, error), "source-unreadable") from None
        except InputError as error:
            raise self._lost(file, error, "source-changed") from None

    def _lost(self, file: str, error: InputError, code: str) -> InputError | SourceError:
        """The same error; of a file that was there when headers were read, as one that a re-run may not meet."""
        if file not in self._stamps:
            return error
        return SourceError(
            code,
            f"{error.message}; it was there before",
            "Run the same command again once it is back.",
        )

    def file_nbytes(self, file: str) -> int:
        return _regular(self._folder, file).stat().st_size

    def check_unchanged(self, shard: str) -> None:
        path = self._folder / shard
        if not path.exists() or _stamp(path) != self.checkpoint.stamps[shard]:
            detail = f"{shard} changed while it was read; expected one that stays as it is"
            raise SourceError("source-changed", detail, "Run the command again once it does.")

    @contextmanager
    def stream(self, file: str) -> Iterator[None]:
        try:
            yield
        finally:  # a mapping takes its time to go, a thirtieth of a second for 1 GB: now, beside other work, and not in the end
            with self._lock:
                mapped = self._maps.pop(file, None)
            del mapped  # outside of the lock: other readers need not wait for it

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> None:
        """Nothing to do: a disk does not keep anyone waiting."""

    def holds(self, path: Path) -> bool:
        place, root = path.resolve(), self._root.resolve()
        return place == root if self._single else place.is_relative_to(root)

    def _open(self, may_be_empty: bool) -> Checkpoint:
        try:
            names = [self._single] if self._single else sorted(os.listdir(self._folder))
        except OSError as error:
            raise _unreadable(self._folder, error) from None
        if self._single and not self._single.endswith((WEIGHTS, GGUF)):
            raise no_weights(self._folder / self._single, names)
        if PIPELINE in names and not self._single and (components := self._components()):
            return self._pipeline(components)
        index = find_index(names)
        weight_map = self._index(index) if index else None
        shards = [self._single] if self._single else choose_shards(self._folder, names, weight_map)
        if not shards and not may_be_empty:
            raise no_weights(self._folder, names)
        headers = tuple(self._header(name) for name in shards)
        homes = find_homes(headers)
        sidecars, left_out = sort_others(self._files(), shards)
        return Checkpoint(
            repo=None,
            revision=None,
            config=self._config(),
            shards=headers,
            sidecars=sidecars,
            left_out=left_out,
            unindexed=check_index(homes, weight_map, index) if weight_map and index else (),
            stamps=self._stamps_of(*shards, *sidecars),
        )

    def _components(self) -> tuple[str, ...]:
        with self.open_file(PIPELINE) as stream:
            return find_components(stream.read(), _folders_of(self._folder))

    def _pipeline(self, components: tuple[str, ...]) -> Checkpoint:
        """What lies beside the components of a pipeline."""
        sidecars, left_out = sort_pipeline(self._files(components), components)
        return Checkpoint(
            None, None, {}, (), sidecars, left_out, (), self._stamps_of(*sidecars), components
        )

    def _stamps_of(self, *files: str) -> dict[str, str]:
        for file in files:
            _regular(self._folder, file)
        return {file: _stamp(self._folder / file) for file in files}

    def _index(self, index: str) -> dict[str, str]:
        with self.open_file(index) as stream:
            return read_index(stream.read(), index)

    def _header(self, name: str) -> Header:
        if name.endswith(GGUF):
            return read_gguf_header(_regular(self._folder, name))
        with self.open_file(name) as stream:
            size = os.fstat(stream.fileno()).st_size
            return read_header(
                name, size, lambda offset, length: os.pread(stream.fileno(), length, offset)
            )

    def _config(self) -> dict[str, object]:
        """config.json of the folder; that beside a single file too, for it says what the names mean."""
        if not (self._folder / "config.json").exists():
            return {}
        with self.open_file("config.json") as stream:
            return parse_json_object(stream.read(), "config.json", has_constants=True)

    def _files(self, apart: Collection[str] = ()) -> list[str]:
        """Every file of the folder, but for hidden ones and those of the folders `apart`."""
        found: list[str] = []
        for folder, folders, files in (
            () if self._single else os.walk(self._folder, onerror=_refuse)
        ):
            is_top = folder == str(self._folder)
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".") and not (is_top and name in apart)
            )
            for link in (name for name in folders if os.path.islink(os.path.join(folder, name))):
                raise InputError(
                    "folder-link",
                    f"{link} is a link to a folder; expected a folder, or files",
                    "Copy what it leads to.",
                )
            names = sorted(name for name in files if not name.startswith("."))
            found += [os.path.relpath(os.path.join(folder, name), self._folder) for name in names]
        return found


def _folders_of(folder: Path) -> list[str]:
    """The folders in a folder that are not hidden."""
    try:
        return [
            place.name
            for place in folder.iterdir()
            if place.is_dir() and not place.name.startswith(".")
        ]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _stamp(path: Path) -> str:
    return " ".join(map(str, Mark.of(path.stat())))


def _unreadable(place: object, error: OSError) -> InputError:
    return InputError(
        "unreadable", f"{place} cannot be read: {error.strerror}", "See that this user may read it."
    )


def _refuse(error: OSError) -> NoReturn:
    raise _unreadable(error.filename, error)


def _regular(folder: Path, name: str) -> Path:
    """The path of a regular file inside `folder`; links may lead inside it, or into the blobs of the Hub's own cache."""
    path, root = folder / name, folder.resolve()
    allowed = [root]
    allowed += [
        place.parent.parent / "blobs"
        for place in (root, *root.parents)
        if place.parent.name == "snapshots"
    ]
    try:
        name.encode("utf-8")
        target = path.resolve()
        mode = path.stat().st_mode
    except UnicodeEncodeError:
        raise InputError(
            "file-name",
            f"the name of {name!r} is not UTF-8; expected one that records can hold",
            "Rename it.",
        ) from None
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: a link that leads to itself; ValueError: NUL
        raise InputError(
            "unreadable", f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not any(target.is_relative_to(place) for place in allowed):
        raise InputError(
            "link-outside",
            f"{name} is a link to {target}, outside the folder; expected a file in it",
        )
    if not stat.S_ISREG(mode):
        raise InputError("not-a-file", f"{name} is not a regular file; expected one")
    return path
