"""Experts and scale groups of several formats are found in any artifact, and told in plans."""

import pytest
from checkpoints import LAYER, LLAMA, pack_shard, read_shard, run, weight, write_single
from engine_contents import without_fused_names

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
@pytest.mark.sweep(3)
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


def test_a_matrix_of_a_type_that_stays_is_told_of_and_is_not_called_absent(tmp_path):
    tensors = {f"{name}.weight": weight(rows=64) for name in ATTENTION}
    tensors[f"{ATTENTION[1]}.weight"] = ("F64", (64, 64), bytes(8 * 64 * 64))
    source, out = write_single(tmp_path / "m", tensors), tmp_path / "out"
    made = run("quantize", source, "--format", "nvfp4", "-o", out, "--json")
    group, left = made.json["warnings"]
    why = "F64, not one of BF16, F16, F32"
    assert left.startswith(f"1 weight left as in the source: {why}, the first '{ATTENTION[1]}.w")
    assert group.startswith(f"1 scale group q_proj/k_proj/v_proj: k_proj stays as it is ({why}),")
    codes = [one["code"] for one in run("inspect", out, "--json").json["findings"]]
    assert codes == ["group-in-part"]


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


KEPT, MIXED = ("--exclude", "*.[qkv]_proj"), ("--target-bits", "6.5")


@pytest.mark.parametrize(
    ("model", "dialect", "format", "options", "says"),
    [
        ("llama", "compressed-tensors", "nvfp4", KEPT, "builds kept q/k/v"),
        ("llama", "compressed-tensors", "nvfp4", MIXED, "finds no scheme for q/k/v"),
        ("llama", "modelopt", "nvfp4", MIXED, "builds q/k/v, or gate and up, in bf16"),
        ("llama", "quark", "mxfp4", KEPT, "builds kept q/k/v as a four-bit matrix"),
        ("llama", "modelopt", "nvfp4", KEPT, ""),
        ("llama", "compressed-tensors", "nvfp4", (), ""),
        ("qwen3_moe", "compressed-tensors", "nvfp4", KEPT, ""),
        ("qwen3_moe", "compressed-tensors", "nvfp4", MIXED, ""),
        ("qwen3_moe", "modelopt", "nvfp4", MIXED, ""),
        ("deepseek_v3", "quark", "mxfp4", KEPT, ""),
    ],
)
def test_records_that_name_the_parts_alone_are_judged_as_sglang_does(
    model, dialect, format, options, says, tmp_path
):
    """What its loader said of each is in configs/engines/sglang.toml."""
    names = [*ATTENTION, *(f"{LAYER}.mlp.{leaf}_proj" for leaf in ("gate", "up", "down"))]
    tensors = {f"{name}.weight": weight(number, rows=64) for number, name in enumerate(names)}
    source = write_single(tmp_path / "m", tensors, {**LLAMA, "model_type": model})
    out = tmp_path / "out"
    words = ["--dialect", dialect, "--format", format]
    words += ["--activations", 4] if dialect == "quark" else []
    made = run("quantize", source, *words, *options, "-o", out)
    assert made.code == 0, made.err
    for command in ("inspect", "verify"):
        assert run(command, out, "--for", "sglang").code == 0
    without_fused_names(out)
    for command in ("inspect", "verify"):
        assert run(command, out, "--for", "vllm").code == 0
        told = run(command, out, "--for", "sglang", "--json")
        details = [one["detail"] for one in told.json["findings"]]
        assert told.code == (6 if says else 0)
        assert not says or any(detail.startswith(f"SGLang 0.5.23 {says}") for detail in details)
