"""Rows of what engines said: one for each artifact, kept as JSON."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parameters import Judged, numberless

Judge = Callable[[Path, Path], tuple[Judged, str]]


def judge_all(engine: str, version: str, judge: Judge, folders: list[Path], results: Path) -> None:
    """Judge every folder and write the rows.

    FOLDER.json says what it is; with "tensors_of" the tensors of another folder are expected.
    """
    rows = []
    for folder in folders:
        began = time.monotonic()
        row = json.loads(Path(f"{folder}.json").read_text())
        expected = Path(row.pop("tensors_of", folder))
        row |= _outcome(judge, folder, expected)
        rows.append(row)
        told = (
            f"{row['outcome']} {'; '.join(row['faults'])[:200]} ({time.monotonic() - began:.1f} s)"
        )
        print(f"{folder.name}: {told}", flush=True)
    page = {"engine": engine, "version": version, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    results.write_text(json.dumps(page, indent=1) + "\n")


def _outcome(judge: Judge, folder: Path, expected: Path) -> dict[str, Any]:
    """Say in one row what the engine did.

    exact    all is as the artifact says
    refuses  the engine raised an error
    wrong    bytes differ, or something is unset or unread
    """
    try:
        judged, after = judge(folder, expected)
    except Exception as error:  # any error of an engine is its answer
        return {"outcome": "refuses", "faults": [error_line(error)]}
    faults = judged.faults
    counts = {"parameters": len(judged.exact), "nbytes": judged.nbytes, "after": after[:160]}
    return {"outcome": "wrong" if faults else "exact", "faults": faults, **counts}


def error_line(error: Exception) -> str:
    """Tell an error, and the file and function of the engine that raised it."""
    words = numberless(" ".join(str(error).split()))
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if re.search(r"/(vllm|sglang)/", frame.filename)]
    place = f" ({Path(places[-1].filename).name}, {places[-1].name})" if places else ""
    return f"{type(error).__name__}: {words}"[:200] + place
