"""Print documents, progress, warnings and errors.

A command makes one document; it is printed as JSON for a machine or drawn for a person, from the same values.
Text from a checkpoint is escaped first and printed as plain text: no control, bidi or markup character reaches a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from fp4convert.checkpoint.module_names import join_names
from fp4convert.errors import Fp4Error, OutputError
from fp4convert.progress import Meter, Phases
from fp4convert.report.text import Document, escape, shorten
from fp4convert.storage.safetensors import WEIGHT

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
CLOSED_PIPE = 141  # as a shell shows a program whose reader went away
BAR_WIDTH, SHORTEST_BAR = 40, 8
STATUS_WIDTH = len("999 GB of 999 GB (100 %), 999 MB/s, 59 min 59 s left")
JSON_PIECES = 10_000  # words and signs of a document that are written together
PIPE_WIDTH = 1000  # a pipe keeps rows whole
GAP = "  "  # between columns


class Screen:
    """The two streams of one command; `is_json` turns every document into JSON on stdout."""

    def __init__(self, is_json: bool = False, is_quiet: bool = False) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet

    @cached_property
    def out(self) -> Console:
        from rich.console import Console

        return Console(
            highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH
        )

    @cached_property
    def width(self) -> int:
        """Characters that a line of stdout has room for."""
        return self.out.width if sys.stdout.isatty() else PIPE_WIDTH

    @cached_property
    def err(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, document: Document, draw: Callable[[Screen, Document], None]) -> None:
        """The document as JSON for a machine, or drawn for a person."""
        try:
            if self.is_json:
                pieces = json.JSONEncoder(indent=2).iterencode(document)
                while part := "".join(
                    islice(pieces, JSON_PIECES)
                ):  # never all at once: a plan can have tens of megabytes
                    sys.stdout.write(part)
                print()
            else:
                draw(self, document)
            sys.stdout.flush()
        except OSError as error:
            _forget_stdout()
            if isinstance(error, BrokenPipeError):
                sys.exit(CLOSED_PIPE)
            raise OutputError(
                "cannot-print", f"standard output cannot be written: {error.strerror}"
            ) from None

    def line(self, text: object, style: str = "", label: str = "") -> None:
        """A line on stdout; where it has a label before it, that alone has the style."""
        self._print(sys.stdout, text, style, label)

    def _print(self, to: TextIO, text: object, style: str, label: str = "") -> None:
        if not _has_colours(to):
            print(f"{label}{escape(text)}", file=to, flush=True)
            return
        from rich.text import Text

        line = (
            Text(label, style).append(escape(text), "default")
            if label
            else Text(escape(text), style)
        )
        (self.out if to is sys.stdout else self.err).print(line)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table that fits the terminal; the widest columns give way."""
        shown = [tuple(shorten(escape(cell)) for cell in row) for row in rows]
        widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
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
        """Print a row of a table; a cell wider than its column goes on below itself.

        right  the columns that stand to the right, as numbers do
        """
        parts = [wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            sized = [
                part.rjust(width) if at in right else part.ljust(width)
                for at, (part, width) in enumerate(zip(line, widths, strict=True))
            ]
            self.line(GAP.join(sized).rstrip(), style)

    def warn(self, warnings: Iterable[str]) -> None:
        for warning in () if self.is_quiet else warnings:
            self._print(sys.stderr, warning, "yellow", "warning: ")

    def note(self, lines: Iterable[str]) -> None:
        """What a person wants to know meanwhile, on stderr."""
        for line in () if self.is_quiet else lines:
            self._print(sys.stderr, line, "dim")

    def tell(self, line: str) -> None:
        """A line of `note`."""
        self.note([line])

    def fail(self, error: Fp4Error) -> None:
        """One message on stderr: found, where, expected; then the next step. With JSON also a document on stdout."""
        if self.is_json:
            try:
                print(json.dumps(error.as_json(), indent=2), flush=True)
            except OSError:
                _forget_stdout()
        for number, line in enumerate(error.lines):
            self._print(sys.stderr, line, "bold red", "error: " if number == 0 else "       ")
        if error.next_step:
            self._print(sys.stderr, error.next_step, "bold", " next: ")

    @contextmanager
    def phases(self) -> Iterator[Phases]:
        """A bar for each phase on a terminal, a line every few seconds elsewhere and in CI; both on stderr."""
        is_bare = (
            "CI" in os.environ
            or not sys.stderr.isatty()
            or self.err.is_dumb_terminal
            or not self.err.is_terminal
        )
        phases = Phases(_print_progress if is_bare and not self.is_quiet else None)
        if is_bare or self.is_quiet:
            yield phases
            phases.end()
            return
        from rich.live import Live

        with Live(
            get_renderable=lambda: _bars(phases.meters, self.err.width),
            console=self.err,
            transient=True,
        ):
            yield phases


def _has_colours(stream: TextIO) -> bool:
    """False where rich would print plain words: a pipe or a file, unless a user asks for colours in it."""
    return (
        stream.isatty()
        or bool(os.environ.get("FORCE_COLOR"))
        or os.environ.get("TTY_COMPATIBLE") == "1"
    )


def _forget_stdout() -> None:
    """What is left to be written there has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_progress(line: str, tensor: str) -> None:
    name = f", {shorten(escape(tensor))}" if tensor else ""
    print(f"{line}{name}", file=sys.stderr, flush=True)


def _bars(meters: Sequence[Meter], width: int) -> RenderableType:
    """A row for each phase, with a bar where there is room for one; below them the tensor that was done last."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    verbs = max((len(meter.verb) for meter in meters), default=0)
    room = min(BAR_WIDTH, width - verbs - STATUS_WIDTH - 2)
    rows = Table.grid(padding=(0, 1))
    for meter in meters:
        done = meter.total_nbytes if meter.is_over else meter.done_nbytes
        bar = (
            [ProgressBar(meter.total_nbytes or (0 if meter.is_over else None), done, room)]
            if room >= SHORTEST_BAR
            else []
        )
        rows.add_row(Text(meter.verb), *bar, Text(meter.status(), no_wrap=True))
    tensor = meters[-1].tensor if meters and not meters[-1].is_over else ""
    return Group(
        rows, Text(shorten(escape(tensor), width - 3), "dim", no_wrap=True, overflow="ellipsis")
    )


def draw_findings(screen: Screen, findings: Iterable[Document]) -> None:
    """A line for each, by its level; those that say the same of several tensors in one, under their pattern."""
    alike: dict[tuple[str, str, str], list[str | None]] = defaultdict(list)
    for finding in findings:
        alike[finding["level"], finding["code"], finding["detail"]].append(finding["tensor"])
    for (level, code, detail), tensors in alike.items():
        named = [
            (tensor.removesuffix(WEIGHT), WEIGHT if tensor.endswith(WEIGHT) else "")
            for tensor in tensors
            if tensor
        ]
        whole = [""] if len(named) < len(tensors) else []
        for where in [
            *whole,
            *(_pattern_text(named, pattern, held) for pattern, held in join_names(named)),
        ]:
            screen.line(f"{where}{detail}", _COLOURS[level], f"{level} {code}: ")


def _pattern_text(named: Sequence[tuple[str, str]], pattern: str, held: Sequence[int]) -> str:
    """The pattern of those names, and how many they are."""
    return f"{escape(pattern)}{named[held[0]][1]}{f' ({len(held)} of them)' if len(held) > 1 else ''}: "


def draw_verdict(screen: Screen, is_good: bool, good: str, bad: str) -> None:
    """The last line of what judges."""
    screen.line(good if is_good else bad, "bold green" if is_good else "bold red")
