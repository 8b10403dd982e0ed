"""Lines that messages suggest can be copied into a shell, whatever names hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    WAIT_SECONDS,
    hidden_characters,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from pruned_deepseek import DEEPSEEK, calibrated, deepseek_shards

from fp4convert.errors import shell_line

NAMES = [
    "a b",
    "em pty's",
    'quo"te',
    "back\\slash",
    "$HOME `id` $(id) !!",
    "*?[a]",
    "~",
    "#x",
    "new\nline",
    "bell\x07 \x1b[31m it's \\",
    "\x01" + "23",  # digits behind what is written in digits
    "bidi\u202e",
    "no-break\u00a0space",
    "\u6a21\u578b",
    "bytes\udcff\udcfe",
    "ends.",
    "",
    "-o",
]


def words_of(line: str) -> list[str]:
    """The words that bash makes of a line."""
    told = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {line}'], check=True, capture_output=True, timeout=60
    )
    return [os.fsdecode(word) for word in told.stdout.split(b"\0")[:-1]]


def test_a_shell_reads_the_words_that_were_meant():
    line = shell_line("fp4convert", *NAMES)
    assert words_of(line) == ["fp4convert", *NAMES]
    assert hidden_characters(line) == []
    assert "\n" not in line


def test_plain_words_stay_plain():
    assert shell_line("vllm", "serve", "./M-NVFP4", ".", "..", "a/..") == (
        "vllm serve ./M-NVFP4 . .. a/.."
    )


def test_a_stop_belongs_to_the_name_or_is_not_there():
    assert shell_line("M.") == "'M.'"


def test_a_path_is_no_option():
    assert shell_line(Path("-o"), Path("a"), "-o") == "./-o a -o"


def next_of(outcome) -> str:
    return outcome.err.splitlines()[-1].removeprefix(" next: ")


@pytest.mark.parametrize("name", ["em pty's", "ends.", "-x", "es\x1bc", "two\nlines"])
def test_an_empty_folder_names_itself_so_that_it_can_be_typed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    outcome = run("inspect", f"./{name}")
    assert outcome.code == 2
    line = next_of(outcome).removeprefix("It is empty: ")
    assert hidden_characters(outcome.err) == []
    assert words_of(line)[:4] == ["hf", "download", "ORG/NAME", "--local-dir"]
    assert (Path(words_of(line)[4])).resolve() == tmp_path / name


@pytest.mark.parametrize("name", ["out it's.", "-o", "es\x1bc"])
def test_next_steps_of_a_result_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_llama(tmp_path / "so urce")
    done = run("quantize", source, "--format", "nvfp4", "-o", f"./{name}", "--json")
    words = words_of(done.json["next"][0])
    assert words[:2] == ["fp4convert", "verify"]
    assert not words[2].startswith("-")
    assert run(*words[1:]).code == 0


@pytest.mark.parametrize(
    "module", ["[/foo]", "a b's", "es\x1bc\u202e", "re:x", "-x", "st*r", "line\nbreak", "ends."]
)
def test_what_excludes_an_unsound_matrix_excludes_it(module, tmp_path):
    unsound = ("F32", (32, 64), np.full((32, 64), np.nan, np.float32).tobytes())
    source = write_single(
        tmp_path / "source", {"model.o_proj.weight": weight(), f"{module}.weight": unsound}
    )
    asked = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    refused = run(*asked)
    assert refused.code == 2
    assert hidden_characters(refused.err) == []
    step = next_of(refused)
    _, _, options = step.partition(" --exclude ")
    assert run(*asked, *words_of(f"--exclude {options}")).code == 0


def test_a_name_that_collides_is_excluded_as_it_is(tmp_path):
    """What a shell's glob would not match: the brackets stand for themselves."""
    from fp4convert.recipes.patterns import exclude_option, matches

    for module in ("[/foo]", "re:a.*", "a?*", "[!x]", "it's"):
        _, pattern = words_of(exclude_option(module))
        assert matches(pattern, module)
        assert not matches(pattern, "/")
        assert not matches(pattern, "re:abc")


def test_a_word_that_is_a_model_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "my model")
    line = next_of(run("my model")).removeprefix("To convert it: ")
    assert words_of(line) == ["fp4convert", "quantize", "my model", "--format", "nvfp4"]


