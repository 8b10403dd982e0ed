"""Measure the losses of kinds of modules in every format, and advise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp4convert.calibration.fingerprint import check_source
from fp4convert.calibration.input_power import Inputs, describe_inputs
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import advise_on_types
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, check_finite
from fp4convert.numerics.error_sums import decibels
from fp4convert.numerics.formats import FP4_FORMATS, FP8, NVFP4
from fp4convert.planning.decisions import NAME_SOME, decide
from fp4convert.planning.no_effect import find_idle, refuse_idle
from fp4convert.process import processors
from fp4convert.progress import Phases, are_text
from fp4convert.quality.losses import (
    BF16,
    ROW,
    Loss,
    RowSample,
    Way,
    Weighed,
    draw_sample,
    kinds_of,
    plain_losses,
    short_names,
    through_form,
    ways,
)
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.source import Source, read_each

STANDS_OUT = 1.15  # times the output error of the whole, before a kind is named
MOST_NAMED = 3  # of them
KEPT = (Way(FP8.name, "amax", ROW), Way(BF16))  # what a kind can be instead of four-bit


class MeasuredKind(NamedTuple):
    """One kind of matrices with its measured losses.

    losses  of every sampled matrix, by form; only forms that fit all of them
    """

    kind: str
    short: str
    linears: Sequence[Linear]
    samples: Sequence[RowSample]
    losses: Mapping[Way, Sequence[Loss]]

    @property
    def weights(self) -> int:
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)

    @property
    def sampled_weights(self) -> int:
        return sum(sample.rows * sample.linear.shape[1] for sample in self.samples)

    def nbits(self, way: Way) -> float:
        """Count the bits that all matrices of the kind take."""
        return sum(way.nbits(linear.shape) for linear in self.linears)

    def loss(self, way: Way) -> Loss:
        """Return the mean loss of its sampled matrices."""
        found = self.losses[way]
        return Loss(
            math.fsum(loss.nmse for loss in found) / len(found),
            math.fsum(loss.output for loss in found) / len(found),
        )


def analyze(
    source: Source,
    options: RecipeOptions,
    sample_nbytes: int | None = None,
    calibration: Calibration | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Make the document of `fp4convert analyze --json`.

    options        the recipe, with the modules that stay
    sample_nbytes  most bytes to read; None for USUAL_NBYTES
    calibration    the inputs of layers; None for Gaussians of unit variance
    Raises  InputError for nothing to quantize, a sample too small, or a calibration of another
            model; NumericError for weights that are NaN or Inf
    """
    phases = phases or Phases()
    linears_by_kind = kinds_of(_find_quantizable(source, options))
    if not linears_by_kind:
        detail = f"{source.name}: the recipe quantizes no matrix; expected some to analyze"
        step = advise_on_types(source.checkpoint.tensors, NAME_SOME)
        raise InputError("no-linears", detail, step)
    linears = [linear for own in linears_by_kind.values() for linear in own]
    if calibration:
        check_source(calibration, source, linears)
    # Their losses, by a sample of each kind.
    samples = draw_sample(linears_by_kind, sample_nbytes)
    phases.begin("measure", sum(sample.nbytes for own in samples.values() for sample in own))
    losses = _measure(source, calibration, samples, phases.report)
    names = short_names(list(linears_by_kind))
    kinds = [
        MeasuredKind(kind, names[kind], own, samples[kind], losses[kind])
        for kind, own in linears_by_kind.items()
    ]
    # The document: the whole, every kind, and what follows from them in words.
    weights = sum(kind.weights for kind in kinds)
    warnings = []
    if packed := [linear for linear in linears if linear.coding.is_packed]:
        warning = f"{are_text(len(packed), 'matrix')} {packed[0].coding.word} or otherwise packed"
        warning += " already:"
        warning += " losses are against what they hold now"
        warnings = [f"{warning}, not against the weights that they were made from"]
    losses_of_all = ((way, mean_loss(kinds, way)) for way in kinds[0].losses)
    return {
        "source": source.name,
        **describe_inputs(calibration),
        "weights": weights,
        "sampled_weights": sum(kind.sampled_weights for kind in kinds),
        "sampled_bytes": sum(sample.nbytes for kind in kinds for sample in kind.samples),
        "matrices": sum(len(kind.linears) for kind in kinds),
        "sampled_matrices": sum(len(kind.samples) for kind in kinds),
        "ways": [
            _describe_way(way, loss, bits_per_weight(kinds, way))
            for way, loss in losses_of_all
            if loss
        ],
        "kinds": [_describe_kind(kind) for kind in kinds],
        "recommendation": advise(kinds),
        "warnings": warnings,
    }


