"""Find, read and check recipe files: configs/*.toml and users' own.

A family file names the models that it is for (`model_types` and `class_names` of config.json) and applies to them by itself.
A file that names none is a mode, which a person picks; so is a user's own file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.errors import InputError
from fp4convert.recipes.options import STACK_ORDERS, STACK_ROWS
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

if TYPE_CHECKING:
    from importlib.abc import Traversable

DEFAULT = "default"  # the file that every model has
FOLD_KINDS = (
    "norm",
    "norm_plus_one",
    "linear",
    "heads",
)  # x * w (+ b); x * (1 + w); rows of W; rows of W, repeated for heads
KEEP, ANY_FORMAT = (
    "keep",
    "target",
)  # words of [[format]] beside the formats' names: it stays; it becomes what is asked for


MOST_BASES = 20  # of a file, one upon another
_MEMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """One file, checked.

    name  of a file of configs/, without its ending; of a user's, its path
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

    @property
    def is_mode(self) -> bool:
        """True where no model has it by itself."""
        return not self.model_types and not self.class_names


def known_names() -> list[str]:
    """The names that --recipe takes: of every file of configs/ but default.toml."""
    return [name for name in _texts() if name != DEFAULT]


@cache
def known_file(name: str) -> RecipeFile:
    """That file of configs/."""
    return parse(_texts()[name], name)


def families_of(kinds: Iterable[str]) -> list[RecipeFile]:
    """The files that name one of these model_types and class names, each after all that it builds on."""
    wanted = set(kinds)
    likely = (
        name for name, text in _texts().items() if any(f'"{kind}"' in text for kind in wanted)
    )  # 60 files take time
    found: list[RecipeFile] = []
    for file in map(known_file, likely):
        if not wanted.isdisjoint((*file.model_types, *file.class_names)):
            _collect(file.name, Path(), (), found)
    return found


def chosen_files(recipe: str) -> list[RecipeFile]:
    """The file that --recipe names, after all that it builds on.

    recipe  a name of known_names, or the path of a TOML file
    Raises  InputError for one that is not there, that is wrong, or that builds on itself
    """
    found: list[RecipeFile] = []
    _collect(recipe, Path(), (), found)
    return found


def describe_known() -> dict[str, object]:
    """The document of `fp4convert recipes`: every file of configs/, those that a person picks before those of families."""
    files = sorted(
        map(known_file, _texts()), key=lambda file: (file.name != DEFAULT, not file.is_mode)
    )
    return {"recipes": [_head(file) for file in files]}


def describe(recipe: str) -> dict[str, object]:
    """The document of `fp4convert recipes NAME`: what that file says, and before it all that it builds on.

    Raises InputError as chosen_files does
    """
    files = chosen_files(recipe)
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
        for file in files[::-1]
        for rule in file.stacks
    ]
    keep = [
        {"reason": rule.reason, "modules": rule.patterns, "for_accuracy": rule.is_for_accuracy}
        for file in files
        for rule in file.keep
    ]
    return {
        **_head(files[-1]),
        "base": [file.name for file in files[:-1]],
        "keep": keep,
        "only": [
            {"reason": rule.reason, "modules": rule.patterns}
            for file in files
            for rule in file.only
        ],
        "groups": list(dict.fromkeys(group for file in files[::-1] for group in file.groups)),
        "stacks": stacks,
        "formats": [
            {"format": rule.format, "modules": rule.patterns}
            for file in files[::-1]
            for rule in file.formats
        ],
        "folds": [rule._asdict() for file in files[::-1] for rule in file.folds],
        "experts": [rule._asdict() for file in files[::-1] for rule in file.experts],
    }


def _head(file: RecipeFile) -> dict[str, object]:
    return {
        "name": file.name,
        "about": file.about,
        "model_types": file.model_types,
        "class_names": file.class_names,
    }


