"""gemv.cu, run on the host by simt.py, against float64 products of what codec.py makes of the same
codes.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from adversarial import generator
from numpy.typing import NDArray
from ptx import BUILDS
from simt import KERNELS, aligned, guarded, is_intact, launch, survives, walled

from fp4convert.numerics import codec
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import FP4_FORMATS, MXFP4, NVFP4, Format, Kind
from fp4convert.numerics.matrices import Quantized

Float64s = NDArray[np.float64]
Float16s = NDArray[np.float16]
COLUMNS, ROWS, VECTORS = (64, 128, 320, 2112), (1, 3, 32, 33), (1, 2, 3, 5, 8)
HALVES = {"bf16": "BF16", "fp16": "F16"}
EVERY_W = pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
EVERY_X = pytest.mark.parametrize("word", [*HALVES, "nvfp4"])


@dataclass(frozen=True)
class Vectors:
    """Vectors as a kernel takes them: bits of a 16-bit dtype, or packed codes with E4M3 block
    scales and a global scale.
    """

    word: str
    data: NDArray[np.generic]  # (vectors, bytes)
    scales: NDArray[np.uint8]  # (vectors, columns / 16)
    global_scale: float

    def values(self) -> Float64s:
        if self.word in HALVES:
            return self.data.view(FLOAT_DTYPES[HALVES[self.word]]).astype(np.float64)
        columns = 2 * self.data.shape[1]
        parts = (np.ascontiguousarray(part).reshape(-1).data for part in (self.data, self.scales))
        return codec.dequantize(
            Quantized(NVFP4, (len(self.data), columns), *parts, self.global_scale)
        ).astype(np.float64)

    def __getitem__(self, chosen: slice) -> Vectors:
        return replace(self, data=self.data[chosen], scales=self.scales[chosen])


@pytest.fixture(scope="module", params=BUILDS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    build, has_cvt = request.param
    return build(KERNELS / "gemv.cu", tmp_path_factory.mktemp("gemv"), has_cvt)


def vectors_of(values: Float64s, word: str) -> Vectors:
    """`values` in the kernel's type; for nvfp4, quantized under a global scale of 1/4."""
    if word in HALVES:
        narrow = values.astype(np.float32).astype(FLOAT_DTYPES[HALVES[word]])
        return Vectors(word, narrow.view(np.uint8), np.zeros((len(values), 0), np.uint8), 1.0)
    q = codec.quantize(values.astype(np.float32), NVFP4, "amax", 2688 / 4)
    assert q.global_scale == 0.25
    packed, scales = (
        np.frombuffer(part, np.uint8).reshape(len(values), -1)
        for part in (q.packed, q.block_scales)
    )
    return Vectors(word, packed, scales, q.global_scale)


