"""--like: the options of an earlier artifact, where none is given."""

import json

import pytest
from checkpoints import run, write_llama

RECORD = "quantization_config.json"


@pytest.fixture
def made(tmp_path):
    source = write_llama(tmp_path / "m")
    words = (
        "--dialect",
        "modelopt",
        "--activations",
        4,
        "--scale-rule",
        "amax",
        "--input-scale",
        0.5,
    )
    words = (*words, "--exclude", "*.down_proj", "--exclude", "lm_head")
    done = run("quantize", source, "--format", "nvfp4", *words, "-o", tmp_path / "a", "--json")
    assert done.code == 0, done.err
    return source, tmp_path / "a", done.json["digest"]


@pytest.mark.parametrize("by", ["folder", "record"])
def test_the_same_options_make_the_same_bytes(by, made, tmp_path):
    source, artifact, digest = made
    like = artifact if by == "folder" else artifact / RECORD
    found = run("quantize", source, "--like", like, "-o", tmp_path / "b", "--json")
    assert (found.code, found.json["digest"]) == (0, digest)
    assert "--exclude '*.down_proj'" in found.err


def test_what_is_given_wins_and_the_default_folder_is_named_by_all(made, tmp_path, monkeypatch):
    source, artifact, _ = made
    monkeypatch.chdir(tmp_path)
    plan = run(
        "quantize", source, "--like", artifact, "--exclude", "*.up_proj", "--dry-run", "--json"
    )
    actions = {one["name"]: one["action"] for one in plan.json["tensors"]}
    assert actions["model.layers.0.mlp.up_proj.weight"] == "copy"
    assert actions["model.layers.0.mlp.down_proj.weight"] == "quantize"
    assert run("quantize", source, "--like", artifact, "-q").code == 0
    assert (tmp_path / "m-NVFP4-modelopt-A4" / RECORD).is_file()


def test_statistics_of_another_model_are_not_taken(made, tmp_path):
    source, artifact, _ = made
    record = json.loads((artifact / RECORD).read_text())
    record["options"]["calibration"] = {"sha256": "0" * 64}
    (tmp_path / "r.json").write_text(json.dumps(record))
    assert run("quantize", source, "--like", tmp_path / "r.json", "--dry-run").code == 0


@pytest.mark.parametrize("what", ["{}", "[", '{"options": {"nonsense": 1}}'])
def test_what_is_no_record_is_refused(what, made, tmp_path):
    (tmp_path / "r.json").write_text(what)
    error = run("quantize", made[0], "--like", tmp_path / "r.json", "--json").json["error"]
    assert error["code"] in ("no-record", "not-reproducible")
    missing = run("quantize", made[0], "--like", tmp_path / "no", "--json").json["error"]
    assert missing["code"] == "no-record"
