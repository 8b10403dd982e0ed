"""What the simulated worlds found in the real code: each fault by itself, on the real disk."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import run, write_llama

from fp4convert.execution import folder as folder_module
from fp4convert.storage.disk import hash_file
from fp4convert.storage.local import LocalSource

STATE = ".fp4convert"


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


def quantize(source: Path, out: Path):
    return run("quantize", source, "--format", "nvfp4", "-o", out, "--json")


def test_the_names_of_the_folders_above_are_on_the_disk_before_the_plan_is(
    source, tmp_path, monkeypatch
):
    """Else a power cut after the end takes the whole output; files in folders as well."""
    (source / "assets" / "deep").mkdir(parents=True)
    (source / "assets" / "deep" / "words.txt").write_bytes(b"words")
    out, flushed = tmp_path / "new" / "deep" / "out", []
    is_begun = {}

    def note(place: Path) -> None:
        flushed.append(place)
        is_begun.setdefault(place, (out / STATE / "plan.json").exists())

    monkeypatch.setattr("fp4convert.storage.disk.fsync_folder", note)
    monkeypatch.setattr(folder_module, "fsync_folder", note)
    assert quantize(source, out).code == 0
    above = (out, *out.parents[:3])
    assert out.parents[2] == tmp_path
    assert [is_begun.get(place) for place in above] == [False] * 4
    assert {out / "assets" / "deep", out / "assets"} <= set(flushed)


@pytest.mark.parametrize("taken", ["small-config.json", "small-0", "quantization_config.json"])
def test_a_process_whose_small_files_were_taken_away_is_told_so(
    taken, source, tmp_path, monkeypatch
):
    """As one that slept for longer than a minute: it was a traceback."""

    def hash_none(path: Path, *_: object) -> str:
        if path.name.endswith(taken):
            shutil.rmtree(path.parent)
        return hash_file(path)

    monkeypatch.setattr(folder_module, "hash_file", hash_none)
    outcome = quantize(source, tmp_path / "out")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "given-up")


def test_a_copy_whose_source_fails_does_not_blame_the_output(source, tmp_path, monkeypatch):
    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = LocalSource.open_file
    monkeypatch.setattr(
        LocalSource,
        "open_file",
        lambda self, file: Failing() if file == "tokenizer.json" else opened(self, file),
    )
    outcome = quantize(source, tmp_path / "out")
    assert outcome.code == 3
    assert outcome.json["error"]["code"] == "source-unreadable"
