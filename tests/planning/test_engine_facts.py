"""Traps of engines stand in the plan, the result and JSON; the next step serves what was made."""

import pytest
from checkpoints import LAYER, LLAMA, run, weight, write_llama, write_single
from diffusion import WAN_CONFIG, wan_tensors, write_component, write_wan
from gguf_donors import model, write_donor

from fp4convert.engines.files import known_engines
from fp4convert.planning.engine_facts import load_code

NO_TEXT = "# BertModel answers with no text: see how vLLM serves such models"


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


@pytest.mark.parametrize(
    ("dialect", "line"),
    [
        ("compressed-tensors", "vllm serve {out}"),
        ("modelopt", "vllm serve {out}"),
        ("mlx", "mlx_lm.generate --model {out} --prompt Hello"),
        ("plain", None),
    ],
)
def test_the_next_steps_are_to_verify_and_to_serve(dialect, line, tmp_path):
    source, out = write_llama(tmp_path / "my model"), tmp_path / "out"
    asked = ("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", out, "--force")
    expected = [f"fp4convert verify {out} --source '{source}'"]
    expected += [line.format(out=out)] if line else []
    assert run(*asked, "--json").json["next"] == expected
    drawn = run(*asked).out
    assert drawn.endswith(
        "".join(
            f"{'next: ' if not number else ' ' * 6}{step}\n" for number, step in enumerate(expected)
        )
    )
    assert "next:" not in run(*asked, "-q").out


def test_the_next_step_of_a_gguf_file_names_it(tmp_path):
    source = write_donor(tmp_path / "m.gguf", model())
    asked = ("quantize", source, "--format", "mxfp4", "--dialect", "gguf", "-o", tmp_path / "out")
    *_, last = run(*asked, "--json").json["next"]
    (made,) = (tmp_path / "out").glob("*.gguf")
    assert last == f"llama-server -m {made}"


def test_no_engine_is_named_that_is_known_not_to_load_it_or_answers_no_text(tmp_path):
    for model_type, architecture in (("gpt_oss", "GptOssForCausalLM"), ("bert", "BertModel")):
        leaves = ("gate_proj", "up_proj", "down_proj")
        tensors = {f"{LAYER}.mlp.experts.0.{leaf}.weight": weight(rows=64) for leaf in leaves}
        config = {**LLAMA, "model_type": model_type, "architectures": [architecture]}
        folder = write_single(tmp_path / model_type, tensors, config)
        asked = ("quantize", folder, "--format", "mxfp4", "-o", tmp_path / f"{model_type}-out")
        more = run(*asked, "--json").json["next"][1:]
        assert more == ([NO_TEXT] if model_type == "bert" else [])


@pytest.mark.parametrize(
    ("name", "config", "auto"),
    [
        ("LlamaForCausalLM", {}, "AutoModelForCausalLM"),
        ("Gemma3ForConditionalGeneration", {"vision_config": {}}, "AutoModelForImageTextToText"),
        ("CLIPModel", {"vision_config": {}}, "AutoModel"),
        ("T5ForConditionalGeneration", {}, "AutoModel"),
    ],
)
def test_transformers_loads_a_model_that_sees_as_one_that_answers(name, config, auto):
    (engine,) = (each for each in known_engines() if each.key == "transformers")
    lines = load_code(engine, {**config, "architectures": [name]}, "m")
    assert lines[-1] == f'model = {auto}.from_pretrained("m", dtype="bfloat16")'


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("vllm", "loaded by vLLM itself, as a tiny LlamaForCausalLM"),
        ("transformers", "loaded by transformers itself, as a tiny LlamaForCausalLM"),
        ("tensorrt-llm", "read in its source or documentation, not loaded"),
    ],
)
def test_what_was_chosen_comes_with_how_that_is_known(engine, how, tmp_path):
    source, asked = write_llama(tmp_path / "m"), ("--dry-run", "-o", tmp_path / "out")
    told = " ".join(run("quantize", source, "--for", engine, *asked).err.split())
    assert f"bit activations ({how})" in told


def test_the_next_step_of_a_part_is_to_merge(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    parts = ("--shard-index", 0, "--num-shards", 2, "--json")
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out, *parts)
    assert outcome.json["next"] == [f"fp4convert merge {out}"]
