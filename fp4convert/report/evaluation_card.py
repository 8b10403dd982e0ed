"""Write the figures of evaluate into a model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fp4convert.errors import OutputError
from fp4convert.report.model_card import CARD_LIMIT, code, table
from fp4convert.report.text import evaluation_rows
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.disk import write_errors_at
from fp4convert.storage.source import Source
from fp4convert.version import __version__

ANY_CARD = Paper("--card", CARD, "", CARD)
# Between them is what `evaluate --card` writes.
EVALUATION, EVALUATION_END = (
    "<!-- made: fp4convert evaluate -->",
    "<!-- end: fp4convert evaluate -->",
)
_EVALUATED = re.compile(f"{EVALUATION}((?!{EVALUATION}).)*?{EVALUATION_END}", re.DOTALL)


def add_evaluation(path: Path, evaluated: dict[str, Any], source: Source, adapter: str = "") -> str:
    """Write the figures of `evaluate` into a card.

    An earlier section of figures is replaced, everything else stays; a missing card is made.
    evaluated  the document of `evaluate --json`
    adapter    name of the adapter that was merged into the source; empty without one
    Returns    a line for a person
    Raises     OutputError if it cannot be written
    """
    checkpoint = source.checkpoint
    at = f" at commit {code(checkpoint.revision)}" if checkpoint.revision else ""
    merged = f" with the adapter {code(adapter)} merged" if adapter else ""
    beside = f"{code(checkpoint.repo or source.name)}{at}{merged}"
    section = evaluation_section(evaluated, beside)
    text = _read_card(path)
    if _EVALUATED.search(text):
        text = _EVALUATED.sub(lambda _: section, text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}\n".lstrip("\n")
    write_paper(path, text, ANY_CARD)
    return f"card: {path}"


def evaluation_section(evaluated: dict[str, Any], beside: str) -> str:
    """Return the section of a card on predictions.

    evaluated  the document of `evaluate --json`
    beside     markdown that names the source
    """
    # All of these words are ours.
    rows = "\n".join(f"| {name} | {words} |" for name, words in evaluation_rows(evaluated).items())
    by = f"Beside {beside}, by `fp4convert evaluate` {__version__}."
    parts = [EVALUATION, "## Predictions", by, f"| | |\n|---|---|\n{rows}"]
    if layers := evaluated["by_layer"]:
        named = [(row["layer"], row["alone"], row["cumulated"]) for row in layers]
        parts += [
            "Mean KL divergence by layer, in nats:",
            table([("layer", "alone", "cumulated"), *named]),
        ]
    return "\n\n".join([*parts, EVALUATION_END])


def evaluation_in(path: Path) -> str:
    """Return the section of `evaluate` in a card; "" without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        text = stream.read(CARD_LIMIT).decode("utf-8", "replace")
    return found[0] if (found := _EVALUATED.search(text)) else ""


def check_card(path: Path) -> None:
    """Raise OutputError if no card can be written or added to."""
    check_place(path, ANY_CARD)
    _read_card(path)


def _read_card(path: Path) -> str:
    """Return the text of a card; "" without a card.

    Raises  OutputError for a file that is no text, or longer than any card
    """
    if not path.exists():
        return ""
    expected = f"expected a text in UTF-8 of at most {CARD_LIMIT:,} bytes"
    with write_errors_at(path), path.open("rb") as stream:
        data = stream.read(CARD_LIMIT + 1)
    try:
        if len(data) > CARD_LIMIT:
            raise ValueError(f"more than {CARD_LIMIT:,} bytes")
        text = data.decode("utf-8")
        if text.count(EVALUATION) != text.count(EVALUATION_END):
            raise ValueError(f"one of {EVALUATION} and {EVALUATION_END} stands alone")
        return text
    except ValueError as error:
        detail = f"{path} is no model card: {error}; {expected}"
        raise OutputError("cannot-write", detail, "Give another: --card README.md.") from None
