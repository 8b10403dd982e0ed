"""Copy stored bytes as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fp4convert.makers.maker import Fact, Maker, Parts, Tools
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.storage.safetensors import TensorRef

COPY_NBYTES = 8 << 20  # read at once


@dataclass(frozen=True, slots=True)
class Copied(Maker):
    """A tensor that stays, or parts of one behind each other, under any name.

    is_norm  a fact says whether it holds zeros alone, of either sign; its bytes are the same
    """

    name: str
    refs: tuple[TensorRef, ...]
    is_norm: bool = field(default=False, repr=False, compare=False)

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return self.refs

    def parts(self, tools: Tools) -> Parts:
        is_zero = self.is_norm
        for ref in self.refs:
            for start in range(0, ref.nbytes, COPY_NBYTES):
                stop = min(start + COPY_NBYTES, ref.nbytes)
                data = tools.source.read_range(ref, start, stop)
                is_zero = is_zero and not np.frombuffer(data, FLOAT_DTYPES[ref.dtype]).any()
                yield self.name, data
        return (Fact("norm", self.name, is_zero),) if self.is_norm else ()
