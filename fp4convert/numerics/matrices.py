"""Values that hold matrices: Weights, Quantized, Blocks.

Quantized is what every backend makes and every dialect spells; a panel is some whole rows of a
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.formats import FLOAT_TYPES, FP4_FORMATS, Format, Kind

PANEL_ELEMENTS = 4 << 20  # elements held at once: 8 MB of bf16 in, 2.3 MB out


class Matrix(NamedTuple):
    """Weights as they are stored: whole rows of a matrix, row-major.

    data   the bytes, little-endian; need not be aligned
    dtype  safetensors' name: BF16, F16 or F32
    """

    data: memoryview
    dtype: str
    shape: tuple[int, int]


class StoredRows(NamedTuple):
    """Rows as they are stored, for a GPU to decode.

    kernel     of kernels/decode.cu, which makes of them what `rows` gives
    arguments  what it takes before y: tables, which are uploaded, and whole numbers
    """

    kernel: str
    arguments: tuple[NDArray[np.generic] | int, ...]


StoredReader = Callable[[int, int], StoredRows]
"""(first, last + 1) of a range of rows -> these rows"""


class RowReader(Protocol):
    """What reads whole rows; some weights know a faster way."""

    def rows(self, first: int, last: int) -> Matrix:
        """Read rows first..last-1; read-only, valid while their source is open."""

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        """Copy rows first..last-1 into a writable buffer of exactly their size."""
        buffer[:] = self.rows(first, last).data

    def amaxes(self) -> Iterator[float] | None:
        """Find amaxes of parts of the whole; None where reading rows is as fast."""
        return None

    def stored_reader(self) -> StoredReader | None:
        """Return what reads stored rows; None where no GPU can decode them."""
        return None


class Weights(RowReader, Protocol):
    """A matrix somewhere, read by whole rows as often as is wanted.

    Two are equal where they are the same matrix of the same source. A dataclass would take an
    inherited property for the default of its field of that name: dtype and shape stand apart.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class InMemory(RowReader):
    """Weights that are in memory already."""

    matrix: Matrix

    @property
    def dtype(self) -> str:
        return self.matrix.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def rows(self, first: int, last: int) -> Matrix:
        width = self.shape[1] * FLOAT_TYPES[self.dtype].nbytes
        data = self.matrix.data[first * width : last * width]
        return Matrix(data, self.dtype, (last - first, self.shape[1]))


@dataclass(frozen=True, slots=True, eq=False)
class FetchedWeights(RowReader):
    """Weights that are made as they are read.

    fetch   (first, last + 1) of a range of rows -> these rows
    stored  the same rows, not decoded, where a GPU can do that
    """

    dtype: str
    shape: tuple[int, int]
    fetch: Callable[[int, int], Matrix]
    stored: StoredReader | None = None

    def rows(self, first: int, last: int) -> Matrix:
        return self.fetch(first, last)

    def stored_reader(self) -> StoredReader | None:
        return self.stored


class Compared(NamedTuple):
    """What rows of codes have lost; error_sums.py explains the numbers.

    rows    float64 (rows, ROW_SUMS)
    counts  int64 (CODES): how often each code occurs; empty where codes have more bits
    adapter  of merged weights: the power of an adapter's effect in these rows, and of their errors
             along its inputs
    exact    of weights from fake quantization: how many blocks are not zero, and how many of these
             come back
    """

    rows: memoryview
    counts: memoryview
    adapter: tuple[float, float] | None = None
    exact: tuple[int, int] | None = None


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Canonical(Generic[Part]):
    """One matrix, or some whole rows of one, in canonical form.

    Row-major, low nibble first, linear scales.
    packed        rows * columns / 2 bytes; element 2i in bits 0-3, element 2i+1 in bits 4-7
    block_scales  rows * columns / block_size bytes, E4M3 or E8M0
    global_scale  the stored float32, as an exact Python float; None where the format has none
    kind          how that float is meant: value = code * block_scale * multiplier, or code *
                  block_scale / divisor
    scale_layout  order of block_scales, which quantize_tensor alone gives other than linear
    """

    format: Format
    shape: tuple[int, int]
    packed: Part
    block_scales: Part
    global_scale: float | None
    kind: Kind = "multiplier"
    scale_layout: str = "linear"


