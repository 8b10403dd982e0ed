"""Write a document as one page of HTML that fetches nothing.

Text of a checkpoint reaches the page as JSON without signs that mean something in HTML, and is
inserted as text.  The page allows its own script and style, by their hashes, and no address: a
script in a name could not run.
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
from fp4convert.report.datasheet import make_datasheet
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage import checkpoint_files
from fp4convert.storage.source import Source

GENERATOR = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="generator" content="fp4convert">\n'
)
# Kinds of pages: names of their parts in page/, and their words.
REPORT, COMPARISON = "report", "comparison"
_KINDS = {REPORT: "artifact report", COMPARISON: "comparison"}
PAGE = Paper("--report", "FILE.html", GENERATOR, checkpoint_files.PAGE)
# Signs that mean something in HTML, or end a line of a script.
SIGNS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
_POLICY = "default-src 'none'; script-src {}; style-src {}; base-uri 'none'; form-action 'none'"
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def check_page(path: Path) -> None:
    """Raise OutputError if no page can be written, or another file lies there."""
    check_place(path, PAGE)


def save_page(path: Path, artifact: Artifact, source: Source | None, **found: Any) -> str:
    """Write the page of an artifact; return a line that names it.

    source, found  arguments of make_datasheet
    Raises         OutputError if it cannot be written; errors of make_datasheet
    """
    write_page(make_datasheet(artifact, source, **found), path)
    return f"report: {path}, {size_text(path.stat().st_size)}"


def write_page(document: Mapping[str, Any], path: Path, kind: str = REPORT) -> None:
    """Write a page, whole or not at all.

    document, kind  arguments of make_page
    Raises          OutputError if it cannot be written
    """
    write_paper(path, make_page(document, kind), PAGE)


def make_page(document: Mapping[str, Any], kind: str = REPORT) -> str:
    """Return the text of a page.

    document  for its script: a data sheet or a comparison
    kind      name of its HTML and script in page/
    """

    def read(*names: str) -> str:
        return "".join((folder / name).read_text(encoding="utf-8") for name in names)

    folder = files("fp4convert.report") / "page"
    slots = {"style": read("page.css"), "kind": _KINDS[kind]}
    # Nothing in a script ends the element that it stands in.
    script = read("common.js", "draw.js", f"{kind}.js")
    slots["script"] = re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
    slots["policy"] = _POLICY.format(_hash(slots["script"]), _hash(slots["style"]))
    slots["title"] = html.escape(str(document["title"]))
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    slots["data"] = text.translate(SIGNS)
    page = read("page.html").replace("{{sections}}", read(f"{kind}.html").rstrip())
    return _SLOT.sub(lambda slot: slots[slot[1]], page)


def _hash(text: str) -> str:
    """Return the source expression of a script or style (CSP level 3, hashes)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
