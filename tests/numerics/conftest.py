"""An imaginary GPU, for the tests of what works on one."""

import sys
from pathlib import Path

import pytest
from lazy_cuda import Machine

from fp4convert.numerics.backends import cuda_stream, gpus, self_check


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where NVRTC's cubins are kept for all modules."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def machine(simt_libraries, cache, monkeypatch: pytest.MonkeyPatch) -> Machine:  # type: ignore[no-untyped-def]
    """One imaginary GPU, and panels so small that a matrix has many."""
    made = Machine(simt_libraries)
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), made.count, ""))
    monkeypatch.setattr(self_check, "check", lambda gpu: None)  # test_self_check.py has it
    monkeypatch.setattr(cuda_stream, "GPU_PANEL_ELEMENTS", 2048)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return made
