"""Tell which tensors an artifact keeps; look for NaN and infinity in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.mlx_affine import find_affine
from fp4convert.errors import Finding
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.progress import Phases
from fp4convert.storage.safetensors import TensorRef

PART_NBYTES = 8 << 20  # of a tensor, held at once
VECTORS_NBYTES = 8 << 20  # of norms and biases, that are read at most where not all is


def check_kept(
    artifact: Artifact, phases: Phases, has_source: bool, is_whole: bool = True
) -> Iterator[Finding]:
    """Check that the tensors that were kept hold no NaN or Inf.

    has_source  the source is compared, and decides what NaN in a norm means
    is_whole    look at all of them; else at norms and biases, which are small, but on the Hub
                not even at these: each would cost a request
    """
    if not is_whole and artifact.source.is_streamed:
        return
    ours = own_names(artifact)
    kept = [
        ref
        for ref in artifact.tensors.values()
        if ref.name not in ours and ref.dtype in FLOAT_DTYPES and (is_whole or len(ref.shape) == 1)
    ]
    if is_whole:
        phases.begin("kept", sum(ref.nbytes for ref in kept))
    elif sum(ref.nbytes for ref in kept) > VECTORS_NBYTES:
        return
    for ref in kept:
        nans, infinities = _count_not_finite(artifact, ref, phases if is_whole else None)
        if nans or infinities:
            detail = f"it was kept with {nans + infinities} values that are NaN or Inf"
            is_fatal = nans and len(ref.shape) == 1 and not has_source
            if is_fatal:
                detail += ": a norm or a bias with NaN makes every answer NaN"
            yield Finding("error" if is_fatal else "warning", "kept-not-finite", ref.name, detail)


def _count_not_finite(artifact: Artifact, ref: TensorRef, phases: Phases | None) -> tuple[int, int]:
    """Count the values that are NaN, and those that are infinite."""
    nans = infinities = 0
    for part in split_bytes(ref):
        stored = artifact.source.read_range(ref, *part)
        values = np.frombuffer(stored, FLOAT_DTYPES[ref.dtype])
        if not_finite := int(np.count_nonzero(~np.isfinite(values))):
            own = int(np.count_nonzero(np.isnan(values)))
            nans, infinities = nans + own, infinities + not_finite - own
        if phases:
            phases.report(ref.name, len(stored))
    return nans, infinities


def own_names(artifact: Artifact) -> set[str]:
    """Name the tensors that were not kept: codes, scales and companions."""
    names = {
        ref.name
        for module in artifact.packed.values()
        for ref in (*module.refs, *module.companions)
    }
    names |= {ref.name for linear in find_affine(artifact.clues).values() for ref in linear.refs}
    return names | artifact.cache_scales.keys()


def split_bytes(ref: TensorRef) -> Iterator[tuple[int, int]]:
    """Split a tensor's bytes into ranges that are held at once."""
    for start in range(0, ref.nbytes, PART_NBYTES):
        yield start, min(start + PART_NBYTES, ref.nbytes)
