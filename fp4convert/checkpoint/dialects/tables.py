"""Tensors of one matrix, for dialects that store them alike.

Dialects with a tensor of packed codes and one of linear block scales use a Table; others use its
Scalars alone. Fp8Table describes FP8 matrices, which some hold beside four-bit ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.dialects.forms import Form, Granularity, granularity_word
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FP8, INT4, Format, Kind
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized, Span
from fp4convert.storage.safetensors import SHAPES, TensorRef, TensorSpec

if TYPE_CHECKING:
    from fp4convert.numerics.low_rank import Correction

SMALLEST_SCALE = 2.0**-126  # smallest normal float32; its reciprocal is one too
Read = Callable[[str], Span]
Part = tuple[str, memoryview]
SCALAR_NBYTES = 4
INT4_PER_ITEM = 8  # codes in an I32


class CacheScales(NamedTuple):
    """How the two scales of a cache of keys and values are stored.

    endings  of their names below an attention: of keys, of values
    divisor  the stored multiplier is the largest |key| or |value| / divisor
    known    tools that write or read them otherwise, for a note; "" for none
    """

    endings: tuple[str, str]
    divisor: float
    known: str = ""


class Scalars(NamedTuple):
    """The scalars of a matrix.

    global_scale  ending of the global scale's name; None: there is no place for one, and it is 1
    input_scale   ending of the name of the scale of activations, or None
    shape         of both: () or (1,)
    kind          of both: multiplier or divisor
    is_apart      they lie in the file for scales alone
    dtype         of both: F32, or BF16 for multipliers, the upper half of a float32
    """

    global_scale: str | None
    input_scale: str | None = None
    shape: tuple[int, ...] = ()
    kind: Kind = "multiplier"
    is_apart: bool = False
    dtype: str = "F32"

    def specs(self, stem: str, form: Form) -> Iterator[TensorSpec]:
        """Yield the tensors of scalars of a matrix of that form."""
        if self.global_scale and form.format.has_global_scale:
            yield TensorSpec(stem + self.global_scale, self.dtype, self.shape, self.is_apart)
        if self.input_scale and form.has_input_scale:
            yield TensorSpec(stem + self.input_scale, "F32", self.shape, self.is_apart)

    def encode(self, stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
        """Yield the bytes of the scalars; InputError where there is no place.

        input_scale  a multiplier, or None
        """
        if q.global_scale is not None and self.global_scale:
            stored = encode_scalar(q.global_scale, q.kind != self.kind)
            yield stem + self.global_scale, stored if self.dtype == "F32" else _upper_half(stored)
        elif q.global_scale not in (None, 1.0):
            detail = f"{stem} has the global scale {q.global_scale:g}, stored as a {q.kind}; this"
            detail = f"{detail} dialect has no place for one, expected 1"
            next_step = "Quantize the original weights to this dialect, or dequantize the artifact"
            raise InputError("dialect-global-scale", detail, f"{next_step} first.", stem)
        if input_scale is not None and self.input_scale:
            yield stem + self.input_scale, encode_scalar(input_scale, self.kind == "divisor")

    def decode_global(self, stem: str, form: Form, read: Read) -> float | None:
        """Read the stored global scale, where the format has one."""
        if not form.format.has_global_scale:
            return None
        if not self.global_scale:
            return 1.0
        stored = read(stem + self.global_scale)
        if self.dtype == "F32":
            return decode_scalar(stored)
        return decode_scalar(memoryview(b"\0\0" + bytes(stored[:])))

    def input_name(self, module: str) -> str:
        """Return the name of the tensor of the scale of activations."""
        if self.input_scale is None:
            raise RuntimeError("this dialect has no input scales")
        return module + self.input_scale

    def as_multiplier(self, stored: float) -> float:
        """Turn a stored scale of activations into a multiplier, not rounded."""
        if self.kind == "multiplier":
            return stored
        return 1 / stored if stored else math.inf


def _upper_half(stored: memoryview) -> memoryview:
    """Return the bf16 of a float32 that was rounded so that nothing is lost."""
    if any(stored[:2]):
        raise RuntimeError(f"the global scale {decode_scalar(stored)} is no bf16")
    return stored[2:]


def scale_grid(shape: tuple[int, int], granularity: Granularity) -> tuple[int, int]:
    """Return (rows, columns) of the scales; a partial block has one, too."""
    if granularity == "tensor":
        return (1, 1)
    if granularity == "row":
        return (shape[0], 1)
    if isinstance(granularity, str):
        raise RuntimeError(f"granularity {granularity!r} is none")
    return (-(-shape[0] // granularity[0]), -(-shape[1] // granularity[1]))


@lru_cache(SHAPES)
def _divided(shape: tuple[int, ...], *divisors: int) -> tuple[tuple[int, ...], ...]:
    """Divide the columns; equal shapes are one object."""
    *above, columns = shape
    return tuple((*above, columns // divisor) for divisor in divisors)


@dataclass(frozen=True, slots=True)
class Fp8Table:
    """Tensors of FP8 and MXFP8 matrices: M.weight and M.weight_scale.

    made         granularity of weights that become FP8 here
    scale_shape  of the scales' tensor, by granularity; None for one that the dialect cannot hold
    input_scale  ending of the static scale of activations, which engines want with one scale for a
                 matrix; None: there is none
    is_open      it is optional: Form.is_static decides
    activations  bits to which engines quantize activations, by granularity, where they do not leave
                 the choice
    codes        dtype of M.weight, and how many codes are in one item of it
    scales       ending of the scales' name
    arrange      puts scales of (rows, columns) blocks in the order in which they are stored
    mark         name's ending and bytes of a tensor that names a module's format for engines
    older        other endings of names that are read, by today's
    e8m0         ending of the scales' name where they stay F8_E8M0; None: they become float32
    """

    made: Granularity
    scale_shape: Callable[[tuple[int, int], Granularity], tuple[int, ...] | None]
    input_scale: str | None = None
    is_open: bool = False
    activations: Mapping[Granularity, int] = field(default_factory=dict)
    codes: tuple[str, int] = ("F8_E4M3", 1)
    scales: str = ".weight_scale"
    arrange: Callable[[memoryview, tuple[int, int]], memoryview] | None = None
    mark: Callable[[Form], tuple[str, bytes]] | None = None
    older: Mapping[str, str] = field(default_factory=dict)
    e8m0: str | None = None

    def scales_name(self, stem: str, form: Form) -> str:
        """Return the name of the scales of such a matrix."""
        is_e8m0 = self.e8m0 is not None and form.stored_scales == "F8_E8M0"
        return f"{stem}{self.e8m0 if is_e8m0 else self.scales}"

    def has_input_scale(self, form: Form) -> bool:
        """Return whether such a matrix has a static scale of activations."""
        is_one = form.format is FP8 and form.granularity == "tensor"
        is_wanted = form.is_static or not self.is_open
        return self.input_scale is not None and is_one and is_wanted

    def unfit(self, shape: tuple[int, int], form: Form) -> str | None:
        """Implement Dialect.unfit."""
        if form.granularity is None or self.scale_shape(shape, form.granularity) is None:
            return f"FP8 with scales of {granularity_word(form.granularity or 'no known kind')}"
        return None

    def outputs(self, stem: str, shape: tuple[int, int], form: Form) -> tuple[TensorSpec, ...]:
        """Implement Dialect.outputs."""
        grid = self.scale_shape(shape, form.granularity) if form.granularity else None
        if grid is None:
            reason = self.unfit(shape, form)
            raise RuntimeError(f"{stem}: {reason} has no place in this dialect")
        dtype, count = self.codes
        specs = [
            TensorSpec(f"{stem}.weight", dtype, (shape[0], shape[1] // count)),
            TensorSpec(self.scales_name(stem, form), form.stored_scales, grid),
        ]
        if self.input_scale and self.has_input_scale(form):
            specs.append(TensorSpec(stem + self.input_scale, "F32", grid))
        if self.mark:
            ending, data = self.mark(form)
            specs.append(TensorSpec(stem + ending, "U8", (len(data),)))
        return tuple(specs)

    def encode(
        self,
        stem: str,
        shape: tuple[int, ...],
        form: Form,
        panels: Iterable[tuple[memoryview, memoryview]],
        input_scale: float | None = None,
    ) -> Iterator[Part]:
        """Yield bytes to append to outputs, by name.

        panels  pairs of stored codes of whole rows and stored scales; either may be empty
        """
        if self.input_scale and self.has_input_scale(form):
            if input_scale is None:
                raise RuntimeError(f"{stem} has no input scale")
            yield stem + self.input_scale, encode_scalar(input_scale)
        if self.mark:
            ending, data = self.mark(form)
            yield stem + ending, memoryview(data)
        for codes, scales in panels:
            if codes.nbytes:
                yield f"{stem}.weight", codes
            if scales.nbytes and self.arrange and isinstance(form.granularity, tuple):
                grid = scale_grid((shape[0], shape[1]), form.granularity)
                yield self.scales_name(stem, form), self.arrange(scales, grid)
            elif scales.nbytes:
                yield self.scales_name(stem, form), scales


class Table(NamedTuple):
    """Tensors of a matrix: packed codes and linear block scales.

    packed          ending and dtype of the packed codes
    codes_per_item  codes in one item of that dtype
    block_scales    ending of the block scales' name
    scale_dtypes    dtype of the block scales, by format
    fp8             table of FP8 matrices; int4 is packed as in compressed-tensors
    """

    packed: tuple[str, str]
    block_scales: str
    scale_dtypes: Mapping[Format, str]
    scalars: Scalars
    codes_per_item: int = 2
    fp8: Fp8Table | None = None

    def unfit(self, module: str, shape: tuple[int, int], form: Form) -> str | None:
        """Implement Dialect.unfit."""
        return self.fp8.unfit(shape, form) if self.fp8 and form.format.is_fp8 else None

    def outputs(self, stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """Implement Dialect.outputs."""
        *above, columns = shape
        (ending, dtype), scales_name = self.packed, stem + self.block_scales
        if self.fp8 and form.format.is_fp8:
            return self.fp8.outputs(stem, (above[0], columns), form)
        if form.format is INT4:
            grid = scale_grid((above[0], columns), form.granularity or "row")
            return (
                TensorSpec(stem + ending, "I32", (above[0], -(-columns // INT4_PER_ITEM))),
                TensorSpec(scales_name, form.stored_scales, grid),
                TensorSpec(f"{stem}.weight_shape", "I64", (2,)),
            )
        codes, blocks = _divided(shape, self.codes_per_item, form.format.block_size)
        return (
            TensorSpec(stem + ending, dtype, codes),
            TensorSpec(scales_name, self.scale_dtypes[form.format], blocks),
            *self.scalars.specs(stem, form),
        )

    def stored_shape(self, stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """Implement Dialect.stored_shape."""
        if len(packed.shape) != 2:
            return None
        rows, items = packed.shape
        if form.format is INT4:
            return rows, items * INT4_PER_ITEM
        if self.fp8 and form.format.is_fp8:
            return rows, items * self.fp8.codes[1]
        return whole_blocks((rows, items * self.codes_per_item), form)

    def encode(
        self, stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Implement Dialect.encode."""
        for rows in panels:
            yield stem + self.packed[0], rows.packed
            yield stem + self.block_scales, rows.block_scales

    def decode(self, stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """Implement Dialect.decode."""
        *above, columns = shape
        stored, scales = read(stem + self.packed[0]), read(stem + self.block_scales)
        global_scale = self.scalars.decode_global(stem, form, read)
        # Both lie in canonical form, so that rows are slices.
        half, blocks = columns // 2, columns // form.format.block_size

        def fetch_scales(first: int, last: int) -> memoryview:
            return scales[first * blocks : last * blocks]

        def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
            return stored[first * half : last * half], fetch_scales(first, last)

        matrix, kind = (math.prod(above), columns), self.scalars.kind
        return Fetched(form.format, matrix, global_scale, kind, fetch, fetch_scales)


class CorrectionTable(NamedTuple):
    """How low-rank corrections are stored beside four-bit codes.

    rank    of written corrections
    encode  (stem, correction) -> bytes to append to outputs, by name
    decode  (stem, shape, read) -> the correction
    bias    ending of the bias, which is stored in the order of the kernels
    order   number of values -> index in the ordinary vector of each stored value
    """

    rank: int
    encode: Callable[[str, Correction], Iterator[Part]]
    decode: Callable[[str, tuple[int, int], Read], Correction]
    bias: str
    order: Callable[[int], NDArray[np.intp]]


def encode_int4(
    stem: str, shape: tuple[int, ...], panels: Iterable[tuple[memoryview, memoryview]]
) -> Iterator[Part]:
    """Yield the bytes of packed integers by their names in compressed-tensors.

    panels  as in Fp8Table.encode
    """
    for codes, scales in panels:
        if codes.nbytes:
            yield f"{stem}.weight_packed", codes
        if scales.nbytes:
            yield f"{stem}.weight_scale", scales
    yield f"{stem}.weight_shape", memoryview(struct.pack("<2q", *shape))


def whole_blocks(shape: tuple[int, ...], form: Form) -> tuple[int, ...] | None:
    """Return the shape if it holds whole blocks alone, else None."""
    return shape if math.prod(shape) and shape[-1] % form.format.block_size == 0 else None


def is_reversible(scalar: float | None) -> bool:
    """Return whether inverting a float32 twice gives it again; True for None."""
    if scalar is None:
        return True
    there = decode_scalar(encode_scalar(scalar, is_inverse=True))
    return bytes(encode_scalar(there, is_inverse=True)) == bytes(encode_scalar(scalar))


def encode_scalar(value: float, is_inverse: bool = False) -> memoryview:
    """Return the four bytes of a float32, or of its reciprocal.

    The reciprocal is fl(1/x): float64, then one rounding.
    Raises  InputError for a reciprocal that is no positive normal float32
    """
    if is_inverse and not SMALLEST_SCALE <= value <= 1 / SMALLEST_SCALE:
        detail = f"a scale is {value:g}, whose reciprocal is not a float32; expected a positive"
        detail = f"{detail} number that has one"
        next_step = "Dequantize the artifact, and quantize the result."
        raise InputError("scale-without-inverse", detail, next_step)
    return memoryview(struct.pack("<f", 1 / value if is_inverse else value))


def decode_scalar(stored: Span) -> float:
    return float(struct.unpack("<f", stored[:])[0])
