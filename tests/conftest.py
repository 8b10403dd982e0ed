"""What whole modules of tests share."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_llama
from fakehub import TOKEN
from fakehub_uploads import UploadHub
from paths import ROOT
from pushing import FastTime, Made, check_secrets, make
from simt import KERNELS, compile_for_host
from tiny_chains import TEXT, make_model
from tiny_models import offline

from fp4convert.numerics.backends import entry_points
from fp4convert.storage.hub.retry import Patience

# Workers and the commands that tests start get it: threads that wait by spinning double their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sweep(n)` every n-th case is in the gate; the others are slow.

    Cases that are slow anyway are not counted.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


@pytest.fixture(scope="session", autouse=True)
def _waits_for_no_disk() -> Iterator[None]:
    """No test in this process is of a machine that loses power; a bad descriptor stays an error.

    Commands of their own process, among them those that are killed or traced, wait as ever.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="module", autouse=True)
def _offline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines are kept from asking a hub."""
    if request.node.get_closest_marker("engine"):
        with offline():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built by the local compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        ROOT,
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    """A Hub on the loopback device that this process asks, and soon gives up on; its storage must
    never see a token.
    """
    from huggingface_hub import constants

    fake = UploadHub()
    template = fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    known = {
        "ENDPOINT": fake.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
    }
    for name, value in {**known, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    for name, value in (
        ("HF_ENDPOINT", fake.endpoint),
        ("HF_HOME", str(tmp_path / "home")),
        ("HF_TOKEN", TOKEN),
    ):
        monkeypatch.setenv(name, value)
    # Shards of a few KB stand for large ones here; test_small_shards.py has those that are small.
    monkeypatch.setattr("fp4convert.storage.hub.source.WHOLE_NBYTES", 0)
    hasty = Patience(1.0, first_seconds=0.01, least_nbytes=100)
    for asking in ("fp4convert.storage.hub.source", "fp4convert.storage.hub.upload"):
        monkeypatch.setattr(f"{asking}.Patience", lambda: hasty)
    yield fake
    fake.close()
    assert {seen.token for seen in fake.seen if seen.where == "storage"} <= {None}


@pytest.fixture(scope="session")
def simt_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Every .cu file for the host, as simt_gpu.Machine takes them."""
    folder = tmp_path_factory.mktemp("simt")
    stems = [Path(source).stem for source in entry_points.SOURCES]
    return {stem: compile_for_host(KERNELS / f"{stem}.cu", folder) for stem in stems}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An artifact in two shards, ready to be pushed."""
    root = tmp_path_factory.mktemp("push")
    return make(
        write_llama(root / "m", **{"tokenizer.json": b"{}" * 2000, "notes.txt": b"n"}), root / "q"
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, to be calibrated."""
    return make_model(tmp_path_factory.mktemp("llama") / "m", "Llama")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Text for it."""
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def told(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """What people are told of a push; it holds no secret, and nothing else is printed or logged.

    huggingface_hub's own pauses are skipped.
    """
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)
    lines: list[str] = []
    yield lines
    check_secrets("\n".join(lines))
    assert capfd.readouterr() == ("", "")
    assert [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name.startswith("huggingface_hub")
    ] == []
