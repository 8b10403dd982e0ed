"""scale_layouts.py against code of other packages, against the documented offsets, and against
bytes typed by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from fp4convert.errors import InputError
from fp4convert.numerics.codec import Bytes
from fp4convert.numerics.scale_layouts import (
    LAYOUTS,
    from_halves,
    interleave,
    split_runs,
    to_halves,
)

SHAPES = [(1, 1), (130, 5), (5, 6), (300, 9), (128, 4), (256, 8)]


def scales(shape: tuple[int, int]) -> Bytes:
    """Bytes of which none is zero, so that padding shows."""
    return np.random.default_rng(0).integers(1, 127, shape, dtype=np.uint8)


def arrange(name: str, linear: Bytes) -> Bytes:
    return np.frombuffer(
        LAYOUTS[name].arrange(
            np.ascontiguousarray(linear).data, (linear.shape[0], linear.shape[1])
        ),
        np.uint8,
    )


def restore(name: str, stored: Bytes, shape: tuple[int, int]) -> Bytes:
    return np.frombuffer(LAYOUTS[name].restore(stored.data, shape), np.uint8).reshape(shape)


def up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


# ----------------------------------------------------------------------------------------------
# judges outside this house


@pytest.mark.parametrize("shape", SHAPES)
def test_128x4_equals_torchao(shape: tuple[int, int]) -> None:
    linear = scales(shape)
    stored = arrange("128x4", linear)
    assert np.array_equal(stored, to_blocked(torch.from_numpy(linear)).flatten().numpy())
    assert np.array_equal(from_blocked(torch.from_numpy(stored.copy()), *shape).numpy(), linear)


@pytest.mark.parametrize("shape", SHAPES)
def test_128x4_equals_modelopt(shape: tuple[int, int]) -> None:
    from modelopt.torch.export.diffusers_utils import swizzle_nvfp4_scales  # late: it takes seconds

    linear = scales(shape)
    state = {
        "a.weight": torch.zeros(shape[0], shape[1] * 8, dtype=torch.uint8),
        "a.weight_scale": torch.from_numpy(linear).view(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(1.0),
    }
    theirs = swizzle_nvfp4_scales(state)["a.weight_scale"].view(torch.uint8)
    assert tuple(theirs.shape) == LAYOUTS["128x4"].padded(shape)
    assert np.array_equal(arrange("128x4", linear), theirs.flatten().numpy())


# --------------------------------------------------------------------------------------------------
# documented offsets


def offset_linear(row: int, block: int, shape: tuple[int, int]) -> int:
    return row * shape[1] + block


def offset_128x4(row: int, block: int, shape: tuple[int, int]) -> int:
    """cuBLAS, "1D block scaling factors layout": tiles of 512 bytes, 16 of them for rows r, r + 32,
    r + 64 and r + 96.
    """
    tile = row // 128 * (up(shape[1], 4) // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def offset_8x4(row: int, block: int, shape: tuple[int, int]) -> int:
    """FlashInfer, get_sf_out_offset_8x4: tiles of 32 bytes, row-major within."""
    return (row // 8 * (up(shape[1], 4) // 4) + block // 4) * 32 + row % 8 * 4 + block % 4


def offset_deepgemm(row: int, block: int, shape: tuple[int, int]) -> int:
    """DeepGEMM, get_mn_major_tma_aligned_packed_ue8m0_tensor: column-major int32, rows aligned to
    16 bytes, low byte first.
    """
    return 4 * (block // 4 * up(shape[0], 4) + row) + block % 4


def offset_k_major(row: int, block: int, shape: tuple[int, int]) -> int:
    return block * shape[0] + row


OFFSETS: dict[str, tuple[Callable[[int, int, tuple[int, int]], int], tuple[int, int]]] = {
    "linear": (offset_linear, (1, 1)),
    "128x4": (offset_128x4, (128, 4)),
    "8x4": (offset_8x4, (8, 4)),
    "deepgemm": (offset_deepgemm, (4, 4)),
    "k_major": (offset_k_major, (1, 1)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OFFSETS)
def test_every_byte_lies_at_its_offset_and_the_rest_is_zero(
    name: str, shape: tuple[int, int]
) -> None:
    offset, multiples = OFFSETS[name]
    linear = scales(shape)
    expected = np.zeros(up(shape[0], multiples[0]) * up(shape[1], multiples[1]), np.uint8)
    for row, block in np.ndindex(shape):
        expected[offset(row, block, shape)] = linear[row, block]
    assert np.array_equal(arrange(name, linear), expected)
    assert LAYOUTS[name].padded(shape) == (up(shape[0], multiples[0]), up(shape[1], multiples[1]))


def test_every_layout_has_its_offsets() -> None:
    assert set(OFFSETS) == set(LAYOUTS)


def test_deepgemm_is_a_column_major_int32_matrix() -> None:
    words = (
        arrange("deepgemm", np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], np.uint8))
        .view("<i4")
        .reshape(2, 4)
        .T
    )
    assert words[:, 0].tolist() == [0x04030201, 0x09080706, 0, 0]
    assert words[:, 1].tolist() == [0x05, 0x0A, 0, 0]


# -------------------------------------------------------------------------------------------------
# round trips, refusals


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_restore_turns_arrange_back(name: str, shape: tuple[int, int]) -> None:
    linear = scales(shape)
    restored = restore(name, arrange(name, linear), shape)
    assert np.array_equal(restored, linear)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_number_of_bytes_is_refused(name: str, change: int) -> None:
    count = arrange(name, scales((130, 5))).size + change
    with pytest.raises(
        InputError,
        match=f"^{count} scale bytes; expected {count - change}, as {name} has them for 130 x 5$",
    ) as refused:
        restore(name, np.zeros(count, np.uint8), (130, 5))
    assert refused.value.code == "scale-layout"


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_restored_when_they_are_asked_for(name: str) -> None:
    linear, reads = scales((130, 5)), []
    stored = arrange(name, linear)
    rows = LAYOUTS[name].restore_lazily(lambda: reads.append(1) or stored.data, (130, 5))  # type: ignore[func-returns-value]
    assert not reads
    assert bytes(rows(3, 131)) == linear[3:].tobytes()
    assert bytes(rows(0, 1)) == linear[:1].tobytes()
    assert len(reads) == 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 4)])
def test_rows_alone_are_those_of_the_whole(name: str, shape: tuple[int, int]) -> None:
    """At the edges of tiles and between them."""
    linear = scales(shape)
    stored = arrange(name, linear).data
    rows, blocks = shape
    ends = {0, 1, 7, 8, 31, 127, 128, 129, rows} & set(range(rows + 1))
    for first, last in ((a, b) for a in ends for b in ends if a <= b):
        for few in {1, 3, 4, 5, blocks} & set(range(blocks + 1)):
            found = LAYOUTS[name].restore_rows(stored, shape, first, last, few)
            assert found.tobytes() == linear[first:last, :few].tobytes()
            assert found.shape == (last - first, few)


# --------------------------------------------------------------------------------------------------
# codes and scales


def test_parts_take_turns_and_come_apart() -> None:
    """Two rows of two blocks of two bytes, each with its scale; then two scales before four bytes,
    as GGUF has them.
    """
    packed, block_scales = (
        memoryview(bytes.fromhex("1011121320212223")),
        memoryview(bytes.fromhex("a0a1b0b1")),
    )
    assert bytes(interleave((packed, 2), (block_scales, 1))).hex() == "1011a01213a12021b02223b1"
    assert bytes(interleave((block_scales, 2), (packed, 4))).hex() == "a0a110111213b0b120212223"
    assert [
        bytes(each) for each in split_runs(interleave((packed, 2), (block_scales, 1)), 2, 1)
    ] == [packed, block_scales]
    assert [
        bytes(each) for each in split_runs(interleave((block_scales, 2), (packed, 4)), 2, 4)
    ] == [block_scales, packed]


def test_halves_of_a_run() -> None:
    """Codes 0 to 7 as pairs of neighbours, the first in bits 0-3; then 0 beside 4,
    1 beside 5, ...
    """
    pairs, halves = bytes.fromhex("10325476"), bytes.fromhex("40516273")
    assert bytes(to_halves(memoryview(pairs * 2), 4)) == halves * 2
    assert bytes(from_halves(memoryview(halves * 2), 4)) == pairs * 2
    noise = np.random.default_rng(1).integers(0, 256, 48, dtype=np.uint8)
    for nbytes in (8, 16):
        assert bytes(from_halves(to_halves(noise.data, nbytes), nbytes)) == noise.tobytes()
