"""Read a checkpoint on this disk: a folder or one file."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

from fp4convert.errors import InputError, SourceError, shell_line
from fp4convert.process import bus_errors, outlive_bus_errors
from fp4convert.storage.checkpoint_files import (
    CONFIG,
    GGUF,
    HUB_FILE,
    PIPELINE,
    PLAN_FILE,
    UNFINISHED,
    WEIGHTS,
    check_index,
    choose_shards,
    find_components,
    find_homes,
    find_index,
    gguf_parts,
    no_subfolder,
    no_weights,
    read_index,
    sort_others,
    sort_pipeline,
)
from fp4convert.storage.disk import Mark, lost_pages
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header, TensorRef, read_header
from fp4convert.storage.source import CACHED, Checkpoint, Source, name_of, read_whole
from fp4convert.storage.system import most_files, read_at, read_into_at

HOLDING = "Give the folder that holds the weights."
SCALAR_NBYTES = 8
MOST_OPEN = 256  # shards
AGAIN = "Run the command again once nothing writes to it."


class LocalSource(Source):
    """Maps shards into memory; the page cache owns their bytes."""

    is_streamed = False

    def __init__(
        self,
        path: Path,
        may_lack: bool = False,
        subfolder: str = "",
        follows_links: bool = False,
    ) -> None:
        self._follows_links = follows_links
        try:
            is_folder = path.is_dir()
            self._root = path if is_folder else path.parent
            self._folder = self._root / subfolder
            self._single = None if is_folder else path.name
            if subfolder and (self._single or not self._folder.is_dir()):
                raise no_subfolder(path, subfolder, () if self._single else _folders_of(path))
            self.name = name_of(str(path))
            self._maps: dict[str, mmap.mmap] = {}  # least recently used first, as the next
            self._opened: dict[str, _Opened] = {}
            self._lock = threading.Lock()
            self._bus_errors = bus_errors()  # of earlier sources
            self._stamps: dict[str, str] = {}  # of files there when headers were read
            self.checkpoint = self._open(may_lack)
        except OSError as error:
            raise _unreadable(error.filename or path, error) from error
        self._stamps = self.checkpoint.stamps

    def _regular(self, name: str) -> Path:
        return _regular(self._folder, name, self._follows_links)

    def read(self, ref: TensorRef) -> memoryview:
        with self._lock:
            mapped = self._maps.pop(ref.file, None)
            if mapped is None:
                outlive_bus_errors()
                with self.open_file(ref.file) as stream:
                    try:
                        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                    except OSError as error:
                        detail = f"{ref.file} cannot be read: {error}"
                        raise SourceError("source-unreadable", detail, AGAIN) from error
                    except ValueError:  # it is empty now
                        mapped = None
                shards = self.checkpoint.shards
                nbytes = next(shard.nbytes for shard in shards if shard.file == ref.file)
                if mapped is None or len(mapped) != nbytes:
                    found = f"it had {nbytes} bytes and now has {len(mapped or b'')}"
                    detail = f"{ref.file} changed while it was read: {found}"
                    raise SourceError("source-changed", detail, AGAIN)
                if hasattr(mmap, "MADV_SEQUENTIAL"):
                    # Read ahead of a missing page, not around it.
                    mapped.madvise(mmap.MADV_SEQUENTIAL)
            self._maps[ref.file] = mapped
            if len(self._maps) > most_open():
                del self._maps[next(iter(self._maps))]  # closed with its last view
            return memoryview(mapped)[ref.start : ref.start + ref.nbytes]

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        if stop - start > SCALAR_NBYTES:
            return self.read(ref)[start:stop]
        # Through a mapping the system would fetch much more.
        buffer = memoryview(bytearray(stop - start))
        self.read_into(ref, start, buffer)
        return buffer

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        with self._lock:
            opened = self._opened.pop(ref.file, None) or _Opened(self.open_file(ref.file))
            self._opened[ref.file] = opened
            if len(self._opened) > most_open():
                del self._opened[next(iter(self._opened))]
        done, fd = 0, opened.stream.fileno()
        while done < buffer.nbytes:
            try:
                count = read_into_at(fd, buffer[done:], ref.start + start + done)
            except OSError as error:
                detail = f"{ref.file} cannot be read: {error.strerror}"
                raise SourceError("source-unreadable", detail, "Run it again.") from error
            if not count:
                detail = f"{ref.file} changed while it was read: it ends inside {ref.name!r}"
                raise SourceError("source-changed", detail, AGAIN)
            done += count

    def has_file(self, file: str) -> bool:
        try:
            return self._single is None and (self._folder / file).exists()
        except OSError as error:  # too long a name, or no access to the folder
            raise _unreadable(file, error) from error

    def open_file(self, file: str) -> BinaryIO:
        try:
            return self._regular(file).open("rb")
        except OSError as error:
            refusal = _unreadable(file, error)
            code = "source-unreadable"
        except InputError as error:
            refusal = error
            code = "source-changed"
        if file not in self._stamps:
            raise refusal
        # It was there before: a re-run may find it again.
        detail = f"{refusal.message}; it was there before"
        raise SourceError(code, detail, "Run the same command again once it is back.")

    def file_nbytes(self, file: str) -> int:
        try:
            return self._regular(file).stat().st_size
        except OSError as error:
            raise _unreadable(file, error) from error

    def check_unchanged(self, shard: str) -> None:
        if bus_errors() != self._bus_errors:
            raise lost_pages()
        try:
            stamp = _stamp(self._folder / shard)
        except FileNotFoundError:
            stamp = ""
        except OSError as error:
            detail = f"{shard} cannot be read: {error.strerror}"
            raise SourceError("source-unreadable", detail, "Run it again.") from error
        if stamp != self.checkpoint.stamps[shard]:
            detail = f"{shard} changed while it was read; expected one that does not change"
            raise SourceError(
                "source-changed", detail, "Run the command again once nothing writes to it."
            )

    def distrust(self) -> None:
        """Do nothing: a mapping shows the bytes of the disk."""

    def stop(self) -> None:
        """Do nothing: a disk keeps nobody waiting."""

    @contextmanager
    def stream(self, file: str) -> Iterator[None]:
        try:
            yield
        finally:
            # Unmapping takes a thirtieth of a second for 1 GB: now, beside other work.
            with self._lock:
                mapped = self._maps.pop(file, None)
            del mapped  # outside of the lock, for which other readers wait

    def holds(self, path: Path) -> bool:
        # Not Path.resolve, which fails at a link to itself.
        place, root = Path(os.path.realpath(path)), Path(os.path.realpath(self._root))
        return place == root if self._single else place.is_relative_to(root)

    def _open(self, may_lack: bool) -> Checkpoint:
        try:
            names = [self._single] if self._single else sorted(os.listdir(self._folder))
        except OSError as error:
            raise _unreadable(self._folder, error) from None
        if self._single and not self._single.endswith((WEIGHTS, GGUF)):
            here = [*self._folder.glob(f"*{WEIGHTS}"), *self._folder.glob(f"*{GGUF}")]
            step = f"Give the folder: {shell_line(self._folder)}" if here else HOLDING
            raise no_weights(self._folder / self._single, names, step)

        # A pipeline: its components are checkpoints, and files beside them are copied.
        if PIPELINE in names and not self._single:
            components = find_components(read_whole(self, PIPELINE), _folders_of(self._folder))
            if components:
                sidecars, left_out = sort_pipeline(self._files(components), components)
                stamps = self._stamps_of(*sidecars)
                return Checkpoint(None, None, {}, (), sidecars, left_out, (), stamps, components)

        # The shards: one file, or by the index or their names.
        index = find_index(names)
        weight_map = read_index(read_whole(self, index), index) if index else None
        try:
            if self._single:
                shards = gguf_parts(self._single, os.listdir(self._folder))
            else:
                shards = choose_shards(self._folder, names, weight_map, may_lack)
            if not shards and not may_lack:
                raise no_weights(self._folder, names, self._step_to_weights(names))
        except InputError as error:
            raise self._explain_gone(error) from None
        headers = tuple(self._header(name) for name in shards)
        homes = find_homes(headers)
        sidecars, left_out = sort_others(self._files(), shards)

        # The config of the folder, also beside a single file: it explains the names.
        config: dict[str, object] = {}
        if (self._folder / CONFIG).exists():
            config = parse_json_object(read_whole(self, CONFIG), CONFIG, has_constants=True)
        return Checkpoint(
            repo=None,
            revision=None,
            config=config,
            shards=headers,
            sidecars=sidecars,
            left_out=left_out,
            unindexed=check_index(homes, weight_map, index) if weight_map and index else (),
            stamps=self._stamps_of(*shards, *sidecars),
        )

    def _explain_gone(self, error: InputError) -> InputError:
        """Return a better error if the missing shards went to the Hub."""
        if error.code not in ("missing-shard", "no-weights") or not self.has_file(HUB_FILE):
            return error
        repo = str(parse_json_object(read_whole(self, HUB_FILE), HUB_FILE).get("repo"))
        detail = f"{self._folder}: its shards are not here: --no-keep has sent them to {repo}"
        step = f"Name the repository: {repo}; if it lacks them, its commit was not made: run the"
        step = f"{step} command again that began it."
        return InputError("shards-gone", detail, step)

    def _step_to_weights(self, names: Collection[str]) -> str:
        """Return the next step after a folder without weights; "" for the usual."""
        if not names:
            return f"It is empty: hf download ORG/NAME {shell_line('--local-dir', self._folder)}"
        if (self._folder / PLAN_FILE).exists():
            return UNFINISHED
        if not _folders_of(self._folder):
            return HOLDING
        snapshots = self._folder / "snapshots"
        if snapshots.is_dir() and CACHED.fullmatch(self._folder.resolve().name):
            newest = max(snapshots.iterdir(), key=lambda place: place.stat().st_mtime, default="")
            return f"It is a folder of the Hub's cache; give a snapshot in it: {shell_line(newest)}"
        return ""

    def _stamps_of(self, *files: str) -> dict[str, str]:
        return {file: _stamp(self._regular(file)) for file in files}

    def _header(self, name: str) -> Header:
        if name.endswith(GGUF):
            from fp4convert.storage.gguf import read_gguf_header

            return read_gguf_header(self._regular(name))
        with self.open_file(name) as stream:
            fd = stream.fileno()
            nbytes = os.fstat(fd).st_size
            return read_header(name, nbytes, lambda offset, length: read_at(fd, length, offset))

    def _files(self, apart: Collection[str] = ()) -> list[str]:
        """List the files below the folder without hidden ones and `apart`."""
        found: list[str] = []
        errors: list[OSError] = []
        walk = () if self._single else os.walk(self._folder, onerror=errors.append)
        for folder, folders, files in walk:
            left_out = apart if folder == str(self._folder) else ()
            folders[:] = sorted(
                name for name in folders if not name.startswith(".") and name not in left_out
            )
            for link in (name for name in folders if os.path.islink(os.path.join(folder, name))):
                detail = f"{link} is a link to a folder; expected a real folder"
                raise InputError("folder-link", detail, "Copy the folder that it points to.")
            names = sorted(name for name in files if not name.startswith("."))
            found += [os.path.relpath(os.path.join(folder, name), self._folder) for name in names]
        for error in errors:
            raise _unreadable(error.filename, error)
        return found


class _Opened:
    """A file that is closed after its last reader."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def __del__(self) -> None:
        self.stream.close()


