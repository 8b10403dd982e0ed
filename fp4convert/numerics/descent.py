"""Make codes and block scales cost less under H; the kernels' reference.

What is left is the cost of the errors e = x - value of a row, e^T H e, and r = H e is their pull.
The columns of a block scale are looked at together, one block after the other, `passes` times.
For each of the scales tried, every column j of the block in turn becomes the nearest to

  value_j + r_j / H_jj  =  x_j + (r_j - H_jj e_j) / H_jj

which is where the cost is least while all others stay; r follows.  The scale and the codes of least
cost are taken, if that is less than what was there; of equal costs the scale tried first.  It is
the block's own first, then those beside it, below before above, as far as NEIGHBOURS says.

Float32 one operation at a time, in the order written here, but for what has changed so far: its
product with H is in float64.  From it comes what a row costs now less what it cost,

  (e before + e after) . H (e after - e before)

and a row stays as it came in unless that is below 0.  So no row costs more than it did.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import (
    LARGEST_CODE,
    Bytes,
    Float32s,
    block_steps,
    decode_e2m1,
    encode_e2m1,
    pack,
    unpack,
)
from fp4convert.numerics.formats import E8M0_STORED_MAX, MXFP4, NVFP4, Format
from fp4convert.numerics.matrices import Quantized

NEIGHBOURS = {NVFP4: 3, MXFP4: 1}  # scales tried on either side
SCALE_BYTES = {NVFP4: (1, LARGEST_CODE), MXFP4: (0, E8M0_STORED_MAX)}  # the lowest and the highest

PANEL_ROWS = 256  # that share a strip of H in the kernel, if their elements are few
PANEL_ELEMENTS = 1 << 20
SIDE = 16  # rows that a kernel takes at once, or fewer
ELEMENT_NBYTES = 54  # of the kernel's room: laid_out in kernels/descend.c
ROW_NBYTES = 24
COLUMN_NBYTES = 128
GPU_ROWS, GPU_ELEMENT_NBYTES = 16, 34  # of whose multiples, and each element, is a GPU's room


def panel_rows(width: int) -> int:
    """Choose how many rows the kernel takes under blocks of H of a width."""
    return min(PANEL_ROWS, max(1, PANEL_ELEMENTS // width // SIDE) * SIDE)


def room_nbytes(width: int) -> int:
    """Return the memory that the kernel works in."""
    rows = panel_rows(width)
    return rows * (width * ELEMENT_NBYTES + ROW_NBYTES) + width * COLUMN_NBYTES


def gpu_room_nbytes(rows: int, width: int) -> int:
    """Return the memory that the kernel of a GPU works in."""
    return -(-rows // GPU_ROWS) * GPU_ROWS * width * GPU_ELEMENT_NBYTES


def check_shapes(x: Float32s, q: Quantized, h: Float32s) -> None:
    """Raise ValueError for what a kernel could not take."""
    columns, width, block = x.shape[1], h.shape[1], q.format.block_size
    if h.shape != (-(-columns // width), width, width) or width % block:
        expected = f"blocks of n columns that cover {columns}, n a multiple of {block}"
        raise ValueError(f"h of shape {h.shape}; expected {expected}")
    if q.shape != x.shape or q.kind != "multiplier":
        raise ValueError(f"codes of {q.shape} by a {q.kind}; expected {x.shape}, multiplier")


def aligned(h: Float32s, columns: int, fmt: Format) -> Float32s:
    """Join blocks of H until none ends within a block of the format."""
    count, width, _ = h.shape
    if count == 1:
        return h[:, :columns, :columns]
    together = fmt.block_size // math.gcd(width, fmt.block_size)
    if together == 1:
        return h
    joined = np.zeros((-(-count // together), together * width, together * width), np.float32)
    for number, block in enumerate(h):
        here = slice(number % together * width, (number % together + 1) * width)
        joined[number // together, here, here] = block
    return joined


def descend(x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
    """Return codes and block scales of a matrix that cost less.

    x       (rows, columns) float32, finite: what the codes stand for
    q       with a multiplier, if it has a global scale, which stays
    h       (k, n, n) float32: H, or the blocks along its diagonal, of which the last may reach
            beyond the columns; symmetric, finite, the diagonal above 0; n a multiple of the
            format's block size
    """
    rows, columns = x.shape
    block, width = q.format.block_size, h.shape[1]
    codes = unpack(np.frombuffer(q.packed, np.uint8).reshape(rows, -1))
    scales = np.frombuffer(q.block_scales, np.uint8).reshape(rows, -1).copy()
    table = steps_of(q)
    for first in range(0, columns, width):
        here = slice(first, min(first + width, columns))
        blocks = slice(first // block, here.stop // block)
        descent = _Descent(x[:, here], codes[:, here], scales[:, blocks], q.format, table)
        n = here.stop - here.start
        codes[:, here], scales[:, blocks] = descent.run(h[first // width, :n, :n], passes)
    found = pack(codes).reshape(-1).data, scales.reshape(-1).data
    return Quantized(q.format, q.shape, *found, q.global_scale, q.kind)


def steps_of(q: Quantized) -> Float32s:
    """Return what one code unit is worth under each byte of a block scale."""
    every = np.arange(256, dtype=np.uint8).data
    shape = (256, q.format.block_size)
    return block_steps(Quantized(q.format, shape, every, every, q.global_scale, q.kind))


class _Descent:
    """Rows in one block of H, as they came in and as they are."""

    def __init__(
        self, x: Float32s, codes: Bytes, scales: Bytes, fmt: Format, table: Float32s
    ) -> None:
        self._x, self._fmt, self._table = x, fmt, table
        self._before = codes, scales
        self._codes, self._scales = codes.copy(), scales.copy()
        steps = np.repeat(table[scales], fmt.block_size, axis=1)
        self._values_before = decode_e2m1(codes) * steps
        self._values = self._values_before.copy()

    def run(self, h: Float32s, passes: int) -> tuple[Bytes, Bytes]:
        """Pass over the columns; return the codes and scales of least cost."""
        with np.errstate(all="ignore"):
            # The pull of all errors that came in, once.
            error, pull = self._x - self._values, np.zeros_like(self._x)
            for j in range(len(h)):
                pull += error[:, j, None] * h[j]
            # Of each block what has changed since it was looked at: later columns in the pass
            # before, then the earlier ones in this pass.
            moved = np.zeros(self._x.shape)
            last, changes = np.zeros_like(moved), np.zeros_like(moved)
            for number in range(passes + 1):
                last, changes = changes, np.zeros_like(moved)
                for first in range(0, len(h), self._fmt.block_size):
                    here = slice(first, first + self._fmt.block_size)
                    _move(moved[:, here], last, h[:, here], range(first, len(h)))
                    _move(moved[:, here], changes, h[:, here], range(first))
                    if number < passes:
                        pulls = (moved[:, here] + pull[:, here]).astype(np.float32)
                        reach = NEIGHBOURS[self._fmt] if number == 0 else 1
                        changes[:, here] = self._choose(first, pulls, h[here, here], reach)
            cost = self._costs(moved)
        is_less = (cost < 0)[:, None]
        codes, scales = self._before
        return np.where(is_less, self._codes, codes), np.where(is_less, self._scales, scales)

    def _choose(self, first: int, pulls: Float32s, h: Float32s, reach: int) -> NDArray[np.float64]:
        """Choose scale and codes of a block; return how its values change."""
        here, block = slice(first, first + len(h)), first // len(h)
        values, own = self._values[:, here].copy(), self._scales[:, block].astype(np.int64)
        least = np.zeros(len(values), np.float32)
        lowest, highest = SCALE_BYTES[self._fmt]
        for offset in [0, *(sign * far for far in range(1, reach + 1) for sign in (-1, 1))]:
            candidate = own + offset
            steps = self._table[candidate & 0xFF]
            cost, codes = _sweep(values, pulls, h, steps)
            wins = (cost < least) & (candidate >= lowest) & (candidate <= highest)
            least[wins] = cost[wins]
            self._codes[wins, here], self._scales[wins, block] = codes[wins], candidate[wins]
            made = decode_e2m1(codes[wins]) * steps[wins, None]
            self._values[wins, here] = made
        return values.astype(np.float64) - self._values[:, here]

    def _costs(self, moved: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each row costs less what it cost, column after column."""
        x = self._x.astype(np.float64)
        errors = (x - self._values_before) + (x - self._values)
        cost = np.zeros(len(x))
        for j in range(x.shape[1]):
            cost += errors[:, j] * moved[:, j]
        return cost


def _move(
    moved: NDArray[np.float64], changes: NDArray[np.float64], h: Float32s, columns: range
) -> None:
    """Add the product of changes in these columns with H, one by one."""
    for j in columns:
        rows = changes[:, j] != 0
        moved[rows] += changes[rows, j, None] * h[j].astype(np.float64)


def _sweep(
    values: Float32s, pulls: Float32s, h: Float32s, steps: Float32s
) -> tuple[Float32s, Bytes]:
    """Round every column in turn; return the cost that adds, and codes."""
    p, cost = pulls.copy(), np.zeros(len(values), np.float32)
    codes, inverse = np.empty(values.shape, np.uint8), np.float32(1) / np.diagonal(h)
    for j in range(len(h)):
        codes[:, j] = encode_e2m1((values[:, j] + p[:, j] * inverse[j]) / steps)
        delta = values[:, j] - decode_e2m1(codes[:, j]) * steps
        cost += delta * (np.float32(2) * p[:, j] + delta * h[j, j])
        p += delta[:, None] * h[j]
    return cost, codes
