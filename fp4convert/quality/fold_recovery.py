"""Read back from an artifact by which factors it was folded.

A norm tells them: its weight in the source over that in the artifact, exactly, for so they were made.  Rows tell powers of two:
they are the source's but for that, and rounding to four bits moves no row by as much.  What an artifact holds is right where it
is the source under factors that are told so: then norms, rows and columns cancel, and the model is the one that was rounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.folds import Fold, changed_by, folds_used, vectors_of
from fp4convert.calibration.methods.scaled_weights import Folded, quotients, read_vector
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Factors, Linear
from fp4convert.checkpoint.linears import Linears, linears_stored, originals_of
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.errors import Finding
from fp4convert.numerics.codec import as_floats, block_steps, decode_e2m1, dequantize, encode_e2m1
from fp4convert.numerics.matrices import Blocks, Weights, row_panels
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

EXCESS = 1.1  # of a column's noise over that of the nearest codes, which rounding chose
UNSEEN = 1e-6  # of a column's power: what float32 may lose
CERTAIN = 0.25  # how far from a power of two a row may be, in powers of two
COMPARED_ELEMENTS = 1 << 20  # at once
Doubles = NDArray[np.float64]


def unfolded(artifact: Artifact, source: Source) -> Linears:
    """The linear layers of the source that an artifact was made from, and the vectors that were divided, under its folds.

    Raises InputError where the record tells of folds that the source cannot have
    """
    originals = originals_of(artifact, source)
    uses = folds_recorded(artifact.record)
    if not uses:
        return originals
    folds = folds_used(uses, source.checkpoint, originals)
    reader = _Reader(artifact, linears_stored(artifact))
    changed = reader.changed = changed_by(folds, reader.factors)
    of = {
        module: replace(linear, coding=changed.get(module, linear.coding))
        for module, linear in originals.of.items()
    }
    vectors = {linear.name: linear for fold in folds for linear in vectors_of(fold, reader.factors)}
    return replace(originals, of=of, vectors=vectors)


class _Reader:
    """Finds the factors of each fold once."""

    def __init__(self, artifact: Artifact, stored: Mapping[str, Linear]) -> None:
        self.changed: Mapping[str, Folded] = {}
        self._artifact = artifact
        self._stored = stored
        self._found: dict[str, Factors] = {}
        self._lock = threading.RLock()  # rows of a layer are told under the factors of its columns

    def factors(self, fold: Fold, source: Source) -> Factors:
        """Those of a fold; 1 where nothing tells."""
        with self._lock:
            if fold.name not in self._found:
                made = (
                    self._of_norm(fold, fold.weight, source)
                    if fold.weight
                    else self._of_rows(fold, source)
                )
                made = np.where(np.isfinite(made) & (made > 0), made, 1).astype(np.float32)
                self._found[fold.name] = Factors(fold.by_column(made).astype(np.float32), made)
            return self._found[fold.name]

    def _of_norm(self, fold: Fold, weight: TensorRef, source: Source) -> NDArray[np.float32]:
        own = self._artifact.tensors.get(weight.name)
        if own is None or (own.dtype, own.shape) != (weight.dtype, weight.shape):
            return np.ones(fold.outputs, np.float32)
        return quotients(
            read_vector(weight, source), read_vector(own, self._artifact.source), fold.vector
        )

    def _of_rows(self, fold: Fold, source: Source) -> Doubles:
        """The power of two for each row, by the row itself; for one of zeros by the columns that read it."""
        found = self._told(fold.maker, source, axis=1)
        found = np.ones(fold.outputs) if found is None else 1 / found
        if not (unknown := ~np.isfinite(found)).any():
            return found
        for linear in fold.readers:
            told = self._told(linear, source, axis=0)
            if told is not None:
                columns = fold.by_head(told)[:, 0]
                found = np.where(unknown & ~np.isfinite(found), columns, found)
        return found

    def _told(self, linear: Linear | None, source: Source, axis: int) -> Doubles | None:
        """By which power of two each row (axis 1) or column (0) of the artifact is multiplied; NaN where none is near."""
        own = self._stored.get(linear.module) if linear else None
        if linear is None or own is None or own.shape != linear.shape:
            return None
        other = self.changed[linear.module]
        coding = replace(other, rows=None) if axis == 1 else replace(other, columns=None)
        theirs, ours = (
            coding.weights(linear, source),
            own.coding.weights(own, self._artifact.source),
        )
        power, common = np.zeros(linear.shape[1 - axis]), np.zeros(linear.shape[1 - axis])
        for panel in row_panels(linear.shape, COMPARED_ELEMENTS):
            x, y = (
                as_floats(weights.rows(*panel)).astype(np.float64) for weights in (theirs, ours)
            )
            if axis == 1:
                power[slice(*panel)], common[slice(*panel)] = (
                    (x * x).sum(axis=1),
                    (x * y).sum(axis=1),
                )
            else:
                power, common = power + (x * x).sum(axis=0), common + (x * y).sum(axis=0)
        with np.errstate(all="ignore"):
            exponents = np.log2(common / power)
            is_near = np.abs(exponents - np.rint(exponents)) < CERTAIN
            found: Doubles = np.where(is_near, np.exp2(np.rint(exponents)), np.nan)
        return found


def check_vector(artifact: Artifact, linear: Linear, source: Source) -> Finding | None:
    """A finding where a divided norm or bias is not what the artifact's factors make of the source's."""
    kept, ref = artifact.tensors.get(linear.name), linear.refs[0]
    if kept is None or (kept.dtype, kept.shape) != (ref.dtype, ref.shape):
        return Finding(
            "error",
            "kept-missing",
            ref.name,
            "the source has it, the artifact has it not, or otherwise",
        )
    expected = as_floats(linear.coding.weights(linear, source).rows(0, 1))[0]
    own = read_vector(kept, artifact.source)
    with np.errstate(all="ignore"):
        is_same = (own == expected) | (np.abs(own - expected) <= UNSEEN * np.abs(expected))
    if is_same.all():
        return None
    detail = f"{np.count_nonzero(~is_same)} of its values are the source's under no factor, or under another than its readers have"
    return Finding("error", "fold-differs", ref.name, detail)


def check_columns(module: str, blocks: Blocks, linear: Linear, source: Source) -> Iterator[Finding]:
    """A finding where columns of a four-bit module were not rounded from the source's under the factors that are told."""
    odd = _odd_columns(blocks, linear.coding.weights(linear, source))
    if count := int(np.count_nonzero(odd)):
        detail = f"{count} of {odd.size} columns are not those of the source under the factors that norms and rows tell"
        yield Finding("error", "fold-differs", module, detail)


def _odd_columns(blocks: Blocks, weights: Weights) -> NDArray[np.bool_]:
    """Columns whose codes are further from the weights than the nearest ones under the same scales."""
    signal, noise, least = (np.zeros(blocks.shape[1]) for _ in range(3))
    for panel in row_panels(blocks.shape, COMPARED_ELEMENTS):
        q, x = blocks.rows(*panel), as_floats(weights.rows(*panel))
        steps = block_steps(q).reshape(len(x), -1, 1)
        with np.errstate(all="ignore"):
            q_values = np.nan_to_num(x.reshape(len(x), -1, q.format.block_size) / steps)
            nearest = (decode_e2m1(encode_e2m1(q_values)) * steps).reshape(x.shape)
            noise += np.square(x - dequantize(q), dtype=np.float64).sum(axis=0)
            least += np.square(x - nearest, dtype=np.float64).sum(axis=0)
            signal += np.square(x, dtype=np.float64).sum(axis=0)
    return ~(noise <= EXCESS * least + UNSEEN * signal)
