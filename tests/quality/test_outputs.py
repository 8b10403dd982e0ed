"""verify --calibration: what linear layers answer, beside the answers of dequantized weights to the
very inputs, by NumPy.
"""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import (
    LAYER,
    SECOND,
    pack_shard,
    read_folder,
    read_shard,
    run,
    values_of,
    write_llama,
    write_single,
)
from folded_llama import INPUTS, READERS, calibrated, made, stored_weights, write_source
from made_up_inputs import aliases_of, calibrate, inputs_of
from restored_artifacts import restored

DOWN = f"{LAYER}.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def artifact(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "artifact"
    quantize(source, out)
    return out


def verify(folder: Path, *options: object) -> dict:
    outcome = run("verify", folder, *options, "--json")
    assert outcome.code == (0 if outcome.json["passed"] else 6), outcome
    return outcome.json


def relative(error: np.ndarray, weights: np.ndarray, x: np.ndarray, gram: str) -> float:
    """|error x| / |weights x| over these inputs, of whose columns only those of one block are known
    to go together.
    """
    width = {"full": x.shape[1], "diag": 1}.get(gram) or int(gram.partition(":")[2])
    parts = [slice(first, first + width) for first in range(0, x.shape[1], width)]
    noise, signal = (
        sum(((x[:, part] @ matrix[:, part].T) ** 2).sum() for part in parts)
        for matrix in (error, weights)
    )
    return math.sqrt(noise / signal)


@pytest.mark.parametrize("gram", ["full", "block:48", "diag"])
def test_errors_with_a_calibration_are_those_over_its_inputs(gram, source, artifact, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source, gram)
    document = verify(artifact, "--source", source, "--calibration", file)
    assert document["inputs"] == f"calibration, gram {gram}"
    assert document["calibration"] == hashlib.sha256(file.read_bytes()).hexdigest()
    before, after = restored_pair(source, artifact, tmp_path)
    own, aliases = inputs_of(source), aliases_of(source)
    weighted = []
    for entry in document["tensors"]:
        module = entry["name"].removesuffix(".weight")
        x = own[aliases.get(module, module)].astype(np.float64)
        w, v = before[entry["name"]], after[entry["name"]]
        assert entry["output_error"] == pytest.approx(relative(w - v, w, x, gram), rel=1e-5)
        weighted += [entry["output_error"]] * w.size
    assert document["summary"]["output_error_max"] == max(weighted)
    assert document["summary"]["output_error_mean"] == pytest.approx(
        math.sqrt(np.mean(np.square(weighted))), rel=1e-12
    )
    assert len(document["tensors"]) == 7


def restored_pair(
    source: Path, artifact: Path, folder: Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    before = {name: values_of(tensor) for name, tensor in read_folder(source).items()}
    return before, restored(artifact, folder / "plain")


def test_analyze_says_the_same_of_a_matrix_that_it_reads_whole(tmp_path):
    """Its global scale is that of the sampled rows, here all of them, and MXFP4 has none."""
    values = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32)
    source = write_single(tmp_path / "m", {f"{DOWN}.weight": ("F32", (32, 64), values.tobytes())})
    file = calibrate(tmp_path / "c.safetensors", source, "full")
    quantize(source, tmp_path / "a", "--format", "mxfp4")
    ways = run("analyze", source, "--calibration", file, "--json").json["ways"]
    (expected,) = [
        way["output_error"]
        for way in ways
        if (way["format"], way["rule"], way["block"]) == ("mxfp4", "even", 32)
    ]
    (entry,) = verify(tmp_path / "a", "--source", source, "--calibration", file)["tensors"]
    assert entry["output_error"] == pytest.approx(expected, rel=1e-6)


def test_a_folded_layer_answers_the_inputs_of_the_original(tmp_path):
    """Its columns are divided by what its norm lost, and rows multiplied back: powers of two that
    the rows show.
    """
    source = write_source(tmp_path / "source")
    file = calibrated(source, tmp_path / "c.safetensors")
    made(source, tmp_path / "out", "awq", file)
    found = {
        entry["name"]: entry["output_error"]
        for entry in verify(tmp_path / "out", "--source", source, "--calibration", file)["tensors"]
    }
    weights, after = stored_weights(), restored(tmp_path / "out", tmp_path / "plain")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        factors = weights[norm].astype(np.float64) / after[f"{LAYER}.{norm}.weight"]
        assert np.ptp(factors) > 0.1
        for leaf in READERS[norm]:
            w = weights[leaf].astype(np.float64)
            v = after[f"{LAYER}.{leaf}.weight"] / factors
            v *= np.exp2(np.rint(np.log2((w * w).sum(1) / (w * v).sum(1))))[:, None]
            expected = relative(w - v, w, INPUTS[norm].astype(np.float64), "diag")
            assert found[f"{LAYER}.{leaf}.weight"] == pytest.approx(expected, rel=2e-4), leaf


