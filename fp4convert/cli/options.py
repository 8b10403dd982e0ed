"""Make typer's commands of declared options; show their documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from fp4convert.cli.help import RARE
from fp4convert.commands.checks import checked
from fp4convert.options.access import read_gigabytes
from fp4convert.process import bus_errors
from fp4convert.recipes.options import (
    OUTPUT,
    TARGET,
    Declared,
    Option,
    Reference,
    declared_in,
    help_with_words,
    is_required,
)

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.report.text import Document

FINDINGS = 6  # the exit code where something is wrong with what was looked at
JSON = Declared(
    "json",
    bool,
    False,
    Option("Print one JSON document on stdout, also for an error.", panel=OUTPUT),
)
QUIET = Declared(
    "quiet",
    bool,
    False,
    Option(
        "Print no progress and no warnings.", flags=("--quiet", "-q"), panel=OUTPUT, is_rare=True
    ),
)
VERBOSE = Declared(
    "verbose",
    bool,
    False,
    Option(
        "Print versions, the time of every step, and peak memory.",
        flags=("--verbose", "-v"),
        panel=OUTPUT,
        is_rare=True,
    ),
)
DRY_RUN = Declared(
    "dry_run", bool, False, Option("Print the plan and write nothing.", panel=TARGET)
)
PLAIN_TYPES = (str, int, float, bool)
GIGABYTES = "<gb>"
PLAN = "draw_plan:draw_plan"  # of a dry run


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line.

    asks     the class whose fields are its options, and whose docstring is its help: MODULE:NAME
             below fp4convert.options, loaded where it is used
    panel    its heading in the list of commands
    work     its function, MODULE:NAME below fp4convert, loaded when the command runs
    draw     the function of cli/ that shows its document to a person
    preview  the function for --dry-run, if any
    verdict  the key of its document that is false for a failed check
    hidden   options for Python alone
    """

    asks: str
    panel: str
    work: str
    draw: str
    preview: str = ""
    verdict: str = ""
    hidden: frozenset[str] = frozenset()

    @property
    def options(self) -> type[Any]:
        loaded: Any = _load(f"options.{self.asks}")
        return cast("type[Any]", loaded)

    def declared(self) -> list[Declared]:
        """Return all options: its own, then those of every command."""
        shared = [*([DRY_RUN] if self.preview else []), JSON, QUIET, VERBOSE]
        return [*declared_in(self.options), *shared]

    def shown(self) -> list[Declared]:
        """Return the options of the command line."""
        return [each for each in self.declared() if each.name not in self.hidden]

    def for_typer(self) -> Callable[..., None]:
        """Return a function whose parameters typer reads."""

        def called(**words: Any) -> None:
            self._run(words)

        made: Any = called
        made.__signature__ = Signature([parameter_of(each) for each in self.shown()])
        made.__annotations__ = {}
        return called

    def _run(self, words: dict[str, Any]) -> None:
        """Do the command, show its document, and last the warnings in it."""
        from fp4convert.cli.screen import Screen

        before = bus_errors()
        screen = Screen(*(words.pop(each.name) for each in (JSON, QUIET, VERBOSE)))
        screen.begin()
        is_dry = bool(self.preview) and words.pop(DRY_RUN.name)
        names = {field.name for field in fields(self.options)}
        heard = {"tell": screen.tell, "warn": screen.warn}
        words |= {name: hear for name, hear in heard.items() if name in names}
        work = self.preview if is_dry else self.work
        if "phases" in names:
            with screen.phases() as phases:
                document = self._document(work, {**words, "phases": phases})
        else:
            document = self._document(work, words)
        if bus_errors() != before:
            from fp4convert.storage.disk import lost_pages

            raise lost_pages()
        screen.show(document, _load(f"cli.{PLAN if is_dry else self.draw}"))
        screen.warn(document.get("warnings", ()))
        screen.end()
        if is_dry and (error := document.get("error")):
            screen.print_error(error["code"], [error["message"]], error["next"])
            raise typer.Exit(error["exit"])
        if self.verdict and document[self.verdict] is False:
            raise typer.Exit(FINDINGS)

    def _document(self, work: str, words: dict[str, Any]) -> Document:
        """Do the work; return the document that --json prints."""
        result = _load(work)(checked(self.options(**words)))
        return result if isinstance(result, dict) else result.as_json()


def _load(place: str) -> Callable[..., Any]:
    """Return the function that a row names: MODULE:NAME below fp4convert."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"fp4convert.{module}"), name)
    return function


def flags_of(declared: Declared) -> tuple[str, ...]:
    """Return all spellings of an option; none of an argument."""
    if declared.option.is_argument:
        return ()
    return declared.option.flags or (f"--{declared.name.replace('_', '-')}",)


def parameter_of(declared: Declared) -> Parameter:
    """Return the parameter that typer makes an option or an argument of."""
    name, option, default = declared.name, declared.option, declared.default
    members = (declared.type, *get_args(declared.type))
    plain = next((kind for kind in PLAIN_TYPES if kind in members), str)
    how: dict[str, Any] = {
        "help": help_with_words(option) if option.value else option.help,
        "min": option.least,
        "metavar": _argument_text(declared) or _value_text(declared, plain),
        "rich_help_panel": f"{RARE if option.is_rare else ''}{option.panel}" or None,
    }
    if option.words or option.is_recipe or option.is_code:
        how["autocompletion"] = _completion_for(option)
    if option.value == GIGABYTES:
        how["parser"] = _gigabytes
    making: Any = typer.Argument if option.is_argument else typer.Option
    made = making(*flags_of(declared), **how)
    kind: Any = list[plain] if option.is_several else plain  # type: ignore[valid-type]
    if is_required(declared):
        default = Parameter.empty
    elif default is None or option.is_several:
        kind, default = kind | None, None
    return Parameter(
        name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, made]
    )


def _gigabytes(text: str) -> float:
    """Read the value of an option in GB."""
    try:
        return read_gigabytes(text)
    except ValueError:
        from fp4convert.report.text import escape

        detail = f"{escape(text)} is no size; expected a number of GB: 24, 24GB or 22.4GiB"
        raise typer.BadParameter(detail) from None


def _argument_text(declared: Declared) -> str:
    """Return the name of an argument in help; "" for an option."""
    if not declared.option.is_argument:
        return ""
    name = declared.name.upper()
    return f"{name.removesuffix('S')}..." if declared.option.is_several else name


def _value_text(declared: Declared, plain: type) -> str | None:
    """Return the name of a value in help: its choices or its type."""
    option = declared.option
    if plain is bool:
        return None
    if option.value or option.words:
        return option.value or f"[{'|'.join(option.words)}]"
    if plain in (int, float):
        return "<number>"
    return "<path>" if declared.type in (Reference, Reference | None) else "<text>"


def _completion_for(option: Option) -> Callable[[str], list[str]]:
    """Return the function that completes an unfinished word."""

    def complete(incomplete: str) -> list[str]:  # typer takes no partial
        words = option.words
        if option.is_recipe:
            from fp4convert.recipes.toml_files import known_names

            words = known_names()
        elif option.is_code:
            from fp4convert.report.text import explanations

            words = [*explanations("findings"), *explanations("errors")]
        return [word for word in words if word.startswith(incomplete)]

    return complete
