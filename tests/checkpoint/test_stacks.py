"""Rows that take turns: stacks against NumPy's own indexing, in panels of any height."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4convert.checkpoint.dialects import stacks
from fp4convert.checkpoint.dialects.stacks import (
    Rows,
    StridedRows,
    alternate,
    gather,
    places_of,
    take_rows,
)
from fp4convert.numerics import matrices
from fp4convert.numerics.formats import MXFP4
from fp4convert.numerics.matrices import Fetched, Quantized

COLUMNS = 64  # 32 bytes of codes and two scales to a row
HEIGHTS = st.integers(1, 9)


def matrix_of(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of codes and of scales, each row of them another."""
    chance = np.random.default_rng(seed)
    return chance.integers(0, 256, (rows, 32), np.uint8), chance.integers(
        0, 256, (rows, 2), np.uint8
    )


def blocks_of(tables: tuple[np.ndarray, np.ndarray]) -> Quantized:
    packed, scales = (np.ascontiguousarray(table).reshape(-1).data for table in tables)
    return Quantized(MXFP4, (len(tables[0]), COLUMNS), packed, scales, None)


def tables_of(q: Quantized) -> tuple[bytes, bytes]:
    return bytes(q.packed), bytes(q.block_scales)


def as_bytes(tables: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    return tables[0].tobytes(), tables[1].tobytes()


def joined(panels: list[Quantized]) -> tuple[bytes, bytes]:
    return b"".join(bytes(q.packed) for q in panels), b"".join(
        bytes(q.block_scales) for q in panels
    )


def row_numbers(pieces: tuple[StridedRows, ...]) -> list[int]:
    """Rows of the stored matrix, in the module's own order."""
    return [
        piece.first + row * piece.step for piece in sorted(pieces) for row in range(piece.height)
    ]


def cut(draw, height: int) -> list[tuple[int, int]]:
    """Ranges of rows that cover the height once, in order."""
    points = sorted({0, height, *draw(st.lists(st.integers(0, height), max_size=4))})
    return list(pairwise(points))


def test_pieces_of_a_stack_typed_by_hand():
    """Two experts; gate and up take turns, gate first: rows 0, 2, 4 and 1, 3, 5, and those of the
    second below.
    """
    slots = [(Rows("0.gate", 0, 3), Rows("0.up", 0, 3)), (Rows("1.gate", 0, 3), Rows("1.up", 0, 3))]
    assert places_of(slots) == {
        "0.gate": (StridedRows(0, 0, 2, 3),),
        "0.up": (StridedRows(0, 1, 2, 3),),
        "1.gate": (StridedRows(0, 6, 2, 3),),
        "1.up": (StridedRows(0, 7, 2, 3),),
    }


def test_pieces_of_a_head_whose_halves_take_turns():
    """GGUF's order of a head of four rows: 0, 2, 1, 3."""
    slots = [(Rows("q", 0, 2), Rows("q", 2, 4)), (Rows("q", 4, 6), Rows("q", 6, 8))]
    pieces = places_of(slots)["q"]
    assert pieces == (
        StridedRows(0, 0, 2, 2),
        StridedRows(2, 1, 2, 2),
        StridedRows(4, 4, 2, 2),
        StridedRows(6, 5, 2, 2),
    )
    assert row_numbers(pieces) == [0, 2, 1, 3, 4, 6, 5, 7]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_what_takes_turns_is_gathered_again(data):
    """Any experts of any height, any number of members in turn, fetched in any ranges."""
    members, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    height = data.draw(HEIGHTS)
    slots = [
        tuple(Rows(f"{number}.{member}", 0, height) for member in range(members))
        for number in range(count)
    ]
    tables = matrix_of(count * members * height)
    stored = blocks_of(tables)
    for module, pieces in places_of(slots).items():
        number, member = map(int, module.split("."))
        expected = tuple(
            table.reshape(count, height, members, -1)[number, :, member] for table in tables
        )
        found = gather(stored, (height, COLUMNS), pieces)
        assert (found.shape, found.format, found.global_scale) == ((height, COLUMNS), MXFP4, None)
        panels = [found.rows(first, last) for first, last in cut(data.draw, height)]
        assert joined(panels) == as_bytes(expected)
        assert all(panel.shape[1] == COLUMNS for panel in panels)
        assert sum(panel.shape[0] for panel in panels) == height


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_module_in_many_pieces_is_gathered_in_its_own_order(data):
    """Halves of heads in turn, as GGUF keeps q and k; every range of rows may begin and end inside
    a piece.
    """
    heads, half = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rows = heads * 2 * half
    slots = [
        (
            Rows("q", 2 * half * head, 2 * half * head + half),
            Rows("q", 2 * half * head + half, 2 * half * (head + 1)),
        )
        for head in range(heads)
    ]
    tables = matrix_of(rows)
    stored = tuple(
        table.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows, -1) for table in tables
    )
    found = gather(blocks_of(stored), (rows, COLUMNS), places_of(slots)["q"])
    assert joined([found.rows(first, last) for first, last in cut(data.draw, rows)]) == as_bytes(
        tables
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_part_of_is_a_slice(data):
    rows = data.draw(HEIGHTS)
    first, last = sorted((data.draw(st.integers(0, rows - 1)), data.draw(st.integers(1, rows))))
    last = max(last, first + 1)
    tables = matrix_of(rows)
    found = take_rows(blocks_of(tables), Rows("m", first, last))
    assert found.shape == (last - first, COLUMNS)
    panels = [found.rows(*piece) for piece in cut(data.draw, last - first)]
    assert joined(panels) == as_bytes(tuple(table[first:last] for table in tables))


def test_the_whole_is_handed_on_as_it_is():
    stored = blocks_of(matrix_of(5))
    assert gather(stored, (5, COLUMNS), (StridedRows(0, 0, 1, 5),)) is stored
    assert take_rows(stored, Rows("m", 0, 5)) is stored


def test_half_of_a_matrix_is_not_the_whole():
    """Every second row of a stack as tall as twice the module: the first of two members, from row
    0.
    """
    tables = matrix_of(6)
    found = gather(blocks_of(tables), (3, COLUMNS), (StridedRows(0, 0, 2, 3),))
    assert tables_of(found.rows(0, 3)) == as_bytes(tuple(table[::2] for table in tables))


@pytest.mark.parametrize("elements", [1, COLUMNS, 3 * COLUMNS + 1, 1 << 20])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(count=st.integers(1, 4), height=HEIGHTS)
def test_rows_of_members_take_turns(elements, count, height):
    """In panels of one row, of three, and of all."""
    tables = [matrix_of(height, seed) for seed in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "row_panels", lambda shape: matrices.row_panels(shape, elements))
        panels = list(alternate([blocks_of(own) for own in tables]))
    expected = tuple(
        np.stack([own[kind] for own in tables], axis=1).reshape(count * height, -1)
        for kind in (0, 1)
    )
    assert joined(panels) == as_bytes(expected)
    own_height = max(1, elements // COLUMNS)
    assert [panel.shape for panel in panels] == [
        (count * min(own_height, height - first), COLUMNS) for first in range(0, height, own_height)
    ]


def test_a_fetched_member_keeps_its_global_scale_and_kind():
    made = matrix_of(4)
    member = Fetched(
        MXFP4, (4, COLUMNS), 0.5, "divisor", lambda first, last: _bytes_of(made, first, last)
    )
    gathered = gather(member, (2, COLUMNS), (StridedRows(0, 1, 2, 2),))
    assert (gathered.global_scale, gathered.kind) == (0.5, "divisor")
    assert tables_of(gathered.rows(0, 2)) == as_bytes(tuple(table[1::2] for table in made))
    (panel,) = alternate([member, member])
    assert (panel.global_scale, panel.kind, panel.shape) == (0.5, "divisor", (8, COLUMNS))


def _bytes_of(
    tables: tuple[np.ndarray, np.ndarray], first: int, last: int
) -> tuple[memoryview, memoryview]:
    packed, scales = (table[first:last].reshape(-1).data for table in tables)
    return packed, scales
