"""What engines load is one table: its rows are whole, and say what was tried by hand."""

import json

import pytest
from paths import ROOT

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.errors import InputError, read_catalogue
from fp4convert.recipes.engines import (
    ENGINES,
    FAILS,
    NICKNAMES,
    Condition,
    Contents,
    Part,
    engine_asked,
    engine_called,
    judge_contents,
    known_engines,
    read_versions,
    trap_text,
    traps_of,
    verdicts_on,
)

CT, MO = "compressed-tensors", "modelopt"
ROWS = [(engine, row) for engine in known_engines() for row in engine.rows]
FINDINGS = {code for topic in read_catalogue()["findings"] for code in topic["codes"]}


def contents(dialect, *parts, model="llama", **facts):
    """Parts as "nvfp4", "mxfp4 experts" or "nvfp4 w4a4 experts"."""
    made = set()
    for words in parts:
        four = "w4a4" in words
        plain = words.replace(" w4a4", "").replace(" experts", "")
        made.add(Part(plain, 4 if four else 16, "experts" in words))
    return Contents(dialect, frozenset(made), model, **facts)


def loaded(*given, **facts):
    """The engines that load it, with versions."""
    found = verdicts_on(contents(*given, **facts))
    return {each.engine.key: each.versions for each in found if each.loads}


def test_every_engine_has_a_file_and_every_file_an_engine():
    files = {file.stem for file in (ROOT / "configs" / "engines").glob("*.toml")}
    assert files == set(ENGINES)
    assert set(NICKNAMES.values()) <= set(ENGINES)


@pytest.mark.parametrize(("engine", "row"), ROWS, ids=lambda each: getattr(each, "key", ""))
def test_every_row_is_whole(engine, row):
    assert row.effect in ("loads", "slow", *FAILS)
    assert row.tried in ("run", "loaded", "read")
    assert row.says
    assert row.source
    assert bool(row.instead) == (row.effect != "loads")
    assert set(row.condition.dialects) <= set(DIALECTS)
    assert set(row.condition.formats) <= {"nvfp4", "mxfp4"}
    assert set(row.condition.findings) <= FINDINGS
    assert row.proof or row.tried != "run"
    assert not row.proof or (ROOT / row.proof).exists()
    if row.effect == "loads":
        assert row.condition.dialects
        assert not row.condition.findings


@pytest.mark.parametrize("engine", known_engines(), ids=lambda engine: engine.key)
def test_what_is_to_be_typed_loads(engine):
    """Of a plain model, or of those that a choice names."""
    assert any(not choice.models for choice in engine.choices)
    for choice in engine.choices:
        kinds = {choice.format + (" w4a4" if choice.activations == 4 else "")}
        kinds = {f"{kind} experts" for kind in kinds} if choice.others else kinds
        model = choice.models[0].replace("*", "") if choice.models else "llama"
        made = contents(choice.dialect, *kinds, model=model, is_diffusers=engine.key == "diffusers")
        assert judge_contents(engine, made).loads, choice


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
            {"model": "phi3"},
            {"vllm": ">=0.32", "sglang": ">=0.5.22", "transformers": ">=5"},
        ),
        ((CT, "nvfp4", "fp8 row"), {}, {"vllm": ">=0.32", "transformers": ">=5"}),
        ((CT, "mxfp4 experts"), {"model": "gpt_oss"}, {}),
        (
            ("gpt-oss", "mxfp4 experts"),
            {"model": "gpt_oss"},
            {"vllm": ">=0.32", "transformers": ">=5"},
        ),
        ((MO, "nvfp4"), {}, {"vllm": ">=0.24", "sglang": ">=0.5.12"}),
        ((MO, "nvfp4 w4a4"), {}, {"vllm": ">=0.24", "sglang": ">=0.5.12", "tensorrt-llm": ""}),
        ((MO, "nvfp4", "fp8 tensor"), {}, {"vllm": ">=0.24"}),
        ((MO, "nvfp4", "fp8 128x128"), {}, {}),
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
        (("comfy", "nvfp4"), {}, {"comfyui": ""}),
        (("comfy", "nvfp4"), {"is_diffusers": True}, {}),
        (("plain", "nvfp4"), {}, {}),
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
    engine, version = engine_asked(asked)
    verdict = judge_contents(engine, contents(*given), version)
    assert (verdict.loads, why in verdict.why) == (loads, True), verdict.why


def test_conditions_ask_for_all_that_they_name():
    made = contents(CT, "nvfp4", "mxfp4 experts", "fp8 row")
    assert Condition().fits(made)
    assert Condition(formats=("mxfp4",), has_experts=True, has_others=False).fits(made)
    assert Condition(formats=("nvfp4",), has_experts=False, has_others=True).fits(made)
    assert not Condition(formats=("nvfp4",), has_experts=True).fits(made)
    assert Condition(beside=("fp8*",), is_mixed=True).fits(made)
    assert not Condition(beside=("int4",)).fits(made)
    assert not Condition(not_models=("lla*",)).fits(made)
    assert not Condition(classes=("LlamaForCausalLM",)).fits(made)
    assert not Condition(findings=("scale-layout",)).fits(made)
    assert not Condition().fits(contents(CT, "fp8 row")), "rows are about four-bit modules"


@pytest.mark.parametrize("text", ["=0.5", ">0.5", ">=0.5,>=0.6", "5.x", "<0.5 "])
def test_odd_versions_are_refused(text):
    with pytest.raises(ValueError, match="versions"):
        read_versions(text)


def test_names_of_engines_are_understood():
    assert engine_called("VLLM").key == "vllm"
    assert engine_called("llama-cpp").key == "llama.cpp"
    assert engine_called("ollama").key == "llama.cpp"
    assert engine_called("onnx") is None
    for odd in ("vlm", "vllm:", "vllm:new"):
        with pytest.raises(InputError) as refused:
            engine_asked(odd)
        assert refused.value.code == "unknown-engine"


def test_a_trap_names_the_newest_version_or_the_end_of_the_old_ones():
    found = [trap_text(*trap) for trap in traps_of(contents(CT, "nvfp4 experts"))]
    assert found == [
        "transformers 5.23 ignores the global scales of NVFP4 experts and computes garbage;"
        " for it use --format mxfp4, or dequantize the artifact"
    ]
    (old,) = traps_of(contents(MO, "nvfp4 experts", findings=frozenset({"activations-unsaid"})))
    assert trap_text(*old).startswith("vLLM before 0.29 multiplies weight-only experts by zero")


def test_a_verdict_is_json():
    (first, *_) = verdicts_on(contents(CT, "nvfp4"))
    assert json.loads(json.dumps(first.as_json())) == {
        "engine": "vllm",
        "versions": ">=0.32",
        "loads": True,
        "why": "loads NVFP4 and MXFP4, also beside FP8, of dense models and of experts",
    }
