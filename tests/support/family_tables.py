"""Tables of what stays in a family: a model in a line of its own, below it lines of "keep" or "-"
and a module.
"""

from __future__ import annotations

from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Recipe, Target, build_recipe

LAYERS = {"num_hidden_layers": 8, "first_k_dense_replace": 2, "num_layers": 8}


def rows_of(table: str) -> list[tuple[str, str, bool]]:
    """(model, module, is kept) of every line."""
    found, model = [], ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            model = line
            continue
        word, module = line.split()
        found.append((model, module, word == "keep"))
    return found


def recipe_for(model: str) -> Recipe:
    """The recipe for a model_type, for a class of Diffusers, or for `--recipe NAME`."""
    if model.startswith("--recipe "):
        return build_recipe(
            Target("nvfp4"), LAYERS, RecipeOptions(recipe=model.removeprefix("--recipe "))
        )
    key = "_class_name" if model[0].isupper() else "model_type"
    return build_recipe(Target("nvfp4"), {key: model, **LAYERS})
