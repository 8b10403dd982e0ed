"""Write the values of linear layers as an ordinary tensor.

It may be a packed matrix that stays, a matrix that gets another dtype or is changed by an adapter,
one expert of a stack whose other experts are quantized, or a whole stack of experts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES
from fp4convert.checkpoint.dialects.stacks import Rows, Slot, places_of, take_rows
from fp4convert.checkpoint.encodings.base import (
    Linear,
    check_scales_finite,
    is_fp8,
    room_for,
    scales_not_finite,
)
from fp4convert.checkpoint.encodings.fp8 import E8M0_DTYPES, decode_scales
from fp4convert.errors import NumericError
from fp4convert.makers.carried import sound_blocks
from fp4convert.makers.maker import Maker, Parts, Tools, UnsoundShardError
from fp4convert.makers.unit import fold_refs, refs_of
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, as_floats
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import Matrix, row_panels
from fp4convert.numerics.value_checks import check_largest
from fp4convert.storage.gguf import Q8_0, encode_q8_0
from fp4convert.storage.safetensors import TensorRef, TensorSpec, nbytes_of
from fp4convert.storage.source import Source

OTHER_DTYPE = "Choose another --keep-dtype."


@dataclass(frozen=True, slots=True)
class Floats(Maker):
    """A linear layer, a vector as one row, or a stack.

    slots         modules of the rows; none where the tensor is one linear layer
    shape         of a stack, in the order of its linear layers
    is_transposed each matrix of the stack is stored as (columns, rows)
    next_step     for values beyond the dtype; None: as the codec says
    is_on_device  four-bit blocks are decoded by the backend
    """

    spec: TensorSpec
    linears: tuple[Linear, ...]
    slots: tuple[Slot, ...] = ()
    shape: tuple[int, ...] = ()
    is_transposed: bool = False
    next_step: str | None = OTHER_DTYPE
    is_on_device: bool = False

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return (*refs_of(self.linears), *fold_refs(self.linears))

    def parts(self, tools: Tools) -> Parts:
        name = self.spec.name
        try:
            with closing(self._panels(tools)) as panels:
                for data in panels:
                    yield name, data
        except NumericError as error:
            if error.tensor is None:
                step = self.next_step or error.next_step
                error = NumericError(error.code, f"{name}: {error.message}", step, name)
            raise UnsoundShardError([error]) from None
        return ()

    def _panels(self, tools: Tools) -> Generator[memoryview]:
        """Decode rows, or expert after expert, in the order of the tensor."""
        if not self.slots:
            yield from self._values(self.linears[0], tools)
            return
        linears = {linear.module: linear for linear in self.linears}
        count = len(self.slots) // math.prod(self.shape[:-2])
        for first in range(0, len(self.slots), count):
            slots = self.slots[first : first + count]
            # Rows that lie among those of others are read more than once.
            held = {linears[rows.module] for slot in slots for rows in slot}
            with room_for(tools.source, [linear for linear in held if linear.share > 1]):
                if self.is_transposed or any(len(slot) > 1 for slot in slots):
                    yield self._matrix(linears, slots, tools)
                else:
                    for (rows,) in slots:
                        yield from self._values(linears[rows.module], tools, rows)

    def _matrix(
        self, linears: Mapping[str, Linear], slots: Sequence[Slot], tools: Tools
    ) -> memoryview:
        """Decode a whole matrix, or one expert of a stack.

        Slots lie below each other; the rows of a slot's members take turns.
        """
        (height, columns), dtype = self.shape[-2:], self.spec.dtype
        # Q8_0 has whole blocks in a row.
        width = nbytes_of(dtype, self.spec.shape) // math.prod(self.shape[:-1])
        matrix = np.empty((height, width), np.uint8)
        for module, pieces in places_of(slots).items():
            for piece in pieces:
                rows = Rows(module, piece.start, piece.start + piece.height)
                values = b"".join(self._values(linears[module], tools, rows))
                places = slice(piece.first, piece.first + piece.height * piece.step, piece.step)
                matrix[places] = np.frombuffer(values, np.uint8).reshape(-1, width)
        data = matrix.reshape(-1).data
        if not self.is_transposed:
            return data
        return Cpu().transpose(Matrix(data, dtype, (height, columns)), range(columns)).data

    def _values(
        self, linear: Linear, tools: Tools, rows: Rows | None = None
    ) -> Iterator[memoryview]:
        """Decode a linear layer, or some rows of it."""
        if not self.is_on_device or linear.coding.blocks(linear) is None:
            yield from values_of(linear, tools.source, self.spec.dtype, rows)
            return
        sound = sound_blocks(linear)
        blocks = take_rows(sound, rows) if rows else sound
        yield from tools.backend.dequantize_panels(blocks, self.spec.dtype)


def values_of(
    linear: Linear, source: Source, dtype: str, rows: Rows | None = None
) -> Iterator[memoryview]:
    """Decode a linear layer as bytes of a dtype, panel by panel.

    rows    rows to decode; None: all
    Raises  NumericError beyond the range of F16, BF16 or Q8_0, or for scales that are not finite
    """
    weights = linear.coding.weights(linear, source)
    begin, end = (rows.first, rows.last) if rows else (0, weights.shape[0])
    for first, last in row_panels((end - begin, weights.shape[1])):
        panel = weights.rows(begin + first, begin + last)
        if panel.dtype == dtype and not linear.coding.is_packed:
            yield panel.data
            continue
        values = as_floats(panel).reshape(-1)
        if linear.coding.is_packed and not np.isfinite(values).all():
            _check_scales(linear, source)
            if np.isinf(values).any():  # of finite scales: no dtype holds it
                limit = f"{FLOAT_TYPES['F32'].largest:g}, the largest of fp32"
                raise scales_not_finite(linear.module, f"it makes values beyond {limit}")
        if panel.dtype == dtype:
            yield panel.data
        elif dtype == Q8_0:
            yield encode_q8_0(values)
        else:
            check_largest(float(np.fmax.reduce(np.abs(values), initial=0)), dtype)
            if dtype == "BF16":
                yield Cpu().to_bf16(values)
            else:
                yield values.astype(FLOAT_DTYPES[dtype]).view(np.uint8).data


def _check_scales(linear: Linear, source: Source) -> None:
    """Raise NumericError where a scale is not finite."""
    for ref in linear.refs[1:2]:
        if ref.dtype in SCALE_DTYPES or (ref.dtype in E8M0_DTYPES and is_fp8(linear)):
            stored = source.read_range(ref, 0, ref.nbytes)
            check_scales_finite(linear, decode_scales(stored, ref.dtype))
