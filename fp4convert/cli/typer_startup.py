"""Parse plain words without typer's slow checks; draw plain help.

Typer imports pydantic to check a value: as long again as all else before the work begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ParameterInfo

from fp4convert.errors import InputError

TOKEN = "token"  # the name of the option whose value is in no message
MOST_DIGITS = 15  # of a plain number; a float has so many exactly
_ODD = object()  # stands for what typer has to look at


class PlainCommand(TyperCommand):
    """One command, whose plain words are taken here."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_plain_words(super().get_params(ctx))

    def make_parser(self, ctx: Any) -> Any:
        """Return typer's parser, which here refuses a second, other value.

        It would keep the last one of an option that takes one.
        """
        parser: Any = super().make_parser(ctx)
        declared = [*parser._long_opt.values(), *parser._short_opt.values()]
        single = {option.dest: option for option in declared if option.action == "store"}
        for option in single.values():
            option.action = "append"
        parse = parser.parse_args

        def parse_args(args: list[str]) -> tuple[Any, list[str], list[Any]]:
            values, words, order = parse(args)
            for name in [name for name in single if name in values]:
                if len(set(values[name])) > 1 and not ctx.resilient_parsing:
                    raise _given_again(single[name].obj, values[name])
                values[name] = values[name][-1]
            return values, words, order

        parser.parse_args = parse_args
        return parser

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from fp4convert.cli.help import draw_command

        page = draw_command(
            ctx.command_path, self.help or "", self.get_params(ctx), formatter.width
        )
        formatter.write(page + "\n")


class PlainGroup(TyperGroup):
    """All commands, and the options before them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_plain_words(super().get_params(ctx))

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


def _given_again(option: Any, values: list[str]) -> InputError:
    """Return the error of an option that takes one value and has several."""
    flag = max(option.opts, key=len)
    found = "" if option.name == TOKEN else f": {', '.join(map(repr, values))}"
    times = "twice" if len(values) == 2 else f"{len(values)} times"
    detail = f"{flag} is given {times}{found}; expected one value"
    return InputError("usage", detail, f"Give {flag} once.")


def _take_plain_words(parameters: list[Any]) -> list[Any]:
    """Make the parameters take plain words as they are.

    They are changed where they stand: they belong to the command that typer has just made for us.
    Copies would not do, for typer sorts parameters by which object they are, and keeps one.
    """
    for parameter in parameters:
        is_changed = "process_value" in vars(parameter)
        if type(parameter) in (TyperOption, TyperArgument) and not is_changed:
            parameter.process_value = partial(_process, parameter, parameter.process_value)
    return parameters


def _process(
    parameter: TyperOption | TyperArgument, check: Callable[..., Any], ctx: Any, value: Any
) -> Any:
    """Process a value; what is not plain as typer's own check does."""
    taken = _take(parameter, value)
    if taken is _ODD:
        return check(ctx, value)
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)


def _take(parameter: TyperOption | TyperArgument, value: Any) -> object:
    """Return what typer would make of a plain value.

    Plain are: none given, one plain word, or plain words where several may be given.
    """
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
    """Return what typer would make of one plain word."""
    if type(word) is kind:  # a word where one is wanted, and defaults
        return word
    if kind is Path and isinstance(word, str):
        is_checked = info.exists or info.readable or info.writable or info.resolve_path
        is_any = info.file_okay and info.dir_okay and not is_checked
        return Path(word) if is_any else _ODD
    if kind not in (int, float) or not isinstance(word, str) or len(word) > MOST_DIGITS:
        return _ODD
    digits = word.replace(".", "", 1) if kind is float else word
    if not (digits.isascii() and digits.isdigit()):
        return _ODD
    number = int(word) if kind is int else float(word)
    if info.min is not None and number < info.min:
        return _ODD
    return _ODD if info.max is not None and number > info.max else number
