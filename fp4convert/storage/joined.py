"""Join two sources: the checkpoint of one, and the bytes of both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source


class JoinedSource:
    """A source, and the shards of another beside its own.

    prefix        of the other's file names here; "" where no two files have one name
    has_sidecars  files beside the first's weights are copied
    """

    def __init__(
        self, first: Source, other: Source, prefix: str = "", *, has_sidecars: bool = True
    ) -> None:
        self.name, self.is_streamed = first.name, first.is_streamed or other.is_streamed
        self._first, self._other, self._prefix = first, other, prefix
        theirs = {prefix + file: stamp for file, stamp in other.checkpoint.stamps.items()}
        checkpoint = first.checkpoint
        sidecars = checkpoint.sidecars if has_sidecars else ()
        stamps = theirs | checkpoint.stamps
        self.checkpoint = checkpoint._replace(sidecars=sidecars, stamps=stamps)
        self._files = {shard.file for shard in checkpoint.shards}

    def read(self, ref: TensorRef) -> memoryview:
        source, ref = self._place(ref)
        return source.read(ref)

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        source, ref = self._place(ref)
        source.read_into(ref, start, buffer)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        source, ref = self._place(ref)
        return source.read_range(ref, start, stop)

    def has_file(self, file: str) -> bool:
        return self._first.has_file(file)

    def open_file(self, file: str) -> BinaryIO:
        return self._first.open_file(file)

    def file_nbytes(self, file: str) -> int:
        return self._first.file_nbytes(file)

    def check_unchanged(self, shard: str) -> None:
        source, file = self._owner(shard)
        source.check_unchanged(file)

    @contextmanager
    def proving(self, shards: Collection[str]) -> Iterator[None]:
        own = self._files.intersection(shards)
        theirs = [shard.removeprefix(self._prefix) for shard in shards if shard not in own]
        with self._first.proving(own), self._other.proving(theirs):
            yield

    def distrust(self) -> None:
        self._first.distrust()
        self._other.distrust()

    def holds(self, path: Path) -> bool:
        return self._first.holds(path) or self._other.holds(path)

    def stream(self, file: str) -> AbstractContextManager[None]:
        source, file = self._owner(file)
        return source.stream(file)

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        placed = [self._place(ref) for ref in refs]
        source = placed[0][0] if placed else self._first
        return source.room_for(nbytes, [ref for owner, ref in placed if owner is source])

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        groups = [*groups]  # both ask
        return sum(each.held_nbytes(groups, at_once) for each in (self._first, self._other))

    def stop(self) -> None:
        self._first.stop()
        self._other.stop()

    def _place(self, ref: TensorRef) -> tuple[Source, TensorRef]:
        source, file = self._owner(ref.file)
        return source, ref if file == ref.file else ref._replace(file=file)

    def _owner(self, file: str) -> tuple[Source, str]:
        """Return the source that has a file, and the file's name there."""
        if file in self._files:
            return self._first, file
        return self._other, file.removeprefix(self._prefix)
