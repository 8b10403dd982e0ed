"""Find the parts of a model, and choose their formats for a size.

A *part* changes its format as one, because engines want it in one format: members of a scale group,
all experts of a layer, or a single linear layer. A part becomes the format that is asked for, or
FP8 where the dialect holds both (MXFP8 in mlx), or it stays. Its error is the sum of the losses of
its matrices (weight_losses.py), where the experts of a layer count as one matrix: errors of layers
add up, to first order, as shares of the output of a layer, and a token meets few experts.

Where a calibration has measured the losses of the model's outputs by part and format
(calibration/output_losses.py), these are the errors, and other four-bit formats of the dialect are
options, too; no weight is read.

The choice: every part begins with its most accurate option. Each further option of the lower convex
hull of its (bytes, error) saves bytes and adds error; the cheapest such steps of all parts are
taken, by error per byte, until the whole fits (the greedy solution of the Lagrangian). No other
choice of as many bytes has less error. The last step may have saved more than was needed: steps
that fit into the rest are then taken back, the dearest first. So the error is within the last step
of the least. Where a few parts bear most of the error a step is large: then a part is raised where
the cheapest steps of others pay for it, as long as the error falls.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from fp4convert.calibration.statistics import KL, OUTPUT, Calibration
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears
from fp4convert.checkpoint.module_names import part_of, split_numbers
from fp4convert.conversion.weight_losses import MOST_EXPERTS, Candidate, Losses
from fp4convert.errors import InputError
from fp4convert.planning.decisions import Verdict, decide, judge_each
from fp4convert.planning.global_scales import given_amaxes
from fp4convert.planning.kept_dtype import kept_nbytes
from fp4convert.planning.quantize_plan import Scalars
from fp4convert.recipes.options import KEEP
from fp4convert.recipes.recipe import Recipe, gather_groups
from fp4convert.recipes.rules import FormatRule, Patterns
from fp4convert.recipes.toml_files import ANY_FORMAT
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

WORDS = {KL: "KL of predictions", OUTPUT: "squared error of what it gives"}
SENSE = "Calibrate again with --sensitivity."
MOST_EXCHANGES = 1000  # each lessens the error
ROUNDING = 1e-12  # of errors: what is less is none


class Option(NamedTuple):
    """What a part can become.

    word    for what it becomes
    nbytes  that it then takes
    error   that it then has, in units that add up over parts
    """

    word: str
    nbytes: int
    error: float


class Parts(NamedTuple):
    """One source, one request: what may become what, and what each takes.

    modules     of each part, by its name
    verdicts    on them as four-bit, as FP8 and as staying, by the word of it
    candidates  what is to be measured
    """

    source: Source
    recipe: Recipe
    linears: Linears
    scalars: Scalars
    dialect: Dialect
    modules: Mapping[str, Sequence[str]]
    verdicts: Mapping[str, Mapping[str, Verdict]]
    candidates: Sequence[Candidate]

    @classmethod
    def of(cls, source: Source, recipe: Recipe, linears: Linears, scalars: Scalars) -> Parts:
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
        patterns = Patterns(map(pattern_of, chosen))
        known = scalars.calibration.loss_formats if scalars.calibration else ()
        words, eight = [KEEP], dialect.TRAITS.eight_beside(recipe.format)
        for fmt in dialect.TRAITS.mixes if eight else ():
            is_beside = fmt is eight or (fmt.is_fp4 and fmt is not recipe.format)
            if is_beside and (fmt.name in known if known else fmt is eight):
                words.append(fmt.name)
        others = {}
        for word in words:
            formats = (FormatRule(patterns, word), *recipe.formats)
            others[word] = judge_each(
                chosen, replace(recipe, formats=formats), dialect, linears.judged.kept
            )
        parts: dict[str, list[str]] = defaultdict(list)
        for module in own:
            parts[part_of(module, recipe)].append(module)
        # What is taken over as it is loses nothing, and is not measured.
        # Of many experts some are.
        groups = gather_groups({module: verdict.group for module, verdict in decided.items()})
        shares = dict(share for modules in parts.values() for share in _standing_for(modules))
        candidates = []
        for module, verdict in own.items():
            if module not in shares:
                continue
            measured = [name] if verdict.action == "quantize" else []
            for word, verdicts in others.items():
                other = verdicts[module]
                is_word = other.form is not None and other.form.format.name == word
                if is_word and other.action == "quantize":
                    measured.append(word)
            if measured:
                names = groups[verdict.group] if verdict.group else [module]
                members = tuple(
                    decided[one].linear for one in names if one in shares or one not in own
                )
                amax = amaxes.get(module)
                candidates.append(
                    Candidate(verdict.linear, members, tuple(measured), amax, shares[module])
                )
        every = {name: own, **others}
        return cls(source, recipe, linears, scalars, dialect, parts, every, candidates)

    @property
    def measured(self) -> Calibration | None:
        """Return the calibration that has measured outputs, if there is one."""
        calibration = self.scalars.calibration
        return calibration if calibration and calibration.loss_formats else None

    def known_losses(self) -> tuple[Losses, tuple[str, ...]] | None:
        """Read what outputs lose by every module; say what a person should know.

        None where no calibration has measured them

        Raises  InputError for a file without losses of the format that is asked for, or of a part
        """
        calibration, name = self.measured, self.recipe.format.name
        if calibration is None:
            return None
        if name not in calibration.loss_formats:
            known = ", ".join(calibration.loss_formats)
            detail = f"{calibration.path} has what outputs lose in {known}; expected {name}, too"
            raise InputError("calibration-missing", detail, SENSE)
        losses: Losses = {}
        for modules in self.modules.values():
            for module in modules:
                found = calibration.output_losses(module) or {}
                losses[module] = {
                    word: found.get(word, 0.0)
                    for word, verdicts in self.verdicts.items()
                    if word != KEEP and verdicts[module].action == "quantize"
                }
        fixed = self.unmeasured
        if len(fixed) == len(self.modules):
            detail = f"{calibration.path} has not measured what outputs lose by any part of these"
            raise InputError("calibration-missing", f"{detail}; expected some", SENSE)
        words = [
            f"formats are chosen by what outputs lose ({WORDS[calibration.loss_kind]}, measured on"
            f" {calibration.loss_tokens:,} tokens by {calibration.path.name}); no weights are read"
        ]
        if fixed:
            words.append(
                f"{calibration.path.name} has not measured {len(fixed)} parts, which become {name}:"
                f" the first is {next(iter(fixed))}"
            )
        return losses, tuple(words)

    @property
    def unmeasured(self) -> dict[str, None]:
        """Name the parts that a calibration with losses does not know."""
        calibration = self.measured
        if calibration is None:
            return {}
        return {
            part: None
            for part, modules in self.modules.items()
            if any(calibration.output_losses(module) is None for module in modules)
        }

    @property
    def weights(self) -> int:
        """Count the weights of all parts."""
        verdicts = self.verdicts[self.recipe.format.name].values()
        return sum(math.prod(verdict.linear.shape) for verdict in verdicts)

    def sized(self, losses: Losses) -> list[list[Option]]:
        """Return the parts with the options that fit all of their modules.

        losses  {} for their sizes alone
        """
        found, fixed = [], self.unmeasured
        for part, modules in self.modules.items():
            options = []
            for word, verdicts in self.verdicts.items():
                if part in fixed and word != self.recipe.format.name:
                    continue
                own = [verdicts[module] for module in modules]
                if word == KEEP or all(
                    verdict.form and verdict.form.format.name == word for verdict in own
                ):
                    error = self._error(word, modules, losses)
                    options.append(Option(word, self._nbytes(own), error))
            found.append(options)
        return found

    def _error(self, word: str, modules: Sequence[str], losses: Losses) -> float:
        """Count what a part loses in a format."""
        if self.measured is None:
            return _mean_error(word, modules, losses)
        return math.fsum(losses.get(module, {}).get(word, 0.0) for module in modules)

    def _nbytes(self, verdicts: Sequence[Verdict]) -> int:
        """Count the bytes that the tensors of these modules take."""
        made: dict[Form, dict[str, tuple[int, int]]] = {}  # shapes of modules by form
        total = 0
        for verdict in verdicts:
            linear = verdict.linear
            if verdict.form:
                made.setdefault(verdict.form, {})[linear.module] = linear.shape
            else:  # an ordinary tensor
                total += kept_nbytes(linear, self.recipe)
        for form, shapes in made.items():
            for stem, shape in self.dialect.stems(shapes).items():
                for spec in self.dialect.outputs(stem, shape, form):
                    total += TensorRef(spec.name, spec.dtype, spec.shape, "", 0).nbytes
        return total


def _standing_for(modules: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the modules to measure, of experts some, with how many of a kind."""
    for own in _by_kind(modules):
        count = min(len(own), MOST_EXPERTS)
        yield from ((own[number * len(own) // count], count) for number in range(count))


def _by_kind(modules: Sequence[str]) -> list[list[str]]:
    """Gather the modules of a part whose names differ by a number: experts."""
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module in modules:
        kinds[split_numbers(module)[0]].append(module)
    return list(kinds.values())


def _mean_error(word: str, modules: Sequence[str], losses: Losses) -> float:
    """Sum the losses of a format over kinds of modules, of experts the mean."""
    total = []
    for own in _by_kind([module for module, _ in _standing_for(modules)]):
        found = [losses.get(module, {}).get(word, 0.0) for module in own]
        total.append(math.fsum(found) / len(found))
    return math.fsum(total)


def pattern_of(module: str) -> str:
    """Return a pattern that fits that module alone."""
    return module if is_plain(module) else f"re:{re.escape(module)}$"


def is_plain(name: str) -> bool:
    """Tell whether a name is a glob of itself alone."""
    return not set(name) & set("*?[") and not name.startswith("re:")


def choose(parts: Sequence[Sequence[Option]], nbytes: int) -> list[Option] | None:
    """Choose an option for every part, so that all take at most so many bytes.

    parts    of each its options; a part changes its format as one: a matrix, or several that
             engines need in one format
    Returns  an option for each; None where even the smallest options take more
    """
    hulls = [hull(options) for options in parts]
    # From one option of a hull to the next smaller one: price, part, level and bytes saved. They
    # sort by price, then by the order of parts.
    steps = sorted(
        (_price(before, after), part, level, before.nbytes - after.nbytes)
        for part, options in enumerate(hulls)
        for level, (before, after) in enumerate(pairwise(options), 1)
    )
    levels = [0] * len(parts)
    excess = sum(options[0].nbytes for options in hulls) - nbytes
    taken = 0
    while excess > 0 and taken < len(steps):
        _, part, level, saved_nbytes = steps[taken]
        levels[part] = level
        excess -= saved_nbytes
        taken += 1
    if excess > 0:
        return None
    for _, part, level, saved_nbytes in reversed(steps[:taken]):
        if levels[part] == level and excess + saved_nbytes <= 0:
            levels[part] -= 1
            excess += saved_nbytes
    for _ in range(MOST_EXCHANGES):
        if not _exchange(hulls, levels, nbytes):
            break
    return [options[level] for options, level in zip(hulls, levels, strict=True)]


def _exchange(hulls: Sequence[Sequence[Option]], levels: list[int], nbytes: int) -> bool:
    """Raise the part that gains most, if cheaper steps pay for it."""
    taken = sum(options[level].nbytes for options, level in zip(hulls, levels, strict=True))
    steps = sorted(
        (_price(before, after), part, level, before.nbytes - after.nbytes)
        for part, options in enumerate(hulls)
        for level, (before, after) in enumerate(pairwise(options), 1)
        if level > levels[part]
    )
    best, found = 0.0, dict[int, int]()
    for part, options in enumerate(hulls):
        for level in range(levels[part]):
            own, higher = options[levels[part]], options[level]
            excess, error = taken + higher.nbytes - own.nbytes - nbytes, higher.error - own.error
            changed = {part: level}
            for price, other, lower, saved_nbytes in steps:
                if excess <= 0 or error >= best:
                    break
                if other != part:
                    changed[other] = lower
                    excess -= saved_nbytes
                    error += price * saved_nbytes
            if excess <= 0 and error < best * (1 + ROUNDING) - ROUNDING * own.error:
                best, found = error, changed
    for part, level in found.items():
        levels[part] = level
    return bool(found)


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of (bytes, error).

    From the most accurate option to the smallest; what is on no edge is left out.
    """
    found: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.error)):
        if found and option.error >= found[-1].error:
            continue  # larger, and no better
        while len(found) > 1 and _price(option, found[-1]) >= _price(found[-1], found[-2]):
            found.pop()
        found.append(option)
    return found[::-1]


def _price(larger: Option, smaller: Option) -> float:
    """Return the error added for each byte saved."""
    return (smaller.error - larger.error) / (larger.nbytes - smaller.nbytes)
