"""Find the reading of an artifact's bytes that fits its source.

Every candidate reads codes and block scales in another way.  The cosine with the source, which no
constant factor changes, shows the right reading; the remaining factor shows whether the scales are
right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.corrected import Residual
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, block_steps, dequantize, nearest_values
from fp4convert.numerics.formats import E2M1_MAX, MXFP4, NVFP4
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS, arrange_scales, swap_nibbles
from fp4convert.progress import Phases
from fp4convert.quality.fold_recovery import fold_originals
from fp4convert.quality.odd_places import PLACED
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
Doubles = NDArray[np.float64]
LEAST_SCALES = {NVFP4: 0x01, MXFP4: 0x00}  # 2^-9 of E4M3, 2^-127 of E8M0
EXCESS = 1.05  # what a rule's choice of a scale may lose beside the least one
LOST = 0.5  # of a block's power: from there on rounding has lost it


class _Reading(NamedTuple):
    """One way to read the bytes of a module."""

    layout: str
    is_swapped: bool


class _Fit(NamedTuple):
    """The fit of the values of a reading to the source.

    residual  share of the weights' power that remains under the best factor
    is_off    the factor is not 1, or much remains that nearer codes would not leave
    is_lost   the rest was too small for its scales; of the declared reading alone
    """

    residual: float
    factor: float
    is_off: bool
    is_lost: bool = False


def match_source(
    artifact: Artifact, source: Source, modules: Sequence[str], phases: Phases | None = None
) -> tuple[str | None, list[Finding]]:
    """Check some modules against the source, in every known reading.

    phases  receives the progress in modules
    Returns the layout of the block scales, None if no reading fits; and the findings
    Raises  InputError for a source without these modules
    """
    originals = fold_originals(artifact, source).of
    known = {
        module: originals[module]
        for module in modules
        if module in originals and originals[module].shape == artifact.modules[module].shape
    }
    if not known:
        detail = f"{source.name} holds none of the artifact's modules in its shape"
        raise InputError("source-differs", detail)
    chosen = list(known)[:: max(1, len(known) // COMPARED_MODULES)]
    phases = phases or Phases()
    phases.begin("layout", len(chosen), lambda count: f"{count:.0f} modules")
    for module in chosen:
        if not _Sample.of(artifact, module, source, known[module]).is_nearest():
            break
        phases.report(module, 1)
    else:
        return artifact.scale_layout, []
    fits = {
        module: _Sample.of(artifact, module, source, known[module]).fit_readings()
        for module in chosen
    }
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


class _Sample(NamedTuple):
    """Rows of a module from all over it.

    x       the source's values, flat
    coded   the module's codes and scales, of all its rows
    chunks  first row, and the one behind the last
    """

    x: Doubles
    coded: Blocks
    chunks: list[tuple[int, int]]
    declared: str
    slack: float

    @classmethod
    def of(cls, artifact: Artifact, module: str, source: Source, original: Linear) -> _Sample:
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
        return cls(x, q, chunks, artifact.scale_layout, slack)

    def is_nearest(self) -> bool:
        """Return whether the codes are the nearest under the declared scales.

        Then no other reading is looked at: under scales that lie wrong, nearer codes exist.
        """
        _, q = next(_read_layouts(self.coded, self.declared, self.chunks))
        values = dequantize(q).ravel().astype(np.float64)
        noise, signal = (float(np.dot(each, each)) for each in (self.x - values, self.x))
        if not noise < RESIDUAL_LIMIT * signal:
            return False
        nearest = self.x - nearest_values(self.x, q).astype(np.float64)
        return noise <= ROUNDING_EXCESS * float(np.dot(nearest, nearest))

    def fit_readings(self) -> dict[_Reading, _Fit]:
        """Compare every reading."""
        found = {}
        for layout, part in _read_layouts(self.coded, self.declared, self.chunks):
            swapped = replace(part, packed=swap_nibbles(part.packed))
            fit = _fit(self.x, part, self.slack)
            if layout == self.declared and fit.residual >= DIFFERENT_RESIDUAL:
                fit = fit._replace(is_lost=is_underflow([(self.x, part)]))
            found[_Reading(layout, False)] = fit
            found[_Reading(layout, True)] = _fit(self.x, swapped, self.slack)
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


def is_underflow(panels: Iterable[tuple[Doubles, Quantized]]) -> bool:
    """Tell whether all lost values were too small for their scales.

    Every lost block has the nearest codes under its scale, is within the range of the least block
    scale, and would lose as much under that.

    panels  values of the source, and their codes
    """
    has_lost = False
    for values, q in panels:
        if q.format not in LEAST_SCALES:
            return False
        shape = (-1, q.format.block_size)
        least = replace(
            q, block_scales=memoryview(bytes([LEAST_SCALES[q.format]]) * len(q.block_scales))
        )
        found = (values, dequantize(q), nearest_values(values, q), nearest_values(values, least))
        x, y, nearest, best = (each.reshape(shape).astype(np.float64) for each in found)
        noise, least_noise = (((x - other) ** 2).sum(axis=1) for other in (y, best))
        is_lost = noise > LOST * (x**2).sum(axis=1)
        is_due = (noise <= EXCESS * least_noise) & (y == nearest).all(axis=1)
        is_due &= np.abs(x).max(axis=1) <= E2M1_MAX * block_steps(least)
        if not is_due[is_lost].all():
            return False
        has_lost |= bool(is_lost.any())
    return has_lost


def underflow(name: str) -> Finding:
    """Return the finding on weights below the range of scales."""
    detail = "weights of the source were lost to underflow: they are below half of the smallest"
    detail += " step that its scales allow; keep it (--exclude), or choose another format"
    return Finding("error", "weights-underflow", name, detail)
