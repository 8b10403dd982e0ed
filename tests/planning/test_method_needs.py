"""quantize --calibration FILE --method M: what is recorded, what is refused, and that nothing is
written then.
"""

import json
import shutil

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import LAYER, LLAMA, read_folder, run, weight, write_llama, write_single
from made_up_inputs import calibrate
from refusals import refused

from fp4convert.numerics.formats import METHODS


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


@pytest.fixture
def calibration(source, tmp_path):
    return calibrate(tmp_path / "calibration.safetensors", source, "diag")


def test_the_method_and_the_file_are_recorded(source, calibration, tmp_path):
    from hashlib import sha256

    document = quantize(source, tmp_path / "out", "--calibration", calibration)
    assert document["method"] == "rtn"
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert (record["method"], record["calibration"]) == (
        "rtn",
        sha256(calibration.read_bytes()).hexdigest(),
    )
    plan = quantize(source, tmp_path / "none", "--calibration", calibration, "--dry-run")
    assert (plan["method"], plan["calibration"]) == ("rtn", record["calibration"])
    quantize(source, tmp_path / "without")
    record = json.loads((tmp_path / "without" / "quantization_config.json").read_text())
    assert (record["method"], record["calibration"]) == ("rtn", None)


def test_transcode_carries_the_method_on(source, calibration, tmp_path):
    quantize(source, tmp_path / "out", "--calibration", calibration)
    assert (
        run("transcode", tmp_path / "out", "-o", tmp_path / "there", "--dialect", "modelopt").code
        == 0
    )
    before, after = (
        json.loads((tmp_path / name / "quantization_config.json").read_text())
        for name in ("out", "there")
    )
    assert [before[key] == after[key] for key in ("method", "calibration")] == [True, True]


def test_a_file_that_changes_no_weight_is_a_warning(source, calibration, tmp_path):
    asked = ("--calibration", calibration, "--scale-rule", "mse", "--dry-run")
    plan = quantize(source, tmp_path / "out", *asked)
    assert any("--calibration has no effect" in warning for warning in plan["warnings"])


def test_a_calibration_alone_weighs_errors(source, calibration, tmp_path):
    quantize(source, tmp_path / "alone", "--calibration", calibration)
    asked = ("--calibration", calibration, "--scale-rule", "importance")
    quantize(source, tmp_path / "asked", *asked)
    alone, asked_for, plain = (tmp_path / name for name in ("alone", "asked", "plain"))
    quantize(source, plain)
    weights = [read_folder(folder) for folder in (alone, asked_for, plain)]
    assert weights[0] == weights[1] != weights[2]


def test_a_file_that_chooses_formats_has_an_effect(source, calibration, tmp_path):
    asked = ("--calibration", calibration, "--target-bits", 5, "--dry-run")
    plan = quantize(source, tmp_path / "out", *asked)
    assert not any("--calibration has no effect" in warning for warning in plan["warnings"])


def test_a_run_is_not_continued_with_other_statistics(source, calibration, tmp_path):
    """Another file means another plan: what is finished by the first is not taken for the
    second's.
    """
    quantize(source, tmp_path / "out", "--calibration", calibration)
    other = calibrate(tmp_path / "other.safetensors", source, "diag", extra=np.zeros(1, np.float32))
    outcome = run(
        "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--calibration", other
    )
    assert outcome.code == 5
    assert "the options" in outcome.err


@pytest.mark.parametrize("method", ["gptqq", "", "rtm"])
def test_an_unknown_method_is_refused(method, source, calibration, tmp_path):
    error = refused(source, tmp_path, "--method", method, "--calibration", calibration)
    assert error["code"] == "unknown-method"
    assert all(known in error["message"] for known in METHODS)


def test_a_file_that_is_none_is_refused(source, tmp_path):
    assert (
        refused(source, tmp_path, "--calibration", tmp_path / "none")["code"] == "calibration-file"
    )
    assert (
        refused(source, tmp_path, "--calibration", source / "model-00001-of-00002.safetensors")[
            "code"
        ]
        == "calibration-file"
    )


def test_the_file_of_another_model_is_refused(source, calibration, tmp_path):
    other = write_single(tmp_path / "other", {f"{LAYER}.mlp.down_proj.weight": weight()})
    assert refused(other, tmp_path, "--calibration", calibration)["code"] == "calibration-model"
    shutil.copytree(source, tmp_path / "renamed")
    (tmp_path / "renamed" / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 1e6}))
    assert (
        refused(tmp_path / "renamed", tmp_path, "--calibration", calibration)["code"]
        == "calibration-model"
    )


def test_the_file_of_another_revision_is_refused(source, calibration, tmp_path):
    for shard in source.glob("*.safetensors"):
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert refused(source, tmp_path, "--calibration", calibration)["code"] == "calibration-weights"


def test_every_node_of_a_cluster_finds_the_file(source, calibration, tmp_path, monkeypatch):
    """By its whole path, whatever folder its worker begins in."""
    from fp4convert.conversion.ray_workers import options_for_nodes
    from fp4convert.options.writing import QuantizeOptions
    from fp4convert.storage.open import open_source

    monkeypatch.chdir(tmp_path)
    options = QuantizeOptions(source, format="nvfp4", calibration=calibration.name)
    sent = options_for_nodes(options, open_source(str(source)))
    assert sent.calibration == str(calibration)
    assert sent.source == str(source.absolute())


def test_a_file_that_changes_meanwhile_is_noticed(source, calibration, tmp_path):
    """Between the plan and the work."""
    from fp4convert.conversion.quantize import prepare_quantize
    from fp4convert.conversion.quantize import quantize as carry_out
    from fp4convert.conversion.request import take_apart
    from fp4convert.errors import InputError
    from fp4convert.execution.settings import Settings
    from fp4convert.options.writing import QuantizeOptions
    from fp4convert.storage.open import open_source

    opened = open_source(str(source))
    plan = prepare_quantize(
        take_apart(opened, QuantizeOptions("", format="nvfp4", calibration=str(calibration)))
    )
    calibrate(calibration, source, "diag", extra=np.zeros(1, np.float32))
    with pytest.raises(InputError, match="has changed since the plan was made"):
        carry_out(opened, plan, tmp_path / "out", Settings("cpu"))
    assert not (tmp_path / "out").exists()
