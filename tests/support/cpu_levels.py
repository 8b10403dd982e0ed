"""The CPU library at every level of instructions, and matrices at odd addresses."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from adversarial import DTYPES

from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import FP4_FORMATS
from fp4convert.numerics.matrices import Matrix
from fp4convert.process import cpu_library

NATIVE = cpu_library().fp4_level(0)  # 4, 3 or 2 on x86-64, 0 elsewhere


Cpus = dict[int, Cpu]


EVERY_RULE = pytest.mark.parametrize(
    ("fmt", "rule"), [(fmt, rule) for fmt in FP4_FORMATS.values() for rule in fmt.scale_rules]
)


EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def every_level(folder: Path) -> Cpus:
    """One backend a level; a level is lowered for good, so each has a copy of the library in
    `folder`, and that its own level.
    """
    source = Path(cpu_library()._name)
    found = {}
    for level in range(2, NATIVE + 1) if NATIVE else (0,):
        copy = shutil.copy(source, folder / f"v{level}{source.suffix}")
        found[level] = Cpu()
        found[level]._library = ctypes.CDLL(str(copy))
        found[level]._library.fp4_level(level)
    return found


def unaligned(x: Matrix) -> Matrix:
    """The same values, one byte past where they were aligned."""
    shifted = np.empty(len(x.data) + 1, np.uint8)
    shifted[1:] = x.data
    return Matrix(shifted[1:].data, x.dtype, x.shape)


def unaligned_bytes(part: memoryview) -> memoryview:
    return memoryview(b"\0" + bytes(part))[1:]
