"""Copy stored bytes as they are."""

from __future__ import annotations

from dataclasses import dataclass

from fp4convert.makers.maker import Maker, Parts, Tools
from fp4convert.storage.safetensors import TensorRef

COPY_NBYTES = 8 << 20  # read at once


@dataclass(frozen=True, slots=True)
class Copied(Maker):
    """A tensor that stays, or parts of one behind each other, under any name."""

    name: str
    refs: tuple[TensorRef, ...]

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return self.refs

    def parts(self, tools: Tools) -> Parts:
        for ref in self.refs:
            for start in range(0, ref.nbytes, COPY_NBYTES):
                stop = min(start + COPY_NBYTES, ref.nbytes)
                yield self.name, tools.source.read_range(ref, start, stop)
        return ()
