"""Run commands by name; turn their errors into exit codes.

Results go to stdout, progress, warnings and errors to stderr; with --json stdout holds one
document, also for an error.  Exit codes: 0 done, 1 our bug, 2 bad input or usage, 3 source
unreachable or changed, 4 no access to it, 5 output side, 6 findings, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from inspect import getdoc
from typing import Annotated

import typer

from fp4convert.cli.commands import COMMANDS
from fp4convert.cli.typer_startup import PlainCommand, PlainGroup
from fp4convert.errors import Fp4Error, InputError, Interrupted
from fp4convert.process import Stopped, sturdy_streams, uncovered


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fp4convert {version('fp4convert')}")
        raise typer.Exit


def _declare_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def make_app(called: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Build the command line of all commands.

    called  the commands that need their options; of others only names and help are read, which
            takes a tenth of the time
    """
    made = typer.Typer(
        cls=PlainGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: half the time, and the same everywhere
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Turn a checkpoint into NVFP4 or MXFP4 safetensors that inference engines load.",
    )
    made.callback()(_declare_options)
    for name, command in COMMANDS.items():
        do = command.for_typer() if name in called else lambda: None
        made.command(name, cls=PlainCommand, help=getdoc(command.options))(do)
    return made


def main() -> None:
    """Run the command line, print what fails, and exit."""
    with sturdy_streams():
        arguments = sys.argv[1:]
        called = _find_command(arguments)
        failure: Fp4Error
        try:
            with uncovered():
                sys.exit(make_app(called)(standalone_mode=False))
        except Fp4Error as error:
            failure = error
        except Stopped as stopped:
            command = shlex.join(["fp4convert", *_without_token(arguments)])
            failure = Interrupted(command, stopped.exit_code, stopped.kept)
        except Exception as error:
            # What click refuses has a message; anything else is our bug.
            if not hasattr(error, "format_message"):
                raise
            message = error.format_message()
            if not message:  # the bare command: its help has been printed
                sys.exit(InputError.exit_code)
            helped = " ".join(["fp4convert", *called[:1]])
            failure = InputError("usage", message, f"See: {helped} --help.")
        from fp4convert.cli.screen import Screen

        Screen(is_json="--json" in sys.argv).fail(failure)
        sys.exit(failure.exit_code)


def _find_command(words: list[str]) -> Sequence[str]:
    """Find the command that is called; all while a shell completes."""
    is_asked = any(name.startswith("_") and name.endswith("_COMPLETE") for name in os.environ)
    return tuple(COMMANDS) if is_asked else [word for word in words if word in COMMANDS][:1]


def _without_token(arguments: list[str]) -> list[str]:
    """Drop --token and its value: no message holds a token."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [
        argument
        for before, argument in pairs
        if before != "--token" and not argument.startswith("--token")
    ]
