"""Through a mirror that nobody here wrote: olah, pulling from the Hub of the tests, gives the bytes
of the folder.

It asks that Hub in its own ways, answers ranges out of blocks that it keeps, and sends no X-Linked
headers.  It wants an older
psutil than is beside it, so it has an environment of its own, which the package index fills: hence
the mark.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import run, run_alone, write_llama
from fakehub import TOKEN, FakeHub
from hub_cases import expect

pytestmark = pytest.mark.system
OLAH = "olah==0.5.4"
NVFP4 = ("--format", "nvfp4", "--json")
SECONDS = 60


@pytest.fixture(scope="module")
def olah(tmp_path_factory) -> Path:
    """The mirror's command."""
    home = tmp_path_factory.mktemp("olah")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin" / "pip", "install", "--quiet", OLAH], check=True)
    return home / "bin" / "olah-cli"


@pytest.fixture
def mirror(
    hub: FakeHub, olah: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """The Hub behind a mirror with an empty cache, which the command finds at HF_ENDPOINT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    origins = {
        "hf": hub.endpoint,
        "hf-lfs": hub.storage,
        "mirror": f"http://{place}",
        "mirror-lfs": f"http://{place}",
    }
    words = [
        word
        for name, origin in origins.items()
        for word in (f"--{name}-netloc", origin.removeprefix("http://"))
    ]
    words += [
        "--hf-scheme",
        "http",
        "--mirror-scheme",
        "http",
        "--host",
        "127.0.0.1",
        "--port",
        place.partition(":")[2],
    ]
    words += ["--repos-path", str(tmp_path / "repos"), "--log-path", str(tmp_path / "logs")]
    with (
        (tmp_path / "olah.log").open("w") as log,
        subprocess.Popen([olah, *words], stdout=log, stderr=log, cwd=tmp_path) as process,
    ):
        wait_for(place)
        monkeypatch.setenv("HF_ENDPOINT", f"http://{place}")
        yield hub
        process.terminate()


def wait_for(place: str) -> None:
    host, _, port = place.partition(":")
    for _ in range(10 * SECONDS):
        try:
            return socket.create_connection((host, int(port)), 1).close()
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"nothing listens at {place}")


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000, "notes.txt": b"n"})


def ask(*arguments: object):
    return run_alone(*arguments, seconds=SECONDS)


def test_cold_and_warm_it_gives_the_bytes_of_the_folder(mirror, folder, tmp_path):
    mirror.add("org/m", folder)
    expected = expect(mirror, folder, tmp_path / "local")
    for name in ("cold", "warm"):
        before = len(mirror.seen)
        assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / name).json["digest"] == expected
        fetched = [seen.path for seen in mirror.seen[before:] if seen.where == "storage"]
        assert bool(fetched) is (name == "cold"), fetched


def test_an_artifact_is_inspected_and_verified_through_it(mirror, folder, tmp_path):
    assert run("quantize", folder, *NVFP4, "-o", tmp_path / "q").code == 0
    mirror.add("org/m", folder)
    mirror.add("org/q", tmp_path / "q")
    for _ in ("cold", "warm"):
        assert (
            ask("inspect", "org/q", "--json").json == run("inspect", tmp_path / "q", "--json").json
        )
    measured = ask("verify", "org/q", "--source", "org/m", "--json").json
    assert measured == run("verify", tmp_path / "q", "--source", folder, "--json").json


def test_files_of_the_xet_storage_come_over_http(mirror, folder, tmp_path):
    """As olah is set up without a file: it takes them from the link that it is given, and answers
    itself.
    """
    commit = mirror.add("org/m", folder)
    files = mirror.repos["org/m"].commits[commit]
    mirror.xet_names = {
        file.oid: f"{number:064x}" for number, file in enumerate(files.values()) if file.is_large
    }
    expected = expect(mirror, folder, tmp_path / "local")
    for name in ("cold", "warm"):
        assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / name).json["digest"] == expected


def test_it_opens_no_gated_repository_without_a_token(mirror, folder, tmp_path, monkeypatch):
    mirror.add("org/m", folder, is_gated=True)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--token", TOKEN).code == 0
    monkeypatch.delenv("HF_TOKEN")
    refused = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "r")
    assert (refused.code, refused.json["error"]["code"]) == (4, "gated")
