"""Locate the rows of modules in a stored stack of matrices.

gpt-oss keeps all experts of a layer in one tensor, gate and up row by row in turn; GGUF keeps the
two halves of every head of q and k in turn. Rows move whole; codes and scales stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp4convert.numerics.matrices import (
    Blocks,
    Fetched,
    Matrix,
    Quantized,
    RowReader,
    Weights,
    row_panels,
)

MATRIX_DIMENSIONS, STACK_DIMENSIONS = 2, 3


class Rows(NamedTuple):
    """Rows first..last-1 of a module."""

    module: str
    first: int
    last: int


class StridedRows(NamedTuple):
    """Rows of a module: `height` of them from `start` on.

    They are rows first, first + step, ... of the matrix that stores them.
    """

    start: int
    first: int
    step: int
    height: int


Slot = tuple[Rows, ...]
"""Modules whose rows take turns in a stored matrix, equally many of each; the next slot follows."""


def places_of(slots: Sequence[Slot]) -> dict[str, tuple[StridedRows, ...]]:
    """Locate the rows of every module in a matrix of those slots."""
    found: dict[str, tuple[StridedRows, ...]] = {}
    first = 0
    for slot in slots:
        for place, rows in enumerate(slot):
            strided = StridedRows(rows.first, first + place, len(slot), rows.last - rows.first)
            found[rows.module] = (*found.get(rows.module, ()), strided)
        first += sum(rows.last - rows.first for rows in slot)
    return found


def gather(stored: Blocks, shape: tuple[int, int], places: tuple[StridedRows, ...]) -> Blocks:
    """Return the blocks of a module of that shape, out of a stored matrix."""
    if places == (StridedRows(0, 0, 1, stored.shape[0]),):
        return stored

    def spans(first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield first, end and step of the stored rows that hold the module's."""
        for rows in places:
            begin, end = (min(max(row - rows.start, 0), rows.height) for row in (first, last))
            if begin < end:
                above = rows.first + begin * rows.step
                yield above, rows.first + (end - 1) * rows.step + 1, rows.step

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        parts = [
            _interleave([stored.rows(begin, end)], step) for begin, end, step in spans(first, last)
        ]
        packed, block_scales = (b"".join(table) for table in zip(*parts, strict=True))
        return memoryview(packed), memoryview(block_scales)

    def fetch_scales(first: int, last: int) -> memoryview:
        parts = (
            _interleave_bytes([stored.scales(begin, end)], end - begin, step)
            for begin, end, step in spans(first, last)
        )
        return memoryview(b"".join(parts))

    global_scale = stored.global_scale
    if isinstance(stored, Fetched) and stored.scale_of:
        global_scale = stored.scale_of(places[0].first)
    return Fetched(stored.format, shape, global_scale, stored.kind, fetch, fetch_scales)


def take_rows(blocks: Blocks, rows: Rows) -> Blocks:
    """Return the blocks of some rows of a module."""
    height = rows.last - rows.first
    if (rows.first, rows.last) == (0, blocks.shape[0]):
        return blocks
    return gather(blocks, (height, blocks.shape[1]), (StridedRows(0, rows.first, 1, height),))


def alternate(members: Sequence[Blocks]) -> Iterator[Quantized]:
    """Yield panels of a matrix in which rows of equal members take turns."""
    if len(members) == 1:
        yield from (members[0].rows(first, last) for first, last in row_panels(members[0].shape))
        return
    for first, last in row_panels(members[0].shape):
        panels = [member.rows(first, last) for member in members]
        packed, block_scales = (memoryview(table) for table in _interleave(panels))
        shape = (len(members) * (last - first), members[0].shape[1])
        yield replace(panels[0], shape=shape, packed=packed, block_scales=block_scales)


def _interleave(members: Sequence[Quantized], step: int = 1) -> tuple[bytes, bytes]:
    """Return codes and block scales of every step-th row, members in turn."""
    height = members[0].shape[0]
    codes, scales = [q.packed for q in members], [q.block_scales for q in members]
    return _interleave_bytes(codes, height, step), _interleave_bytes(scales, height, step)


def _interleave_bytes(tables: Sequence[memoryview], height: int, step: int = 1) -> bytes:
    """Return every step-th row of each table, the tables in turn."""
    flat = [table.cast("B") for table in tables]
    width = flat[0].nbytes // height
    return b"".join(
        table[row * width : (row + 1) * width] for row in range(0, height, step) for table in flat
    )


@dataclass(frozen=True, slots=True)
class InterleavedWeights(RowReader):
    """Weights in which rows of the members, equally many of each, take turns."""

    members: tuple[Weights, ...]

    @property
    def dtype(self) -> str:
        return self.members[0].dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.members[0].shape
        return rows * len(self.members), columns

    def rows(self, first: int, last: int) -> Matrix:
        count = len(self.members)
        if count == 1:
            return self.members[0].rows(first, last)
        # Read whole turns, then cut off the rows of other members at both ends.
        begin, end = first // count, -(-last // count)
        own = [member.rows(begin, end).data for member in self.members]
        joined = memoryview(_interleave_bytes(own, end - begin))
        width = joined.nbytes // (count * (end - begin))
        data = joined[(first - begin * count) * width : (last - begin * count) * width]
        return Matrix(data, self.dtype, (last - first, self.shape[1]))
