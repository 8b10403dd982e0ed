"""Blocks whose scale is NaN are carried into no result, and become no floats."""

import struct

import pytest
from checkpoints import LAYER, done, read_shard, run, write_llama
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


def damage(folder, fmt, worse=b""):
    """Make the first scale of a module NaN, or another."""
    ending, nan = DAMAGE[fmt]
    nan = worse or nan
    for shard in folder.glob("*.safetensors"):
        if found := read_shard(shard).get(DOWN + ending):
            rewrite(folder, shard.name, DOWN + ending, nan + found[2][len(nan) :])
    forget_hashes(folder)


@pytest.mark.parametrize("fmt", DAMAGE)
@pytest.mark.parametrize("command", ["dequantize", "transcode", "quantize"])
def test_a_nan_scale_is_refused(fmt, command, tmp_path):
    """quantize would take the blocks over as they are."""
    made, out = tmp_path / "made", tmp_path / "out"
    done("quantize", write_llama(tmp_path / "m"), "--format", fmt, "-o", made)
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
    done("quantize", write_llama(tmp_path / "m"), "--format", "fp8", "-o", made)
    damage(made, "fp8")
    outcome = run("quantize", made, "--format", "nvfp4", "--exclude", DOWN, "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], error["tensor"]) == (2, "scale-not-finite", DOWN)
    assert error["next"].startswith("Start from the original weights")


@pytest.mark.parametrize(
    "words",
    [
        *(("dequantize", "--dtype", dtype) for dtype in ("bf16", "fp16", "fp32")),
        ("quantize", "--format", "nvfp4", "--exclude", DOWN),
        ("quantize", "--format", "nvfp4", "--exclude", DOWN, "--keep-dtype", "fp16"),
    ],
)
def test_values_that_no_dtype_holds_are_not_sent_to_another(words, tmp_path):
    """A finite scale of 1e37 makes more of a code than fp32 can say."""
    made, out = tmp_path / "made", tmp_path / "out"
    done("quantize", write_llama(tmp_path / "m"), "--format", "fp8", "-o", made)
    damage(made, "fp8", struct.pack("<f", 1e37))
    outcome = run(words[0], made, *words[1:], "-o", out, "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], error["tensor"]) == (2, "scale-not-finite", DOWN)
    assert error["next"].startswith("Start from the original weights")
    assert not (out / "quantization_config.json").exists()
