"""Factors of folds, by AWQ.

The calibration file and the weights give them, fold by fold, on first use:
s = mean|x|^alpha / sqrt(max * min), with the alpha of 0, 0.05, ... 1 that leaves the least error in
the readers' outputs (Lin et al., arXiv 2306.00978, and its reference code for the normalisation);
0 multiplies with 1: rounding alone.

The weight of a norm is divided and rounded to its dtype, and s is the quotient of both, so that the
fold rounds nothing.  For a matrix or a bias that keeps its dtype, s is a power of two.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.input_power import Inputs
from fp4convert.calibration.methods.folds import Fold
from fp4convert.calibration.methods.scaled_weights import (
    divided,
    over_squares,
    quotients,
    read_vector,
)
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.encodings.base import Factors, Linear
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats, as_matrix
from fp4convert.numerics.formats import IMPORTANCE, format_named, global_range
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Source

ALPHAS = tuple(step / 20 for step in range(21))
# Of the weights of all readers of one output; rows from all over each of them.
SEARCHED_ELEMENTS = 1 << 20
SEARCHED_PRODUCTS = 1 << 28  # rows * columns^2, where a Gram matrix weighs the errors
CHUNKS = 8  # of adjacent rows
LEAST_MAGNITUDE = 1e-4  # of a column, beside the largest: no column is divided by nothing
Doubles = NDArray[np.float64]


class AwqSearch:
    """Finds the factors of folds once, for all threads."""

    def __init__(self, target: Target, calibration: Calibration, are_inputs_told: bool) -> None:
        """Keep the arguments of factors.

        are_inputs_told  input scales come from observed inputs, which factors change
        """
        self._calibration = calibration
        self._are_inputs_told = are_inputs_told
        self._format = format_named(target.format)
        self._rule = target.rule_for(self._format)
        self._has_unit_scale = target.has_unit_scale and self._format.has_global_scale
        self._found: dict[str, Factors] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def factors(self, fold: Fold, source: Source) -> Factors:
        """Return the factors of a fold.

        Raises InputError for a file without their statistics
        """
        with self._lock:
            lock = self._locks[fold.name]
        with lock:
            if fold.name not in self._found:
                factors = storable(fold, source, self._search(fold, source))
                if self._are_inputs_told:
                    factors = factors._replace(reach=self._measure_reach(fold, factors))
                self._found[fold.name] = factors
            return self._found[fold.name]

    def _measure_reach(self, fold: Fold, factors: Factors) -> dict[str, float]:
        """Measure how much the largest inputs of readers grow.

        Experts see other tokens than their siblings.
        """
        found = {}
        for linear in fold.readers:
            if self._calibration.has(linear.module):
                inputs = self._calibration.channel_amax(linear.module).astype(np.float64)
                before = float(inputs.max(initial=0))
                after = float((inputs / factors.columns).max(initial=0))
                found[linear.module] = after / before if before > 0 else 1.0
        return found

    def _search(self, fold: Fold, source: Source) -> Doubles:
        """Search the power of the inputs' magnitudes with the least error.

        Of equal ones the lowest.
        """
        # mean|x| of each output over all tokens of its readers.
        modules = [linear.module for linear in fold.rounded]
        tokens = np.array([self._calibration.tokens_of(module) for module in modules], np.float64)
        means = np.stack([self._calibration.mean_magnitudes(module) for module in modules])
        weights = tokens if tokens.sum() else np.ones_like(tokens)
        mean = np.average(means.astype(np.float64), axis=0, weights=weights)
        magnitudes: Doubles = fold.by_head(mean).mean(axis=1)
        largest = float(magnitudes.max(initial=0))
        if largest > 0:
            magnitudes = np.maximum(magnitudes, LEAST_MAGNITUDE * largest)
        else:
            magnitudes = np.ones_like(magnitudes)
        # The factors by each alpha, and the error of all readers under them.
        candidates: list[Doubles] = []
        for alpha in ALPHAS:
            powers = magnitudes**alpha
            candidates.append(powers / np.sqrt(powers.max() * powers.min()))
        stored = [storable(fold, source, wanted).columns for wanted in candidates]
        costs = np.zeros(len(ALPHAS))
        for linear in fold.rounded:
            costs += self._measure_costs(linear, source, stored, len(fold.rounded))
        if not np.isfinite(costs).all():
            return candidates[0]  # weights that are NaN or Inf, which their own step tells
        return candidates[int(np.argmin(costs))]

    def _measure_costs(
        self, linear: Linear, source: Source, stored: list[Float32s], count: int
    ) -> Doubles:
        """Measure the error of a reader's outputs by candidate.

        The sum is over the tokens of the reader.
        stored  the candidates, by column
        count   of the fold's readers
        """
        inputs = Inputs.of(self._calibration, linear.module)
        rows = max(1, SEARCHED_ELEMENTS // (count * linear.shape[1]))
        if inputs.gram is not None:
            products = linear.shape[1] * inputs.gram.blocks.shape[-1]
            rows = min(rows, max(1, SEARCHED_PRODUCTS // (count * products)))
        weights = _read_some_rows(linear, source, rows)
        tokens = max(1, self._calibration.tokens_of(linear.module))
        share = linear.shape[0] / len(weights)
        errors = [self._rounding_error(weights, columns, inputs.moments) for columns in stored]
        return np.array([tokens * share * inputs.power(error) for error in errors])

    def _rounding_error(
        self, weights: Float32s, columns: Float32s, moments: Float32s | None
    ) -> Float32s:
        """Return the errors of some rows of a matrix in four bits.

        The rows have their own global scale.
        Returns  (rows, columns) rounded weights less the weights
        """
        with np.errstate(all="ignore"):
            scaled = weights * columns
            amax = float(np.abs(scaled).max(initial=0))
            if not np.isfinite(amax):
                return np.full_like(weights, np.nan)
            importance = None
            if self._rule == IMPORTANCE and moments is not None:
                importance = over_squares(moments, columns)
            amax = global_range(self._rule) if self._has_unit_scale else amax
            q = Cpu().quantize(as_matrix(scaled), self._format, self._rule, amax, importance)
            found: Float32s = Cpu().values(q) / columns - weights
        return found


def storable(fold: Fold, source: Source, wanted: Doubles) -> Factors:
    """Find the nearest factors that a norm's dtype or powers of two hold.

    wanted   factors of the outputs
    Returns  1 for an output without a factor
    """
    with np.errstate(all="ignore"):
        made = (np.exp2(np.rint(np.log2(wanted))) if fold.is_exact else wanted).astype(np.float32)
        made = np.where(np.isfinite(made) & (made > 0), made, np.float32(1))
        if fold.weight:
            weight = read_vector(fold.weight, source)
            after = divided(weight, made, fold.vector, fold.weight.dtype)
            found = quotients(weight, after, fold.vector)
            is_sound = np.isfinite(found) & (found > 0) & ((found == made) | (not fold.is_exact))
            made = np.where(is_sound, found, np.float32(1))
        if fold.bias:
            bias = read_vector(fold.bias, source)
            after = divided(bias, made, "bias", fold.bias.dtype)
            made = np.where(after * made == bias, made, np.float32(1))
    return Factors(np.ascontiguousarray(fold.by_column(made), np.float32), made)


def _read_some_rows(linear: Linear, source: Source, most: int) -> Float32s:
    """Read rows of a matrix, at most so many.

    They are ranges of adjacent ones, from the first to the last.
    """
    weights, (rows, _) = linear.coding.weights(linear, source), linear.shape
    if most >= rows:
        return as_floats(weights.rows(0, rows))
    chunks = min(CHUNKS, most)
    height = most // chunks
    begins = [number * (rows - height) // max(1, chunks - 1) for number in range(chunks)]
    return np.concatenate([as_floats(weights.rows(begin, begin + height)) for begin in begins])
