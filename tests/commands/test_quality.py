"""Arguments of the commands that check, taken for each other."""

from __future__ import annotations

from checkpoints import run, write_checkpoint, write_llama
from pruned_deepseek import DEEPSEEK, calibrated, deepseek_shards


def test_swapped_and_doubled_arguments_are_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_llama(tmp_path / "source")
    out = tmp_path / "an artifact"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    swapped = [
        ("verify", source, "--source", out),
        ("inspect", source, "--source", out),
        ("compare", source, source, "--source", out),
        ("compare", "other", source, "--source", out),
    ]
    assert run("quantize", source, "--format", "mxfp4", "-o", "other").code == 0
    for words in swapped:
        error = run(*words, "--json").json["error"]
        step = f"{out} is an artifact: give it first, and --source {source}"
        assert (error["code"], error["next"]) == ("not-an-artifact", step)
    for words in (
        ("verify", out, "--source", out),
        ("inspect", out, "--source", f"{out}/."),
        ("compare", out, "other", "--source", out),
    ):
        error = run(*words, "--json").json["error"]
        assert (error["exit"], error["code"]) == (2, "usage")
        assert "as the artifact and as its source" in error["message"]
    # An ordinary checkpoint without a source, or with another, is still one to quantize.
    for words in (("verify", source), ("verify", source, "--source", tmp_path)):
        assert "fp4convert quantize" in run(*words).err


def test_a_pruned_checkpoint_is_one_to_quantize(tmp_path):
    source = write_checkpoint(tmp_path / "source", deepseek_shards(), DEEPSEEK)
    asked = ("--calibration", calibrated(source), "--keep", 4)
    assert run("prune", source, "-o", tmp_path / "out", *asked).code == 0
    error = run("inspect", tmp_path / "out", "--json").json["error"]
    assert "which prune made" in error["message"]
    assert error["next"] == f"Quantize it: fp4convert quantize {tmp_path / 'out'} --format nvfp4"
