"""Describe a linear layer and its encoding: Linear, Coding, Folding.

floats   as it is, or a part of a stack of experts that is transposed or whose rows take turns
fp8      E4M3 codes under scales of blocks, rows or the whole
int4     compressed-tensors' packed integers under scales of groups
fp4      any dialect's four-bit blocks
gguf_blocks  llama.cpp's own types of blocks: Q8_0, Q4_K and others
mlx_affine   MLX's integers of 4 or 8 bits, scale * code + bias
corrected  the same beside a low-rank correction
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.errors import NumericError
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.error_sums import SOURCE
from fp4convert.numerics.formats import FLOAT_TYPES, Format
from fp4convert.numerics.matrices import Blocks, Weights
from fp4convert.numerics.value_checks import find_not_finite_values
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef, total_nbytes
from fp4convert.storage.source import Source

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
PACKED_DTYPE = "I32"
CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".k_global_scale",
    ".v_global_scale",
    ".q_scale",
    ".prob_output_scale",
    ".k_zero_point",
    ".v_zero_point",
)


class Factors(NamedTuple):
    """What one fold multiplies with, float32, positive and finite.

    columns  of every linear layer that reads the output
    made     one for each output where it is made; fewer than columns where heads are repeated
    reach    the largest input of each reader afterwards, over that before, by module; each sees
             tokens of its own
    """

    columns: Float32s
    made: Float32s
    reach: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Folding:
    """One fold, as a tensor that it changes knows it.

    name    of the module that is divided
    key     equal keys mean factors found in the same tensors
    beside  of every file that they are found in, one tensor
    find    the factors, which may take reading weights
    """

    name: str
    key: str
    beside: tuple[TensorRef, ...] = field(repr=False)
    find: Callable[[Source], Factors] = field(repr=False, compare=False)


class CodingDefaults(Protocol):
    """What a coding answers where its own class says nothing."""

    @property
    def artifact(self) -> Artifact | None:
        """Return the artifact that holds it; None where no records tell of it."""
        return None

    @property
    def columns(self) -> Folding | None:
        """Return the fold that multiplies its columns."""
        return None

    @property
    def rows(self) -> Folding | None:
        """Return the fold that divides its rows."""
        return None

    @property
    def foldings(self) -> tuple[Folding, ...]:
        """Return every fold that changes its values."""
        return ()

    @property
    def change(self) -> str:
        """Say what changes its values on their way, "" for nothing."""
        return ""

    @property
    def against(self) -> str:
        """Name the values that losses are counted against."""
        return SOURCE

    @property
    def becomes(self) -> str | None:
        """Return the dtype that its values take when it stays; None: as stored."""
        return None

    @property
    def is_gguf_type(self) -> bool:
        """Tell whether it is of a type of llama.cpp's, rounded to few bits."""
        return False

    @property
    def is_at_home(self) -> bool:
        """Tell whether it may stay as it is, though it is packed."""
        return False

    @property
    def is_spread(self) -> bool:
        """Tell whether one row lies spread over the whole stored matrix."""
        return False

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        """Tell whether a GPU cannot make its values of what is stored."""
        return False

    def check(self, linear: Linear, source: Source) -> None:
        """Raise InputError where small tensors beside the codes contradict them."""
        return

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Return its rows as floats; nothing is read before they are asked for."""

    def blocks(self, linear: Linear) -> Blocks | None:
        """Return its codes and scales as stored; None where it has no blocks."""
        return None

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        """Return the form in which it can stay as it is in what is made.

        None where it is an ordinary tensor, or the dialect has no form for it.
        """
        return None

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Read its codes and its scales in that form, piece by piece.

        Either may be empty; nothing comes where it has no form.
        """
        return iter(())


class Coding(CodingDefaults, Protocol):
    """What the bytes of a matrix mean.

    word       what a person calls it: bf16, fp8 128x128, int4 32, mxfp4
    is_packed  whether it is not what an ordinary checkpoint holds
    format     of the codes; None where no module can become it, or factors change the values
    These stand apart from the defaults: a dataclass would take an inherited property for the
    default of its field of that name.
    """

    @property
    def word(self) -> str: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def format(self) -> Format | None: ...


class Linear(NamedTuple):
    """The matrix of one linear layer at its address; holds no data.

    shape   (rows, columns), as (out_features, in_features)
    refs    what it is decoded from, the codes first; a matrix of a stack has an address of its own
    idle    other tensors that only its engine has a use for; they do not travel with its values
    stack   the tensor that it is a part of, with matrices of other modules; None where it has its
            own
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
        """Name it as a person looks for it.

        By its tensor, or by the module where the tensor holds others too.
        """
        return self.module if self.stack else self.refs[0].name

    @property
    def nbytes(self) -> int:
        return total_nbytes(self.refs) // self.share

    @property
    def home(self) -> TensorRef:
        """Return the stored tensor whose place its outputs take."""
        return self.stack or self.refs[0]


def is_fp8(linear: Linear) -> bool:
    """Tell whether its codes are E4M3 already."""
    return linear.coding.format is not None and linear.coding.format.is_fp8


def input_scale_of(linear: Linear) -> TensorRef | None:
    """Return the static scale of its activations that stands beside it."""
    for ref in linear.idle:
        if ref.name.endswith(".input_scale") and ref.dtype in FLOAT_TYPES and ref.elements == 1:
            return ref
    return None


def scales_not_finite(module: str, found: str) -> NumericError:
    """Return the error for scales that say nothing of weights.

    found  such as "3 of its 8 scales are not finite"
    """
    detail = f"{module}: {found}; expected numbers"
    next_step = "Start from the original weights; see: fp4convert inspect."
    return NumericError("scale-not-finite", detail, next_step, module)


def check_scales_finite(linear: Linear, scales: Float32s) -> None:
    """Raise NumericError where a scale is NaN or infinite."""
    if bad := int(np.count_nonzero(~np.isfinite(scales))):
        raise scales_not_finite(linear.module, f"{bad} of its {scales.size} scales are not finite")


def room_for(source: Source, linears: Collection[Linear]) -> AbstractContextManager[None]:
    """Hold memory while these are read more than once.

    Waits until the source has memory for them.  The first is of the shard that is streamed.
    """
    whole = dict.fromkeys(ref for linear in linears if linear.share == 1 for ref in linear.refs)
    return source.room_for(sum(linear.nbytes for linear in linears), list(whole))


def find_not_finite(source: Source, linear: Linear) -> NumericError | None:
    """Count NaN and Inf in a matrix; None where all are finite."""
    found = find_not_finite_values(linear.coding.weights(linear, source))
    if not found:
        return None
    detail = f"{linear.home.file}: {linear.name} has {found}; weights must be finite"
    return NumericError("not-finite", detail, exclude_option(linear.module), linear.name)
