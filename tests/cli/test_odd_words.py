"""Words that no command should take, and secrets that no message should hold."""

from __future__ import annotations

import pytest
from checkpoints import run, write_llama

import fp4convert
from fp4convert.errors import InputError

LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "M", "--format", "nvfp4", "-o", ""),
        ("verify", "M", "--source", ""),
        ("inspect", "M", "--source="),
        ("quantize", "M", "--format", "nvfp4", "--revision", ""),
    ],
)
def test_an_empty_word_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run(*words)
    assert outcome.code == 2
    assert "is empty" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_token_is_none(tmp_path):
    source = write_llama(tmp_path / "M")
    assert run("quantize", source, "--format", "nvfp4", "--token", "", "--dry-run").code == 0


def test_an_empty_source_is_refused_in_python(tmp_path):
    with pytest.raises(InputError, match="--source is empty"):
        fp4convert.verify(tmp_path, source="")


@pytest.mark.parametrize(
    "words",
    [
        (LONG, "--format", "nvfp4"),
        ("M", "--format", "nvfp4", "--subfolder", LONG),
        ("M", "--format", "nvfp4", "--report", f"{LONG}.html"),
    ],
)
def test_a_name_that_no_disk_has_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "M")
    outcome = run("quantize", *words, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["code"] == ("no-source" if words[0] == LONG else "usage")


@pytest.mark.parametrize(
    "source",
    [
        "https://user:hf_mySECRET@huggingface.co/Qwen/Qwen3-8B",
        "https://hf_mySECRET@huggingface.co/a/b",
        "https://huggingface.co/a/b?token=hf_mySECRET",
        "user:hf_mySECRET@huggingface.co/a",
    ],
)
def test_no_message_holds_a_secret_of_an_address(source):
    for words in ((), ("--json",)):
        outcome = run("quantize", source, "--format", "nvfp4", "--dry-run", *words)
        assert outcome.code != 0
        assert "SECRET" not in outcome.out + outcome.err
        assert "***" in outcome.out + outcome.err


def test_a_dry_run_measures_with_as_many_threads_as_help(tmp_path):
    source = write_llama(tmp_path / "M")
    words = ("--format", "nvfp4", "--dry-run", "--workers", 10**12)
    assert run("quantize", source, *words).code == 0
