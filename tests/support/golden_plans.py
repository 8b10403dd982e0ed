"""The plan of a conversion as a page that a person can read: one line for every kind of module,
without what differs by machine.

python tests/support/golden_plans.py            # prints what differs from tests/golden/plans, exits
1 where something does
python tests/support/golden_plans.py --write    # replaces the pages; a person reads the diff before
it is committed
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from families import FAMILIES
from family import build
from fp4_sources import MAKERS
from packed_families import CASES
from paths import GOLDEN
from tiny_models import fp4convert_json, offline

PLANS = GOLDEN / "plans"
HEAD = ("pattern", "n", "becomes", "scale group", "before", "after", "why")


def draw_plan(source: Path, fmt: str = "nvfp4") -> str:
    """The page for a checkpoint, from nothing but its folder."""
    document = fp4convert_json("quantize", source, "--format", fmt, "--dry-run")
    rows = [HEAD, *(_cells(row) for row in document["patterns"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    before, after = (
        sum(row[key] for row in document["patterns"]) for key in ("source_bytes", "output_bytes")
    )
    totals = f"{before} bytes become {after}"
    return (
        "\n".join([*lines, "", totals, *(f"warning: {text}" for text in document["warnings"])])
        + "\n"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    becomes = row["format"] or {"copy": "", "skip": ""}.get(row["action"], row["action"])
    counts = (str(row[key]) for key in ("count", "source_bytes", "output_bytes"))
    count, before, after = counts
    return row["pattern"], count, becomes, row["group"] or "", before, after, row["reason"]


def _makers() -> dict[str, Callable[[Path], object]]:
    """Name -> what makes the checkpoint in a folder."""
    makers: dict[str, Callable[[Path], object]] = {
        family.name: partial(build, family) for family in FAMILIES
    }
    return makers | {str(case): case.build for case in CASES} | MAKERS


def main(arguments: list[str]) -> int:
    differs = False
    PLANS.mkdir(exist_ok=True)
    for name, make in _makers().items():
        file = PLANS / f"{name}.txt"
        with tempfile.TemporaryDirectory() as folder, offline():
            make(Path(folder) / name)
            page = draw_plan(Path(folder) / name)
        known = file.read_text() if file.exists() else ""
        diff = difflib.unified_diff(
            known.splitlines(), page.splitlines(), file.name, "now", lineterm=""
        )
        for line in diff:
            differs = True
            print(line)
        if "--write" in arguments:
            file.write_text(page)
    return int(differs and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
