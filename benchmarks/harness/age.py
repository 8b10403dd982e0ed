"""Is a page of results of this code?  Its commits beside those made since."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.measure import RESULTS, ROOT

MOST_COMMITS = 30  # since a page was made, of those that touch what it measures
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40}|unknown)(-dirty)?")
# What a page measures, by what its name begins with.
MEASURED = {
    "cpu": ("fp4convert", "kernels"),
    "hub": ("fp4convert/storage", "fp4convert/execution"),
    "mixed": ("fp4convert/checkpoint/encodings", "fp4convert/execution", "kernels"),
    "host": ("fp4convert/execution", "fp4convert/numerics/backends"),
    "fidelity": ("fp4convert/numerics", "fp4convert/calibration", "kernels"),
    "gpu": ("fp4convert/numerics/backends", ":(glob)kernels/*.cu", ":(glob)kernels/*.cuh"),
}


def old_pages(folder: Path = RESULTS, root: Path = ROOT) -> Iterator[str]:
    """Say of each page of results, in a line, why it is not of this code.

    Raises  KeyError for a page of which nobody knows what it measures
    """
    for page in sorted(folder.glob("*.md")):
        paths = MEASURED[page.stem.partition("-")[0]]
        found = dict.fromkeys(COMMIT.findall(page.read_text(encoding="utf-8")))
        if not found:
            yield f"{page.name} names no commit"
        for commit, dirt in found:
            if dirt or commit == "unknown":
                yield f"{page.name} was measured on files that no commit has ({commit}{dirt})"
                continue
            words = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths]
            counted = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
            if counted.returncode:
                yield f"{page.name} is of {commit}, which is no commit here"
            elif (count := int(counted.stdout)) > MOST_COMMITS:
                what = f"{count} commits have touched what it measures; expected {MOST_COMMITS}"
                yield f"{page.name} is of {commit}: since then {what} at most"
