"""What engines load is one table: its rows are whole, and say what was tried by hand."""

import subprocess
import sys

import pytest
from engine_contents import contents
from paths import ROOT

from fp4convert.checkpoint.dialects.registry import DIALECTS, READ_ONLY
from fp4convert.engines.files import (
    ENGINES,
    MADE_OF,
    NICKNAMES,
    OTHERS,
    ModelList,
    find_engine,
    judged_as,
    known_engines,
    parse_engine,
    read_engine,
)
from fp4convert.engines.rows import FAILS
from fp4convert.engines.verdicts import judge
from fp4convert.errors import InputError, read_catalogue

ROWS = [(engine, row) for engine in known_engines(OTHERS) for row in engine.rows]
FINDINGS = {code for topic in read_catalogue()["findings"] for code in topic["codes"]}


def test_every_engine_has_a_file_and_every_file_an_engine():
    files = {file.stem for file in (ROOT / "configs" / "engines").glob("*.toml")}
    assert files == {*ENGINES, *OTHERS, "gpus"}
    assert {*NICKNAMES.values(), *MADE_OF.values()} <= {*ENGINES, *OTHERS}


FORMS = {"nvfp4", "mxfp4", "mxfp8", *(f"fp8 {each}" for each in ("tensor", "row", "128x128"))}


@pytest.mark.parametrize(("engine", "row"), ROWS, ids=lambda each: getattr(each, "key", ""))
def test_every_row_is_whole(engine, row):
    assert row.effect in ("loads", "slow", *FAILS)
    assert row.tried in ("run", "loaded", "read")
    assert row.says
    assert row.source
    assert bool(row.instead) == (row.effect != "loads")
    assert set(row.condition.dialects) <= {*DIALECTS, *READ_ONLY}
    assert set(row.condition.formats) <= FORMS
    assert set(row.condition.findings) <= FINDINGS
    assert row.proof or row.tried != "run"
    assert not row.proof or (ROOT / row.proof).exists()
    if row.effect == "loads":
        assert row.condition.dialects
        assert not row.condition.findings


READ = tuple(key for key in OTHERS if read_engine(key).dialects)
OF_PIPELINES = ("diffusers", "sglang-diffusion", "vllm-omni", "visualgen")


@pytest.mark.parametrize("engine", known_engines(READ), ids=lambda engine: engine.key)
def test_what_is_to_be_typed_loads(engine):
    """Of a plain model, or of those that a preset names."""
    classes = {"classes": ("FluxTransformer2DModel",)} if engine.key in OF_PIPELINES else {}
    assert any(not preset.models for preset in engine.presets)
    for preset in engine.presets:
        kinds = {preset.format + (" w4a4" if preset.activations == 4 else "")}
        kinds = {f"{kind} experts" for kind in kinds} if preset.keeps_others else kinds
        usual = "" if engine.key == "comfyui" else "llama"
        model = preset.models[0].replace("*", "") if preset.models else usual
        made = contents(preset.dialect, *kinds, model=model, is_diffusers=bool(classes), **classes)
        assert judge(engine, made).may_load, preset


def test_names_of_engines_are_understood():
    assert find_engine("VLLM").key == "vllm"
    assert find_engine("llama-cpp").key == "llama.cpp"
    assert find_engine("LM Studio").key == "llama.cpp"
    assert judged_as("vllm,LMStudio:1") == [
        "lm-studio itself was not looked at: judged as llama.cpp, of which it is made"
    ]
    assert find_engine("onnx") is None
    for odd in ("vlm", "vllm:", "vllm:new", "", ":0.33", 5, b"vllm", ["vllm", "sglang"]):
        with pytest.raises(InputError) as refused:
            parse_engine(odd)
        assert refused.value.code == "unknown-engine"


@pytest.mark.parametrize(
    ("classes", "missing"),
    [
        (("LlamaForCausalLM",), ""),
        (("NewForCausalLM", "LlamaForCausalLM"), ""),
        (("LlamaEmbeddingModel",), ""),
        (("NewForCausalLM",), "NewForCausalLM"),
        ((), ""),
    ],
)
def test_a_list_of_models_says_what_it_lacks(classes, missing):
    made = ModelList("an engine", "class", frozenset({"LlamaForCausalLM"}), ("ForCausalLM",))
    with_endings = made._replace(endings=("ForCausalLM", "EmbeddingModel"))
    assert with_endings.lacks(contents("plain", classes=classes)) == missing
    assert bool(made.lacks(contents("plain", classes=("LlamaEmbeddingModel",))))
    by_type = ModelList("an engine", "model_type", frozenset({"llama"}))
    assert by_type.lacks(contents("plain", model="bert")) == "bert"
    assert by_type.lacks(contents("plain", model="")) == ""


def test_every_list_belongs_to_an_engine():
    files = {file.stem for file in (ROOT / "configs" / "engines" / "models").glob("*.toml")}
    assert files == {engine.key for engine in known_engines() if engine.models}


def test_one_engine_is_one_file():
    """Files of other engines, and lists of models, are read where they are asked."""
    code = "from fp4convert.engines import files; files.parse_engine('vllm:0.33'); "
    code += (
        "print(files.read_engine.cache_info().currsize, files._read_models.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "0"]


def test_names_of_engines_load_no_rows():
    """The command line starts with them: --help needs no version."""
    code = "import sys; import fp4convert.engines.files; "
    code += "assert not {'packaging', 'tomllib', 'fp4convert.engines.rows'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
