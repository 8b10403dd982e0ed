"""Experts and scale groups of several formats are found in any artifact, and told in plans."""

import pytest
from checkpoints import LAYER, LLAMA, pack_shard, read_shard, run, weight, write_single

EXPERTS = [
    f"{LAYER}.mlp.experts.{n}.{leaf}_proj" for n in (0, 1) for leaf in ("gate", "up", "down")
]
ATTENTION = [f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkvo"]


def write_moe(folder, down_columns=64):
    tensors = {f"{name}.weight": weight(rows=64) for name in (*EXPERTS, *ATTENTION)}
    tensors |= {
        f"{name}.weight": weight(rows=64, columns=down_columns)
        for name in EXPERTS
        if name.endswith("down_proj")
    }
    return write_single(folder, tensors, {**LLAMA, "model_type": "qwen3_moe"})


@pytest.mark.parametrize(
    ("kept", "columns", "code"),
    [
        ("*down_proj", 64, "experts-in-part"),
        ("*.experts.1.*", 64, "experts-in-part"),
        (None, 40, "experts-in-part"),
        ("*.v_proj", 64, "group-in-part"),
        ("*.experts.*", 64, None),
        ("*.self_attn.*", 64, None),
        (None, 64, None),
    ],
)
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_what_is_quantized_in_part_is_a_warning_and_for_an_engine_an_error(
    kept, columns, code, dialect, tmp_path
):
    source, out = write_moe(tmp_path / "m", columns), tmp_path / "out"
    asked = ["quantize", source, "--dialect", dialect, *(["--exclude", kept] if kept else [])]
    made = run(*asked, "--format", "nvfp4", "-o", out, "--json")
    told = [line for line in made.json["warnings"] if "engines that" in line]
    assert len(told) == bool(code)
    for command in ("inspect", "verify"):
        found = run(command, out, "--json")
        codes = {one["code"]: one["level"] for one in found.json["findings"]}
        assert (found.code, codes) == (0, {code: "warning"} if code else {})
        for engine in ("vllm", "sglang"):
            assert run(command, out, "--for", engine).code == (6 if code else 0)
    refused = run(*asked, "--for", "vllm", "-o", tmp_path / "other", "--json")
    assert refused.code == (2 if code else 0)
    if code:
        assert refused.json["error"]["code"] == "engine-refuses"
        assert not (tmp_path / "other").exists()


def test_stacks_that_stay_beside_experts_are_seen(tmp_path):
    """As foreign tools leave them: a stack of gate and up in bf16, and down in four bits."""
    out = tmp_path / "out"
    run("quantize", write_moe(tmp_path / "m"), "--format", "nvfp4", "-o", out, "-q")
    (out / "quantization_config.json").unlink()
    (file,) = out.glob("*.safetensors")
    halves = (".gate_proj.", ".up_proj.")
    kept = {
        name: tensor
        for name, tensor in read_shard(file).items()
        if not any(half in name for half in halves)
    }
    kept[f"{LAYER}.mlp.experts.gate_up_proj"] = ("BF16", (2, 128, 64), bytes(2 * 2 * 128 * 64))
    file.write_bytes(pack_shard(kept))
    codes = [one["code"] for one in run("inspect", out, "--json").json["findings"]]
    assert "experts-in-part" in codes