@pytest.mark.parametrize("name", ["it's a.gguf", "-m.gguf"])
def test_the_folder_that_a_file_s_name_becomes_is_quoted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run("quantize", write_llama(tmp_path / "M"), "--format", "nvfp4", "-o", name)
    assert outcome.code == 2
    words = words_of(next_of(outcome).removeprefix("Leave the ending out: "))
    assert words[0] == "-o"
    assert Path(words[1]).resolve() == tmp_path / name.removesuffix(".gguf")


PLACES = ['it\'s a "quote" $HOME `id`', "-x es\x1bc"]
VLLM = '#!/bin/bash\n[ "$1" = serve ] && [ -f "$2/config.json" ] && echo served\n'


@pytest.fixture
def shell(tmp_path):
    """Run a line as a person does, in that folder; `vllm` looks for the model it is to serve."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(VLLM)
    (programs / "vllm").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])

    def type_line(line: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            check=False,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    return type_line


def printed_steps(told: str) -> list[str]:
    """What stands after "next: ", and below it."""
    _, _, steps = told.rpartition("next: ")
    return [line.strip() for line in steps.splitlines()]


@pytest.mark.parametrize("name", PLACES)
def test_next_lines_of_every_command_run_as_printed(name, shell, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    source, out, other = (f"./{name} {word}" for word in ("source", "out", "other"))
    write_llama(Path(source))
    made = printed_steps(run("quantize", source, "--for", "vllm", "-o", out).out)
    assert [words_of(line)[0] for line in made] == ["fp4convert", "vllm"]
    assert words_of(made[0])[-2:] == ["--source", source]
    carried = printed_steps(run("transcode", out, "-o", other, "--dialect", "modelopt").out)
    assert [words_of(line)[0] for line in carried] == ["fp4convert", "vllm"]
    for line in (*made, *carried):
        assert shell(line, here)
    restored = run("dequantize", out, "-o", f"{other} 2")
    assert (restored.code, "next" in restored.out) == (0, False)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.sweep(2)
def test_merge_says_what_was_made_from_what_and_for_whom(name, shell, tmp_path, monkeypatch):
    """What whoever began it knew; in any folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    source, out = f"./{name} source", f"./{name} out"
    write_llama(Path(source))
    asked = ("quantize", source, "--for", "sglang", "-o", out)
    for index in range(2):
        outcome = run(*asked, "--shard-index", index, "--num-shards", 2)
        told = outcome.out.splitlines()
        lines = (outcome.out + outcome.err).splitlines()
        assert [line for line in lines if "fp4convert merge" in line] == [told[-1]]
        if index == 0:
            assert "of parts, those that are left" in run("merge", out).err
    drawn = printed_steps(shell(told[-1].strip(), here))
    steps = run("merge", out, "--json").json["next"]
    assert drawn == steps
    place = here / f"{name} out"
    verify, serve = map(words_of, steps)
    whole = [str(place), "--source", str(here / f"{name} source")]
    assert verify == ["fp4convert", "verify", *whole]
    assert serve == ["python", "-m", "sglang.launch_server", "--model-path", str(place)]
    shell(steps[0], there)
    assert "next: " not in run("merge", out, "-q").out
    moved = there / f"{name} moved"
    place.rename(moved)
    (alone,) = run("merge", moved, "--json").json["next"]
    assert words_of(alone) == ["fp4convert", "verify", str(moved)]
    shell(alone, there)


def test_a_pruned_model_is_quantized_by_the_next_line(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, (name, _) = write_checkpoint(tmp_path / "source", deepseek_shards(), DEEPSEEK), PLACES
    asked = ("prune", source, "--calibration", calibrated(source), "--keep", 4, "-o")
    (line,) = printed_steps(run(*asked, name).out)
    assert words_of(line) == ["fp4convert", "quantize", name, "--format", "nvfp4"]
    assert f"{name}-NVFP4" in shell(line, tmp_path)
    for index in range(2):
        part = ("--shard-index", index, "--num-shards", 2)
        told = run(*asked, "parts", *part).out.splitlines()
    (line,) = printed_steps(shell(told[-1].strip(), tmp_path))
    assert words_of(line)[2] == str(tmp_path / "parts")
