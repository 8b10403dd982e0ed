"""quantize --base: what stays has the bytes of a publisher's own FP8 or MXFP8 release, which
ml_dtypes makes here, and names, shapes and values of both are compared.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    FIRST,
    LAYER,
    SECOND,
    Tensor,
    done,
    llama_shards,
    read_folder,
    run,
    values_of,
    write_checkpoint,
    write_single,
)

ATTENTION = [f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"]
MLP = f"{LAYER}.mlp.up_proj"
KEEP = ("--exclude", "*self_attn*")
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
RECORD = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
MX = {"weights": {"num_bits": 8, "type": "float", "group_size": 32}, "targets": ["Linear"]}
MX_RECORD = {"quant_method": "modelopt", "quant_algo": "MXFP8", "config_groups": {"group_0": MX}}


def eight(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix: blocks of 16x32 under float32, or MXFP8 by the floor rule."""
    x = values_of(tensor).astype(np.float32)
    rows, columns = x.shape
    height = 16 if kind == "fp8" else 1
    blocks = x.reshape(rows // height, height, columns // 32, 32)
    amax = np.abs(blocks).max((1, 3))
    scales = amax / 448
    if kind == "mxfp8":
        exponents = np.floor(np.log2(amax)) - 8
        scales = np.exp2(exponents)
    scaled = np.clip(blocks / scales[:, None, :, None], -448, 448)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).tobytes()
    stored = ("F32", scales.shape, scales.astype(np.float32).tobytes())
    if kind == "mxfp8":
        stored = ("U8", scales.shape, (exponents + 127).astype(np.uint8).tobytes())
    return ("F8_E4M3", (rows, columns), codes), stored


def write_both(folder: Path, kind: str) -> tuple[Path, Path, dict[str, Tensor]]:
    """The source and the release in FP8, whose shards have the same names and other contents."""
    shards, released = llama_shards(), {}
    config = json.dumps(CONFIG).encode()
    source = write_checkpoint(folder / "source", shards, None, **{"config.json": config})
    ending = ".weight_scale_inv" if kind == "fp8" else ".weight_scale"
    for name, tensor in {**shards[FIRST], **shards[SECOND]}.items():
        if "_proj.weight" in name:
            released[name], released[name.removesuffix(".weight") + ending] = eight(tensor, kind)
        else:
            released[name] = tensor
    record = {"quantization_config": RECORD if kind == "fp8" else MX_RECORD}
    text = json.dumps(CONFIG | record).encode()
    parts = {FIRST: dict(list(released.items())[8:]), SECOND: dict(list(released.items())[:8])}
    base = write_checkpoint(folder / "release-fp8", parts, None, **{"config.json": text})
    return source, base, released


def quantize(source: Path, base: Path, out: Path, *words: object) -> dict[str, object]:
    arguments = ("quantize", source, "--format", "nvfp4", "--base", base, "-o", out, *KEEP)
    return done(*arguments, *words, "--json").json


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [("fp8", "compressed-tensors"), ("mxfp8", "compressed-tensors"), ("mxfp8", "modelopt")],
)
def test_what_stays_has_the_bytes_of_the_base(kind, dialect, tmp_path):
    source, base, released = write_both(tmp_path, kind)
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "plain", *KEEP)
    words = ("--dialect", dialect)
    plan = quantize(source, base, tmp_path / "out", *words, "--dry-run")
    reasons = {one["name"]: one["reason"] for one in plan["tensors"]}
    assert reasons[f"{ATTENTION[0]}.weight"].endswith("from release-fp8")
    quantize(source, base, tmp_path / "out", *words)
    made = read_folder(tmp_path / "out")
    ending = ".weight_scale_inv" if kind == "fp8" else ".weight_scale"
    for module in ATTENTION:
        assert made[f"{module}.weight"] == released[f"{module}.weight"]
        assert made[f"{module}.weight_scale"][2] == released[module + ending][2]
    floats = read_folder(tmp_path / "plain")
    if dialect == "compressed-tensors":  # what is rounded comes from the source
        assert made[f"{MLP}.weight_packed"] == floats[f"{MLP}.weight_packed"]
    assert made["lm_head.weight"] == floats["lm_head.weight"]
    assert run("inspect", tmp_path / "out", "--json").json["healthy"]
    assert done("verify", tmp_path / "out", "--source", source)
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert record["base"]["repo"] is None
    assert str(tmp_path) not in json.dumps(record)
    again = run("reproduce", tmp_path / "out", "--source", source, "--base", base, "--json")
    assert again.json["reproduced"], again.json


