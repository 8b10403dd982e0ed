"""An artifact beside the weights that it was made from: which reading of its bytes gives these weights back.

Every candidate reads codes and block scales in another way; the cosine with the source, which no constant factor changes, says
which is right, and the factor that is left over says whether the scales are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.artifact import Artifact, Finding
from fp4convert.codec import FLOAT_DTYPES, dequantize
from fp4convert.errors import InputError
from fp4convert.formats import Blocks, Quantized, row_panels
from fp4convert.layout import LAYOUTS
from fp4convert.shard import TensorRef
from fp4convert.sources import Source

COMPARED_MODULES = 64
COMPARED_ELEMENTS = 1 << 20  # of each
RESIDUAL_LIMIT = 0.1  # 1 - cosine^2; four-bit weights have about 0.01, and others nearly 1
FACTOR_LIMIT = 0.06  # rounding alone leaves up to 0.03
_SWAPPED = bytes(byte >> 4 | (byte & 15) << 4 for byte in range(256))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What a source says: in which layout the block scales lie, or None where nothing fits, and what is wrong."""

    layout: str | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to read the bytes of a module."""

    layout: str
    is_swapped: bool


@dataclass(frozen=True, slots=True)
class _Match:
    """How well the values of a reading fit: what is left of the weights' power, and the factor that fits best."""

    residual: float
    factor: float


def suspect(artifact: Artifact, source: Source, modules: Sequence[str]) -> Suspicion:
    """Findings on the modules, some from everywhere, that the source holds too; InputError where it holds none of them."""
    originals = {ref.name: ref for ref in source.checkpoint.tensors}
    refs = {module: originals.get(f"{module}.weight") for module in modules}
    known = {
        module: ref
        for module, ref in refs.items()
        if ref is not None and ref.dtype in FLOAT_DTYPES and ref.shape == artifact.modules[module].shape
    }
    if not known:
        detail = f"{source.name} holds none of the artifact's modules as floats of its shape"
        raise InputError("source-differs", detail, "Give the weights that it was made from: --source SOURCE.")
    chosen = list(known)[:: max(1, len(known) // COMPARED_MODULES)]
    matches = {module: _match(artifact, module, source, known[module]) for module in chosen}
    means = {
        reading: float(np.median([found[reading].residual for found in matches.values() if reading in found]))
        for reading in {reading for found in matches.values() for reading in found}
    }
    declared = _Reading(artifact.form.scale_layout, False)
    best = min(means, key=lambda reading: (means[reading], reading != declared))
    if means[declared] < RESIDUAL_LIMIT:
        best = declared
    if means[best] >= RESIDUAL_LIMIT:
        detail = (
            f"read in no known way they are the weights of {source.name}: {100 * means[best]:.0f} % of their power is missing"
        )
        return Suspicion(None, (Finding("error", "source-differs", None, detail),))
    return Suspicion(best.layout, (*_judge(artifact, best), *_judge_modules(matches, best)))


def _match(artifact: Artifact, module: str, source: Source, ref: TensorRef) -> dict[_Reading, _Match]:
    """Every reading of a module, compared with some of its rows."""
    q = artifact.decode(module)
    last = min(q.shape[0], max(1, COMPARED_ELEMENTS // q.shape[1]))
    row_nbytes = ref.nbytes // q.shape[0]
    x = np.frombuffer(source.read_range(ref, 0, last * row_nbytes), FLOAT_DTYPES[ref.dtype]).astype(np.float64)
    found = {}
    for layout, rows in _readings(q, artifact.form.scale_layout, last):
        for is_swapped in (False, True):
            packed = memoryview(bytes(rows.packed).translate(_SWAPPED)) if is_swapped else rows.packed
            y = dequantize(replace(rows, packed=packed)).ravel().astype(np.float64)
            found[_Reading(layout, is_swapped)] = _fit(x, y)
    return found


def _readings(q: Blocks, declared: str, last: int) -> Iterator[tuple[str, Quantized]]:
    """The first rows with their block scales as declared, and taken out of every layout with as many bytes."""
    rows = q.rows(0, last)
    yield declared, rows
    if declared not in LAYOUTS:
        return
    shape = (q.shape[0], q.shape[1] // q.format.block_size)
    linear = b"".join(q.scales(first, end) for first, end in row_panels(q.shape))
    stored = LAYOUTS[declared].arrange(memoryview(linear), shape)
    for name, layout in LAYOUTS.items():
        padded = layout.padded(shape)
        if name != declared and padded[0] * padded[1] == stored.nbytes:
            yield name, replace(rows, block_scales=layout.restore(stored, shape)[: last * shape[1]])


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Match:
    y = np.where(np.isfinite(y), y, 0.0)
    power, made, common = float(x @ x), float(y @ y), float(x @ y)
    if not power or not made:
        return _Match(float(power != made), 1.0)
    return _Match(1 - common * common / (power * made), common / made)


def _judge(artifact: Artifact, best: _Reading) -> Iterator[Finding]:
    if best.layout != artifact.form.scale_layout:
        detail = f"block scales are declared {artifact.form.scale_layout}; by the source they lie {best.layout}"
        yield Finding("error", "scale-layout", None, detail)
    if best.is_swapped:
        order = artifact.spelling.NIBBLE_ORDER
        yield Finding("error", "nibble-order", None, f"codes are declared {order}; by the source their nibbles are swapped")


def _judge_modules(matches: dict[str, dict[_Reading, _Match]], best: _Reading) -> Iterator[Finding]:
    for module, found in matches.items():
        match = found[best]
        if match.residual >= RESIDUAL_LIMIT:
            detail = f"it is not what the source holds: {100 * match.residual:.0f} % of the weights' power is missing"
            yield Finding("error", "source-differs", module, detail)
        elif abs(match.factor - 1) > FACTOR_LIMIT:
            detail = f"its values are the source's only after multiplication by {match.factor:.4g}: a scale is wrong"
            yield Finding("error", "scale-factor", module, detail)
