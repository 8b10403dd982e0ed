"""Rows of what engines said: one for each artifact, kept as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parameters import Judged

Judge = Callable[[Path, Path], tuple[Judged, str]]


def judge_all(engine: str, version: str, judge: Judge, folders: list[Path], results: Path) -> int:
    """Judge every folder and write the rows; return 1 where one is wrong, else 0.

    FOLDER.json says what it is; with "tensors_of" the tensors of another folder are expected.
    """
    rows = []
    for folder in folders:
        began = time.monotonic()
        row = json.loads(Path(f"{folder}.json").read_text())
        expected = Path(row.pop("tensors_of", folder))
        row |= _outcome(judge, folder, expected)
        rows.append(row)
        told = f"{row['outcome']} {row['says']} ({time.monotonic() - began:.1f} s)"
        print(f"{folder.name}: {told}", flush=True)
    page = {"engine": engine, "version": version, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    results.write_text(json.dumps(page, indent=1) + "\n")
    return int(any(row["outcome"] == "wrong" for row in rows))


def _outcome(judge: Judge, folder: Path, expected: Path) -> dict[str, Any]:
    """Say in one row what the engine did.

    exact    all is as the artifact says
    refuses  the engine raised an error; `says` is its first line
    wrong    a byte differs, or something is unset or unread
    """
    try:
        judged, after = judge(folder, expected)
    except Exception as error:  # any error of an engine is its answer
        return {"outcome": "refuses", "says": _line(error)}
    counts = {"parameters": len(judged.exact), "nbytes": judged.nbytes, "after": after[:160]}
    return {"outcome": "wrong" if judged.fault else "exact", "says": judged.fault, **counts}


def _line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:240]
