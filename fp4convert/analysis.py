"""Which format, which rule, which modules: what each kind of matrix loses in every form, measured on rows that stand for it.

Kinds and the whole are told by ratios of powers: the mean over sampled matrices, each of which counts the same in its kind, and
kinds by their weights in the whole.  Nothing is written, and nothing is said of what was not measured.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fp4convert.advice import MeasuredKind, advise, describe_kind, describe_whole
from fp4convert.backends import processors
from fp4convert.calibration_file import Calibration
from fp4convert.codings import Linear
from fp4convert.dialects import dialect_to_write
from fp4convert.errors import InputError, NumericError
from fp4convert.formats import NVFP4
from fp4convert.inputs import Inputs, describe_inputs
from fp4convert.linears import find_linears
from fp4convert.losses import Loss, Way, losses_of, rows_of, ways
from fp4convert.progress import Phases
from fp4convert.recipe import Choice, Target, build_recipe
from fp4convert.sampling import Sample, draw_sample, kinds_of, short_names
from fp4convert.sources import Source, stopping
from fp4convert.verdicts import NAME_SOME, decide

ASKED_AT_ONCE = 8  # of a Hub


@dataclass(frozen=True, slots=True)
class Study:
    """What `analyze` is asked for.

    sample_nbytes  of the source that may be read; None for as many as usual
    calibration    whose inputs count; None for Gaussians of unit variance
    """

    choice: Choice
    sample_nbytes: int | None = None
    calibration: Calibration | None = None


def analyze(source: Source, study: Study, phases: Phases | None = None) -> dict[str, Any]:
    """The document of `fp4convert analyze --json`.

    Raises  InputError for nothing to quantize, a sample too small, or a calibration of something else; NumericError for weights
            that are NaN or Inf
    """
    phases = phases or Phases()
    kinds = kinds_of(find_quantizable(source, study.choice))
    if not kinds:
        raise InputError("no-linears", f"{source.name}: the recipe quantizes no matrix; expected some to analyze", NAME_SOME)
    if study.calibration:
        study.calibration.check(source, [linear for linears in kinds.values() for linear in linears])
    samples = draw_sample(kinds, study.sample_nbytes)
    phases.begin("measure", sum(sample.nbytes for own in samples.values() for sample in own))
    losses, names = _measure(source, study, samples, phases.report), short_names(list(kinds))
    measured = [MeasuredKind(kind, names[kind], linears, samples[kind], losses[kind]) for kind, linears in kinds.items()]
    return _describe(source, study, measured)


def sample_nbytes(gigabytes: float | None) -> int | None:
    """That many bytes; InputError for what is no positive number."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:
        raise InputError("sample-size", f"--sample {gigabytes:g} GB; expected a positive number", "Leave it out for 0.02.")
    return int(gigabytes * 10**9)


def find_quantizable(source: Source, choice: Choice) -> dict[str, Linear]:
    """The linear layers that would become four-bit, by module."""
    recipe = build_recipe(Target(NVFP4.name, "compressed-tensors"), source.checkpoint.config, choice)
    verdicts = decide(find_linears(source, recipe), recipe, dialect_to_write(recipe.target))
    return {module: verdict.linear for module, verdict in verdicts.items() if verdict.form and verdict.form.format.is_fp4}


def _measure(
    source: Source, study: Study, samples: Mapping[str, list[Sample]], report: Callable[[str, int], None]
) -> dict[str, dict[Way, list[Loss]]]:
    """The losses of every sample, by kind and form."""
    wanted = {
        kind: [way for way in ways(study.calibration is not None) if all(way.fits(sample.linear.shape[1]) for sample in own)]
        for kind, own in samples.items()
    }

    def measure(kind: str, sample: Sample) -> list[Loss]:
        linear = sample.linear
        x = rows_of(linear.coding.weights(linear, source), sample.strips)
        try:
            found = list(losses_of(x, Inputs.of(study.calibration, linear.module), wanted[kind]))
        except NumericError as error:
            next_step = f"Leave it out: --exclude {shlex.quote(linear.module)}."
            raise NumericError(error.code, f"{linear.name}: {error.message}", next_step, linear.name) from None
        report(linear.name, sample.nbytes)
        return found

    threads = max(processors(), ASKED_AT_ONCE) if source.is_streamed else processors()
    with ThreadPoolExecutor(threads) as pool, stopping(source):
        coming = {kind: [pool.submit(measure, kind, sample) for sample in own] for kind, own in samples.items()}
        try:
            found = {kind: [future.result() for future in own] for kind, own in coming.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {kind: dict(zip(wanted[kind], map(list, zip(*own, strict=True)), strict=True)) for kind, own in found.items()}


def _describe(source: Source, study: Study, kinds: list[MeasuredKind]) -> dict[str, object]:
    """The document: the whole, every kind, and what follows from them in words."""
    weights, sampled = sum(kind.weights for kind in kinds), sum(kind.sampled_weights for kind in kinds)
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
