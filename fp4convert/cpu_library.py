"""Load the CPU library, name its kernels' copy, count failed reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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


@cache
def outlive_bus_errors() -> Callable[[], int]:
    """Let pages of mapped files that are gone be zeros, not the end.

    Returns  what counts them; what was read since the first is worth nothing
    """
    library = cpu_library()
    library.outlive_bus_errors()
    library.bus_errors.restype = ctypes.c_int64
    return library.bus_errors
