"""Choose formats of modules so that the artifact has a given size.

A *part* is what changes its format as one, because engines want it in one: members of a scale group, all experts of a layer, or
a linear layer by itself.  A part becomes the format that is asked for, or FP8 where the dialect holds both, or it stays.
Its error is the sum over its matrices of what each loses (sensitivity.py), experts counting together as one layer: noises of
layers add up, to first order, as shares of what each layer puts out, and of an expert as often as a token meets it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp4convert.calibration.statistics import check_linears
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears
from fp4convert.checkpoint.module_names import split_numbers
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.knapsack import Option, Part, choose
from fp4convert.conversion.options import DeviceOptions, QuantizeOptions
from fp4convert.conversion.quantization import plan_with, understand
from fp4convert.conversion.sensitivity import Bench, Candidate, Losses, measure
from fp4convert.errors import InputError
from fp4convert.execution.finish import nbytes_of
from fp4convert.execution.job import refuse_inside
from fp4convert.execution.plan_file import read_manifest
from fp4convert.execution.rounding import Rounding
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import FLOAT_TYPES, FP8
from fp4convert.planning.decisions import NAME_SOME, Verdict, decide, gather_made, judge_each
from fp4convert.planning.quantize_plan import KEPT_DTYPE, Scalars
from fp4convert.progress import Phases, size_text
from fp4convert.recipes.recipe import EXPERT_WORDS, Recipe, scale_group
from fp4convert.recipes.rules import FormatRule, Patterns
from fp4convert.recipes.toml_files import ANY_FORMAT, KEEP
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

MOST_TRIES = 50  # to meet a size: what names and records take changes a little with the choice


GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Goal:
    """What the artifact should come to: one of the two.

    nbytes  of all its files
    bits    of each weight, scales and all, averaged over the modules that would be four-bit without a goal
    """

    nbytes: int | None = None
    bits: float | None = None

    def within(self, low: float, high: float) -> None:
        """InputError where it is below the smallest artifact, or not below one of which everything stays."""
        wanted = self.nbytes if self.nbytes is not None else self.bits or 0.0
        if low <= wanted < high:
            return
        if self.nbytes is not None:
            asked, span = (
                f"--target-size {self.nbytes / GIGA:.9g} GB",
                (f"{math.ceil(low) / GIGA:.9f}", f"{high / GIGA:.9f} GB"),
            )
        else:
            asked, span = (
                f"--target-bits {self.bits:g}",
                (f"{math.ceil(low * 1e6) / 1e6:.6f}", f"{high:g} bits per weight"),
            )
        expected = f"expected from {span[0]} to below {span[1]}"
        reach = "all of it four-bit takes the lower, and nothing of it the upper"
        raise InputError(
            "target-range",
            f"{asked}; {expected}: {reach}",
            "Choose another; or give other modules to it: --include, --exclude.",
        )


def goal_of(gigabytes: float | None, bits: float | None) -> Goal | None:
    """What the options ask for; InputError for both of them, or for what is no positive number."""
    if gigabytes is not None and bits is not None:
        raise InputError(
            "target-twice",
            "--target-size and --target-bits are given; expected one of them",
            "Leave one out.",
        )
    for option, value, unit in (
        ("--target-size", gigabytes, "GB"),
        ("--target-bits", bits, "bits per weight"),
    ):
        if value is not None and not 0 < value < math.inf:
            detail = f"{option} {value:g}; expected a positive number of {unit}"
            raise InputError(
                "target-range",
                detail,
                "Give any such number: what is out of reach is told with the range.",
            )
    if gigabytes is not None:
        return Goal(nbytes=int(gigabytes * GIGA))
    return None if bits is None else Goal(bits=bits)


@dataclass(frozen=True, slots=True)
class Measuring:
    """How it is measured; nothing here changes the choice.

    output   where measurements are kept and read again
    is_kept  False where nothing may be written
    """

    output: Path | None = None
    is_kept: bool = True
    device: str = DeviceOptions.device
    workers: int = 0
    phases: Phases = field(default_factory=Phases)


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen.

    rules    formats of modules, for prepare_quantize
    nbytes   of all files of the artifact
    bits     per weight, as Goal means it
    error    of all parts together
    modules  how many become what
    words    for a person
    """

    goal: Goal
    rules: tuple[FormatRule, ...]
    nbytes: int
    bits: float
    error: float
    modules: Mapping[str, int]
    words: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The value of `target` in the document of a dry run."""
        formats = [{"format": rule.format, "modules": list(rule.patterns)} for rule in self.rules]
        asked = {"target_bytes": self.goal.nbytes, "target_bits": self.goal.bits}
        found = {"output_bytes": self.nbytes, "bits_per_weight": self.bits, "error": self.error}
        return {**asked, **found, "modules": dict(self.modules), "formats": formats}


def fit(source: Source, options: QuantizeOptions, goal: Goal, measuring: Measuring) -> Fit:
    """The formats by which the artifact of that request meets the goal with the least error; measures first.

    Raises  InputError for a goal out of reach, or where nothing is four-bit; what `measure` raises; OutputError for a folder that
            is somebody else's
    """
    if options.via:
        detail = "--via rounds twice, for comparison; with a target every module is rounded once"
        raise InputError("target-via", detail, "Leave --via out.")
    recipe, linears, scalars = understand(source, options)
    fitting = _Fitting.of(source, recipe, linears, scalars)
    calibration = scalars.measured.calibration if scalars.measured else None
    if not fitting.parts:
        raise InputError(
            "no-linears",
            "no module becomes four-bit, so that there is nothing to choose",
            NAME_SOME,
        )
    fitting.check(goal)
    if calibration:
        check_linears(calibration, (candidate.linear for candidate in fitting.candidates))
        for candidate in fitting.candidates:
            calibration.moments(candidate.linear.module)
    if measuring.output and measuring.is_kept:
        refuse_inside(source, measuring.output)
        if measuring.output.is_dir():
            read_manifest(measuring.output)
    rounding = Rounding(
        replace(recipe.target, method="rtn"), open_backend(measuring.device), calibration
    )
    table = fitting.dialect.TRAITS.fp8
    bench = Bench(
        source, rounding, calibration, str(table.made) if table else "row", *_places(measuring)
    )
    losses = measure(bench, fitting.candidates)
    return fitting.best(goal, losses, _told(source, measuring, fitting))


def _places(measuring: Measuring) -> tuple[Path | None, bool, int, Phases]:
    return measuring.output, measuring.is_kept, measuring.workers, measuring.phases


def _told(source: Source, measuring: Measuring, fitting: _Fitting) -> tuple[str, ...]:
    """What a person should know of the pass."""
    nbytes = sum(candidate.linear.nbytes for candidate in fitting.candidates)
    where = "from the Hub" if source.is_streamed else "from the disk"
    twice = f"a target reads the source twice {where}: {size_text(nbytes)} of it to measure, then all of it to convert"
    kept = (
        ()
        if measuring.is_kept
        else ("a dry run with a target measures, and keeps nothing: the run itself measures again",)
    )
    return (twice, *kept)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """One source, one request: what may become what, and what each takes.

    parts       modules of each, by its name
    verdicts    on them as four-bit, as FP8 and as staying, by the word of it
    candidates  what is to be measured
    """

    source: Source
    recipe: Recipe
    linears: Linears
    scalars: Scalars
    dialect: Dialect
    parts: Mapping[str, Sequence[str]]
    verdicts: Mapping[str, Mapping[str, Verdict]]
    candidates: Sequence[Candidate]

    @classmethod
    def of(cls, source: Source, recipe: Recipe, linears: Linears, scalars: Scalars) -> _Fitting:
        dialect = dialect_to_write(recipe.target)
        decided = decide(linears, recipe, dialect)
        own = {
            module: verdict
            for module, verdict in decided.items()
            if verdict.form
            and verdict.form.format is recipe.format
            and not verdict.stays
            and recipe.override(module) in (None, ANY_FORMAT)
        }
        words = [KEEP, *([FP8.name] if FP8 in dialect.TRAITS.mixes else [])]
        chosen = {module: verdict.linear for module, verdict in own.items()}
        others = {word: judge_each(chosen, _with(recipe, word, chosen), dialect) for word in words}
        parts: dict[str, list[str]] = defaultdict(list)
        for module in own:
            parts[_part_of(module, recipe)].append(module)
        groups = gather_made(decided)
        candidates = [
            Candidate(
                verdict.linear,
                tuple(groups[verdict.group]) if verdict.group else (verdict.linear,),
                formats,
            )
            for module, verdict in own.items()
            if (formats := _measured(module, recipe.format.name, own, others))
        ]
        every = {recipe.format.name: own, **others}
        return cls(source, recipe, linears, scalars, dialect, parts, every, candidates)

    def check(self, goal: Goal) -> None:
        """InputError for a goal that is out of reach."""
        parts = self.sized({})
        least = [min(part.options, key=lambda option: option.nbytes) for part in parts]
        low, high = (
            sum(option.nbytes for option in least),
            sum(max(o.nbytes for o in part.options) for part in parts),
        )
        if goal.bits is not None:
            goal.within(8 * low / self.weights, 8 * high / self.weights)
        else:
            nbytes = self.artifact_nbytes(parts, least)
            goal.within(nbytes, nbytes + high - low)

    @property
    def weights(self) -> int:
        return sum(
            math.prod(verdict.linear.shape)
            for verdict in self.verdicts[self.recipe.format.name].values()
        )

    def sized(self, losses: Losses) -> list[Part]:
        """The parts with the options that fit all of their modules; without losses, for their sizes alone."""
        return [
            Part(name, tuple(self._options(modules, losses)))
            for name, modules in self.parts.items()
        ]

    def _options(self, modules: Sequence[str], losses: Losses) -> list[Option]:
        found = []
        for word, verdicts in self.verdicts.items():
            own = [verdicts[module] for module in modules]
            if word == KEEP or all(
                verdict.form and verdict.form.format.name == word for verdict in own
            ):
                found.append(Option(word, self._nbytes(own), self._error(word, modules, losses)))
        return found

    def _nbytes(self, verdicts: Sequence[Verdict]) -> int:
        """What the tensors of these modules take."""
        made = {verdict.linear.module: verdict for verdict in verdicts if verdict.form}
        total = 0
        for form in dict.fromkeys(verdict.form for verdict in made.values()):
            shapes = {
                module: verdict.linear.shape
                for module, verdict in made.items()
                if verdict.form == form
            }
            for stem, shape in self.dialect.stems(shapes).items():
                specs = self.dialect.outputs(stem, shape, form) if form else ()
                total += sum(
                    TensorRef(spec.name, spec.dtype, spec.shape, "", 0).nbytes for spec in specs
                )
        return total + sum(_kept_nbytes(verdict) for verdict in verdicts if not verdict.form)

    def _error(self, word: str, modules: Sequence[str], losses: Losses) -> float:
        """The sum over kinds of what each loses; modules of one kind, which are experts, count as their mean."""
        kinds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for module in modules:
            kinds[split_numbers(module)[0]].append(losses.get(module, {}).get(word, 0.0))
        return math.fsum(math.fsum(found) / len(found) for found in kinds.values())

    def best(self, goal: Goal, losses: Losses, words: tuple[str, ...]) -> Fit:
        """The choice; its size is that of the files that will be written."""
        parts = self.sized(losses)
        smallest = [min(part.options, key=lambda option: option.nbytes) for part in parts]
        if goal.bits is not None:
            chosen = self._four_bit(
                parts, choose(parts, math.floor(goal.bits * self.weights / 8)) or smallest
            )
            return self._fit(goal, parts, chosen, words)
        wanted = goal.nbytes or 0
        beside = self.artifact_nbytes(parts, smallest) - sum(option.nbytes for option in smallest)
        for _ in range(MOST_TRIES):
            chosen = self._four_bit(parts, choose(parts, wanted - beside) or smallest)
            found = self._fit(goal, parts, chosen, words)
            if found.nbytes <= wanted:
                return found
            beside += found.nbytes - wanted
        return self._fit(goal, parts, smallest, words)

    def _four_bit(self, parts: Sequence[Part], chosen: list[Option]) -> list[Option]:
        """The choice; where it leaves nothing in the format that is asked for, the part that loses least becomes it."""
        name = self.recipe.format.name
        if any(option.word == name for option in chosen):
            return chosen
        own = [
            next((option for option in part.options if option.word == name), None) for part in parts
        ]
        added = [
            (after.error - before.error, at)
            for at, (before, after) in enumerate(zip(chosen, own, strict=True))
            if after
        ]
        _, first = min(added)
        return [option if at != first else own[first] or option for at, option in enumerate(chosen)]

    def _fit(
        self, goal: Goal, parts: Sequence[Part], chosen: Sequence[Option], words: tuple[str, ...]
    ) -> Fit:
        modules: dict[str, int] = defaultdict(int)
        for part, option in zip(parts, chosen, strict=True):
            modules[option.word] += len(self.parts[part.name])
        bits = 8 * sum(option.nbytes for option in chosen) / self.weights
        error = math.fsum(option.error for option in chosen)
        made = self.artifact_nbytes(parts, chosen)
        return Fit(goal, self._rules(parts, chosen), made, bits, error, dict(modules), words)

    def _rules(self, parts: Sequence[Part], chosen: Sequence[Option]) -> tuple[FormatRule, ...]:
        """[[format]] rows for all that does not become the format that is asked for."""
        patterns: dict[str, list[str]] = defaultdict(list)
        for part, option in zip(parts, chosen, strict=True):
            if option.word != self.recipe.format.name:
                patterns[option.word] += self._patterns(part.name)
        return tuple(FormatRule(Patterns(own), word) for word, own in patterns.items())

    def _patterns(self, part: str) -> list[str]:
        """A glob for experts, where it fits nothing else; else the names."""
        modules = self.parts[part]
        is_parent = len(modules) > 1 and _is_plain(part) and modules[0].startswith(f"{part}.")
        if is_parent and sum(module.startswith(f"{part}.") for module in self.linears.of) == len(
            modules
        ):
            return [f"{part}.*"]
        return [module if _is_plain(module) else f"re:{re.escape(module)}$" for module in modules]

    def artifact_nbytes(self, parts: Sequence[Part], chosen: Sequence[Option]) -> int:
        """Of all files, exactly."""
        plan = plan_with(
            self.source, self.recipe, self.linears, self.scalars, self._rules(parts, chosen)
        )
        return nbytes_of(artifact_job(self.source, plan).manifest())


def _with(recipe: Recipe, word: str, modules: Mapping[str, object]) -> Recipe:
    """The recipe by which all of these modules become that."""
    names = Patterns(
        module if _is_plain(module) else f"re:{re.escape(module)}$" for module in modules
    )
    return replace(recipe, formats=(FormatRule(names, word), *recipe.formats))


def _is_plain(name: str) -> bool:
    """True for a name that is a glob of itself alone."""
    return not set(name) & set("*?[") and not name.startswith("re:")


def _measured(
    module: str, name: str, own: Mapping[str, Verdict], others: Mapping[str, Mapping[str, Verdict]]
) -> tuple[str, ...]:
    """The formats in which a module is rounded; what is taken over as it is loses nothing."""
    four = (name,) if own[module].action == "quantize" else ()
    eight = others.get(FP8.name, {}).get(module)
    return (
        *four,
        *(
            (FP8.name,)
            if eight and eight.form and eight.form.format is FP8 and eight.action == "quantize"
            else ()
        ),
    )


def _part_of(module: str, recipe: Recipe) -> str:
    """The name of the part: experts by what they are in, members of a scale group by the group."""
    if any(word in module for word in EXPERT_WORDS) and len(split_numbers(module)[1]) > 1:
        texts, _ = split_numbers(module)
        return module[: len(module) - len(texts[-1])].rpartition(".")[0]
    group = scale_group(module, recipe.groups)
    return str(group) if group else module


def _kept_nbytes(verdict: Verdict) -> int:
    """Of a matrix that stays an ordinary tensor."""
    linear = verdict.linear
    dtype = KEPT_DTYPE if linear.coding.is_packed else linear.home.dtype
    return math.prod(linear.shape) * FLOAT_TYPES[dtype].nbytes
