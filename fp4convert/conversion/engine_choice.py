"""Choose dialect, format and activations for the engine that --for names.

The rows of configs/engines decide: each of the engine's choices is planned, from headers alone,
and the first that it loads is taken.  What a person gave by hand stays; where no row allows it,
nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fp4convert.checkpoint.artifact import PARAMS
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.dialects.target_forms import usual_activations
from fp4convert.checkpoint.missing_parts import fault_text
from fp4convert.checkpoint.whole_model import refuse_no_model
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.engines.files import SERVERS, Engine, EngineAt, parse_engines
from fp4convert.engines.rows import FOUR_BIT, Contents, Part, fit_any
from fp4convert.engines.verdicts import Verdict, judge
from fp4convert.engines.versions import Version
from fp4convert.errors import ChoiceError, InputError, named, shell_line
from fp4convert.numerics.formats import format_named
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.engine_facts import plan_contents, words_of_steps
from fp4convert.planning.no_effect import refuse_empty, refuse_idle
from fp4convert.planning.plan import Plan
from fp4convert.recipes.options import Globs, as_globs
from fp4convert.recipes.recipe import model_recipe
from fp4convert.recipes.uneven_formats import EXPERTS, EXPERTS_IN_PART, find_uneven
from fp4convert.storage.open import open_with_components
from fp4convert.storage.source import Checkpoint, Source, stopping

NO_EXPERTS = r"re:(?!.*\.experts\.)"  # fits every module but experts
ALL_EXPERTS = "*.experts.*"
DECIDED = ("dialect", "format", "activations")  # options that --for fills in
TRIED = tuple(f"--{name}" for name in (*DECIDED, "exclude"))  # for advice
# Options that may have to go, and their values without them.
GIVEN_UP: dict[str, Any] = {"kv_cache": None, "exclude": (), "include": ()}
MOST_GLOBS = 8  # of an advice
NO_ADVICE = "Nothing of this model is known to load there; choose another engine."


class Choices(NamedTuple):
    """Options that decide what engines load; None or () where not given."""

    dialect: str | None
    format: str | None
    activations: int | None
    exclude: tuple[str, ...]
    include: tuple[str, ...]
    kv_cache: str | None
    recipe: str | None


class Asked(NamedTuple):
    """Which engines are to load what is made of a source.

    engine  the first, whose own choices are tried first
    parts   components of the source by name, or itself as ""
    plan    plans the part of a name under choices
    others  engines that have to load it, too
    """

    engine: Engine
    version: Version | None
    source: Source
    parts: dict[str, Source]
    plan: Callable[[str, Choices], Plan]
    others: tuple[EngineAt, ...] = ()

    @property
    def every(self) -> tuple[EngineAt, ...]:
        """Return all engines and their versions."""
        return (self.engine, self.version), *self.others

    @property
    def first(self) -> str:
        """Return the name of the first part."""
        return next(iter(self.parts))


def choose_options(options: QuantizeOptions) -> QuantizeOptions:
    """Fill in what --for decides: dialect, format, activations.

    Raises  InputError for an unknown engine, where it loads nothing that the options allow, and
            what open_source and prepare_quantize raise
    """
    if options.engine is None:
        return options
    (engine, version), *others = parse_engines(options.engine)
    if options.dialect is not None:
        dialect_named(options.dialect)
    format_named(options.format or FOUR_BIT[0])
    source, components = open_with_components(os.fspath(options.source), options.access())
    parts = dict(components) or {"": source}

    def plan(name: str, choices: Choices) -> Plan:
        own = replace(options, **choices._asdict())
        with named(name):
            if name:
                from fp4convert.conversion.diffusers import component_options

                own = component_options(own, source, name)
            return prepare_quantize(take_apart(parts[name], own))

    given = Choices(**{name: getattr(options, name) for name in Choices._fields})
    asked = Asked(engine, version, source, parts, plan, tuple(others))
    with stopping(source, *parts.values()):
        if not components:
            refuse_no_model(source, os.fspath(options.source))
            _refuse_no_config(asked)
        try:
            chosen = _choose_first(asked, given)
        except ChoiceError as error:
            is_tried = any(option in error.next_step for option in TRIED)
            step = _advise(asked, given)
            step = step or (_give_up(asked, given) if is_tried else error.next_step)
            if asked.others and step == NO_ADVICE:
                step = f"Nothing is known that all of {options.engine} load: make one for each."
            raise InputError(error.code, error.lines, step) from None
    for each in {source, *parts.values()}:
        each.stop()
    return replace(options, **chosen._asdict())


def _refuse_no_config(asked: Asked) -> None:
    """Raise InputError without a config.json where a server goes by its class.

    Mistral's own files have another record; rows of the engines refuse them.
    """
    named = [engine.name for engine, _ in asked.every if engine.key in SERVERS]
    source = asked.source
    if named and not (source.checkpoint.config or source.has_file(PARAMS)):
        detail = f"{source.name} has no config.json, without which {named[0]} loads nothing"
        raise InputError("engine-refuses", detail, "Give the folder of the whole model.")


def _choose_first(asked: Asked, given: Choices) -> Choices:
    """Return the first candidate that the engine loads; experts stay last.

    Raises  ChoiceError of the first; InputError for what no other choice mends
    """
    failures: list[InputError] = []
    kept = given._replace(exclude=(ALL_EXPERTS,))
    for start in (given,) if any(given) else (given, kept):
        for chosen in _candidates(asked, start):
            try:
                _check_candidate(asked, chosen)
            except InputError as error:
                if start is given and not isinstance(error, ChoiceError):
                    raise
                failures.append(error)
                continue
            return chosen
    raise failures[0]  # of what it would be without other choices


def added_words(called: str, given: Globs, chosen: Globs) -> str:
    """Say which modules --for leaves as they are, if any.

    called         names of the engines
    given, chosen  the patterns of --exclude before and after the choice
    """
    added = as_globs(chosen)[len(as_globs(given)) :]
    words = [word for glob in added for word in ("--exclude", glob)]
    why = f"{called} reads these modules in no four bits"
    return f"as with {shell_line(*words)}: {why}" if words else ""


def _check_candidate(asked: Asked, chosen: Choices) -> None:
    """Raise ChoiceError for what cannot be made so, or not be loaded."""
    dialect = str(chosen.dialect)
    for engine, version in asked.every:
        if dialect not in engine.dialects:
            raise _refusal(judge(engine, Contents(dialect, frozenset())), version)
    plans = {name: asked.plan(name, chosen) for name in asked.parts}
    # An engine has nothing to do with these.
    refuse_idle([plan.idle for plan in plans.values()])
    refuse_empty(asked.source.name, list(plans.values()))
    for name, plan in plans.items():
        for engine, version in asked.every:
            with named(name):
                _judge_plan(engine, version, plan, asked.parts[name].checkpoint)


def _candidates(asked: Asked, given: Choices) -> list[Choices]:
    """List what may be made, best first: what is given by hand, in all."""
    engine = asked.engine
    model = str(asked.parts[asked.first].checkpoint.config.get("model_type", ""))
    own = [preset for preset in engine.presets if _fits(preset.models, model)]
    usual = [preset for preset in engine.presets if not preset.models]
    found: dict[Choices, None] = {}
    for preset in (*own, *usual):
        dialect, fmt = given.dialect or preset.dialect, given.format or preset.format
        is_own = (dialect, fmt) == (preset.dialect, preset.format)
        bits = given.activations or _usual_bits(fmt, dialect, preset.activations)[0]
        kept = (NO_EXPERTS,) if is_own and preset.keeps_others else ()
        chosen = given._replace(dialect=dialect, format=fmt, activations=bits)
        found[chosen._replace(exclude=(*given.exclude, *kept))] = None
    for dialect in (given.dialect,) if given.dialect else DIALECTS:
        if dialect not in engine.dialects:
            continue
        formats = (given.format,) if given.format else FOUR_BIT
        bits_of = {fmt: _usual_bits(fmt, dialect, 16, 4) for fmt in formats}
        for number in range(2):
            for fmt, known in bits_of.items():
                bits = given.activations or known[number]
                found[given._replace(dialect=dialect, format=fmt, activations=bits)] = None
    return list(found)


def _usual_bits(fmt: str, dialect: str, *bits: int) -> tuple[int, ...]:
    """Return the bits of activations, usual first; `bits` of four-bit weights."""
    if fmt in FOUR_BIT:
        return bits
    return usual_activations(format_named(fmt), dialect), 16


def _fits(models: tuple[str, ...], model: str) -> bool:
    return any(fnmatchcase(model, glob) for glob in models)


def _advise(asked: Asked, given: Choices) -> str:
    """Return the options most like these that the engine loads; "" for none.

    Its newest version is tried last.
    """
    newest = asked._replace(version=asked.engine.version)
    is_newest = asked.version == asked.engine.version
    for at in (asked,) if is_newest else (asked, newest):
        for more in dict.fromkeys(((), _globs_in_the_way(at, given), (ALL_EXPERTS,))):
            wished = given._replace(exclude=(*given.exclude, *more))
            if (change := _find_change(at, wished, more == (ALL_EXPERTS,))) is not None:
                words = [*change, *(word for glob in more for word in ("--exclude", glob))]
                if at.version == asked.version:
                    return f"Use {shell_line(*words)}"
                line = shell_line("--for", at.engine.key, *words)
                return f"{at.engine.called()} loads it: {line}"
    return ""


def _globs_in_the_way(asked: Asked, given: Choices) -> tuple[str, ...]:
    """Return globs of modules that keep the first choice from loading.

    These are named by the row that decides, or have several formats where engines want one.
    """
    found: dict[str, None] = {}
    for name, part in asked.parts.items():
        try:
            plan = asked.plan(name, _candidates(asked, given)[0])
        except InputError:
            return ()
        contents, words = plan_contents(plan, part.checkpoint), words_of_steps(plan.steps)
        layers = {module.partition(EXPERTS)[0] for module in words if EXPERTS in module}
        uneven = find_uneven(words, model_recipe(part.checkpoint.config).groups)
        in_part = [f"{one.parent}.*" for one in uneven if one.code == EXPERTS_IN_PART]
        if len(in_part) < len(layers):  # else all experts are
            found |= dict.fromkeys(in_part)
        groups = (one.modules for one in uneven if one.code != EXPERTS_IN_PART)
        found |= dict.fromkeys(each for one in groups for word in one if word for each in one[word])
        rows = [judge(engine, contents, version).row for engine, version in asked.every]
        globs = [glob for row in rows if row for glob in row.condition.modules]
        found |= dict.fromkeys(glob for glob in globs if fit_any((glob,), contents.modules))
    return tuple(found) if len(found) <= MOST_GLOBS else ()


def _give_up(asked: Asked, given: Choices) -> str:
    """Say which option or which widths stand in the way, if any are known."""
    for name, nothing in GIVEN_UP.items():
        without = given._replace(**{name: nothing})
        if without != given and (change := _find_change(asked, without, False)) is not None:
            step = f"Leave out --{name.replace('_', '-')}"
            return f"{step}, and use {shell_line(*change)}" if change else step + "."
    for chosen in _candidates(asked, given._replace(dialect=None, format=None, activations=None)):
        try:
            _check_candidate(asked, chosen)
        except InputError as error:
            if error.code == "no-linears":
                words = shell_line("--dialect", chosen.dialect, "--format", chosen.format)
                read = f"{asked.engine.called()} reads {words}, but of {error.message}"
                return f"{read}. Choose another engine."
    return NO_ADVICE


def _find_change(asked: Asked, given: Choices, keeps_experts: bool) -> list[str] | None:
    """Return the fewest changed options that the engine loads, or None."""

    def changes(chosen: Choices) -> list[str]:
        both = zip(DECIDED, chosen, given, strict=False)
        changed = [(name, value) for name, value, before in both if before not in (None, value)]
        return [word for name, value in changed for word in (f"--{name}", str(value))]

    relaxed = given._replace(dialect=None, format=None, activations=None)
    seen: Contents | None = None
    for chosen in sorted(_candidates(asked, relaxed), key=lambda each: len(changes(each))):
        likely = seen and _as_if(seen, chosen, keeps_experts)
        if likely and not judge(asked.engine, likely, asked.version).may_load:
            continue  # without a plan, which takes its time
        try:
            if seen is None:
                plan = asked.plan(asked.first, chosen)
                found = plan_contents(plan, asked.parts[asked.first].checkpoint)
                seen = found if found.parts else None
            _check_candidate(asked, chosen)
        except InputError:
            continue
        return changes(chosen)
    return None


def _as_if(contents: Contents, chosen: Choices, keeps_experts: bool) -> Contents:
    """Guess the contents under choices by the contents under others."""
    fmt, bits = str(chosen.format), chosen.activations or 0
    keeps_others = NO_EXPERTS in chosen.exclude
    parts = [
        Part(fmt, bits, part.is_expert) if part.format in FOUR_BIT else part
        for part in contents.parts
        if not (part.is_expert and keeps_experts) and (part.is_expert or not keeps_others)
    ]
    findings = contents.findings - {EXPERTS_IN_PART}  # by the format's blocks, perhaps
    return contents._replace(dialect=str(chosen.dialect), parts=frozenset(parts), findings=findings)


def check_plan(
    plan: Plan, checkpoint: Checkpoint, asked_engine: str | None, option: str
) -> tuple[Verdict, ...]:
    """Judge a plan by the engines that were asked for.

    option  of the size that formats were chosen for
    Raises  InputError with the reason of the row that decides, where the engine does not load it
    """
    if asked_engine is None:
        return ()
    if faults := plan.judged.faults:
        fault = faults[0]
        words = shell_line("--dialect", str(plan.target.dialect))
        step = f"Complete the source; or leave --for out, and give {words}."
        code = "config-size" if fault.code == "config-size" else "module-missing"
        raise InputError(code, fault_text(fault), step, fault.tensor)
    asked = parse_engines(asked_engine)
    try:
        for engine, version in asked:
            _judge_plan(engine, version, plan, checkpoint)
    except ChoiceError as error:  # it loads what was planned without a size: choose_options
        step = f"Leave {option} out."
        if error.next_step != NO_ADVICE:
            step = f"{error.next_step} Or leave {option} out."
        raise InputError(error.code, error.lines, step) from None
    contents = plan_contents(plan, checkpoint)
    return tuple(judge(engine, contents) for engine, _ in asked)


def _judge_plan(
    engine: Engine, version: Version | None, plan: Plan, checkpoint: Checkpoint
) -> None:
    """Raise ChoiceError where an engine is not known to load the result."""
    verdict = judge(engine, plan_contents(plan, checkpoint), version)
    if not verdict.may_load:
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
    return f"for {verdict.engine.at(verdict.versions)}: {_target_text(plan)} ({verdict.words})"


def _target_text(plan: Plan) -> str:
    target = plan.target
    return f"{target.format} in dialect {target.dialect} with {target.activations}-bit activations"
