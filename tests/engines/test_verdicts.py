"""Engines load what was tried, and not what the rows say they fail at."""

import json

import pytest
from engine_contents import contents

from fp4convert.engines.files import parse_engine
from fp4convert.engines.verdicts import find_traps, judge, judge_all, trap_text

CT, MO = "compressed-tensors", "modelopt"
W4A4_EXPERTS = {"vllm": ">=0.32", "sglang": ">=0.5.12"}


def loaded(*given, **facts):
    """The engines that load such artifacts of some class, with versions."""
    found = judge_all(contents(*given, **facts))
    return {each.engine.key: each.versions for each in found if each.may_load}


def claim(verdict):
    """What is claimed of a class that was tried, where rows say so of this one."""
    return True if verdict.may_load else verdict.loads


@pytest.mark.parametrize(
    ("given", "facts", "expected"),
    [
        ((CT, "nvfp4"), {}, {"vllm": ">=0.32", "sglang": ">=0.5.22", "transformers": ">=5"}),
        ((CT, "nvfp4 w4a4"), {}, {"vllm": ">=0.32", "sglang": ">=0.5.12", "transformers": ">=5"}),
        ((CT, "mxfp4"), {}, {"vllm": ">=0.32", "transformers": ">=5"}),
        (
            (CT, "mxfp4 experts"),
            {},
            {"vllm": ">=0.32", "transformers": ">=5"},
        ),
        ((CT, "mxfp4", "mxfp4 experts"), {}, {"vllm": ">=0.32", "transformers": ">=5"}),
        ((CT, "nvfp4", "nvfp4 experts"), {}, {"vllm": ">=0.32", "sglang": ">=0.5.22"}),
        (
            (CT, "nvfp4", "fp8 row"),
            {},
            {"vllm": ">=0.32", "sglang": ">=0.5.22", "transformers": ">=5"},
        ),
        (
            (CT, "nvfp4", "fp8 row"),
            {"names_fused": False},
            {"vllm": ">=0.32", "transformers": ">=5"},
        ),
        (
            (CT, "nvfp4", "fp8 row"),
            {"names_fused": False, "model": "qwen3_moe"},
            {"vllm": ">=0.32", "sglang": ">=0.5.22", "transformers": ">=5"},
        ),
        ((CT, "nvfp4"), {"names_fused": False}, {"vllm": ">=0.32", "transformers": ">=5"}),
        ((CT, "nvfp4 experts", "fp8 row"), {}, {"vllm": ">=0.32", "sglang": ">=0.5.22"}),
        ((CT, "nvfp4 experts", "fp8 row experts"), {}, {}),
        ((CT, "nvfp4 w4a4 experts", "fp8 row experts"), {}, W4A4_EXPERTS),
        ((MO, "nvfp4"), {"names_fused": False}, {"vllm": ">=0.24", "sglang": ">=0.5.12"}),
        ((MO, "nvfp4", "fp8 tensor"), {"names_fused": False}, {"vllm": ">=0.24"}),
        ((MO, "nvfp4", "fp8 tensor"), {"model": "qwen3_vl_moe"}, {"vllm": ">=0.24"}),
        ((CT, "mxfp4 experts"), {"model": "gpt_oss"}, {}),
        (
            ("gpt-oss", "mxfp4 experts"),
            {"model": "gpt_oss"},
            {"vllm": ">=0.32", "sglang": ">=0.5.23", "transformers": ">=5"},
        ),
        ((MO, "nvfp4"), {}, {"vllm": ">=0.24", "sglang": ">=0.5.12"}),
        ((MO, "nvfp4 w4a4"), {}, {"vllm": ">=0.24", "sglang": ">=0.5.12", "tensorrt-llm": ""}),
        ((MO, "nvfp4", "fp8 tensor"), {}, {"vllm": ">=0.24", "sglang": ">=0.5.12"}),
        ((MO, "nvfp4", "fp8 128x128"), {}, {"sglang": ">=0.5.12"}),
        ((MO, "nvfp4", "fp8 tensor"), {"findings": frozenset({"input-scale-missing"})}, {}),
        (
            (MO, "nvfp4 experts", "fp8 tensor"),
            {"model": "nemotron_h"},
            {"vllm": ">=0.24", "sglang": ">=0.5.12"},
        ),
        ((MO, "nvfp4 w4a4"), {"is_diffusers": True}, {"diffusers": ""}),
        ((MO, "nvfp4 w4a4"), {"is_diffusers": True, "is_sharded": True}, {}),
        (("quark", "mxfp4"), {}, {"vllm": ">=0.32", "transformers": ">=5"}),
        (
            ("quark", "mxfp4 w4a4"),
            {},
            {"vllm": ">=0.32", "sglang": ">=0.5.23", "transformers": ">=5"},
        ),
        (("quark", "mxfp4 experts"), {}, {"vllm": ">=0.32"}),
        (
            (CT, "mxfp4 experts"),
            {"model": "qwen3_vl_moe_text"},
            {"vllm": ">=0.32"},
        ),
        (("mlx", "mxfp4 experts"), {"model": "mixtral"}, {"mlx": ""}),
        (("mlx", "mxfp4 experts"), {"model": "qwen3_moe"}, {}),
        (("mlx", "mxfp4"), {"model": "qwen3_moe"}, {"mlx": ""}),
        (("quark", "nvfp4"), {}, {}),
        (("quark", "nvfp4 w4a4"), {}, {"vllm": ">=0.32"}),
        (("gguf", "nvfp4"), {}, {"llama.cpp": ""}),
        (("mlx", "nvfp4"), {}, {"mlx": ""}),
        (("comfy", "nvfp4"), {"model": ""}, {"comfyui": ""}),
        (("comfy", "nvfp4"), {"is_diffusers": True}, {}),
        (("plain", "nvfp4"), {}, {}),
        (
            (CT, "nvfp4"),
            {"model": "llama4", "modules": frozenset({"vision_model.model.layers.0.mlp.fc1"})},
            {"transformers": ">=5"},
        ),
        (
            (CT, "nvfp4"),
            {"model": "kimi_k2", "modules": frozenset({"model.layers.0.self_attn.o_proj"})},
            {"vllm": ">=0.32"},
        ),
        (
            (CT, "nvfp4"),
            {"model": "kimi_k2", "modules": frozenset({"model.layers.0.mlp.down_proj"})},
            {"vllm": ">=0.32", "sglang": ">=0.5.22"},
        ),
    ],
)
def test_engines_load_what_was_tried(given, facts, expected):
    assert loaded(*given, **facts) == expected


