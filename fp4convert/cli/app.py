"""Run commands by name; turn their errors into exit codes.

Results go to stdout, progress, warnings and errors to stderr; with --json stdout holds one
document, also for an error.  Exit codes: errors.py, and 6 for findings.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext, redirect_stdout
from errno import EBADF, EIO, EMFILE, ENAMETOOLONG, ENFILE, ENOMEM, ENOSPC, ESTALE
from inspect import getdoc
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fp4convert.cli.commands import COMMANDS
from fp4convert.cli.help import WIDEST
from fp4convert.cli.options import JSON, QUIET, VERBOSE, flags_of
from fp4convert.cli.typer_startup import PlainCommand, PlainGroup
from fp4convert.errors import Fp4Error, InputError, Interrupted, OutputError, shell_line
from fp4convert.process import Stopped, instruction_set, sturdy_streams, uncovered

# Options without meaning for an empty word; others refuse one themselves.
NOT_EMPTY = ("--source", "--output", "-o", "--revision", "--subfolder", "--report", "--sarif")
SHARED = frozenset(flag for each in (JSON, QUIET, VERBOSE) for flag in flags_of(each))
REPORT_IT = "Report it, with the command and the traceback on stderr."
ABOUT = """Quantize safetensors checkpoints to NVFP4 or MXFP4 for inference engines.

Example: fp4convert quantize Qwen/Qwen3-8B --format nvfp4
fp4convert inspect ./Qwen3-8B-NVFP4
fp4convert verify ./Qwen3-8B-NVFP4 --source Qwen/Qwen3-8B
"""


def _print_version(wanted: bool) -> None:
    """Print the version, and which copy of the kernels runs here."""
    if wanted:
        from fp4convert.version import __version__

        try:
            kernels = instruction_set()
        except (OSError, RuntimeError):
            kernels = "not installed"
        kernels = kernels.replace(" (", ", ").removesuffix(")")
        typer.echo(f"fp4convert {__version__} (CPU kernels: {kernels})")
        raise typer.Exit


def _declare_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the version and the instruction set of the CPU kernels.",
        ),
    ] = False,
) -> None:
    pass


def make_app(called: Collection[str] = tuple(COMMANDS), is_list: bool = True) -> typer.Typer:
    """Build the command line of all commands.

    called   the commands that need their options; without them the rest takes a tenth of the time
    is_list  the help of each command may be shown
    """
    app = typer.Typer(
        cls=PlainGroup,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: half the time, and the same everywhere
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST + 2},
        help=ABOUT,
    )
    app.callback()(_declare_options)
    for name, command in COMMANDS.items():
        is_asked = name in called
        function = command.for_typer() if is_asked else lambda: None
        words = getdoc(command.options) if is_asked or is_list else None
        app.command(name, cls=PlainCommand, help=words, rich_help_panel=command.panel)(function)
    return app


def main() -> None:
    """Run the command line, print what fails, and exit."""
    # What NumPy says of NaN in weights is no news: the error that names them is.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"fp4convert\.")
    with sturdy_streams():
        given = sys.argv[1:]
        arguments = _as_options(given)
        called = _find_command(arguments)
        failure: Fp4Error
        try:
            # The bare command is bad usage and gets the help on stderr, as with uv and ruff.
            is_bare = not given and not _is_completing()
            _refuse_empty(given, called)
            with uncovered(), redirect_stdout(sys.stderr) if is_bare else nullcontext():
                code = make_app(called, arguments[:1] != [*called])(
                    args=arguments, standalone_mode=False
                )
            sys.exit(InputError.exit_code if is_bare else code)
        except Fp4Error as error:
            failure = _find_limit(error.__cause__) or error
        except Stopped as stopped:
            failure = _interrupted(stopped)
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # Typer exits with 1
                failure = _end_printing(ended.__context__)
            else:
                raise
        except Exception as error:
            # A full disk, a limit of the system, a failing disk, bad usage; else it is our bug.
            if isinstance(error, OSError) and error.errno in (EBADF, ENOSPC) and not error.filename:
                failure = _end_printing(error)
            elif known := _find_limit(error) or _find_refusal(error):
                failure = known
            elif hasattr(error, "format_message"):
                failure = _bad_usage(error, arguments, " ".join(["fp4convert", *called[:1]]))
            else:
                _print_bug(error)
                raise
        _end(failure)


def _end_printing(error: OSError) -> OutputError:
    from fp4convert.cli.screen import end_printing

    return end_printing(error)


def _find_limit(error: BaseException | None) -> OutputError | None:
    """Return our error if the system refused memory, files or threads."""
    while error is not None:
        words, limit = "", ""
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == ENOMEM:
            words, limit = "no more memory", "memory: ulimit -v, or the limit of its container"
        elif getattr(error, "errno", None) in (EMFILE, ENFILE):
            words, limit = "no more open files", "open files: ulimit -n"
        elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            words, limit = "no more threads", "threads or memory: ulimit -u, ulimit -v"
        if words:
            detail = f"the system gives this process {words}; expected enough for this work"
            return OutputError("machine-limit", detail, f"Allow more {limit}.")
        error = error.__cause__ or error.__context__
    return None


def _find_refusal(error: BaseException | None) -> Fp4Error | None:
    """Return our error if a disk failed at a place that expects no failure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == ENAMETOOLONG:
            detail = f"{os.fsdecode(error.filename or '')[:60]}... is longer than disks allow"
            return InputError("usage", detail, "Give a name of 255 bytes at most.")
        if isinstance(error, OSError) and error.errno in (EIO, ESTALE):
            where = f"{error.filename}: its disk fails" if error.filename else "a disk fails"
            return OutputError("cannot-read", f"{where}: {error.strerror}")
        error = error.__cause__  # not __context__: an error in a handler is a bug
    return None


