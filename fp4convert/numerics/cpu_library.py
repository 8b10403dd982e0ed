"""Name the copy of the CPU library's kernels that is in use."""

from __future__ import annotations

from fp4convert.process import cpu_library

LEVELS = {2: "x86-64-v2 (SSE4.2)", 3: "x86-64-v3 (AVX2)", 4: "x86-64-v4 (AVX-512)", 0: "baseline"}


def instruction_set() -> str:
    """Name the copy that fits this processor.

    Raises  RuntimeError where the package was installed without the library
    """
    return LEVELS[cpu_library().fp4_level(0)]
