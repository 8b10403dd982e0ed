"""Decide which folds are used, and what they change.

A fold may not round a tensor that stays: where a matrix or a bias keeps its dtype the factors are
powers of two, and where that does not help the fold is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from fp4convert.calibration.methods.awq import AwqSearch
from fp4convert.calibration.methods.folds import (
    FindFactors,
    Fold,
    Refusal,
    changed_by,
    find_folds,
    uses_of,
    vectors_of,
)
from fp4convert.calibration.methods.scaled_weights import Folded
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.planning.decisions import Verdict, decide
from fp4convert.recipes.patterns import configs_in
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.rules import FoldUse
from fp4convert.storage.source import Checkpoint

TOLD_REFUSALS = 3  # in warnings, one for each reason


class FoldedLayers(NamedTuple):
    """Linear layers under the folds that are used.

    notes  on folds that are not used
    """

    linears: Linears
    folds: tuple[Fold, ...]
    notes: tuple[str, ...]

    @property
    def uses(self) -> tuple[FoldUse, ...]:
        """Describe the folds for the record."""
        return uses_of(self.folds)


def fold_layers(
    checkpoint: Checkpoint,
    recipe: Recipe,
    linears: Linears,
    calibration: Calibration,
    is_unscaled: bool,
) -> FoldedLayers:
    """Put linear layers under the folds of the method.

    is_unscaled  no input scale was measured
    Raises       InputError for --via, which rounds before anything else
    """
    target = recipe.target
    if target.via:
        rounds = f"--via {target.via} rounds weights before anything else"
        detail = f"{rounds}, and --method {target.method} multiplies them first"
        raise InputError("method-via", f"{detail}; expected one of them", "Leave --via out.")
    search = AwqSearch(target, calibration, not is_unscaled)
    return use_folds(checkpoint, recipe, linears, dialect_to_write(target), search.factors)


def use_folds(
    checkpoint: Checkpoint, recipe: Recipe, linears: Linears, dialect: Dialect, find: FindFactors
) -> FoldedLayers:
    """Use every fold of the recipe that helps a four-bit module.

    find    finds the factors of one fold
    Raises  InputError where no fold helps
    """
    verdicts = decide(linears, recipe, dialect)
    found, unused = find_folds(recipe.folds, checkpoint, linears)
    # only refusals beside a module that is rounded, at any height, are of interest
    parents: set[str] = set()
    for module, verdict in verdicts.items():
        if _is_rounded(verdict):
            while (module := module.rpartition(".")[0]) and module not in parents:
                parents.add(module)
    refused = [one for one in unused if one.name.rpartition(".")[0] in parents]
    used: list[Fold] = []
    for fold in found:
        rounded = tuple(linear for linear in fold.readers if _is_rounded(verdicts[linear.module]))
        if not rounded:
            continue
        if why := _unfit(fold, verdicts, recipe):
            refused.append(Refusal(fold.name, why))
        else:
            # Powers of two where a tensor beside a norm's weight keeps its dtype; and always where
            # rows are divided, so that this shows.
            is_exact = (
                fold.weight is None
                or fold.bias is not None
                or any(not verdicts[linear.module].is_made for linear in fold.readers)
            )
            used.append(fold._replace(rounded=rounded, is_exact=is_exact))
    if not used:
        raise _no_folds(checkpoint, recipe, refused)
    changed = changed_by(used, find)
    of = {
        module: linear._replace(coding=changed.get(module, linear.coding))
        for module, linear in linears.of.items()
    }
    vectors = {linear.name: linear for fold in used for linear in vectors_of(fold, find)}
    return FoldedLayers(
        replace(linears, of=of, vectors=vectors),
        tuple(used),
        tuple(_notes(verdicts, changed, refused)),
    )


def _is_rounded(verdict: Verdict) -> bool:
    return verdict.action == "quantize" and verdict.form is not None and verdict.form.format.is_fp4


def _unfit(fold: Fold, verdicts: Mapping[str, Verdict], recipe: Recipe) -> str:
    """Return why a fold cannot be used; "" where it can."""
    if fold.kind == "heads" and recipe.target.kv_cache:
        return "the KV cache scales were measured before folding"
    for linear in (*fold.readers, *([fold.maker] if fold.maker else ())):
        verdict = verdicts[linear.module]
        if verdict.action == "transcode" or verdict.stays:
            return f"{linear.module} keeps its codes"
        if not verdict.is_made and linear.stack:
            return f"{linear.module} is kept in a stack with others"
    for linear in fold.readers:
        verdict = verdicts[linear.module]
        if verdict.is_made and linear.idle and not _is_rounded(verdict):
            return f"{linear.module} has a scale of its inputs"
        if fold.kind == "norm_plus_one" and not verdict.is_made:
            return (
                f"{linear.module} is kept, and 1 + weight of a norm cannot be divided without"
                " rounding"
            )
    return ""


def _no_folds(checkpoint: Checkpoint, recipe: Recipe, refused: list[Refusal]) -> InputError:
    kinds = [
        one["model_type"]
        for one in configs_in(checkpoint.config)
        if isinstance(one.get("model_type"), str)
    ]
    method, model = (
        recipe.target.method,
        f"model type {kinds[0]}" if kinds else "a checkpoint without a model type",
    )
    next_step = (
        "Use --method gptq, or leave --method out; or name what reads what in [[fold]] rows:"
        " docs/recipes.md."
    )
    if not recipe.folds:
        return InputError("no-fold", f"method {method}: no fold is known for {model}", next_step)
    why = f"; {refused[0].name}: {refused[0].why}" if refused else ""
    return InputError(
        "no-fold", f"method {method}: no fold of {model} reaches a four-bit module{why}", next_step
    )


def _notes(
    verdicts: Mapping[str, Verdict], changed: Mapping[str, Folded], refused: list[Refusal]
) -> Iterator[str]:
    """Warn of modules without a fold, and of folds that are not used."""
    without = [
        module
        for module, verdict in verdicts.items()
        if _is_rounded(verdict) and (module not in changed or changed[module].columns is None)
    ]
    if without:
        # the last two parts of a name that are no numbers: self_attn.o_proj, experts.down_proj
        parts = ([part for part in name.split(".") if not part.isdecimal()] for name in without)
        leaves = Counter(".".join(words[-2:]) for words in parts)
        names = ", ".join(f"{leaf} ({count})" for leaf, count in leaves.items())
        yield f"{len(without)} modules have no fold and are rounded as they are: {names}"
    alike: dict[str, list[Refusal]] = {}  # by their reason without the numbers in it
    for refusal in refused:
        reason = "".join(letter for letter in refusal.why if not letter.isdecimal())
        alike.setdefault(reason, []).append(refusal)
    for same in sorted(alike.values(), key=len, reverse=True)[:TOLD_REFUSALS]:
        first = same[0]
        yield f"{len(same)} folds are not used, the first into {first.name}: {first.why}"
