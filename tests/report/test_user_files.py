"""Files that are asked for beside a result: never in an artifact's folder, never two in one place,
and told before the work.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import run, write_llama

from fp4convert.errors import OutputError
from fp4convert.report.user_files import Paper, write_papers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("papers") / "source")


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    quantize(source, tmp_path / "artifact")
    return tmp_path / "artifact"


def held(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command", [("verify", "--report"), ("verify", "--sarif"), ("inspect", "--sarif")], ids=" ".join
)
def test_no_file_is_put_into_an_artifact(command, artifact, tmp_path):
    word, option = command
    (artifact / "deeper").mkdir()
    (tmp_path / "link").symlink_to(artifact)
    before = held(tmp_path)
    weights = next(artifact.glob("*.safetensors"))
    for place in (
        artifact,
        artifact / "f",
        artifact / "deeper" / "f",
        weights,
        tmp_path / "link" / "f",
        tmp_path / "x/../artifact/f",
    ):
        refused = run(word, artifact, option, place, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, "file-in-artifact"), place
        assert f"{option} {place}" in refused.json["error"]["message"]
    refused = run(word, tmp_path, "--subfolder", "artifact", option, artifact / "f", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "file-in-artifact")
    assert held(tmp_path) == before
    assert (
        run(word, tmp_path, "--subfolder", "artifact", option, tmp_path / "f").code == 0
    )  # beside it
    assert run("verify", artifact, "--json").json["findings"] == []


def test_an_earlier_file_in_an_artifact_stays(artifact, tmp_path):
    """It is refused before anything is removed in favour of the new one."""
    assert run("verify", artifact, "--sarif", tmp_path / "f.sarif").code == 0
    (tmp_path / "f.sarif").rename(artifact / "f.sarif")
    assert run("verify", artifact, "--sarif", artifact / "f.sarif").code == 2
    assert (artifact / "f.sarif").exists()


@pytest.mark.parametrize("place", ["out", "out/r.html", "./out/deeper/r.html"])
@pytest.mark.parametrize("is_there", [False, True])
def test_no_page_is_put_into_the_output(place, is_there, source, tmp_path):
    if is_there:
        (tmp_path / "out" / "deeper").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    outcome = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "--report",
        tmp_path / place,
        "--json",
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "file-in-artifact")
    assert sorted(tmp_path.rglob("*")) == before


def test_two_files_have_two_places(artifact, tmp_path):
    (tmp_path / "here").symlink_to(tmp_path)
    refused = run(
        "verify", artifact, "--report", tmp_path / "f", "--sarif", tmp_path / "here" / "f", "--json"
    )
    assert (refused.code, refused.json["error"]["code"]) == (2, "file-twice")
    assert not (tmp_path / "f").exists()
    assert run("verify", artifact, "--report", tmp_path / "f", "--sarif", tmp_path / "g").code == 0


def test_the_neighbours_of_a_single_file_are_not_its_own(source, tmp_path):
    quantize(source, tmp_path / "made", "--dialect", "comfy")
    (tmp_path / "models").mkdir()
    weights = next((tmp_path / "made").glob("*.safetensors")).rename(
        tmp_path / "models" / "one.safetensors"
    )
    refused = run("verify", weights, "--report", weights, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (5, "output-exists")
    assert run("verify", weights, "--sarif", tmp_path / "models" / "f.sarif").code == 0
    assert [found["code"] for found in run("verify", weights, "--json").json["findings"]] == [
        "no-hashes"
    ]


def test_files_that_belong_together_take_their_names_together(tmp_path, monkeypatch):
    """A page of other artifacts beside new figures would be believed."""
    kind = Paper("--report", "FILE", "first")
    files = [tmp_path / name for name in ("page", "table")]
    for file in files:
        file.write_text("first, old")
    real = os.fsync

    def fail_second(fd: int) -> None:
        if (
            os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp")
            and len(list(tmp_path.iterdir())) > 3
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fail_second)
    with pytest.raises(OutputError, match="space"):
        write_papers(*((file, "first, new", kind) for file in files))
    assert [file.read_text() for file in files] == ["first, old"] * 2
    assert sorted(tmp_path.iterdir()) == files
    monkeypatch.undo()
    write_papers(*((file, "first, new", kind) for file in files))
    assert [file.read_text() for file in files] == ["first, new"] * 2
