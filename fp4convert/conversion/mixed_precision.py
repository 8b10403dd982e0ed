"""Choose formats of modules so that the artifact has a given size.

parts.py has the parts of a model, their options and errors, and the choice for a number of bytes;
here a goal becomes that number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fp4convert.calibration.statistics import check_linears
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4
from fp4convert.checkpoint.encodings.floats import advise_on_types
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.device_choice import choose_device
from fp4convert.conversion.parts import Option, Parts, choose, is_plain, pattern_of
from fp4convert.conversion.quantize import place_outputs
from fp4convert.conversion.request import Request
from fp4convert.conversion.weight_losses import SAMPLE_NBYTES, Bench, Losses, measure
from fp4convert.errors import InputError
from fp4convert.execution.job import refuse_inside
from fp4convert.execution.plan_file import read_manifest
from fp4convert.execution.settings import Settings
from fp4convert.numerics.backends import open_backend
from fp4convert.planning.decisions import NAME_SOME
from fp4convert.progress import size_text
from fp4convert.recipes.rules import FormatRule, Patterns

GIGA = 10**9
NMSE = "nmse"  # what errors are where outputs were not measured
MOST_TRIES = 50  # to meet a size: what names and records take changes a little with the choice


class Goal(NamedTuple):
    """What the artifact should come to: one of the two.

    nbytes  of all its files
    bits    of each weight, scales and all, averaged over the modules that would be four-bit without
            a goal
    """

    nbytes: int | None = None
    bits: float | None = None

    @property
    def asked(self) -> str:
        if self.nbytes is not None:
            return f"--target-size {self.nbytes / GIGA:.9g} GB"
        return f"--target-bits {self.bits:g}"

    def within(self, low: float, high: float, least_formats: str) -> None:
        """Raise InputError where no choice of formats meets the goal.

        low            what the smallest artifact has, of the modules in `least_formats`
        high           what one has of which everything stays; the goal has to be below
        """
        wanted = self.nbytes if self.nbytes is not None else self.bits or 0.0
        if low <= wanted < high:
            return
        if self.nbytes is not None:
            least, most = f"{math.ceil(low) / GIGA:.9f}", f"{high / GIGA:.9f} GB"
        else:
            least, most = f"{math.ceil(low * 1e6) / 1e6:.6f}", f"{high:g} bits per weight"
        reach = f"the least is all modules in {least_formats}, the most is none"
        detail = f"{self.asked}; expected from {least} to below {most}: {reach}"
        next_step = "Choose one in that range, or change the modules: --include, --exclude."
        raise InputError("target-range", detail, next_step)


def goal_of(gigabytes: float | None, bits: float | None) -> Goal | None:
    """Return what the options ask for; None where they ask for nothing.

    Raises InputError for both of them, or for what is no positive number
    """
    if gigabytes is not None and bits is not None:
        detail = "--target-size and --target-bits are given; expected one of them"
        raise InputError("target-twice", detail, "Leave one out.")
    for option, value, unit in (
        ("--target-size", gigabytes, "GB"),
        ("--target-bits", bits, "bits per weight"),
    ):
        if value is not None and not 0 < value * GIGA < math.inf:
            detail = f"{option} {value:g}; expected a positive number of {unit}"
            next_step = "Give one; where it cannot be reached, the error shows the range."
            raise InputError("target-range", detail, next_step)
    if gigabytes is not None:
        return Goal(nbytes=int(gigabytes * GIGA))
    return None if bits is None else Goal(bits=bits)


# Measured on a small trained Llama at 4.75 bits, W4A4: -3 % KL by weights, -36 to -45 % by outputs.
BY_WEIGHTS = (
    "formats are chosen by the error of weights, and with --activations 4 most is lost by inputs:"
    " what outputs lose chooses better; calibrate with --sensitivity, or give a text (--text FILE)"
)


class Fit(NamedTuple):
    """What was chosen.

    rules    formats of modules, for prepare_quantize
    nbytes   of all files of the artifact
    bits     per weight, as Goal means it
    error    of all parts together
    unit     of the error: nmse, or what the losses of a calibration are
    modules  how many become what
    words    for a person
    """

    goal: Goal
    rules: tuple[FormatRule, ...]
    nbytes: int
    bits: float
    error: float
    unit: str
    modules: Mapping[str, int]
    words: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Make the value of `target` in the document of a dry run."""
        formats = [{"format": rule.format, "modules": list(rule.patterns)} for rule in self.rules]
        asked = {"target_bytes": self.goal.nbytes, "target_bits": self.goal.bits}
        found = {"output_bytes": self.nbytes, "bits_per_weight": self.bits}
        error = {"error": self.error, "unit": self.unit}
        return {**asked, **found, **error, "modules": dict(self.modules), "formats": formats}


