"""--for chooses what the engine loads, lets options given by hand win where it may, and refuses the
rest before a byte is written.
"""

import json

import pytest
from checkpoints import LAYER, LLAMA, run, weight, write_llama, write_single
from diffusion import wan_tensors, write_component, write_wan
from gguf_donors import model, write_donor

from fp4convert import InputError, preview_quantize


def write_moe(folder, model_type="qwen3_moe"):
    names = [f"{LAYER}.mlp.experts.{n}.{leaf}_proj" for n in (0, 1) for leaf in ("gate", "up")]
    names += [f"{LAYER}.mlp.experts.{n}.down_proj" for n in (0, 1)] + [f"{LAYER}.self_attn.o_proj"]
    tensors = {f"{name}.weight": weight(n, 64, 128) for n, name in enumerate(names)}
    return write_single(folder, tensors, {**LLAMA, "model_type": model_type})


MAKERS = {
    "llama": write_llama,
    "moe": write_moe,
    "gpt-oss": lambda folder: write_moe(folder, "gpt_oss"),
    "gguf": lambda folder: write_donor(folder.with_suffix(".gguf"), model()),
    "wan": write_wan,
}
NVFP4, MXFP4 = ("nvfp4", "compressed-tensors", 16), ("mxfp4", "compressed-tensors", 16)
W4A4 = ("nvfp4", "modelopt", 4)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("llama", "vllm", NVFP4),
        ("llama", "vLLM:0.33", NVFP4),
        ("llama", "sglang", NVFP4),
        ("llama", "sglang:0.5.21", W4A4),
        ("llama", "tensorrt-llm", W4A4),
        ("llama", "trtllm", W4A4),
        ("llama", "transformers", NVFP4),
        ("llama", "mlx", ("mxfp4", "mlx", 16)),
        ("llama", "comfyui", ("nvfp4", "comfy", 16)),
        ("gguf", "llama.cpp", ("mxfp4", "gguf", 16)),
        ("moe", "vllm", NVFP4),
        ("moe", "transformers", MXFP4),
        ("moe", "sglang", NVFP4),
        ("moe", "sglang:0.5.12", W4A4),
        ("gpt-oss", "sglang --format nvfp4", "engine-refuses"),
        ("wan", "vllm", "engine-refuses"),
        ("wan", "comfyui", "engine-refuses"),
        ("wan", "diffusers", W4A4),
        ("llama", "diffusers", "engine-refuses"),
        ("llama", "vllm:0.20", "engine-refuses"),
        ("llama", "llama.cpp", "dialect-container"),
        # given by hand
        ("llama", "vllm --format mxfp4", MXFP4),
        ("llama", "vllm --dialect modelopt", ("nvfp4", "modelopt", 16)),
        ("llama", "vllm --dialect quark", ("mxfp4", "quark", 16)),
        ("llama", "vllm --activations 4", ("nvfp4", "compressed-tensors", 4)),
        ("llama", "sglang --format mxfp4", ("mxfp4", "quark", 4)),
        ("llama", "sglang --format mxfp4 --dialect compressed-tensors", "engine-refuses"),
        ("llama", "sglang:0.5.21 --activations 16", ("nvfp4", "modelopt", 16)),
        ("llama", "sglang:0.5.21 --dialect compressed-tensors --activations 16", "engine-refuses"),
        ("llama", "tensorrt-llm --activations 16", "engine-refuses"),
        ("llama", "vllm --dialect gguf", "engine-refuses"),
        ("llama", "mlx --format nvfp4", ("nvfp4", "mlx", 16)),
        ("moe", "transformers --format nvfp4", "engine-refuses"),
        ("moe", "transformers --format nvfp4 --exclude *.experts.*", NVFP4),
        # words that there are not
        ("llama", "vlm", "unknown-engine"),
        ("llama", "vllm:new", "unknown-engine"),
        ("llama", "vllm --dialect vllm", "unknown-dialect"),
        ("llama", "vllm --format int4", "unknown-format"),
    ],
)
def test_the_first_choice_that_the_engine_loads_is_taken(name, words, expected, tmp_path):
    source, options = MAKERS[name](tmp_path / "m"), ("--for", *words.split())
    outcome = run("quantize", source, *options, "-o", tmp_path / "out", "--dry-run", "--json")
    if isinstance(expected, str):
        assert (outcome.json["error"]["code"], outcome.code) == (expected, 2)
        assert not (tmp_path / "out").exists()
        return
    made = run("quantize", source, *options, "-o", tmp_path / "out", "--json")
    assert made.code == 0, made.err
    assert (outcome.json["format"], outcome.json["dialect"]) == expected[:2]
    place = tmp_path / "out" / "transformer" if name == "wan" else tmp_path / "out"
    place = next(place.glob("*.gguf")) if name == "gguf" else place
    found = run("inspect", place, "--for", words.split()[0], "--json")
    shown = {key: found.json[key] for key in ("format", "dialect", "activations")}
    assert (*shown.values(),) == expected
    assert (found.code, found.json["healthy"]) == (0, True), found.json["findings"]


