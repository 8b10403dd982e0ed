"""Find whose rows a stored stack of matrices holds.

gpt-oss keeps all experts of a layer in one tensor, gate and up row by row in turn; GGUF keeps the two halves of every head of
q and k in turn.  Rows move whole: nothing here looks at a code or a scale.
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


class Rows(NamedTuple):
    """Rows first..last-1 of a module."""

    module: str
    first: int
    last: int


class Piece(NamedTuple):
    """`height` rows of a module from `start` on: rows first, first + step, ... of the matrix that stores them."""

    start: int
    first: int
    step: int
    height: int


Slot = tuple[Rows, ...]
"""Modules whose rows take turns in a stored matrix, equally many of each; the next slot begins below them."""


def pieces_of(slots: Sequence[Slot]) -> dict[str, tuple[Piece, ...]]:
    """Where the rows of every module are in a matrix of those slots."""
    found: dict[str, tuple[Piece, ...]] = {}
    first = 0
    for slot in slots:
        for place, rows in enumerate(slot):
            piece = Piece(rows.first, first + place, len(slot), rows.last - rows.first)
            found[rows.module] = (*found.get(rows.module, ()), piece)
        first += sum(rows.last - rows.first for rows in slot)
    return found


def gather(stored: Blocks, shape: tuple[int, int], pieces: tuple[Piece, ...]) -> Blocks:
    """The blocks of a module of that shape, out of the matrix that stores it."""
    if pieces == (Piece(0, 0, 1, stored.shape[0]),):
        return stored

    def places(first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Where these rows are: the first, behind the last, and how many of each step are others' but one."""
        for piece in pieces:
            begin, end = (min(max(row - piece.start, 0), piece.height) for row in (first, last))
            if begin < end:
                yield (
                    piece.first + begin * piece.step,
                    piece.first + (end - 1) * piece.step + 1,
                    piece.step,
                )

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        parts = [
            _in_turn([stored.rows(begin, end)], step) for begin, end, step in places(first, last)
        ]
        packed, block_scales = (b"".join(table) for table in zip(*parts, strict=True))
        return memoryview(packed), memoryview(block_scales)

    def fetch_scales(first: int, last: int) -> memoryview:
        parts = (
            _weave([stored.scales(begin, end)], end - begin, step)
            for begin, end, step in places(first, last)
        )
        return memoryview(b"".join(parts))

    return Fetched(stored.format, shape, stored.global_scale, stored.kind, fetch, fetch_scales)


def rows_of(blocks: Blocks, rows: Rows) -> Blocks:
    """Those rows of a module whose blocks they are."""
    if (rows.first, rows.last) == (0, blocks.shape[0]):
        return blocks
    return gather(
        blocks,
        (rows.last - rows.first, blocks.shape[1]),
        (Piece(0, rows.first, 1, rows.last - rows.first),),
    )


def alternate(members: Sequence[Blocks]) -> Iterator[Quantized]:
    """Panels of a matrix in which rows of the members, equally many of each, take turns."""
    if len(members) == 1:
        yield from (members[0].rows(first, last) for first, last in row_panels(members[0].shape))
        return
    for first, last in row_panels(members[0].shape):
        panels = [member.rows(first, last) for member in members]
        packed, block_scales = (memoryview(table) for table in _in_turn(panels))
        shape = (len(members) * (last - first), members[0].shape[1])
        yield replace(panels[0], shape=shape, packed=packed, block_scales=block_scales)


def _in_turn(members: Sequence[Quantized], step: int = 1) -> tuple[bytes, bytes]:
    """Codes and block scales of every step-th row of each member, the members in turn."""
    height = members[0].shape[0]
    return _weave([q.packed for q in members], height, step), _weave(
        [q.block_scales for q in members], height, step
    )


def _weave(tables: Sequence[memoryview], height: int, step: int = 1) -> bytes:
    """Every step-th row of each table, the tables in turn."""
    flat = [table.cast("B") for table in tables]
    width = flat[0].nbytes // height
    return b"".join(
        table[row * width : (row + 1) * width] for row in range(0, height, step) for table in flat
    )


@dataclass(frozen=True, slots=True)
class Woven(RowReader):
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
        begin, end = first // count, -(-last // count)
        woven = memoryview(
            _weave([member.rows(begin, end).data for member in self.members], end - begin)
        )
        width = woven.nbytes // (count * (end - begin))
        data = woven[(first - begin * count) * width : (last - begin * count) * width]
        return Matrix(data, self.dtype, (last - first, self.shape[1]))