@cache
def most_open() -> int:
    """Return how many shards may be mapped, and how many open, at once.

    Both are an eighth of the process's limit of open files.
    """
    files = most_files()
    return max(2, min(MOST_OPEN, files // 8)) if files else MOST_OPEN


def _folders_of(folder: Path) -> list[str]:
    """List the folders in a folder, without hidden ones."""
    try:
        places = [place for place in folder.iterdir() if place.is_dir()]
        return [place.name for place in places if not place.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _stamp(path: Path) -> str:
    return " ".join(map(str, Mark.of(path.stat())))


def _unreadable(place: object, error: OSError) -> InputError:
    detail = f"{place} cannot be read: {error.strerror}"
    return InputError("unreadable", detail, "Check that this user may read it.")


@cache
def _links_lead_to(root: Path) -> tuple[Path, ...]:
    """Return the allowed targets of links in a folder."""
    caches = [place for place in (root, *root.parents) if place.parent.name == "snapshots"]
    return (root, *(place.parent.parent / "blobs" for place in caches))


def _regular(folder: Path, name: str, follows_links: bool) -> Path:
    """Return the path of a regular file in a folder, or in its cache's blobs.

    follows_links  the folder is the user's own: its links may lead anywhere
    """
    path = folder / name
    try:
        name.encode("utf-8")
        mode = path.stat().st_mode  # first: records may name many missing files
        target, root = path.resolve(), folder.resolve()
    except UnicodeEncodeError:
        detail = f"the name of {name!r} is not UTF-8; expected one that records can hold"
        raise InputError("file-name", detail, "Rename it.") from None
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a link that leads to itself; ValueError: NUL.
        words = getattr(error, "strerror", None) or error
        raise InputError("unreadable", f"{name} cannot be read: {words}") from None
    is_inside = any(target.is_relative_to(place) for place in _links_lead_to(root))
    if not (is_inside or follows_links):
        detail = f"{name} is a link to {target}, outside the folder; expected a file in it"
        step = "If the folder and its links are yours, add --follow-links; else put the file itself"
        raise InputError("link-outside", detail, f"{step} there, in place of the link.")
    if not stat.S_ISREG(mode):
        raise InputError("not-a-file", f"{name} is not a regular file; expected one")
    return path