def parse(text: str, name: str, *, is_users: bool = False) -> RecipeFile:
    """A file's text, checked; raises InputError that names file, key and what was expected."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError("recipe-file", f"{name}: no TOML that can be read: {error}") from None
    if is_users and (taken := [key for key in ("model_types", "class_names") if key in table]):
        detail = f"{name}: {taken[0]} is for fp4convert's own files; a file given with --recipe applies to every model"
        raise InputError(
            "recipe-file", detail, f"Remove {taken[0]}; to build on a family, write: base = NAME."
        )
    known = _checked(table, _FILE, name)
    rows = {
        key: [
            _checked(row, _ROWS[key], f"{name}: [[{key}]] {n}")
            for n, row in enumerate(known[key], 1)
        ]
        for key in _ROWS
    }
    base = known["base"]
    for number, row in enumerate(rows["stack"], 1):
        names = row["members"]
        if len(set(names)) < len(names) or not all(_MEMBER.fullmatch(member) for member in names):
            detail = f"{name}: [[stack]] {number}: members {names!r}; expected different names of modules, each without dots"
            raise InputError("recipe-file", detail, "See: docs/recipes.md.")
    return RecipeFile(
        name,
        known["about"],
        tuple(known["model_types"]),
        tuple(known["class_names"]),
        (base,) if isinstance(base, str) else tuple(base),
        tuple(
            KeepRule(
                tuple(row["modules"]),
                row["reason"],
                row["kind"],
                row["may_be_absent"],
                row["for_accuracy"],
            )
            for row in rows["keep"]
        ),
        tuple(OnlyRule(tuple(row["modules"]), row["reason"]) for row in rows["only"]),
        tuple(tuple(row["members"]) for row in rows["group"]),
        tuple(member for row in rows["group"] for member in row["may_lack"]),
        tuple(
            StackRule(
                tuple(row["tensors"]),
                tuple(row["members"]),
                row["order"] == "in_out",
                row["rows"] == "interleaved",
                row["named"],
                row["inputs"],
                experts_key=row["experts"],
            )
            for row in rows["stack"]
        ),
        tuple(FormatRule(Patterns(row["modules"]), row["format"]) for row in rows["format"]),
        tuple(
            FoldRule(
                row["into"],
                row["kind"],
                tuple(row["linears"]),
                tuple(row["may_lack"]),
                tuple(row["aside"]),
            )
            for row in rows["fold"]
        ),
        tuple(
            ExpertsRule(*(tuple(row[key]) for key in ExpertsRule._fields))
            for row in rows["experts"]
        ),
    )


class _Key(NamedTuple):
    """A key of a table: what it holds, in words and as a question; no default where it must be there."""

    expected: str
    is_sound: Callable[[Any], bool]
    default: object = None


def _is_texts(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(text, str) and text for text in value)
    )


def _is_name(value: object) -> bool:
    """True for a template of names of modules, one for each expert."""
    if not isinstance(value, str) or "{expert}" not in value:
        return False
    rest = value.replace("{parent}", "").replace("{expert}", "").replace("{member}", "")
    return not set(rest) & set("{}")


def _is_place(value: object) -> bool:
    """True for the name of a module in a layer, with no braces but those of a layer and an expert."""
    is_in_layer = isinstance(value, str) and value.startswith("{layer}.")
    return is_in_layer and not set(str(value).replace("{layer}", "").replace("{expert}", "")) & set(
        "{}*?[]"
    )


def _word(*words: str, default: object = None) -> _Key:
    return _Key(" or ".join(map(repr, words)), lambda value: value in words, default)


def _rows() -> _Key:
    return _Key("tables, each under double brackets", lambda value: isinstance(value, list), ())


_TEXT = _Key("a text", lambda value: isinstance(value, str) and bool(value))
_TEXTS = _Key("a list of texts, not empty", _is_texts)
_PLACE = _Key(
    "a name that begins with {layer}, with {expert} where experts have numbers", _is_place
)
_PLACES = _Key(
    "a list of such names: {layer}.mlp.up_proj",
    lambda value: _is_texts(value) and all(map(_is_place, value)),
)
_FLAG = _Key("true or false", lambda value: isinstance(value, bool), False)
_FILE = {
    "about": _TEXT._replace(default=""),
    "model_types": _TEXTS._replace(default=()),
    "class_names": _TEXTS._replace(default=()),
    "base": _Key(
        "a name, or a list of names",
        lambda value: (isinstance(value, str) and bool(value)) or _is_texts(value),
        (),
    ),
    **dict.fromkeys(("keep", "only", "group", "stack", "format", "fold", "experts"), _rows()),
}
_ROWS = {
    "keep": {
        "modules": _TEXTS,
        "reason": _TEXT,
        "kind": _word("embedding", "router", "tower", "prediction", default=""),
        "may_be_absent": _FLAG,
        "for_accuracy": _FLAG,
    },
    "only": {"modules": _TEXTS, "reason": _TEXT},
    "group": {"members": _TEXTS, "may_lack": _TEXTS._replace(default=())},
    "stack": {
        "tensors": _TEXTS,
        "members": _TEXTS,
        "order": _word(*STACK_ORDERS),
        "rows": _word(*STACK_ROWS, default="concatenated"),
        "named": _Key("a name with {parent}, {expert} and {member} in it", _is_name, NAMED),
        "inputs": _TEXT._replace(default=""),
        "experts": _TEXT._replace(default=""),
    },
    "format": {"modules": _TEXTS, "format": _word("nvfp4", "mxfp4", "fp8", KEEP, ANY_FORMAT)},
    "fold": {
        "into": _PLACE,
        "kind": _word(*FOLD_KINDS),
        "linears": _PLACES,
        "may_lack": _PLACES._replace(default=()),
        "aside": _PLACES._replace(default=()),
    },
    "experts": {
        "counts": _TEXTS,
        "chosen": _TEXTS,
        "rows": _TEXTS._replace(default=()),
        "columns": _TEXTS._replace(default=()),
    },
}


def _checked(table: object, keys: Mapping[str, _Key], where: str) -> dict[str, Any]:
    """Every key's value, or its default; InputError for another key, a wrong value, or one that is lacking."""
    if not isinstance(table, dict):
        raise InputError("recipe-file", f"{where} is no table; expected the keys {', '.join(keys)}")
    if unknown := [key for key in table if key not in keys]:
        raise InputError(
            "recipe-file",
            f"{where}: no key {unknown[0]!r} is known; expected one of {', '.join(keys)}",
        )
    for key, kind in keys.items():
        if key in table and not kind.is_sound(table[key]):
            raise InputError(
                "recipe-file", f"{where}: {key} is {table[key]!r}; expected {kind.expected}"
            )
        if key not in table and kind.default is None:
            raise InputError("recipe-file", f"{where}: {key} is lacking; expected {kind.expected}")
    return {key: table.get(key, kind.default) for key, kind in keys.items()}


