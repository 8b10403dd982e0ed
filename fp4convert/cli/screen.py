"""Everything a person sees: documents drawn on stdout, progress, warnings and errors on stderr.

A command makes one document; it is printed as JSON for a machine or drawn for a person, from the same values.
Text from a checkpoint is escaped first and printed as plain text: no control, bidi or markup character reaches a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

from fp4convert.errors import Fp4Error, OutputError
from fp4convert.numbered import join_names
from fp4convert.progress import Meter, Phases, duration_text, rate_text, size_text
from fp4convert.shard import WEIGHT

if TYPE_CHECKING:  # what draws tables, bars, and colours on terminals
    from rich.console import Console, RenderableType

Document = dict[str, Any]  # what --json prints; keys as in the README
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format (bidi), surrogate, private, unassigned, separators
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
CLOSED_PIPE = 141  # as a shell shows a program whose reader went away
CELL_WIDTH = 100
BAR_WIDTH, SHORTEST_BAR = 40, 8
STATUS_WIDTH = len("999 GB of 999 GB (100 %), 999 MB/s, 59 min 59 s left")
JSON_PIECES = 10_000  # words and signs of a document that are written together
PIPE_WIDTH = 1000  # a pipe keeps rows whole


def escape(text: object) -> str:
    """`text` with everything that could act on a terminal written as \\xNN or \\uNNNN."""
    string = str(text)
    return string if string.isprintable() else "".join(map(_visible, string))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Screen:
    """The two streams of one command; `is_json` turns every document into JSON on stdout."""

    def __init__(self, is_json: bool = False, is_quiet: bool = False) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet

    @cached_property
    def out(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)

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
                while part := "".join(islice(pieces, JSON_PIECES)):  # never all at once: a plan can have tens of megabytes
                    sys.stdout.write(part)
                print()
            else:
                draw(self, document)
            sys.stdout.flush()
        except OSError as error:
            _forget_stdout()
            if isinstance(error, BrokenPipeError):
                sys.exit(CLOSED_PIPE)
            raise OutputError("cannot-print", f"standard output cannot be written: {error.strerror}") from None

    def line(self, text: object, style: str = "", label: str = "") -> None:
        """A line on stdout; where it has a label before it, that alone has the style."""
        self._print(sys.stdout, text, style, label)

    def _print(self, to: TextIO, text: object, style: str, label: str = "") -> None:
        if not _has_colours(to):
            print(f"{label}{escape(text)}", file=to, flush=True)
            return
        from rich.text import Text

        line = Text(label, style).append(escape(text), "default") if label else Text(escape(text), style)
        (self.out if to is sys.stdout else self.err).print(line)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        from rich.table import Column, Table
        from rich.text import Text

        table = Table(*(Column(heading, overflow="fold") for heading in headings), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(shorten(escape(cell))) for cell in row))
        self.out.print(table)

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
        is_bare = "CI" in os.environ or not sys.stderr.isatty() or self.err.is_dumb_terminal or not self.err.is_terminal
        phases = Phases(_print_progress if is_bare and not self.is_quiet else None)
        if is_bare or self.is_quiet:
            yield phases
            phases.end()
            return
        from rich.live import Live

        with Live(get_renderable=lambda: _bars(phases.meters, self.err.width), console=self.err, transient=True):
            yield phases


def _has_colours(stream: TextIO) -> bool:
    """False where rich would print plain words: a pipe or a file, unless a user asks for colours in it."""
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TTY_COMPATIBLE") == "1"


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
        bar = [ProgressBar(meter.total_nbytes or (0 if meter.is_over else None), done, room)] if room >= SHORTEST_BAR else []
        rows.add_row(Text(meter.verb), *bar, Text(meter.status(), no_wrap=True))
    tensor = meters[-1].tensor if meters and not meters[-1].is_over else ""
    return Group(rows, Text(shorten(escape(tensor), width - 3), "dim", no_wrap=True, overflow="ellipsis"))


def draw_result(screen: Screen, result: Document) -> None:
    """What a conversion did, in lines to paste: the same whatever command made it.

    adopted_bytes    of the source, whose result was there already; they count for no rate
    bits_per_weight  of the quantized tensors
    """
    counts, bits = result["tensors"], result.get("bits_per_weight")
    named = {"": result["format"], "dialect ": result["dialect"], "rule ": result["scale_rule"]}
    named["method "] = method if (method := result.get("method")) != "rtn" else None
    screen.line(result["output"], "bold")
    screen.line(f"  {', '.join(f'{word}{name}' for word, name in named.items() if name)}")
    if experts := result.get("experts"):
        screen.line(f"  {experts['kept']} of {experts['before']} experts stay in each of {experts['layers']} layers")
    (how, converted), *others = counts.items()
    told = [f"{converted} tensors {how}", *(f"{count} {'kept' if how == 'copied' else how}" for how, count in others)]
    screen.line(f"  {', '.join(told)}")
    before, after = result["source_bytes"], result["output_bytes"]
    weights = f", {bits:.3f} bits per weight where it is quantized" if bits and before else ""
    ratio = f" ({100 * after / before:.0f} %)" if before else ""
    screen.line(f"  {size_text(before)} -> {size_text(after)}{ratio}{weights}")
    share, seconds = result.get("share"), result["seconds"]
    worked = before if share else before - result.get("adopted_bytes", 0)  # a part tells what it did itself
    if fidelity := result.get("fidelity"):
        screen.line(f"  {fidelity_text(fidelity)}")
    rate = f", {rate_text(worked / seconds)}" if worked and seconds else ""
    screen.line(f"  in {duration_text(seconds)} on {result['device']}{rate}")
    if share:
        screen.line(f"  part {share['index']} of {share['of']}, shards written: {share['shards']}. When every part is done:")
        screen.line(f"  fp4convert merge {result['output']}")
    else:
        screen.line(f"  digest {result['digest']}")
    for part in result.get("components", ()):
        sizes = f"{size_text(part['source_bytes'])} -> {size_text(part['output_bytes'])}"
        screen.line(f"  {part['name']}: {part['tensors'][how]} tensors {how}, {sizes}")
        if fidelity := part.get("fidelity"):
            screen.line(f"  {part['name']}: {fidelity_text(fidelity)}")
    if pushed := result.get("pushed"):
        screen.line(f"  pushed: {pushed}")
    if carried := result.get("carried"):
        _draw_carried(screen, carried)


def badness(sqnr_db: float | None, mse: float | None) -> float:
    """Sorts tensors: first what has no mse, for it is not measurable, or no ratio, for its source is zero; exact ones last."""
    if mse == 0:
        return math.inf
    return -math.inf if mse is None or sqnr_db is None else sqnr_db


def fidelity_text(summary: Document) -> str:
    """How much was lost, in a line."""
    mean, least = summary["sqnr_db_mean"], summary["sqnr_db_min"]
    return "nothing was lost" if mean is None else f"SQNR {mean:.2f} dB on average, least {least:.2f} dB ({summary['worst']})"


def _draw_carried(screen: Screen, carried: Document) -> None:
    """What a transcoded artifact keeps of the other, and what it does not."""
    how = "keep every value in another format" if "blocks" in carried else "are carried bit for bit"
    screen.line(f"  {carried['bit_for_bit']} of {carried['modules']} modules {how}")
    for key, what in (
        ("rounded", "a scale stored as its reciprocal is off by one bit on the way back"),
        ("lossy", "blocks too small for E4M3 were rounded"),
    ):
        if names := carried.get(key):
            screen.line(f"  {len(names)} are not ({what}), the first {names[0]}", "yellow")
    if "blocks" in carried:
        screen.line(f"  {carried['kept_blocks']:,} of {carried['blocks']:,} blocks keep every value")


def draw_merged(screen: Screen, merged: Document) -> None:
    """What `merge` ended."""
    screen.line(merged["output"], "bold")
    made = ", ".join(word for word in (merged["format"], merged["dialect"]) if word)
    size, seconds = size_text(merged["output_bytes"]), duration_text(merged["seconds"])
    screen.line(f"  {merged['shards']} shards merged ({made}), {size}, in {seconds}")
    if fidelity := merged.get("fidelity"):
        screen.line(f"  {fidelity_text(fidelity)}")
    screen.line(f"  digest {merged['digest']}")


def draw_recipes(screen: Screen, found: Document) -> None:
    """Every recipe in a line, families with the models that they are for."""
    width = max(len(recipe["name"]) for recipe in found["recipes"])
    for recipe in found["recipes"]:
        models = ", ".join((*recipe["model_types"], *recipe["class_names"]))
        screen.line(f"{recipe['name']:{width}}  {recipe['about']}")
        if models:
            screen.line(f"{'':{width}}  for {models}")


def draw_recipe(screen: Screen, recipe: Document) -> None:
    """What one recipe says, in the words of its file."""
    screen.line(f"{recipe['name']}: {recipe['about']}")
    if models := (*recipe["model_types"], *recipe["class_names"]):
        screen.line(f"for {', '.join(models)}")
    if recipe["base"]:
        screen.line(f"builds on {', '.join(recipe['base'])}")
    for rule in recipe["keep"]:
        screen.line(f"keeps {', '.join(rule['modules'])}: {rule['reason']}")
    for rule in recipe["only"]:
        screen.line(f"quantizes only {', '.join(rule['modules'])}")
    for rule in recipe["formats"]:
        screen.line(f"makes {rule['format']} of {', '.join(rule['modules'])}")
    for members in recipe["groups"]:
        screen.line(f"one scale for {', '.join(members)}")
    for rule in recipe["stacks"]:
        rows = f", {rule['rows']}" if len(rule["members"]) > 1 else ""
        screen.line(f"takes {', '.join(rule['tensors'])} for stacks of {', '.join(rule['members'])}: {rule['order']}{rows}")
    for rule in recipe["experts"]:
        screen.line(f"counts experts by {', '.join(rule['counts'])}: in {', '.join((*rule['rows'], *rule['columns']))}")


def draw_examination(screen: Screen, found: Document) -> None:
    """What `doctor` found out."""
    cache, cpu, disk = found["cubin_cache"], found["cpu"], found["disk"]
    driver = f"NVIDIA, runs CUDA {found['driver']}, shows {found['gpus_shown']} GPU(s)" if found["driver"] else "none"
    kept = (
        f"{cache['files']} files, {size_text(cache['bytes'])}" if cache["writable"] else "not writable: compiled anew by each run"
    )
    rows = {
        "fp4convert": f"{found['fp4convert']}, Python {found['python']}",
        "--device auto": found["device"],
        "driver": driver,
        "CuPy": found["cupy"] or ("none that can be used" if found["gpus_shown"] else "not looked for"),
        "NVRTC": found["nvrtc"] or "-",
        "cubin cache": f"{cache['folder']} ({kept})",
        "CPU": f"{cpu['processors']} processors, {cpu['machine']}, kernels for {cpu['instruction_set']}",
        "disk": f"{disk['folder']}: {disk['free_bytes'] / 1e9:,.1f} GB free" if disk["folder"] else "the folder is gone",
    }
    for key, value in rows.items():
        screen.line(f"{key:<16}{value}")
    for gpu in found["gpus"]:
        memory = f"{gpu['memory_bytes'] / 1e9:,.1f} GB"
        screen.line(
            f"{gpu['device']:<16}{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}, {gpu['target']}"
        )
        for how in ("hardware", "software"):
            if gpu[f"{how}_conversion"]:
                screen.line(f"{'':<16}E2M1 conversion in {how}: {', '.join(gpu[f'{how}_conversion'])}")
    for gpu in found["gpus_refused"]:
        screen.line(f"{gpu['device']:<16}cannot be used: {gpu['reason']}", "yellow")
    if found["problem"]:
        screen.line(f"no GPU is used: {found['problem']}", "yellow")
        screen.line(f"  {found['next']}")


def draw_findings(screen: Screen, findings: Iterable[Document]) -> None:
    """A line for each, by its level; those that say the same of several tensors in one, under their pattern."""
    alike: dict[tuple[str, str, str], list[str | None]] = defaultdict(list)
    for finding in findings:
        alike[finding["level"], finding["code"], finding["detail"]].append(finding["tensor"])
    for (level, code, detail), tensors in alike.items():
        named = [(tensor.removesuffix(WEIGHT), WEIGHT if tensor.endswith(WEIGHT) else "") for tensor in tensors if tensor]
        whole = [""] if len(named) < len(tensors) else []
        for where in [*whole, *(_pattern_text(named, pattern, held) for pattern, held in join_names(named))]:
            screen.line(f"{where}{detail}", _COLOURS[level], f"{level} {code}: ")


def _pattern_text(named: Sequence[tuple[str, str]], pattern: str, held: Sequence[int]) -> str:
    """The pattern of those names, and how many they are."""
    return f"{escape(pattern)}{named[held[0]][1]}{f' ({len(held)} of them)' if len(held) > 1 else ''}: "


def draw_verdict(screen: Screen, is_good: bool, good: str, bad: str) -> None:
    """The last line of what judges."""
    screen.line(good if is_good else bad, "bold green" if is_good else "bold red")


def shorten(text: str, width: int = CELL_WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width // 2]}...{text[-width // 2 :]}"
