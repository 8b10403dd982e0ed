"""Call the CPU library, kernels/*.c, through ctypes.

Calls release the interpreter's lock, so threads run side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.backends import entry_points
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.entry_points import Codes, Values
from fp4convert.numerics.codec import (
    FLOAT_DTYPES,
    Bytes,
    Float32s,
    as_matrix,
    check_finite,
    check_importance,
    global_scale_of,
    weigh,
)
from fp4convert.numerics.formats import CODES, E8M0_STORED_MAX, ROW_SUMS, Format, check_rule
from fp4convert.numerics.fp8_int import Grid, amax_fp8, decode_fp8, grid_shape
from fp4convert.numerics.matrices import (
    PANEL_ELEMENTS,
    Blocks,
    Compared,
    Fp8Panel,
    Matrix,
    Quantized,
    Weights,
    row_panels,
)
from fp4convert.numerics.value_checks import check_range
from fp4convert.process import cpu_library, instruction_set, processors

if TYPE_CHECKING:
    from fp4convert.numerics.low_rank import Pulls

# Of a panel's codes and scales, and of a copy of it where a shard leaves it unaligned.
PANEL_ELEMENT_NBYTES = 4
# In a panel: 4 MB of bf16. Larger ones take less time, but would all lie across streamed pieces.
READ_ELEMENTS = 2 << 20
# The enum in kernels/scale_variance.c, and ROWS in kernels/low_rank.c.
PERIODS = (128, 64, 32, 16, 8, 4, 2, 1)
CELL_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TILE_ROWS = 16

Array = NDArray[np.generic]
Doubles = NDArray[np.float64]


class Cpu:
    """Runs on the copy of the kernels that fits this processor."""

    name = "cpu"

    def __init__(self) -> None:
        self._library = cpu_library()

    @property
    def threads(self) -> int:
        return processors()

    @property
    def instruction_set(self) -> str:
        """Name the copy of the kernels in use."""
        return instruction_set()

    def held_nbytes(self, threads: int, widest: int) -> int:
        return threads * PANEL_ELEMENT_NBYTES * max(PANEL_ELEMENTS, widest)

    def quantize_group(
        self,
        measured: Sequence[Weights],
        members: Sequence[Weights],
        fmt: Format,
        rule: str,
        given: Given = OWN,
    ) -> Iterator[tuple[int, Quantized]]:
        is_in_one_pass = given.amax is not None or (
            not fmt.has_global_scale and all(weights in members for weights in measured)
        )
        # Read all that is measured for its amax, which sets the global scale of every member.
        group_amax = (given.amax or 0.0) if is_in_one_pass else self.group_amax(measured)
        # Read panel by panel, quantize, and compare with what was read.
        for number, weights in enumerate(members):
            importance = given.importance[number] if given.importance else None
            for panel in _panels(weights):
                q = self.quantize(panel, fmt, rule, group_amax, importance)
                # MXFP4 gives Inf and NaN its largest scales, but for those of fp16.
                largest = _held(q.block_scales, (-1,)).max(initial=0)
                is_open = panel.dtype == "F16" or largest >= E8M0_STORED_MAX
                if is_in_one_pass and not given.is_own and (is_open or given.amax is not None):
                    given.note(number, check_finite(self.amax(panel)))
                yield number, replace(q, compared=self.compare(panel, q))

    def group_amax(self, measured: Sequence[Weights]) -> float:
        amax = 0.0
        for weights in measured:
            known = weights.amaxes()
            for one in map(self.amax, _panels(weights)) if known is None else known:
                amax = max(amax, check_finite(one))
        return amax

    def dequantize_panels(self, q: Blocks, dtype: str) -> Iterator[memoryview]:
        return (self.dequantize(q.rows(*panel), dtype) for panel in row_panels(q.shape))

    def fp8_passes(self, weights: Weights) -> AbstractContextManager[Cpu]:
        return nullcontext(self)

    def block_amaxes(self, weights: Weights, block: tuple[int, int]) -> Float32s:
        found = np.zeros(grid_shape(weights.shape, block), np.float32)
        for panel in row_panels(weights.shape):
            self.grid_amax(weights.rows(*panel), Grid(found, block, panel[0]))
        return found

    def block_costs(
        self, weights: Weights, block: tuple[int, int], candidates: Sequence[Float32s]
    ) -> Doubles:
        costs = np.zeros((len(candidates), *grid_shape(weights.shape, block)))
        for first, last in row_panels(weights.shape):
            x = weights.rows(first, last)
            for scales, own in zip(candidates, costs, strict=True):
                self.fp8_costs(x, Grid(scales, block, first), own)
        return costs

    def fp8_panels(
        self, weights: Weights, block: tuple[int, int], scales: Float32s
    ) -> Iterator[Fp8Panel]:
        for first, last in row_panels(weights.shape):
            x, grid = weights.rows(first, last), Grid(scales, block, first)
            codes = self.quantize_fp8(x, grid).reshape(-1).data
            values = self.decode_fp8(codes, x.shape, grid)
            yield Fp8Panel(first, x.shape, codes, self.compare_values(x, values))

    def amax(self, x: Matrix) -> float:
        """Find the largest magnitude, exact; Inf or NaN where there is one."""
        bits = np.zeros(1, np.uint32)
        self._run(entry_points.amax_call(_values(x), bits))
        return float(bits.view(np.float32)[0])

    def quantize(
        self,
        x: Matrix,
        fmt: Format,
        rule: str,
        group_amax: float,
        importance: Float32s | None = None,
    ) -> Quantized:
        """Quantize the rows; equals codec.quantize."""
        values = _values(x)
        packed = np.empty(values.n // 2, np.uint8)
        block_scales = np.empty(values.n // fmt.block_size, np.uint8)
        check_importance(rule, importance)
        weights = () if importance is None else (weigh(importance, x.shape[1], fmt), x.shape[1])
        amax, codes = np.array([group_amax], np.float32), Codes(fmt, packed, block_scales)
        self._run(entry_points.quantize_call(values, codes, rule, amax, weights))
        stored = float(global_scale_of(group_amax, rule)) if fmt.has_global_scale else None
        return Quantized(fmt, x.shape, packed.data, block_scales.data, stored)

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        """Read the values as bytes of `dtype`; equals codec.dequantize."""
        check_range(q, dtype)
        values = np.empty(q.shape[0] * q.shape[1], FLOAT_DTYPES[dtype])
        self._run(entry_points.dequantize_call(_codes(q), Values(dtype, values, q.shape)))
        return values.view(np.uint8).data

    def values(self, q: Quantized) -> Float32s:
        """Return (rows, columns) float32 values; equals codec.dequantize."""
        return np.frombuffer(self.dequantize(q, "F32"), np.float32).reshape(q.shape)

    def study(
        self,
        x: Float32s,
        fmt: Format,
        rule: str,
        group_amax: float,
        importance: Float32s | None = None,
    ) -> Float32s:
        """Round to blocks that no engine reads: NVFP4 32 or 64, MXFP4 16 or 64.

        Returns the values: equals codec.dequantize of codec.quantize
        """
        check_importance(rule, importance)
        values, amax = _values(as_matrix(x)), np.array([group_amax], np.float32)
        weights = 0 if importance is None else weigh(importance, x.shape[1], fmt)
        sizes = values.n, fmt.block_size, fmt.scale_rules.index(check_rule(fmt, rule))
        y = np.empty(x.shape, np.float32)
        self._call(f"study_{fmt.name}", values.address, *sizes, amax, weights, x.shape[1], y)
        return y

    def compare(self, x: Matrix, q: Quantized) -> Compared:
        """Measure what rows lost by their codes; equals error_sums.compare."""
        codes = _codes(q)
        sums, counts = np.empty((x.shape[0], ROW_SUMS)), np.zeros(CODES, np.int64)
        self._run(entry_points.compare_call(_values(x), codes, sums))
        self._run(entry_points.count_call(codes.packed, codes.packed.size, counts))
        return Compared(sums.reshape(-1).view(np.uint8).data, counts.view(np.uint8).data)

    def compare_values(self, x: Matrix, y: Float32s) -> Compared:
        """Measure what rows lost where y are their values afterwards.

        Equals error_sums.compare_values.
        """
        sums = np.empty((x.shape[0], ROW_SUMS))
        self._run(entry_points.compare_values_call(_values(x), _checked(y, x.shape), sums))
        return Compared(sums.reshape(-1).view(np.uint8).data, memoryview(b""))

    def decode_fp8(
        self, codes: memoryview, shape: tuple[int, int], grid: Grid, dtype: str = "F8_E4M3"
    ) -> Float32s:
        """Return (rows, columns) float32 values; equals fp8_int.decode_fp8."""
        if dtype != "F8_E4M3":
            return decode_fp8(codes, shape, grid, dtype)
        values = np.empty(shape, np.float32)
        self._call("decode_fp8", _held(codes, shape), *native_grid(grid, shape), values)
        return values

    def amax_fp8(
        self, codes: memoryview, shape: tuple[int, int], grid: Grid, dtype: str = "F8_E4M3"
    ) -> float:
        """Find the largest magnitude of those values; equals fp8_int.amax_fp8."""
        if dtype != "F8_E4M3":
            return amax_fp8(codes, shape, grid, dtype)
        bits = np.zeros(1, np.uint32)
        self._call("amax_fp8", _held(codes, shape), *native_grid(grid, shape), bits)
        return float(bits.view(np.float32)[0])

    def decode_integers(
        self,
        packed: memoryview,
        shape: tuple[int, int],
        grid: Grid,
        bits: int = 4,
        zero_points: Float32s | None = None,
    ) -> Float32s:
        """Return (rows, columns) float32; equals fp8_int.decode_integers."""
        scales, layout = native_grid(grid, shape)
        zeros = 0 if zero_points is None else _checked(zero_points, scales.shape)
        values = np.empty(shape, np.float32)
        items = _held(packed, (shape[0], -(-shape[1] * bits // 32), 4))
        self._call(f"decode_int{bits}", items, scales, zeros, layout, values)
        return values

    def grid_amax(self, x: Matrix, grid: Grid) -> None:
        """Raise scales to amaxes of blocks; equals fp8_int.grid_amax."""
        amaxes, layout = native_grid(grid, x.shape)
        self._run(entry_points.grid_amax_call(_values(x), layout, amaxes))

    def quantize_fp8(self, x: Matrix, grid: Grid) -> Bytes:
        """Return (rows, columns) E4M3 codes; equals fp8_int.quantize_fp8."""
        codes, tables = np.empty(x.shape, np.uint8), native_grid(grid, x.shape)
        self._run(entry_points.quantize_fp8_call(_values(x), *tables, codes))
        return codes

    def fp8_costs(self, x: Matrix, grid: Grid, costs: Doubles) -> None:
        """Add costs of blocks; equals fp8_int.fp8_costs."""
        if costs.shape != grid.scales.shape or not costs.flags.c_contiguous:
            raise ValueError(f"costs of shape {costs.shape}; expected {grid.scales.shape}")
        values, tables = _values(x), native_grid(grid, x.shape)
        self._call(f"fp8_costs_{values.word}", values.address, *tables, costs)

    def transpose(self, stored: Matrix, columns: range) -> Matrix:
        """Return columns of a stored matrix as rows; equals fp8_int.transpose."""
        raw, (rows, width) = np.frombuffer(stored.data, np.uint8), stored.shape
        nbytes = raw.size // (rows * width)
        if columns and not 0 <= columns[0] <= columns[-1] < width:
            raise ValueError(f"columns {columns} of a matrix of {width}")
        turned = np.empty(len(columns) * rows * nbytes, np.uint8)
        numbers = rows, width, columns.start, columns.step, len(columns)
        self._call(f"transpose_{nbytes}", raw, *numbers, turned)
        return Matrix(turned.data, stored.dtype, (len(columns), rows))

    def count_bytes(self, stored: memoryview | Bytes) -> NDArray[np.int64]:
        """Count how often each byte of contiguous data occurs: (256,) int64."""
        counts, flat = np.zeros(256, np.int64), np.frombuffer(stored, np.uint8)
        self._call("count_bytes", flat, flat.size, counts)
        return counts

    def sum_cells(
        self, codes: Bytes, values: Doubles, runs: Sequence[int]
    ) -> tuple[Doubles, float]:
        """Sum the cells of a matrix: (runs and PERIODS, CELL_WIDTHS, 3) float64.

        tests/kernels/test_scale_variance.py defines it and count_bytes.
        codes    (rows, blocks) uint8: each is one of the values less their mean; not finite: 0
        values   (256,) float64
        runs     how many rows a cell has, each >= 1
        Returns  for the runs, then PERIODS, and each of CELL_WIDTHS, added up: the squares of the
                 sums of cells, all elements in cells, the squares of these; and the squares of the
                 sums of rows
        """
        if codes.ndim != 2 or codes.dtype != np.uint8:
            raise ValueError(f"codes of shape {codes.shape}, {codes.dtype}; expected 2 axes, uint8")
        if values.shape != (256,) or values.dtype != np.float64:
            raise ValueError(f"values of shape {values.shape}; expected (256,), float64")
        if min(runs, default=1) < 1:
            raise ValueError(f"runs {tuple(runs)}; expected rows, 1 or more")
        rows, blocks = codes.shape
        sums = np.zeros((len(runs) + len(PERIODS)) * len(CELL_WIDTHS) * 3 + 1)
        of_cells = (rows + 1 + PERIODS[0]) * 3 * min(blocks, CELL_WIDTHS[-1])
        room = np.empty(rows * (blocks + 1) + of_cells)
        tables = np.ascontiguousarray(codes), np.ascontiguousarray(values)
        self._call(
            "sum_cells", *tables, rows, blocks, np.array(runs, np.int64), len(runs), room, sums
        )
        return sums[:-1].reshape(-1, len(CELL_WIDTHS), 3), float(sums[-1])

    def descend(self, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
        """Find codes and scales that cost less; equals descent.descend."""
        from fp4convert.numerics.descent import check_shapes, panel_rows, room_nbytes

        check_shapes(x, q, h)
        (rows, columns), width = x.shape, h.shape[1]
        room = np.empty(room_nbytes(width) + 64, np.uint8)
        room = room[-room.ctypes.data % 64 :]
        codes = _codes(q)
        found = np.empty_like(codes.packed), np.empty_like(codes.block_scales)
        inputs = _checked(h.reshape(-1, width), (h.shape[0] * width, width))
        sizes = np.array([rows, columns, width, passes, panel_rows(width)], np.int64)
        given = _checked(x, q.shape), inputs, sizes
        self._run(entry_points.descend_call(given, codes, Codes(q.format, *found), room))
        packed, block_scales = (part.reshape(-1).data for part in found)
        return replace(q, packed=packed, block_scales=block_scales, compared=None)

    def compensate(self, matrices: Sequence[Array], columns: range) -> None:
        """Round columns of GPTQ; kernels/compensate.c says which matrices."""
        sizes = np.array([*matrices[0].shape, columns.start, columns.stop], np.int64)
        self._call("compensate", matrices[0], sizes, *matrices[1:])

    def to_bf16(self, values: Float32s) -> memoryview:
        """Round values to bytes of bf16, half to even; NaN stays NaN."""
        rounded = np.empty(values.size, np.uint16)
        self._call("round_bf16", np.ascontiguousarray(values), values.size, rounded)
        return rounded.view(np.uint8).data

    def multiply(self, b: Float32s, a: Float32s) -> Float32s:
        """Return b @ a in float32; equals low_rank.multiply."""
        rows, inner, columns = *b.shape, a.shape[1]
        y = np.empty((rows, columns), np.float32)
        wide = _checked(b, (rows, inner)), _checked(a, (inner, columns))
        self._call("multiply", *wide, rows, inner, columns, y)
        return y

    def pull_to_nearest(
        self, x: Float32s, steps: Float32s, pulls: Pulls, y: Float32s, pulled: Float32s
    ) -> tuple[Float32s, Float32s]:
        """Round every column once more; equals low_rank.pull_to_nearest."""
        (rows, columns), rank = x.shape, pulled.shape[1]
        own, worth, values, sums = (_in_tiles(part) for part in (x, steps, y, pulled))
        worth[-1, :, rows - (len(own) - 1) * TILE_ROWS :] = 1
        directions, amounts = (_checked(part, (columns, rank)) for part in pulls)
        sizes = np.array([len(own), columns, rank, columns // steps.shape[1]], np.int64)
        self._call("pull_to_nearest", own, worth, directions, amounts, sizes, values, sums)
        found, left = (part.swapaxes(1, 2).reshape(-1, part.shape[1]) for part in (values, sums))
        return found[:rows], left[:rows]

    def _run(self, call: entry_points.Call) -> None:
        self._call(call[0], *call[1])

    def _call(self, name: str, *arguments: Array | int) -> None:
        # The library keeps what getattr finds; an item is made anew.
        native = (
            ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data)
            for a in arguments
        )
        getattr(self._library, name)(*native)


def _panels(weights: Weights) -> Iterator[Matrix]:
    return (weights.rows(first, last) for first, last in row_panels(weights.shape, READ_ELEMENTS))


def _values(x: Matrix) -> Values:
    """Return the values; a copy where a header left them unaligned."""
    values = np.frombuffer(x.data, FLOAT_DTYPES[x.dtype]).reshape(x.shape)
    return Values(x.dtype, values if values.flags.aligned else values.copy(), x.shape)


def _held(stored: memoryview, shape: tuple[int, ...]) -> Array:
    """Return the bytes in that shape; ValueError where they do not fit."""
    return np.frombuffer(stored, np.uint8).reshape(shape)


def _codes(q: Quantized) -> Codes:
    """Return the parts of a matrix; ValueError where they do not fit."""
    rows, columns = q.shape
    block_scales = _held(q.block_scales, (rows, columns // q.format.block_size))
    stored = np.array([q.global_scale or 0], np.float32)
    return Codes(q.format, _held(q.packed, (rows, columns // 2)), block_scales, stored, q.kind)


def native_grid(grid: Grid, shape: tuple[int, int]) -> tuple[Float32s, NDArray[np.int64]]:
    """Return scales for every block, and what kernels call a grid."""
    scales = _checked(grid.scales, grid_shape((grid.first_row + shape[0], shape[1]), grid.block))
    return scales, np.array([*shape, *grid.block, grid.first_row], np.int64)


def _in_tiles(values: Float32s) -> Float32s:
    """Copy a matrix as (tiles, columns, TILE_ROWS); rows of zeros fill it up."""
    rows, columns = values.shape
    padded = np.zeros((-(-rows // TILE_ROWS), TILE_ROWS, columns), np.float32)
    padded.reshape(-1, columns)[:rows] = values
    return np.ascontiguousarray(padded.swapaxes(1, 2))


def _checked(scales: Float32s, shape: tuple[int, ...]) -> Float32s:
    """Return the scales, contiguous; ValueError where they do not fit."""
    if scales.shape[0] < shape[0] or scales.shape[1:] != shape[1:]:
        raise ValueError(f"scales of shape {scales.shape}; expected {shape}")
    return np.ascontiguousarray(scales, np.float32)
