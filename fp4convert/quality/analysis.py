"""Measure what each kind of module loses in each format, and advise."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp4convert.calibration.input_power import Inputs, describe_inputs
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.backends.base import processors
from fp4convert.numerics.error_sums import decibels
from fp4convert.numerics.formats import FORMATS, FP8, NVFP4
from fp4convert.planning.decisions import NAME_SOME, decide
from fp4convert.progress import Phases
from fp4convert.quality.losses import (
    BF16,
    ROW,
    Loss,
    Sample,
    Way,
    draw_sample,
    kinds_of,
    losses_of,
    rows_of,
    short_names,
    ways,
)
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.source import Source, read_each

STANDS_OUT = 1.15  # times the output error of the whole, before a kind is named
MOST_NAMED = 3  # of them
KEPT = (Way(FP8.name, "amax", ROW), Way(BF16))  # what a kind can be instead of four-bit


@dataclass(frozen=True, slots=True)
class MeasuredKind:
    """One kind of matrices, and what was measured of it.

    losses  of every sampled matrix, by the form; of forms that fit all of them alone
    """

    kind: str
    short: str
    linears: Sequence[Linear]
    samples: Sequence[Sample]
    losses: Mapping[Way, Sequence[Loss]]

    @property
    def weights(self) -> int:
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)

    @property
    def sampled_weights(self) -> int:
        return sum(sample.rows * sample.linear.shape[1] for sample in self.samples)

    def bits(self, way: Way) -> float:
        """Bits that all matrices of the kind take."""
        return sum(way.nbits(linear.shape) for linear in self.linears)

    def loss(self, way: Way) -> Loss:
        """The mean over its sampled matrices."""
        found = self.losses[way]
        return Loss(
            math.fsum(loss.nmse for loss in found) / len(found),
            math.fsum(loss.output for loss in found) / len(found),
        )


def whole_of(kinds: Sequence[MeasuredKind], way: Way) -> Loss | None:
    """The mean over kinds, by their weights; None where the form does not fit all of them."""
    if any(way not in kind.losses for kind in kinds):
        return None
    weights = sum(kind.weights for kind in kinds)
    each = [(kind.weights / weights, kind.loss(way)) for kind in kinds]
    return Loss(
        math.fsum(share * loss.nmse for share, loss in each),
        math.fsum(share * loss.output for share, loss in each),
    )


def describe_kind(kind: MeasuredKind) -> dict[str, object]:
    """One entry of `kinds`."""
    return {
        "kind": kind.short,
        "modules": kind.kind,
        "matrices": len(kind.linears),
        "weights": kind.weights,
        "sampled_matrices": len(kind.samples),
        "sampled_weights": kind.sampled_weights,
        "ways": [
            {**_named(way), **_numbers(kind.loss(way), kind.bits(way) / kind.weights)}
            for way in kind.losses
        ],
    }


def describe_whole(kinds: Sequence[MeasuredKind]) -> list[dict[str, object]]:
    """The entries of `ways`: every form that fits all kinds."""
    weights = sum(kind.weights for kind in kinds)
    found = ((way, whole_of(kinds, way)) for way in kinds[0].losses)
    return [
        {**_named(way), **_numbers(loss, _bits(kinds, way) / weights)}
        for way, loss in found
        if loss
    ]


def _named(way: Way) -> dict[str, object]:
    return {
        "format": way.format,
        "rule": way.rule,
        "block": way.block,
        "for_study": way.is_for_study,
    }


def _numbers(loss: Loss, bits_per_weight: float) -> dict[str, object]:
    """sqnr_db is None where nothing is lost."""
    sqnr_db = -decibels(loss.nmse) if loss.nmse else None
    return {
        "bits_per_weight": bits_per_weight,
        "sqnr_db": sqnr_db,
        "output_error": math.sqrt(loss.output),
    }


def _bits(
    kinds: Sequence[MeasuredKind], way: Way, others: Mapping[str, Way] | None = None
) -> float:
    """Bits of all kinds in one form, but for some in others."""
    return sum(kind.bits((others or {}).get(kind.kind, way)) for kind in kinds)


def advise(kinds: Sequence[MeasuredKind]) -> dict[str, object]:
    """The recommendation: the form of four bits with the least output error, and which kinds lose most by it."""
    found = {
        way: loss for way in kinds[0].losses if _is_for_use(way) and (loss := whole_of(kinds, way))
    }
    if not found:
        return {
            "format": None,
            "rule": None,
            "words": ["No four-bit format fits the columns of every kind."],
            "kinds": [],
        }
    best = min(found, key=lambda way: found[way].output)
    ranked = sorted(kinds, key=lambda kind: -kind.loss(best).output)
    outstanding = [kind for kind in ranked if _times(kind, best, found[best]) > STANDS_OUT]
    return {
        "format": best.format,
        "rule": best.rule,
        "words": [*_tell_formats(kinds, found, best), *_tell_kinds(kinds, best, found[best])],
        "kinds": [_instead(kinds, kind, best) for kind in outstanding],
    }


def _is_for_use(way: Way) -> bool:
    return way.is_fp4 and not way.is_for_study


def _tell_formats(
    kinds: Sequence[MeasuredKind], found: Mapping[Way, Loss], best: Way
) -> Iterator[str]:
    """The best rule of each format, and what the others lose."""
    for name in sorted(FORMATS, key=lambda name: name != best.format):
        own = {way: loss for way, loss in found.items() if way.format == name}
        if not own:
            yield f"{name} does not fit the columns of every kind."
            continue
        way = min(own, key=lambda one: own[one].output)
        bits = _bits(kinds, way) / sum(kind.weights for kind in kinds)
        least = "Least output error in four bits: " if name == best.format else "The other format: "
        others = [
            f"{other.rule} {_percent(loss)}" for other, loss in own.items() if other is not way
        ]
        beside = f" ({', '.join(others)})" if others else ""
        yield f"{least}{name} with rule {way.rule}, {_percent(own[way])} at {bits:.3f} bits per weight{beside}."


def _tell_kinds(kinds: Sequence[MeasuredKind], best: Way, whole: Loss) -> Iterator[str]:
    """The kinds that lose most, and what they would be and cost in more bits."""
    ranked = sorted(kinds, key=lambda kind: -kind.loss(best).output)
    if (times := _times(ranked[0], best, whole)) <= STANDS_OUT:
        yield f"No kind stands out: the one that loses most, {ranked[0].short}, loses {times:.2f} times what the whole does."
        return
    for kind in ranked[:MOST_NAMED]:
        if (times := _times(kind, best, whole)) > STANDS_OUT:
            entry = _instead(kinds, kind, best)
            costs = [
                f"in {way.format} {_percent(kind.loss(way))} and {entry[f'{way.format}_bits_per_weight']:.3f} bits in the whole"
                for way in KEPT
            ]
            lost = f"{kind.short} loses {_percent(kind.loss(best))}, {times:.2f} times the whole"
            yield f"Worth more bits first: {lost}; {', '.join(costs)}."


def _times(kind: MeasuredKind, way: Way, whole: Loss) -> float:
    """Its output error as a multiple of the whole's."""
    return math.sqrt(kind.loss(way).output / whole.output) if whole.output else 0.0


