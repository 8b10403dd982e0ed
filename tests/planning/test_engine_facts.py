"""What engines are known not to load is told in the plan, in the result and in JSON."""

import pytest
from checkpoints import LAYER, LLAMA, run, weight, write_llama, write_single
from diffusion import WAN_CONFIG, wan_tensors, write_component, write_wan

from fp4convert.engines.files import known_engines


def write_model(folder, model_type, experts=False, others=True, shared=False):
    names = [f"{LAYER}.self_attn.o_proj"] if others else []
    names += [f"{LAYER}.mlp.shared_experts.down_proj"] if shared else []
    for expert in range(2) if experts else ():
        leaves = ("gate_proj", "up_proj", "down_proj")
        names += [f"{LAYER}.mlp.experts.{expert}.{leaf}" for leaf in leaves]
    tensors = {f"{name}.weight": weight(rows=64) for name in names}
    return write_single(folder, tensors, {**LLAMA, "model_type": model_type})


def engines_warned_of(source, tmp_path, *options, fmt="nvfp4"):
    """The engines of warnings: in the dry run's document, in that of the run, and on stderr."""
    asked = ("quantize", source, "--format", fmt, "-o", tmp_path / "out", "--force", *options)
    planned, told = run(*asked, "--dry-run", "--json"), run(*asked, "--json")
    names = [engine.name for engine in known_engines()]

    def engines(warnings):
        lines = [line.rpartition(": ")[2] if ": " in line else line for line in warnings]
        return [line.split()[0] for line in lines if line.split()[0] in names]

    found = engines(told.json["warnings"])
    assert engines(planned.json["warnings"]) == found
    assert [name for name in names if f"{name} " in told.err] == sorted(set(found), key=names.index)
    return found


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "mlx", "plain"])
def test_a_plain_llama_has_no_warning(dialect, tmp_path):
    assert engines_warned_of(write_llama(tmp_path / "m"), tmp_path, "--dialect", dialect) == []


@pytest.mark.parametrize(
    ("source", "fmt", "dialect", "engines"),
    [
        ({"model_type": "qwen3_moe", "experts": True}, "nvfp4", "compressed-tensors", ["HF"]),
        ({"model_type": "qwen3_moe", "experts": True}, "nvfp4", "modelopt", []),
        ({"model_type": "llama"}, "mxfp4", "quark", ["SGLang"]),
        ({"model_type": "llama"}, "nvfp4", "quark", ["vLLM", "SGLang", "HF"]),
        ({"model_type": "deepseek_v3", "shared": True}, "nvfp4", "compressed-tensors", []),
        ({"model_type": "qwen3_moe", "experts": True}, "mxfp4", "compressed-tensors", ["SGLang"]),
        (
            {"model_type": "qwen3_moe", "experts": True, "others": False},
            *("mxfp4", "compressed-tensors", ["SGLang"]),
        ),
        ({"model_type": "llama"}, "mxfp4", "compressed-tensors", ["SGLang"]),
        ({"model_type": "t5"}, "nvfp4", "compressed-tensors", ["HF"]),
        ({"model_type": "wav2vec2-bert"}, "nvfp4", "compressed-tensors", ["HF"]),
        ({"model_type": "t5"}, "nvfp4", "modelopt", []),
        (
            {"model_type": "gpt_oss", "experts": True},
            *("mxfp4", "compressed-tensors", ["vLLM", "SGLang"]),
        ),
    ],
)
@pytest.mark.sweep(3)
def test_a_trap_is_told_where_all_that_it_names_is_so(source, fmt, dialect, engines, tmp_path):
    folder = write_model(tmp_path / "m", **source)
    expected = ["transformers" if engine == "HF" else engine for engine in engines]
    assert engines_warned_of(folder, tmp_path, "--dialect", dialect, fmt=fmt) == expected


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        ((), ["Diffusers"] * 2),
        (("--dialect", "comfy"), ["ComfyUI"] * 2),
        (("--dialect", "modelopt"), ["Diffusers"] * 2),
        (("--dialect", "modelopt", "--activations", "4"), []),
    ],
)
def test_a_pipeline_is_told_what_loads_it(options, engines, tmp_path):
    assert engines_warned_of(write_wan(tmp_path / "wan"), tmp_path, *options) == engines


def test_diffusers_reads_one_file_alone(tmp_path):
    folder = tmp_path / "wan"
    write_component(folder, [wan_tensors(), {"blocks.8.ffn.net.2.weight": weight()}], WAN_CONFIG)
    options = ("--dialect", "modelopt", "--activations", "4")
    assert engines_warned_of(folder, tmp_path, *options) == ["Diffusers"]


def test_a_transcoded_artifact_has_the_warnings_and_the_next_step_of_its_dialect(tmp_path):
    source = write_model(tmp_path / "m", "qwen3_moe", experts=True)
    made, out = tmp_path / "made", tmp_path / "out"
    quantized = ("quantize", source, "--format", "nvfp4", "--dialect", "modelopt", "-o", made)
    assert run(*quantized, "--json").json["warnings"] == []
    asked = ("transcode", made, "-o", out, "--dialect", "compressed-tensors")
    told = run(*asked, "--json")
    assert [line.split()[0] for line in told.json["warnings"]] == ["transformers"]
    assert told.err.count("transformers 5.23 ignores the global scales") == 1
    assert told.json["next"] == [f"fp4convert verify {out}", f"vllm serve {out}"]
