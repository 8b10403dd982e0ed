"""The protocol Source, its Checkpoint, and helpers for every source.

A source makes a Checkpoint (addresses, no data) and reads the bytes behind it; nothing above asks
for the kind of source.
"""

from __future__ import annotations

import gc
import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from fp4convert.errors import CORRUPT, InputError, SourceError
from fp4convert.storage.checkpoint_files import GGUF, PLAN_FILE
from fp4convert.storage.json_text import MISSHAPEN, TEXT_LIMIT, read_text_file
from fp4convert.storage.safetensors import Header, TensorRef

BRANCH = "main"  # of a repository without a revision
CACHED = re.compile(r"models--(?:[\w.-]+?--)?(.+)")  # a repository in the Hub's cache


@dataclass(frozen=True, slots=True)
class Access:
    """Options for opening a source; a local path needs only the subfolder.

    revision       branch, tag or commit on the Hub; None for the main branch
    subfolder      folder of the checkpoint in the repository or folder
    token          None for the login's
    memory_nbytes  budget of the process, if a scale group fits in it
    tell           gets a line for people about waits
    output         an unfinished plan in this folder pins the commit
    connections    at once; None for the default
    config         folder whose config.json turns a GGUF file into a folder
    follows_links  links in a folder may lead out of it
    """

    revision: str | None = None
    subfolder: str | None = None
    token: str | None = field(default=None, repr=False)
    memory_nbytes: int = 10**9
    tell: Callable[[str], None] = lambda line: None
    output: Path | None = None
    connections: int | None = None
    config: Path | None = None
    follows_links: bool = False


class Padding(NamedTuple):
    """Zeros behind rows and columns of a checkpoint's tensors.

    record  their entry in the record of a result
    note    a sentence for people
    """

    record: dict[str, object]
    note: str


class Checkpoint(NamedTuple):
    """The content of a source.

    repo, revision  Hub repository and commit; None for a folder or a file
    config          config.json, or {} without one
    shards          headers, in the order of their names
    sidecars        files beside the weights that are copied, relative to the source
    left_out        weights in another form, which are not copied
    unindexed       tensors that the index lacks
    stamps          a word for each shard and sidecar that changes with its bytes (for resuming;
                    part of no digest)
    components      folders of a Diffusers pipeline that are checkpoints of their own; then there
                    are no shards, and the sidecars are all files outside these folders
    padding         zeros added to the stored tensors
    """

    repo: str | None
    revision: str | None
    config: dict[str, object]
    shards: tuple[Header, ...]
    sidecars: tuple[str, ...]
    left_out: tuple[str, ...]
    unindexed: tuple[str, ...]
    stamps: dict[str, str]
    components: tuple[str, ...] = ()
    padding: Padding | None = None

    @property
    def tensors(self) -> Iterator[TensorRef]:
        return (ref for shard in self.shards for ref in shard.tensors)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class Source(Protocol):
    """A checkpoint and the bytes behind it.

    Methods with a body suit a disk, which owes no proof and holds no memory of ours.

    name         the last part of its path
    is_streamed  bytes come best in the order of the file
    """

    name: str
    checkpoint: Checkpoint
    is_streamed: bool

    def read(self, ref: TensorRef) -> memoryview:
        """Return the bytes of one tensor, read-only."""

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Return bytes start..stop-1 of one tensor, read-only."""

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of one tensor from `start` on."""

    def has_file(self, file: str) -> bool:
        """Return whether the source's folder holds that file."""

    def open_file(self, file: str) -> BinaryIO:
        """Open a file of the source for reading."""

    def file_nbytes(self, file: str) -> int:
        """Return the size of a file of the source."""

    def check_unchanged(self, shard: str) -> None:
        """Raise SourceError if a shard changed since its header was read."""

    def proving(self, shards: Collection[str]) -> AbstractContextManager[None]:
        """Prove at the end all that was read of shards outside of `stream`.

        Reads a shard whole if no hash covers that.

        Raises  SourceError at the end for bytes that the shard does not hold
        """
        return nullcontext()

    def distrust(self) -> None:
        """Forget bytes that no hash covers: the next read fetches them again."""

    def holds(self, path: Path) -> bool:
        """Return whether a path is in the source's folder, or a file's folder."""

    def stream(self, file: str) -> AbstractContextManager[None]:
        """Bring a shard while all of its tensors are read.

        Raises  SourceError at the end for a wrong hash
        """

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        """Wait for, then hold, memory for bytes that are read more than once.

        refs  these tensors; the first is of the shard that is streamed for them
        """
        return nullcontext()

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        """Return the most memory that reads hold; 0 if the system holds it.

        groups  bytes of each scale group, in reading order; may be an iterator
        """
        return 0

    def stop(self) -> None:
        """Make reads in other threads fail soon, for good."""


@contextmanager
def stopping(*sources: Source) -> Iterator[None]:
    """Stop the sources when an error ends the work early.

    Enter it inside of the context that waits for reading threads.
    """
    try:
        yield
    except BaseException:
        for source in sources:
            source.stop()
        raise


