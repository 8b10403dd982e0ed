"""Blocks whose scale is NaN are carried into no result, and become no floats."""

import struct

import pytest
from checkpoints import LAYER, read_shard, run, write_llama
from rewriting import forget_hashes, rewrite

DOWN = f"{LAYER}.mlp.down_proj"
NAN = struct.pack("<f", float("nan"))
# By format: the scales' ending and a NaN among them.
DAMAGE = {
    "nvfp4": (".weight_scale", b"\x7f"),
    "mxfp4": (".weight_scale", b"\xff"),
    "fp8": (".weight_scale", NAN),
    "mxfp8": (".weight_scale", b"\xff"),
}


def damage(folder, fmt):
    """Make the first scale of a module NaN."""
    ending, nan = DAMAGE[fmt]
    for shard in folder.glob("*.safetensors"):
        if found := read_shard(shard).get(DOWN + ending):
            rewrite(folder, shard.name, DOWN + ending, nan + found[2][len(nan) :])
    forget_hashes(folder)


@pytest.mark.parametrize("fmt", DAMAGE)
@pytest.mark.parametrize("command", ["dequantize", "transcode", "quantize"])
def test_a_nan_scale_is_refused(fmt, command, tmp_path):
    """quantize would take the blocks over as they are."""
    made, out = tmp_path / "made", tmp_path / "out"
    assert run("quantize", write_llama(tmp_path / "m"), "--format", fmt, "-o", made).code == 0
    damage(made, fmt)
    dialect = "quark" if fmt == "mxfp4" else "modelopt"
    options = {"transcode": ("--dialect", dialect), "quantize": ("--format", fmt)}
    outcome = run(command, made, *options.get(command, ()), "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], error["tensor"]) == (2, "scale-not-finite", DOWN)
    assert DOWN in error["message"]
    assert not (out / "quantization_config.json").exists()


def test_what_becomes_bf16_again_is_refused_too(tmp_path):
    """FP8 that --exclude names is written as bf16."""
    made, out = tmp_path / "made", tmp_path / "out"
    assert run("quantize", write_llama(tmp_path / "m"), "--format", "fp8", "-o", made).code == 0
    damage(made, "fp8")
    outcome = run("quantize", made, "--format", "nvfp4", "--exclude", DOWN, "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], error["tensor"]) == (2, "scale-not-finite", DOWN)
    assert error["next"].startswith("Start from the original weights")
