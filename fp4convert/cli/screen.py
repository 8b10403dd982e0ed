"""Print documents, progress, warnings and errors.

The document of a command is printed as JSON for a machine or drawn for a person.  Text from a
checkpoint is escaped first: no control, bidi or markup character reaches a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from fp4convert.errors import Fp4Error, InputError, OutputError
from fp4convert.process import peak_nbytes, stop_listening
from fp4convert.progress import Meter, Phases, duration_text, size_text
from fp4convert.report.text import (
    MOST_ALIKE,
    Document,
    escape,
    fold_findings,
    shorten,
    shorten_words,
)
from fp4convert.storage.json_text import pieces_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDEST = 130  # of a sentence, also in a pipe
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
CLOSED_PIPE = 141  # as a shell shows a program whose reader went away
BAR_WIDTH, SHORTEST_BAR = 40, 8
STATUS_WIDTH = len("999 GB of 999 GB (100 %), 999 MB/s, 59 min 59 s left")
PIPE_WIDTH = 1000  # a pipe keeps rows whole
GAP = "  "  # between columns


class Screen:
    """The two streams of one command.

    is_json     print every document as JSON on stdout
    is_quiet    print neither progress nor warnings nor lines of `tell`
    is_verbose  print versions, every phase and the memory used
    """

    def __init__(
        self, is_json: bool = False, is_quiet: bool = False, is_verbose: bool = False
    ) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self._warned: set[str] = set()
        self.is_verbose = is_verbose
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Tell versions and the machine, if asked to."""
        if not self.is_verbose:
            return
        if self.is_quiet:
            detail = "--quiet and --verbose are given; expected one of them"
            raise InputError("usage", detail, "Leave one of them out.")
        from fp4convert.process import instruction_set, processors
        from fp4convert.version import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        machine = f"CPU kernels {instruction_set()}, {processors()} processors"
        self.tell(f"fp4convert {__version__}, Python {python}, {machine}")

    def end(self) -> None:
        """Tell how long everything took and the memory used, if asked to."""
        if self.is_verbose:
            seconds = duration_text(time.monotonic() - self._begun)
            nbytes = peak_nbytes()
            peak = "" if nbytes is None else f", peak memory {size_text(nbytes)}"
            self.tell(f"whole command: {seconds}{peak}")

    @cached_property
    def out(self) -> Console:
        from rich.console import Console

        return Console(
            highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH
        )

    @cached_property
    def width(self) -> int:
        """Return the most characters of a line of stdout."""
        return self.out.width if sys.stdout.isatty() else PIPE_WIDTH

    @cached_property
    def err(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, document: Document, draw: Callable[[Screen, Document], None]) -> None:
        """Print the document as JSON, or draw it for a person."""
        try:
            if self.is_json:
                # Never all at once: a plan can have tens of megabytes.
                for piece in pieces_of(document, is_short=True):
                    sys.stdout.write(piece)
                print()
            else:
                draw(self, document)
            sys.stdout.flush()
            stop_listening()
        except OSError as error:
            raise end_printing(error) from None

    def line(self, text: object, style: str = "", label: str = "", hang: int = 0) -> None:
        """Print a line on stdout; wrap it at words on a terminal.

        style  of the label before it, or else of all of it
        hang   column of the lines after the first; 0 for two more than that of the first
        """
        self._wrap(sys.stdout, text, style, label, hang)

    def _wrap(self, to: TextIO, text: object, style: str, label: str = "", hang: int = 0) -> None:
        """Print a line as `line` does, on either stream."""
        first, *more = [shown := shorten_words(escape(text))]
        width = PIPE_WIDTH
        if to.isatty():
            width = self.width if to is sys.stdout else self.err.width
        if to.isatty() and len(label) + len(shown) > width:
            hang = hang or len(shown) - len(shown.lstrip()) + len(GAP)
            first, *more = wrap(
                label + shown,
                width,
                subsequent_indent=" " * hang,
                break_long_words=False,
                break_on_hyphens=False,
            )
            first = first.removeprefix(label if first.startswith(label) else label.rstrip())
        self._print(to, first, style, label)
        for part in more:
            self._print(to, part, "" if label else style)

    def unwrapped(self, text: str, style: str = "", label: str = "") -> None:
        """Print a path or a command in one line, so that it can be copied."""
        self._print(sys.stdout, text, style, label)

    def _print(self, to: TextIO, text: object, style: str, label: str = "") -> None:
        """Print an escaped line; its label, or else all of it, has the style."""
        # rich, whose import takes time, would print the same to a pipe without colours.
        has_colours = (
            to.isatty()
            or bool(os.environ.get("FORCE_COLOR"))
            or os.environ.get("TTY_COMPATIBLE") == "1"
        )
        if not has_colours:
            print(f"{label}{escape(text)}", file=to, flush=True)
            return
        from rich.text import Text

        line = Text(label or escape(text), style)
        if label:
            line.append(escape(text), "default")
        (self.out if to is sys.stdout else self.err).print(line)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table that fits the terminal; the widest columns give way."""
        shown = [tuple(shorten(escape(cell)) for cell in row) for row in rows]
        widths = [
            max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(headings, *shown, strict=True)
        ]
        while sum(widths) + len(GAP) * (len(widths) - 1) > self.width and max(widths) > 1:
            widths[widths.index(max(widths))] -= 1
        self.row(headings, widths, "bold")
        for row in shown:
            self.row(row, widths)

    def row(
        self,
        cells: Sequence[str],
        widths: Sequence[int],
        style: str = "",
        right: Collection[int] = (),
    ) -> None:
        """Print a row of a table; long cells go on below themselves.

        right  the columns that stand to the right, as numbers do
        """
        parts = [
            [
                part
                for line in cell.split("\n")
                for part in ([line] if len(line) <= width else wrap(line, width) or [""])
            ]
            for cell, width in zip(cells, widths, strict=True)
        ]
        for line in zip_longest(*parts, fillvalue=""):
            sized = [
                part.rjust(width) if at in right else part.ljust(width)
                for at, (part, width) in enumerate(zip(line, widths, strict=True))
            ]
            self.line(GAP.join(sized).rstrip(), style)

    def warn(self, warnings: Iterable[str]) -> None:
        """Print warnings on stderr, none a second time."""
        for warning in () if self.is_quiet else warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._wrap(sys.stderr, warning, "yellow", "warning: ")

    def tell(self, line: str) -> None:
        """Print a line about the running work on stderr."""
        if not self.is_quiet:
            self._wrap(sys.stderr, line, "dim")

    def fail(self, error: Fp4Error) -> None:
        """Print an error and its next step on stderr; with JSON on stdout, too."""
        stop_listening()
        if self.is_json:
            try:
                print(json.dumps(error.as_json(), indent=2), flush=True)
            except OSError:
                _forget_stdout()
        self.print_error(error.code, error.lines, error.next_step)

    def print_error(self, code: str, lines: Iterable[str], next_step: str | None) -> None:
        """Print an error on stderr, whatever stdout holds."""
        for number, line in enumerate(lines):
            label = f"error[{code}]: " if number == 0 else "       "
            self._wrap(sys.stderr, line, "bold red", label, hang=len(GAP))
        if next_step:
            self._print(sys.stderr, next_step, "bold", " next: ")

    @contextmanager
    def phases(self) -> Iterator[Phases]:
        """Show progress on stderr: bars on a terminal, lines elsewhere and in CI."""
        is_bare = (
            "CI" in os.environ
            or not sys.stderr.isatty()
            or self.err.is_dumb_terminal
            or not self.err.is_terminal
        )

        def print_line(line: str, tensor: str) -> None:
            name = f", {shorten(escape(tensor))}" if tensor else ""
            print(f"{line}{name}", file=sys.stderr, flush=True)

        say = print_line if is_bare and not self.is_quiet else None
        phases = Phases(say, says_all=self.is_verbose)
        if is_bare or self.is_quiet:
            yield phases
            phases.end()
            return
        from rich.live import Live

        with Live(
            get_renderable=lambda: _draw_bars(phases.meters, self.err.width),
            console=self.err,
            transient=True,
        ):
            yield phases
        phases.end()
        for meter in phases.meters if self.is_verbose else ():
            self.tell(f"{meter.verb}: {meter.status()}")


def end_printing(error: OSError) -> OutputError:
    """Return the error of stdout, or exit where its reader went away."""
    _forget_stdout()
    if isinstance(error, BrokenPipeError):
        sys.exit(CLOSED_PIPE)
    return OutputError("cannot-print", f"standard output cannot be written: {error.strerror}")


def _forget_stdout() -> None:
    """Drop everything that is still to be written to stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _draw_bars(meters: Sequence[Meter], width: int) -> RenderableType:
    """Draw a row for each phase, with a bar if it fits, and the latest tensor."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    verbs = max((len(meter.verb) for meter in meters), default=0)
    room = min(BAR_WIDTH, width - verbs - STATUS_WIDTH - 2)
    rows = Table.grid(padding=(0, 1))
    for meter in meters:
        done = meter.total_nbytes if meter.is_over else meter.done_nbytes
        cells: list[RenderableType] = [Text(meter.verb)]
        if room >= SHORTEST_BAR:
            total = meter.total_nbytes or (0 if meter.is_over else None)
            cells.append(ProgressBar(total, done, room))
        rows.add_row(*cells, Text(meter.status(), no_wrap=True))
    tensor = meters[-1].tensor if meters and not meters[-1].is_over else ""
    below = shorten(escape(tensor), width - 3)
    return Group(rows, Text(below, "dim", no_wrap=True, overflow="ellipsis"))


def draw_findings(
    screen: Screen, findings: Iterable[Document], of: int = 0, most: int = MOST_ALIKE
) -> None:
    """Draw a line for each finding, in the colour of its level.

    of, most  as fold_findings takes them
    """
    folded = fold_findings(findings, of, most)
    for one in folded:
        named = f"{one['lead']}{one['tensor']}: " if one["tensor"] else one["lead"]
        prefix = f"{one['level']} {one['code']}: "
        screen.line(f"{named}{one['detail']}", _COLOURS[one["level"]], prefix)
    if any(one["is_folded"] for one in folded):
        screen.line("--json lists every tensor", "dim")


def draw_verdict(screen: Screen, is_good: bool, good: str, bad: str) -> None:
    """Draw the last line of a command that judges."""
    screen.line(good if is_good else bad, "bold green" if is_good else "bold red")
