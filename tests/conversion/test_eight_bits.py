"""FP8 and MXFP8 as formats of a whole artifact: what the commands make of them, and what they
refuse. Values are those of torch's own FP8; tests/engines/test_eight_bits.py has other judges.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import done, read_folder, run, values_of, write_llama
from tiny_chains import LENGTH, TEXT, make_model

MODULES = 21
CASES = [
    ("fp8", "compressed-tensors"),
    ("fp8", "modelopt"),
    ("fp8", "deepseek"),
    ("fp8", "comfy"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("mxfp8", "mlx"),
    ("mxfp8", "comfy"),
]
EVERY_CASE = pytest.mark.parametrize(("fmt", "dialect"), CASES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), "Llama")


def quantize(source: Path, folder: Path, fmt: str, dialect: str, *options: object) -> Path:
    done("quantize", source, "--format", fmt, "--dialect", dialect, "-o", folder, *options, "-q")
    return folder


@EVERY_CASE
def test_dequantize_gives_the_nearest_of_every_value(
    source: Path, tmp_path: Path, fmt: str, dialect: str
) -> None:
    """Every value is x rounded to three bits of mantissa, or to the steps of its block below them:
    within 1/16 of itself, or half of a step of the block.
    """
    made = quantize(source, tmp_path / "made", fmt, dialect)
    done("dequantize", made, "-o", tmp_path / "r", "--dtype", "fp32", "-q")
    before, after = read_folder(source), read_folder(tmp_path / "r")
    assert before.keys() == after.keys()
    changed = [name for name in before if "_proj.weight" in name]
    assert len(changed) == MODULES
    for name in changed:
        x, y = (values_of(each[name]).astype(np.float64) for each in (before, after))
        smallest = np.abs(x).max() / 448 * 2.0**-9
        assert (np.abs(x - y) <= np.maximum(np.abs(x) / 16, smallest)).all(), name


@EVERY_CASE
def test_foreign_artifacts_are_opened_by_their_own_records(
    source: Path, tmp_path: Path, fmt: str, dialect: str
) -> None:
    made = quantize(source, tmp_path / "made", fmt, dialect)
    known = run("inspect", made, "--json").json
    (made / "quantization_config.json").unlink()
    shutil.rmtree(made / ".fp4convert")
    found = run("inspect", made, "--json").json
    assert found["healthy"]
    for key in ("format", "dialect", "tensors", "bits_per_weight", "activations", "block_size"):
        assert found[key] == known[key], key
    verified = run("verify", made, "--source", source, "--json").json
    assert verified["passed"]
    assert len(verified["tensors"]) == MODULES


@EVERY_CASE
def test_damage_is_found(source: Path, tmp_path: Path, fmt: str, dialect: str) -> None:
    """A scale of one block or matrix, twice as large."""
    made = quantize(source, tmp_path / "made", fmt, dialect)
    (made / "quantization_config.json").unlink()
    shutil.rmtree(made / ".fp4convert")
    name = next(
        name
        for name in read_folder(made)
        if "down_proj" in name and "scale" in name and "input" not in name
    )
    dtype, shape, data = read_folder(made)[name]
    raw = bytearray((made / "model.safetensors").read_bytes())
    at = raw.index(data)
    if dtype == "U8":
        raw[at : at + len(data)] = bytes(min(byte + 1, 254) for byte in data)
    else:
        raw[at : at + len(data)] = (2 * np.frombuffer(data, np.float32)).tobytes()
    (made / "model.safetensors").write_bytes(raw)
    verified = run("verify", made, "--source", source, "--json")
    assert verified.code == 6
    assert "source-differs" in {finding["code"] for finding in verified.json["findings"]}
    assert shape is not None


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--format", "fp8", "--method", "gptq"), "idle-option", "four-bit"),
        (("--format", "mxfp8", "--via", "fp8"), "idle-option", "four-bit"),
        (("--format", "fp8", "--scale-rule", "importance"), "unknown-scale-rule", "amax, mse"),
        (("--format", "mxfp8", "--scale-rule", "amax"), "unknown-scale-rule", "floor"),
        (("--format", "fp8", "--activations", 4), "dialect-activations", "--activations 8"),
        (("--format", "nvfp4", "--activations", 8), "dialect-activations", "--activations 16"),
        (
            ("--format", "fp8", "--dialect", "modelopt", "--activations", 16),
            "dialect-activations",
            "--activations 8",
        ),
        (
            ("--format", "mxfp8", "--dialect", "mlx", "--activations", 8),
            "dialect-activations",
            "--activations 16",
        ),
        (("--format", "fp8", "--dialect", "mlx"), "dialect-format", "mxfp8"),
        (("--format", "mxfp8", "--dialect", "quark"), "dialect-format", "mxfp4"),
        (("--format", "fp8", "--global-scale", "x"), "bad-global-scale", "nvfp4"),
        (("--format", "fp8", "--for", "tensorrt-llm"), "engine-refuses", "fp8"),
    ],
)
def test_refusals(tmp_path: Path, options: tuple[object, ...], code: str, told: str) -> None:
    source = write_llama(tmp_path / "M")
    outcome = run("quantize", source, *options, "-o", tmp_path / "out", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["code"] == code
    assert told in outcome.json["error"]["message"] + outcome.json["error"]["next"]
    assert not (tmp_path / "out").exists()


def test_the_folder_is_named_after_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "M")
    monkeypatch.chdir(tmp_path)
    done("quantize", "M", "--format", "fp8", "-q")
    assert (tmp_path / "M-FP8" / "quantization_config.json").exists()


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
def test_evaluate_runs_it_and_tells_of_activations(source: Path, tmp_path: Path, fmt: str) -> None:
    made = quantize(source, tmp_path / "made", fmt, "compressed-tensors")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("--text", tmp_path / "text.txt", "--sequence-length", LENGTH, "--json")
    found = done("evaluate", made, "--source", source, *words)
    assert 0 < found.json["kl"]["mean"] < 0.01
    assert f"{MODULES} linear layers have 8-bit activations in engines" in found.err


def test_mxfp8_that_the_dialect_can_hold_keeps_its_bytes(source: Path, tmp_path: Path) -> None:
    """An MXFP8 artifact is a source, too: to MXFP8 by its bytes, to NVFP4 by its values."""
    first = quantize(source, tmp_path / "first", "mxfp8", "compressed-tensors")
    again = quantize(first, tmp_path / "again", "mxfp8", "modelopt")
    ours, theirs = read_folder(first), read_folder(again)
    assert {name: ours[name] for name in ours} == {name: theirs[name] for name in ours}
    made = quantize(first, tmp_path / "four", "nvfp4", "compressed-tensors")
    assert run("verify", made, "--source", first, "--json").json["passed"]


def test_a_target_chooses_mxfp8_in_mlx(source: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "made", "mxfp4", "mlx", "--target-bits", 5.5)
    found = run("inspect", made, "--json").json
    assert {form["format"] for form in found["forms"]} == {"mxfp4", "mxfp8"}
    config = json.loads((made / "config.json").read_text())["quantization"]
    assert sum(isinstance(each, dict) for each in config.values()) > 0
    assert 4.25 < found["bits_per_weight"] <= 5.5
    assert run("verify", made, "--source", source, "--json").json["passed"]


def test_scales_of_128x128_are_where_deepseek_has_them(tmp_path: Path) -> None:
    """By hand: a matrix of one block of ones and one of twos, and a part of a block of threes."""
    from safetensors.torch import save_file

    weight = torch.ones(128, 192)
    weight[:, 128:] = 3
    (tmp_path / "m").mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, tmp_path / "m" / "model.safetensors")
    made = quantize(tmp_path / "m", tmp_path / "made", "fp8", "deepseek")
    tensors = read_folder(made)
    dtype, shape, data = tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert (dtype, shape) == ("F32", (1, 2))
    scales = np.frombuffer(data, np.float32)
    assert scales.tolist() == [float(np.float32(n) / np.float32(448)) for n in (1, 3)]
    assert set(tensors["model.layers.0.mlp.up_proj.weight"][2]) == {0x7E}
