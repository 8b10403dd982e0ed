"""Read a source as if zeros stood behind rows and columns of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Padding, Source


class PaddedSource:
    """Another source with zeros in tensors, and a config.json that says so."""

    def __init__(
        self,
        source: Source,
        shapes: Mapping[str, tuple[int, ...]],
        config: dict[str, object],
        padding: Padding,
    ) -> None:
        self.name, self.is_streamed = source.name, source.is_streamed
        self._source = source
        self._stored = {ref.name: ref for ref in source.checkpoint.tensors if ref.name in shapes}
        shards = tuple(
            shard._replace(
                tensors=tuple(
                    ref._replace(shape=shapes.get(ref.name, ref.shape)) for ref in shard.tensors
                ),
            )
            for shard in source.checkpoint.shards
        )
        checkpoint = source.checkpoint._replace(config=config, shards=shards)
        self.checkpoint = checkpoint._replace(padding=padding)

    def read(self, ref: TensorRef) -> memoryview:
        return self.read_range(ref, 0, ref.nbytes)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Return bytes of a tensor; only those of whole stored rows are read."""
        stored = self._stored.get(ref.name)
        if stored is None:
            return self._source.read_range(ref, start, stop)
        rows = stored.shape[0]
        own, width = stored.nbytes // rows, ref.nbytes // ref.shape[0]
        first, last = start // width, -(-stop // width)
        values = np.zeros((last - first, width), np.uint8)
        there = min(last, rows) - first
        if there > 0:
            data = self._source.read_range(stored, first * own, (first + there) * own)
            values[:there, :own] = np.frombuffer(data, np.uint8).reshape(there, own)
        part = values.reshape(-1)[start - first * width : stop - first * width]
        part.flags.writeable = False
        return part.data

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        if ref.name in self._stored:
            buffer[:] = self.read_range(ref, start, start + buffer.nbytes)
        else:
            self._source.read_into(ref, start, buffer)

    def has_file(self, file: str) -> bool:
        return self._source.has_file(file)

    def open_file(self, file: str) -> BinaryIO:
        return self._source.open_file(file)

    def file_nbytes(self, file: str) -> int:
        return self._source.file_nbytes(file)

    def check_unchanged(self, shard: str) -> None:
        self._source.check_unchanged(shard)

    def proving(self, shards: Collection[str]) -> AbstractContextManager[None]:
        return self._source.proving(shards)

    def distrust(self) -> None:
        self._source.distrust()

    def holds(self, path: Path) -> bool:
        return self._source.holds(path)

    def stream(self, file: str) -> AbstractContextManager[None]:
        return self._source.stream(file)

    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> AbstractContextManager[None]:
        return self._source.room_for(nbytes, [self._stored.get(ref.name, ref) for ref in refs])

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        return self._source.held_nbytes(groups, at_once)

    def stop(self) -> None:
        self._source.stop()
