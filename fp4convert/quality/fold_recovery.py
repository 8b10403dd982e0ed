"""Recover the factors by which an artifact was folded.

A norm gives them: its weight in the source over its weight in the artifact, exactly.  Rows give
powers of two: a row is the source's row times such a power, and rounding to four bits moves no row
by as much.  An artifact is right if it is the source under these factors: then norms, rows and
columns cancel, and the model is the one that was rounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.folds import Fold, changed_by, folds_used, vectors_of
from fp4convert.calibration.methods.scaled_weights import Folded, quotients, read_vector
from fp4convert.checkpoint.adapters.merging import merge_adapter
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Factors, Linear
from fp4convert.checkpoint.encodings.corrected import biases_in_tiles
from fp4convert.checkpoint.encodings.fp4 import FourBit
from fp4convert.checkpoint.linears import Linears, linears_stored, originals_of
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.errors import Finding
from fp4convert.numerics.codec import as_floats, dequantize, nearest_values
from fp4convert.numerics.matrices import Blocks, Weights, row_panels
from fp4convert.storage.source import Source

EXCESS = 1.1  # of a column's noise over that of the nearest codes, which rounding chose
UNSEEN = 1e-6  # of a column's power: what float32 may lose
CERTAIN = 0.25  # how far from a power of two a row may be, in powers of two
WORN = 0.1  # of a row's power that no factor explains; then its codes tell
COMPARED_ELEMENTS = 1 << 20  # at once
Doubles = NDArray[np.float64]


def fold_originals(artifact: Artifact, source: Source) -> Linears:
    """Find the source's linear layers behind an artifact's changes.

    Changes are an adapter, folds, or the order of tiles.

    Returns  the layers, and the changed vectors
    Raises   InputError for recorded folds that the source cannot have
    """
    originals = originals_of(artifact, source)
    if artifact.foreign:  # whose records name no change
        return originals
    if artifact.adapter:  # beside which there are no folds
        originals = merge_adapter(originals, artifact.adapter, source.checkpoint)
    if table := artifact.spelling.TRAITS.correction:
        tensors = {ref.name: ref for ref in source.checkpoint.tensors}
        vectors = originals.vectors
        found = dict(biases_in_tiles(artifact.modules, tensors, table, vectors))
        originals = replace(originals, vectors={**vectors, **found})
    if artifact.adapter:
        return originals
    uses = folds_recorded(artifact.record)
    if not uses:
        return originals
    folds = folds_used(uses, source.checkpoint, originals)
    finder = _FactorFinder(artifact)
    changed = finder.changed = changed_by(folds, finder.factors)
    of = {
        module: linear._replace(coding=changed.get(module, linear.coding))
        for module, linear in originals.of.items()
    }
    vectors = {linear.name: linear for fold in folds for linear in vectors_of(fold, finder.factors)}
    return replace(originals, of=of, vectors=vectors)


class _FactorFinder:
    """Finds the factors of folds, once."""

    def __init__(self, artifact: Artifact) -> None:
        self.changed: Mapping[str, Folded] = {}
        self._artifact = artifact
        self._stored = linears_stored(artifact)
        self._found: dict[str, Factors] = {}
        self._lock = threading.RLock()  # rows of a layer are told under the factors of its columns

    def factors(self, fold: Fold, source: Source) -> Factors:
        """Return the factors of a fold; 1 if unknown."""
        with self._lock:
            if fold.name not in self._found:
                find = self._find_by_norm if fold.weight else self._find_by_rows
                made = find(fold, source)
                made = np.where(np.isfinite(made) & (made > 0), made, 1).astype(np.float32)
                self._found[fold.name] = Factors(fold.by_column(made).astype(np.float32), made)
            return self._found[fold.name]

    def _find_by_norm(self, fold: Fold, source: Source) -> NDArray[np.float32]:
        """Divide the source's weight of a norm by the artifact's."""
        weight = fold.weight
        own = self._artifact.tensors.get(weight.name) if weight else None
        if weight is None or own is None or (own.dtype, own.shape) != (weight.dtype, weight.shape):
            return np.ones(fold.outputs, np.float32)
        before, after = read_vector(weight, source), read_vector(own, self._artifact.source)
        return quotients(before, after, fold.vector)

    def _find_by_rows(self, fold: Fold, source: Source) -> Doubles:
        """Find the power of two of every row; of a row of zeros by its readers."""
        by_rows = self._find_powers(fold.maker, source, axis=1)
        found = np.ones(fold.outputs) if by_rows is None else 1 / by_rows
        unknown = ~np.isfinite(found)
        for linear in fold.readers if unknown.any() else ():
            by_columns = self._find_powers(linear, source, axis=0)
            if by_columns is not None:
                columns = fold.by_head(by_columns)[:, 0]
                found = np.where(unknown & ~np.isfinite(found), columns, found)
        return found

    def _find_powers(self, linear: Linear | None, source: Source, axis: int) -> Doubles | None:
        """Find the power of two of every row or column.

        axis     1 for rows, 0 for columns
        Returns  NaN if no power of two is near; None if the artifact has no such layer
        """
        own = self._stored.get(linear.module) if linear else None
        if linear is None or own is None or own.shape != linear.shape:
            return None
        folded = self.changed[linear.module]
        coding = replace(folded, rows=None) if axis == 1 else replace(folded, columns=None)
        theirs = coding.weights(linear, source)
        ours = own.coding.weights(own, self._artifact.source)
        power, made, common = (np.zeros(linear.shape[1 - axis]) for _ in range(3))
        for panel in row_panels(linear.shape, COMPARED_ELEMENTS):
            x = as_floats(theirs.rows(*panel)).astype(np.float64)
            y = as_floats(ours.rows(*panel)).astype(np.float64)
            place = slice(*panel) if axis == 1 else slice(None)
            power[place] += (x * x).sum(axis=axis)
            made[place] += (y * y).sum(axis=axis)
            common[place] += (x * y).sum(axis=axis)
        with np.errstate(all="ignore"):
            # By what is there: however much was rounded to zero, the rest says the same.
            exponents = np.log2(made / common)
            is_near = np.abs(exponents - np.rint(exponents)) < CERTAIN
            found: Doubles = np.where(is_near, np.exp2(np.rint(exponents)), np.nan)
            is_worn = ~is_near | (1 - common * common / (power * made) > WORN)
            is_worn &= np.isfinite(exponents)
        if isinstance(own.coding, FourBit):
            blocks = self._artifact.decode(linear.module)
            guess = np.rint(np.where(is_worn, exponents, 0))
            if axis == 0 and is_worn.any():  # some of all rows say it
                panel = next(iter(row_panels(linear.shape, COMPARED_ELEMENTS)))
                settled = _choose_powers(theirs, blocks, panel, guess[None, :], axis)
                found[is_worn] = settled[is_worn]
            for row in map(int, np.flatnonzero(is_worn) if axis == 1 else ()):
                own_guess, panel = guess[row : row + 1, None], (row, row + 1)
                found[row] = _choose_powers(theirs, blocks, panel, own_guess, axis)[0]
        return found


def _choose_powers(
    weights: Weights, blocks: Blocks, rows: tuple[int, int], guess: Doubles, axis: int
) -> Doubles:
    """Choose the powers of two that bring weights nearest to the codes.

    guess    exponents near the right ones, (rows, 1) or (1, columns)
    axis     of the sums: 1 for rows, 0 for columns
    Returns  one power for each row or column; NaN if two are as near
    """
    q, x = blocks.rows(*rows), as_floats(weights.rows(*rows))
    powers = np.exp2(guess + np.arange(-2, 3)[:, None, None]).astype(np.float32)
    with np.errstate(all="ignore"):
        values = dequantize(q)
        errors = (values - nearest_values(x * power, q) for power in powers)
        noises = np.stack([np.square(each, dtype=np.float64).sum(axis=axis) for each in errors])
    is_best = noises == noises.min(axis=0)
    best = np.take_along_axis(powers.reshape(noises.shape), is_best.argmax(axis=0)[None], 0)[0]
    found: Doubles = np.where(is_best.sum(axis=0) == 1, best, np.nan)
    return found


def check_vector(artifact: Artifact, linear: Linear, source: Source) -> Finding | None:
    """Check that a norm or bias is the source's under its factors, or changed."""
    kept, ref = artifact.tensors.get(linear.name), linear.refs[0]
    weights = linear.coding.weights(linear, source)
    if kept is None or (kept.dtype, kept.shape) != (weights.dtype, ref.shape):
        detail = "missing from the artifact, or there with another dtype or shape"
        return Finding("error", "kept-missing", ref.name, detail)
    expected = as_floats(weights.rows(0, 1))[0]
    own = read_vector(kept, artifact.source)
    with np.errstate(all="ignore"):
        is_same = (own == expected) | (np.abs(own - expected) <= UNSEEN * np.abs(expected))
    if is_same.all():
        return None
    if not linear.coding.foldings:
        detail = f"its values are not the source's, {linear.coding.change}"
        return Finding("error", "kept-differs", ref.name, detail)
    detail = f"{np.count_nonzero(~is_same)} of its values match the source under no factor, or"
    detail += " under another than its readers have"
    return Finding("error", "fold-differs", ref.name, detail)


def check_columns(
    blocks: Blocks, ours: Linear, theirs: Linear, source: Source
) -> Iterator[Finding]:
    """Check that four-bit columns were rounded from the source's, folded.

    A column is odd if its codes are further from the weights than the nearest ones under the
    same scales.
    """
    weights = theirs.coding.weights(theirs, source)
    signal, noise, least = (np.zeros(blocks.shape[1]) for _ in range(3))
    for panel in row_panels(blocks.shape, COMPARED_ELEMENTS):
        q, x = blocks.rows(*panel), as_floats(weights.rows(*panel))
        with np.errstate(all="ignore"):
            noise += np.square(x - dequantize(q), dtype=np.float64).sum(axis=0)
            least += np.square(x - nearest_values(x, q), dtype=np.float64).sum(axis=0)
            signal += np.square(x, dtype=np.float64).sum(axis=0)
    odd = ~(noise <= EXCESS * least + UNSEEN * signal)
    if count := int(np.count_nonzero(odd)):
        detail = f"{count} of {odd.size} columns do not match the source"
        detail += " under the factors found in norms and rows"
        yield Finding("error", "fold-differs", ours.module, detail)
