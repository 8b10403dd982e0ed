"""Write what engines' own loaders took: configs/engines/loaded, from the results of the judges.

    python tests/engines/judges/evidence.py [FOLDER]

A row is a class, dialect, formats with the bits of activations, and the digest of the artifact that
was loaded; behind it stands what the engine said where it did not hold every value. Rows are those
of results/classes, and of the families in results/ whose artifacts lie in FOLDER (build/engines).
The test is tests/engines/test_evidence.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LOADED = HERE.parents[2] / "configs" / "engines" / "loaded"
VERSIONS = {"vllm": "0.33", "sglang": "0.5.23", "transformers": "5.23"}
MOST_LETTERS = 150
JUDGED = "exact", "refuses", "wrong"


def rows_of(page: dict[str, Any]) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Return the digest and the reason of every row that an engine answered."""
    return {
        (row["class"], row["dialect"], row["formats"]): (row["digest"], reason(row))
        for row in page["rows"]
        if row["outcome"] in JUDGED and "formats" in row
    }


def reason(row: dict[str, Any]) -> str:
    """Return "" for what it holds exactly, else the first fault, short."""
    if row["outcome"] == "exact":
        return ""
    return " ".join(row["faults"][0].split())[:MOST_LETTERS]


def text_of(engine: str) -> str:
    """Return the file of an engine."""
    page = json.loads((RESULTS / "classes" / f"{engine}.json").read_text())
    rows = rows_of(page)
    lines = [" ".join(filter(None, (*key, *rows[key]))) for key in sorted(rows)]
    return "\n".join(
        [
            "# Made by tests/engines/judges/evidence.py; do not edit.",
            "# CLASS DIALECT FORMATS/ACTIVATIONS DIGEST, and what it did where it does not hold every value.",
            f'source = "{page["engine"]} {page["version"]}, its own loader, on a CPU"',
            f'version = "{VERSIONS[engine]}"',
            "rows = '''",
            *lines,
            "'''",
            "",
        ]
    ).replace("rows = '''\n", "rows = '''\n")


def main() -> None:
    """Write the files of all engines that were judged."""
    LOADED.mkdir(exist_ok=True)
    for engine in VERSIONS:
        if (RESULTS / "classes" / f"{engine}.json").exists():
            (LOADED / f"{engine}.toml").write_text(text_of(engine), encoding="utf-8")


if __name__ == "__main__":
    main()
