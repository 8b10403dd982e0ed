"""Find, read and check recipe files: configs/*.toml and users' own.

A family file applies to the models that its `model_types` and `class_names` name.  A file without
them is a mode, which --recipe picks; so is a user's own file.  families.toml is the index of
models, so that a plan opens no other file; `make docs` writes it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.errors import InputError, did_you_mean
from fp4convert.numerics.formats import FORMATS
from fp4convert.recipes.options import DRAFTS, KEEP, STACK_ORDERS, STACK_ROWS
from fp4convert.recipes.rules import (
    NAMED,
    ExpertsRule,
    FoldRule,
    FormatRule,
    KeepRule,
    OnlyRule,
    Patterns,
    StackRule,
)
from fp4convert.storage.json_text import read_text_file

if TYPE_CHECKING:
    from importlib.abc import Traversable

FAMILIES = Path(__file__).with_name("families.toml")
DEFAULT = "default"  # the file for every model
NO_RECIPES = ("usual_losses.toml",)  # of configs/
# x * w (+ b); x * (1 + w); rows of W; rows of W, repeated for heads
FOLD_KINDS = ("norm", "norm_plus_one", "linear", "heads")
# Words of [[format]] beside names of formats: KEEP, and that of --format.
ANY_FORMAT = "target"
MOST_BASES = 20  # in a chain
_MEMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RecipeFile(NamedTuple):
    """A recipe file that was checked.

    name      name of a file of configs/ without its ending, or the path of a user's file
    draft     the choice for layers that draft tokens: SAME, KEEP, or "" for none
    is_users  it is a user's file
    """

    name: str
    about: str
    model_types: tuple[str, ...]
    class_names: tuple[str, ...]
    bases: tuple[str, ...]
    keep: tuple[KeepRule, ...]
    only: tuple[OnlyRule, ...]
    groups: tuple[tuple[str, ...], ...]
    may_lack: tuple[str, ...]
    stacks: tuple[StackRule, ...]
    formats: tuple[FormatRule, ...]
    folds: tuple[FoldRule, ...] = ()
    experts: tuple[ExpertsRule, ...] = ()
    is_users: bool = False
    draft: str = ""

    @property
    def is_mode(self) -> bool:
        """Return whether no model picks the file."""
        return not self.model_types and not self.class_names


def known_names() -> list[str]:
    """Return the names for --recipe: all of configs/ but default.toml."""
    return [name for name in _known() if name != DEFAULT]


@cache
def known_file(name: str) -> RecipeFile:
    """Read a file of configs/."""
    return parse(_known()[name].read_text(encoding="utf-8"), name)


def families_of(kinds: Iterable[str]) -> list[RecipeFile]:
    """Return family files of model types and classes, after their bases."""
    index = _families()
    files: list[RecipeFile] = []
    for name in sorted({index[kind] for kind in kinds if kind in index}):
        _collect(name, Path(), (), files)
    return files


def family_spelled(architecture: str) -> str | None:
    """Return the model type of a family that llama.cpp spells so: gpt-oss."""
    bare = re.sub(r"[-_.]", "", architecture)
    return next((kind for kind in _families() if re.sub(r"[-_.]", "", kind) == bare), None)


def chosen_files(recipe: str) -> list[RecipeFile]:
    """Return the file that --recipe names, after its bases.

    recipe  a name of known_names, or the path of a TOML file
    Raises  InputError for a file that is missing, wrong, or its own base
    """
    files: list[RecipeFile] = []
    _collect(recipe, Path(), (), files)
    return files


def describe_known() -> dict[str, object]:
    """Return the document of `recipes --json`: modes before families."""
    files = sorted(
        map(known_file, _known()), key=lambda file: (file.name != DEFAULT, not file.is_mode)
    )
    return {"recipes": [_describe_head(file) for file in files]}


def describe(recipe: str) -> dict[str, object]:
    """Return the document of `recipes NAME --json`: a file with its bases.

    Raises  InputError as chosen_files does
    """
    files = chosen_files(recipe)
    later_first = files[::-1]
    stacks = [
        {
            "tensors": rule.tensors,
            "members": rule.members,
            "order": STACK_ORDERS[rule.is_transposed],
            "rows": STACK_ROWS[rule.is_interleaved],
            "named": rule.named,
            "inputs": rule.inputs_key or None,
            "experts": rule.experts_key or None,
        }
        for file in later_first
        for rule in file.stacks
    ]
    keep = [
        {"reason": rule.reason, "modules": rule.patterns, "for_accuracy": rule.is_for_accuracy}
        for file in files
        for rule in file.keep
    ]
    only = [
        {"reason": rule.reason, "modules": rule.patterns} for file in files for rule in file.only
    ]
    formats = [
        {"format": rule.format, "modules": rule.patterns}
        for file in later_first
        for rule in file.formats
    ]
    return {
        **_describe_head(files[-1]),
        "base": [file.name for file in files[:-1]],
        "keep": keep,
        "only": only,
        "groups": list(dict.fromkeys(group for file in later_first for group in file.groups)),
        "stacks": stacks,
        "formats": formats,
        "folds": [rule._asdict() for file in later_first for rule in file.folds],
        "experts": [rule._asdict() for file in later_first for rule in file.experts],
        "draft": next((file.draft for file in later_first if file.draft), None),
    }


def _describe_head(file: RecipeFile) -> dict[str, object]:
    return {key: getattr(file, key) for key in ("name", "about", "model_types", "class_names")}


def parse(text: str, name: str, *, is_users: bool = False) -> RecipeFile:
    """Parse and check the text of a recipe file.

    Raises  InputError that names file, key and expected value
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise InputError("recipe-file", f"{name}: not valid TOML: {error}") from None
    if is_users and (reserved := [key for key in ("model_types", "class_names") if key in table]):
        detail = (
            f"{name}: {reserved[0]} is for fp4convert's own files; "
            "a file given with --recipe applies to every model"
        )
        raise InputError(
            "recipe-file",
            detail,
            f"Remove {reserved[0]}; to build on a family, write: base = NAME.",
        )
    known = _check_table(table, _FILE, name)
    rows = {
        key: [
            _check_table(row, kinds, f"{name}: [[{key}]] {number}")
            for number, row in enumerate(known[key], 1)
        ]
        for key, kinds in _ROWS.items()
    }
    # Keys of other rows are in the order of the fields.
    return RecipeFile(
        name,
        about=known["about"],
        model_types=known["model_types"],
        class_names=known["class_names"],
        bases=(known["base"],) if isinstance(known["base"], str) else known["base"],
        keep=tuple(KeepRule(*row.values()) for row in rows["keep"]),
        only=tuple(OnlyRule(*row.values()) for row in rows["only"]),
        groups=tuple(row["members"] for row in rows["group"]),
        may_lack=tuple(member for row in rows["group"] for member in row["may_lack"]),
        stacks=tuple(
            _make_stack(row, f"{name}: [[stack]] {number}")
            for number, row in enumerate(rows["stack"], 1)
        ),
        formats=tuple(
            FormatRule(Patterns(row["modules"]), row["format"]) for row in rows["format"]
        ),
        folds=tuple(FoldRule(*row.values()) for row in rows["fold"]),
        experts=tuple(ExpertsRule(*row.values()) for row in rows["experts"]),
        is_users=is_users,
        draft=known["draft"],
    )


