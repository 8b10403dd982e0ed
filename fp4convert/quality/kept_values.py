"""List the tensors that an artifact keeps; find NaN, Inf and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.registry import is_mark
from fp4convert.checkpoint.encodings.int4 import find_affine
from fp4convert.checkpoint.error_report import is_norm, odd_zeros
from fp4convert.errors import Finding
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.fp8_int import FP8_DTYPES
from fp4convert.progress import Phases, count_text
from fp4convert.storage.safetensors import WEIGHT, TensorRef

PART_NBYTES = 8 << 20  # of a tensor, held at once
LOOK = 32  # values that show of most tensors that they are not zero
WITH_NAN = {**FLOAT_DTYPES, **FP8_DTYPES, "F64": np.dtype(np.float64)}


def check_kept(artifact: Artifact, phases: Phases, has_source: bool) -> Iterator[Finding]:
    """Check that kept tensors are finite, and matrices and norms not zero.

    has_source  a source is compared, and has these values, too
    """
    kept = _find_kept(artifact)
    phases.begin("kept", sum(ref.nbytes for ref in kept))
    yield from _check_values(artifact, kept, has_source, phases)


def check_vectors(artifact: Artifact, has_source: bool) -> Iterator[Finding]:
    """Check that norms and biases are finite, and norms not zero.

    Not on the Hub, where every vector would be a request.
    """
    if not artifact.source.is_streamed:
        vectors = [ref for ref in _find_kept(artifact) if len(ref.shape) == 1]
        yield from _check_values(artifact, vectors, has_source)


def _find_kept(artifact: Artifact) -> list[TensorRef]:
    ours = own_names(artifact)
    return [
        ref for ref in artifact.tensors.values() if ref.name not in ours and ref.dtype in WITH_NAN
    ]


def _check_values(
    artifact: Artifact, refs: list[TensorRef], has_source: bool, phases: Phases | None = None
) -> Iterator[Finding]:
    zeros: list[str] = []
    for ref in refs:
        bad, has_nan = 0, False
        is_matrix = len(ref.shape) == 2 and min(ref.shape) > 1 and ref.name.endswith(WEIGHT)
        is_zero = is_matrix or is_norm(ref.name)  # until another number is seen
        for part in split_bytes(ref):
            stored = artifact.source.read_range(ref, *part)
            values = np.frombuffer(stored, WITH_NAN[ref.dtype])
            is_zero = is_zero and not values[:LOOK].any() and not values.any()  # -0 is zero, too
            with np.errstate(invalid="ignore"):  # a signalling NaN
                if own := int(np.count_nonzero(~np.isfinite(values))):
                    bad, has_nan = bad + own, has_nan or bool(np.isnan(values).any())
            if phases:
                phases.report(ref.name, len(stored))
        zeros += [ref.name] if is_zero else []
        if bad:
            detail = f"it was kept with {bad} values that are NaN or Inf"
            is_fatal = has_nan and len(ref.shape) == 1 and not has_source
            if is_fatal:
                detail += ": a norm, a bias or another vector with NaN makes NaN of what follows"
            yield Finding("error" if is_fatal else "warning", "kept-not-finite", ref.name, detail)
    norms = odd_zeros([*filter(is_norm, zeros)], sum(map(is_norm, artifact.tensors)))
    if named := [name for name in zeros if name in norms or not is_norm(name)]:
        yield describe_zeros(named, "kept")


def describe_zeros(names: Sequence[str], kind: str) -> Finding:
    """Report weights of zeros alone."""
    detail = f"zeros alone in {count_text(len(names), f'{kind} weight')}, the first {names[0]}"
    return Finding("warning", "zero-weights", names[0], detail)


def own_names(artifact: Artifact) -> set[str]:
    """Name the tensors that were not kept: codes, scales, companions, marks."""
    names = {
        ref.name
        for module in artifact.packed.values()
        for ref in (*module.refs, *module.companions)
    }
    if artifact.foreign:
        return {ref.name for one in artifact.foreign.values() for ref in (*one.refs, *one.idle)}
    names |= {ref.name for linear in find_affine(artifact.clues).values() for ref in linear.refs}
    names |= {name for name, ref in artifact.tensors.items() if is_mark(ref)}
    return names | artifact.cache_scales.keys()


def split_bytes(ref: TensorRef) -> Iterator[tuple[int, int]]:
    """Split a tensor's bytes into ranges that are held at once."""
    for start in range(0, ref.nbytes, PART_NBYTES):
        yield start, min(start + PART_NBYTES, ref.nbytes)
