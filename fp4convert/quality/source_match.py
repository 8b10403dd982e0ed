"""Find the reading of an artifact's bytes that fits its source.

Every candidate reads codes and block scales in another way; the cosine with the source, which no constant factor changes, says
which is right, and the factor that is left over says whether the scales are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.codec import (
    FLOAT_DTYPES,
    Float32s,
    block_steps,
    decode_e2m1,
    dequantize,
    encode_e2m1,
)
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS, arrange_scales, swap_nibbles
from fp4convert.quality.fold_recovery import unfolded
from fp4convert.storage.source import Source

COMPARED_MODULES = 64
COMPARED_ELEMENTS = 1 << 17  # of each: 4096 blocks at least
RESIDUAL_LIMIT = 0.1  # 1 - cosine^2; four-bit weights have about 0.01: below it a reading fits
DIFFERENT = 0.5  # other weights have nearly 1, and odd ones lose up to 0.3 by rounding
COMPARED_CHUNKS = 8  # of rows, from all over a module
CLEARLY_BETTER, SAME_RESIDUAL = (
    2,
    1e-3,
)  # scales that lie wrong leave 5 to 20 times what rounding leaves
FACTOR_LIMIT = 0.06  # rounding alone leaves up to 0.02 in ordinary weights
ROUNDING_EXCESS = 1.1  # the noise of codes over that of the nearest ones, which have the least that their scales allow
PLACED = 5.0  # times these limits of residual and factor, where a method places errors for the sake of outputs


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
    """How well the values of a reading fit.

    residual  what is left of the weights' power with the factor that fits best
    is_off    the factor is not 1, or much is left, and not because of rounding: nearer codes would fit much better
    """

    residual: float
    factor: float
    is_off: bool


def suspect(artifact: Artifact, source: Source, modules: Sequence[str]) -> Suspicion:
    """Findings on the modules, some from everywhere, that the source holds too; InputError where it holds none of them."""
    originals = unfolded(artifact, source).of
    shapes = {module: artifact.modules[module].shape for module in modules}
    known = {
        module: originals[module]
        for module in modules
        if module in originals and originals[module].shape == shapes[module]
    }
    if not known:
        detail = f"{source.name} holds none of the artifact's modules in its shape"
        raise InputError(
            "source-differs", detail, "Give the weights that it was made from: --source SOURCE."
        )
    chosen = list(known)[:: max(1, len(known) // COMPARED_MODULES)]
    matches = {module: _match(artifact, module, source, known[module]) for module in chosen}
    readings = [
        reading
        for reading in matches[chosen[0]]
        if all(reading in found for found in matches.values())
    ]
    declared = _Reading(artifact.scale_layout, False)
    medians = {
        reading: float(np.median([found[reading].residual for found in matches.values()]))
        for reading in readings
    }
    best = _choose(medians, declared)
    if medians[best] >= DIFFERENT:
        detail = f"read in no known way they are the weights of {source.name}: {100 * medians[best]:.0f} % of their power is missing"
        return Suspicion(None, (Finding("error", "source-differs", None, detail),))
    findings = [*_judge_reading(artifact, None, best, declared)]
    for module, found in matches.items():
        own = _choose({reading: match.residual for reading, match in found.items()}, best)
        findings += [
            *_judge_reading(artifact, module, own, best),
            *_judge_match(module, found[own]),
        ]
    return Suspicion(best.layout if medians[best] < RESIDUAL_LIMIT else None, tuple(findings))


def _choose(residuals: dict[_Reading, float], expected: _Reading) -> _Reading:
    """The reading that fits best, or the expected one where none fits clearly better."""
    best = min(residuals, key=lambda reading: residuals[reading])
    is_clear = CLEARLY_BETTER * residuals[best] + SAME_RESIDUAL < residuals[expected]
    return best if is_clear and residuals[best] < RESIDUAL_LIMIT else expected


def _match(
    artifact: Artifact, module: str, source: Source, original: Linear
) -> dict[_Reading, _Match]:
    """Every reading of a module, compared with some of its rows from all over."""
    q = artifact.decode(module)
    chunks = _chunks(q.shape)
    weights = original.coding.weights(original, source)
    stored = b"".join(weights.rows(first, last).data for first, last in chunks)
    x = np.frombuffer(stored, FLOAT_DTYPES[weights.dtype]).astype(np.float64)
    slack = PLACED if artifact.record.get("method") == "gptq" else 1.0
    found = {}
    for layout, rows in _readings(q, artifact.scale_layout, chunks):
        for is_swapped in (False, True):
            packed = swap_nibbles(rows.packed) if is_swapped else rows.packed
            found[_Reading(layout, is_swapped)] = _fit(x, replace(rows, packed=packed), slack)
    return found


def _chunks(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """(first, last + 1) of some ranges of rows, from the first to the last one."""
    rows, columns = shape
    height = max(1, COMPARED_ELEMENTS // COMPARED_CHUNKS // columns)
    if height * COMPARED_CHUNKS >= rows:
        return [(0, rows)]
    begins = [
        number * (rows - height) // (COMPARED_CHUNKS - 1) for number in range(COMPARED_CHUNKS)
    ]
    return [(begin, begin + height) for begin in begins]


def _readings(
    q: Blocks, declared: str, chunks: list[tuple[int, int]]
) -> Iterator[tuple[str, Quantized]]:
    """Those rows with their block scales as declared, and taken out of every layout with as many bytes."""
    panels = [q.rows(first, last) for first, last in chunks]
    packed, block_scales = (
        memoryview(b"".join(table))
        for table in zip(*((p.packed, p.block_scales) for p in panels), strict=True)
    )
    rows = replace(
        panels[0],
        shape=(sum(p.shape[0] for p in panels), q.shape[1]),
        packed=packed,
        block_scales=block_scales,
    )
    yield declared, rows
    if declared not in LAYOUTS:
        return
    shape = (q.shape[0], q.shape[1] // q.format.block_size)
    stored = arrange_scales(q, LAYOUTS[declared])
    for name, layout in LAYOUTS.items():
        padded = layout.padded(shape)
        if name != declared and padded[0] * padded[1] == stored.nbytes:
            linear = layout.restore(stored, shape)
            other = b"".join(linear[first * shape[1] : last * shape[1]] for first, last in chunks)
            yield name, replace(rows, block_scales=memoryview(other))


def _fit(x: NDArray[np.float64], rows: Quantized, slack: float) -> _Match:
    y = _finite(dequantize(rows))
    power, made, common = _dot(x, x), _dot(y, y), _dot(x, y)
    if not power or not made:
        return _Match(float(power != made), 1.0, False)
    residual, factor = 1 - common * common / (power * made), common / made
    is_off = abs(factor - 1) > slack * FACTOR_LIMIT or residual >= slack * RESIDUAL_LIMIT
    return _Match(
        residual, factor, is_off and _dot(x - y, x - y) > ROUNDING_EXCESS * _least_noise(x, rows)
    )


def _least_noise(x: NDArray[np.float64], rows: Quantized) -> float:
    """What the nearest codes leave under the same scales."""
    steps = block_steps(rows)[:, None]
    with np.errstate(all="ignore"):
        quotients = np.nan_to_num(x.reshape(steps.size, -1).astype(np.float32) / steps)
        difference = x - _finite(decode_e2m1(encode_e2m1(quotients)) * steps)
    return _dot(difference, difference)


def _dot(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Without BLAS, whose threads cost more than they bring for so little."""
    return float(np.multiply(x, y).sum())


