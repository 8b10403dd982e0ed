"""Where a result goes: folders, named after the model."""

import os
import shutil

import pytest
from checkpoints import LAYER, done, run, weight, write_llama, write_single
from gguf_donors import model, write_donor

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.mark.parametrize("ending", ["gguf", "safetensors"])
@pytest.mark.parametrize("command", ["quantize", "dequantize", "transcode", "prune"])
def test_a_name_of_a_file_is_refused(command, ending, tmp_path):
    source = write_llama(tmp_path / "m")
    more = {
        "quantize": ("--format", "nvfp4"),
        "transcode": ("--dialect", "modelopt"),
        "prune": ("--calibration", "x", "--keep", 1),
    }.get(command, ())
    outcome = run(command, source, "-o", tmp_path / f"x.{ending}", *more, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "output-name")
    assert f"x.{ending} names a file, and a folder is written" in outcome.json["error"]["message"]
    assert os.listdir(tmp_path) == ["m"]


def test_the_file_in_the_folder_is_named(tmp_path):
    source = write_donor(tmp_path / "llama-bf16.gguf", model())
    asked = ("quantize", source, "--format", "mxfp4", "--dialect", "gguf")
    error = run(*asked, "-o", tmp_path / "g.gguf", "--json").json["error"]
    assert error["message"].endswith("with llama-bf16.gguf in it; expected a folder's name")
    assert error["next"] == f"Leave the ending out: -o {tmp_path / 'g'}"
    done(*asked, "-o", tmp_path / "g")
    assert [path.name for path in (tmp_path / "g").glob("*.gguf")] == ["llama-MXFP4.gguf"]


def test_a_snapshot_is_named_after_its_model(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--My-1.5B" / "snapshots" / COMMIT
    write_single(snapshot, {f"{LAYER}.o_proj.weight": weight()})
    monkeypatch.chdir(tmp_path)
    planned = run("quantize", snapshot, "--format", "nvfp4", "--json")
    assert planned.json["output"] == "My-1.5B-NVFP4"
    refused = run("quantize", snapshot.parents[1], "--format", "nvfp4", "--json").json["error"]
    assert refused["code"] == "no-weights"
    assert refused["next"].endswith(f"give a snapshot in it: {snapshot}")


@pytest.mark.parametrize(("inside", "source"), [(".", "."), ("..", COMMIT), ("sub", "..")])
def test_nothing_is_written_into_the_cache(inside, source, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--My-1.5B" / "snapshots" / COMMIT
    write_single(snapshot, {f"{LAYER}.o_proj.weight": weight()})
    (snapshot / "sub").mkdir()
    monkeypatch.chdir(snapshot / inside)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for dry in ((), ("--dry-run",)):
        error = run("quantize", source, "--format", "nvfp4", "--json", *dry).json["error"]
        assert (error["exit"], error["code"]) == (2, "output-in-source")
        assert error["next"] == f"Name one: -o {tmp_path / 'home' / 'My-1.5B-NVFP4'}"
    assert os.listdir(snapshot.parent) == [COMMIT]
    words = error["next"].removeprefix("Name one: ").split()
    done("quantize", source, "--format", "nvfp4", *words)


@pytest.mark.parametrize("inside", [".", "sub"])
def test_the_current_folder_becomes_one_beside_it(inside, tmp_path, monkeypatch):
    source = write_single(tmp_path / "Model", {f"{LAYER}.o_proj.weight": weight()})
    (source / "sub").mkdir()
    monkeypatch.chdir(source / inside)
    reference = "." if inside == "." else ".."
    told = run("quantize", reference, "--format", "nvfp4", "--json").json
    made = told["output"]
    assert told["next"][1] == f"vllm serve {made}"
    assert os.path.realpath(made) == str(tmp_path / "Model-NVFP4")
    assert (tmp_path / "Model-NVFP4" / "quantization_config.json").is_file()


def test_a_place_without_weights_says_which_to_give(tmp_path):
    (tmp_path / "empty").mkdir()
    empty = run("quantize", tmp_path / "empty", "--format", "nvfp4", "--json").json["error"]
    assert empty["next"].startswith("It is empty: hf download ORG/NAME --local-dir ")
    source = write_llama(tmp_path / "m")
    shutil.copy(source / "config.json", tmp_path / "config.json")
    config = run("quantize", source / "config.json", "--format", "nvfp4", "--json").json["error"]
    assert (config["code"], config["next"]) == ("no-weights", f"Give the folder: {source}")


@pytest.mark.parametrize("shards", [1, 2])
def test_an_unfinished_output_says_what_continues(shards, tmp_path):
    source, out = tmp_path / "m", tmp_path / "out"
    write_llama(source) if shards == 2 else write_single(
        source, {f"{LAYER}.o_proj.weight": weight()}
    )
    done("quantize", source, "--format", "nvfp4", "-o", out)
    for path in [path for path in out.iterdir() if path.is_file()]:
        path.unlink()
    for words in (
        ("quantize", out, "--format", "mxfp4", "-o", tmp_path / "x"),
        ("dequantize", out, "-o", tmp_path / "x"),
        ("transcode", out, "--dialect", "modelopt", "-o", tmp_path / "x"),
        ("analyze", out),
    ):
        error = run(*words, "--json").json["error"]
        assert error["exit"] == 2, words
        assert "run its command again, which continues" in error["next"], words
    done("quantize", source, "--format", "nvfp4", "-o", out)


def test_the_source_s_own_folder_is_called_so(tmp_path):
    source = write_llama(tmp_path / "m")
    for place, said in ((".", "is the source's own folder"), ("q", "lies inside the source")):
        asked = ("quantize", source, "--format", "nvfp4", "-o", f"{source}/{place}", "--json")
        for dry in ((), ("--dry-run",)):
            error = run(*asked, *dry).json["error"]
            assert (error["exit"], error["code"]) == (2, "output-in-source")
            assert f" {said}; expected a folder outside" in error["message"]