def _make_stack(row: Mapping[str, Any], where: str) -> StackRule:
    """Return the rule of a row; raise InputError for odd names of members."""
    names = row["members"]
    if len(set(names)) < len(names) or not all(_MEMBER.fullmatch(member) for member in names):
        detail = (
            f"{where}: members {list(names)!r}; "
            "expected different names of modules, each without dots"
        )
        raise InputError("recipe-file", detail, "See: docs/recipes.md.")
    return StackRule(
        row["tensors"],
        names,
        is_transposed=row["order"] == "in_out",
        is_interleaved=row["rows"] == "interleaved",
        named=row["named"],
        inputs_key=row["inputs"],
        experts_key=row["experts"],
    )


_Check = tuple[str, Callable[[Any], bool]]
"""The value of a key: words for messages, and its check"""
_Keys = dict[str, tuple[str, Callable[[Any], bool], object]]
"""Keys of a table, with a default; None where the key is required"""


def _is_texts(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(text, str) and text for text in value)
    )


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _is_name(value: object) -> bool:
    """Return whether a value is a template for names of experts."""
    if not isinstance(value, str) or "{expert}" not in value:
        return False
    rest = value.replace("{parent}", "").replace("{expert}", "").replace("{member}", "")
    return not set(rest) & set("{}")


def _is_place(value: object) -> bool:
    """Return whether a value is a name with {layer} and {expert} alone."""
    if not isinstance(value, str) or not value.startswith("{layer}."):
        return False
    return not set(value.replace("{layer}", "").replace("{expert}", "")) & set("{}*?[]")


def _one_of(*words: str) -> _Check:
    return " or ".join(map(repr, words)), lambda value: value in words


