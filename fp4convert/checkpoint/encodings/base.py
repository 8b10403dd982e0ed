"""What every encoding offers: the protocol Coding; and Linear.

floats   as it is, or a part of a stack of experts that is transposed or whose rows take turns
fp8      E4M3 codes under scales of blocks, rows or the whole
int4     compressed-tensors' packed integers under scales of groups
fp4      any dialect's four-bit blocks
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.numerics.matrices import Weights
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef, total_nbytes
from fp4convert.storage.source import Source


class Coding(Protocol):
    """What the bytes of a matrix mean."""

    @property
    def word(self) -> str:
        """What a person calls it: bf16, fp8 128x128, int4 32, mxfp4."""

    @property
    def is_packed(self) -> bool:
        """True where it is not what an ordinary checkpoint holds."""

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Its rows as floats; nothing is read before they are asked for."""

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        """The form in which it can stay as it is in what is made; None where it is an ordinary tensor, or no dialect has one."""

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Its codes and its scales in that form, piece by piece, either of which may be empty; nothing where it has no form."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The matrix of one linear layer at its address; holds no data.

    shape   (rows, columns), as (out_features, in_features)
    refs    what it is decoded from, the codes first; a matrix of a stack has an address of its own
    idle    other tensors that only its engine has a use for; they do not travel with its values
    stack   the tensor that it is a part of, with matrices of other modules; None where it has its own
    share   one of how many equal parts of what the refs hold it is
    """

    module: str
    shape: tuple[int, int]
    coding: Coding
    refs: tuple[TensorRef, ...]
    idle: tuple[TensorRef, ...] = ()
    stack: TensorRef | None = None
    share: int = 1

    @property
    def name(self) -> str:
        """What a person looks for: its tensor, or the module where the tensor holds others too."""
        return self.module if self.stack else self.refs[0].name

    @property
    def nbytes(self) -> int:
        return total_nbytes(self.refs) // self.share

    @property
    def home(self) -> TensorRef:
        """The stored tensor whose place its outputs take."""
        return self.stack or self.refs[0]


def room_for(source: Source, linears: Collection[Linear]) -> AbstractContextManager[None]:
    """Meanwhile these are read more than once; waits until the source has memory for them."""
    whole = {ref for linear in linears if linear.share == 1 for ref in linear.refs}
    return source.room_for(sum(linear.nbytes for linear in linears), whole)