def nbytes_to_sample(gigabytes: float | None) -> int | None:
    """Convert GB to bytes; InputError unless the number is positive."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes * 1e9 < math.inf:
        raise InputError("sample-size", f"--sample {gigabytes:g} GB; expected a positive number")
    return int(gigabytes * 10**9)


def _find_quantizable(source: Source, options: RecipeOptions) -> dict[str, Linear]:
    """Find the linear layers that would become four-bit, by module."""
    target = Target(NVFP4.name, "compressed-tensors")
    recipe = build_recipe(target, source.checkpoint.config, options)
    linears = find_linears(source, recipe)
    verdicts = decide(linears, recipe, dialect_to_write(recipe.target))
    refuse_idle([find_idle(recipe, source.checkpoint, linears, verdicts)])
    return {
        module: verdict.linear
        for module, verdict in verdicts.items()
        if verdict.form and verdict.form.format.is_fp4
    }


def _measure(
    source: Source,
    calibration: Calibration | None,
    samples: Mapping[str, list[RowSample]],
    report: Callable[[str, int], None],
) -> dict[str, dict[Way, list[Loss]]]:
    """Measure the losses of every sample, by kind and form."""
    all_ways = ways(calibration is not None)
    wanted = {
        kind: [way for way in all_ways if all(way.fits(one.linear.shape[1]) for one in own)]
        for kind, own in samples.items()
    }

    def measure(place: tuple[str, RowSample]) -> list[Loss]:
        kind, sample = place
        linear = sample.linear
        rows = sample.read(source)
        try:
            amax = check_finite(Cpu().amax(rows))
        except NumericError as error:
            detail = f"{linear.name}: {error.message}"
            next_step = f"Leave it out: {exclude_option(linear.module)}"
            raise NumericError(error.code, detail, next_step, linear.name) from None
        if calibration:
            weighed = Weighed.of(as_floats(rows), Inputs.of(calibration, linear.module))
            x, moments = weighed.x, weighed.inputs.moments
            losses = [weighed.loss(through_form(x, way, amax, moments)) for way in wanted[kind]]
        else:
            losses = plain_losses(rows, wanted[kind], amax)
        report(linear.name, sample.nbytes)
        return losses

    places = [(kind, sample) for kind, own in samples.items() for sample in own]
    found: dict[str, list[list[Loss]]] = {kind: [] for kind in samples}
    for (kind, _), losses in zip(
        places, read_each(source, measure, places, processors()), strict=True
    ):
        found[kind].append(losses)
    return {
        kind: dict(zip(wanted[kind], map(list, zip(*own, strict=True)), strict=True))
        for kind, own in found.items()
    }


def mean_loss(kinds: Sequence[MeasuredKind], way: Way) -> Loss | None:
    """Return the mean loss of kinds by weights; None if the form does not fit."""
    if any(way not in kind.losses for kind in kinds):
        return None
    weights = sum(kind.weights for kind in kinds)
    each = [(kind.weights / weights, kind.loss(way)) for kind in kinds]
    return Loss(
        math.fsum(share * loss.nmse for share, loss in each),
        math.fsum(share * loss.output for share, loss in each),
    )


def bits_per_weight(
    kinds: Sequence[MeasuredKind], way: Way, others: Mapping[str, Way] | None = None
) -> float:
    """Return the bits per weight of kinds in one form.

    others  exceptions: another form, by kind
    """
    nbits = sum(kind.nbits((others or {}).get(kind.kind, way)) for kind in kinds)
    return nbits / sum(kind.weights for kind in kinds)


def _describe_kind(kind: MeasuredKind) -> dict[str, object]:
    """Make one entry of `kinds`."""
    return {
        "kind": kind.short,
        "modules": kind.kind,
        "matrices": len(kind.linears),
        "weights": kind.weights,
        "sampled_matrices": len(kind.samples),
        "sampled_weights": kind.sampled_weights,
        "ways": [
            _describe_way(way, kind.loss(way), bits_per_weight([kind], way)) for way in kind.losses
        ],
    }


def _describe_way(way: Way, loss: Loss, bits: float) -> dict[str, object]:
    """Make one entry of `ways`; sqnr_db is None without a loss."""
    return {
        "format": way.format,
        "rule": way.rule,
        "block": way.block,
        "for_study": way.is_for_study,
        "bits_per_weight": bits,
        "sqnr_db": -decibels(loss.nmse) if loss.nmse else None,
        "output_error": math.sqrt(loss.output),
    }


def advise(kinds: Sequence[MeasuredKind]) -> dict[str, object]:
    """Recommend the four-bit form with the least output error.

    Names the kinds that lose much by it, with their cost in more bits.
    """
    found = {
        way: loss
        for way in kinds[0].losses
        if way.format in FP4_FORMATS and not way.is_for_study and (loss := mean_loss(kinds, way))
    }
    if not found:
        words = ["No four-bit format fits the columns of every kind."]
        return {"format": None, "rule": None, "words": words, "kinds": []}
    best = min(found, key=lambda way: found[way].output)
    whole = found[best]
    outstanding = []
    for kind in sorted(kinds, key=lambda kind: -kind.loss(best).output):
        if _times_whole(kind, best, whole) > STANDS_OUT:
            entry: dict[str, object] = {
                "kind": kind.short,
                "modules": kind.kind,
                "output_error": math.sqrt(kind.loss(best).output),
            }
            for way in KEPT:
                bits = bits_per_weight(kinds, best, {kind.kind: way})
                entry[f"{way.format}_bits_per_weight"] = bits
            outstanding.append(entry)
    return {
        "format": best.format,
        "rule": best.rule,
        "words": [*_compare_formats(kinds, found, best), *_compare_kinds(kinds, best, whole)],
        "kinds": outstanding,
    }


def _compare_formats(
    kinds: Sequence[MeasuredKind], found: Mapping[Way, Loss], best: Way
) -> Iterator[str]:
    """Yield a sentence for a format: its best rule, and losses by the others."""
    for name in sorted(FP4_FORMATS, key=lambda name: name != best.format):
        own = {way: loss for way, loss in found.items() if way.format == name}
        if not own:
            yield f"{name} does not fit the columns of every kind."
            continue
        way = min(own, key=lambda one: own[one].output)
        least = "Least output error in four bits: " if name == best.format else "The other format: "
        others = [
            f"{other.rule} {_percent(loss)}" for other, loss in own.items() if other is not way
        ]
        beside = f" ({', '.join(others)})" if others else ""
        bits = f"{bits_per_weight(kinds, way):.3f} bits per weight"
        yield f"{least}{name} with rule {way.rule}, {_percent(own[way])} at {bits}{beside}."


def _compare_kinds(kinds: Sequence[MeasuredKind], best: Way, whole: Loss) -> Iterator[str]:
    """Yield sentences on the kinds that lose most, and their cost in bits."""
    ranked = sorted(kinds, key=lambda kind: -kind.loss(best).output)
    if (times := _times_whole(ranked[0], best, whole)) <= STANDS_OUT:
        first = f"No kind stands out: the one that loses most, {ranked[0].short}"
        yield f"{first}, loses {times:.2f} times what the whole does."
        return
    for kind in ranked[:MOST_NAMED]:
        if (times := _times_whole(kind, best, whole)) > STANDS_OUT:
            lost = f"{kind.short} loses {_percent(kind.loss(best))}, {times:.2f} times the whole"
            costs = [
                f"in {way.format} {_percent(kind.loss(way))} and"
                f" {bits_per_weight(kinds, best, {kind.kind: way}):.3f} bits in the whole"
                for way in KEPT
            ]
            yield f"Worth more bits first: {lost}; {', '.join(costs)}."


def _times_whole(kind: MeasuredKind, way: Way, whole: Loss) -> float:
    """Return the output error of a kind over that of the whole."""
    return math.sqrt(kind.loss(way).output / whole.output) if whole.output else 0.0


def _percent(loss: Loss) -> str:
    return f"{100 * math.sqrt(loss.output):.2f} %"