def test_layers_that_the_engine_reads_in_no_four_bits_are_kept(tmp_path):
    """Kimi K3's; of others SGLang does not read MXFP4 experts of compressed-tensors."""
    source = write_moe(tmp_path / "m")
    asked = ("quantize", source, "--for", "sglang", "--format", "mxfp4", "--json", "-o")
    made = run(*asked, tmp_path / "first")
    assert (made.json["dialect"], made.json["tensors"]["copied"]) == ("quark", 0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k3"}))
    made = run(*asked, tmp_path / "second")
    assert made.json["tensors"] == {"quantized": 6, "copied": 1, "skipped": 0}
    assert made.json["dialect"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("words", "why", "step"),
    [
        (
            "transformers --format nvfp4",
            "transformers 5.23 ignores the global scales of NVFP4 experts and computes garbage;"
            " asked for: nvfp4 in dialect compressed-tensors with 16-bit activations",
            "For it use --format mxfp4, or dequantize the artifact.",
        ),
        ("vllm:0.20", "vLLM 0.20 is known to load", "Use 0.32 or newer."),
        (
            "mlx --dialect modelopt",
            "mlx-lm 0.32 reads no artifact of dialect modelopt",
            "Use --dial",
        ),
        ("tensorrt-llm --activations 16", "nobody has tried or read it", "Leave --dialect"),
    ],
)
def test_a_refusal_has_the_rows_reason_and_what_to_do(words, why, step, tmp_path):
    source = write_moe(tmp_path / "m")
    error = run("quantize", source, "--for", *words.split(), "--json").json["error"]
    assert why in error["message"]
    assert error["next"].startswith(step)


@pytest.mark.parametrize(
    ("engine", "versions", "line"),
    [
        ("vllm", ">=0.32", "vllm serve {out}"),
        ("sglang", ">=0.5.22", "python -m sglang.launch_server --model-path {out}"),
        ("tensorrt-llm", "", "trtllm-serve {out}"),
        ("mlx", "", "mlx_lm.generate --model {out} --prompt Hello"),
        (
            "transformers",
            ">=5",
            "python -c 'from transformers import AutoModelForCausalLM; model ="
            ' AutoModelForCausalLM.from_pretrained("{out}", dtype="auto")\'',
        ),
    ],
)
def test_the_result_says_which_versions_load_it_and_what_serves_it(
    engine, versions, line, tmp_path
):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    made = run("quantize", source, "--for", engine, "-o", out, "--json")
    told = made.json["engine"]
    assert (told["engine"], told["versions"], told["loads"]) == (engine, versions, True)
    assert made.json["next"][1:] == [line.format(out=out)]
    assert f" {versions}: " in made.err or not versions
    assert "engine" not in run("quantize", source, "--format", "nvfp4", "-o", out, "--json").json


def test_a_cache_is_asked_for_in_the_line_that_serves(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    made = run("quantize", source, "--for", "vllm", "--kv-cache", "fp8", "-o", out, "--json")
    assert made.json["next"][1] == f"vllm serve {out} --kv-cache-dtype fp8"


def test_python_takes_an_engine_and_the_folder_is_named_by_what_it_chose(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_moe(tmp_path / "m")
    document = preview_quantize(source, engine="transformers")
    assert (document["format"], document["engine"]["engine"]) == ("mxfp4", "transformers")
    assert run("quantize", source, "--for", "transformers").code == 0
    assert (tmp_path / "m-MXFP4" / "quantization_config.json").exists()
    with pytest.raises(InputError, match="Missing option --format"):
        preview_quantize(source)


def test_a_pipeline_of_several_files_is_refused(tmp_path):
    folder = tmp_path / "wan"
    config = {"_class_name": "WanTransformer3DModel", "num_layers": 8}
    write_component(folder, [wan_tensors(), {"blocks.8.ffn.net.2.weight": weight()}], config)
    error = run("quantize", folder, "--for", "diffusers", "--json").json["error"]
    assert (error["code"], error["next"]) == (
        "engine-refuses",
        "Save the source as one file first.",
    )
