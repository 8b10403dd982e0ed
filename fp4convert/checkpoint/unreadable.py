"""Set modules aside that cannot be read, where --exclude names them.

They are carried bit for bit where engines can still tell what they are: by the module's own mark,
by GGUF's types, or by the record, in the dialect that the source has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import dialect_named, recognise
from fp4convert.checkpoint.modules import form_finder
from fp4convert.errors import InputError
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import Recipe
from fp4convert.storage.safetensors import TensorRef

NUMBER = re.compile(r"\d+")


class Aside(NamedTuple):
    """A tensor of a module that is carried without being read.

    form  of the module, given with its largest tensor where a record says it; else None
    why   it could not be read
    """

    ref: TensorRef
    form: Form | None
    why: str


def set_aside(error: InputError, clues: Clues, recipe: Recipe) -> dict[str, Aside]:
    """Set aside an unreadable module and its kin in other layers.

    error    of that module
    Returns  by name of the tensor; {} where --exclude does not name the module
    Raises   InputError where engines of the dialect would take its codes for weights
    """
    module = _module_of(error.tensor, clues.tensors)
    if not module or not matches_any(recipe.exclude, module):
        return {}
    kind, found = NUMBER.sub("#", module), defaultdict[str, list[TensorRef]](list)
    for name in clues.tensors:
        own = _module_of(name, clues.tensors)
        if NUMBER.sub("#", own) == kind and matches_any(recipe.exclude, own):
            found[own].append(clues.tensors[name])
    aside = {}
    for own, refs in sorted(found.items()):
        form = _form_recorded(own, refs, clues, recipe, error)
        largest = max(refs, key=lambda ref: ref.nbytes)
        for ref in refs:
            aside[ref.name] = Aside(ref, form if ref is largest else None, error.message)
    return aside


def _module_of(name: str | None, tensors: Mapping[str, TensorRef]) -> str:
    """Return the module of a tensor; findings name modules already."""
    if not name or name not in tensors:
        return name or ""
    return name.rpartition(".")[0]


def _form_recorded(
    module: str, refs: list[TensorRef], clues: Clues, recipe: Recipe, error: InputError
) -> Form | None:
    """Return the recorded form of a module; None for one with a mark."""
    dialect = str(recipe.target.dialect)
    traits = dialect_named(dialect).TRAITS
    is_marked = not traits.ignores_by_name and any(
        ref.name.endswith(traits.labels) for ref in refs if traits.labels
    )
    if is_marked or traits.container == "gguf":
        return None
    next_step = "Give this module in bf16, under the name that ordinary weights have."
    for name, groups in recognise(clues):
        form = form_finder([(group.form, group.modules) for group in groups])(module)
        is_alike = form is not None and form.format is recipe.format
        if (
            name == dialect
            and form
            and (is_alike or {form.format, recipe.format} <= {*traits.mixes})
        ):
            return form
        if is_alike:
            next_step = f"Choose --dialect {name}, the source's own. {next_step}"
    detail = f"{error.message}; {module} is excluded, but nothing in dialect {dialect} would tell"
    detail = f"{detail} engines how to read it as it is"
    raise InputError(error.code, detail, next_step, error.tensor)
