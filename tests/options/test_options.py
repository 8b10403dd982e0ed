"""options/ and recipes/options.py: words and references as people write them."""

from pathlib import Path

import pytest
from checkpoints import run, write_llama

from fp4convert.cli.commands import COMMANDS
from fp4convert.errors import InputError
from fp4convert.options.looking import InspectOptions, VerifyOptions
from fp4convert.options.measuring import CalibrateOptions, CompareOptions
from fp4convert.options.rewriting import DequantizeOptions, TranscodeOptions
from fp4convert.options.writing import QuantizeOptions
from fp4convert.recipes.options import _folded, declared_in


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [
        ("format", "NVFP4", "nvfp4"),
        ("format", "mx-fp4", "mxfp4"),
        ("dialect", "compressed_tensors", "compressed-tensors"),
        ("dialect", "GGUF", "gguf"),
        ("method", "AWQ", "awq"),
        ("scale_rule", "four_over_six", "four-over-six"),
        ("kv_cache", "FP8_E4M3", "fp8"),
        ("stack_order", "out-in", "out_in"),
        ("format", "nvpf4", "nvpf4"),
    ],
)
def test_words_are_spelled_as_they_are_legal(option, given, meant):
    options = QuantizeOptions("M", **{"format": "nvfp4", option: given})
    assert getattr(options, option) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("FP32", "fp32"), ("half", "half")],
)
def test_dtypes_are_taken_by_the_words_of_torch(given, meant):
    assert DequantizeOptions("M", "out", dtype=given).dtype == meant


def test_no_two_words_of_an_option_are_spelled_alike():
    for command in COMMANDS.values():
        for each in declared_in(command.options):
            words = [*each.option.words, *each.option.synonyms]
            assert len({_folded(word) for word in words}) == len(words), each.name
            assert set(each.option.synonyms.values()) <= set(each.option.words)


def test_documents_have_the_legal_word(tmp_path):
    source = write_llama(tmp_path / "M")
    words = ("--format", "NVFP4", "--dialect", "Compressed_Tensors", "--method", "RTN")
    plan = run("quantize", source, *words, "--dry-run", "--json").json
    told = [plan[key] for key in ("format", "dialect", "method")]
    assert told == ["nvfp4", "compressed-tensors", "rtn"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--format", "nvpf4"), "did you mean nvfp4?"),
        (("--format", "fp4"), "did you mean nvfp4 or mxfp4?"),
        (("--format", "mxfp6"), "llama.cpp's own types"),
        (("--format", "INT4"), "expected nvfp4, mxfp4, fp8 or mxfp8"),
        (("--format", "nvfp4", "--dialect", "modelop"), "did you mean modelopt?"),
        (("--format", "nvfp4", "--method", "gtpq"), "did you mean gptq?"),
        (("--format", "nvfp4", "--scale-rule", "amx"), "did you mean amax?"),
        (("--format", "nvfp4", "--recipe", "qwen"), "qwen2_moe"),
        (("--format", "nvfp4", "--recipe", "qwen"), "qwen3_moe"),
    ],
)
def test_near_misses_are_told_the_word(words, told, tmp_path):
    outcome = run("quantize", write_llama(tmp_path / "M"), *words, "--dry-run")
    assert (outcome.code, told in outcome.err) == (2, True), outcome.err


@pytest.mark.parametrize(
    ("given", "engine", "dialect"),
    [
        ("vllm", "vLLM: vllm", "compressed-tensors"),
        ("SGLang", "SGLang: sglang", "compressed-tensors"),
        ("trtllm", "TensorRT-LLM: tensorrt-llm", "modelopt"),
        ("TensorRT-LLM", "TensorRT-LLM: tensorrt-llm", "modelopt"),
        ("llama.cpp", "llama.cpp: llama.cpp", "gguf"),
        ("mlx-lm", "mlx-lm: mlx", "mlx"),
        ("comfyui", "ComfyUI: comfyui", "comfy"),
        ("transformers", "transformers: transformers", "compressed-tensors"),
    ],
)
def test_an_engine_is_told_its_dialect(given, engine, dialect, tmp_path):
    source = write_llama(tmp_path / "M")
    words = ("--format", "nvfp4", "--dialect", given, "--dry-run", "--json")
    error = run("quantize", source, *words).json["error"]
    assert error["code"] == "unknown-dialect"
    name, _, key = engine.partition(": ")
    assert error["next"] == f"{name} is an engine: --for {key}, or --dialect {dialect}."


@pytest.mark.parametrize(
    ("given", "reference", "revision", "subfolder"),
    [
        ("ORG/NAME", "ORG/NAME", None, None),
        ("ORG/NAME/", "ORG/NAME", None, None),
        ("https://huggingface.co/ORG/NAME", "ORG/NAME", None, None),
        ("https://huggingface.co/ORG/NAME/", "ORG/NAME", None, None),
        ("http://www.hf.co/ORG/NAME/tree/v1", "ORG/NAME", "v1", None),
        ("https://hf.co/ORG/NAME/tree/refs%2Fpr%2F1", "ORG/NAME", "refs/pr/1", None),
        ("https://huggingface.co/ORG/N/tree/main/unet", "ORG/N", "main", "unet"),
        ("https://huggingface.co/datasets/ORG/NAME", None, None, None),
        ("https://elsewhere.org/ORG/NAME", None, None, None),
        ("./folder/", "./folder/", None, None),
    ],
)
def test_a_source_is_understood_as_people_paste_it(given, reference, revision, subfolder):
    options = QuantizeOptions(given, format="nvfp4")
    assert options.source == (reference or given)
    assert (options.revision, options.subfolder) == (revision, subfolder)


def test_a_home_folder_in_quotes_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = TranscodeOptions("~/in", "~/out", dialect="plain")
    assert (options.artifact, options.output) == (f"{tmp_path}/in", f"{tmp_path}/out")
    assert InspectOptions(Path("~/in")).artifact == Path("~/in")  # a path of Python is what it says
    source = write_llama(tmp_path / "M")
    assert run("quantize", "~/M", "--format", "nvfp4", "--dry-run").code == 0, source


def test_a_folder_here_is_no_repository_of_the_same_name(monkeypatch, tmp_path):
    (tmp_path / "ORG" / "NAME").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert InspectOptions("ORG/NAME/").artifact == "ORG/NAME/"


@pytest.mark.parametrize("given", ["deep/sub", "deep/sub/", "./deep//sub", "deep/./sub"])
def test_a_subfolder_is_spelled_one_way(given):
    page = f"https://huggingface.co/ORG/NAME/tree/main/{given}"
    assert InspectOptions("ORG/NAME", subfolder=given).subfolder == "deep/sub"
    assert InspectOptions(page, subfolder="deep/sub/").subfolder == "deep/sub"
    assert InspectOptions("ORG/NAME", subfolder="./").subfolder is None


def test_two_revisions_are_not_one():
    page = "https://huggingface.co/ORG/NAME/tree/v1"
    assert InspectOptions(page, revision="v1").revision == "v1"
    for bad in (
        lambda: InspectOptions(page, revision="v2"),
        lambda: CompareOptions([page, "A"], source="S"),
        lambda: VerifyOptions("A", source=page),
    ):
        with pytest.raises(InputError) as refused:
            bad()
        assert refused.value.code == "usage"


def test_a_calibration_is_a_file():
    with pytest.raises(InputError) as refused:
        CalibrateOptions("A", "out/", text="t")
    assert refused.value.code == "output-name"
    assert refused.value.next_step == "Name one: -o out/NAME.safetensors"
