"""Everything a person sees: summaries and tables on stdout, progress and errors on stderr.

Text from a checkpoint is escaped first and printed as plain text: no control, bidi or markup character reaches a terminal.
JSON for machines is made from the same values elsewhere and printed here.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from fp4convert.artifact import Artifact, Finding
from fp4convert.convert import Progress as Report
from fp4convert.convert import Result
from fp4convert.errors import Fp4Error
from fp4convert.plan import Plan, Step
from fp4convert.verification import Report as Verification

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format (bidi), surrogate, private, unassigned, separators
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
LOG_SECONDS = 5.0
CELL_WIDTH = 100
PIPE_WIDTH = 1000  # a pipe keeps rows whole


def escape(text: object) -> str:
    """`text` with everything that could act on a terminal written as \\xNN or \\uNNNN."""
    return "".join(_visible(character) for character in str(text))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Screen:
    """The two streams; one is made per command."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self.out = Console(highlight=False, soft_wrap=True, width=width)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def document(self, document: object) -> None:
        """One JSON document on stdout."""
        print(json.dumps(document, indent=2))

    def line(self, text: object, style: str = "") -> None:
        self.out.print(Text(escape(text), style))

    def warn(self, warnings: Iterable[str]) -> None:
        for warning in () if self.is_quiet else warnings:
            self.err.print(Text("warning: ", "yellow").append(escape(warning), "default"))

    def fail(self, error: Fp4Error) -> None:
        """One message: found, where, expected; then the next step."""
        for number, line in enumerate(error.message.split("\n")):
            self.err.print(Text("error: " if number == 0 else "       ", "bold red").append(escape(line), "default"))
        if error.next_step:
            self.err.print(Text(" next: ", "bold").append(escape(error.next_step), "default"))

    def findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            where = f"{escape(finding.tensor)}: " if finding.tensor else ""
            text = Text(f"{finding.level} {finding.code}: ", _COLOURS[finding.level])
            self.out.print(text.append(f"{where}{escape(finding.detail)}", "default"))

    def result(self, result: Result, verb: str) -> None:
        """What a conversion did, in lines to paste."""
        counts = result.tensors
        made = ", ".join(str(word) for word in (result.format, result.dialect, result.scale_rule) if word)
        self.line(result.output, "bold")
        self.line(f"  {counts['quantized']} tensors {verb} ({made}), {counts['copied']} kept, {counts['skipped']} skipped")
        sizes = f"{_megabytes(result.source_bytes)} -> {_megabytes(result.output_bytes)}"
        self.line(f"  {sizes} in {result.seconds:.2f} s on {result.device}")
        self.line(f"  digest {result.digest}")

    def plan(self, plan: Plan) -> None:
        """The plan, layers folded: one row for every tensor pattern, action and reason."""
        rows: dict[tuple[str, str, str], list[Step]] = defaultdict(list)
        for step in plan.steps:
            rows[re.sub(r"\d+", "*", step.refs[0].name), step.action, step.reason].append(step)
        table = _table("tensors", "count", "action", "reason", "group", "before", "after")
        order = ("quantize", "skip", "copy")
        for (pattern, action, reason), steps in sorted(rows.items(), key=lambda row: order.index(row[0][1])):
            group = re.sub(r"\d+", "*", steps[0].group or "").rpartition(".")[2]
            before, after = sum(s.source_bytes for s in steps), sum(s.output_bytes for s in steps)
            _add_row(table, pattern, len(steps), action, reason, group, _megabytes(before), _megabytes(after))
        self.out.print(table)
        self.line(f"total {_megabytes(sum(s.source_bytes for s in plan.steps))} -> {_megabytes(plan.output_bytes)}", "bold")

    def artifact(self, artifact: Artifact, description: dict[str, object]) -> None:
        """What `inspect` found out."""
        fmt = artifact.format
        layout = description["scale_layout"]
        counts = description["tensors"]
        bits = description["bits_per_weight"]
        rows = {
            "format": f"{fmt.name}: fp4_e2m1 codes, {fmt.block_size} to a block, {fmt.scale_dtype} block scales",
            "dialect": artifact.dialect,
            "global scale": f"fp32, stored as a {artifact.spelling.GLOBAL_SCALE_KIND}" if fmt.has_global_scale else "none",
            "scale layout": f"{layout['declared']} (declared)" if isinstance(layout, dict) else "",
            "nibble order": str(description["nibble_order"]),
            "tensors": f"{counts['quantized']} quantized, {counts['other']} other" if isinstance(counts, dict) else "",
            "bits per weight": "none" if bits is None else f"{bits:.3f} (codes, block scales and global scales)",
            "share read": "headers and records only",
        }
        for key, value in rows.items():
            self.line(f"{key:<16}{value}")
        self.findings(artifact.findings)
        is_healthy = bool(description["healthy"])
        self.line("healthy" if is_healthy else "not healthy", "bold green" if is_healthy else "bold red")

    def verification(self, report: Verification) -> None:
        """What `verify` found out: the totals and the worst tensors."""
        worst = sorted(report.tensors, key=lambda error: _or_infinity(error.sqnr_db))[:5]
        if worst:
            table = _table("worst tensors", "SQNR dB", "MSE", "max |error|", "cosine")
            for error in worst:
                numbers = (_number(error.sqnr_db, ".2f"), _number(error.mse, ".3g"), _number(error.max_abs, ".3g"))
                _add_row(table, error.name, *numbers, _number(error.cosine, ".6f"))
            self.out.print(table)
            summary = report.summary
            mean, low = _number(summary["sqnr_db_mean"], ".2f"), _number(summary["sqnr_db_min"], ".2f")
            nmse = _number(summary["nmse"], ".4g")
            self.line(f"{len(report.tensors)} tensors: SQNR mean {mean} dB, lowest {low} dB; NMSE {nmse}")
        self.findings(report.findings)
        self.line("passed" if report.passed else "failed", "bold green" if report.passed else "bold red")

    @contextmanager
    def progress(self, plan: Plan, verb: str) -> Iterator[Report]:
        """A bar on a terminal, a line every few seconds elsewhere; both on stderr."""
        total = sum(step.source_bytes for step in plan.steps)
        if self.is_quiet or not self.err.is_terminal:
            yield _log_lines(total, verb, self.is_quiet)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(verb, total=total)
            yield lambda tensor, nbytes: bar.advance(task, nbytes)


def _log_lines(total: int, verb: str, is_quiet: bool) -> Report:
    done = 0
    last = time.monotonic()

    def report(tensor: str, nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if not is_quiet and time.monotonic() - last > LOG_SECONDS:
            last = time.monotonic()
            print(f"{verb}: {_megabytes(done)} of {_megabytes(total)}", file=sys.stderr, flush=True)

    return report


def _table(*headings: str) -> Table:
    return Table(*(Column(heading, overflow="fold") for heading in headings), box=None, pad_edge=False)


def _add_row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(_shorten(escape(cell))) for cell in cells))


def _shorten(text: str) -> str:
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH // 2]}...{text[-CELL_WIDTH // 2 :]}"


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f} MB"