def test_other_weights_are_refused_by_name_and_shapes_before_anything_is_read(tmp_path):
    """One value of the release is a step and a half away, which rounding never is."""
    source, base, released = write_both(tmp_path, "fp8")
    module = ATTENTION[3]
    dtype, _, data = released[f"{module}.weight"]
    codes = bytearray(data)
    codes[70] ^= 0x04  # half of a power of two
    file = next(one for one in base.glob("*.safetensors") if bytes(data) in one.read_bytes())
    file.write_bytes(file.read_bytes().replace(bytes(data), bytes(codes)))
    words = ("--format", "nvfp4", *KEEP, "--base", base)
    refused = run("quantize", source, *words, "-o", tmp_path / "out", "--json")
    error = refused.json["error"]
    assert (refused.code, error["code"], error["tensor"]) == (2, "base-differs", module)
    assert "1 of its 2048 values" in error["message"]
    assert "[1, 6]" in error["message"]
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    shutil.rmtree(tmp_path / "out")
    scales = ("F32", (4, 1), np.ones(4, np.float32).tobytes())
    tensors = {f"{module}.weight": (dtype, (64, 32), data), f"{module}.weight_scale_inv": scales}
    other = write_single(tmp_path / "other", tensors, CONFIG | {"quantization_config": RECORD})
    for target, said in ((other, f"{module} is [64, 32]"), (source, "no module in FP8")):
        words = ("--format", "nvfp4", *KEEP, "--base", target, "-o", tmp_path / "out", "--json")
        refused = run("quantize", source, *words)
        error = refused.json["error"]
        assert (refused.code, error["code"]) == (2, "base-mismatch")
        assert said in error["message"]
    assert not (tmp_path / "out").exists()


def test_a_base_that_the_dialect_cannot_hold_or_nothing_takes_is_refused(tmp_path):
    source, base, _ = write_both(tmp_path, "fp8")
    words = ("--format", "nvfp4", "--base", base, "-o", tmp_path / "out", "--json")
    held = run("quantize", source, *words, *KEEP, "--dialect", "modelopt").json["error"]
    assert held["code"] == "dialect-mixed"
    assert "--base" in held["next"]
    idle = run("quantize", source, *words)
    assert idle.code == 2
    assert "--base" in idle.json["error"]["message"]
    packed = run("quantize", base, *words, *KEEP).json["error"]
    assert packed["code"] == "base-mismatch"


def test_a_run_goes_on_where_it_ended_and_takes_no_other_base(tmp_path):
    source, base, released = write_both(tmp_path, "fp8")
    quantize(source, base, tmp_path / "whole")
    words = (source, "--format", "nvfp4", "--base", base, *KEEP, "-o", tmp_path / "out")
    done("quantize", *words, "--shard-index", "0", "--num-shards", "2")
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    begun = shard.stat().st_mtime_ns
    done("quantize", *words)
    assert shard.stat().st_mtime_ns == begun
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")
    name = f"{ATTENTION[0]}.weight_scale_inv"  # a scale that differs in its last bit
    data = released[name][2]
    file = next(one for one in base.glob("*.safetensors") if data in one.read_bytes())
    other = bytes([data[0] ^ 1, *data[1:]])
    file.write_bytes(file.read_bytes().replace(data, other))
    done("quantize", *words, "--force")
    assert read_folder(tmp_path / "out")[f"{ATTENTION[0]}.weight_scale"][2] == other
    again = run("reproduce", tmp_path / "whole", "--source", source, "--base", base, "--json")
    assert (again.code, again.json["reproduced"]) == (6, False)
