"""--gpu: which kernels run on a card, the way out where none does, and --fit by its memory.

Expected values were read in the choosers of vLLM 0.33 and SGLang 0.5.23, and followed by hand;
test_cited_lines.py holds their lines.
"""

import json

import pytest
from checkpoints import run, write_llama

from fp4convert.engines.files import read_engine
from fp4convert.engines.gpus import (
    advice,
    engines_with_kernels,
    find_gpu,
    known_gpus,
    known_kernels,
    parse_gpu,
    use_of,
)
from fp4convert.engines.rows import Part
from fp4convert.errors import InputError

CHOSEN = [
    # vLLM: --activations 16 stays Marlin on SM12x, though its CuTe DSL kernel would run there
    ("rtx5090", "vllm", "nvfp4", 16, False, "W4A16", "Marlin"),
    ("rtx5090", "vllm", "nvfp4", 4, False, "W4A4", "FlashInfer CUTLASS"),
    ("spark", "vllm", "nvfp4", 4, True, "W4A4", "FlashInfer CUTLASS"),
    ("spark", "vllm", "nvfp4", 16, True, "W4A16", "Marlin"),
    ("b200", "vllm", "nvfp4", 16, False, "W4A16", "FlashInfer CuTe DSL"),
    ("b300", "vllm", "nvfp4", 4, True, "W4A4", "FlashInfer TRT-LLM"),
    ("h100", "vllm", "nvfp4", 4, False, "W4A16", "Humming where it is installed, else Marlin"),
    ("rtx4090", "vllm", "nvfp4", 4, True, "W4A16", "Marlin"),
    ("rtx5090", "vllm", "mxfp4", 16, False, "W4A4", "FlashInfer"),
    ("rtx3090", "vllm", "mxfp4", 16, False, "W4A16", "Marlin"),
    ("rtx3090", "vllm", "fp8 row", 8, False, "W8A16", "Marlin"),
    ("rtx4090", "vllm", "fp8 row", 8, False, "W8A8", "CUTLASS or FlashInfer"),
    ("mi355", "vllm", "mxfp4", 4, False, "W4A4", "AITER"),
    ("mi300x", "vllm", "mxfp4", 4, False, "emulated", "its emulation, which needs amd-quark"),
    ("mi355", "vllm", "nvfp4", 4, True, "emulated", "its emulation"),
    ("rtx5090", "sglang", "nvfp4", 4, False, "W4A4", "FlashInfer CUTLASS"),
    ("rtx5090", "sglang", "nvfp4", 16, False, "W4A16", "Marlin"),
    ("h200", "sglang", "nvfp4", 4, True, "W4A16", "Marlin"),
    ("t4", "sglang", "nvfp4", 16, False, "refused", "none below SM80"),
    ("rtx4090", "sglang", "kv-nvfp4", 16, False, "refused", "none below SM90"),
]


@pytest.mark.parametrize("row", CHOSEN)
def test_the_kernel_that_runs(row):
    gpu, engine, *part, computes, kernel = row
    part = Part(*part)
    found = use_of(parse_gpu(gpu), read_engine(engine), part, "compressed-tensors").kernel
    assert (found.computes, found.kernel) == (computes, kernel)


def test_every_row_is_of_a_card_and_a_known_engine():
    arches = {gpu.arch for gpu in known_gpus()}
    assert {engine.key for engine in engines_with_kernels()} == {"vllm", "sglang"}
    for kernel in known_kernels():
        assert any(
            kernel.fits(arch, Part(fmt.replace("*", "row"), bits, is_expert), dialect)
            for arch in arches
            for fmt in kernel.formats
            for bits in (4, 8, 16)
            for is_expert in (False, True)
            for dialect in ("compressed-tensors", "gpt-oss", "modelopt")
        ), kernel


def test_cards_by_any_spelling():
    for word in ("rtx5090", "RTX 5090", "NVIDIA GeForce RTX 5090", "5090"):
        assert find_gpu(word).arch == "sm120"
    assert find_gpu("Instinct MI355X").arch == "gfx950"
    assert find_gpu("24GB") is None
    with pytest.raises(InputError, match="expected one of t4") as refused:
        parse_gpu("gtx1080")
    assert refused.value.code == "unknown-gpu"


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("rtx5090", "four bits are multiplied"), ("rtx4090", "FP8 is faster"), ("rtx3090", "no low")],
)
def test_what_is_faster(gpu, words):
    assert advice(parse_gpu(gpu)).startswith(words)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gpu") / "m")


def quantize(source, *options):
    done = run("quantize", source, *options, "--dry-run", "--json")
    return done.code, json.loads(done.out)


@pytest.mark.parametrize(
    ("gpu", "other", "computes"), [("mi355", "mxfp4", "W4A4"), ("mi300", "fp8", "W8A8")]
)
def test_a_card_without_a_kernel_is_refused_with_a_way_that_works(source, gpu, other, computes):
    code, found = quantize(source, "--for", "vllm", "--gpu", gpu)
    assert (code, found["error"]["code"]) == (2, "engine-refuses")
    assert "nvfp4 is refused" in found["error"]["message"]
    assert found["error"]["next"] == f"Use --format {other}"
    code, found = quantize(source, "--for", "vllm", "--gpu", gpu, "--format", other)
    assert (code, found["gpu"]["uses"][0]["computes"]) == (0, computes)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--format", "nvfp4", "--activations", "4"), "leave out --activations 4"),
        (("--format", "nvfp4"), None),
    ],
)
def test_bits_that_a_card_does_not_compute_are_a_warning(source, options, warning):
    code, found = quantize(source, "--for", "vllm,sglang", "--gpu", "rtx4090", *options)
    assert code == 0
    assert [use["computes"] for use in found["gpu"]["uses"]] == ["W4A16", "W4A16"]
    assert any(warning in line for line in found["warnings"]) if warning else True
    assert warning or not any("rtx" in line.lower() for line in found["warnings"])


def test_an_artifact_on_a_card(source, tmp_path):
    made = tmp_path / "made"
    run("quantize", source, "--format", "mxfp4", "-o", made)
    found = json.loads(run("inspect", made, "--gpu", "rtx5090", "--json").out)
    assert found["healthy"]
    assert [(one["level"], one["code"]) for one in found["findings"]] == [("warning", "gpu-kernel")]
    done = run("inspect", made, "--gpu", "mi300x", "--for", "vllm", "--json")
    assert done.code == 6
    assert json.loads(done.out)["findings"][-1]["code"] == "gpu-kernel"
    assert (
        "vLLM 0.33 on RTX 5090 (SM120): mxfp4 as W4A4"
        in run("inspect", made, "--gpu", "rtx5090").out
    )


def test_explain_answers_cards_and_engines():
    card = json.loads(run("explain", "rtx5090", "--json").out)["gpu"]
    assert (card["memory_gb"], card["architecture"]) == (32, "sm120")
    assert all(use["lines"] for use in card["uses"])
    assert "experts as W4A16 (Marlin)" in run("explain", "RTX 5090").out
    told = run("explain", "ollama").out
    assert told.startswith("ollama: ")
    assert "refuses gguf: stops at NVFP4" in told
    assert "knows FP8 and NVFP4 of ModelOpt alone" in run("explain", "sglang-diffusion").out


def test_an_unknown_card_is_refused_before_the_source_is_opened(tmp_path):
    code, found = quantize(tmp_path / "none", "--format", "nvfp4", "--gpu", "rtx6090")
    assert (code, found["error"]["code"]) == (2, "unknown-gpu")
