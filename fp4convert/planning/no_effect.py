"""Refuse requests without effect: unmatched patterns, empty plans."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.encodings.floats import advise_on_types
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import ChoiceError, InputError, shell_line
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.planning.decisions import Verdict
from fp4convert.planning.plan import Idle, Plan
from fp4convert.planning.steps import Step, module_of
from fp4convert.progress import count_text
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.recipes.patterns import compiled, matches, sift
from fp4convert.recipes.recipe import Recipe, model_recipe
from fp4convert.recipes.unread_modules import PLAIN_KIND
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Checkpoint

MOST_REASONS = 4  # that a message counts
UNMATCHED = "matches no module; a module's name is its tensor's without .weight"
PACKED = "modules that are packed already (FP8, int4, FP4)"
STACK = "stacks of experts"
NO_LINEAR = f"no matrix of {', '.join(FLOAT_TYPES)}"
DRAFT_LAYERS = "layers that draft tokens (multi-token prediction)"
REGEX_SIGNS = re.compile(r"\.\*|\\|\^|\$|\.\+|\|")


def find_idle(
    recipe: Recipe, checkpoint: Checkpoint, linears: Linears, verdicts: Mapping[str, Verdict]
) -> tuple[Idle, ...]:
    """Find requests without effect.

    These are patterns that match no module and no stack, --include of modules that stay all the
    same, and options for modules that the source lacks.
    """
    stacks = [linear.stack for linear in linears.of.values() if linear.stack]
    has_stacks = bool(stacks or linears.unruled)
    lacking: dict[str, str | bool | None] = {
        "--keep-packed": recipe.keeps_packed and not linears.is_packed and PACKED,
        "--stack-order": recipe.options.stack_order and not has_stacks and STACK,
    }
    if linears.base:
        taken = (linears.of[module].eight is verdict.linear for module, verdict in verdicts.items())
        lacking["--base"] = (
            not any(taken) and f"modules that stay and have FP8 in {linears.base.name}"
        )
    if recipe.asked_draft and not (
        any(map(recipe.is_draft, linears.of)) or is_draft_head(linears.of)
    ):
        lacking[f"--draft {recipe.asked_draft}"] = DRAFT_LAYERS
    found = [
        Idle(option, f"is for {what}; the source has none", is_pattern=False)
        for option, what in lacking.items()
        if what
    ]
    asked = {
        "--include": [(pattern,) for pattern in recipe.include],
        "--exclude": [(pattern,) for pattern in recipe.exclude],
        **recipe.asked,
    }
    if not any(asked.values()):
        return tuple(found)
    named = {*linears.of, *(stack.name.removesuffix(WEIGHT) for stack in stacks)}
    modules = {*named, *(module_of(ref.name) for ref in checkpoint.tensors)} - {""}
    made = [module for module, verdict in verdicts.items() if verdict.is_made]
    for option, requests in asked.items():
        for patterns in requests:
            if patterns and not any(
                pattern in modules or any(matches(pattern, module) for module in modules)
                for pattern in patterns
            ):
                words = f"{option} {', '.join(map(repr, patterns))}"
                better = _suggest(
                    patterns[0],
                    named if option == "--include" else modules,
                    made if option == "--exclude" else (),
                )
                count = sum(any(matches(one, module) for one in better) for module in modules)
                line = " ".join(
                    shell_line(option, one) if option.startswith("--") else repr(one)
                    for one in better
                )
                found.append(Idle(words, UNMATCHED, line, count))
    return (*found, *_idle_includes(recipe.include, modules, verdicts))


def _idle_includes(
    include: Iterable[str], modules: Iterable[str], verdicts: Mapping[str, Verdict]
) -> Iterator[Idle]:
    """Find patterns of --include that match modules, all of which stay."""
    if not include:
        return
    made: set[str] = set()
    reasons: dict[str, str] = {}
    for module, verdict in verdicts.items():
        stack = verdict.linear.stack
        names = [module, *([stack.name.removesuffix(WEIGHT)] if stack else ())]
        made.update(names if verdict.is_made else ())
        reasons |= dict.fromkeys(names, verdict.reason)
    for pattern in include:
        chosen = sorted(module for module in modules if matches(pattern, module))
        if chosen and not made.intersection(chosen):
            why = f"quantizes nothing: {count_text(len(chosen), 'module')}, all of which stay"
            why = f"{why}; {chosen[0]}: {reasons.get(chosen[0], NO_LINEAR)}"
            yield Idle(f"--include {pattern!r}", why, is_pattern=False)


def refuse_idle(found: Sequence[Sequence[Idle]]) -> None:
    """Raise InputError for a request without effect.

    found  results of find_idle, of a checkpoint or of all components of a pipeline
    """
    first, *others = ({idle.asked: idle for idle in own} for own in found)
    everywhere = [
        next((own[asked] for own in (first, *others) if own[asked].better), idle)
        for asked, idle in first.items()
        if all(asked in own for own in others)
    ]
    if not everywhere:
        return
    lines = tuple(
        f"{idle.asked} {idle.why}"
        + (
            f"; did you mean {idle.better} ({count_text(idle.modules, 'module')})?"
            if idle.better
            else ""
        )
        for idle in everywhere
    )
    better = [idle.better for idle in everywhere if idle.better]
    next_step = f"Use {' '.join(better)}" if better else ""
    code = "unmatched-pattern" if everywhere[0].is_pattern else "idle-option"
    raise InputError(code, lines, next_step)


def _suggest(pattern: str, modules: Collection[str], made: Collection[str]) -> list[str]:
    """Return patterns that match modules and may have been meant.

    made  quantized modules, of which some must stay unmatched: else nothing is left to do
    """
    if "," in pattern and not pattern.startswith("re:"):
        parts = [part.strip() for part in pattern.split(",") if part.strip()]
        likely = (next(_better(part, modules, made, is_itself=True), "") for part in parts)
        return [one for one in likely if one]
    return list(islice(_better(pattern, modules, made), 1))


def _better(
    pattern: str, modules: Collection[str], made: Collection[str], is_itself: bool = False
) -> Iterator[str]:
    """Yield similar patterns that match a module, the likeliest first."""
    bare = pattern.removeprefix("re:").removesuffix(WEIGHT).strip(".")
    words = bare.strip(".*")
    leaves = {part for module in modules for part in module.split(".") if not part.isdigit()}
    candidates = [pattern] if is_itself else []
    if REGEX_SIGNS.search(pattern) and not pattern.startswith("re:"):
        candidates.append(f"re:{pattern}")
    candidates += [bare, f"*.{words}", f"{words}.*", f"*.{words}.*", f"*{words}*"]
    candidates += [f"*.{leaf}" for leaf in difflib.get_close_matches(words, sorted(leaves), 1)]
    candidates += [f"{one}.*" for one in candidates[-1:]]
    for one in candidates:
        try:
            compiled(one)
        except InputError:
            continue
        if not one.strip("*.") or not any(matches(one, module) for module in modules):
            continue
        if not made or not all(matches(one, module) for module in made):
            yield one


def refuse_empty(source: str, plans: Sequence[Plan]) -> None:
    """Raise ChoiceError where no tensor is quantized in the result.

    source  its name for people
    plans   one, or those of all components of a pipeline
    """
    steps = [step for plan in plans for step in plan.steps]
    if any(step.is_made for step in steps):
        return
    matrices = [step for step in steps if _is_matrix(step)]
    reasons = Counter(step.reason for step in matrices or steps).most_common()
    listed = [f"{reason} ({count})" for reason, count in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        listed.append(f"other reasons ({sum(count for _, count in reasons[MOST_REASONS:])})")
    why = "; ".join(listed) or "it has no tensors"
    detail = f"{source}: nothing becomes {plans[0].target.format}: {why}"
    next_step = ""
    named = {module_of(ref.name) for step in matrices for ref in step.refs}
    plain = model_recipe({}, dialect=plans[0].target.dialect).patterns_of(PLAIN_KIND)
    if named and len(sift(plain, named)) == len(named):
        next_step = "Use this file as it is, beside a model that is quantized."
    elif any(plan.excluded for plan in plans):
        next_step = "Exclude fewer modules, by a narrower pattern."
    elif any(ref.dtype not in FLOAT_TYPES for step in matrices for ref in step.refs):
        original = "Start from the original weights, in bf16, fp16 or fp32."
        next_step = advise_on_types((ref for step in matrices for ref in step.refs), original)
    raise ChoiceError("no-linears", f"{detail}; expected at least one linear layer", next_step)


def _is_matrix(step: Step) -> bool:
    return any(len(ref.shape) >= MATRIX_DIMENSIONS for ref in (*step.refs, *step.outputs))
