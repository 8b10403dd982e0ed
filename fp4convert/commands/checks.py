"""Check the arguments of public functions; warn as Python does."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar, get_args
from urllib.parse import urlsplit

from fp4convert.options.access import AccessOptions, refuse_idle_options
from fp4convert.recipes.options import one_of

Options = TypeVar("Options")
P = ParamSpec("P")
R = TypeVar("R")


def by_name(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments without their names, and texts in place of numbers."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        name, declared = function.__name__, signature(function)
        parameters = declared.parameters.values()
        places = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        if len(args) > len(places):
            taken = f"takes {', '.join(places)} without a name"
            given = ", ".join(f"NAME={value!r}" for value in args[len(places) :])
            raise TypeError(f"{name}() {taken}; the others need theirs: {given}")
        try:
            bound = declared.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        for each in parameters:
            members = (each.annotation, *get_args(each.annotation))
            kinds = [kind for kind in members if kind in (int, float, bool)]
            if kinds and str not in members and isinstance(bound.get(each.name), str):
                expected = one_of(kind.__name__ for kind in kinds)
                given = f"{each.name}={bound[each.name]!r}"
                raise TypeError(f"{name}() {given}; expected {expected}")
        return function(*args, **kwargs)

    return called


def checked(options: Options) -> Options:
    """Return the options; InputError for idle ones and a bad HF_ENDPOINT.

    huggingface_hub cannot be imported where that is no address.
    """
    if not isinstance(options, AccessOptions):
        return options  # of a command that never asks the Hub
    refuse_idle_options(options)
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        urlsplit(address)
    except ValueError:
        from fp4convert.storage.hub.http import check_endpoint

        check_endpoint(address)
    return options


def as_warnings(lines: Iterable[str]) -> None:
    """Warn as Python does, at the line that called the package."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("fp4convert."):
        level += 1
    for line in lines:
        from fp4convert.report.text import escape

        warnings.warn(escape(line), UserWarning, stacklevel=level + 1)
