"""Lines of an engine's code that rows of configs/engines cite."""

from functools import cache
from pathlib import Path

from fp4convert.engines.gpus import Kernel
from fp4convert.engines.rows import Row


@cache
def files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder.rglob("*.py"))


def stale(row: Row | Kernel, folder: Path) -> list[str]:
    """The cited lines that a package has not."""
    missing = []
    for line in row.lines:
        name, _, text = line.partition(": ")
        known = [file for file in files(folder) if file.as_posix().endswith(f"/{name}")]
        if not any(text in file.read_text(encoding="utf-8") for file in known):
            missing.append(line)
    return missing
