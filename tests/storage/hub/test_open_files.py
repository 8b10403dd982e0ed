"""In Python's development mode no file or connection is told of that was left open."""

import subprocess
import sys

import pytest
from checkpoints import run, write_llama

PLAIN = ("--format", "nvfp4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source, and what was made of it."""
    folder = tmp_path_factory.mktemp("folders")
    source = write_llama(folder / "m")
    assert run("quantize", source, *PLAIN, "-o", folder / "q").code == 0
    return source, folder / "q"


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "org/m", *PLAIN, "-o", "OUT"),
        ("quantize", "org/m", *PLAIN, "-o", "OUT", "--dry-run"),
        ("quantize", "M", *PLAIN, "-o", "OUT", "--push-to-hub", "me/q", "--no-keep"),
        ("quantize", "org/nothing", *PLAIN, "-o", "OUT"),
        ("inspect", "org/q", "--source", "org/m"),
        ("verify", "org/q", "--source", "org/m"),
        ("verify", "org/m"),
        ("reproduce", "org/q", "--source", "org/m"),
    ],
    ids=" ".join,
)
def test_development_mode_has_nothing_to_say(words, folders, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    source, made = folders
    hub.add("org/m", source)
    hub.add("org/q", made)
    places = {"OUT": str(tmp_path / "out"), "M": str(source)}
    command = [sys.executable, "-X", "dev", "-m", "fp4convert"]
    command += [places.get(word, word) for word in words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == (2 if "org/nothing" in words or words[1:] == ("org/m",) else 0)
    assert "ResourceWarning" not in ended.stderr, ended.stderr
