"""Models that many tests start from are built once in a run of tests; each test gets a copy of its
own.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache
def _shelf() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fp4convert-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_built: dict[str, Path] = {}


def built_once(what: str, build: Callable[[Path], object], folder: Path) -> Path:
    """The folder, now with what `build` makes of an empty one; `what` tells one model from every
    other.
    """
    if what not in _built:
        made = _shelf() / str(len(_built))
        build(made)
        _built[what] = made
    shutil.copytree(_built[what], folder, dirs_exist_ok=True)
    return folder
