"""Quantize to dialect nunchaku, and back: a Diffusers component as Nunchaku Lite reads it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import bf16, done, read_shard, run, values_of, write_checkpoint

BLOCK = "transformer_blocks.0"
FILE = "diffusion_pytorch_model.safetensors"
CONFIG = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.0"}
LINEARS = {"attn.to_q": (256, 128), "attn.to_k": (256, 128), "ff.net.2": (128, 384)}
NUNCHAKU = ("--format", "nvfp4", "--dialect", "nunchaku")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three linear layers that fit, one that does not, a norm; biases but of to_k."""
    tensors = {}
    for seed, (name, shape) in enumerate({**LINEARS, "ff.net.0.proj": (100, 128)}.items()):
        tensors[f"{BLOCK}.{name}.weight"] = ("BF16", shape, bf16(*shape, seed=seed))
        if name != "attn.to_k":
            tensors[f"{BLOCK}.{name}.bias"] = ("BF16", shape[:1], bf16(shape[0], seed=9 + seed))
    tensors[f"{BLOCK}.norm_q.weight"] = ("BF16", (32,), bf16(32, seed=20))
    return write_checkpoint(tmp_path_factory.mktemp("source") / "m", {FILE: tensors}, CONFIG)


@pytest.fixture(scope="module")
def artifact(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "q"
    done("quantize", source, *NUNCHAKU, "-o", folder, "--workers", 1)
    return folder


def test_every_tensor_has_the_name_dtype_and_shape_of_diffusers_class(source, artifact):
    stored, original = read_shard(artifact / FILE), read_shard(source / FILE)
    expected = {}
    for name, (rows, columns) in LINEARS.items():
        expected |= {
            f"{BLOCK}.{name}.qweight": ("I8", (rows, columns // 2)),
            f"{BLOCK}.{name}.wscales": ("F8_E4M3", (columns // 16, rows)),
            f"{BLOCK}.{name}.wtscale": ("BF16", (1,)),
            f"{BLOCK}.{name}.wcscales": ("BF16", (rows,)),
            f"{BLOCK}.{name}.smooth_factor": ("BF16", (columns,)),
            f"{BLOCK}.{name}.proj_down": ("BF16", (columns, 32)),
            f"{BLOCK}.{name}.proj_up": ("BF16", (rows, 32)),
        }
    kept = [name for name in original if name.endswith((".bias", "norm_q.weight"))]
    kept.append(f"{BLOCK}.ff.net.0.proj.weight")
    expected |= {name: original[name][:2] for name in kept}
    assert {name: tensor[:2] for name, tensor in stored.items()} == expected


def test_records_name_the_modules_and_our_own_says_what_else_there_is(artifact):
    config = json.loads((artifact / "config.json").read_text())
    targets = sorted(f"{BLOCK}.{name}" for name in LINEARS)
    section = {"precision": "nvfp4", "group_size": 16, "rank": 32, "targets": targets}
    record = {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16", "svdq_w4a4": section}
    assert config == {**CONFIG, "quantization_config": record}
    own = json.loads((artifact / "quantization_config.json").read_text())
    assert (own["dialect"], own["rank"], own["activations"]) == ("nunchaku", 32, 4)
    assert own["global_scale"] == {"dtype": "bf16", "stored_as": "multiplier"}


def test_the_plan_says_why_a_layer_stays_and_that_activations_have_four_bits(source):
    plan = run("quantize", source, *NUNCHAKU, "--dry-run", "--json").json
    actions = {tensor["name"]: (tensor["action"], tensor["reason"]) for tensor in plan["tensors"]}
    reason = "100 x 128, and Nunchaku's tiles need multiples of 128"
    assert actions[f"{BLOCK}.ff.net.0.proj.weight"] == ("skip", reason)
    assert actions[f"{BLOCK}.ff.net.0.proj.bias"][0] == "copy"
    assert actions[f"{BLOCK}.ff.net.2.bias"] == ("reorder", "a bias, bf16 in tiles")
    assert any("quantize activations to four bits" in line for line in plan["warnings"])


def test_any_number_of_workers_makes_the_same_bytes(source, artifact, tmp_path):
    done("quantize", source, *NUNCHAKU, "-o", tmp_path / "q", "--workers", 3)
    assert (tmp_path / "q" / FILE).read_bytes() == (artifact / FILE).read_bytes()


def test_another_process_has_the_same_task_keys(source, tmp_path):
    """The record of a finished shard is found by its key: biases in tiles had an address in it."""
    part = ("--shard-index", "0", "--num-shards", "2")
    words = [sys.executable, "-m", "fp4convert", "quantize", source, *NUNCHAKU, *part, "-q"]
    keys = []
    for number in range(2):
        out = tmp_path / str(number)
        subprocess.run([*words, "-o", out], check=True)
        plan = json.loads((out / ".fp4convert" / "plan.json").read_text())
        keys.append([task["key"] for task in plan["tasks"]])
    assert keys[0] == keys[1]


def test_its_values_are_the_sources_and_the_report_says_how_far(source, artifact):
    found = run("verify", artifact, "--source", source, "--json").json
    assert found["passed"]
    assert [one for one in found["findings"] if one["level"] == "error"] == []
    assert len(found["tensors"]) == 3
    assert 20 < found["summary"]["sqnr_db_min"] < 30
    assert found["recorded"]["sqnr_db_min"] == pytest.approx(found["summary"]["sqnr_db_min"], 1e-6)


def test_what_is_dequantized_has_the_names_values_and_biases_of_the_source(
    source, artifact, tmp_path
):
    done("dequantize", artifact, "-o", tmp_path / "d")
    restored, original = read_shard(tmp_path / "d" / FILE), read_shard(source / FILE)
    assert {name: tensor[:2] for name, tensor in restored.items()} == {
        name: tensor[:2] for name, tensor in original.items()
    }
    made = {f"{BLOCK}.{name}.weight" for name in LINEARS}
    for name, tensor in original.items():
        if name not in made:
            assert restored[name] == tensor, name
            continue
        own, expected = values_of(restored[name]), values_of(tensor)
        assert 0.02 < np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.1
    assert json.loads((tmp_path / "d" / "config.json").read_text()) == CONFIG


def test_it_can_be_a_source_again(artifact, source, tmp_path):
    """Its codes are not carried: they are of what corrections leave."""
    options = ("--format", "nvfp4", "-o", tmp_path / "q")
    done("quantize", artifact, *options)
    assert run("verify", tmp_path / "q", "--source", artifact, "--json").json["passed"]
    again = read_shard(tmp_path / "q" / FILE)
    assert again[f"{BLOCK}.ff.net.2.bias"] == read_shard(source / FILE)[f"{BLOCK}.ff.net.2.bias"]


def test_a_packed_source_is_rounded_again_and_not_taken_over(source, tmp_path):
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "ct")
    made = run("quantize", tmp_path / "ct", *NUNCHAKU, "-o", tmp_path / "q", "--json")
    assert made.json["tensors"]["quantized"] == 3
    assert run("verify", tmp_path / "q", "--source", tmp_path / "ct", "--json").json["passed"]


@pytest.mark.parametrize("name", ["wscales", "qweight", "proj_up", "smooth_factor"])
def test_inspect_finds_what_is_missing(name, artifact, tmp_path):
    tensors = read_shard(artifact / FILE)
    del tensors[f"{BLOCK}.attn.to_q.{name}"]
    config = json.loads((artifact / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "q", {FILE: tensors}, config)
    found = run("inspect", folder, "--json")
    assert found.code == 6
    assert any(one["tensor"].startswith(f"{BLOCK}.attn.to_q") for one in found.json["findings"])


@pytest.mark.parametrize("name", ["proj_down", "smooth_factor", "wtscale", "wcscales", "bias"])
def test_verify_finds_other_numbers_beside_the_codes(name, artifact, source, tmp_path):
    tensors = read_shard(artifact / FILE)
    dtype, shape, data = tensors[f"{BLOCK}.attn.to_q.{name}"]
    changed = bytearray(data)
    changed[1] ^= 0x03  # of the exponent
    tensors[f"{BLOCK}.attn.to_q.{name}"] = dtype, shape, bytes(changed)
    config = json.loads((artifact / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "q", {FILE: tensors}, config)
    clean = write_checkpoint(tmp_path / "clean", {FILE: read_shard(artifact / FILE)}, config)
    measured = [run("verify", each, "--source", source, "--json").json for each in (clean, folder)]
    assert measured[0]["passed"]
    if name == "bias":
        (found,) = (one for one in measured[1]["findings"] if one["level"] == "error")
        assert (found["code"], found["tensor"]) == ("kept-differs", f"{BLOCK}.attn.to_q.bias")
    else:
        place = f"{BLOCK}.attn.to_q.weight"
        before, after = (
            next(one["sqnr_db"] for one in found["tensors"] if one["name"] == place)
            for found in measured
        )
        assert after < before - 0.1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--activations", 16), "dialect-activations"),
        (("--method", "gptq"), "idle-option"),
        (("--scale-rule", "importance"), "idle-option"),
        (("--via", "fp8"), "idle-option"),
        (("--input-scale", 0.5), "idle-option"),
        (("--kv-cache", "fp8"), "dialect-cache"),
        (("--calibration", "any.safetensors"), "idle-option"),
    ],
)
def test_what_has_no_use_is_refused(options, code, source, tmp_path):
    outcome = run("quantize", source, *NUNCHAKU, *options, "-o", tmp_path / "q", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "q").exists()


def test_codes_are_carried_neither_out_of_it_nor_into_it(source, artifact, tmp_path):
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "ct")
    for folder, dialect in ((artifact, "modelopt"), (tmp_path / "ct", "nunchaku")):
        options = ("--dialect", dialect, "-o", tmp_path / "t", "--json")
        outcome = run("transcode", folder, *options)
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "not-lossless")
        assert not (tmp_path / "t").exists()