def _instead(kinds: Sequence[MeasuredKind], kind: MeasuredKind, best: Way) -> dict[str, object]:
    """What it comes to where one kind gets more bits than all others."""
    weights = sum(each.weights for each in kinds)
    whole = {
        f"{way.format}_bits_per_weight": _bits(kinds, best, {kind.kind: way}) / weights
        for way in KEPT
    }
    return {
        "kind": kind.short,
        "modules": kind.kind,
        "output_error": math.sqrt(kind.loss(best).output),
        **whole,
    }


def _percent(loss: Loss) -> str:
    return f"{100 * math.sqrt(loss.output):.2f} %"


@dataclass(frozen=True, slots=True)
class Study:
    """What `analyze` is asked for.

    sample_nbytes  of the source that may be read; None for as many as usual
    calibration    whose inputs count; None for Gaussians of unit variance
    """

    options: RecipeOptions
    sample_nbytes: int | None = None
    calibration: Calibration | None = None


def analyze(source: Source, study: Study, phases: Phases | None = None) -> dict[str, Any]:
    """The document of `fp4convert analyze --json`.

    Raises  InputError for nothing to quantize, a sample too small, or a calibration of something else; NumericError for weights
            that are NaN or Inf
    """
    phases = phases or Phases()
    kinds = kinds_of(find_quantizable(source, study.options))
    if not kinds:
        raise InputError(
            "no-linears",
            f"{source.name}: the recipe quantizes no matrix; expected some to analyze",
            NAME_SOME,
        )
    if study.calibration:
        study.calibration.check(
            source, [linear for linears in kinds.values() for linear in linears]
        )
    samples = draw_sample(kinds, study.sample_nbytes)
    phases.begin("measure", sum(sample.nbytes for own in samples.values() for sample in own))
    losses, names = _measure(source, study, samples, phases.report), short_names(list(kinds))
    measured = [
        MeasuredKind(kind, names[kind], linears, samples[kind], losses[kind])
        for kind, linears in kinds.items()
    ]
    return _describe(source, study, measured)