@dataclass(frozen=True, slots=True)
class Quantized(Canonical[memoryview]):
    """One matrix in canonical form, in memory.

    compared  with the weights that it was made of, where that was done
    """

    compared: Compared | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle with the bytes, but without `compared`."""
        bits = [(bytes(part), part.shape) for part in (self.packed, self.block_scales)]
        stored = self.global_scale, self.kind, self.scale_layout
        return _revived, (self.format.name, self.shape, bits, stored)

    def shaped(self) -> Quantized:
        """Shape parts as matrices: (rows, columns / 2) and (rows, blocks)."""
        rows = self.shape[0]
        packed, scales = (
            part.cast("B", (rows, part.nbytes // rows)) for part in (self.packed, self.block_scales)
        )
        return replace(self, packed=packed, block_scales=scales)

    def rows(self, first: int, last: int) -> Quantized:
        """Return rows first..last-1, sharing the same bytes."""
        columns = self.shape[1]
        blocks = columns // self.format.block_size
        packed, scales = (part.cast("B") for part in (self.packed, self.block_scales))
        packed = packed[first * columns // 2 : last * columns // 2]
        block_scales = scales[first * blocks : last * blocks]
        shape = last - first, columns
        return replace(self, shape=shape, packed=packed, block_scales=block_scales, compared=None)

    def scales(self, first: int, last: int) -> memoryview:
        return self.rows(first, last).block_scales


class Fp8Panel(NamedTuple):
    """Rows as E4M3 codes, and what they have lost.

    first  of the rows in their matrix
    """

    first: int
    shape: tuple[int, int]
    codes: memoryview
    compared: Compared


class Span(Protocol):
    """Bytes somewhere, fetched by slices without a step; a memoryview is one."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def _revived(
    format: str,
    shape: tuple[int, int],
    bits: list[tuple[bytes, tuple[int, ...]]],
    stored: tuple[float | None, Kind, str],
) -> Quantized:
    packed, block_scales = (memoryview(part).cast("B", size) for part, size in bits)
    return Quantized(FP4_FORMATS[format], shape, packed, block_scales, *stored)


class Blocks(Protocol):
    """A four-bit matrix, read by whole rows as often as is wanted."""

    @property
    def format(self) -> Format: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def global_scale(self) -> float | None: ...

    @property
    def kind(self) -> Kind: ...

    def rows(self, first: int, last: int) -> Quantized:
        """Read rows first..last-1 in canonical form."""

    def scales(self, first: int, last: int) -> memoryview:
        """Read the block scales alone of rows first..last-1, linear."""


class Fetched(NamedTuple):
    """Blocks that are put into canonical form as they are fetched.

    fetch         (first, last + 1) of a range of rows -> its packed codes and its block scales
    fetch_scales  -> its block scales alone, where that is less work
    scale_of      a row -> its global scale, where the matrices of a stack have one each: rows of
                  one of them are read at a time, and global_scale is that of the first
    """

    format: Format
    shape: tuple[int, int]
    global_scale: float | None
    kind: Kind
    fetch: Callable[[int, int], tuple[memoryview, memoryview]]
    fetch_scales: Callable[[int, int], memoryview] | None = None
    scale_of: Callable[[int], float] | None = None

    def rows(self, first: int, last: int) -> Quantized:
        packed, block_scales = self.fetch(first, last)
        global_scale = self.scale_of(first) if self.scale_of else self.global_scale
        shape = last - first, self.shape[1]
        return Quantized(self.format, shape, packed, block_scales, global_scale, self.kind)

    def scales(self, first: int, last: int) -> memoryview:
        return self.fetch_scales(first, last) if self.fetch_scales else self.fetch(first, last)[1]


def row_panels(shape: tuple[int, int], elements: int = PANEL_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Cut a matrix into (first, last + 1) rows of about so many elements."""
    rows, columns = shape
    height = max(1, elements // columns)
    return ((first, min(first + height, rows)) for first in range(0, rows, height))
