"""inspect and verify judge any artifact by the engine that is to load it; experts and scale groups
of several formats are found in any artifact, and told in plans.
"""

import json
import shutil

import pytest
from checkpoints import (
    LAYER,
    LLAMA,
    SECOND,
    llama_shards,
    pack_shard,
    read_shard,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from engine_contents import without_fused_names

EXPERTS = [
    f"{LAYER}.mlp.experts.{n}.{leaf}_proj" for n in (0, 1) for leaf in ("gate", "up", "down")
]
ATTENTION = [f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkvo"]


def write_moe(folder):
    names = [f"{LAYER}.mlp.experts.0.{leaf}_proj" for leaf in ("gate", "up", "down")]
    tensors = {f"{name}.weight": weight(n) for n, name in enumerate((*names, f"{LAYER}.mlp.gate"))}
    return write_single(folder, tensors, {**LLAMA, "model_type": "qwen3_moe"})


@pytest.fixture
def made(tmp_path):
    """Make an artifact, of whose maker nothing is left."""

    def make(maker, *options):
        out = tmp_path / "made"
        done = run("quantize", maker(tmp_path / "m"), *options, "-o", out)
        assert done.code == 0, done.err
        (out / "quantization_config.json").unlink()
        shutil.rmtree(out / ".fp4convert")
        return out

    return make


def loads(document):
    return {each["engine"]: each["versions"] for each in document["engines"] if each["loads"]}


def test_inspect_lists_the_engines_that_load_it_a_line_each(made):
    out = made(write_llama, "--format", "nvfp4")
    document = run("inspect", out, "--json").json
    assert loads(document) == {"vllm": ">=0.32", "sglang": ">=0.5.22", "transformers": ">=5"}
    assert document["engines"][0] == {
        "engine": "vllm",
        "versions": ">=0.32",
        "loads": True,
        "evidence": "loaded",
        "class": "LlamaForCausalLM",
        "why": "loads NVFP4 and MXFP4, also beside FP8, of dense models and of experts",
    }
    assert [each["engine"] for each in document["engines"] if each["loads"] is False] == [
        *("tensorrt-llm", "llama.cpp", "mlx", "comfyui", "diffusers")
    ]
    lines = run("inspect", out).out.splitlines()
    assert [line.split() for line in lines if line.startswith(("loads in", "not in"))] == [
        ["loads", "in", "vllm", ">=0.32"],
        ["loads", "in", "sglang", ">=0.5.22"],
        ["loads", "in", "transformers", ">=5"],
    ]


def test_an_engine_of_the_dialect_that_does_not_load_it_is_told_with_the_reason(made):
    out = made(write_moe, "--format", "nvfp4")
    assert "transformers" not in loads(run("inspect", out, "--json").json)
    (line,) = (line for line in run("inspect", out).out.splitlines() if line.startswith("not in"))
    assert "ignores the global scales of NVFP4 experts and computes garbage" in line


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("asked", "code", "level", "why"),
    [
        ("vllm", 0, None, None),
        ("sglang:0.5.22", 0, None, None),
        ("sglang:0.5.21", 6, "error", "SGLang 0.5.21 crashes on weight-only NVFP4"),
        ("transformers", 6, "error", "transformers 5.23 ignores the global scales"),
        ("mlx", 6, "error", "mlx-lm 0.32 reads no artifact of dialect compressed-tensors"),
        ("vllm:0.30", 6, "error", "vLLM 0.30 is known to load such artifacts from version 0.32"),
    ],
)
def test_what_the_engine_does_not_load_is_an_error(made, command, asked, code, level, why):
    out = made(write_moe, "--format", "nvfp4")
    told = run(command, out, "--for", asked, "--json")
    found = [one for one in told.json["findings"] if one["code"].startswith("engine-")]
    assert told.code == code
    assert [one["level"] for one in found] == ([level] if level else [])
    assert all(one["detail"].startswith(why) for one in found)


def test_what_nobody_tried_is_no_fault(made):
    """Another version than any that was tried is unknown; one that fails is a fault."""
    out = made(write_moe, "--format", "nvfp4")
    for command, fault in (("inspect", "not healthy"), ("verify", "failed")):
        for asked, word in (
            ("vllm:0.30", "unknown to fp4convert: nobody tried it"),
            ("mlx", fault),
        ):
            told = run(command, out, "--for", asked)
            assert (told.code, told.out.splitlines()[-1]) == (6, word)


def test_what_has_errors_loads_nowhere(made):
    out = made(write_llama, "--format", "nvfp4")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (out / "config.json").write_text(json.dumps(config))
    told = run("inspect", out, "--for", "vllm", "--json")
    assert loads(told.json) == {}
    assert [one["code"] for one in told.json["findings"]] == ["kept-not-ignored", "engine-refuses"]
    assert "loads in" not in run("inspect", out).out


def test_what_is_unfinished_loads_nowhere_though_no_row_says_so(tmp_path):
    out = tmp_path / "made"
    run("quantize", write_llama(tmp_path / "m"), "--format", "nvfp4", "-o", out)
    (out / "quantization_config.json").unlink()
    document = run("inspect", out, "--json").json
    assert loads(document) == {}
    assert document["engines"][0]["why"].startswith(
        "has an artifact with errors before it: unfinished: "
    )
    first, second, *_ = run("verify", out, "--for", "vllm", "--json").json["findings"]
    assert (first["code"], second["code"]) == ("unfinished", "engine-refuses")


def test_wildcards_of_quark_are_for_transformers_alone(made):
    out = made(write_llama, "--format", "mxfp4", "--dialect", "quark", "--exclude", "*.o_proj")
    assert loads(run("inspect", out, "--json").json).keys() == {"vllm", "transformers"}
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["exclude"] = ["*.o_proj", "lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    assert loads(run("inspect", out, "--json").json).keys() == {"transformers"}
    assert run("inspect", out, "--for", "vllm").code == 6


def test_an_unknown_engine_is_told_before_the_artifact_is_opened(tmp_path):
    for command in ("inspect", "verify"):
        told = run(command, tmp_path / "nothing", "--for", "vlm", "--json")
        assert (told.code, told.json["error"]["code"]) == (2, "unknown-engine")


def test_a_gate_that_is_missed_is_no_fault_of_the_engine(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    run("quantize", source, "--format", "nvfp4", "-o", out, "-q")
    told = run("verify", out, "--source", source, "--for", "vllm", "--min-sqnr", "99", "--json")
    assert {one["code"] for one in told.json["findings"]} == {"sqnr-low"}


def test_a_file_that_was_changed_is_no_fault_of_the_engine(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    run("quantize", source, "--format", "nvfp4", "-o", out, "-q")
    (out / "config.json").write_text((out / "config.json").read_text() + "\n")
    told = run("verify", out, "--for", "vllm", "--json")
    assert [one["code"] for one in told.json["findings"]] == ["hash-mismatch"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_module_without_a_scale_is_told_once(made, command):
    """Every module lacks it, so that none is left; which says nothing of the engine."""
    out = made(write_llama, "--format", "nvfp4", "--dialect", "modelopt", "--activations", "16")
    for name in ("config.json", "hf_quant_config.json"):
        document = json.loads((out / name).read_text().replace("W4A16_NVFP4", "NVFP4"))
        for group in document.get("quantization_config", {}).get("config_groups", {}).values():
            group["input_activations"] = group["weights"]
        (out / name).write_text(json.dumps(document))
    told = run(command, out, "--for", "vllm", "--json").json["findings"]
    assert {one["code"] for one in told} - {"no-hashes"} == {"tensor-missing", "engine-refuses"}


def test_another_source_is_no_fault_of_the_engine(tmp_path):
    out = tmp_path / "out"
    run("quantize", write_llama(tmp_path / "m"), "--format", "nvfp4", "-o", out, "-q")
    shards = llama_shards()
    stem = f"{LAYER}.mlp.down_proj.weight"
    shards[SECOND][stem] = weight(77, 64, 128)
    other = write_checkpoint(tmp_path / "other", shards)
    told = run("verify", out, "--source", other, "--for", "vllm", "--json")
    codes = {one["code"] for one in told.json["findings"]}
    assert "source-differs" in codes
    assert "engine-refuses" not in codes


def write_uneven_moe(folder, down_columns=64):
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
    source, out = write_uneven_moe(tmp_path / "m", columns), tmp_path / "out"
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
    run("quantize", write_uneven_moe(tmp_path / "m"), "--format", "nvfp4", "-o", out, "-q")
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
