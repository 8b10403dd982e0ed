"""Choose rows that stand for a model, and measure what they lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fp4convert.calibration.input_power import Inputs, column_power, output_power, weighted
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.module_names import split_numbers
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import (
    FLOAT_DTYPES,
    Float32s,
    as_floats,
    as_matrix,
    dequantize,
    not_finite,
    quantize,
)
from fp4convert.numerics.formats import FORMATS, FP8, IMPORTANCE
from fp4convert.numerics.fp8_int import through_fp8
from fp4convert.numerics.matrices import Weights

STUDIED_BLOCKS = (16, 32, 64)
ROW, TENSOR = "row", "tensor"
BF16 = "bf16"
_SCALE_BITS = 8  # of a block
_WORD_BITS = 32  # of a global scale, and of one of FP8
_BYTE_BITS = 8


class Way(NamedTuple):
    """A form that a matrix can take.

    format  nvfp4, mxfp4, fp8 or bf16
    rule    that sets the block scales; None where there are none
    block   columns to a block; "row" or "tensor" for what shares a scale of FP8; None for bf16
    """

    format: str
    rule: str | None = None
    block: int | str | None = None

    @property
    def is_for_study(self) -> bool:
        """True where no engine reads such blocks."""
        return self.format in FORMATS and self.block != FORMATS[self.format].block_size

    @property
    def is_fp4(self) -> bool:
        return self.format in FORMATS

    def fits(self, columns: int) -> bool:
        """True where a row is made of whole blocks."""
        return not isinstance(self.block, int) or columns % self.block == 0

    def nbits(self, shape: tuple[int, int]) -> float:
        """Bits that a matrix of that shape takes, scales and all."""
        weights = shape[0] * shape[1]
        if isinstance(self.block, int):
            word = _WORD_BITS if FORMATS[self.format].has_global_scale else 0
            return weights * (_BYTE_BITS // 2 + _SCALE_BITS / self.block) + word
        if self.format == FP8.name:
            return weights * _BYTE_BITS + _WORD_BITS * (shape[0] if self.block == ROW else 1)
        return weights * 2 * _BYTE_BITS


def ways(is_calibrated: bool) -> list[Way]:
    """All forms that are compared: both formats, every rule, every block size; FP8 and bf16 to compare with."""
    fp4 = [
        Way(fmt.name, rule, block)
        for fmt in FORMATS.values()
        for rule in fmt.scale_rules
        for block in STUDIED_BLOCKS
        if rule != IMPORTANCE or is_calibrated
    ]
    return [*fp4, Way(FP8.name, "amax", ROW), Way(FP8.name, "amax", TENSOR), Way(BF16)]


class Loss(NamedTuple):
    """What one matrix loses in one form.

    nmse    sum (w - v)^2 / sum w^2
    output  sum |(W - V) x|^2 / sum |W x|^2
    """

    nmse: float
    output: float


def losses_of(x: Float32s, inputs: Inputs, chosen: list[Way]) -> Iterator[Loss]:
    """The loss of that matrix in every form that fits it; NumericError on NaN or infinity.

    x  (rows, columns), some rows of a matrix or all of them; their amax sets the global scale
    """
    if not np.isfinite(x).all():
        raise not_finite()
    signal, output = _of_weights(x), output_power(x, inputs)
    for way in chosen:
        error = x - rounded(x, way, inputs.moments)
        yield Loss(_ratio(_of_weights(error), signal), _ratio(output_power(error, inputs), output))


def _of_weights(matrix: Float32s) -> float:
    return weighted(column_power(matrix), None)


def _ratio(noise: float, signal: float) -> float:
    return noise / signal if signal else 0.0


def rounded(x: Float32s, way: Way, importance: Float32s | None = None) -> Float32s:
    """The values of that form of a matrix.

    importance  of the columns, for the rule of that name
    """
    if isinstance(way.block, int):
        fmt, amax = FORMATS[way.format], float(np.abs(x).max(initial=0))
        given = importance if way.rule == IMPORTANCE else None
        if way.is_for_study:
            return dequantize(
                quantize(x, replace(fmt, block_size=way.block), str(way.rule), amax, given)
            )
        q = Cpu().quantize(as_matrix(x), fmt, str(way.rule), amax, given)
        return Cpu().values(q)
    if way.format == BF16:
        return x.astype(FLOAT_DTYPES["BF16"]).astype(np.float32)
    return through_fp8(x, (1, x.shape[1]) if way.block == ROW else (x.shape[0], x.shape[1]))


def rows_of(weights: Weights, strips: tuple[tuple[int, int], ...]) -> Float32s:
    """Those ranges of rows of a matrix, one below the other."""
    return np.concatenate([as_floats(weights.rows(first, last)) for first, last in strips])


USUAL_NBYTES = 20 * 10**6
MOST_MATRICES = 128  # of a kind: more of them say the same, and each is some requests to a Hub
MOST_STRIPS = 8  # of a matrix
STRIP_NBYTES = 1 << 20
ANY = "*"
TURN = (
    0.618034  # of a matrix from one sample to the next, so that no place in a matrix is preferred
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of one matrix.

    strips  (first, last + 1) of ranges of whole rows, ascending
    nbytes  that reading them takes
    """

    linear: Linear
    strips: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def rows(self) -> int:
        return sum(last - first for first, last in self.strips)