def weights(rows: int, columns: int, fmt: Format, kind: Kind) -> Quantized:
    """Any codes; block scales of both ends of a few binades, and any mantissa."""
    rng = generator(30, rows, columns)
    low, high = (0x20, 0x48) if fmt is NVFP4 else (120, 130)
    scales = rng.integers(low, high, rows * columns // fmt.block_size).astype(np.uint8)
    stored = None if fmt is MXFP4 else 0.037 if kind == "multiplier" else 27.3
    stored = None if stored is None else float(np.float32(stored))
    return Quantized(
        fmt, (rows, columns), memoryview(rng.bytes(rows * columns // 2)), scales.data, stored, kind
    )


def gemv(library: ctypes.CDLL, q: Quantized, x: Vectors) -> Float16s:
    """(vectors, rows) fp16 of one matrix."""
    return multiply(library, [q], [x])[0]


def multiply(library: ctypes.CDLL, batch: list[Quantized], xs: list[Vectors]) -> Float16s:
    """(matrices, vectors, rows) fp16, in one launch; every buffer guarded, and NaN where a kernel
    must not look.
    """
    q, x = batch[0], xs[0]
    (rows, columns), vectors = q.shape, len(x.data)
    stored = [np.nan if q.global_scale is None else q.global_scale for q in batch]
    x_global = [np.nan if x.word in HALVES else x.global_scale for x in xs]
    matrix = [
        b"".join(part) for part in zip(*((q.packed, q.block_scales) for q in batch), strict=True)
    ]
    given = [np.concatenate(part) for part in zip(*((x.data, x.scales) for x in xs), strict=True)]
    parts = (*matrix, np.float32(stored), *map(np.ascontiguousarray, given), np.float32(x_global))
    buffers = [aligned(part) for part in parts]
    y = guarded(2 * len(batch) * vectors * rows)
    w, own = ([buffer.ctypes.data for buffer in part] for part in (buffers[:3], buffers[3:]))
    arguments = (*w, int(q.kind == "divisor"), rows, columns, *own, vectors, y.ctypes.data)
    grid = (-(-rows // 32), -(-vectors // 2), len(batch))
    launch(library, f"gemv_{q.format.name}_{x.word}", grid, arguments)
    assert all(is_intact(buffer) for buffer in (*buffers, y)), "written beside a buffer"
    return y.view(np.float16).reshape(len(batch), vectors, rows)


def assert_close(found: Float16s, q: Quantized, x: Vectors) -> None:
    """Within what float32 additions and one rounding to fp16 may lose.

    A term passes at most 16 additions inside its block, two for each tile its lane takes, 5 between
    lanes, and 8 other roundings:
    products with the block scale of x, 1 / divisor and the two global scales here, two of w and two
    of x in codec.dequantize.
    With k roundings, each off by at most 2^-24 of what it rounds, the sum is off by at most 1.01 k
    2^-24 times the sum of
    magnitudes (Higham, Accuracy and Stability, section 3.1).  fp16 adds half its last place: 2^-11
    of the value, or 2^-25.
    """
    w, values = codec.dequantize(q).astype(np.float64), x.values()
    exact, magnitude = values @ w.T, np.abs(values) @ np.abs(w).T
    roundings = 16 + 2 * -(-q.shape[1] // 1024) + 5 + 8
    before = 1.01 * roundings * 2.0**-24 * magnitude
    bound = before + 2.0**-11 * (np.abs(exact) + before) + 2.0**-25
    wrong = np.argwhere(~(np.abs(found.astype(np.float64) - exact) <= bound))
    at = tuple(int(i) for i in wrong[0]) if len(wrong) else ()
    assert not len(wrong), (
        f"{len(wrong)} wrong, first vector and row {at}: {found[at]}, expected {exact[at]} +- "
        f"{bound[at]}"
    )


@pytest.mark.sweep(8)
@EVERY_X
@EVERY_W
@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
def test_every_shape(library: ctypes.CDLL, fmt: Format, word: str, kind: Kind) -> None:
    for columns in COLUMNS:
        x = vectors_of(generator(31, columns).normal(0, 1, (max(VECTORS), columns)), word)
        for rows in ROWS:
            q = weights(rows, columns, fmt, kind)
            for count in VECTORS:
                assert_close(gemv(library, q, x[:count]), q, x[:count])


@pytest.mark.parametrize("vectors", [1, 3])
@EVERY_X
@EVERY_W
@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
def test_a_batch_of_matrices_each_with_vectors_of_its_own(
    library: ctypes.CDLL, fmt: Format, word: str, kind: Kind, vectors: int
) -> None:
    """No two matrices, global scales, vectors and scales of them are alike."""
    whole = weights(3 * 33, 320, fmt, kind)
    batch = [whole.rows(33 * z, 33 * (z + 1)) for z in range(3)]
    if fmt is NVFP4:
        batch = [replace(q, global_scale=whole.global_scale * 2.0**z) for z, q in enumerate(batch)]
    own = vectors_of(generator(33).normal(0, 1, (3 * vectors, 320)), word)
    xs = [
        replace(own[z * vectors : (z + 1) * vectors], global_scale=own.global_scale * 2.0**-z)
        for z in range(3)
    ]
    for found, q, x in zip(multiply(library, batch, xs), batch, xs, strict=True):
        assert_close(found, q, x)


@EVERY_X
@EVERY_W
def test_a_vector_does_not_depend_on_its_neighbours(
    library: ctypes.CDLL, fmt: Format, word: str
) -> None:
    q = weights(33, 2112, fmt, "multiplier")
    x = vectors_of(generator(32).normal(0, 1, (5, 2112)), word)
    together = gemv(library, q, x)
    for k in range(5):
        alone = gemv(library, q, x[k : k + 1])
        assert together[k].tobytes() == alone[0].tobytes(), f"vector {k} of 5"


@pytest.mark.sweep(8)
@EVERY_X
@EVERY_W
def test_nothing_is_read_behind_an_input(library: ctypes.CDLL, fmt: Format, word: str) -> None:
    one = aligned(np.ones(1, np.float32))
    for columns, rows, vectors in itertools.product((64, 2112), (1, 33), (1, 3)):
        x_nbytes = vectors * columns * 2 if word in HALVES else vectors * columns // 2
        sizes = (
            rows * columns // 2,
            rows * columns // fmt.block_size,
            x_nbytes,
            vectors * columns // 16,
        )
        packed, scales, x, x_scales = (walled(size) for size in sizes)
        y = guarded(2 * vectors * rows)
        matrix, given = (packed, scales, one), (x, x_scales, one)
        w, xs = ([buffer.ctypes.data for buffer in part] for part in (matrix, given))
        arguments = (*w, 0, rows, columns, *xs, vectors, y.ctypes.data)
        call = partial(
            launch,
            library,
            f"gemv_{fmt.name}_{word}",
            (-(-rows // 32), -(-vectors // 2)),
            arguments,
        )
        assert survives(call), (
            f"{vectors} vectors, {rows} rows, {columns} columns: read behind an input"
        )


@EVERY_X
@EVERY_W
def test_unit_vectors_give_every_code_at_every_place(
    library: ctypes.CDLL, fmt: Format, word: str
) -> None:
    """Row r, column c holds code r + c: all 16 in each place of a word; sums of one product and
    zeros are exact.
    """
    columns, one = 64, 6.0  # which nvfp4 holds, too
    codes = (np.arange(33)[:, None] + np.arange(columns)).astype(np.uint8) % 16
    per_row = columns // fmt.block_size  # block scales: powers of two, each unlike its neighbours
    scales = (np.arange(33)[:, None] + 3 * np.arange(per_row)) % 7 * (8 if fmt is NVFP4 else 1) + (
        0x28 if fmt is NVFP4 else 124
    )
    stored = 0.5 if fmt is NVFP4 else None
    q = Quantized(
        fmt,
        codes.shape,
        codec.pack(codes).ravel().data,
        scales.astype(np.uint8).ravel().data,
        stored,
    )
    x = vectors_of(one * np.eye(columns), word)
    assert (x.values() == one * np.eye(columns)).all()
    assert (gemv(library, q, x) == one * codec.dequantize(q).T).all()


@pytest.mark.parametrize("word", HALVES)
@EVERY_W
def test_every_block_scale(library: ctypes.CDLL, fmt: Format, word: str) -> None:
    """Each byte, NaN included, times 1 in its block alone: exact until the rounding to fp16, which
    makes Inf beyond 65504.
    """
    columns, last = 64, 64 // fmt.block_size - 1
    codes = np.full((256, columns), 2, np.uint8)  # 1.0
    scales = np.full((256, last + 1), 0x38 if fmt is NVFP4 else 127, np.uint8)
    scales[:, last] = np.arange(256)
    stored = 1.5 if fmt is NVFP4 else None
    q = Quantized(fmt, codes.shape, codec.pack(codes).ravel().data, scales.ravel().data, stored)
    found = gemv(library, q, vectors_of(np.eye(columns)[[columns - 1]], word))[0]
    with np.errstate(over="ignore"):
        expected = codec.dequantize(q)[:, -1].astype(np.float16)
    assert found.tobytes() == expected.tobytes() or np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
@EVERY_X
@EVERY_W
def test_overflow_is_infinite(library: ctypes.CDLL, fmt: Format, word: str, kind: Kind) -> None:
    """1365 ones times 48 are 65520, the first value that fp16 rounds to Inf; with one less, 65472,
    which fp16 holds.
    """
    rows, columns = 3, 1408
    codes = np.full((rows, columns), 2, np.uint8)
    codes[:, 1365:] = 0
    codes[1] |= 8
    codes[2, 0] = 0
    scales = np.full((rows, columns // fmt.block_size), 0x38 if fmt is NVFP4 else 127, np.uint8)
    stored = None if fmt is MXFP4 else 1.0
    q = Quantized(
        fmt, codes.shape, codec.pack(codes).ravel().data, scales.ravel().data, stored, kind
    )
    x = vectors_of(np.full((2, columns), 48.0), word)
    assert (x.values() == 48).all()
    assert gemv(library, q, x).tolist() == [[np.inf, -np.inf, 65472.0]] * 2
