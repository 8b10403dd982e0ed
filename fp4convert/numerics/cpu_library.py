"""Load the CPU library, and name the copy of its kernels in use."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files

LEVELS = {2: "x86-64-v2 (SSE4.2)", 3: "x86-64-v3 (AVX2)", 4: "x86-64-v4 (AVX-512)", 0: "baseline"}


@cache
def cpu_library() -> ctypes.CDLL:
    """Load the library that lies beside the package.

    Raises  RuntimeError where the package was installed without it
    """
    found = [item for item in files("fp4convert").iterdir() if item.name.startswith("libcpu.")]
    if not found:
        raise RuntimeError(
            "the CPU library is not installed with the package; reinstall fp4convert"
        )
    return ctypes.CDLL(str(found[0]))


def instruction_set(library: ctypes.CDLL) -> str:
    """Name the copy of the kernels that fits this processor."""
    return LEVELS[library.fp4_level(0)]
