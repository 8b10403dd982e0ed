"""--revision means nothing where everything is on this disk: exit 2; --token and --memory stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FIRST, Outcome, read_folder, run, write_llama
from fakehub import TOKEN
from gguf_donors import model, write_donor

import fp4convert
from fp4convert.options.access import read_gigabytes


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    source = write_llama(tmp_path / "M")
    write_donor(tmp_path / "m.gguf", model())
    (tmp_path / "one.safetensors").write_bytes((source / FIRST).read_bytes())
    assert run("quantize", "M", "--format", "nvfp4", "-o", "Q").code == 0
    return tmp_path


COMMANDS = [
    ("quantize", "M", "--format", "nvfp4", "-o", "out"),
    ("quantize", "M", "--format", "nvfp4", "-o", "out", "--dry-run"),
    ("quantize", "M", "--for", "vllm", "-o", "out"),
    ("quantize", "one.safetensors", "--format", "nvfp4", "-o", "out"),
    ("quantize", "m.gguf", "--format", "mxfp4", "--dialect", "gguf", "-o", "out"),
    ("dequantize", "Q", "-o", "out"),
    ("transcode", "Q", "-o", "out", "--dialect", "modelopt"),
    ("inspect", "Q"),
    ("inspect", "Q", "--source", "M"),
    ("verify", "Q", "--source", "M"),
    ("compare", "Q", "Q", "--source", "M"),
    ("analyze", "M"),
    ("calibrate", "M", "-o", "c.safetensors", "--self-generate", "1"),
    ("prune", "M", "-o", "out", "--calibration", "c.safetensors", "--keep", "1"),
]


def refused(outcome: Outcome, option: str) -> None:
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == (2, "idle-option"), outcome.err
    assert error["message"].startswith(option)
    assert " is for " in error["message"]
    assert error["next"].startswith(f"Leave {option} out")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_of_every_command(words, places):
    before = sorted(places.rglob("*"))
    refused(run(*words, "--revision=v1", "--json"), "--revision")
    assert sorted(places.rglob("*")) == before


def test_one_script_serves_folders_and_repositories(places):
    harmless = ("--token=hf_mine", "--memory=2")
    assert run("quantize", "M", "--format", "nvfp4", "-o", "P", *harmless).code == 0
    assert (places / "P" / FIRST).read_bytes() == (places / "Q" / FIRST).read_bytes()
    outcome = run("verify", "P", "--source", "M", "--token=hf_mine")
    assert outcome.code == 0
    assert "hf_mine" not in f"{outcome.out}{outcome.err}{read_folder(places / 'P')}"


def test_they_are_taken_for_what_is_on_the_hub(places, hub):
    hub.add("org/m", places / "M")
    hub.add("org/q", places / "Q")
    asked = ("--memory=2", "--token=", "--revision=main")
    assert run("quantize", "org/m", "--format", "nvfp4", "-o", "out", *asked).code == 0
    assert run("inspect", "org/q", "--revision=main").code == 0
    assert run("verify", "org/q", "--source", "M", "--revision=main").code == 0
    # The source of an artifact has a revision of its own.
    verify = ("verify", "Q", "--source", "org/m", "--json")
    refused(run(*verify, "--revision=main"), "--revision")
    assert run(*verify).code == 0
    # A token may write, too.
    push = ("--push-to-hub", "org/new", f"--token={TOKEN}", "--dry-run")
    assert run("quantize", "M", "--format", "nvfp4", "-o", "other", *push).code == 0


def test_from_python(places):
    with pytest.raises(fp4convert.InputError, match="--revision is for the Hub, and M is here"):
        fp4convert.inspect("M", revision="v1")
    with pytest.raises(fp4convert.InputError, match="Q and M are here"):
        fp4convert.compare(["Q", "M"], source="M", revision="v1")


def test_what_is_nowhere_is_told_first(tmp_path):
    outcome = run("inspect", tmp_path / "nothing", "--revision=v1", "--json")
    assert outcome.json["error"]["code"] == "no-source"


def test_options_of_the_other_way_to_calibrate(places):
    pytest.importorskip("torch")
    (places / "a.txt").write_text("Some words.")
    asked = ("calibrate", "M", "-o", "c.safetensors", "--json")
    refused(run(*asked, "--text", "a.txt", "--hold=2"), "--hold")
    outcome = run(*asked, "--self-generate=2", "--samples=3")
    assert outcome.json["error"]["code"] == "idle-option"
    assert outcome.json["error"]["next"] == "Write --self-generate 3, without --samples."


@pytest.mark.parametrize(("text", "gigabytes"), [("24", 24), ("24GB", 24), ("1 GiB", 1.073741824)])
def test_sizes_have_units(text, gigabytes):
    assert read_gigabytes(text) == pytest.approx(gigabytes)


def test_a_word_that_is_no_size(places):
    outcome = run("quantize", "M", "--format", "nvfp4", "-o", "out", "--target-size", "nix")
    assert outcome.code == 2
    assert "nix is no size; expected a number of GB: 24, 24GB or 22.4GiB" in outcome.err
