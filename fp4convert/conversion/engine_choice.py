"""Choose dialect, format and activations for the engine that --for names.

The rows of configs/engines decide: each of the engine's choices is planned, from headers alone,
and the first that it loads is taken.  What a person gave by hand stays; where no row allows it,
nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.dialects.target_forms import usual_activations
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.engines.files import Engine, parse_engine
from fp4convert.engines.rows import FOUR_BIT, Contents, Part
from fp4convert.engines.verdicts import Verdict, judge
from fp4convert.engines.versions import Version
from fp4convert.errors import ChoiceError, InputError, named, shell_line
from fp4convert.numerics.formats import format_named
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.engine_facts import plan_contents
from fp4convert.planning.no_effect import refuse_empty, refuse_idle
from fp4convert.planning.plan import Plan
from fp4convert.recipes.options import as_globs
from fp4convert.recipes.uneven_formats import EXPERTS_IN_PART
from fp4convert.storage.open import open_with_components
from fp4convert.storage.source import Checkpoint, Source, stopping

NO_EXPERTS = r"re:(?!.*\.experts\.)"  # fits every module but experts
ALL_EXPERTS = "*.experts.*"
DECIDED = ("dialect", "format", "activations")  # options that --for fills in
TRIED = tuple(f"--{name}" for name in (*DECIDED, "exclude"))  # for advice
# Options that may have to go, and their values without them.
GIVEN_UP: dict[str, Any] = {"kv_cache": None, "exclude": (), "include": ()}
NO_ADVICE = "Nothing of this model is known to load there; choose another engine."


class Candidate(NamedTuple):
    """What may be made for an engine; keeps_others: as a Preset has it."""

    dialect: str
    format: str
    activations: int
    keeps_others: bool = False


class Asked(NamedTuple):
    """Which engine is to load what is made of a source.

    parts  its components by name, or itself as ""
    """

    engine: Engine
    version: Version | None
    source: Source
    parts: dict[str, Source]

    @property
    def first(self) -> str:
        """Return the name of the first part."""
        return next(iter(self.parts))

    def plan(self, name: str, chosen: QuantizeOptions) -> Plan:
        """Plan a part with its own options."""
        own = chosen
        with named(name):
            if name:
                from fp4convert.conversion.diffusers import component_options

                own = component_options(chosen, self.source, name)
            return prepare_quantize(self.parts[name], own)


def choose_options(options: QuantizeOptions) -> QuantizeOptions:
    """Fill in what --for decides: dialect, format, activations.

    Raises  InputError for an unknown engine, where it loads nothing that the options allow, and
            what open_source and prepare_quantize raise
    """
    if options.engine is None:
        return options
    engine, version = parse_engine(options.engine)
    if options.dialect is not None:
        dialect_named(options.dialect)
    format_named(options.format or FOUR_BIT[0])
    source, components = open_with_components(os.fspath(options.source), options.access())
    asked = Asked(engine, version, source, components or {"": source})
    with stopping(source, *asked.parts.values()):
        try:
            chosen = _choose_first(asked, options)
        except ChoiceError as error:
            is_tried = any(option in error.next_step for option in TRIED)
            step = _advise(asked, options)
            step = step or (_give_up(asked, options) if is_tried else error.next_step)
            raise InputError(error.code, error.lines, step) from None
    for each in {source, *asked.parts.values()}:
        each.stop()
    return chosen


def _choose_first(asked: Asked, options: QuantizeOptions) -> QuantizeOptions:
    """Return the options of the first candidate that the engine loads.

    Where it loads none, and everything was left to --for, experts stay as they are.
    Raises  ChoiceError of the first candidate, where it loads none; InputError for what no other
            choice mends
    """
    failures: list[ChoiceError] = []
    for candidate in _candidates(asked, options):
        chosen = _with_candidate(options, candidate)
        try:
            _check_candidate(asked, chosen)
        except ChoiceError as error:
            failures.append(error)
            continue
        return chosen
    kept = replace(options, exclude=(ALL_EXPERTS,))
    for candidate in _candidates(asked, kept) if _leaves_all(options) else ():
        chosen = _with_candidate(kept, candidate)
        try:
            _check_candidate(asked, chosen)
        except InputError:
            continue
        return chosen
    raise failures[0]  # of what it would be without other choices


def _leaves_all(options: QuantizeOptions) -> bool:
    """Tell whether every choice is left to --for, that of the modules too."""
    given = (*(getattr(options, name) for name in (*DECIDED, *GIVEN_UP)), options.recipe)
    return not any(given)


def added_words(engine: Engine, options: QuantizeOptions, chosen: QuantizeOptions) -> str:
    """Say which modules --for leaves as they are, if any."""
    added = as_globs(chosen.exclude)[len(as_globs(options.exclude)) :]
    words = [word for glob in added for word in ("--exclude", glob)]
    why = f"{engine.called()} reads these modules in no four bits"
    return f"as with {shell_line(*words)}: {why}" if words else ""


def _check_candidate(asked: Asked, chosen: QuantizeOptions) -> None:
    """Raise ChoiceError for what cannot be made so, or not be loaded."""
    dialect = str(chosen.dialect)
    if dialect not in asked.engine.dialects:
        verdict = judge(asked.engine, Contents(dialect, frozenset()))
        raise _refusal(verdict, asked.version)
    plans = {name: asked.plan(name, chosen) for name in asked.parts}
    # An engine has nothing to do with these.
    refuse_idle([plan.idle for plan in plans.values()])
    refuse_empty(asked.source.name, list(plans.values()))
    for name, plan in plans.items():
        with named(name):
            _judge_plan(asked.engine, asked.version, plan, asked.parts[name].checkpoint)


def _candidates(asked: Asked, options: QuantizeOptions) -> Iterator[Candidate]:
    """Yield what may be made, best first: what is given by hand, in all."""
    engine = asked.engine
    model = str(asked.parts[asked.first].checkpoint.config.get("model_type", ""))
    own = [preset for preset in engine.presets if _fits(preset.models, model)]
    usual = [preset for preset in engine.presets if not preset.models]
    found: dict[Candidate, None] = {}
    for preset in (*own, *usual):
        dialect, fmt = options.dialect or preset.dialect, options.format or preset.format
        is_own = (dialect, fmt) == (preset.dialect, preset.format)
        bits = options.activations or _usual_bits(fmt, dialect, preset.activations)[0]
        found[Candidate(dialect, fmt, bits, is_own and preset.keeps_others)] = None
    for dialect in (options.dialect,) if options.dialect else DIALECTS:
        if dialect not in engine.dialects:
            continue
        formats = (options.format,) if options.format else FOUR_BIT
        bits_of = {fmt: _usual_bits(fmt, dialect, 16, 4) for fmt in formats}
        for number in range(2):
            for fmt, known in bits_of.items():
                found[Candidate(dialect, fmt, options.activations or known[number])] = None
    return iter(found)


def _usual_bits(fmt: str, dialect: str, *bits: int) -> tuple[int, ...]:
    """Return the bits that activations may have, the usual ones first.

    bits  those of four-bit weights
    """
    if fmt in FOUR_BIT:
        return bits
    return usual_activations(format_named(fmt), dialect), 16


def _fits(models: tuple[str, ...], model: str) -> bool:
    return any(fnmatchcase(model, glob) for glob in models)


def _with_candidate(options: QuantizeOptions, candidate: Candidate) -> QuantizeOptions:
    """Return the options with a candidate in them."""
    kept = (NO_EXPERTS,) if candidate.keeps_others else ()
    return replace(
        options,
        dialect=candidate.dialect,
        format=candidate.format,
        activations=candidate.activations,
        exclude=(*as_globs(options.exclude), *kept),
    )


def _advise(asked: Asked, options: QuantizeOptions) -> str:
    """Say which options, most like those, the engine loads; "" for none.

    They were planned and judged.  Its newest version comes last.
    """
    newest = asked._replace(version=asked.engine.version)
    is_newest = asked.version == asked.engine.version
    for at in (asked,) if is_newest else (asked, newest):
        for more in ((), (ALL_EXPERTS,)):
            wished = replace(options, exclude=(*as_globs(options.exclude), *more))
            if (change := _find_change(at, wished, bool(more))) is not None:
                words = [*change, *(word for glob in more for word in ("--exclude", glob))]
                if at.version == asked.version:
                    return f"Use {shell_line(*words)}"
                line = shell_line("--for", at.engine.key, *words)
                return f"{at.engine.called()} loads it: {line}"
    return ""


def _give_up(asked: Asked, options: QuantizeOptions) -> str:
    """Say which option stands in the way, or that the engine loads nothing."""
    for name, nothing in GIVEN_UP.items():
        without = replace(options, **{name: nothing})
        is_given = getattr(options, name) != nothing
        if is_given and (change := _find_change(asked, without, False)) is not None:
            step = f"Leave out --{name.replace('_', '-')}"
            return f"{step}, and use {shell_line(*change)}" if change else step + "."
    return NO_ADVICE


def _find_change(asked: Asked, options: QuantizeOptions, keeps_experts: bool) -> list[str] | None:
    """Find the words that make of the options what the engine loads.

    As few of those that were given are changed as may be; None where nothing does.
    """
    given = {name: getattr(options, name) for name in DECIDED}

    def changes(candidate: Candidate) -> list[str]:
        pairs = zip(DECIDED, candidate, strict=False)
        changed = {name: value for name, value in pairs if given[name] not in (None, value)}
        return [word for name, value in changed.items() for word in (f"--{name}", str(value))]

    relaxed = replace(options, dialect=None, format=None, activations=None)
    seen: Contents | None = None
    for candidate in sorted(_candidates(asked, relaxed), key=lambda each: len(changes(each))):
        chosen = _with_candidate(options, candidate)
        likely = seen and _as_if(seen, candidate, keeps_experts)
        if likely and not judge(asked.engine, likely, asked.version).loads:
            continue  # without a plan, which takes its time
        try:
            if seen is None:
                plan = asked.plan(asked.first, chosen)
                found = plan_contents(plan, asked.parts[asked.first].checkpoint)
                seen = found if found.parts else None
            _check_candidate(asked, chosen)
        except InputError:
            continue
        return changes(candidate)
    return None


def _as_if(contents: Contents, candidate: Candidate, keeps_experts: bool) -> Contents:
    """Guess the contents of a candidate by those of another."""
    parts = [
        Part(candidate.format, candidate.activations, part.is_expert)
        if part.format in FOUR_BIT
        else part
        for part in contents.parts
        if not (part.is_expert and keeps_experts) and (part.is_expert or not candidate.keeps_others)
    ]
    findings = contents.findings - {EXPERTS_IN_PART}  # by the format's blocks, perhaps
    return contents._replace(dialect=candidate.dialect, parts=frozenset(parts), findings=findings)


def check_plan(plan: Plan, checkpoint: Checkpoint, options: QuantizeOptions) -> Verdict | None:
    """Judge a plan by the engine that was asked for; None where none was.

    Raises  InputError with the reason of the row that decides, where the engine does not load it
    """
    if options.engine is None:
        return None
    if plan.faults:
        fault = plan.faults[0]
        step = "Complete the source; or leave --for out, and name the dialect: --dialect"
        raise InputError(fault.code, f"{fault.tensor}: {fault.detail}", step, fault.tensor)
    engine, version = parse_engine(options.engine)
    try:
        _judge_plan(engine, version, plan, checkpoint)
    except ChoiceError as error:  # it loads what was planned without a size: choose_options
        option = "--target-size" if options.target_size is not None else "--target-bits"
        step = f"Leave {option} out."
        if error.next_step != NO_ADVICE:
            step = f"{error.next_step} Or leave {option} out."
        raise InputError(error.code, error.lines, step) from None
    return judge(engine, plan_contents(plan, checkpoint))


def _judge_plan(
    engine: Engine, version: Version | None, plan: Plan, checkpoint: Checkpoint
) -> None:
    """Raise ChoiceError where an engine is not known to load the result."""
    verdict = judge(engine, plan_contents(plan, checkpoint), version)
    if not verdict.loads:
        raise _refusal(verdict, version, _target_text(plan))


def _refusal(verdict: Verdict, version: Version | None, made: str = "") -> ChoiceError:
    """Make the error of a verdict."""
    detail, instead = verdict.reason(version), verdict.instead
    return ChoiceError(
        "engine-refuses",
        f"{detail}; it would be {made}" if made else detail,
        f"{instead[0].upper()}{instead[1:]}." if instead else NO_ADVICE,
    )


def choice_text(verdict: Verdict, plan: Plan) -> str:
    """Say what was chosen for an engine, and how its verdict is known."""
    evidence = f" ({verdict.evidence})" if verdict.row else ""
    return f"for {verdict.engine.at(verdict.versions)}: {_target_text(plan)}{evidence}"


def _target_text(plan: Plan) -> str:
    target = plan.target
    return f"{target.format} in dialect {target.dialect} with {target.activations}-bit activations"
