"""A plugin of pytest: the CPU library is the one that LIBCPU names (test_sanitizers.py).

    LIBCPU=FILE pytest -p sanitized_cpu tests/kernels

Loaded before anything else imports the package.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import pytest

from fp4convert import process

process.cpu_library = cache(lambda: ctypes.CDLL(os.environ["LIBCPU"]))


def pytest_report_header() -> str:
    return f"libcpu: {process.cpu_library()._name}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs commands of their own, or imaginary GPUs, says nothing of this library."""
    others = {"machine", "simt_libraries", "wheel"}
    items[:] = [item for item in items if not others & {*getattr(item, "fixturenames", ())}]
