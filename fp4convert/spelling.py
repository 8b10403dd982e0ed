"""How tensors stand for a four-bit matrix, as far as dialects do it alike: codes, block scales, and scalars beside them.

A dialect is a Table where each of these is a tensor of its own, with linear block scales; others use its Scalars alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fp4convert.errors import InputError
from fp4convert.formats import Blocks, Format, Kind, Quantized, Span, Spans
from fp4convert.shard import TensorRef, TensorSpec

ACTIVATIONS_FP4 = 4
SMALLEST_SCALE = 2.0**-126  # smallest normal float32; its reciprocal is one too
Read = Callable[[str], Span]
Part = tuple[str, memoryview]


@dataclass(frozen=True, slots=True)
class Form:
    """What an artifact says of its weights beside their names.

    activations   16: only weights are quantized; 4: engines quantize activations too, NVFP4 with an input scale
    scale_layout  in which order block scales lie; a name in layout.py
    kv_cache      "fp8" where engines keep the cache of keys and values in FP8, or None
    shapes        (rows, columns) of the modules whose tensors cannot tell
    """

    format: Format
    activations: int = 16
    scale_layout: str = "linear"
    kv_cache: str | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def has_input_scale(self) -> bool:
        return self.activations == ACTIVATIONS_FP4 and self.format.has_global_scale


@dataclass(frozen=True, slots=True)
class Scalars:
    """The float32 that stand once per matrix.

    global_scale  ending of the global scale's name; None: there is no place for one, and it is 1
    input_scale   ending of the name of the scale of activations, or None
    shape         of both: () or (1,)
    kind          whether both are multipliers or divisors
    is_apart      they stand in the file for scales alone
    """

    global_scale: str | None
    input_scale: str | None = None
    shape: tuple[int, ...] = ()
    kind: Kind = "multiplier"
    is_apart: bool = False

    def specs(self, stem: str, form: Form) -> Iterator[TensorSpec]:
        """The tensors of a matrix of that form."""
        if self.global_scale and form.format.has_global_scale:
            yield TensorSpec(stem + self.global_scale, "F32", self.shape, self.is_apart)
        if self.input_scale and form.has_input_scale:
            yield TensorSpec(stem + self.input_scale, "F32", self.shape, self.is_apart)

    def encode(self, stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
        """Their bytes; raises InputError where one cannot be said.

        input_scale  a multiplier, or None
        """
        if q.global_scale is not None and self.global_scale:
            yield stem + self.global_scale, encode_scalar(q.global_scale, is_inverse=q.kind != self.kind)
        elif q.global_scale not in (None, 1.0):
            found = f"{stem} has the global scale {q.global_scale:g}, stored as a {q.kind}"
            detail = f"{found}; this dialect has no place for one, expected 1"
            next_step = "Quantize the original weights to this dialect, or dequantize the artifact first."
            raise InputError("dialect-global-scale", detail, next_step, stem)
        if input_scale is not None and self.input_scale:
            yield stem + self.input_scale, encode_scalar(input_scale, is_inverse=self.kind == "divisor")

    def decode_global(self, stem: str, form: Form, read: Read) -> float | None:
        """The stored global scale, where the format has one."""
        if not form.format.has_global_scale:
            return None
        return decode_scalar(read(stem + self.global_scale)) if self.global_scale else 1.0

    def decode_input(self, module: str, read: Read) -> float:
        """The scale of activations as a multiplier, not rounded."""
        if self.input_scale is None:
            raise RuntimeError("this dialect has no input scales")
        stored = decode_scalar(read(module + self.input_scale))
        if self.kind == "multiplier":
            return stored
        return 1 / stored if stored else math.inf


@dataclass(frozen=True, slots=True)
class Table:
    """Names and types of a matrix that is stored as packed codes and linear block scales, each a tensor.

    packed        ending and dtype of the packed codes
    codes_per_item  how many of them are in one item of that dtype
    block_scales  ending of the block scales' name
    scale_dtypes  their dtype, by format
    """

    packed: tuple[str, str]
    block_scales: str
    scale_dtypes: Mapping[Format, str]
    scalars: Scalars
    codes_per_item: int = 2

    def outputs(self, stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """Dialect.outputs."""
        *above, columns = shape
        ending, dtype = self.packed
        return (
            TensorSpec(stem + ending, dtype, (*above, columns // self.codes_per_item)),
            TensorSpec(stem + self.block_scales, self.scale_dtypes[form.format], (*above, columns // form.format.block_size)),
            *self.scalars.specs(stem, form),
        )

    def stored_shape(self, stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """Dialect.stored_shape."""
        *above, items = packed.shape
        return whole_blocks((*above, items * self.codes_per_item), form) if len(above) == 1 else None

    def encode(self, stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
        """Dialect.encode."""
        for rows in panels:
            yield stem + self.packed[0], rows.packed
            yield stem + self.block_scales, rows.block_scales

    def decode(self, stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """Dialect.decode."""
        *above, columns = shape
        stored, scales = read(stem + self.packed[0]), read(stem + self.block_scales)
        global_scale = self.scalars.decode_global(stem, form, read)
        return Spans(form.format, (math.prod(above), columns), stored, scales, global_scale, self.scalars.kind)


def half_columns(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    """`stored_shape` where packed codes are (rows, columns / 2)."""
    return whole_blocks((packed.shape[0], packed.shape[1] * 2), form) if len(packed.shape) == 2 else None


def whole_blocks(shape: tuple[int, ...], form: Form) -> tuple[int, ...] | None:
    """The shape itself where it holds at least one block and no part of one."""
    return shape if math.prod(shape) and shape[-1] % form.format.block_size == 0 else None


def is_reversible(scalar: float | None) -> bool:
    """True where the float32 reciprocal of the float32 reciprocal is the float32 itself; of nothing, too."""
    if scalar is None:
        return True
    there = decode_scalar(encode_scalar(scalar, is_inverse=True))
    return bytes(encode_scalar(there, is_inverse=True)) == bytes(encode_scalar(scalar))


def encode_scalar(value: float, is_inverse: bool = False) -> memoryview:
    """The four bytes of a float32; inverted it is fl(1/x): float64, then one rounding.

    Raises InputError where the reciprocal is no positive normal float32
    """
    if is_inverse and not SMALLEST_SCALE <= value <= 1 / SMALLEST_SCALE:
        detail = f"a scale is {value:g}, whose reciprocal is no float32; expected a positive number that has one"
        raise InputError("scale-without-inverse", detail, "Dequantize the artifact, and quantize the result.")
    return memoryview(struct.pack("<f", 1 / value if is_inverse else value))


def decode_scalar(stored: Span) -> float:
    """The float32 in those four bytes."""
    return float(struct.unpack("<f", stored[:])[0])
