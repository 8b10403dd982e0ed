"""Refuse requests without effect: unmatched patterns, empty plans."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from fp4convert.checkpoint.encodings.floats import MATRIX_DIMENSIONS
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError, shell_line
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.planning.steps import Plan, Step, module_of
from fp4convert.recipes.patterns import compiled, matches
from fp4convert.recipes.recipe import EXCLUDED, Recipe
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Checkpoint

MOST_REASONS = 4  # that a message counts
REGEX_SIGNS = re.compile(r"\.\*|\\|\^|\$|\.\+|\|")


def find_unmatched(recipe: Recipe, checkpoint: Checkpoint, linears: Linears) -> dict[str, str]:
    """Find what a person asks for that matches no module and no stack.

    Returns  what to give instead, "" for nothing alike, by the option with its pattern
    """
    asked = {
        "--include": [(pattern,) for pattern in recipe.include],
        "--exclude": [(pattern,) for pattern in recipe.exclude],
        **recipe.asked,
    }
    if not any(asked.values()):
        return {}
    stacks = (linear.stack for linear in linears.of.values() if linear.stack)
    modules = {
        *linears.of,
        *(stack.name.removesuffix(WEIGHT) for stack in stacks),
        *(module_of(ref.name) for ref in checkpoint.tensors),
    } - {""}
    found = {}
    for option, requests in asked.items():
        for patterns in requests:
            if patterns and not any(
                pattern in modules or any(matches(pattern, module) for module in modules)
                for pattern in patterns
            ):
                instead = _suggest(option, patterns[0], modules)
                found[f"{option} {', '.join(map(repr, patterns))}"] = instead
    return found


def refuse_unmatched(unmatched: Sequence[Mapping[str, str]]) -> None:
    """Raise InputError for a pattern that matches no module.

    unmatched  what find_unmatched found of a checkpoint, or of all components of a pipeline
    """
    first, *others = unmatched
    found = {words: hint for words, hint in first.items() if all(words in own for own in others)}
    if not found:
        return
    what = "matches no module; a module's name is its tensor's without .weight"
    hints = [next(filter(None, (own[words] for own in (first, *others))), "") for words in found]
    lines = tuple(
        f"{words} {what}" + (f"; did you mean {hint}?" if hint else "")
        for words, hint in zip(found, hints, strict=True)
    )
    better = [hint.rpartition(" (")[0] for hint in hints if hint]
    next_step = f"Use {' '.join(better)}" if better else ""
    raise InputError("unmatched-pattern", lines, next_step)


def _suggest(option: str, pattern: str, modules: Collection[str]) -> str:
    """Return options that match, with the number of modules; "" for none."""
    if "," in pattern and not pattern.startswith("re:"):
        parts = [part.strip() for part in pattern.split(",") if part.strip()]
        likely = (next(_better(part, modules, is_itself=True), "") for part in parts)
        better = [one for one in likely if one]
        count = sum(any(matches(one, module) for one in better) for module in modules)
        text = " ".join(shell_line(option, one) for one in better)
        return f"{text} ({_modules(count)})" if count else ""
    for one in _better(pattern, modules):
        count = sum(matches(one, module) for module in modules)
        return f"{shell_line(option, one)} ({_modules(count)})"
    return ""


def _better(pattern: str, modules: Collection[str], is_itself: bool = False) -> Iterator[str]:
    """Yield patterns like this one that match a module, the likeliest first."""
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
        if one.strip("*.") and any(matches(one, module) for module in modules):
            yield one


def _modules(count: int) -> str:
    return "1 module" if count == 1 else f"{count:,} modules"


def refuse_empty(source: str, plans: Sequence[Plan]) -> None:
    """Raise InputError where no tensor gets another form.

    source  how a person calls it
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
    if any(reason.startswith(EXCLUDED) for reason, _ in reasons):
        next_step = "Exclude fewer modules: a narrower --exclude 'PATTERN'."
    elif any(ref.dtype not in FLOAT_TYPES for step in matrices for ref in step.refs):
        next_step = "Start from the original weights, in bf16, fp16 or fp32."
    raise InputError("no-linears", f"{detail}; expected at least one linear layer", next_step)


def _is_matrix(step: Step) -> bool:
    return any(len(ref.shape) >= MATRIX_DIMENSIONS for ref in (*step.refs, *step.outputs))
