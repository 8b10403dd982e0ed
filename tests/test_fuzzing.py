"""Damaged input ends in an answer: the committed seeds, and changes of each.

`make fuzz` lets coverage guide the changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing.targets import CORPUS, TARGETS, SlowError, check
from paths import ROOT, SUPPORT

FEW, MANY = 3, 400  # changes of each seed


def fuzzed(*words: object) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, whose memory has an end."""
    return subprocess.run(
        [sys.executable, "-m", "fuzzing", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        cwd=ROOT,
    )


def test_every_seed_and_some_changes_of_it():
    ended = fuzzed("--changes", FEW)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seeds = sum(len(list((CORPUS / name).iterdir())) for name in TARGETS)
    assert ended.stdout.startswith(f"{seeds * (1 + FEW)} inputs, 0 faults")


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_changes(name):
    ended = fuzzed("--target", name, "--first", FEW, "--changes", MANY)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def spin(*_: object) -> None:
    while True:
        pass


def fail(*_: object) -> None:
    raise KeyError("a bug")


def fill(*_: object) -> None:
    raise MemoryError


FAULTS = [
    ("safetensors", "fp4convert.storage.safetensors.read_together", fail, KeyError),
    ("source", "fp4convert.storage.local.read_index", fail, KeyError),
    ("artifact", "fp4convert.checkpoint.artifact.groups_recorded", fill, AssertionError),
    ("patterns", "fp4convert.recipes.patterns.compiled", spin, SlowError),
]


@pytest.mark.parametrize(("name", "place", "fault", "expected"), FAULTS)
def test_faults_are_seen(name, place, fault, expected, tmp_path, monkeypatch):
    """A bug, a bug behind the command line, no memory, no end."""
    monkeypatch.setattr("fuzzing.targets.SECONDS", 1)
    seeds = {"source": "split.json", "artifact": "ours.json"}
    seed = (CORPUS / name / seeds[name]) if name in seeds else sorted((CORPUS / name).iterdir())[0]
    check(name, seed.read_bytes(), tmp_path)
    monkeypatch.setattr(place, fault)
    with pytest.raises(expected):
        check(name, seed.read_bytes(), tmp_path)


def test_a_file_without_a_name_is_none(tmp_path):
    """It was the folder itself, which the harness then made again."""
    for name in ("calibration", "calibrated", "artifact", "source"):
        check(name, b'{"": ""}', tmp_path)


def write_above(data: bytes, place: Path) -> None:
    (place.parent.parent / "made").write_text("x")


def change_above(data: bytes, place: Path) -> None:
    (place.parent.parent / "kept").chmod(0o600)


@pytest.mark.parametrize("target", [write_above, change_above])
def test_files_outside_are_seen(target, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "kept").write_text("x")
    monkeypatch.setitem(TARGETS, "patterns", target)
    with pytest.raises(AssertionError, match="outside of its folder"):
        check("patterns", b"", tmp_path / "scratch")
