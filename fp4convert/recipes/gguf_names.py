"""Apply a family's recipe to llama.cpp's names of modules.

Recipes speak the names of transformers, and are picked by config.json, which a GGUF file lacks. Its
architecture picks the family, and llama.cpp's own map says which module of transformers a tensor
was: a rule that fits one of these names keeps the tensor.
Source: llama.cpp's package gguf, tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp4convert.errors import ChoiceError
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import Recipe, Target, build_recipe
from fp4convert.recipes.rules import KeepRule, Patterns
from fp4convert.recipes.toml_files import family_spelled
from fp4convert.storage.gguf import GgufFrame, aliases_of
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Checkpoint

OTHER_WORDS = {  # llama.cpp's names that are not transformers' model types, spelled otherwise
    **{"deepseek2": "deepseek_v3", "deepseek32": "deepseek_v32", "deepseek4": "deepseek_v4"},
    **{"nemotron_h_moe": "nemotron_h", "step35": "step3p5"},
}
TABLES = ("keep", "only", "formats")
# Names of transformers' modules in the map; llama.cpp puts the experts of a layer together.
TRANSFORMERS = re.compile(r"(?:model|backbone|transformer)\.")
STACKED = re.compile(r"\.experts?\.(?=[^.]+$)")
STACK = re.compile(r"blk\.\d+\.ffn_\w+_exps")
EXPERT = re.compile(rf"({STACK.pattern})\.(\d+)")
MATRIX_DIMENSIONS = 2


def build_for_gguf(target: Target, checkpoint: Checkpoint, options: RecipeOptions) -> Recipe:
    """Build the recipe for the model in a GGUF file.

    Raises  ChoiceError for a --recipe that names no module of it
    """
    frame = checkpoint.shards[0].frame
    if not isinstance(frame, GgufFrame):
        raise RuntimeError(f"{checkpoint.shards[0].file} is no GGUF file")
    config: dict[str, object] = {}
    name = frame.architecture
    if family := OTHER_WORDS.get(name) or family_spelled(name):
        config = {"model_type": family, "num_hidden_layers": frame.blocks}
    modules = list(_modules_of(checkpoint.tensors))
    names = _names_of(frame, modules)
    plain = build_recipe(target, {})
    recipe = _translated(build_recipe(target, config, options), plain, names)
    if options.recipe is not None:
        chosen = _translated(build_recipe(target, {}, options), plain, names)
        fitting = tuple(pattern for rule in _own_rules(chosen, plain) for pattern in rule.patterns)
        if not any(matches_any(fitting, module) for module in modules):
            detail = f"--recipe {options.recipe} names no module of the {frame.architecture} in"
            detail = f"{detail} the GGUF file, by no name that llama.cpp knows for it"
            raise ChoiceError("idle-option", detail, "Leave --recipe out.")
    return recipe


def _modules_of(tensors: Iterable[TensorRef]) -> Iterator[str]:
    """Yield the modules of weights, experts by their numbers."""
    for ref in tensors:
        module = ref.name.removesuffix(WEIGHT)
        yield module
        if STACK.fullmatch(module) and len(ref.shape) > MATRIX_DIMENSIONS:
            yield from (f"{module}.{number}" for number in range(ref.shape[0]))


def _own_rules(recipe: Recipe, plain: Recipe) -> list[Any]:
    """Return the rules that a recipe has beside those of every model."""
    return [
        rule
        for table in TABLES
        for rule in getattr(recipe, table)
        if rule not in getattr(plain, table)
    ]


def _translated(recipe: Recipe, plain: Recipe, names: Mapping[str, list[str]]) -> Recipe:
    """Add llama.cpp's names to rules beside those of every model.

    A family's rules on layouts and engines of transformers are not about GGUF files.
    """

    def fitting(patterns: tuple[str, ...], unless: tuple[str, ...] = ()) -> Iterator[str]:
        for module, known in names.items():
            if any(matches_any(patterns, one) and not matches_any(unless, one) for one in known):
                yield module

    asked = {
        table: tuple((*one, *fitting(one)) if one else one for one in every)
        for table, every in recipe.asked.items()
    }
    of_user = {one for every in recipe.asked.values() for one in every}

    def translate(rule: Any) -> Any:
        if isinstance(rule, KeepRule):
            is_for_gguf = rule.is_for_accuracy or rule.patterns in of_user
            found = fitting(rule.patterns, rule.unless) if is_for_gguf else ()
            return rule._replace(patterns=(*rule.patterns, *found))
        return rule._replace(patterns=Patterns((*rule.patterns, *fitting(rule.patterns))))

    changed: dict[str, Any] = {
        table: tuple(
            rule if rule in getattr(plain, table) else translate(rule)
            for rule in getattr(recipe, table)
        )
        for table in TABLES
    }
    kept, only = (
        tuple(pattern for rule in changed[table] for pattern in rule.patterns)
        for table in TABLES[:2]
    )
    return replace(recipe, **changed, kept_patterns=kept, only_patterns=only, asked=asked)


def _names_of(frame: GgufFrame, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of transformers for each module that llama.cpp maps."""
    known: dict[str, list[str]] = defaultdict(list)
    for alias, name in (aliases_of(frame) or {}).items():
        if TRANSFORMERS.match(alias):
            known[name].append(alias)
    found = {}
    for module in modules:
        expert = EXPERT.fullmatch(module)
        names = known.get(expert[1] if expert else module, [])
        if expert:
            names = [STACKED.sub(f".experts.{expert[2]}.", name) for name in names]
        if names:
            found[module] = names
    return found