def fit(
    request: Request, goal: Goal, output: Path, settings: Settings, may_write: bool
) -> Fit | None:
    """Measure, and choose the formats that meet the goal with the least error.

    None where the goal is met without a choice: then all modules have the format asked for.

    may_write  measurements are kept in the output folder; they are read from there in any case
    Raises  InputError for a goal out of reach, or where nothing is rounded; what `measure` raises;
            OutputError for a folder that is somebody else's
    """
    source, recipe, calibration = request.source, request.recipe, request.scalars.calibration
    if recipe.target.via:
        detail = "--via rounds twice, for comparison; with a target every module is rounded once"
        raise InputError("target-via", detail)
    parts = Parts.of(source, recipe, request.linears, request.scalars)
    if not parts.modules:
        detail = f"no module becomes {recipe.format.name}, so there is nothing to choose"
        next_step = advise_on_types(source.checkpoint.tensors, NAME_SOME)
        raise InputError("no-linears", detail, next_step)
    fitting, known = _Fitting(goal, parts, request, request.recorded(None)), parts.known_losses()
    if fitting.is_met(settings.tell):
        return None
    fitting.check()
    if not any(recipe.format.name in one.formats for one in parts.candidates):
        count = sum(map(len, parts.modules.values()))
        detail = f"{goal.asked} changes nothing: all {count} {recipe.format.name} modules are"
        detail = f"{detail} taken over as they are; expected one that is rounded"
        raise InputError("idle-option", detail)
    if may_write:
        refuse_inside(source, output)
        if output.is_dir():
            read_manifest(output)
    if known:
        return fitting.best(*known)
    if calibration:
        check_linears(calibration, (candidate.linear for candidate in parts.candidates))
        for candidate in parts.candidates:
            calibration.moments(candidate.linear.module)
    losses, words = _measure(parts, output, settings, may_write)
    if recipe.target.activations == ACTIVATIONS_FP4:
        words = (*words, BY_WEIGHTS)
    return fitting.best(losses, words)


def _measure(
    parts: Parts, output: Path, settings: Settings, may_write: bool
) -> tuple[Losses, tuple[str, ...]]:
    """Measure weights; say what a person should know of it."""
    source, recipe, candidates = parts.source, parts.recipe, parts.candidates
    calibration, table = parts.scalars.calibration, parts.dialect.TRAITS.fp8
    target = recipe.target._replace(method="rtn")
    measured = (one.linear for one in candidates if recipe.format.name in one.formats)
    choice = choose_device(settings.device, target, measured)
    if choice.device != "cpu" and choice.reason:
        settings.tell(f"measuring: {choice.reason}")
    bench = Bench(
        source,
        target,
        open_backend(choice.device),
        calibration,
        str(table.made) if table else "row",
        output,
        may_write,
        settings,
    )
    losses = measure(bench, candidates)
    nbytes = sum(candidate.nbytes for candidate in candidates)
    matrices = sum(map(len, parts.modules.values()))
    where = "from the Hub" if source.is_streamed else "from the disk"
    words = [
        f"a target reads {size_text(nbytes)} {where} to measure {len(candidates)} of"
        f" {matrices} matrices: of each, or of all experts of a kind and layer, rows of"
        f" {size_text(SAMPLE_NBYTES)} that lie evenly over it; then all of the source to convert"
    ]
    if not may_write:
        words.append("a dry run with a target keeps no measurements: the run itself measures again")
    return losses, tuple(words)


