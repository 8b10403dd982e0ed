"""Draw --help: usage, options under headings, examples.

typer's own help has no headings unless rich draws it, which doubles the time of --help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any

from fp4convert.recipes.options import PANELS

FEW = 12  # options that need no headings, --help among them
WIDEST = 100  # of a page
SCREEN = 45  # lines
RARE = "rare "  # begins the heading of an option that is left out first
INDENT, GAP = "  ", "  "
NO_BREAK = "\u00a0"  # a space within a default, which stands in one line
MOST_LEFT = 26  # characters of an option and its value; longer ones have a line to themselves
EXAMPLE = "Example: "  # begins the last paragraph of a command's docstring
DOCS = "docs/ of the repository; docs/engines.md says what to type for your engine"
Rows = list[tuple[str, str]]


def draw_command(
    usage: str, text: str, parameters: Sequence[Any], width: int, is_all: bool = False
) -> str:
    """Return the page of one command.

    Where it would not fit one screen, rare options and all but the first sentences are left out.

    text        its docstring
    parameters  typer's, arguments first
    is_all      leave nothing out
    """
    page = _page(usage, text, parameters, width)
    if is_all or len(page) <= SCREEN:
        return "\n".join(page)
    shown = [each for each in parameters if not (each.rich_help_panel or "").startswith(RARE)]
    left = len(parameters) - len(shown)
    more = f"{left} more options: {usage} --help all"
    return "\n".join([*_page(usage, text, shown, width, is_short=True), "", more])


def _page(
    usage: str, text: str, parameters: Sequence[Any], width: int, is_short: bool = False
) -> list[str]:
    """Return the lines of a page with these parameters.

    is_short  the first sentence of each, under one heading
    """
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name != "argument"]
    words = " ".join(["[OPTIONS]", *(_in_usage(each) for each in arguments)])
    sections: list[tuple[str, Rows]] = [("Arguments", [_row(each) for each in arguments])]
    if len(options) <= FEW or is_short:
        sections.append(("Options", [_row(each) for each in options]))
    else:
        shown = {panel: list[Any]() for panel in PANELS}
        for each in options:
            panel = (getattr(each, "rich_help_panel", None) or PANELS[-1]).removeprefix(RARE)
            shown[panel].append(each)
        sections += [(panel, [_row(each) for each in held]) for panel, held in shown.items()]
    if is_short:
        sections = [
            (
                panel,
                [(left, f"{right.partition('. ')[0].removesuffix('.')}.") for left, right in rows],
            )
            for panel, rows in sections
        ]
    told, _, example = text.partition(EXAMPLE)
    lines = [f"Usage: {usage} {words}", "", *_paragraphs(told, width), *_draw(sections, width)]
    if example:
        lines += ["", "Example:", *_lay_out(" ".join(example.split()), width)]
    return lines


def draw_group(
    usage: str, text: str, parameters: Sequence[Any], commands: dict[str, Rows], width: int
) -> str:
    """Return the page of all commands.

    commands  heading -> a command, and the first sentence of its docstring
    """
    told, _, example = text.partition(EXAMPLE)
    sections = [*commands.items(), ("Options", [_row(each) for each in parameters])]
    lines = [f"Usage: {usage} [OPTIONS] COMMAND [ARGS]...", "", *_paragraphs(told, width)]
    lines += [*_draw(sections, width), "", "Example:"]
    lines += [f"{INDENT}{line.strip()}" for line in example.splitlines() if line.strip()]
    lines += ["", f"More: {usage} COMMAND --help.", f"Docs: {DOCS}."]
    return "\n".join(lines)


def _in_usage(argument: Any) -> str:
    return str(argument.metavar) if argument.required else f"[{argument.metavar}]"


def _row(parameter: Any) -> tuple[str, str]:
    """Return an option with its value, and its help."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar), parameter.help or ""
    flags = ", ".join(sorted(parameter.opts, key=len))
    is_flag = parameter.is_flag or not parameter.metavar
    extra = ["required"] if parameter.required else []
    default = None if callable(parameter.default) else parameter.default
    if not extra and not is_flag and default not in (None, "", (), []):
        extra = [f"default: {default}"]
    noted = f" [{'; '.join(extra)}]".replace(": ", f":{NO_BREAK}") if extra else ""
    return flags if is_flag else f"{flags} {parameter.metavar}", f"{parameter.help or ''}{noted}"


def _draw(sections: Iterable[tuple[str, Rows]], width: int) -> Iterator[str]:
    """Draw headings and rows in two columns, which all sections share."""
    held = [(heading, rows) for heading, rows in sections if rows]
    lefts = [len(left) for _, rows in held for left, _ in rows if len(left) <= MOST_LEFT]
    first = len(INDENT) + max(lefts, default=0) + len(GAP)
    for heading, rows in held:
        yield ""
        yield f"{heading}:"
        for left, right in rows:
            room = max(width - first, MOST_LEFT)
            told = wrap(right, room, break_on_hyphens=False) or [""]
            told = [line.replace(NO_BREAK, " ") for line in told]
            if len(left) > MOST_LEFT:
                yield f"{INDENT}{left}"
            else:
                yield f"{INDENT}{left}".ljust(first) + told.pop(0)
            yield from (" " * first + line for line in told)


def _paragraphs(text: str, width: int) -> Iterator[str]:
    """Wrap paragraphs, an empty line between them."""
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        yield from [""] if number else []
        words = " ".join(paragraph.split())
        yield from wrap(words, width, initial_indent=INDENT, subsequent_indent=INDENT)


def _lay_out(command: str, width: int) -> Iterator[str]:
    """Break a command line before options, so that it can be copied."""
    line = ""
    for part in command.replace(" -", "\n-").split("\n"):
        if line and len(INDENT) + len(line) + len(part) + len(" \\") > width:
            yield f"{INDENT}{line} \\"
            line = f"{INDENT}{part}"
        else:
            line = f"{line} {part}".strip() if not line.startswith(" ") else f"{line} {part}"
    yield f"{INDENT}{line}"
