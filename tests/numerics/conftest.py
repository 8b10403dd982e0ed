"""An imaginary GPU, for the tests of what works on one."""

from pathlib import Path

import pytest
from simt_gpu import Machine

from fp4convert.numerics.backends import cuda_stream


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where NVRTC's cubins are kept for all modules."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def machine(simt_libraries, cache, monkeypatch: pytest.MonkeyPatch) -> Machine:  # type: ignore[no-untyped-def]
    """One imaginary GPU, and panels so small that a matrix has many."""
    made = Machine(simt_libraries)
    made.install(monkeypatch, cache)
    monkeypatch.setattr(cuda_stream, "GPU_PANEL_ELEMENTS", 2048)
    return made
