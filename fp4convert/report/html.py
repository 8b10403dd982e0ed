"""Write a data sheet as one page of HTML that fetches nothing.

Whatever a checkpoint says reaches the page as JSON in which no sign has a meaning in HTML, and from there as text.  The page
allows its own two scripts, by their hashes, and no address: neither a name that is a script nor a mistake of ours could run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.progress import size_text
from fp4convert.quality.verification import Verified
from fp4convert.report.datasheet import Subject, make_datasheet
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage.source import Source

GENERATOR = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="fp4convert">\n'
PAGE = Paper("--report", "FILE.html", GENERATOR)
SIGNS = {
    ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"
}  # that mean something in HTML, or end a line of a script
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def check_page(path: Path) -> None:
    """Nothing; OutputError where no file can be written there, or where something else lies than an earlier page."""
    check_place(path, PAGE)


def save_page(
    path: Path, artifact: Artifact, source: Source | None, verified: Verified | None = None
) -> str:
    """Write the page of an artifact; a line that tells it.

    source, verified  as in datasheet.Subject
    Raises            OutputError where it cannot be written; what make_datasheet raises
    """
    write_page(make_datasheet(Subject(artifact, source, verified)), path)
    return f"report: {path}, {size_text(path.stat().st_size)}"


def write_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page of a data sheet, whole or not at all; OutputError where it cannot be written."""
    write_paper(path, make_page(document), PAGE)


def make_page(document: Mapping[str, Any]) -> str:
    """The text of the page."""
    from plotly.offline import get_plotlyjs

    scripts = {"plotly": _sealed(get_plotlyjs()), "script": _sealed(_read("report.js"))}
    filled = {
        **scripts,
        "policy": "; ".join(
            [
                "default-src 'none'",
                f"script-src {' '.join(map(_allowed, scripts.values()))}",
                *_POLICIES,
            ]
        ),
        "style": _read("report.css"),
        "title": html.escape(str(document["title"])),
        "data": json.dumps(document, allow_nan=False, separators=(",", ":")).translate(SIGNS),
    }
    return _SLOT.sub(lambda slot: filled[slot[1]], _read("report.html"))


_POLICIES = (
    "style-src 'unsafe-inline'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
)  # plotly sets styles, and draws cells


def _read(file: str) -> str:
    return files("fp4convert.report").joinpath("page", file).read_text(encoding="utf-8")


def _sealed(script: str) -> str:
    """A script in which nothing ends the element that it stands in."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _allowed(script: str) -> str:
    """The word of a content security policy for exactly that script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
