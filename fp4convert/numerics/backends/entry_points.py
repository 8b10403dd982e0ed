"""Name the entry points of kernels: arguments, files and grids.

The CPU library has most under the same names. Addresses are whatever the caller has: of a GPU's
memory, or arrays of NumPy where kernels run on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp4convert.numerics.formats import FLOAT_TYPES, Format, Kind, kernel_of, rule_number

Call = tuple[str, tuple[Any, ...]]  # name and arguments


class Entry(NamedTuple):
    """Where a kernel stands, and what a block of threads takes.

    across  elements, or rows
    down    vectors, or columns
    """

    file: str
    across: int
    down: int = 1


ENTRIES = {  # by the beginning of a name; the heads of the files say the same
    **dict.fromkeys(("amax", "quantize"), Entry("quantize.cu", 8192)),
    **dict.fromkeys(("search", "weigh"), Entry("search.cu", 8192)),
    **dict.fromkeys(("grid", "quantize_fp8"), Entry("fp8.cu", 8192)),
    "row": Entry("fp8.cu", 32),
    "add": Entry("fp8.cu", 256),
    "dequantize": Entry("dequantize.cu", 8192),
    "gemv": Entry("gemv.cu", 32, 2),
    "compare": Entry("compare.cu", 8),
    "count": Entry("compare.cu", 1 << 17),
    "decode": Entry("decode.cu", 8192),
    "transpose_2": Entry("decode.cu", 128, 128),
    "transpose_4": Entry("decode.cu", 64, 64),
    "descend_nvfp4": Entry("descend.cu", 16),
    "descend_mxfp4": Entry("descend.cu", 8),
}
SOURCES = tuple(dict.fromkeys(entry.file for entry in ENTRIES.values()))


def entry_of(name: str) -> Entry:
    """Find the entry of a kernel by its name."""
    beginnings = (name, name.rpartition("_")[0], name.partition("_")[0])
    return next(ENTRIES[own] for own in beginnings if own in ENTRIES)


def grid_of(name: str, first: int, second: int = 1, matrices: int = 1) -> tuple[int, int, int]:
    """Count blocks of threads for elements, or rows and vectors or columns."""
    entry = entry_of(name)
    return -(-first // entry.across), -(-second // entry.down), matrices


class Values(NamedTuple):
    """A matrix of numbers, whose dtype is named as safetensors does."""

    dtype: str
    address: Any
    shape: tuple[int, int]

    @property
    def n(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def word(self) -> str:
        return FLOAT_TYPES[self.dtype].word


class Codes(NamedTuple):
    """A matrix in canonical form, as Quantized: addresses of its parts.

    global_scale  of the stored float32; nothing reads it where the format has none
    """

    format: Format
    packed: Any
    block_scales: Any
    global_scale: Any = 0
    kind: Kind = "multiplier"

    @property
    def scale(self) -> tuple[Any, ...]:
        """Return what stands for the global scale among the arguments."""
        is_divisor = int(self.kind == "divisor")
        return (self.global_scale, is_divisor) if self.format.has_global_scale else ()


class Vectors(NamedTuple):
    """Vectors that a matrix is multiplied with.

    kind   bf16, fp16 or nvfp4
    parts  addresses: of values or codes, of block scales and of the global scale, as a format has
           them
    """

    kind: str
    parts: tuple[Any, ...]
    n: int


def amax_call(x: Values, amax: Any) -> Call:
    """Raise the float32 at `amax` to the largest magnitude."""
    return f"amax_{x.word}", (x.address, x.n, amax)


def quantize_call(x: Values, q: Codes, rule: str, amax: Any, weights: tuple[Any, ...] = ()) -> Call:
    """Write codes and block scales.

    amax     of a float32; nothing reads it where the format has no global scale
    weights  address and number, under rule importance
    """
    name = f"{kernel_of(q.format, rule)}_{x.word}"
    group = (amax,) if q.format.has_global_scale else ()
    choice = (*group, *rule_number(q.format, rule), *weights)
    return name, (x.address, x.n, *choice, q.packed, q.block_scales)


def dequantize_call(q: Codes, y: Values) -> Call:
    """Write the values."""
    name = f"dequantize_{q.format.name}_{y.word}"
    return name, (q.packed, q.block_scales, y.n, *q.scale, y.address)


def compare_call(x: Values, q: Codes, sums: Any) -> Call:
    """Write the sums of every row."""
    name = f"compare_{q.format.name}_{x.word}"
    return name, (x.address, *x.shape, q.packed, q.block_scales, *q.scale, sums)


def grid_amax_call(x: Values, grid: Any, amaxes: Any) -> Call:
    """Raise the float32 of every block to its largest magnitude.

    grid  of five int64, as kernels/grid.cuh has them
    """
    return f"grid_amax_{x.word}", (x.address, grid, amaxes)


def quantize_fp8_call(x: Values, scales: Any, grid: Any, codes: Any) -> Call:
    """Write E4M3 codes."""
    return f"quantize_fp8_{x.word}", (x.address, scales, grid, codes)


def row_costs_call(x: Values, scales: Any, grid: Any, costs: Any) -> Call:
    """Write the cost of each block's rows; launched for as many."""
    return f"row_costs_{x.word}", (x.address, scales, grid, costs)


def compare_values_call(x: Values, y: Any, sums: Any) -> Call:
    """Write the sums of every row, of which y are the values afterwards."""
    return f"compare_values_{x.word}", (x.address, *x.shape, y, sums)


def count_call(packed: Any, nbytes: int, counts: Any) -> Call:
    """Add to int64 counts of codes; launched for 2 * nbytes elements."""
    return "count_codes", (packed, nbytes, counts)


def descend_call(given: tuple[Any, Any, Any], q: Codes, found: Codes, room: Any) -> Call:
    """Write codes and block scales that cost less; launched for rows.

    given  x, H and sizes, as kernels/descend.c names them
    q      what came in, whose kind is multiplier
    """
    parts = (q.packed, q.block_scales, found.packed, found.block_scales)
    return f"descend_{q.format.name}", (*given, *q.scale[:1], *parts, room)


def gemv_call(q: Codes, shape: tuple[int, int], x: Vectors, y: Any) -> Call:
    """Write fp16 products with vectors.

    Launched for rows, vectors and matrices, which follow each other without gaps.
    shape  of a matrix, rows and columns
    """
    matrix = (q.packed, q.block_scales, q.global_scale, int(q.kind == "divisor"), *shape)
    return f"gemv_{q.format.name}_{x.kind}", (*matrix, *x.parts, x.n, y)
