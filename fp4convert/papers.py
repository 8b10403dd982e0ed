"""Single files that a person asks for beside a result: looked at before the work, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from fp4convert.errors import OutputError
from fp4convert.shard import told


def check_place(path: Path, option: str, example: str) -> None:
    """Nothing; OutputError where no file can be written there, which should be known before the work."""
    folder = path.parent
    detail = "it is a folder" if path.is_dir() else "" if folder.is_dir() else f"{folder} is no folder"
    detail = detail or ("" if os.access(folder, os.W_OK) else f"{folder} cannot be written to")
    if detail:
        raise OutputError("cannot-write", f"{option} {path}: {detail}; expected the name of a new file", f"Give {example}.")


def write_paper(path: Path, text: str) -> None:
    """Write the file in UTF-8, in place of what is there; OutputError where it cannot be written."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with told(path):
        try:
            temp.write_text(text, encoding="utf-8")
            os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