class SourceView(Source):
    """A source whose checkpoint differs from the stored one.

    Everything is passed on; a view changes addresses, or the bytes of some tensors.
    """

    def __init__(self, source: Source, checkpoint: Checkpoint) -> None:
        self.name, self.is_streamed = source.name, source.is_streamed
        self._source, self.checkpoint = source, checkpoint

    def stored(self, ref: TensorRef) -> TensorRef:
        """Return the stored tensor behind one of the view."""
        return ref

    def stored_files(self, shards: Collection[str]) -> Collection[str]:
        """Return the stored files behind shards of the view."""
        return shards

    def read(self, ref: TensorRef) -> memoryview:
        return self.read_range(ref, 0, ref.nbytes)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        return self._source.read_range(self.stored(ref), start, stop)

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        self._source.read_into(self.stored(ref), start, buffer)

    def has_file(self, file: str) -> bool:
        return self._source.has_file(file)

    def open_file(self, file: str) -> BinaryIO:
        return self._source.open_file(file)

    def file_nbytes(self, file: str) -> int:
        return self._source.file_nbytes(file)

    def check_unchanged(self, shard: str) -> None:
        for file in self.stored_files([shard]):
            self._source.check_unchanged(file)

    def proving(self, shards: Collection[str]) -> AbstractContextManager[None]:
        return self._source.proving(self.stored_files(shards))

    def distrust(self) -> None:
        self._source.distrust()

    def holds(self, path: Path) -> bool:
        return self._source.holds(path)

    def stream(self, file: str) -> AbstractContextManager[None]:
        """Stream a shard of one file; prove what was read of one in parts."""
        files = [*self.stored_files([file])]
        return self._source.stream(files[0]) if len(files) == 1 else self._source.proving(files)

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        return self._source.room_for(nbytes, [self.stored(ref) for ref in refs])

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        return self._source.held_nbytes(groups, at_once)

    def stop(self) -> None:
        self._source.stop()


ASKED_AT_ONCE = 8  # requests to a Hub, which answers slowly
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def read_each(
    source: Source, read: Callable[[Item], Answer], items: Iterable[Item], threads: int = 1
) -> list[Answer]:
    """Return `read(item)` for each item in order; run several for a Hub.

    threads  at least so many at once, if `read` also computes
    """
    if source.is_streamed:
        threads = max(threads, ASKED_AT_ONCE)
    if threads == 1:
        return [read(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool, stopping(source):
        return list(pool.map(read, items))


def prove_all(source: Source) -> None:
    """Raise SourceError if bytes that were read are not those of the shards."""
    with stopping(source), source.proving([shard.file for shard in source.checkpoint.shards]):
        pass


@contextmanager
def refusing(source: Source | None) -> Iterator[None]:
    """Turn an InputError from damaged bytes into a SourceError."""
    try:
        yield
    except InputError:
        if source is not None:
            prove_all(source)
        raise


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn Python's collection of cycles off in the meantime.

    It would visit the many objects of headers and plans again and again: a third of the time at
    Python's own threshold.  The command line has a higher one (__main__.py), which a large
    checkpoint passes many times, too.
    Afterwards every object of the process counts as old, also the caller's: its garbage in cycles
    waits for a full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                # All objects become old: else the next collection would visit them at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def read_again_if_damaged(read: Callable[[], Answer]) -> Answer:
    """Call a function, and once more where it reads damaged bytes."""
    try:
        return read()
    except SourceError as error:
        if error.code != CORRUPT:
            raise
    return read()


def subfolder_of(access: Access) -> str:
    """Return the subfolder as a path below the source, "" for none."""
    parts = PurePosixPath((access.subfolder or "").strip("/")).parts
    if ".." in parts or "\0" in "".join(parts):
        found = f"--subfolder {access.subfolder}: not a path below the source"
        detail = f"{found}; expected the name of a folder in it"
        raise InputError("no-subfolder", detail, "Give that folder itself as the source.")
    return "/".join(parts)


def read_whole(source: Source, file: str) -> bytes:
    """Read a file of text of a source; raise InputError for a huge one."""
    if (nbytes := source.file_nbytes(file)) > TEXT_LIMIT:
        detail = f"{file} has {nbytes:,} bytes; expected at most {TEXT_LIMIT:,} bytes of text"
        raise InputError("too-large", detail)
    with source.open_file(file) as stream:
        return stream.read()


def stored_float(source: Source, ref: TensorRef) -> float | None:
    """Return the positive number in a tensor of one float, else None."""
    if ref.elements != 1 or ref.dtype not in ("F32", "BF16", "F16"):
        return None
    stored = source.read_range(ref, 0, ref.nbytes).tobytes()
    wide = b"\0\0" + stored if ref.dtype == "BF16" else stored
    (value,) = struct.unpack("<e" if ref.dtype == "F16" else "<f", wide)
    return float(value) if 0 < value < float("inf") else None


def name_of(reference: str) -> str:
    """Return the last part of a source's path or name on the Hub.

    In the Hub's cache, models--ORG--NAME/snapshots/COMMIT, it is NAME.
    """
    path = Path(reference)
    try:
        if path.is_file() or path.suffix == GGUF:  # which may be on the Hub
            return path.stem
        place = path.resolve()
        is_cached = place.parent.name == "snapshots" and CACHED.fullmatch(place.parents[1].name)
        return is_cached[1] if is_cached else place.name
    except (OSError, ValueError, RuntimeError):  # no path: open_source reports it
        return path.name


def find_cached(place: Path) -> Path | None:
    """Return the repository folder of the Hub's cache around a path, if any."""
    try:
        for parent in place.resolve().parents:
            if CACHED.fullmatch(parent.name) and (parent / "snapshots").is_dir():
                return parent
    except (OSError, RuntimeError):  # no path, or the current folder is gone
        pass
    return None


def commit_begun(output: Path | None, repo: str) -> str | None:
    """Return the commit of the plan in an output, if it is of that repository."""
    try:
        plan = json.loads(read_text_file(output / PLAN_FILE)) if output else {}
        if not output or plan["source"]["repo"] != repo:
            return None
        return str(plan["source"]["revision"])
    except (OSError, *MISSHAPEN):
        return None  # no plan, or a damaged one: open_output judges it