def test_the_gate_is_of_every_tensor(source, artifact, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    errors = [
        entry["output_error"]
        for entry in verify(artifact, "--source", source, "--calibration", file)["tensors"]
    ]
    given = ("--source", source, "--calibration", file, "--max-output-error")
    assert verify(artifact, *given, max(errors))["passed"]
    failed = verify(artifact, *given, sorted(errors)[-2])
    assert [finding["code"] for finding in failed["findings"]] == ["output-error-high"]
    worst = failed["findings"][0]["tensor"]
    assert errors[[entry["name"] for entry in failed["tensors"]].index(worst)] == max(errors)
    told = run("verify", artifact, *given, 0.01)
    assert told.code == 6
    assert told.out.count("error output-error-high: 7 of 7 tensors, the worst ") == 1


def test_a_gate_stands_beside_others(source, artifact, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    gates = ("--max-output-error", 0.001, "--min-sqnr", 90)
    both = verify(artifact, "--source", source, "--calibration", file, *gates)
    codes = [finding["code"] for finding in both["findings"]]
    assert (codes.count("output-error-high"), codes.count("sqnr-low")) == (7, 7)


def test_a_layer_that_was_nothing_and_answers_something_misses_every_gate(tmp_path):
    tensors = {
        f"{DOWN}.weight": ("F32", (2, 32), bytes(256)),
        "x.o_proj.weight": ("F32", (2, 32), bytes(256)),
    }
    source = write_single(tmp_path / "m", tensors)
    quantize(source, tmp_path / "a")
    file = calibrate(tmp_path / "c.safetensors", source)
    given = ("--source", source, "--calibration", file, "--max-output-error")
    clean = verify(tmp_path / "a", *given, 0)
    assert [entry["output_error"] for entry in clean["tensors"]] == [0, 0]
    held = read_shard(tmp_path / "a" / "model.safetensors")
    dtype, shape, data = held[f"{DOWN}.weight_packed"]
    changed = {**held, f"{DOWN}.weight_packed": (dtype, shape, b"\x11" * len(data))}
    (tmp_path / "a" / "model.safetensors").write_bytes(pack_shard(changed))
    spoilt = verify(tmp_path / "a", *given, 1)
    assert [entry["output_error"] for entry in spoilt["tensors"]] == [None, 0]
    assert ("output-error-high", f"{DOWN}.weight") in {
        (each["code"], each["tensor"]) for each in spoilt["findings"]
    }


def test_the_table_shows_what_answers_worst(source, artifact, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    document = verify(artifact, "--source", source, "--calibration", file)
    order = sorted(document["tensors"], key=lambda entry: -entry["output_error"])
    lines = run("verify", artifact, "--source", source, "--calibration", file).out.splitlines()
    assert lines[0].endswith("output error")
    assert [line.split()[0] for line in lines[1:6]] == [entry["name"] for entry in order[:5]]
    assert [line.split()[-2] for line in lines[1:6]] == [
        f"{100 * entry['output_error']:.3f}" for entry in order[:5]
    ]
    assert any(
        line.startswith("output error: mean ") and "inputs: calibration, gram full" in line
        for line in lines
    )
    assert "output error" not in run("verify", artifact, "--source", source).out


def test_a_gate_on_outputs_needs_a_source_and_their_inputs(source, artifact):
    """For random inputs the error is that of the weights, which other gates are for."""
    for given, code in (((), "no-source"), (("--source", source), "no-calibration")):
        outcome = run("verify", artifact, *given, "--max-output-error", "0.1", "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
        assert "--max-output-error" in outcome.json["error"]["message"]


def test_what_cannot_be_asked_is_refused(source, artifact, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    refused = run("verify", artifact, "--calibration", file, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "no-source")
    refused = run("verify", artifact, "--source", source, "--max-output-error", "nan", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "bad-gate")
    assert refused.json["error"]["next"] == "Give a finite number, or leave --max-output-error out."
    other = write_single(
        tmp_path / "other", {f"{DOWN}.weight": read_shard(source / SECOND)[f"{DOWN}.weight"]}
    )
    refused = run(
        "verify",
        artifact,
        "--source",
        source,
        "--calibration",
        calibrate(tmp_path / "o", other),
        "--json",
    )
    assert (refused.code, refused.json["error"]["code"]) == (2, "calibration-model")