def _finite(values: Float32s) -> NDArray[np.float64]:
    """Flat, with zeros for what is not finite."""
    return np.where(np.isfinite(values), values, 0).ravel().astype(np.float64)


def _judge_reading(
    artifact: Artifact, module: str | None, found: _Reading, expected: _Reading
) -> Iterator[Finding]:
    """Findings where the module, or all of them, are read otherwise than expected."""
    if found.layout != expected.layout:
        detail = f"by the source block scales lie {found.layout}, not {expected.layout}"
        yield Finding("error", "scale-layout", module, detail)
    if found.is_swapped != expected.is_swapped:
        how = "swapped" if found.is_swapped else "as declared, and those of others are swapped"
        detail = f"codes are declared {artifact.spelling.TRAITS.nibble_order}; by the source their nibbles are {how}"
        yield Finding("error", "nibble-order", module, detail)


def _judge_match(module: str, match: _Match) -> Iterator[Finding]:
    if match.residual >= DIFFERENT or (match.residual >= RESIDUAL_LIMIT and match.is_off):
        detail = f"it is not what the source holds: {100 * match.residual:.0f} % of the weights' power is missing"
        yield Finding("error", "source-differs", module, detail)
    elif match.is_off:
        detail = f"its values are the source's only after multiplication by {match.factor:.4g}: a scale is wrong"
        yield Finding("error", "scale-factor", module, detail)
