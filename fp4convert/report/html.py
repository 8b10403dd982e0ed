"""Write a document as one page of HTML that fetches nothing.

Text of a checkpoint reaches the page as JSON without signs that mean something in HTML, and is
inserted as text.  The page allows its two scripts, by their hashes, and no address: a script in a
name could not run.  The build puts plotly's script beside the files of the page (CMakeLists.txt).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.errors import InputError, describe_missing
from fp4convert.progress import size_text
from fp4convert.report.datasheet import make_datasheet
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage.source import Source

GENERATOR = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="generator" content="fp4convert">\n'
)
PLOTLY = "plotly.min.js"
REPORT, COMPARISON = "report", "comparison"  # kinds of pages
PAGE = Paper("--report", "FILE.html", GENERATOR)
# Signs that mean something in HTML, or end a line of a script.
SIGNS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
# Beside that for scripts; plotly sets styles, and draws cells.
_POLICIES = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def check_page(path: Path) -> None:
    """Raise OutputError if no page can be written, or another file lies there.

    Raises  InputError without plotly's script
    """
    check_place(path, PAGE)
    _find_plotly()


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

    def read(file: str) -> str:
        return _own_file(file).read_text(encoding="utf-8")

    # Nothing in a script ends the element that it stands in, and only these two may run.
    slots, allowed = {}, []
    plotly = _find_plotly().read_text(encoding="utf-8")
    for slot, script in (("plotly", plotly), ("script", read("common.js") + read(f"{kind}.js"))):
        slots[slot] = re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
        digest = base64.b64encode(hashlib.sha256(slots[slot].encode()).digest()).decode()
        allowed.append(f"'sha256-{digest}'")
    slots["policy"] = f"default-src 'none'; script-src {' '.join(allowed)}; {_POLICIES}"
    slots["style"] = read("page.css")
    slots["title"] = html.escape(str(document["title"]))
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    slots["data"] = text.translate(SIGNS)
    return _SLOT.sub(lambda slot: slots[slot[1]], read(f"{kind}.html"))


def _own_file(file: str) -> Traversable:
    return files("fp4convert.report").joinpath("page", file)


def _find_plotly() -> Traversable:
    """Find plotly's script: the shipped one, else the installed package's.

    Raises  InputError without either
    """
    shipped = _own_file(PLOTLY)
    if shipped.is_file():
        return shipped
    try:
        return files("plotly").joinpath("package_data", PLOTLY)
    except ImportError:
        needing = f"--report draws with {PLOTLY}, which this build of fp4convert lacks"
        needing += "; it needs the package plotly"
        raise InputError("no-plotly", *describe_missing(needing, "report")) from None
