"""Choose formats of modules so that the artifact has a given size.

A *part* is what changes its format as one, because engines want it in one: members of a scale
group, all experts of a layer, or a linear layer by itself. A part becomes the format that is asked
for, or FP8 where the dialect holds both (MXFP8 in mlx), or it stays. Its error is the sum over its
matrices of what each loses (sensitivity.py), experts counting together as one layer: noises of
layers add up, to first order, as shares of what each layer puts out, and of an expert as often as a
token meets it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fp4convert.calibration.statistics import check_linears
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears
from fp4convert.checkpoint.module_names import split_numbers
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.device_choice import choose_device
from fp4convert.conversion.knapsack import Option, choose
from fp4convert.conversion.options import QuantizeOptions
from fp4convert.conversion.quantization import plan_with, understand
from fp4convert.conversion.sensitivity import Bench, Candidate, Losses, measure
from fp4convert.errors import InputError
from fp4convert.execution.job import refuse_inside
from fp4convert.execution.plan_file import read_manifest
from fp4convert.execution.rounding import Rounding
from fp4convert.numerics.backends import open_backend
from fp4convert.planning.decisions import NAME_SOME, Verdict, decide, judge_each
from fp4convert.planning.global_scales import given_amaxes
from fp4convert.planning.quantize_plan import Scalars, is_expanded, kept_spec
from fp4convert.progress import Phases, size_text
from fp4convert.recipes.recipe import EXPERT_WORDS, Recipe, gather_groups, scale_groups
from fp4convert.recipes.rules import FormatRule, Patterns
from fp4convert.recipes.toml_files import ANY_FORMAT, KEEP
from fp4convert.storage.safetensors import TensorRef, nbytes_of
from fp4convert.storage.source import Source

MOST_TRIES = 50  # to meet a size: what names and records take changes a little with the choice
GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Goal:
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

    def within(self, low: float, high: float) -> None:
        """Raise InputError where no choice of formats meets the goal.

        low   what the smallest artifact has
        high  what one has of which everything stays; the goal has to be below
        """
        wanted = self.nbytes if self.nbytes is not None else self.bits or 0.0
        if low <= wanted < high:
            return
        if self.nbytes is not None:
            least, most = f"{math.ceil(low) / GIGA:.9f}", f"{high / GIGA:.9f} GB"
        else:
            least, most = f"{math.ceil(low * 1e6) / 1e6:.6f}", f"{high:g} bits per weight"
        reach = "the least is all modules in four bits, the most is none"
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
        if value is not None and not 0 < value < math.inf:
            detail = f"{option} {value:g}; expected a positive number of {unit}"
            next_step = "Give one; where it cannot be reached, the error shows the range."
            raise InputError("target-range", detail, next_step)
    if gigabytes is not None:
        return Goal(nbytes=int(gigabytes * GIGA))
    return None if bits is None else Goal(bits=bits)


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
        """Make the value of `target` in the document of a dry run."""
        formats = [{"format": rule.format, "modules": list(rule.patterns)} for rule in self.rules]
        asked = {"target_bytes": self.goal.nbytes, "target_bits": self.goal.bits}
        found = {"output_bytes": self.nbytes, "bits_per_weight": self.bits, "error": self.error}
        return {**asked, **found, "modules": dict(self.modules), "formats": formats}


def fit(
    source: Source, options: QuantizeOptions, goal: Goal, phases: Phases, may_write: bool
) -> Fit:
    """Measure, and choose the formats that meet the goal with the least error.

    may_write  measurements are kept in the output folder; they are read from there in any case
    Raises  InputError for a goal out of reach, or where nothing is rounded; what `measure` raises;
            OutputError for a folder that is somebody else's
    """
    if options.via:
        detail = "--via rounds twice, for comparison; with a target every module is rounded once"
        raise InputError("target-via", detail)
    recipe, linears, scalars = understand(source, options)
    fitting = _Fitting.of(source, recipe, linears, scalars)
    calibration = scalars.calibration
    if not fitting.parts:
        detail = "no module becomes four-bit, so there is nothing to choose"
        raise InputError("no-linears", detail, NAME_SOME)
    fitting.check(goal)
    if not any(recipe.format.name in one.formats for one in fitting.candidates):
        count = sum(map(len, fitting.parts.values()))
        detail = f"{goal.asked} changes nothing: all {count} four-bit modules are taken over as"
        raise InputError("idle-option", f"{detail} they are; expected one that is rounded")
    if calibration:
        check_linears(calibration, (candidate.linear for candidate in fitting.candidates))
        for candidate in fitting.candidates:
            calibration.moments(candidate.linear.module)
    if may_write:
        refuse_inside(source, options.folder)
        if options.folder.is_dir():
            read_manifest(options.folder)
    target, table = replace(recipe.target, method="rtn"), fitting.dialect.TRAITS.fp8
    measured = (one.linear for one in fitting.candidates if recipe.format.name in one.formats)
    choice = choose_device(options.device, target, measured)
    if choice.device != "cpu" and choice.reason:
        options.tell(f"measuring: {choice.reason}")
    bench = Bench(
        source,
        Rounding(target, open_backend(choice.device), calibration),
        calibration,
        str(table.made) if table else "row",
        options.folder,
        may_write,
        options.workers,
        phases,
    )
    losses = measure(bench, fitting.candidates)
    # What a person should know of the pass.
    nbytes = sum(candidate.linear.nbytes for candidate in fitting.candidates)
    where = "from the Hub" if source.is_streamed else "from the disk"
    words = [
        f"a target reads the source twice {where}: {size_text(nbytes)} of it to measure,"
        " then all of it to convert"
    ]
    if not may_write:
        words.append("a dry run with a target keeps no measurements: the run itself measures again")
    return fitting.best(goal, losses, tuple(words))


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
        """Find the parts of a source, and the verdicts on their modules."""
        dialect, name = dialect_to_write(recipe.target), recipe.format.name
        decided, scales = decide(linears, recipe, dialect), scalars.weights
        amaxes = given_amaxes(decided, scales, recipe.target)[0] if scales else {}
        # Modules that become four-bit unless the choice says otherwise.
        own = {
            module: verdict
            for module, verdict in decided.items()
            if verdict.form
            and verdict.form.format is recipe.format
            and not verdict.stays
            and recipe.override(module) in (None, ANY_FORMAT)
        }
        # The same modules as FP8, where the dialect holds both, and as what stays.
        chosen = {module: verdict.linear for module, verdict in own.items()}
        patterns = Patterns(map(_pattern_of, chosen))
        eight_bits = dialect.TRAITS.eight_beside(recipe.format)
        words = [KEEP, *([eight_bits.name] if eight_bits else [])]
        others = {}
        for word in words:
            formats = (FormatRule(patterns, word), *recipe.formats)
            others[word] = judge_each(chosen, replace(recipe, formats=formats), dialect)
        parts: dict[str, list[str]] = defaultdict(list)
        for module in own:
            parts[_part_of(module, recipe)].append(module)
        # What is taken over as it is loses nothing, and is not measured.
        groups = gather_groups({module: verdict.group for module, verdict in decided.items()})
        candidates = []
        for module, verdict in own.items():
            eight = others.get(eight_bits.name, {}).get(module) if eight_bits else None
            measured = [name] if verdict.action == "quantize" else []
            is_wider = eight and eight.form and eight.form.format is eight_bits
            if eight_bits and eight and is_wider and eight.action == "quantize":
                measured.append(eight_bits.name)
            if measured:
                names = groups[verdict.group] if verdict.group else [module]
                members = tuple(decided[one].linear for one in names)
                amax = amaxes.get(module)
                candidates.append(Candidate(verdict.linear, members, tuple(measured), amax))
        every = {name: own, **others}
        return cls(source, recipe, linears, scalars, dialect, parts, every, candidates)

    def check(self, goal: Goal) -> None:
        """Raise InputError for a goal that is out of reach."""
        parts = self.sized({})
        least = [min(options, key=lambda option: option.nbytes) for options in parts]
        low = sum(option.nbytes for option in least)
        high = sum(max(option.nbytes for option in options) for options in parts)
        if goal.bits is not None:
            goal.within(8 * low / self.weights, 8 * high / self.weights)
        else:
            nbytes = self.artifact_nbytes(least)
            goal.within(nbytes, nbytes + high - low)

    @property
    def weights(self) -> int:
        """Count the weights of all parts."""
        verdicts = self.verdicts[self.recipe.format.name].values()
        return sum(math.prod(verdict.linear.shape) for verdict in verdicts)

    def sized(self, losses: Losses) -> list[list[Option]]:
        """Return the parts with the options that fit all of their modules.

        losses  {} for their sizes alone
        """
        found = []
        for modules in self.parts.values():
            options = []
            for word, verdicts in self.verdicts.items():
                own = [verdicts[module] for module in modules]
                if word == KEEP or all(
                    verdict.form and verdict.form.format.name == word for verdict in own
                ):
                    error = _error(word, modules, losses)
                    options.append(Option(word, self._nbytes(own), error))
            found.append(options)
        return found

    def _nbytes(self, verdicts: Sequence[Verdict]) -> int:
        """Count the bytes that the tensors of these modules take."""
        made: dict[Form, dict[str, tuple[int, int]]] = {}  # shapes of modules by form
        total = 0
        for verdict in verdicts:
            linear = verdict.linear
            if verdict.form:
                made.setdefault(verdict.form, {})[linear.module] = linear.shape
            elif is_expanded(linear):
                spec = kept_spec(linear.module, linear.shape, self.recipe.target)
                total += nbytes_of(spec.dtype, spec.shape)
            else:
                total += linear.nbytes
        for form, shapes in made.items():
            for stem, shape in self.dialect.stems(shapes).items():
                for spec in self.dialect.outputs(stem, shape, form):
                    total += TensorRef(spec.name, spec.dtype, spec.shape, "", 0).nbytes
        return total

    def best(self, goal: Goal, losses: Losses, words: tuple[str, ...]) -> Fit:
        """Choose the formats; the size is that of the files that will be written."""
        parts = self.sized(losses)
        smallest = [min(options, key=lambda option: option.nbytes) for options in parts]
        if goal.bits is not None:
            most = math.floor(goal.bits * self.weights / 8)
            chosen = self._with_asked_format(parts, choose(parts, most) or smallest)
            return self._fit(goal, chosen, words)
        wanted = goal.nbytes or 0
        beside = self.artifact_nbytes(smallest) - sum(option.nbytes for option in smallest)
        for _ in range(MOST_TRIES):
            chosen = self._with_asked_format(parts, choose(parts, wanted - beside) or smallest)
            found = self._fit(goal, chosen, words)
            if found.nbytes <= wanted:
                return found
            beside += found.nbytes - wanted
        return self._fit(goal, smallest, words)

    def _with_asked_format(
        self, parts: Sequence[Sequence[Option]], chosen: list[Option]
    ) -> list[Option]:
        """Return the choice, with something in the format that is asked for.

        Where it has nothing in it, the part that loses least becomes it.
        """
        name = self.recipe.format.name
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

    def _fit(self, goal: Goal, chosen: Sequence[Option], words: tuple[str, ...]) -> Fit:
        """Say what a choice comes to."""
        modules: dict[str, int] = defaultdict(int)
        for own, option in zip(self.parts.values(), chosen, strict=True):
            modules[option.word] += len(own)
        bits = 8 * sum(option.nbytes for option in chosen) / self.weights
        error = math.fsum(option.error for option in chosen)
        made = self.artifact_nbytes(chosen)
        return Fit(goal, self._rules(chosen), made, bits, error, dict(modules), words)

    def _rules(self, chosen: Sequence[Option]) -> tuple[FormatRule, ...]:
        """Write [[format]] rows for all that gets another format than asked for."""
        patterns: dict[str, list[str]] = defaultdict(list)
        for (part, modules), option in zip(self.parts.items(), chosen, strict=True):
            if option.word == self.recipe.format.name:
                continue
            beginning = f"{part}."
            # A glob for experts, where it fits nothing else; else the names.
            is_parent = _is_plain(part) and modules[0].startswith(beginning)
            if (
                len(modules) > 1
                and is_parent
                and sum(module.startswith(beginning) for module in self.linears.of) == len(modules)
            ):
                patterns[option.word].append(f"{beginning}*")
            else:
                patterns[option.word] += map(_pattern_of, modules)
        return tuple(FormatRule(Patterns(own), word) for word, own in patterns.items())

    def artifact_nbytes(self, chosen: Sequence[Option]) -> int:
        """Count the bytes of all files, exactly."""
        rules = self._rules(chosen)
        plan = plan_with(self.source, self.recipe, self.linears, self.scalars, rules)
        return artifact_job(self.source, plan).result_nbytes


def _error(word: str, modules: Sequence[str], losses: Losses) -> float:
    """Sum over kinds of modules what each loses in that format.

    Modules of one kind, which are experts, count as their mean.
    """
    kinds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for module in modules:
        kinds[split_numbers(module)[0]].append(losses.get(module, {}).get(word, 0.0))
    return math.fsum(math.fsum(found) / len(found) for found in kinds.values())


def _pattern_of(module: str) -> str:
    """Return a pattern that fits that module alone."""
    return module if _is_plain(module) else f"re:{re.escape(module)}$"


def _is_plain(name: str) -> bool:
    """Tell whether a name is a glob of itself alone."""
    return not set(name) & set("*?[") and not name.startswith("re:")


def _part_of(module: str, recipe: Recipe) -> str:
    """Name the part: experts by what they are in, others by the scale group."""
    if any(word in module for word in EXPERT_WORDS) and len(split_numbers(module)[1]) > 1:
        texts, _ = split_numbers(module)
        return module[: len(module) - len(texts[-1])].rpartition(".")[0]
    group = scale_groups([module], recipe.groups).get(module)
    return str(group) if group else module
