"""Write a scalar that no tensor of the source holds."""

from __future__ import annotations

from typing import NamedTuple

from fp4convert.checkpoint.dialects.tables import encode_scalar
from fp4convert.makers.maker import Parts, Tools
from fp4convert.storage.safetensors import TensorRef


class Scalar(NamedTuple):
    """One float32."""

    name: str
    value: float

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return ()

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
        yield self.name, encode_scalar(self.value)
        return ()