class _Fitting(NamedTuple):
    """A goal, and the choices that meet it."""

    goal: Goal
    parts: Parts
    request: Request
    recorded: Mapping[str, object]

    def is_met(self, tell: Callable[[str], None]) -> bool:
        """Return whether the size holds the weights as they are; say so."""
        parts = self.parts.sized({})
        least, high = self._smallest(parts), 0
        for options, option in zip(parts, least, strict=True):
            high += max(option.nbytes for option in options) - option.nbytes
        whole = self.artifact_nbytes(least) + high
        if self.goal.nbytes is None or self.goal.nbytes < whole:
            return False
        name = self.parts.recipe.format.name
        tell(
            f"{size_text(self.goal.nbytes)} hold the weights as they are ({size_text(whole)}):"
            f" no format has to be chosen, and all modules become {name}"
        )
        return True

    def check(self) -> None:
        """Raise InputError for a goal that is out of reach."""
        goal, weights = self.goal, self.parts.weights
        parts = self.parts.sized({})
        least = self._smallest(parts)
        low = sum(option.nbytes for option in least)
        high = sum(max(option.nbytes for option in options) for options in parts)
        formats = " and ".join(sorted({option.word for option in least}))
        if goal.bits is not None:
            goal.within(8 * low / weights, 8 * high / weights, formats)
        else:
            nbytes = self.artifact_nbytes(least)
            goal.within(nbytes, nbytes + high - low, formats)

    def best(self, losses: Losses, words: tuple[str, ...]) -> Fit:
        """Choose the formats; the size is that of the files that will be written."""
        goal, parts = self.goal, self.parts.sized(losses)
        smallest = self._smallest(parts)
        if goal.bits is not None:
            most = math.floor(goal.bits * self.parts.weights / 8)
            return self._fit(self._choose(parts, most), words)
        wanted = goal.nbytes or 0
        beside = self.artifact_nbytes(smallest) - sum(option.nbytes for option in smallest)
        for _ in range(MOST_TRIES):
            found = self._fit(self._choose(parts, wanted - beside), words)
            if found.nbytes <= wanted:
                return found
            beside += found.nbytes - wanted
        return self._fit(smallest, words)

    def _smallest(self, parts: Sequence[Sequence[Option]]) -> list[Option]:
        """Return the choice of least bytes that has the format asked for."""
        return [min(options, key=lambda option: option.nbytes) for options in self._forced(parts)]

    def _choose(self, parts: Sequence[Sequence[Option]], most: int) -> list[Option]:
        """Choose with something in the format asked for; else the smallest choice."""
        for tried in (parts, self._forced(parts)):
            if found := choose(tried, most):
                found = self._with_asked_format(parts, found)
                if sum(option.nbytes for option in found) <= most:
                    return found
        return self._smallest(parts)

    def _forced(self, parts: Sequence[Sequence[Option]]) -> list[Sequence[Option]]:
        """Give one part, the cheapest, no format but that asked for."""
        name = self.parts.recipe.format.name
        dearer = {
            at: own.nbytes - min(option.nbytes for option in options)
            for at, options in enumerate(parts)
            for own in options
            if own.word == name
        }
        first = min(dearer, key=lambda at: dearer[at])
        return [
            options if at != first else [own for own in options if own.word == name]
            for at, options in enumerate(parts)
        ]

    def _with_asked_format(
        self, parts: Sequence[Sequence[Option]], chosen: list[Option]
    ) -> list[Option]:
        """Give the format asked for to the part that loses least, if none has it."""
        name = self.parts.recipe.format.name
        if any(option.word == name for option in chosen):
            return chosen
        own = [
            next((option for option in options if option.word == name), None) for options in parts
        ]
        added = [
            (after.error - before.error, at)
            for at, (before, after) in enumerate(zip(chosen, own, strict=True))
            if after
        ]
        _, first = min(added)
        return [option if at != first else own[first] or option for at, option in enumerate(chosen)]

    def _fit(self, chosen: Sequence[Option], words: tuple[str, ...]) -> Fit:
        """Say what a choice comes to."""
        modules: dict[str, int] = defaultdict(int)
        for own, option in zip(self.parts.modules.values(), chosen, strict=True):
            modules[option.word] += len(own)
        bits = 8 * sum(option.nbytes for option in chosen) / self.parts.weights
        error = math.fsum(option.error for option in chosen)
        made = self.artifact_nbytes(chosen)
        measured = self.parts.measured
        unit = measured.loss_kind if measured else NMSE
        rules = self._rules(chosen)
        return Fit(self.goal, rules, made, bits, error, unit, dict(modules), words)

    def _rules(self, chosen: Sequence[Option]) -> tuple[FormatRule, ...]:
        """Write [[format]] rows for all that gets another format than asked for."""
        patterns: dict[str, list[str]] = defaultdict(list)
        for (part, modules), option in zip(self.parts.modules.items(), chosen, strict=True):
            if option.word == self.parts.recipe.format.name:
                continue
            beginning = f"{part}."
            # A glob for experts, where it fits nothing else; else the names.
            is_parent = is_plain(part) and modules[0].startswith(beginning)
            if (
                len(modules) > 1
                and is_parent
                and sum(module.startswith(beginning) for module in self.parts.linears.of)
                == len(modules)
            ):
                patterns[option.word].append(f"{beginning}*")
            else:
                patterns[option.word] += map(pattern_of, modules)
        return tuple(FormatRule(Patterns(own), word) for word, own in patterns.items())

    def artifact_nbytes(self, chosen: Sequence[Option]) -> int:
        """Count the bytes of all files, exactly."""
        plan = place_outputs(self.request, self._rules(chosen))
        plan = replace(plan, goal=self.request.goal, options=self.recorded)
        return artifact_job(self.parts.source, plan).result_nbytes