_TEXT: _Check = ("a text", lambda value: isinstance(value, str) and bool(value))
_TEXTS: _Check = ("a list of texts, not empty", _is_texts)
_PLACE: _Check = (
    "a name that begins with {layer}, with {expert} where experts have numbers",
    _is_place,
)
_PLACES: _Check = (
    "a list of such names: {layer}.mlp.up_proj",
    lambda value: _is_texts(value) and all(map(_is_place, value)),
)
_FLAG: _Check = ("true or false", lambda value: isinstance(value, bool))
_NUMBERS: _Check = ("a list of whole numbers, not empty", _is_numbers)
_BASES: _Check = ("a name, or a list of names", lambda value: _TEXT[1](value) or _is_texts(value))
_TABLES: _Check = ("tables, each under double brackets", lambda value: isinstance(value, list))
_ROWS: dict[str, _Keys] = {
    "keep": {
        "modules": (*_TEXTS, None),
        "reason": (*_TEXT, None),
        "kind": (*_one_of("embedding", "router", "tower", "prediction", "plain"), ""),
        "may_be_absent": (*_FLAG, False),
        "for_accuracy": (*_FLAG, False),
        "unless": (*_TEXTS, ()),
        "dialects": (*_TEXTS, ()),
        "sizes": (*_NUMBERS, ()),
        "tables": (*_TEXTS, ()),
    },
    "only": {"modules": (*_TEXTS, None), "reason": (*_TEXT, None)},
    "group": {"members": (*_TEXTS, None), "may_lack": (*_TEXTS, ())},
    "stack": {
        "tensors": (*_TEXTS, None),
        "members": (*_TEXTS, None),
        "order": (*_one_of(*STACK_ORDERS), None),
        "rows": (*_one_of(*STACK_ROWS), "concatenated"),
        "named": ("a name with {parent}, {expert} and {member} in it", _is_name, NAMED),
        "inputs": (*_TEXT, ""),
        "experts": (*_TEXT, ""),
    },
    "format": {"modules": (*_TEXTS, None), "format": (*_one_of(*FORMATS, KEEP, ANY_FORMAT), None)},
    "fold": {
        "into": (*_PLACE, None),
        "kind": (*_one_of(*FOLD_KINDS), None),
        "linears": (*_PLACES, None),
        "may_lack": (*_PLACES, ()),
        "aside": (*_PLACES, ()),
    },
    "experts": {
        "counts": (*_TEXTS, None),
        "chosen": (*_TEXTS, None),
        "rows": (*_TEXTS, ()),
        "columns": (*_TEXTS, ()),
    },
}
_FILE: _Keys = {
    "about": (*_TEXT, ""),
    "model_types": (*_TEXTS, ()),
    "class_names": (*_TEXTS, ()),
    "base": (*_BASES, ()),
    "draft": (*_one_of(*DRAFTS), ""),
    **dict.fromkeys(_ROWS, (*_TABLES, ())),
}


def _check_table(table: object, keys: _Keys, where: str) -> dict[str, Any]:
    """Return the value of every key, or its default; lists become tuples.

    Raises  InputError for an unknown key, a wrong value, or a missing one
    """
    if not isinstance(table, dict):
        detail = f"{where} is not a table; expected the keys {', '.join(keys)}"
        raise InputError("recipe-file", detail)
    if unknown := [key for key in table if key not in keys]:
        detail = f"{where}: no key {unknown[0]!r} is known; expected one of {', '.join(keys)}"
        raise InputError("recipe-file", detail)
    values = {}
    for key, (expected, is_sound, default) in keys.items():
        value = table.get(key, default)
        if key in table and not is_sound(value):
            detail = f"{where}: {key} is {value!r}; expected {expected}"
            raise InputError("recipe-file", detail)
        if value is None:
            raise InputError("recipe-file", f"{where}: {key} is missing; expected {expected}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return values


def _collect(name: str, folder: Path, above: tuple[str, ...], files: list[RecipeFile]) -> None:
    """Append a file after its bases, each file once.

    folder  relative paths begin here
    above   names of the files that build on it
    """
    if name in _known():
        file = known_file(name)
    else:
        path = folder / name
        try:
            is_there = path.suffix == ".toml" or os.path.isfile(path)
            text = read_text_file(path) if is_there else None
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
            raise InputError(
                "recipe-file",
                f"{path}: cannot be read: {error}",
                "Look for a typing error; "
                "it has to be a file of UTF-8 text that this user may read.",
            ) from None
        if text is None:
            near = did_you_mean(name, known_names())
            detail = f"recipe {str(path)!r} is not known; expected the name of one of the"
            detail += f" {len(known_names())} recipes, or the path of a TOML file; a model type"
            detail += f" without one of its own takes the recipe default{near}"
            raise InputError("unknown-recipe", detail, "See: fp4convert recipes")
        file, folder = parse(text, os.path.normpath(path), is_users=True), path.parent
    if file.name in above or len(above) > MOST_BASES:
        circle = " -> ".join((*above, file.name))
        detail = f"{circle}: a recipe builds on itself; expected no circle"
        raise InputError("recipe-cycle", detail)
    for base in file.bases:
        _collect(base, folder, (*above, file.name), files)
    if file not in files:
        files.append(file)


@cache
def _known() -> Mapping[str, Traversable]:
    """Return the files of configs/ by name, sorted."""
    from importlib.resources import files

    folder = files("fp4convert").joinpath("configs")
    items = {item.name: item for item in folder.iterdir() if item.name.endswith(".toml")}
    names = sorted(items.keys() - set(NO_RECIPES))
    return {name.removesuffix(".toml"): items[name] for name in names}


@cache
def _families() -> Mapping[str, str]:
    """Read the index: model type or class -> file of configs/."""
    return tomllib.loads(FAMILIES.read_text(encoding="utf-8"))