def sample_nbytes(gigabytes: float | None) -> int | None:
    """That many bytes; InputError for what is no positive number."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:
        raise InputError(
            "sample-size",
            f"--sample {gigabytes:g} GB; expected a positive number",
            "Leave it out for 0.02.",
        )
    return int(gigabytes * 10**9)


def find_quantizable(source: Source, options: RecipeOptions) -> dict[str, Linear]:
    """The linear layers that would become four-bit, by module."""
    recipe = build_recipe(
        Target(NVFP4.name, "compressed-tensors"), source.checkpoint.config, options
    )
    verdicts = decide(find_linears(source, recipe), recipe, dialect_to_write(recipe.target))
    return {
        module: verdict.linear
        for module, verdict in verdicts.items()
        if verdict.form and verdict.form.format.is_fp4
    }


def _measure(
    source: Source,
    study: Study,
    samples: Mapping[str, list[Sample]],
    report: Callable[[str, int], None],
) -> dict[str, dict[Way, list[Loss]]]:
    """The losses of every sample, by kind and form."""
    wanted = {
        kind: [
            way
            for way in ways(study.calibration is not None)
            if all(way.fits(sample.linear.shape[1]) for sample in own)
        ]
        for kind, own in samples.items()
    }

    def measure(place: tuple[str, Sample]) -> list[Loss]:
        kind, sample = place
        linear = sample.linear
        x = rows_of(linear.coding.weights(linear, source), sample.strips)
        try:
            found = list(losses_of(x, Inputs.of(study.calibration, linear.module), wanted[kind]))
        except NumericError as error:
            next_step = f"Leave it out: --exclude {shlex.quote(linear.module)}."
            raise NumericError(
                error.code, f"{linear.name}: {error.message}", next_step, linear.name
            ) from None
        report(linear.name, sample.nbytes)
        return found

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


def _describe(source: Source, study: Study, kinds: list[MeasuredKind]) -> dict[str, object]:
    """The document: the whole, every kind, and what follows from them in words."""
    weights, sampled = (
        sum(kind.weights for kind in kinds),
        sum(kind.sampled_weights for kind in kinds),
    )
    advice = advise(kinds)
    return {
        "source": source.name,
        **describe_inputs(study.calibration),
        "weights": weights,
        "sampled_weights": sampled,
        "sampled_bytes": sum(sample.nbytes for kind in kinds for sample in kind.samples),
        "matrices": sum(len(kind.linears) for kind in kinds),
        "sampled_matrices": sum(len(kind.samples) for kind in kinds),
        "ways": describe_whole(kinds),
        "kinds": [describe_kind(kind) for kind in kinds],
        "recommendation": advice,
        "warnings": _doubts(kinds),
    }


def _doubts(kinds: list[MeasuredKind]) -> list[str]:
    packed = [linear for kind in kinds for linear in kind.linears if linear.coding.is_packed]
    if not packed:
        return []
    return [
        f"{len(packed)} matrices are {packed[0].coding.word} or otherwise packed already: losses are against what they hold now,"
        " not against the weights that they were made from"
    ]
