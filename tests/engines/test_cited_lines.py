"""The lines of engines' code that configs/engines cites are in the engines that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cited_lines import stale
from paths import ROOT

from fp4convert.engines.files import known_engines, read_engine
from fp4convert.engines.gpus import Kernel, known_kernels
from fp4convert.engines.rows import Row
from fp4convert.engines.versions import read_version

JUDGES = ROOT / ".venv-engines"
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}  # of engines whose code was read, in make engines
ROWS = [(engine.key, row) for engine in known_engines() for row in engine.rows]
CITED = [each for each in ROWS if each[1].lines]
KERNELS = known_kernels()
pytestmark = pytest.mark.engine


def installed(package: str) -> list[tuple[str, Path]]:
    """Version and folder of every version of a package in the judges' environment."""
    places = JUDGES.glob("*"), JUDGES.glob("lib/python3*/site-packages")
    known = (
        (place, mark) for each in places for place in each for mark in place.glob("*.dist-info")
    )
    found = []
    for place, mark in known:
        folder = place / package
        name, version = mark.name.removesuffix(".dist-info").split("-")
        if name in (package, f"{package}_cpu") and folder.is_dir():
            found.append((version.partition("+")[0], folder))
    return found


@pytest.mark.skipif(not JUDGES.exists(), reason="needs `make engines`: no .venv-engines")
@pytest.mark.parametrize(("key", "row"), CITED, ids=lambda each: getattr(each, "says", each))
def test_a_cited_line_is_there(key: str, row: Row) -> None:
    """In every version there that the row is about, of which there is one."""
    about = [
        folder
        for version, folder in installed(PACKAGES[key])
        if read_version(version) in row.versions
    ]
    assert about
    for folder in about:
        assert not stale(row, folder), folder


@pytest.mark.skipif(not JUDGES.exists(), reason="needs `make engines`: no .venv-engines")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: f"{each.engine} {each.kernel}")
def test_a_line_that_chooses_a_kernel_is_there(kernel: Kernel) -> None:
    """In the version that was read, which the source names."""
    version = str(read_engine(kernel.engine).version)
    about = [folder for each, folder in installed(kernel.engine) if each.startswith(version)]
    assert about
    assert kernel.source.startswith(f"{kernel.engine} {version}")
    assert not any(stale(kernel, folder) for folder in about)


@pytest.mark.parametrize(("key", "row"), ROWS, ids=lambda each: getattr(each, "says", each))
def test_a_row_that_was_read_in_code_cites_it(key: str, row: Row) -> None:
    """A row from a thread alone has no line."""
    if key in PACKAGES:
        assert bool(row.lines) == row.source.startswith(f"{PACKAGES[key]} ")


def test_another_line_is_seen(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "one.py").write_text("if is_here:\n")
    row = next(row for _, row in CITED)

    assert not stale(row._replace(lines=("vllm/one.py: if is_here:",)), tmp_path)
    assert stale(row._replace(lines=("vllm/one.py: if is_there:",)), tmp_path)
    assert stale(row._replace(lines=("vllm/two.py: if is_here:",)), tmp_path)
