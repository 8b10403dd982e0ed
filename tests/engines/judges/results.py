"""Rows of what engines said: one for each artifact, kept as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parameters import Judged

Judge = Callable[[Path], tuple[Judged, str]]


def judge_all(engine: str, version: str, judge: Judge, folders: list[Path], results: Path) -> int:
    """Judge every folder and write the rows; return 1 where one is wrong, else 0."""
    rows = []
    for folder in folders:
        began = time.monotonic()
        row = json.loads(Path(f"{folder}.json").read_text())
        rows.append({**row, **_outcome(judge, folder)})
        seconds = time.monotonic() - began
        print(f"{folder.name}: {rows[-1]['outcome']} {rows[-1]['says']} ({seconds:.1f} s)", flush=True)
    page = {"engine": engine, "version": version, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    results.write_text(json.dumps(page, indent=1) + "\n")
    return int(any(row["outcome"] == "wrong" for row in rows))


def _outcome(judge: Judge, folder: Path) -> dict[str, Any]:
    """Say in one row what the engine did.

    exact    all is as the artifact says
    refuses  the engine raised an error; `says` is its first line
    wrong    a byte differs, or something is unset or unread
    """
    try:
        judged, after = judge(folder)
    except Exception as error:  # any error of an engine is its answer
        return {"outcome": "refuses", "says": _line(error)}
    counts = {"parameters": len(judged.exact), "nbytes": judged.nbytes, "after": after[:160]}
    return {"outcome": "wrong" if judged.fault else "exact", "says": judged.fault, **counts}


def _line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:240]