@pytest.mark.parametrize(
    ("asked", "given", "loads", "why"),
    [
        ("sglang:0.5.21", (CT, "nvfp4"), False, "crashes on weight-only NVFP4"),
        ("sglang:0.5.22", (CT, "nvfp4"), True, "loads NVFP4"),
        ("sglang:0.6", (CT, "nvfp4"), True, "loads NVFP4"),
        ("vllm:0.20", (CT, "nvfp4"), None, "is known to load such artifacts from version 0.32 on"),
        ("vllm:v0.13", (CT, "nvfp4 experts"), False, "does not load weight-only NVFP4 experts"),
        ("vllm", ("gguf", "nvfp4"), False, "reads no artifact of dialect gguf"),
        ("tensorrt-llm", (MO, "nvfp4"), None, "is not known to load such artifacts"),
        ("TRTLLM", (MO, "nvfp4 w4a4"), True, "loads NVFP4"),
    ],
)
def test_a_version_is_judged_by_itself(asked, given, loads, why):
    engine, version = parse_engine(asked)
    verdict = judge(engine, contents(*given), version)
    assert (claim(verdict), why in verdict.why) == (loads, True), verdict.why


@pytest.mark.parametrize(
    ("engine", "dialect", "model", "names", "loads"),
    [
        ("mlx", "mlx", "bert", "BertModel", False),
        ("mlx", "mlx", "mistral", "MistralForCausalLM", True),
        ("vllm", CT, "llama", "LlamaForCausalLM", True),
        ("vllm", CT, "qwen3", "Qwen3Model", True),
        ("vllm", CT, "new", "NewForCausalLM", None),
        ("tensorrt-llm", MO, "bert", "BertModel", None),
        ("tensorrt-llm", MO, "qwen3", "Qwen3ForCausalLM", True),
        ("diffusers", MO, "qwen3", "Qwen3ForCausalLM", False),
        ("sglang", CT, "new", "NewForCausalLM", None),
        ("transformers", CT, "new", "NewForCausalLM", False),
        ("comfyui", "comfy", "llama", "LlamaForCausalLM", False),
        ("comfyui", "comfy", "", "", True),
    ],
)
def test_an_engine_loads_models_that_it_has_a_class_for(engine, dialect, model, names, loads):
    known, _ = parse_engine(engine)
    classes = tuple(filter(None, [names]))
    parts = "nvfp4 w4a4" if dialect == MO else "nvfp4"
    verdict = judge(known, contents(dialect, parts, model=model, classes=classes))
    assert claim(verdict) is loads, verdict.why
    if not loads and engine != "comfyui":
        assert verdict.why.startswith("has no class for ")


