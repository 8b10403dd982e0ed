"""Parse plain words without typer's slow checks; draw plain help.

typer imports pydantic to check a value, which doubles the time before the work begins.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ParameterInfo

from fp4convert.errors import InputError

TOKEN = "token"  # the name of the option whose value is in no message
MOST_DIGITS = 15  # of a plain number; a float has so many exactly
_ODD = object()  # stands for what typer has to look at


def _process_value(parameter: Any, ctx: Any, value: Any) -> Any:
    """Take a plain value as it is; leave any other to typer's class."""
    taken = _take(parameter, value)
    if taken is _ODD:
        return super(type(parameter), parameter).process_value(ctx, value)
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)


class PlainArgument(TyperArgument):
    """An argument that takes plain words as they are."""

    process_value = _process_value


class PlainOption(TyperOption):
    """An option that takes plain words, and refuses a second, other value.

    typer would keep the last.
    """

    process_value = _process_value

    def add_to_parser(self, parser: Any, ctx: Any) -> None:
        if self.is_flag or self.count or self.multiple or self.nargs != 1:
            super().add_to_parser(parser, ctx)
        else:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append")

    def consume_value(self, ctx: Any, opts: Mapping[str, Any]) -> Any:
        values = opts.get(self.name or "")
        if isinstance(values, list) and not self.multiple:
            if len(set(values)) > 1 and not ctx.resilient_parsing:
                raise _given_again(self, values)
            opts = {**opts, self.name or "": values[-1]}
        return super().consume_value(ctx, opts)


PLAIN: dict[type, type] = {TyperArgument: PlainArgument, TyperOption: PlainOption}


class PlainCommand(TyperCommand):
    """One command, with plain parameters."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_plain(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from fp4convert.cli.help import draw_command

        is_all = sys.argv[-1:] == ["all"]  # --help all
        page = draw_command(
            ctx.command_path, self.help or "", self.get_params(ctx), formatter.width, is_all
        )
        formatter.write(page + "\n")


class PlainGroup(TyperGroup):
    """All commands, and the options before them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_plain(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from fp4convert.cli.help import draw_group

        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            first = (command.help or "").partition("\n\n")[0]
            panels.setdefault(panel, []).append((name, " ".join(first.split()).removesuffix(".")))
        page = draw_group(
            ctx.command_path, self.help or "", self.get_params(ctx), panels, formatter.width
        )
        formatter.write(page + "\n")


def _as_plain(parameters: list[Any]) -> list[Any]:
    """Turn typer's parameters into those of the classes above, in place.

    typer has no way to name another class, and knows its parameters by identity.
    """
    for parameter in parameters:
        parameter.__class__ = PLAIN.get(type(parameter), type(parameter))
    return parameters


def _given_again(option: PlainOption, values: list[str]) -> InputError:
    """Return the error of an option that takes one value and has several."""
    flag = max(option.opts, key=len)
    found = "" if option.name == TOKEN else f": {', '.join(map(repr, values))}"
    times = "twice" if len(values) == 2 else f"{len(values)} times"
    detail = f"{flag} is given {times}{found}; expected one value"
    return InputError("usage", detail, f"Give {flag} once.")


def _take(parameter: TyperOption | TyperArgument, value: Any) -> object:
    """Return the value that typer would make of no word or of plain words."""
    if parameter.nargs != 1:
        return _ODD
    if value is None or (parameter.multiple and value == ()):
        if parameter.required:
            return _ODD
        return () if parameter.multiple else None
    described = getattr(parameter, "type_descriptor", None)  # older typers have none, nor pydantic
    if described is None:
        return _ODD
    if not parameter.multiple:
        return _take_word(described.annotation, described.parameter_info, value)
    kind = get_args(described.annotation)[0] if get_origin(described.annotation) is list else None
    taken = [_take_word(kind, described.parameter_info, word) for word in value]
    return _ODD if _ODD in taken else taken


def _take_word(kind: object, info: ParameterInfo, word: Any) -> object:
    """Return the value that typer would make of one plain word."""
    if type(word) is kind:  # a word where one is wanted, and defaults
        return word
    if kind not in (int, float) or not isinstance(word, str) or len(word) > MOST_DIGITS:
        return _ODD
    digits = word.replace(".", "", 1) if kind is float else word
    if not (digits.isascii() and digits.isdigit()):
        return _ODD
    number = int(word) if kind is int else float(word)
    if info.min is not None and number < info.min:
        return _ODD
    return _ODD if info.max is not None and number > info.max else number
