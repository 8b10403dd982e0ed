"""What the words of a command line become: most are taken as they are, without what typer checks values with.

Typer imports pydantic for every option of a command, given or not: as long again as all else before the work begins.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption


class _PlainOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _called_back(self, ctx, value) if _is_plain(self, value) else super().process_value(ctx, value)


class _PlainArgument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _called_back(self, ctx, value) if _is_plain(self, value) else super().process_value(ctx, value)


def _is_plain(parameter: TyperOption | TyperArgument, value: object) -> bool:
    """True for what nothing is to be done with: an option that is not given, and a word where a word is wanted."""
    if parameter.nargs != 1:
        return False
    if value is None or (parameter.multiple and value == ()):
        return not parameter.required
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)  # older typers have none, nor pydantic
    return (
        not parameter.multiple and type(value) is kind and (kind is str or (kind in (int, float) and value == parameter.default))
    )


def _called_back(parameter: TyperOption | TyperArgument, ctx: Any, value: object) -> object:
    taken = () if parameter.multiple and value is None else value  # as typer has it
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)


def _taken_plainly(parameters: list[Any]) -> list[Any]:
    """These parameters, which typer makes of no other classes than its own, as ones that take plain words as they are."""
    for parameter in parameters:
        if type(parameter) in (TyperOption, TyperArgument):
            parameter.__class__ = _PlainOption if type(parameter) is TyperOption else _PlainArgument
    return parameters


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _taken_plainly(super().get_params(ctx))


class Group(TyperGroup):
    """All of them, and the options before them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _taken_plainly(super().get_params(ctx))
