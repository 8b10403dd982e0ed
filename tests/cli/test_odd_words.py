"""Words that no command should take, and secrets that no message should hold."""

from __future__ import annotations

import os

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


def test_an_option_is_no_value_of_another(tmp_path, monkeypatch):
    """-o without a word would write into a folder of the name --dry-run."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "M")
    outcome = run("quantize", "M", "--format", "nvfp4", "-o", "--dry-run")
    assert outcome.code == 2
    assert "-o has no value: --dry-run, an option, follows it" in outcome.err
    assert outcome.err.endswith("next: Write its value before --dry-run.\n")
    unknown = run("quantize", "M", "--format", "nvfp4", "-o", "--dry")
    assert unknown.err.endswith("is written ./--dry\n")
    assert [each.name for each in tmp_path.iterdir()] == ["M"]
    assert run("quantize", "M", "--format", "nvfp4", "-o", "./--dry-run").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "M", "--exclude", "--json"),
        ("verify", "M", "--source", "--json"),
        ("verify", "M", "--calibration", "--report=a.html", "--json"),
        ("calibrate", "M", "--text", "-o", "a", "--json"),
        ("quantize", "M", "--for", "--json"),
        ("quantize", "M", "--token", "-q", "--json"),
    ],
)
def test_an_option_of_the_command_is_the_value_of_none(words):
    outcome = run(*words)
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == (2, "usage")
    follows = words[3].partition("=")[0]
    assert error["message"] == f"{words[2]} has no value: {follows}, an option, follows it"
    assert error["next"] == f"Write its value before {follows}."


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("quantize", "M", "--recipe", "a", "--recipe=b"), "--recipe is given twice: 'a', 'b'"),
        (("dequantize", "M", "-oa", "-qo", "b"), "--output is given twice: 'a', 'b'"),
        (("calibrate", "M", "--dataset", "a", "--chat", "b"), "--dataset is given twice: 'a', 'b'"),
        (
            ("inspect", "M", "--for", *["vllm", "--for", "mlx", "--for", "vllm"]),
            "--for is given 3 times",
        ),
        (("verify", "M", "--token", "hf_a", "--token", "hf_b"), "--token is given twice; expected"),
    ],
)
def test_no_value_of_two_is_passed_over(words, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run(*words, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == (2, "usage")
    assert error["message"].startswith(found)
    assert error["next"] == f"Give {found.partition(' ')[0]} once."
    assert list(tmp_path.iterdir()) == []


def test_what_may_be_said_again_is_said_again(tmp_path):
    twice = ("--format", "nvfp4", "-q", "--exclude", "*.q_proj", "--dry-run") * 2
    more = ("--exclude", "*.k_proj", "--json")
    plan = run("quantize", write_llama(tmp_path / "M"), *twice, *more).json
    kept = {each["name"] for each in plan["tensors"] if each["reason"].startswith("excluded")}
    assert {name.split(".")[-2] for name in kept} == {"q_proj", "k_proj"}


def test_one_letter_means_nothing():
    assert "did you mean" not in run("recipes", "M").err


def test_a_folder_of_other_files_is_not_told_of_folders_in_it(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for given in (tmp_path, tmp_path / "notes.txt", os.devnull):
        error = run("inspect", given, "--json").json["error"]
        assert error["code"] == "no-weights"
        assert error["next"] == "Give the folder that holds the weights."


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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("CPU", "cpu"),
        ("cpu:0", "cpu"),
        ("gpu", "cuda"),
        ("GPU", "cuda"),
        ("Cuda", "cuda"),
        ("GPU:1", "cuda:1"),
        ("cuda0", "cuda:0"),
        ("1", "cuda:1"),
    ],
)
def test_a_device_that_is_nearly_one_gets_a_hint(given, meant, tmp_path):
    source = write_llama(tmp_path / "M")
    words = ("--format", "nvfp4", "-o", tmp_path / "Q", "--device", given, "--json")
    error = run("quantize", source, *words).json["error"]
    assert (error["exit"], error["code"]) == (2, "no-device")
    assert error["message"].endswith(f"; did you mean {meant}?")
    assert not (tmp_path / "Q").exists()


@pytest.mark.parametrize("given", ["", "tpu", "mps", "cuda:0:1", "cuda,1", "auto "])
def test_other_devices_get_none(given, tmp_path):
    source = write_llama(tmp_path / "M")
    told = run("quantize", source, "--format", "nvfp4", "--dry-run", "--device", given, "--json")
    assert told.json["error"]["message"].endswith("expected auto, cpu, cuda or cuda:N")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("huggingface.co/a/b", "a/b"),
        ("hf.co/a/b/", "a/b"),
        ("hf://a/b", "a/b"),
        ("hf://a/b@main/unet/x.safetensors", "a/b --revision main --subfolder unet"),
        ("a/b@main", "a/b --revision main"),
        ("a/b@v1.0", "a/b --revision v1.0"),
        ("https://huggingface.co/a/b/blob/main/x.safetensors", "a/b --revision main"),
        (
            "https://huggingface.co/a/b/resolve/refs%2Fpr%2F1/deep/er/x.safetensors?download=true",
            "a/b --revision refs/pr/1 --subfolder deep/er",
        ),
        ("huggingface.co/a/b/tree/it's me", """a/b --revision 'it'"'"'s me\'"""),
    ],
)
def test_an_address_is_answered_with_the_repository(given, meant):
    for command in (("quantize", given, "--format", "nvfp4"), ("inspect", given)):
        error = run(*command, "--json").json["error"]
        assert (error["exit"], error["code"]) == (2, "no-source")
        assert error["next"] == f"Name the repository: {meant}"


@pytest.mark.parametrize(
    "given", ["./a/b", "a/b/c", "https://example.com/a/b", "hf://a", "https://huggingface.co/a"]
)
def test_what_is_no_address_of_a_repository_gets_no_hint(given):
    error = run("inspect", given, "--json").json["error"]
    assert error["code"] == "no-source"
    assert "Name the repository" not in error["next"]


def test_a_hint_holds_no_token():
    secret = "hf_" + "S" * 30
    for given in (f"a/b@{secret}", f"hf://a/b@{secret}/x", f"huggingface.co/a/b?token={secret}"):
        outcome = run("inspect", given)
        assert secret not in outcome.out + outcome.err
