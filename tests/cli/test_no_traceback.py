"""Inputs and limits that once ended in a traceback, through the real command: none is a bug."""

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    INDEX,
    Outcome,
    bf16,
    pack_header,
    pack_shard,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

from fp4convert.commands import quality
from fp4convert.execution.plan_file import ENDED, PLAN, STATE
from fp4convert.storage.checkpoint_files import RECORD, REPORT

BUG = 1
HUGE = 5 << 30  # bytes of a file that is a hole
MEMORY = 3 << 30  # bytes that a process may have
COMMANDS = {
    "inspect": ("inspect", "q"),
    "verify": ("verify", "q", "--source", "m"),
    "dequantize": ("dequantize", "q", "-o", "out"),
    "again": ("quantize", "m", "--format", "nvfp4", "-o", "q"),
    "dry-run": ("quantize", "m", "--format", "nvfp4", "--dry-run"),
}


@pytest.fixture
def place(tmp_path) -> Path:
    """A source m and its artifact q."""
    write_llama(tmp_path / "m")
    assert run("quantize", tmp_path / "m", "--format", "nvfp4", "-o", tmp_path / "q").code == 0
    return tmp_path


@pytest.fixture
def here(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    return place


def ended(*words: str) -> Outcome:
    """Of a command in this process; no bug of ours."""
    done = run(*words)
    assert done.code != BUG, done.err
    assert "Traceback" not in done.err
    return done


def outcome(place: Path, words: tuple[str, ...], limits: Callable[[], None]):
    """Of a command of its own process, under limits."""
    done = subprocess.run(
        [sys.executable, "-m", "fp4convert", *words],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limits,
    )
    assert done.returncode != BUG, done.stderr
    assert "Traceback" not in done.stderr
    return done


def small_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


OF_BOTH, OURS = ("config.json", INDEX), (RECORD, REPORT, f"{STATE}/{PLAN}", f"{STATE}/{ENDED}")


@pytest.mark.sweep(5)  # each command once, and each file
@pytest.mark.parametrize(
    ("command", "file"),
    [
        (command, file)
        for command in COMMANDS
        for file in (*OF_BOTH, *(OURS if command != "dry-run" else ()))
    ],
)
@pytest.mark.sweep(3)
def test_files_of_text_that_are_no_text(command, file, place):
    folder = place / ("m" if command == "dry-run" else "q")
    with (folder / file).open("r+b") as stream:
        stream.truncate(HUGE)
    done = outcome(place, COMMANDS[command], small_memory)
    if file in OF_BOTH and command != "again":
        assert done.returncode == 2
        assert "error[too-large]" in done.stderr


@pytest.mark.slow
def test_files_of_options_that_are_no_text(place):
    for name in ("r.toml", "g.json"):
        with (place / name).open("wb") as stream:
            stream.truncate(HUGE)
    dry_run = COMMANDS["dry-run"]
    done = outcome(place, (*dry_run, "--recipe", "r.toml"), small_memory)
    assert (done.returncode, "longer than" in done.stderr) == (2, True)
    done = outcome(place, (*dry_run, "--global-scale", "g.json"), small_memory)
    assert (done.returncode, "longer than" in done.stderr) == (2, True)
    outcome(place, (*dry_run, "--calibration", "g.json"), small_memory)


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize("text", ["(" * 2000 + "a" + ")" * 2000, "a{99999999999}"])
def test_expressions(text, option, here):
    done = ended(*COMMANDS["dry-run"], option, f"re:{text}")
    assert (done.code, "error[bad-pattern]" in done.err) == (2, True)
    record = json.loads((here / "q" / "config.json").read_text())
    record["quantization_config"]["ignore"] += [f"re:{text}"]
    (here / "q" / "config.json").write_text(json.dumps(record))
    assert ended(*COMMANDS["inspect"]).code == 6


def test_an_output_that_is_a_link_to_itself(here):
    (here / "loop").symlink_to("loop")
    quantize = ("quantize", "m", "--format", "nvfp4", "-o")
    assert ended(*quantize, "loop").code == 5
    assert ended(*quantize, "out", "--report", "loop").code == 5
    assert ended("inspect", "loop").code == 2
    assert ended("quantize", "loop", "--format", "nvfp4").code == 2


@pytest.mark.slow
def test_many_shards_with_few_open_files(tmp_path):
    """40 shards, and 32 files that may be open: mappings of shards are not kept forever."""
    shards = {
        f"model-{number:05d}-of-00040.safetensors": {
            f"model.layers.{number - 1}.mlp.up_proj.weight": weight(number, 16, 64)
        }
        for number in range(1, 41)
    }
    write_checkpoint(tmp_path / "m", shards)
    for words in (
        ("quantize", "m", "--format", "nvfp4", "-o", "q"),
        ("verify", "q", "--source", "m"),
        ("inspect", "q", "--full"),
        ("transcode", "q", "--dialect", "modelopt", "-o", "t"),
        ("dequantize", "q", "-o", "out"),
        ("compare", "q", "t", "--source", "m"),
        ("analyze", "m"),
    ):
        done = outcome(tmp_path, words, few_files)
        assert done.returncode in (0, 6), done.stderr
        assert done.returncode == 0 or words[0] in ("verify", "inspect")


@pytest.mark.parametrize(
    "limit",
    [(resource.RLIMIT_AS, 400 << 20), (resource.RLIMIT_NOFILE, 10)],
    ids=["memory", "files"],
)
def test_a_machine_that_gives_nothing(limit, place):
    number, most = limit
    words = ("quantize", "m", "--format", "nvfp4", "-o", "out")
    done = outcome(place, words, lambda: resource.setrlimit(number, (most, most)))
    assert done.returncode in (0, 5)
    assert done.returncode == 0 or "error[machine-limit]" in done.stderr


def test_a_disk_that_fails_where_nobody_looked_for_it(here, monkeypatch):
    def fail_at(options):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "q/config.json")

    def fail_below(options):
        try:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        except OSError as error:
            raise RuntimeError("of a package") from error

    for fail, words in (
        (fail_at, "q/config.json: its disk fails: Input/output error"),
        (fail_below, "a disk fails: Stale file handle"),
    ):
        monkeypatch.setattr(quality, "inspect", fail)
        done = ended("inspect", "q")
        assert (done.code, f"error[cannot-read]: {words}" in done.err) == (5, True)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 2500], ids=["name", "path"])