def _print_bug(error: Exception) -> None:
    """Print the document of a bug of ours; a traceback follows."""
    if "--json" in sys.argv:
        from json import dumps
        from traceback import format_exception_only

        detail = "".join(format_exception_only(error)).strip()
        bug = Fp4Error("bug", f"a bug of fp4convert: {detail}", REPORT_IT)
        print(dumps(bug.as_json(), indent=2), flush=True)


def end_stopped(stopped: Stopped) -> NoReturn:
    """Print that the process was told to stop before any work, and exit."""
    stopped.kept = None
    with sturdy_streams():
        _end(_interrupted(stopped))


def _end(failure: Fp4Error) -> NoReturn:
    from fp4convert.cli.screen import Screen

    Screen(is_json="--json" in sys.argv).fail(failure)
    sys.exit(failure.exit_code)


def _interrupted(stopped: Stopped) -> Interrupted:
    command = shell_line("fp4convert", *_without_token(_as_options(sys.argv[1:])))
    return Interrupted(command, stopped.exit_code, stopped.kept)


def _as_options(words: list[str]) -> list[str]:
    """Write the commands help and version, and an empty line, as options.

    Options of every command may stand before its name.
    """
    first = list(takewhile(SHARED.__contains__, words))
    words = [*words[len(first) :], *first]
    match words:
        case []:
            return ["--help"]
        case ["help", *commands]:
            return [*commands[:1], "--help"]
        case ["version"]:
            return ["--version"]
    return words


def _refuse_empty(words: list[str], called: Sequence[str]) -> None:
    """Raise InputError for an empty value or an option in its place.

    A variable of the shell that is not set leaves an empty value.
    """
    declared = [each for name in called[:1] for each in COMMANDS[name].shown()]
    valued = {flag for each in declared if each.type is not bool for flag in flags_of(each)}
    known = {"--help", "-h"} | {flag for each in declared for flag in flags_of(each)}
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        named = before if not word else option if equals and not value else ""
        if named in NOT_EMPTY:
            next_step = "Give it a value; look for a variable of the shell that is not set."
            raise InputError("usage", f"{named} is empty", next_step)
        if before in valued and option in known:
            detail = f"{before} has no value: {option}, an option, follows it"
            raise InputError("usage", detail, f"Write its value before {option}.")
        if before in NOT_EMPTY and word.startswith("--"):
            next_step = (
                f"Give it a value; a name that begins so is written {shell_line(Path(word))}"
            )
            raise InputError("usage", f"{before} has no value: {word} follows it", next_step)


def _bad_usage(error: Any, arguments: list[str], helped: str) -> InputError:
    """Return our error for an option, a command or a value that typer refuses."""
    from fp4convert.cli.foreign_words import answer_command, answer_option

    see = f"See: {helped} --help"
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if name and type(error).__name__ == "NoSuchOption" and context is not None:
        known = [flag for each in context.command.params for flag in each.opts]
        step = answer_option(name, known, helped)
        return InputError("usage", f"{helped} has no option {name}", step or see)
    if "No such command" in error.format_message():
        word = next(each for each in arguments if not each.startswith("-"))
        step = answer_command(word, COMMANDS)
        return InputError("usage", f"fp4convert has no command {word!r}", step or see)
    if "unexpected extra argument" in error.format_message():
        return InputError("usage", error.format_message(), f"One source a call. {see}")
    missed = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and missed and missed.opts[0].startswith("-"):
        step = f"Add {min(missed.opts, key=len)} {missed.metavar}. {see}"
        return InputError("usage", f"Missing option {missed.opts[0]} {missed.metavar}", step)
    return InputError("usage", error.format_message(), see)


def _find_command(words: list[str]) -> Sequence[str]:
    """Return the command in these words; all commands while a shell completes."""
    return tuple(COMMANDS) if _is_completing() else [word for word in words if word in COMMANDS][:1]


def _is_completing() -> bool:
    """Tell whether a shell asks for completions."""
    return any(name.startswith("_") and name.endswith("_COMPLETE") for name in os.environ)


def _without_token(arguments: list[str]) -> list[str]:
    """Drop --token and its value: no message holds a token."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [
        argument
        for before, argument in pairs
        if before != "--token" and not argument.startswith("--token")
    ]