def kinds_of(linears: Mapping[str, Linear]) -> dict[str, list[Linear]]:
    """Matrices by kind: the glob of their names, with a star for every number; kinds in the order of the source."""
    found: dict[str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        texts, _ = split_numbers(module)
        found[ANY.join(texts)].append(linear)
    return dict(found)


def short_names(kinds: Sequence[str]) -> dict[str, str]:
    """What to call each kind: the fewest last parts of its glob that no other kind ends with, and that begin with a word."""
    ends: dict[str, int] = defaultdict(int)
    for kind in kinds:
        for end in _ends(kind):
            ends[end] += 1
    return {kind: next((end for end in _ends(kind) if ends[end] == 1), kind) for kind in kinds}


def _ends(kind: str) -> list[str]:
    parts = kind.split(".")
    return [".".join(parts[at:]) for at in range(len(parts) - 1, -1, -1) if parts[at] != ANY]


def draw_sample(
    kinds: Mapping[str, Sequence[Linear]], nbytes: int | None = None
) -> dict[str, list[Sample]]:
    """Samples of every kind that take at most so many bytes together, the same for the same source.

    nbytes  None for USUAL_NBYTES, or what a row of every kind takes where that is more
    Raises  InputError where it is less than a row of every kind
    """
    least = {kind: min(map(_least_nbytes, linears)) for kind, linears in kinds.items()}
    nbytes = max(USUAL_NBYTES, sum(least.values())) if nbytes is None else nbytes
    if sum(least.values()) > nbytes:
        detail = f"--sample {nbytes / 1e9:g} GB does not hold a row of each of {len(kinds)} kinds of modules"
        detail = f"{detail}; expected at least {sum(least.values()) / 1e9:.3g} GB"
        raise InputError("sample-size", detail, "Take more, or leave kinds out: --exclude PATTERN.")
    shares = _dealt(kinds, least, nbytes)
    return {kind: _sample_kind(linears, shares[kind]) for kind, linears in kinds.items()}


def _dealt(
    kinds: Mapping[str, Sequence[Linear]], least: Mapping[str, int], nbytes: int
) -> dict[str, int]:
    """The same share for every kind, as far as it can use it, and at least what its smallest row takes."""
    most = {kind: sum(map(_nbytes_read, linears)) for kind, linears in kinds.items()}
    shares = dict(least)
    left = nbytes - sum(least.values())
    open_kinds = set(kinds)
    while open_kinds and left >= len(open_kinds):
        each = left // len(open_kinds)
        for kind in sorted(open_kinds):
            more = min(each, most[kind] - shares[kind])
            shares[kind] += more
            left -= more
        open_kinds = {kind for kind in open_kinds if shares[kind] < most[kind]}
    return shares


def _sample_kind(linears: Sequence[Linear], share: int) -> list[Sample]:
    """Strips of matrices that lie evenly over all of a kind."""
    fitting = [linear for linear in linears if _least_nbytes(linear) <= share]
    count = min(len(fitting), MOST_MATRICES, share // max(map(_least_nbytes, fitting)))
    chosen = [fitting[(2 * number + 1) * len(fitting) // (2 * count)] for number in range(count)]
    granted = [0] * count
    left = share
    for done, at in enumerate(
        sorted(range(count), key=lambda number: _nbytes_read(chosen[number]))
    ):  # small ones leave some
        granted[at] = min(_nbytes_read(chosen[at]), left // (count - done))
        left -= granted[at]
    return [
        _strips_of(linear, nbytes, number)
        for number, (linear, nbytes) in enumerate(zip(chosen, granted, strict=True))
    ]


def _strips_of(linear: Linear, nbytes: int, number: int) -> Sample:
    """So many bytes of a matrix in strips that lie evenly over it; the `number` moves them."""
    rows = linear.shape[0]
    if linear.coding.is_spread or nbytes >= _nbytes_read(linear):
        return Sample(linear, ((0, rows),), _nbytes_read(linear))
    row_nbytes = _least_nbytes(linear)
    height = nbytes // row_nbytes
    count = max(1, min(MOST_STRIPS, height, height * row_nbytes // STRIP_NBYTES))
    each, free = height // count, rows - height // count * count
    at = int(number * TURN % 1 * (free // count + 1))  # as far into each gap
    strips = tuple(
        (first, first + each) for first in (at + strip * (rows // count) for strip in range(count))
    )
    return Sample(linear, strips, each * count * row_nbytes)


def _nbytes_read(linear: Linear) -> int:
    """What reading all rows takes; of a stored matrix that holds others, too, these are read with it."""
    return sum(ref.nbytes for ref in linear.refs)


def _least_nbytes(linear: Linear) -> int:
    """What reading one row takes."""
    return (
        _nbytes_read(linear)
        if linear.coding.is_spread
        else -(-_nbytes_read(linear) // linear.shape[0])
    )
