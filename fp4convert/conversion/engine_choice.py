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
from typing import NamedTuple

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.conversion.options import QuantizeOptions
from fp4convert.conversion.quantization import prepare_quantize
from fp4convert.errors import InputError
from fp4convert.numerics.formats import format_named
from fp4convert.planning.engine_contents import plan_contents
from fp4convert.planning.steps import Plan
from fp4convert.recipes.engine_rows import FOUR_BIT, Contents
from fp4convert.recipes.engine_verdicts import Verdict, judge_contents
from fp4convert.recipes.engine_versions import Version
from fp4convert.recipes.engines import Engine, engine_asked
from fp4convert.recipes.options import as_globs
from fp4convert.storage.open import open_with_components
from fp4convert.storage.source import Checkpoint, stopping

NO_EXPERTS = r"re:(?!.*\.experts\.)"  # fits every module but experts


class Candidate(NamedTuple):
    """What may be made for an engine; others: as a Preset has it."""

    dialect: str
    format: str
    activations: int
    others: str = ""


def choose_options(options: QuantizeOptions) -> QuantizeOptions:
    """Fill in what --for decides: dialect, format, activations.

    Raises  InputError for an unknown engine, where it loads nothing that the options allow, and
            what open_source and prepare_quantize raise
    """
    if options.engine is None:
        return options
    engine, version = engine_asked(options.engine)
    if options.dialect is not None:
        dialect_named(options.dialect)
        if options.dialect not in engine.dialects:
            verdict = judge_contents(engine, Contents(options.dialect, frozenset()))
            raise _refused(engine, version, verdict, f"--dialect {options.dialect}")
    format_named(options.format or FOUR_BIT[0])
    source, components = open_with_components(os.fspath(options.source), options.access())
    parts = list(components.values()) or [source]
    failures: list[InputError] = []
    with stopping(source, *parts):
        model = str(parts[0].checkpoint.config.get("model_type", ""))
        for candidate in _candidates(engine, options, model):
            chosen = _with_candidate(options, candidate)
            try:
                for part in parts:
                    check_plan(prepare_quantize(part, chosen), part.checkpoint, chosen)
            except InputError as error:
                if error.code != "engine-refuses" and not error.code.startswith("dialect-"):
                    raise  # what no other choice mends, or would hide
                failures.append(error)
                continue
            for each in {source, *parts}:
                each.stop()
            return chosen
        raise failures[0]  # of what it would be without other choices


def _candidates(engine: Engine, options: QuantizeOptions, model: str) -> Iterator[Candidate]:
    """Yield what may be made, best first: what is given by hand, in all."""
    own = [preset for preset in engine.presets if _fits(preset.models, model)]
    usual = [preset for preset in engine.presets if not preset.models]
    found: dict[Candidate, None] = {}
    for choice in (*own, *usual):
        dialect, fmt = options.dialect or choice.dialect, options.format or choice.format
        is_own = (dialect, fmt) == (choice.dialect, choice.format)
        bits = options.activations or choice.activations
        found[Candidate(dialect, fmt, bits, choice.others if is_own else "")] = None
    for dialect in (options.dialect,) if options.dialect else DIALECTS:
        for bits in (options.activations,) if options.activations else (16, 4):
            for fmt in (options.format,) if options.format else FOUR_BIT:
                if dialect in engine.dialects:
                    found[Candidate(dialect, fmt, bits)] = None
    return iter(found)


def _fits(models: tuple[str, ...], model: str) -> bool:
    return any(fnmatchcase(model, glob) for glob in models)


def _with_candidate(options: QuantizeOptions, candidate: Candidate) -> QuantizeOptions:
    """Return the options with a candidate in them."""
    kept = (NO_EXPERTS,) if candidate.others else ()
    return replace(
        options,
        dialect=candidate.dialect,
        format=candidate.format,
        activations=candidate.activations,
        exclude=(*as_globs(options.exclude), *kept),
    )


def check_plan(plan: Plan, checkpoint: Checkpoint, options: QuantizeOptions) -> Verdict | None:
    """Judge a plan by the engine that was asked for; None where none was.

    Raises  InputError with the reason of the row that decides, where the engine does not load it
    """
    if options.engine is None:
        return None
    engine, version = engine_asked(options.engine)
    contents = plan_contents(plan, checkpoint)
    verdict = judge_contents(engine, contents, version)
    if not verdict.loads:
        made = f"{plan.target.format} in dialect {plan.target.dialect}"
        made += f" with {plan.target.activations}-bit activations"
        raise _refused(engine, version, verdict, made)
    return judge_contents(engine, contents)


def _refused(engine: Engine, version: Version | None, verdict: Verdict, made: str) -> InputError:
    """Make the error of a verdict."""
    name = f"{engine.name} {version}" if version else engine.name
    step = verdict.instead or "leave --dialect, --format and --activations out"
    detail = f"{name} {verdict.why}; asked for: {made}"
    return InputError("engine-refuses", detail, f"{step[0].upper()}{step[1:]}.")