def _collect(name: str, folder: Path, above: tuple[str, ...], found: list[RecipeFile]) -> None:
    """Append that file after its bases, each file once.

    folder  what a path is relative to
    above   the files that build on it
    """
    if name in _texts():
        file, place = known_file(name), folder
    else:
        path = folder / name
        file, place = _users_file(path), path.parent
    if file.name in above or len(above) > MOST_BASES:
        raise InputError(
            "recipe-cycle",
            f"{' -> '.join((*above, file.name))}: a recipe builds on itself; expected no circle",
        )
    for base in file.bases:
        _collect(base, place, (*above, file.name), found)
    if file not in found:
        found.append(file)


def _users_file(path: Path) -> RecipeFile:
    try:
        is_there = path.suffix == ".toml" or path.is_file()
        text = path.read_text(encoding="utf-8") if is_there else None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no name of a file
        next_step = (
            "Look for a typing error; it has to be a file of UTF-8 text that this user may read."
        )
        raise InputError("recipe-file", f"{path}: cannot be read: {error}", next_step) from None
    if text is None:
        detail = f"recipe {str(path)!r} is not known; expected one of {', '.join(known_names())}, or the path of a TOML file"
        raise InputError("unknown-recipe", detail, "See: fp4convert recipes.")
    return parse(text, os.path.normpath(path), is_users=True)


@cache
def _texts() -> dict[str, str]:
    """The text of every file of configs/, by name."""
    from importlib.resources import files

    folder: Traversable = files("fp4convert").joinpath("configs")
    found: Collection[Traversable] = sorted(folder.iterdir(), key=lambda item: item.name)
    return {
        item.name[:-5]: item.read_text(encoding="utf-8")
        for item in found
        if item.name.endswith(".toml")
    }
