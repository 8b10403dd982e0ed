"""What every source offers: the protocol Source; and Checkpoint.

A source makes a Checkpoint of what it finds (addresses, no data) and gives the bytes behind it; nothing above asks which source.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, TypeVar

from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import PLAN_FILE
from fp4convert.storage.safetensors import Header, TensorRef


@dataclass(frozen=True, slots=True)
class Access:
    """How a source is opened; a path on this disk needs nothing of it but the subfolder.

    revision      of a repository on the Hub: branch, tag or commit; None for the main branch
    subfolder     of the repository or folder, where the checkpoint is
    token         None for the one that the Hub's own client knows
    memory_nbytes what is kept of it in memory for a second reading
    tell          gets a line for people when the Hub makes everything wait
    transport     http, or xet for hf_xet
    connections   at once; None for as many as prefetch.py finds right
    output        where an unfinished plan may lie, which says of which commit it is
    """

    revision: str | None = None
    subfolder: str | None = None
    token: str | None = field(default=None, repr=False)
    memory_nbytes: int = 10**9
    tell: Callable[[str], None] = lambda line: None
    transport: str = "http"
    output: Path | None = None
    connections: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a source holds.

    repo, revision  Hub repository and commit; None for a folder or a file
    config          config.json, or {} where there is none
    shards          headers, in the order of their names
    sidecars        files beside the weights that travel unchanged, relative to the source
    left_out        files that are weights in another form and stay behind
    unindexed       tensors that the index, where there is one, does not name
    stamps          per shard and sidecar a word that changes when its bytes may have (for resuming; part of no digest)
    components      of a Diffusers pipeline: folders that are checkpoints of their own; then there are no shards, and the
                    sidecars are everything outside these folders
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

    @property
    def tensors(self) -> Iterator[TensorRef]:
        return (ref for shard in self.shards for ref in shard.tensors)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class Source(Protocol):
    """A checkpoint and the bytes behind it."""

    @property
    def name(self) -> str:
        """What a person calls it: the last part of its path."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def is_streamed(self) -> bool:
        """True where bytes come best in the order of the file."""

    @property
    def held_nbytes(self) -> int:
        """What may be kept in memory of the bytes that were read."""

    def read(self, ref: TensorRef) -> memoryview:
        """The bytes of one tensor, read-only."""

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Bytes start..stop-1 of one tensor, read-only; no others are fetched for it, but ahead of it in a stream."""

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        """The bytes of one tensor from `start` on, as many as `buffer` holds; SourceError where they are gone."""

    def has_file(self, file: str) -> bool:
        """True where the source's folder holds that file."""

    def open_file(self, file: str) -> BinaryIO:
        """A file of the source, opened for reading."""

    def file_nbytes(self, file: str) -> int:
        """The size of a file of the source."""

    def check_unchanged(self, shard: str) -> None:
        """SourceError where a shard was written, replaced or removed since its header was read."""

    def holds(self, path: Path) -> bool:
        """True where that path is the source's folder or lies inside it; for a single file, where it is its folder."""

    def stream(self, file: str) -> AbstractContextManager[None]:
        """Meanwhile the shard's tensors are read, all of them; SourceError at the end where its bytes were not the right ones."""

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        """Meanwhile so many bytes are read more than once, and all of these tensors; waits until there is memory for them."""

    def stop(self) -> None:
        """Make reads in other threads fail soon; nothing is read afterwards."""


@contextmanager
def stopping(*sources: Source) -> Iterator[None]:
    """Whatever ends the work early makes reads in other threads fail soon; enter it inside of what waits for these threads."""
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile no cycles are looked for, which goes through the many objects of headers and plans again and again.

    At Python's own threshold that is a third of the time, and programs that use the package have this one.  The command line has
    a higher one (__main__.py), but a large checkpoint makes more objects than that, many times.  Afterwards every object of the
    process counts as old, those of the program that called too: its garbage in cycles waits for a full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if (
                not gc.get_freeze_count()
            ):  # all that is there counts as old: else it would be gone through at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def subfolder_of(access: Access) -> str:
    """The subfolder as a path below the source, "" for none; InputError where it leads out."""
    parts = PurePosixPath((access.subfolder or "").strip("/")).parts
    if ".." in parts or "\0" in "".join(parts):
        detail = f"--subfolder {access.subfolder}: not a path below the source; expected the name of a folder in it"
        raise InputError("no-subfolder", detail, "Give that folder itself as the source.")
    return "/".join(parts)


def name_of(reference: str) -> str:
    """What a person calls a source: the last part of its path, or of its name on the Hub."""
    path = Path(reference)
    try:
        return path.stem if path.is_file() else path.resolve().name
    except (OSError, ValueError, RuntimeError):  # no path at all, which open_source tells
        return path.name


def commit_begun(output: Path | None, repo: str) -> str | None:
    """The commit of a repository that an output was begun from; None where there is none."""
    try:
        plan = json.loads((output / PLAN_FILE).read_text(encoding="utf-8")) if output else {}
        if not output or plan["source"]["repo"] != repo:
            return None
        return str(plan["source"]["revision"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no plan, or a damaged one, which open_output judges
