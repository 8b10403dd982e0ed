"""Write a scalar that no tensor of the source holds."""

from __future__ import annotations

from dataclasses import dataclass

from fp4convert.checkpoint.dialects.tables import encode_scalar
from fp4convert.makers.maker import Maker, Parts, Tools
from fp4convert.storage.safetensors import TensorRef


@dataclass(frozen=True, slots=True)
class Scalar(Maker):
    """One float32."""

    name: str
    value: float

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return ()

    def parts(self, tools: Tools) -> Parts:
        yield self.name, encode_scalar(self.value)
        return ()
