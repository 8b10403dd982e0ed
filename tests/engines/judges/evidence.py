"""Write what engines' own loaders took: configs/engines/loaded, from the results of the judges.

    python tests/engines/judges/evidence.py

A row is a class, dialect, formats with the bits of activations, and the digest of the artifact that
was loaded; behind it stands what the engine said where it did not hold every value. Behind a class
that holds models of any type stand the types that its artifact's config.json has. Rows are those of
results/classes, and of the families of the same version.
The test is tests/engines/test_evidence.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LOADED = HERE.parents[2] / "configs" / "engines" / "loaded"
VERSIONS = {"vllm": "0.33", "sglang": "0.5.23", "transformers": "5.23"}
MOST_LETTERS = 90
JUDGED = "exact", "refuses", "wrong"


def rows_of(pages: list[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Return the digest and the reason of every row that an engine answered.

    Of families that share a class, rows which say different things are left out.
    """
    found: dict[tuple[str, str, str], dict[bool, tuple[str, str]]] = defaultdict(dict)
    for page in pages:
        for row in page["rows"]:
            if row["outcome"] in JUDGED and "formats" in row:
                model = ":".join(filter(None, (row["class"], row.get("inner"))))
                key = model, row["dialect"], row["formats"]
                found[key][row["outcome"] == "exact"] = row["digest"], reason(row)
    return {key: next(iter(both.values())) for key, both in found.items() if len(both) == 1}


def reason(row: dict[str, Any]) -> str:
    """Return "" for what it holds exactly, else the first fault, short."""
    if row["outcome"] == "exact":
        return ""
    return " ".join(row["faults"][0].split())[:MOST_LETTERS]


def text_of(engine: str) -> str:
    """Return the file of an engine."""
    page = json.loads((RESULTS / "classes" / f"{engine}.json").read_text())
    families = RESULTS / f"{engine}-{page['version']}.json"
    others = [json.loads(families.read_text())] if families.exists() else []
    rows = rows_of([page, *others])
    lines = [" ".join(filter(None, (*key, *rows[key]))) for key in sorted(rows)]
    return "\n".join(
        [
            "# Made by tests/engines/judges/evidence.py; do not edit.",
            "# CLASS[:TYPES INSIDE] DIALECT FORMATS/ACTIVATIONS DIGEST, and what it did instead.",
            f'source = "{page["engine"]} {page["version"]}, its own loader, on a CPU"',
            f'version = "{VERSIONS[engine]}"',
            "rows = '''",
            *lines,
            "'''",
            "",
        ]
    )


def main() -> None:
    """Write the files of all engines that were judged."""
    LOADED.mkdir(exist_ok=True)
    for engine in VERSIONS:
        if (RESULTS / "classes" / f"{engine}.json").exists():
            (LOADED / f"{engine}.toml").write_text(text_of(engine), encoding="utf-8")


if __name__ == "__main__":
    main()
