"""Describe a linear layer and its encoding: Linear, Coding, Folding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.error_sums import SOURCE
from fp4convert.numerics.formats import FLOAT_TYPES, Format
from fp4convert.numerics.matrices import Blocks, Weights
from fp4convert.numerics.value_checks import find_not_finite_values
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef, total_nbytes
from fp4convert.storage.source import Source

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
    "_fake_quantizer.qscale_act",  # Mistral's own
)


class Base(NamedTuple):
    """The checkpoint that modules in eight bits are taken from.

    taken  of every module its name, coding and shape, which a record hashes
    """

    name: str
    repo: str | None
    revision: str | None
    taken: tuple[tuple[str, str, tuple[int, int]], ...]

    def as_record(self) -> dict[str, object]:
        """Describe it in a record, without a path."""
        text = json.dumps(self.taken)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return {"repo": self.repo, "revision": self.revision, "headers_sha256": sha256}


class Factors(NamedTuple):
    """Factors of one fold: float32, positive and finite.

    columns  multiply the columns of every linear layer that reads the output
    made     divide the output; fewer than columns where heads are repeated
    reach    largest input of each reading module after the fold, over that before it
    """

    columns: Float32s
    made: Float32s
    reach: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Folding:
    """One fold, as the tensors that it changes refer to it.

    name    of the module that is divided
    key     equal for folds whose factors come from the same tensors
    beside  one tensor of every file that the factors are computed from
    find    computes the factors; may read weights
    """

    name: str
    key: str
    beside: tuple[TensorRef, ...] = field(repr=False)
    find: Callable[[Source], Factors] = field(repr=False, compare=False)


class CodingDefaults(Protocol):
    """Default answers of a coding."""

    @property
    def artifact(self) -> Artifact | None:
        """Return the artifact that holds the weights; None: no artifact does."""
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
        """Name the change that its values undergo; "" for none."""
        return ""

    @property
    def against(self) -> str:
        """Name the values that losses are counted against."""
        return SOURCE

    @property
    def becomes(self) -> str | None:
        """Return the dtype that kept values take; None: the stored dtype."""
        return None

    @property
    def is_gguf_type(self) -> bool:
        """Return whether it is one of llama.cpp's quantized types."""
        return False

    @property
    def is_at_home(self) -> bool:
        """Return whether it can stay unchanged, though it is packed."""
        return False

    @property
    def is_spread(self) -> bool:
        """Return whether each row is spread over the whole stored matrix."""
        return False

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        """Return whether only the CPU can decode it."""
        return False

    def check(self, linear: Linear, source: Source) -> None:
        """Raise InputError where small tensors beside the codes contradict them."""
        return

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Return its rows as floats; reads nothing until rows are asked for."""

    def blocks(self, linear: Linear) -> Blocks | None:
        """Return its codes and scales as stored; None: it has no blocks."""
        return None

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        """Return the form in which the target can keep it; None: it cannot."""
        return None

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield its codes and its scales in that form; either may be empty."""
        return iter(())


class Coding(CodingDefaults, Protocol):
    """The meaning of a matrix's bytes.

    word       name for people: bf16, fp8 128x128, int4 32, mxfp4
    is_packed  ordinary checkpoints do not hold it
    format     of the codes; None where no module can become it, or factors change the values

    These are not among the defaults: a dataclass takes an inherited property for the default of
    its field of that name.
    """

    @property
    def word(self) -> str: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def format(self) -> Format | None: ...


class ChangedCoding(CodingDefaults, Protocol):
    """A coding that changes the values of another coding."""

    stored: Coding

    @property
    def word(self) -> str:
        return self.stored.word

    @property
    def is_packed(self) -> bool:
        return self.stored.is_packed

    @property
    def artifact(self) -> Artifact | None:
        return self.stored.artifact


class Linear(NamedTuple):
    """The matrix of one linear layer and its addresses; holds no data.

    shape   (rows, columns), as (out_features, in_features)
    refs    tensors that it is decoded from, the codes first; of a stack only its own matrix
    idle    other tensors, which only engines use; they do not travel with its values
    stack   the tensor that holds it beside matrices of other modules; None: it has its own
    share   how many such matrices of equal size the refs hold
    eight   the same matrix in eight bits, out of another checkpoint: taken if it stays unchanged
    """

    module: str
    shape: tuple[int, int]
    coding: Coding
    refs: tuple[TensorRef, ...]
    idle: tuple[TensorRef, ...] = ()
    stack: TensorRef | None = None
    share: int = 1
    eight: Linear | None = None

    @property
    def name(self) -> str:
        """Name its tensor, or its module where the tensor holds others too."""
        return self.module if self.stack else self.refs[0].name

    @property
    def nbytes(self) -> int:
        return total_nbytes(self.refs) // self.share

    @property
    def home(self) -> TensorRef:
        """Return the stored tensor that its outputs replace."""
        return self.stack or self.refs[0]


def is_fp8(linear: Linear) -> bool:
    """Return whether its codes are E4M3 already."""
    return linear.coding.format is not None and linear.coding.format.is_fp8


def stored_beside(
    tensors: Mapping[str, TensorRef], module: str, endings: Iterable[str]
) -> tuple[TensorRef, ...]:
    """Return the tensors of a module with these endings, in their order."""
    return tuple(ref for ending in endings if (ref := tensors.get(module + ending)))


def scales_missing(detail: str, tensor: str) -> InputError:
    """Return the error for codes without the tensors that give them values."""
    next_step = "Download the checkpoint again; all its shards are needed."
    return InputError("scales-missing", detail, next_step, tensor)


def input_scale_of(linear: Linear) -> TensorRef | None:
    """Return the stored static scale of its activations, if any."""
    for ref in linear.idle:
        if ref.name.endswith(".input_scale") and ref.dtype in FLOAT_TYPES and ref.elements == 1:
            return ref
    return None


def scales_not_finite(module: str, found: str) -> NumericError:
    """Return the error for scales such as "3 of its 8 scales are not finite"."""
    detail = f"{module}: {found}; expected numbers"
    next_step = "Start from the original weights; see: fp4convert inspect."
    return NumericError("scale-not-finite", detail, next_step, module)


def check_scales_finite(linear: Linear, scales: Float32s) -> None:
    """Raise NumericError where a scale is NaN or infinite."""
    if bad := int(np.count_nonzero(~np.isfinite(scales))):
        raise scales_not_finite(linear.module, f"{bad} of its {scales.size} scales are not finite")


def room_for(source: Source, linears: Collection[Linear]) -> AbstractContextManager[None]:
    """Wait for memory, and hold it while these are read more than once.

    linears  the first is of the shard that is streamed
    """
    whole = dict.fromkeys(ref for linear in linears if linear.share == 1 for ref in linear.refs)
    return source.room_for(sum(linear.nbytes for linear in linears), list(whole))


def find_not_finite(source: Source, linear: Linear) -> NumericError | None:
    """Return the error for a matrix with NaN or Inf; None: all is finite."""
    found = find_not_finite_values(linear.coding.weights(linear, source))
    if not found:
        return None
    detail = f"{linear.home.file}: {linear.name} has {found}; weights must be finite"
    return NumericError("not-finite", detail, exclude_option(linear.module), linear.name)
