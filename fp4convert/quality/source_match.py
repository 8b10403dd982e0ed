"""Find the reading of an artifact's bytes that fits its source.

Every candidate reads codes and block scales in another way.  The cosine with the source, which no
constant factor changes, says which is right; the factor that is left over says whether the scales
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.corrected import Residual
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, dequantize, nearest_values
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS, arrange_scales, swap_nibbles
from fp4convert.progress import Phases
from fp4convert.quality.fold_recovery import fold_originals
from fp4convert.quality.odd_places import is_underflow, underflow
from fp4convert.storage.source import Source

COMPARED_MODULES = 64
COMPARED_ELEMENTS = 1 << 17  # of each: 4096 blocks at least
RESIDUAL_LIMIT = 0.1  # 1 - cosine^2; four-bit weights have about 0.01: below it a reading fits
DIFFERENT_RESIDUAL = 0.5  # other weights have nearly 1, and odd ones lose up to 0.3 by rounding
COMPARED_CHUNKS = 8  # of rows, from all over a module
# Scales that lie wrong leave 5 to 20 times what rounding leaves.
CLEARLY_BETTER, SAME_RESIDUAL = 2, 1e-3
FACTOR_LIMIT = 0.04  # rounding alone leaves up to 0.02 in ordinary weights
ROUNDING_EXCESS = 1.05  # the noise of codes over that of the nearest ones under the same scales
PLACED = 5.0  # times these limits, where a method places errors for the sake of outputs
Doubles = NDArray[np.float64]


class _Reading(NamedTuple):
    """One way to read the bytes of a module."""

    layout: str
    is_swapped: bool


class _Fit(NamedTuple):
    """How well the values of a reading fit the source.

    residual  what is left of the weights' power with the factor that fits best
    is_off    the factor is not 1, or much is left, and not because of rounding: nearer codes would
              fit much better
    is_lost   what is left was too small for its scales; of the declared reading alone
    """

    residual: float
    factor: float
    is_off: bool
    is_lost: bool = False


def match_source(
    artifact: Artifact, source: Source, modules: Sequence[str], phases: Phases | None = None
) -> tuple[str | None, list[Finding]]:
    """Check some modules against the source, in every known reading.

    phases  learns how many modules are done
    Returns the layout in which the block scales lie, None where no reading fits; and what is wrong
    Raises  InputError where the source holds none of these modules
    """
    originals = fold_originals(artifact, source).of
    known = {
        module: originals[module]
        for module in modules
        if module in originals and originals[module].shape == artifact.modules[module].shape
    }
    if not known:
        detail = f"{source.name} holds none of the artifact's modules in its shape"
        next_step = "Give the weights that it was made from: --source SOURCE."
        raise InputError("source-differs", detail, next_step)
    chosen = list(known)[:: max(1, len(known) // COMPARED_MODULES)]
    phases = phases or Phases()
    phases.begin("sample", len(chosen), lambda count: f"{count:.0f} modules")
    fits = {}
    for module in chosen:
        fits[module] = _fit_readings(artifact, module, source, known[module])
        phases.report(module, 1)
    # The reading of all modules together: the one with the least median residual.
    declared = _Reading(artifact.scale_layout, False)
    lost = [module for module, found in fits.items() if found[declared].is_lost]
    fits = {module: found for module, found in fits.items() if module not in lost}
    findings = [underflow(module) for module in lost]
    if not fits:
        return None, findings
    medians = {
        reading: float(np.median([found[reading].residual for found in fits.values()]))
        for reading in next(iter(fits.values()))
        if all(reading in found for found in fits.values())
    }
    best = _choose(medians, declared)
    if other := _check_most(fits, source.name):
        return None, [other]
    findings += _check_reading(artifact, None, best, declared)
    # Each module by itself: is it read as the others are, and does it fit then?
    for module, found in fits.items():
        own = _choose({reading: fit.residual for reading, fit in found.items()}, best)
        findings += _check_reading(artifact, module, own, best)
        fit = found[own]
        if fit.residual >= DIFFERENT_RESIDUAL or (fit.residual >= RESIDUAL_LIMIT and fit.is_off):
            detail = f"it does not match the source: {100 * fit.residual:.0f} %"
            detail += " of the weights' power is unexplained"
            findings.append(Finding("error", "source-differs", module, detail))
        elif fit.is_off:
            detail = f"its values are the source's only after multiplication by {fit.factor:.4g}"
            findings.append(Finding("error", "scale-factor", module, f"{detail}: a scale is wrong"))
    return best.layout if medians[best] < RESIDUAL_LIMIT else None, findings


def _check_most(fits: Mapping[str, Mapping[_Reading, _Fit]], name: str) -> Finding | None:
    """Check that half of the modules fit in some reading."""
    leasts = [min(fit.residual for fit in found.values()) for found in fits.values()]
    odd = [least for least in leasts if least >= DIFFERENT_RESIDUAL]
    if 2 * len(odd) <= len(fits):
        return None
    those = "these" if len(odd) == len(fits) else f"{len(odd)} of {len(fits)} modules compared"
    detail = f"{those} are not the weights of {name}: no layout, nibble order or global scale makes"
    detail += f" them match ({100 * float(np.median(odd)):.0f} % of the signal is unexplained)"
    return Finding("error", "source-differs", None, detail)


def _choose(residuals: dict[_Reading, float], expected: _Reading) -> _Reading:
    """Choose the expected reading unless another fits clearly better."""
    best = min(residuals, key=lambda reading: residuals[reading])
    is_clear = CLEARLY_BETTER * residuals[best] + SAME_RESIDUAL < residuals[expected]
    return best if is_clear and residuals[best] < RESIDUAL_LIMIT else expected


def _fit_readings(
    artifact: Artifact, module: str, source: Source, original: Linear
) -> dict[_Reading, _Fit]:
    """Compare every reading of a module with some of its rows from all over."""
    q = artifact.decode(module)
    rows, columns = q.shape
    height = max(1, COMPARED_ELEMENTS // COMPARED_CHUNKS // columns)
    chunks = [(0, rows)]
    if height * COMPARED_CHUNKS < rows:
        last = COMPARED_CHUNKS - 1
        begins = [number * (rows - height) // last for number in range(COMPARED_CHUNKS)]
        chunks = [(begin, begin + height) for begin in begins]
    weights = original.coding.weights(original, source)
    if correction := artifact.correction(module):
        weights = Residual(weights, correction)
    stored = b"".join(weights.rows(*chunk).data for chunk in chunks)
    x = np.frombuffer(stored, FLOAT_DTYPES[weights.dtype]).astype(np.float64)
    slack = PLACED if artifact.record.get("method") == "gptq" else 1.0
    found = {}
    for layout, part in _read_layouts(q, artifact.scale_layout, chunks):
        swapped = replace(part, packed=swap_nibbles(part.packed))
        fit = _fit(x, part, slack)
        if layout == artifact.scale_layout and fit.residual >= DIFFERENT_RESIDUAL:
            fit = fit._replace(is_lost=is_underflow([(x, part)]))
        found[_Reading(layout, False)] = fit
        found[_Reading(layout, True)] = _fit(x, swapped, slack)
    return found


def _read_layouts(
    q: Blocks, declared: str, chunks: list[tuple[int, int]]
) -> Iterator[tuple[str, Quantized]]:
    """Read rows with their block scales in every layout of as many bytes.

    The declared layout comes first.
    """
    panels = [q.rows(*chunk) for chunk in chunks]
    rows = replace(
        panels[0],
        shape=(sum(panel.shape[0] for panel in panels), q.shape[1]),
        packed=memoryview(b"".join(panel.packed for panel in panels)),
        block_scales=memoryview(b"".join(panel.block_scales for panel in panels)),
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


def _fit(x: Doubles, rows: Quantized, slack: float) -> _Fit:
    """Fit the values of quantized rows to x by one constant factor."""

    def dot(x: Doubles, y: Doubles) -> float:
        return float(np.multiply(x, y).sum())  # BLAS threads cost more than they bring here

    values = dequantize(rows)
    y = np.where(np.isfinite(values), values, 0).ravel().astype(np.float64)
    power, made, common = dot(x, x), dot(y, y), dot(x, y)
    if not power or not made:
        return _Fit(float(power != made), 1.0, False)
    residual, factor = 1 - common * common / (power * made), common / made
    is_off = abs(factor - 1) > slack * FACTOR_LIMIT or residual >= slack * RESIDUAL_LIMIT
    if is_off:
        # Not off where the nearest codes under the same scales leave nearly as much.
        nearest = nearest_values(x, rows).astype(np.float64)
        least = dot(x - nearest, x - nearest)
        is_off = dot(x - y, x - y) > ROUNDING_EXCESS * least
    return _Fit(residual, factor, is_off)


def _check_reading(
    artifact: Artifact, module: str | None, found: _Reading, expected: _Reading
) -> Iterator[Finding]:
    """Check that a module, or all of them, is read as expected."""
    if found.layout != expected.layout:
        detail = f"compared with the source, block scales are {found.layout}, not {expected.layout}"
        yield Finding("error", "scale-layout", module, detail)
    if found.is_swapped != expected.is_swapped:
        how = "swapped" if found.is_swapped else "as declared, and those of others are swapped"
        detail = f"codes are declared {artifact.spelling.TRAITS.nibble_order}"
        detail += f"; compared with the source, their nibbles are {how}"
        yield Finding("error", "nibble-order", module, detail)
