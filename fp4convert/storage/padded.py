"""A source with zeros behind rows and columns of some tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Padding, Source, SourceView


class PaddedSource(SourceView):
    """A source with zeros behind rows and columns of its tensors.

    config  with the new sizes
    """

    def __init__(
        self,
        source: Source,
        shapes: Mapping[str, tuple[int, ...]],
        config: dict[str, object],
        padding: Padding | None,
    ) -> None:
        self._stored = {ref.name: ref for ref in source.checkpoint.tensors if ref.name in shapes}
        shards = tuple(
            shard._replace(
                tensors=tuple(
                    ref._replace(shape=shapes.get(ref.name, ref.shape)) for ref in shard.tensors
                ),
            )
            for shard in source.checkpoint.shards
        )
        checkpoint = source.checkpoint._replace(config=config, shards=shards, padding=padding)
        super().__init__(source, checkpoint)

    def stored(self, ref: TensorRef) -> TensorRef:
        return self._stored.get(ref.name, ref)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Return bytes of a tensor; the source reads whole stored rows only."""
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
