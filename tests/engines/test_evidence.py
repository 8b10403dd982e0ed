"""Claims that an engine loads something are as wide as what a judge saw it load."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_contents import contents
from paths import ROOT

from fp4convert.checkpoint.class_table import types_inside
from fp4convert.engines.files import LoadedClasses, parse_engine, read_engine
from fp4convert.engines.rows import Contents
from fp4convert.engines.verdicts import judge
from fp4convert.planning.engine_facts import with_model

LOADED = ROOT / "configs" / "engines" / "loaded"
RESULTS = ROOT / "tests" / "engines" / "judges" / "results" / "classes"
CT = "compressed-tensors"
LLAMA = {"classes": ("LlamaForCausalLM",)}


def rows(engine: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{engine}.json").read_text())["rows"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("engine", "judged", "loads"), [("vllm", 120, 100), ("sglang", 85, 70)])
def test_most_classes_that_transformers_builds_are_judged(
    engine: str, judged: int, loads: int
) -> None:
    answered = {row["class"] for row in rows(engine) if row["outcome"] != "source"}
    exact = {row["class"] for row in rows(engine) if row["outcome"] == "exact"}
    assert len(answered) >= judged
    assert len(exact) >= loads


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_every_result_is_explained_and_is_in_the_file(engine: str) -> None:
    table = tomllib.loads((LOADED / f"{engine}.toml").read_text())
    lines = [line.split(" ", 4) for line in table["rows"].splitlines()]
    written = {tuple(words[:4]): "".join(words[4:]) for words in lines}
    for row in rows(engine):
        assert bool(row["faults"]) == (row["outcome"] != "exact"), row
        if row["outcome"] in ("exact", "refuses", "wrong"):
            model = ":".join(filter(None, (row["class"], row.get("inner"))))
            key = (model, row["dialect"], row["formats"], row["digest"])
            assert (written[key] == "") == (row["outcome"] == "exact"), row


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_rows_have_the_types_of_models_inside_where_config_json_chooses(engine: str) -> None:
    judged = (row for row in rows(engine) if row["outcome"] in ("exact", "refuses", "wrong"))
    inner = {row["class"]: row.get("inner", "") for row in judged}
    for name, types in inner.items():
        paths = [word.partition("=")[0] for word in types.split(",")]
        free = types_inside({"architectures": [name]}).split(",")
        assert paths == [word.partition("=")[0] for word in free], name


def test_what_a_judge_loaded_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {("LlamaForCausalLM", CT, "nvfp4/16"): "", ("Other", CT, "nvfp4/16"): "KeyError: 'x'"}
    _judge_by(monkeypatch, seen)
    engine, version = parse_engine("vllm")
    verdict = judge(engine, contents(CT, "nvfp4", **LLAMA), version)
    assert (verdict.loads, verdict.evidence, verdict.name) == (True, "loaded", "LlamaForCausalLM")
    # Of another class, other activations, another version nothing was seen.
    for asked, given in (
        ("vllm", contents(CT, "nvfp4", classes=("Qwen2ForCausalLM",))),
        ("vllm", contents(CT, "nvfp4 w4a4", **LLAMA)),
        ("vllm", contents(CT, "nvfp4", cache="fp8", **LLAMA)),
        ("vllm:0.32", contents(CT, "nvfp4", **LLAMA)),
    ):
        verdict = judge(*_swapped(parse_engine(asked), given))
        assert (verdict.loads, verdict.evidence, verdict.may_load) == (None, "not-tried", True)
        assert "not tried with this class" in verdict.why


def test_what_a_judge_saw_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _judge_by(monkeypatch, {("LlamaForCausalLM", CT, "nvfp4/16"): "KeyError: 'x'"})
    engine, version = parse_engine("vllm")
    verdict = judge(engine, contents(CT, "nvfp4", **LLAMA), version)
    assert (verdict.loads, verdict.evidence, verdict.may_load) == (False, "loaded", False)
    assert "KeyError: 'x'" in verdict.why


def asked(name: str, **config: Any) -> Contents:
    """An NVFP4 artifact of a class under a config.json."""
    checkpoint: Any = SimpleNamespace(
        config={"architectures": [name], **config}, tensors=(), shards=()
    )
    return with_model(contents(CT, "nvfp4"), checkpoint)


LLAVA, CLIP = "LlavaForConditionalGeneration", {"model_type": "clip_vision_model"}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_class_is_loaded_only_with_the_models_inside_that_a_judge_had(engine: str) -> None:
    def judged(name: str, **config: Any) -> Any:
        return judge(*_swapped(parse_engine(engine), asked(name, **config)))

    tried = judged(LLAVA, text_config={"model_type": "llama"}, vision_config=CLIP)
    assert (tried.loads, tried.evidence, tried.name) == (True, "loaded", LLAVA)
    inside = "(text_config=llama, vision_config=clip_vision_model)"
    assert tried.words.endswith(f"as a tiny {LLAVA} {inside}")
    # Old files leave out the type of Llama, the default of this class.
    assert judged(LLAVA, text_config={"hidden_size": 64}, vision_config=CLIP).loads
    for text, vision in (("mistral", CLIP), ("llama", {"model_type": "siglip_vision_model"})):
        other = judged(LLAVA, text_config={"model_type": text}, vision_config=vision)
        assert (other.loads, other.evidence, other.may_load) == (None, "not-tried", True)
        assert f"(text_config={text}, vision_config={vision['model_type']})" in other.why


def test_types_inside_decide_nothing_where_the_class_has_its_own() -> None:
    # Qwen3-VL's text and vision models are of the class, whatever config.json says of their types.
    for text in ("qwen3_vl_text", "llama"):
        given = asked("Qwen3VLForConditionalGeneration", text_config={"model_type": text})
        assert judge(*_swapped(parse_engine("vllm"), given)).evidence == "loaded"


def test_what_was_read_is_said_to_be_read() -> None:
    engine, version = parse_engine("tensorrt-llm")
    verdict = judge(engine, contents("modelopt", "nvfp4 w4a4", **LLAMA), version)
    assert (verdict.loads, verdict.evidence, verdict.may_load) == (None, "read", True)
    assert "was read, not loaded" in verdict.why
    verdict = judge(engine, contents("modelopt", "nvfp4", **LLAMA), version)
    assert (verdict.loads, verdict.evidence, verdict.may_load) == (None, "not-tried", False)


def _judge_by(monkeypatch: pytest.MonkeyPatch, seen: dict[tuple[str, str, str], str]) -> None:
    version = read_engine("vllm").version
    assert version is not None
    monkeypatch.setattr(
        "fp4convert.engines.files._read_judged", lambda key: LoadedClasses(version, seen)
    )


def _swapped(asked: tuple[Any, Any], given: Any) -> tuple[Any, Any, Any]:
    return asked[0], given, asked[1]


def test_files_are_small() -> None:
    assert sum(file.stat().st_size for file in Path(LOADED).glob("*.toml")) < 135_000