@pytest.mark.parametrize(
    "words",
    [
        ("attest", "q", "--key", "{}"),
        ("attest", "{}"),
        ("evaluate", "q", "--source", "m", "--text", "{}"),
        ("quantize", "{}", "--format", "nvfp4"),
        ("quantize", "m", "--format", "nvfp4", "-o", "{}"),
        ("reproduce", "{}"),
        ("inspect", "{}"),
        ("verify", "q", "--sarif", "{}.sarif"),
        ("verify", "q", "--report", "{}.html"),
    ],
    ids=" ".join,
)
def test_names_that_no_disk_allows(words, name, here):
    done = ended(*(word.format(name) for word in words))
    assert done.code in (2, 5)
    assert len(done.err) < 12_000


SECRETS = "hf_AbCdEfGhIjKlMnOpQrStUvWx", "https://me:secretpassword@huggingface.co/me/q"


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("is_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "{}", "--format", "nvfp4", "--dry-run"),
        ("quantize", "m", "--format", "nvfp4", "-o", "x", "--push-to-hub", "{}"),
        ("quantize", "m", "--format", "nvfp4", "-o", "x", "--push-to-hub", "{}/q"),
        ("quantize", "m", "--format", "nvfp4", "--dry-run", "--lora", "{}"),
        ("quantize", "m", "--format", "{}"),
        ("quantize", "m", "--format", "nvfp4", "--device", "{}", "-o", "x"),
        ("inspect", "{}"),
        ("verify", "q", "--source", "{}"),
        ("reproduce", "q", "--source", "{}"),
        ("{}",),
    ],
    ids=" ".join,
)
def test_a_secret_in_a_wrong_place_is_not_repeated(words, secret, is_json, here, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = ended(*(word.format(secret) for word in words), *(["--json"] if is_json else []))
    assert done.code in (2, 3, 4)
    assert "AbCd" not in done.out + done.err
    assert "secretpassword" not in done.out + done.err
    assert not (here / "x").exists()


def test_a_dry_run_refuses_a_push_as_the_run_does(here, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    words = (*COMMANDS["dry-run"][:-1], "-o", "x", "--push-to-hub", "me/q")
    for more in ((), ("--dry-run",)):  # huggingface_hub reads the variable once
        done = outcome(here, (*words, *more), few_files)
        assert (done.returncode, "error[offline]" in done.stderr) == (2, True)
    assert not (here / "x").exists()


def test_a_record_of_very_many_files(here):
    """A person reads a few of them, a program all."""
    record = json.loads((here / "q" / RECORD).read_text())
    record["files"] |= {f"f{number}.safetensors": "0" * 64 for number in range(20_000)}
    (here / "q" / RECORD).write_text(json.dumps(record))
    done = outcome(here, ("verify", "q", "--source", "m"), small_memory)
    assert (done.returncode, len(done.stdout.splitlines()) < 60) == (6, True)
    findings = ended("verify", "q", "--source", "m", "--json").json["findings"]
    assert sum(one["code"] == "file-missing" for one in findings) == 20_000


@pytest.mark.parametrize("letters", ["x", "x "], ids=["a-word", "words"])
def test_a_name_of_a_million_letters(letters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = "model.layers.0.mlp." + letters * (1_000_000 // len(letters))
    nan = ("BF16", (32, 64), bf16(32, 32) + b"\xc0\x7f" * 1024)
    write_single(tmp_path / "m", {f"{long}.weight": nan, "b.weight": weight(1)})
    write_single(tmp_path / "fine", {f"{long}.weight": weight(2), "b.weight": weight(1)})
    quantize = ("--format", "nvfp4", "-o", "q")
    refused = ended("quantize", "m", *quantize)
    left_out = shlex.split(refused.err.partition(" --exclude ")[2])
    assert ended("quantize", "m", *quantize, "--exclude", *left_out, "--dry-run").code == 0
    for expected, words in (
        (2, ("quantize", "m", *quantize)),
        (0, ("quantize", "fine", *quantize)),
        (0, ("quantize", "fine", "--format", "nvfp4", "--dry-run")),
        (0, ("inspect", "q")),
        (6, ("verify", "q", "--source", "m")),
    ):
        done = ended(*words)
        assert done.code == expected
        assert len(done.out + done.err) < 100_000


@pytest.mark.slow
def test_numbers_beyond_belief(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "e", {})
    entries = {
        f"t{number}": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
        for number in range(20_000)
    }
    (tmp_path / "e" / "model.safetensors").write_bytes(pack_header(json.dumps(entries).encode()))
    assert "error[no-linears]" in ended("quantize", "e", "--format", "nvfp4", "--dry-run").err
    nested = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "model.safetensors").write_bytes(pack_header(nested))
    assert ended("inspect", "n").code == 2
    (tmp_path / "n" / "model.safetensors").write_bytes(pack_shard({"a.weight": weight()}))
    (tmp_path / "n" / "config.json").write_bytes(nested)
    assert ended("inspect", "n").code == 2


def test_a_signalling_nan_is_an_error_and_no_warning_of_numpy(place):
    """bfloat16 0x7f81; a process of its own shows what Python warns of."""
    codes = np.full((64, 64), 0x3F80, np.uint16)
    codes[5, 7] = 0x7F81
    tensors = {"layers.0.mlp.up_proj.weight": ("BF16", codes.shape, codes.tobytes())}
    write_single(place / "nan", tensors)
    words = ("quantize", "nan", "--format", "nvfp4", "-o", "n")
    told = outcome(place, words, lambda: None)
    assert told.returncode == 2
    assert told.stderr.startswith("error[not-finite]: ")
    assert "Warning" not in told.stderr
