"""Make functions of options; nothing is printed."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Signature, cleandoc, signature
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_args
from urllib.parse import urlsplit

from fp4convert.options.access import refuse_idle_options
from fp4convert.recipes.options import declared_in, help_with_words, one_of

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741  (options of a command)
O_contra = TypeVar("O_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Public(Protocol[P, O_contra, R_co]):
    """A public function, called with options by name or run with all."""

    @property
    def run(self) -> Callable[[O_contra], R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def public(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Public[P, O, R]]:
    """Let a function of an options object take them by name.

    options  the dataclass; its fields are the parameters, for a type checker, too
    """

    def decorate(run: Callable[[O], R]) -> Public[P, O, R]:
        kind = cast(type, options)
        parameters = [
            each.replace(annotation=getattr(each.annotation, "__origin__", each.annotation))
            for each in signature(kind).parameters.values()
        ]
        returned = run.__annotations__.get("return", Signature.empty)
        own_signature = Signature(parameters, return_annotation=returned)

        @wraps(run)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            places = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
            if len(args) > len(places):
                taken = f"takes {', '.join(places)} without a name"
                given = ", ".join(f"NAME={value!r}" for value in args[len(places) :])
                raise TypeError(f"{run.__name__}() {taken}; the others need theirs: {given}")
            try:
                bound = own_signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{run.__name__}() {error}") from None
            for name, kinds in numbers.items():
                if isinstance(bound.get(name), str):
                    expected = one_of(kind.__name__ for kind in kinds)
                    raise TypeError(f"{run.__name__}() {name}={bound[name]!r}; expected {expected}")
            return checked(options(*args, **kwargs))

        def checked(given: O) -> R:
            refuse_idle_options(given)
            _check_hub_address()
            return run(given)

        numbers: dict[str, list[type]] = {}  # the types of options that are no texts
        for each in declared_in(kind):
            kinds = [one for one in (each.type, *get_args(each.type)) if one in (int, float, bool)]
            if kinds and str not in get_args(each.type):
                numbers[each.name] = kinds
        rows = [f"{each.name}: {help_with_words(each.option)}" for each in declared_in(kind)]
        called.__doc__ = "\n".join([cleandoc(run.__doc__ or ""), "", *rows])
        made: Any = called
        made.__signature__ = own_signature
        made.run = checked
        return cast(Public[P, O, R], made)

    return decorate


def _check_hub_address() -> None:
    """Raise InputError where HF_ENDPOINT is no address.

    huggingface_hub cannot even be loaded then.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        urlsplit(address)
    except ValueError:
        from fp4convert.storage.hub.http import check_endpoint

        check_endpoint(address)


def as_warnings(lines: Iterable[str]) -> None:
    """Warn as Python does, at the line that called the package.

    The text is safe for a terminal.
    """
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("fp4convert."):
        level += 1
    for line in lines:
        from fp4convert.report.text import escape

        warnings.warn(escape(line), UserWarning, stacklevel=level + 1)
