"""Every error ends with one next step: what the place that raises it knows, or what the catalogue
says of its code.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    LAYER,
    hidden_characters,
    pack_header,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

import fp4convert
from fp4convert import errors
from fp4convert.cli.screen import Screen
from fp4convert.report.text import explanations

KINDS = {
    kind.exit_code: kind
    for kind in errors.Fp4Error.__subclasses__()
    if kind not in (errors.DeviceError, errors.Interrupted)
}
SENTENCE = re.compile(r"[A-Z][a-z]+[ :,].{8,}\.")
HOSTILE = "\n next: sh evil\x1b[31m\u202e"


def next_line(err: str) -> str:
    """What comes after "next:" in what a person sees; the last line,
    and the only one of its kind.
    """
    lines = err.splitlines()
    assert lines[0].startswith("error[")
    assert [line.lstrip().startswith("next: ") for line in lines] == [False] * (len(lines) - 1) + [
        True
    ]
    return lines[-1].removeprefix(" next: ")


def codes() -> list[tuple[str, int]]:
    """(code, exit code) of every error that ends a command so."""
    rows = explanations("errors").items()
    return [(code, end) for code, row in rows for end in row["exits"] if end in KINDS]


def test_no_code_is_left_out():
    assert {code for code, _ in codes()} == set(explanations("errors")) - {"interrupted", "bug"}


@pytest.mark.parametrize("is_json", [False, True])
def test_every_code_prints_a_next_step(is_json, capsys):
    for code, exit_code in codes():
        Screen(is_json).fail(KINDS[exit_code](code, "a file: 1 byte; expected 2"))
        printed = capsys.readouterr()
        told = next_line(printed.err)
        assert SENTENCE.fullmatch(told), code
        assert "`" not in told, code
        if is_json:
            assert json.loads(printed.out)["error"]["next"] == told, code


def test_what_the_place_knows_stands_alone():
    assert errors.InputError("header", "x", "Do this.").next_step == "Do this."
    assert (
        errors.InputError("header", "x").next_step
        == "Download the file again, or correct it where it is a .json file."
    )
    assert (
        errors.InputError("no-source", "x").next_step
        == "Check the path or the name for a typing error."
    )  # its first
    assert errors.InputError("no-such-code", "x").next_step == ""


def test_an_error_is_told_where_no_file_can_be_opened():
    script = """if True:
        import os, resource
        from fp4convert.cli.screen import Screen
        from fp4convert.errors import OutputError
        screen, error = Screen(), OutputError("cannot-write", "x")
        lowest = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
        screen.fail(error)
    """
    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert next_line(told.stderr) == "See what it means: fp4convert explain cannot-write"


def recipe(text: str):
    def write(folder: Path) -> list[object]:
        (folder / "own.toml").write_text(text, encoding="utf-8")
        return [write_llama(folder / "source"), "--recipe", folder / "own.toml"]

    return write


def options(*given: str):
    return lambda folder: [write_llama(folder / "source"), *given]


def index(text: str):
    return lambda folder: [
        write_llama(folder / "source", **{"model.safetensors.index.json": text.encode()})
    ]


def config(text: bytes):
    return lambda folder: [write_llama(folder / "source", **{"config.json": text})]


def shard(content: bytes):
    def write(folder: Path) -> list[object]:
        (folder / "source").mkdir()
        (folder / "source" / "model.safetensors").write_bytes(content)
        return [folder / "source"]

    return write


def linked(folder: Path) -> list[object]:
    source = write_llama(folder / "source")
    (folder / "elsewhere.json").write_text("{}", encoding="utf-8")
    (source / "tokenizer.json").symlink_to(folder / "elsewhere.json")
    return [source]


def linked_to_itself(folder: Path) -> list[object]:
    source = write_llama(folder / "source")
    (source / "tokenizer.json").symlink_to("tokenizer.json")
    return [source]


def empty(folder: Path) -> list[object]:
    (folder / "source").mkdir()
    return [folder / "source"]


RARE = [
    ("bad-pattern", options("--exclude", "re:("), "use a glob"),
    ("bad-pattern", options("--exclude", r"re:(.|.)+$(?<!j)"), "use a glob"),
    (
        "bad-pattern",
        recipe("[[keep]]\nmodules = ['model.layers.{x y:2}.*']\nreason = 'r'"),
        "use a glob",
    ),
    (
        "layer-range",
        recipe("[[keep]]\nmodules = ['model.layers.{0:9999}.*']\nreason = 'r'"),
        "Correct the range",
    ),
    ("recipe-file", recipe("keep = 3"), "docs/recipes.md"),
    ("recipe-file", recipe("= 3"), "docs/recipes.md"),
    ("recipe-file", options("--recipe", "not-there.toml"), "UTF-8 text that this user may read"),
    ("recipe-cycle", recipe("base = 'own.toml'"), "Remove one base"),
    ("unknown-dialect", options("--dialect", "klingon"), "that the message names"),
    ("unknown-stack", options("--stack-order", "up_down"), "Give one of these"),
    (
        "unknown-stack",
        options("--stack-rows", "concatenated"),
        "Add --stack-order out_in or in_out.",
    ),
    ("share", options("--join", "--num-shards", "2"), "--join"),
    ("repo-name", options("--push-to-hub", "no name"), "--push-to-hub ORG/NAME"),
    ("no-source", lambda folder: ["./nothing/here/at/all"], "typing error"),
    ("no-source", lambda folder: ["x" * 5000], "typing error"),
    ("no-weights", empty, "hf download ORG/NAME"),
    ("index", index('{"weight_map": {}}'), "Download the index"),
    ("index", index('{"weight_map": {"a": 3}}'), "Download the index"),
    ("index", index('{"weight_map": {"a": "A.safetensors", "b": "a.safetensors"}}'), "Rename one"),
    (
        "index-outside",
        index('{"weight_map": {"a": "../a.safetensors"}}'),
        "Do not use this checkpoint",
    ),
    ("header", shard(pack_header(b"{]")), "Download the file again"),
    ("header-utf8", shard(pack_header(b'{"\xff": 1}')), "Download the file again"),
    ("header", config(b"[]"), "correct it where it is a .json file"),
    ("duplicate-key", config(b'{"a": 1, "a": 2}'), "correct it where it is a .json file"),
    ("link-outside", linked, "in place of the link"),
    ("unreadable", linked_to_itself, "that this user may read it"),
]


@pytest.mark.parametrize(
    ("code", "write", "step"),
    RARE,
    ids=[f"{number}-{code}" for number, (code, *_) in enumerate(RARE)],
)
def test_rare_errors_of_commands(code, write, step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("quantize", *write(tmp_path), "--format", "nvfp4", "-o", tmp_path / "out")
    asked, seen = run(*arguments, "--json"), run(*arguments)
    assert (asked.code, asked.json["error"]["code"]) == (2, code)
    assert list(asked.json["error"]) == ["code", "exit", "message", "tensor", "next"]
    told = next_line(seen.err)
    assert told == asked.json["error"]["next"]
    assert step in told
    assert not hidden_characters(seen.err)


def test_rare_errors_of_other_commands(tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    assert (
        next_line(run("dequantize", out, "-o", tmp_path / "wide", "--dtype", "fp64").err)
        == "Choose bf16, fp16 or fp32."
    )
    (tmp_path / "file").write_bytes(b"")
    below = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "file" / "out")
    assert (below.code, "this user may write" in next_line(below.err)) == (5, True)
    record = json.loads((out / "quantization_config.json").read_text(encoding="utf-8"))
    (out / "quantization_config.json").write_text(
        json.dumps({**record, "format": "mixed"}), encoding="utf-8"
    )
    assert "with the version that wrote it" in next_line(
        run("dequantize", out, "-o", tmp_path / "wide").err
    )


def test_from_python_a_next_step_does_not_speak_of_options():
    with pytest.raises(fp4convert.Fp4Error) as caught:
        fp4convert.quantize_tensor(np.full((1, 16), np.nan, np.float32), format="nvfp4")
    assert caught.value.next_step == "Correct the matrix, or do not quantize it."
    with pytest.raises(fp4convert.Fp4Error) as caught:
        fp4convert.quantize_tensor([[1.0]], format="nvfp4")
    assert caught.value.next_step == "Make an array of them: numpy.asarray(x, numpy.float32)."
    with pytest.raises(fp4convert.Fp4Error) as caught:
        fp4convert.quantize_tensor(np.ones((1, 31), np.float32), format="mxfp4")
    assert caught.value.next_step == "Pad its columns with zeros to a multiple of 32."
    for given in (None, np.ones((1, 16), np.float32)):
        with pytest.raises(fp4convert.Fp4Error) as caught:
            fp4convert.dequantize_tensor(given)
        assert caught.value.next_step == "Give what quantize_tensor returned."
    large = fp4convert.quantize_tensor(np.full((1, 16), 1e6, np.float32), format="nvfp4")
    with pytest.raises(fp4convert.Fp4Error) as caught:
        fp4convert.dequantize_tensor(large, "fp16")
    assert caught.value.next_step == "Choose the dtype bf16 or fp32."


def test_names_in_a_checkpoint_forge_no_next_step(tmp_path):
    """A tensor's name with a line of its own; of two unsound tensors each has a line, and the next
    step names both.
    """
    unsound = ("F32", (32, 64), np.full((32, 64), np.nan, np.float32).tobytes())
    names = [f"{LAYER}.mlp.{name}_proj{HOSTILE}.weight" for name in ("up", "down")]
    source = write_single(
        tmp_path / "source",
        {f"{LAYER}.self_attn.o_proj.weight": weight(), **dict.fromkeys(names, unsound)},
    )
    outcome = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    assert outcome.code == 2
    told = [line for line in outcome.err.splitlines() if not line.startswith("warning: ")]
    assert next_line("\n".join(told)).count("--exclude") == 2
    assert len(told) == 3
    assert not hidden_characters(outcome.err)


def test_a_name_of_a_file_forges_no_next_step(tmp_path):
    """The shard's name stands bare in the message of a header that is none."""
    source = write_checkpoint(
        tmp_path / "source", {}, None, **{f"model{HOSTILE}.safetensors": pack_header(b"{]")}
    )
    outcome = run("inspect", source)
    assert "Download the file again" in next_line(outcome.err)
    assert not hidden_characters(outcome.err)
    assert "sh evil" in outcome.err
