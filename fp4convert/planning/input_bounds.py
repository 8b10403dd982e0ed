"""Bound the inputs of linear layers by norms and producing weights.

The recipes' [[fold]] rows say what reads what. A norm with the weight w and the bias b gives
x = w u + b with |u| <= sqrt(d), and u of unit variance is typical. So, with the row W_j and the
bias c_j of a linear layer that reads it:

  norm    |x_j| <= sqrt(d) |w_j| + |b_j|
  linear  |y_j| <= sqrt(d) |W_j w| + |W_j b + c_j|, where W_j w is a product by column; typically
          the root of |W_j w|^2 + (W_j b + c_j)^2
  heads   the layer is given means of values: |v_j| bounds them
  gated   |act(g) u| <= |g| |u|, as |act(g)| <= |g|; without a gate act(u) alone

Norms are read whole, of matrices some rows, and of the experts of a layer some, which stand for
all. A layer of which this is not known has no bound here: activation_scales.py says what it gets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.folds import BIAS, Fold, find_folds
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import as_row
from fp4convert.checkpoint.linears import Linears
from fp4convert.numerics.codec import as_floats
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.rules import FoldRule
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source, read_each

STRIPS, STRIP_ROWS = 4, 16  # that are read of a matrix
MOST_EXPERTS = 16  # of a layer
MARGIN = 4.0  # of a bound, for the rows and experts that are not read
ACTIVATED = 0.4  # the root mean square of act(g) u over those of g and u, about
Float64s = NDArray[np.float64]
Outputs = tuple[float, Float64s]
"""The bound of some outputs, and the mean square of each under typical inputs."""


class Affine(NamedTuple):
    """Outputs gain . u + offset of a normalized vector u.

    gains    the norm of each output's gain
    offsets  of each
    radius   the largest |u|
    """

    gains: Float64s
    offsets: Float64s
    radius: float

    @property
    def bounds(self) -> Float64s:
        return self.radius * self.gains + np.abs(self.offsets)

    @property
    def squares(self) -> Float64s:
        return np.square(self.gains) + np.square(self.offsets)


def bound_inputs(
    source: Source, rules: Iterable[FoldRule], linears: Linears
) -> dict[str, Sequence[Outputs]]:
    """Bound the inputs of every linear layer that rules tell of.

    Returns  module -> outputs, of each of which it may be given one
    """
    folds, refused = find_folds(rules, source.checkpoint, linears)
    # A norm feeds its readers, whoever else may read it.
    norms = [fold for fold in (*folds, *(one.fold for one in refused)) if fold and fold.weight]
    reader = _Reader(source, linears)
    found: dict[str, Sequence[Outputs]] = {}
    for fold, norm in zip(norms, read_each(source, reader.read_norm, norms), strict=True):
        for linear in fold.readers:
            reader.norms[linear.module] = norm
            found[linear.module] = ((float(norm.bounds.max(initial=0)), norm.squares),)
    # The experts of a layer are one group, whose names are equal down to their number.
    groups: dict[tuple[str, str], list[Fold]] = defaultdict(list)
    for fold in folds:
        if fold.name in reader.norms:
            end = fold.rule.into.partition("{expert}")[2]
            expert = fold.name.removesuffix(end).rpartition(".")[0]
            groups[fold.rule.into, expert if end else fold.name].append(fold)
    samples = [_sample(group) for group in groups.values()]
    sampled = [fold for sample in samples for fold in sample]
    read = iter(read_each(source, reader.read_outputs, sampled))
    for group, sample in zip(groups.values(), samples, strict=True):
        outputs = [next(read) for _ in sample]
        known = tuple(one for one in outputs if one)
        if len(known) == len(sample):
            found |= {linear.module: known for fold in group for linear in fold.readers}
    return found


def _sample(experts: Sequence[Fold]) -> list[Fold]:
    """Choose the experts to read, evenly over a layer."""
    count = min(len(experts), MOST_EXPERTS)
    return [experts[number * len(experts) // count] for number in range(count)]


def _strips_of(rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the rows to read, evenly over a matrix."""
    whole = rows // STRIP_ROWS
    if whole <= STRIPS:
        yield 0, rows
        return
    for number in range(STRIPS):
        first = number * whole // STRIPS * STRIP_ROWS
        yield first, first + STRIP_ROWS


class _Reader:
    """Reads norms and rows of a source.

    norms  by the module that reads it
    """

    def __init__(self, source: Source, linears: Linears) -> None:
        self.norms: dict[str, Affine] = {}
        self._source, self._linears = source, linears
        self._tensors = {ref.name: ref for ref in source.checkpoint.tensors}
        self._beside: dict[str, list[Linear]] = defaultdict(list)
        for module, linear in linears.of.items():
            self._beside[module.rpartition(".")[0]].append(linear)

    def read_norm(self, fold: Fold) -> Affine:
        """Read the outputs of a norm."""
        weight = self._read_vector(fold.weight) if fold.weight else np.zeros(0)
        gains = np.abs(weight + 1.0 if fold.kind == "norm_plus_one" else weight)
        offsets = self._read_vector(fold.bias) if fold.bias else np.zeros_like(gains)
        return Affine(gains, offsets, math.sqrt(fold.outputs))

    def read_outputs(self, fold: Fold) -> Outputs | None:
        """Read some outputs of a linear layer, behind a gate; None: unknown."""
        members = [fold.maker] if fold.maker else []
        if fold.kind == "linear":
            parent = fold.name.rpartition(".")[0]
            others = {fold.name, *(linear.module for linear in fold.readers)}
            members += [
                linear
                for linear in self._beside[parent]
                if linear.shape == members[0].shape and linear.module not in others
            ]
        read = [self._read_rows(linear, fold.name) for linear in members]
        known = [one for one in read if one]
        if len(known) != len(members) or not 1 <= len(known) <= 2:
            return None
        bounds, squares = known[0].bounds, known[0].squares
        if fold.kind == "linear":
            squares = squares * ACTIVATED**2
        for gate in known[1:]:
            bounds, squares = bounds * gate.bounds, squares * gate.squares
        return float(bounds.max(initial=0)) * MARGIN, squares

    def _read_rows(self, linear: Linear, beside: str) -> Affine | None:
        """Read some rows of a matrix behind its norm.

        beside  a module with the same norm
        Returns  None for another norm, for a layout of which rows are no small part, and for a bias
                 that is not understood
        """
        norm, shape = self.norms.get(linear.module), linear.shape
        bias = self._tensors.get(linear.module + BIAS)
        if bias and (bias.shape != shape[:1] or bias.dtype not in FLOAT_TYPES):
            return None
        if norm is None or norm is not self.norms[beside] or linear.coding.is_spread:
            return None
        strips = list(_strips_of(shape[0]))
        weights = linear.coding.weights(linear, self._source)
        rows = np.concatenate([as_floats(weights.rows(*strip)) for strip in strips])
        rows = rows.astype(np.float64)
        gains = np.sqrt(np.square(rows * norm.gains).sum(axis=1))
        offsets = (rows * norm.offsets).sum(axis=1)
        if bias:
            values = self._read_vector(bias)
            offsets += np.concatenate([values[first:last] for first, last in strips])
        return Affine(gains, offsets, norm.radius)

    def _read_vector(self, ref: TensorRef) -> Float64s:
        """Read a vector, with what an adapter adds to it."""
        linear = self._linears.vectors.get(ref.name) or as_row(ref)
        values = as_floats(linear.coding.weights(linear, self._source).rows(0, 1))
        return values.reshape(-1).astype(np.float64)
