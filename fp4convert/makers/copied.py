"""Copy stored bytes as they are."""

from __future__ import annotations

from typing import NamedTuple

from fp4convert.makers.maker import Parts, Tools
from fp4convert.storage.safetensors import TensorRef

COPY_NBYTES = 8 << 20  # read at once


class Copied(NamedTuple):
    """A tensor that stays, or parts of one behind each other, under any name."""

    name: str
    refs: tuple[TensorRef, ...]

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return self.refs

    @property
    def measures(self) -> tuple[TensorRef, ...]:
        return ()

    @property
    def held_nbytes(self) -> int:
        return 0

    @property
    def pauses(self) -> bool:
        return False

    def parts(self, tools: Tools) -> Parts:
        for ref in self.refs:
            for start in range(0, ref.nbytes, COPY_NBYTES):
                stop = min(start + COPY_NBYTES, ref.nbytes)
                yield self.name, tools.source.read_range(ref, start, stop)
        return ()
