"""What every source offers: the protocol Source; and Checkpoint.

A source makes a Checkpoint of what it finds (addresses, no data) and gives the bytes behind it;
nothing above asks which source.
"""

from __future__ import annotations

import gc
import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from fp4convert.errors import CORRUPT, InputError, SourceError
from fp4convert.storage.checkpoint_files import GGUF, PLAN_FILE
from fp4convert.storage.json_text import MISSHAPEN, TEXT_LIMIT, read_text_file
from fp4convert.storage.safetensors import Header, TensorRef

BRANCH = "main"  # of a repository, where no revision is named
CACHED = re.compile(r"models--(?:[\w.-]+?--)?(.+)")  # a repository in the Hub's cache


@dataclass(frozen=True, slots=True)
class Access:
    """How a source is opened; a path on this disk needs the subfolder alone.

    revision      of a repository on the Hub: branch, tag or commit; None for the main branch
    subfolder     of the repository or folder, where the checkpoint is
    token         None for the one that the Hub's own client knows
    memory_nbytes of the process, as far as a scale group fits
    tell          gets a line for people when the Hub makes everything wait
    transport     http, or xet for hf_xet
    connections   at once; None for as many as prefetch.py finds right
    output        where an unfinished plan may lie, which says of which commit it is
    config        a folder whose config.json makes a folder of a GGUF file
    """

    revision: str | None = None
    subfolder: str | None = None
    token: str | None = field(default=None, repr=False)
    memory_nbytes: int = 10**9
    tell: Callable[[str], None] = lambda line: None
    transport: str = "http"
    output: Path | None = None
    connections: int | None = None
    config: Path | None = None


class Padding(NamedTuple):
    """Zeros that stand behind rows and columns of a checkpoint's tensors.

    record  what the record of a result says of them
    note    the same in a sentence, for people
    """

    record: dict[str, object]
    note: str


class Checkpoint(NamedTuple):
    """What a source holds.

    repo, revision  Hub repository and commit; None for a folder or a file
    config          config.json, or {} where there is none
    shards          headers, in the order of their names
    sidecars        files beside the weights that travel unchanged, relative to the source
    left_out        files that are weights in another form and stay behind
    unindexed       tensors that the index, where there is one, does not name
    stamps          per shard and sidecar a word that changes when its bytes may have (for resuming;
                    part of no digest)
    components      of a Diffusers pipeline: folders that are checkpoints of their own; then there
                    are no shards, and the sidecars are everything outside these folders
    padding         zeros that were added to the stored tensors; None for none
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

    name         what a person calls it: the last part of its path
    is_streamed  True where bytes come best in the order of the file
    """

    name: str
    checkpoint: Checkpoint
    is_streamed: bool

    def read(self, ref: TensorRef) -> memoryview:
        """Return the bytes of one tensor, read-only."""

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Return bytes start..stop-1 of one tensor, read-only.

        No others are fetched for it, but ahead of it in a stream.
        """

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of one tensor from `start` on.

        Raises  SourceError where they are gone
        """

    def has_file(self, file: str) -> bool:
        """Tell whether the source's folder holds that file."""

    def open_file(self, file: str) -> BinaryIO:
        """Open a file of the source for reading."""

    def file_nbytes(self, file: str) -> int:
        """Return the size of a file of the source."""

    def check_unchanged(self, shard: str) -> None:
        """Raise SourceError where a shard is not what it was.

        Written, replaced or removed since its header was read.
        """

    def proving(self, shards: Collection[str]) -> AbstractContextManager[None]:
        """Prove at the end what was read of shards outside of `stream`.

        Before and meanwhile; reads those whole of which no hash covers that.

        Raises  SourceError at the end where a shard has not what was read of it
        """

    def distrust(self) -> None:
        """Read again what no hash has covered yet, when it is asked for next."""

    def holds(self, path: Path) -> bool:
        """Tell whether a path is the source's folder or inside it.

        For a single file: whether it is the folder of that file.
        """

    def stream(self, file: str) -> AbstractContextManager[None]:
        """Bring a shard while all of its tensors are read.

        Raises  SourceError at the end where its bytes were not the right ones
        """

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        """Hold memory for so many bytes that are read more than once.

        All of these tensors will be; the first is of the shard that is streamed for them.  Waits
        until there is memory for them.
        """

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        """Count the memory that is held of what is read.

        groups   bytes of each scale group, in the order in which they are read; to be gone through
                 once, for it may be an iterator
        Returns  0 where the system holds it
        """

    def stop(self) -> None:
        """Make reads in other threads fail soon; nothing is read after."""


