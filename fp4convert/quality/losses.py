"""Sample the weights of a model, and measure what rounding loses.

Both `analyze` and a target size measure here: W is a sample of a matrix, V its values in a form.

nmse    sum (w - v)^2 / sum w^2, over the weights
output  sum |(W - V) x|^2 / sum |W x|^2, over the inputs x of the layer

Inputs are known by their second moments alone (calibration/input_power.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    not_finite,
)
from fp4convert.numerics.error_sums import Sums
from fp4convert.numerics.formats import FP4_FORMATS, FP8, IMPORTANCE, Format
from fp4convert.numerics.fp8_int import fp8_scales_of
from fp4convert.numerics.fp8_rounding import find_scales, round_to_fp8
from fp4convert.numerics.matrices import InMemory, Matrix, Weights, row_panels
from fp4convert.storage.source import Source

STUDIED_BLOCKS = (16, 32, 64)
ROW, TENSOR = "row", "tensor"
BF16 = "bf16"
SCALE_NBITS = 8  # of a block
WORD_NBITS = 32  # of a global scale, and of one of FP8

MEASURED_ELEMENTS = 1 << 17  # at once: what a core's own cache holds
USUAL_NBYTES = 20 * 10**6
MOST_MATRICES = 128  # of a kind: more of them say the same, and each is some requests to a Hub
MOST_STRIPS = 8  # of a matrix
STRIP_NBYTES = 1 << 20
ANY = "*"
TURN = 0.618034  # of a matrix from one sample to the next, so that no place in it is preferred


class Way(NamedTuple):
    """A form that a matrix can take.

    format  nvfp4, mxfp4, fp8 or bf16
    rule    that sets the block scales; None without block scales
    block   columns to a block; "row" or "tensor" for an FP8 scale; None for bf16
    """

    format: str
    rule: str | None = None
    block: int | str | None = None

    @property
    def is_for_study(self) -> bool:
        """Tell whether no engine reads such blocks."""
        return self.format in FP4_FORMATS and self.block != FP4_FORMATS[self.format].block_size

    def fits(self, columns: int) -> bool:
        """Tell whether a row has whole blocks."""
        return not isinstance(self.block, int) or columns % self.block == 0

    def nbits(self, shape: tuple[int, int]) -> float:
        """Count the bits of a matrix of that shape, with its scales."""
        rows, columns = shape
        if isinstance(self.block, int):
            word = WORD_NBITS if FP4_FORMATS[self.format].has_global_scale else 0
            return rows * columns * (4 + SCALE_NBITS / self.block) + word
        if self.format == FP8.name:
            return rows * columns * 8 + WORD_NBITS * (rows if self.block == ROW else 1)
        return rows * columns * 16


def ways(is_calibrated: bool) -> list[Way]:
    """List the forms that `analyze` compares.

    Both formats, every rule and every block size; FP8 and bf16 to compare with.
    """
    fp4 = [
        Way(fmt.name, rule, block)
        for fmt in FP4_FORMATS.values()
        for rule in fmt.scale_rules
        for block in STUDIED_BLOCKS
        if rule != IMPORTANCE or is_calibrated
    ]
    return [*fp4, Way(FP8.name, "amax", ROW), Way(FP8.name, "amax", TENSOR), Way(BF16)]


class Loss(NamedTuple):
    """Losses of one matrix in one form, as defined at the top of this file."""

    nmse: float
    output: float


class Weighed(NamedTuple):
    """Values of a matrix, with the power of them and of their outputs."""

    x: Float32s
    inputs: Inputs
    power: Loss

    @classmethod
    def of(cls, x: Float32s, inputs: Inputs) -> Weighed:
        """Measure the power of a matrix.

        x       (rows, columns), some rows of a matrix or all of them
        Raises  NumericError on NaN or infinity
        """
        if not np.isfinite(x).all():
            raise not_finite()
        return cls(x, inputs, _power_of(x, inputs))

    def loss(self, values: Float32s) -> Loss:
        """Return the loss by which x became `values`."""
        noise, signal = _power_of(self.x - values, self.inputs), self.power
        return Loss(
            noise.nmse / signal.nmse if signal.nmse else 0.0,
            noise.output / signal.output if signal.output else 0.0,
        )


def plain_losses(rows: Matrix, ways: Sequence[Way], amax: float) -> list[Loss]:
    """Return the losses of forms, with inputs of unit variance.

    As Weighed.loss has them, off by less than 1e-6 of itself: squares are added in float32.
    amax  of the matrix; finite
    """
    held, sums = InMemory(rows), dict.fromkeys(ways, Sums())
    for panel in row_panels(rows.shape, MEASURED_ELEMENTS):
        part = held.rows(*panel)
        x = as_floats(part)
        for way in ways:
            compared = Cpu().compare_values(part, through_form(x, way, amax))
            sums[way] = sums[way].plus(compared, x.size)
    return [Loss(*[found.nmse or 0.0] * 2) for found in sums.values()]


def _power_of(matrix: Float32s, inputs: Inputs) -> Loss:
    """Return the power of a matrix, and of its outputs."""
    columns, is_full = column_power(matrix), inputs.gram is not None
    outputs = output_power(matrix, inputs) if is_full else weighted(columns, inputs.moments)
    return Loss(weighted(columns, None), outputs)


def through_form(
    x: Float32s, way: Way, amax: float, importance: Float32s | None = None
) -> Float32s:
    """Round rows of a matrix to a form, and return their values.

    amax        of the matrix, sets a scale of all of it
    importance  of the columns, for the rule of that name
    """
    rows = as_matrix(x)
    if isinstance(way.block, int):
        fmt, given = FP4_FORMATS[way.format], importance if way.rule == IMPORTANCE else None
        if way.is_for_study:
            return Cpu().study(x, replace(fmt, block_size=way.block), str(way.rule), amax, given)
        return Cpu().values(Cpu().quantize(rows, fmt, str(way.rule), amax, given))
    if way.format == BF16:
        return x.astype(FLOAT_DTYPES["BF16"]).astype(np.float32)
    if way.block == TENSOR:
        return round_to_fp8(InMemory(rows), fp8_scales_of(np.full((1, 1), amax, "f4")), x.shape)
    return through_fp8(InMemory(rows), FP8, str(way.rule), is_whole=False)


def through_fp8(weights: Weights, fmt: Format, rule: str, is_whole: bool) -> Float32s:
    """Round a matrix to FP8 or MXFP8, and return its values.

    is_whole  one scale of FP8 for the matrix; else one for a row
    """
    rows, columns = weights.shape
    block = (rows if is_whole and not fmt.block_size else 1, fmt.block_size or columns)
    scales = find_scales(weights, block, fmt, rule)
    return round_to_fp8(weights, scales, block)


class RowSample(NamedTuple):
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

    def read(self, source: Source) -> Matrix:
        """Read these rows, one below the other."""
        weights = self.linear.coding.weights(self.linear, source)
        pieces = [weights.rows(*strip).data for strip in self.strips]
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return Matrix(data, weights.dtype, (self.rows, self.linear.shape[1]))


def kinds_of(linears: Mapping[str, Linear]) -> dict[str, list[Linear]]:
    """Gather matrices by kind, in the order of the source.

    A kind is the glob of their names, with a star for every number.
    """
    found: dict[str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        texts, _ = split_numbers(module)
        found[ANY.join(texts)].append(linear)
    return dict(found)


def short_names(kinds: Sequence[str]) -> dict[str, str]:
    """Return short names of kinds: the ends of their globs that no other has."""
    ends: dict[str, list[str]] = {}
    count: dict[str, int] = defaultdict(int)
    for kind in kinds:
        parts = kind.split(".")
        places = [place for place in reversed(range(len(parts))) if parts[place] != ANY]
        ends[kind] = [".".join(parts[place:]) for place in places]
        for end in ends[kind]:
            count[end] += 1
    return {kind: next((end for end in ends[kind] if count[end] == 1), kind) for kind in kinds}


def draw_sample(
    kinds: Mapping[str, Sequence[Linear]], nbytes: int | None = None
) -> dict[str, list[RowSample]]:
    """Draw samples of every kind, the same for the same source.

    nbytes  of all samples together; None for USUAL_NBYTES, or more for a row of every kind
    Raises  InputError for fewer bytes than a row of every kind takes
    """
    least = {kind: min(map(_row_nbytes, linears)) for kind, linears in kinds.items()}
    left = sum(least.values())
    nbytes = max(USUAL_NBYTES, left) if nbytes is None else nbytes
    if left > nbytes:
        detail = f"--sample {nbytes / 1e9:g} GB does not hold a row of each of {len(kinds)} kinds"
        detail += f" of modules; expected at least {left / 1e9:.3g} GB"
        raise InputError("sample-size", detail)
    # Every kind gets its smallest row, then the same share of the rest as far as it can use it.
    most = {kind: sum(map(_whole_nbytes, linears)) for kind, linears in kinds.items()}
    shares, left = dict(least), nbytes - left
    open_kinds = set(kinds)
    while open_kinds and left >= len(open_kinds):
        each = left // len(open_kinds)
        for kind in sorted(open_kinds):
            more = min(each, most[kind] - shares[kind])
            shares[kind] += more
            left -= more
        open_kinds = {kind for kind in open_kinds if shares[kind] < most[kind]}
    return {kind: _sample_kind(linears, shares[kind]) for kind, linears in kinds.items()}


def _sample_kind(linears: Sequence[Linear], share: int) -> list[RowSample]:
    """Sample matrices that lie evenly over all of a kind."""
    fitting = [linear for linear in linears if _row_nbytes(linear) <= share]
    count = min(len(fitting), MOST_MATRICES, share // max(map(_row_nbytes, fitting)))
    chosen = [fitting[(2 * number + 1) * len(fitting) // (2 * count)] for number in range(count)]
    granted = [0] * count
    left = share
    by_size = sorted(range(count), key=lambda number: _whole_nbytes(chosen[number]))
    for done, number in enumerate(by_size):  # small ones leave some to the others
        granted[number] = min(_whole_nbytes(chosen[number]), left // (count - done))
        left -= granted[number]
    return [
        sample_matrix(linear, nbytes, number)
        for number, (linear, nbytes) in enumerate(zip(chosen, granted, strict=True))
    ]


def sample_matrix(
    linear: Linear, nbytes: int, number: int = 1, strip_nbytes: int = STRIP_NBYTES
) -> RowSample:
    """Sample strips that lie evenly over a matrix; `number` moves them.

    nbytes        to read; at least a row, or a whole matrix if its rows lie spread over it
    strip_nbytes  least bytes of a strip
    """
    rows, row_nbytes, whole = linear.shape[0], _row_nbytes(linear), _whole_nbytes(linear)
    if nbytes >= whole or row_nbytes == whole:
        return RowSample(linear, ((0, rows),), whole)
    height = max(1, nbytes // row_nbytes)
    count = max(1, min(MOST_STRIPS, height, height * row_nbytes // strip_nbytes))
    each, free = height // count, rows - height // count * count
    begin = int(number * TURN % 1 * (free // count + 1))  # as far into each gap
    firsts = [begin + strip * (rows // count) for strip in range(count)]
    strips = tuple((first, first + each) for first in firsts)
    return RowSample(linear, strips, each * count * row_nbytes)


def _whole_nbytes(linear: Linear) -> int:
    """Count the bytes read for all rows.

    Of a stored matrix that holds others, too, these are read with it.
    """
    return sum(ref.nbytes for ref in linear.refs)


def _row_nbytes(linear: Linear) -> int:
    """Count the bytes read for one row: all, if the row lies spread over them."""
    if linear.coding.is_spread:
        return _whole_nbytes(linear)
    return -(-_whole_nbytes(linear) // linear.shape[0])
