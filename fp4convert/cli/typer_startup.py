"""Parse plain words without typer's slow checks.

Typer imports pydantic to check a value: as long again as all else before the work begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ParameterInfo

MOST_DIGITS = 15  # of a plain number; a float has so many exactly
_ODD = object()  # stands for what typer has to look at


class _PlainOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return (
            super().process_value(ctx, value)
            if (taken := _take(self, value)) is _ODD
            else _called_back(self, ctx, taken)
        )


class _PlainArgument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return (
            super().process_value(ctx, value)
            if (taken := _take(self, value)) is _ODD
            else _called_back(self, ctx, taken)
        )


def _take(parameter: TyperOption | TyperArgument, value: Any) -> object:
    """What typer would make of a value: none given, one plain word, or plain words where several may be given."""
    if parameter.nargs != 1:
        return _ODD
    if value is None or (parameter.multiple and value == ()):
        return _ODD if parameter.required else () if parameter.multiple else None
    described = getattr(parameter, "type_descriptor", None)  # older typers have none, nor pydantic
    if described is None:
        return _ODD
    if not parameter.multiple:
        return _take_word(described.annotation, described.parameter_info, value)
    kind = get_args(described.annotation)[0] if get_origin(described.annotation) is list else None
    taken = [_take_word(kind, described.parameter_info, word) for word in value]
    return _ODD if _ODD in taken else taken


def _take_word(kind: object, info: ParameterInfo, word: Any) -> object:
    if type(word) is kind:  # a word where one is wanted, and defaults
        return word
    if kind is Path and isinstance(word, str):
        is_any = (
            info.file_okay
            and info.dir_okay
            and not (info.exists or info.readable or info.writable or info.resolve_path)
        )
        return Path(word) if is_any else _ODD
    if kind not in (int, float) or not isinstance(word, str) or len(word) > MOST_DIGITS:
        return _ODD
    digits = word.replace(".", "", 1) if kind is float else word
    if not (digits.isascii() and digits.isdigit()):
        return _ODD
    number = int(word) if kind is int else float(word)
    is_within = (info.min is None or number >= info.min) and (
        info.max is None or number <= info.max
    )
    return number if is_within else _ODD


def _called_back(parameter: TyperOption | TyperArgument, ctx: Any, value: object) -> object:
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _taken_plainly(parameters: list[Any]) -> list[Any]:
    """The same parameters, as ones that take plain words as they are.

    Typer makes them of its own classes and of no others, so their class is changed where they stand: they belong to the command
    that typer has just made for us.  Copies would not do, for typer sorts parameters by which object they are, and keeps one.
    """
    for parameter in parameters:
        if type(parameter) in (TyperOption, TyperArgument):
            parameter.__class__ = _PlainOption if type(parameter) is TyperOption else _PlainArgument
    return parameters


class PlainCommand(TyperCommand):
    """One command, whose plain words are taken here."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _taken_plainly(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """All commands, and the options before them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _taken_plainly(super().get_params(ctx))