def test_code_of_the_models_own_runs_in_transformers():
    known, _ = parse_engine("transformers")
    made = contents(CT, "nvfp4", model="new", has_code=True)
    assert judge(known, made).may_load


def test_diffusers_loads_classes_that_it_takes_as_one_file():
    known, _ = parse_engine("diffusers")
    for name, loads in (("FluxTransformer2DModel", True), ("NewTransformer2DModel", False)):
        made = contents(MO, "nvfp4 w4a4", model="", classes=(name,), is_diffusers=True)
        assert judge(known, made).may_load is loads


def test_a_trap_names_the_newest_version_or_the_end_of_the_old_ones():
    found = [trap_text(*trap) for trap in find_traps(contents(CT, "nvfp4 experts"))]
    assert found == [
        "transformers 5.23 ignores the global scales of NVFP4 experts and computes garbage;"
        " for it use --format mxfp4, or dequantize the artifact"
    ]
    (old,) = find_traps(contents(MO, "nvfp4 experts", findings=frozenset({"activations-unsaid"})))
    assert trap_text(*old).startswith("vLLM before 0.29 multiplies weight-only experts by zero")


def test_a_verdict_is_json():
    (first, *_) = judge_all(contents(CT, "nvfp4", classes=("LlamaForCausalLM",)))
    assert json.loads(json.dumps(first.as_json())) == {
        "engine": "vllm",
        "versions": ">=0.32",
        "loads": True,
        "evidence": "loaded",
        "class": "LlamaForCausalLM",
        "why": "loads NVFP4 and MXFP4, also beside FP8, of dense models and of experts",
    }


@pytest.mark.parametrize("fp8", ["fp8 tensor", "fp8 row", "fp8 128x128"])
@pytest.mark.parametrize("key", ["vllm", "sglang"])
def test_what_is_told_of_fp8_experts_loads_there(key, fp8):
    """The other dialect does not load each of them, and names this one then."""
    known, parts = parse_engine(key)[0], ("nvfp4", f"{fp8} experts")
    told = judge(known, contents(CT, *parts)).instead
    assert told.startswith("use --activations 4; or, where FP8 has ")
    assert judge(known, contents(CT, "nvfp4 w4a4", parts[1])).may_load
    kinds = {
        "a scale for each matrix": ["fp8 tensor"],
        "no scale for each row": ["fp8 tensor", "fp8 128x128"],
    }
    (named,) = (which for words, which in kinds.items() if words in told)
    assert judge(known, contents(MO, *parts)).may_load is (fp8 in named)


def test_kernels_that_ran_are_no_engine_that_did():
    engine, _ = parse_engine("comfyui")
    verdict = judge(engine, contents("comfy", "nvfp4", model=""))
    assert (verdict.loads, verdict.evidence) == (True, "loaded")
    assert verdict.words == "ComfyUI's kernels compute such weights; it was not run itself"
