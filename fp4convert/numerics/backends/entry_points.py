"""Name the entry points of kernels/*.cu, with their arguments in order.

Addresses are whatever the caller has: of a GPU's memory, or arrays of NumPy where kernels run on
the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp4convert.numerics.formats import FLOAT_TYPES, Format, Kind, kernel_of, rule_number

Call = tuple[str, tuple[Any, ...]]


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


def amax_call(x: Values, amax: Any) -> Call:
    """Raise the float32 at `amax` to the largest magnitude."""
    return f"amax_{x.word}", (x.address, x.n, amax)


def quantize_call(x: Values, q: Codes, rule: str, amax: Any, weights: tuple[Any, ...] = ()) -> Call:
    """Write codes and block scales.

    amax     of a float32; nothing reads it where the format has no global scale
    weights  address and number, under rule importance
    """
    group = (amax,) if q.format.has_global_scale else ()
    choice = (*group, *rule_number(q.format, rule), *weights)
    name = f"{kernel_of(q.format, rule)}_{x.word}"
    return name, (x.address, x.n, *choice, q.packed, q.block_scales)


def dequantize_call(q: Codes, y: Values) -> Call:
    """Write the values."""
    name = f"dequantize_{q.format.name}_{y.word}"
    return name, (q.packed, q.block_scales, y.n, *q.scale, y.address)


def compare_call(x: Values, q: Codes, sums: Any) -> Call:
    """Write the sums of every row."""
    name = f"compare_{q.format.name}_{x.word}"
    return name, (x.address, *x.shape, q.packed, q.block_scales, *q.scale, sums)