@contextmanager
def stopping(*sources: Source) -> Iterator[None]:
    """Stop the sources when an error ends the work early.

    Enter it inside of what waits for the threads that read.
    """
    try:
        yield
    except BaseException:
        for source in sources:
            source.stop()
        raise


ASKED_AT_ONCE = 8  # of a Hub, where every answer takes its time
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def read_each(
    source: Source, read: Callable[[Item], Answer], items: Iterable[Item], threads: int = 1
) -> list[Answer]:
    """Return what `read` gives for each item, in their order.

    read     reads from the source; from a Hub, several at once
    threads  at least so many at once, where `read` computes, too
    """
    if source.is_streamed:
        threads = max(threads, ASKED_AT_ONCE)
    if threads == 1:
        return [read(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool, stopping(source):
        return list(pool.map(read, items))


def prove_all(source: Source) -> None:
    """Raise SourceError where a shard has not what was read of it."""
    with stopping(source), source.proving([shard.file for shard in source.checkpoint.shards]):
        pass


@contextmanager
def refusing(source: Source | None) -> Iterator[None]:
    """Prove what was read before it is refused: it may have come damaged.

    Raises  SourceError instead of an InputError from within, where it did
    """
    try:
        yield
    except InputError:
        if source is not None:
            prove_all(source)
        raise


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for cycles in the meantime.

    It would go through the many objects of headers and plans again and again: at Python's own
    threshold, which programs that use the package have, a third of the time.  The command line has
    a higher one (__main__.py), but a large checkpoint makes more objects than that, many times.
    Afterwards every object of the process counts as old, those of the program that called too: its
    garbage in cycles waits for a full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                # All that is there counts as old: else it would be gone through at once.
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
    """Return the subfolder as a path below the source, "" for none.

    Raises  InputError where it leads out
    """
    parts = PurePosixPath((access.subfolder or "").strip("/")).parts
    if ".." in parts or "\0" in "".join(parts):
        found = f"--subfolder {access.subfolder}: not a path below the source"
        detail = f"{found}; expected the name of a folder in it"
        raise InputError("no-subfolder", detail, "Give that folder itself as the source.")
    return "/".join(parts)


def read_whole(source: Source, file: str) -> bytes:
    """Read a small file of a source.

    Raises  InputError where it is not small
    """
    if (nbytes := source.file_nbytes(file)) > TEXT_LIMIT:
        detail = f"{file} has {nbytes:,} bytes; expected at most {TEXT_LIMIT:,} bytes of text"
        raise InputError("too-large", detail)
    with source.open_file(file) as stream:
        return stream.read()


def stored_float(source: Source, ref: TensorRef) -> float | None:
    """Read the positive number in a tensor of one float; None for others."""
    if ref.elements != 1 or ref.dtype not in ("F32", "BF16", "F16"):
        return None
    stored = source.read_range(ref, 0, ref.nbytes).tobytes()
    wide = b"\0\0" + stored if ref.dtype == "BF16" else stored
    (value,) = struct.unpack("<e" if ref.dtype == "F16" else "<f", wide)
    return float(value) if 0 < value < float("inf") else None


def name_of(reference: str) -> str:
    """Return the last part of a source's path or name on the Hub.

    Of a snapshot in the Hub's cache, models--ORG--NAME/snapshots/COMMIT, it is NAME.
    """
    path = Path(reference)
    try:
        if path.is_file() or path.suffix == GGUF:  # which may be on the Hub
            return path.stem
        place = path.resolve()
        is_cached = place.parent.name == "snapshots" and CACHED.fullmatch(place.parents[1].name)
        return is_cached[1] if is_cached else place.name
    except (OSError, ValueError, RuntimeError):  # no path at all, which open_source tells
        return path.name


def find_cached(place: Path) -> Path | None:
    """Find the repository of the Hub's cache that a place lies in, if any."""
    try:
        parents = place.resolve().parents
        return next(
            (
                each
                for each in parents
                if CACHED.fullmatch(each.name) and (each / "snapshots").is_dir()
            ),
            None,
        )
    except (OSError, RuntimeError):  # no path at all, or a current folder that is gone
        return None


def commit_begun(output: Path | None, repo: str) -> str | None:
    """Return the commit that an output was begun from, if any.

    repo  the repository that it must be of
    """
    try:
        plan = json.loads(read_text_file(output / PLAN_FILE)) if output else {}
        if not output or plan["source"]["repo"] != repo:
            return None
        return str(plan["source"]["revision"])
    except (OSError, *MISSHAPEN):
        return None  # no plan, or a damaged one, which open_output judges
