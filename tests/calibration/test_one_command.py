"""quantize with a text calibrates first: the same bytes as two commands, nothing twice, and
refusals before the model reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import run
from peft_models import write_adapter
from tiny_chains import make_model

pytestmark = pytest.mark.engine


def convert(source: Path, out: Path, *options: object):
    return run("quantize", source, "--format", "nvfp4", "-o", out, *options, "--json")


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def test_one_command_is_two(tmp_path, llama, words):
    one, two, file = tmp_path / "one", tmp_path / "two", tmp_path / "s.safetensors"
    assert convert(llama, one, "--text", words).code == 0
    way = ("--for-method", "gptq", "--format", "nvfp4")
    assert run("calibrate", llama, "-o", file, "--text", words, *way).code == 0
    assert convert(llama, two, "--method", "gptq", "--calibration", file).code == 0
    assert shards(one) == shards(two) != {}
    kept = tmp_path / "one.calibration.safetensors"
    assert kept.read_bytes() == file.read_bytes()
    record = json.loads((one / "quantization_config.json").read_text())
    assert (record["method"], "text" in record["options"]) == ("gptq", False)


def test_a_result_without_statistics_is_refused_before_the_model_reads(tmp_path, llama, words):
    out = tmp_path / "out"
    assert convert(llama, out).code == 0
    error = convert(llama, out, "--text", words).json["error"]
    assert (error["code"], "without statistics" in error["message"]) == ("other-plan", True)
    assert not (tmp_path / "out.calibration.safetensors").exists()


def test_what_is_finished_is_not_done_again(tmp_path, llama, words, monkeypatch):
    out = tmp_path / "out"
    assert convert(llama, out, "--text", words).code == 0
    monkeypatch.setattr("fp4convert.calibration.run.calibrate", None)  # is not called
    assert convert(llama, out, "--text", words).code == 0
    assert convert(llama, tmp_path / "out", "--text", words, "--self-generate", 2).code == 2


def test_statistics_of_another_text_are_not_written_over(tmp_path, llama, words):
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("zebra lion tiger cat dog bird fish " * 200)
    assert convert(llama, out, "--text", words).code == 0
    file = tmp_path / "out.calibration.safetensors"
    before = file.read_bytes()
    outcome = convert(llama, out, "--text", other)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "output-exists")
    assert file.read_bytes() == before
    assert convert(llama, out, "--text", other, "--force").code == 0
    assert file.read_bytes() != before


def test_statistics_of_another_adapter_are_not_rounded_with(tmp_path, llama, words):
    config = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    adapters = [write_adapter(llama, tmp_path / f"a{n}", config, seed=n) for n in range(2)]
    one, two, text = tmp_path / "one", tmp_path / "two", ("--text", words)
    assert convert(llama, one, *text, "--lora", adapters[0]).code == 0
    for asked in ((), ("--lora", adapters[1])):
        error = convert(llama, one, *text, *asked).json["error"]
        assert (error["code"], "--lora a1" in error["message"]) == ("output-exists", bool(asked))
    assert convert(llama, one, *text, "--lora", adapters[1], "--force").code == 0
    assert convert(llama, two, *text, "--lora", adapters[1]).code == 0
    assert shards(one) == shards(two)


def test_losses_that_are_asked_for_are_not_left_out(tmp_path, llama, words):
    """A file without them is of the same text, and would choose formats by weights."""
    assert convert(llama, tmp_path / "out", "--text", words).code == 0
    outcome = convert(llama, tmp_path / "out", "--text", words, "--target-bits", 5)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "output-exists")
    assert "--sensitivity" in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--calibration", "x.safetensors"), 2),
        (("--shard-index", 0, "--num-shards", 2), 2),
        (("--exclude", "no.such.module"), 2),
        (("--format", "fp5"), 2),
        (("--text", "absent.txt"), 2),
    ],
)
def test_what_can_be_refused_is_refused_before_the_model_reads(
    tmp_path, llama, words, options, code, monkeypatch
):
    monkeypatch.setattr("fp4convert.calibration.run.calibrate", None)
    outcome = convert(llama, tmp_path / "out", "--text", words, *options)
    assert outcome.code == code, outcome.out
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_folder_that_is_there_is_refused_first(tmp_path, llama, words, monkeypatch):
    monkeypatch.setattr("fp4convert.calibration.run.calibrate", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert convert(llama, tmp_path / "out", "--text", words).code == 5


def test_a_dry_run_reads_nothing(tmp_path, llama, words, monkeypatch):
    monkeypatch.setattr("fp4convert.calibration.run.calibrate", None)
    outcome = convert(llama, tmp_path / "out", "--text", words, "--dry-run")
    assert outcome.code == 0
    assert "calibrates first" in outcome.err
    assert not list(tmp_path.glob("out*"))


def test_eight_bits_take_no_gram(tmp_path, words):
    llama = make_model(tmp_path / "m", "Llama")
    outcome = run("quantize", llama, "--format", "fp8", "-o", tmp_path / "o", "--text", words)
    assert outcome.code == 0, outcome.err
    assert "rounds by rtn" in outcome.err


def test_one_expert_width_too_many_takes_blocks(tmp_path, llama, words, monkeypatch):
    monkeypatch.setattr("fp4convert.commands.calibration.MOST_FULL_NBYTES", 1000)
    outcome = convert(llama, tmp_path / "out", "--text", words)
    assert outcome.code == 0
    assert "--gram block:128" in outcome.err
