"""List the tensors that an artifact keeps; look for NaN and Inf in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.int4 import find_affine
from fp4convert.errors import Finding
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.fp8_int import FP8_DTYPES
from fp4convert.progress import Phases
from fp4convert.storage.safetensors import TensorRef

PART_NBYTES = 8 << 20  # of a tensor, held at once
WITH_NAN = {**FLOAT_DTYPES, **FP8_DTYPES, "F64": np.dtype(np.float64)}


def check_all_finite(artifact: Artifact, phases: Phases, has_source: bool) -> Iterator[Finding]:
    """Check that no kept tensor holds NaN or Inf.

    has_source  a source is compared, and has these values, too
    """
    kept = _find_kept(artifact)
    phases.begin("kept", sum(ref.nbytes for ref in kept))
    for ref in kept:
        yield from _check_finite(artifact, ref, has_source, phases)


def check_vectors_finite(artifact: Artifact, has_source: bool) -> Iterator[Finding]:
    """Check that no norm or bias holds NaN or Inf.

    Not on the Hub, where every vector would be a request.
    """
    if not artifact.source.is_streamed:
        for ref in _find_kept(artifact):
            if len(ref.shape) == 1:
                yield from _check_finite(artifact, ref, has_source)


def _find_kept(artifact: Artifact) -> list[TensorRef]:
    ours = own_names(artifact)
    return [
        ref for ref in artifact.tensors.values() if ref.name not in ours and ref.dtype in WITH_NAN
    ]


def _check_finite(
    artifact: Artifact, ref: TensorRef, has_source: bool, phases: Phases | None = None
) -> Iterator[Finding]:
    bad, has_nan = 0, False
    for part in split_bytes(ref):
        stored = artifact.source.read_range(ref, *part)
        values = np.frombuffer(stored, WITH_NAN[ref.dtype])
        with np.errstate(invalid="ignore"):  # a signalling NaN
            if own := int(np.count_nonzero(~np.isfinite(values))):
                bad, has_nan = bad + own, has_nan or bool(np.isnan(values).any())
        if phases:
            phases.report(ref.name, len(stored))
    if bad:
        detail = f"it was kept with {bad} values that are NaN or Inf"
        is_fatal = has_nan and len(ref.shape) == 1 and not has_source
        if is_fatal:
            detail += ": a norm, a bias or another vector with NaN makes NaN of what follows"
        yield Finding("error" if is_fatal else "warning", "kept-not-finite", ref.name, detail)


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
