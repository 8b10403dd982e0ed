"""The next step after a run is the command that serves what was made."""

import pytest
from checkpoints import LAYER, LLAMA, run, weight, write_llama, write_single
from gguf_donors import model, write_donor

from fp4convert.engines.files import known_engines
from fp4convert.planning.serving import load_code

NO_TEXT = "# no line serves BertModel, which answers no text: see how vLLM serves such models"


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
        ("vllm", "its own loader took such artifacts; no model was run"),
        ("transformers", "run by tests/engines/test_transformers.py"),
    ],
)
def test_what_was_chosen_comes_with_how_that_is_known(engine, how, tmp_path):
    source, asked = write_llama(tmp_path / "m"), ("--dry-run", "-o", tmp_path / "out")
    told = " ".join(run("quantize", source, "--for", engine, *asked).err.split())
    assert f"in dialect compressed-tensors with 16-bit activations ({how})" in told


def test_the_next_step_of_a_part_is_to_merge(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    parts = ("--shard-index", 0, "--num-shards", 2, "--json")
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out, *parts)
    assert outcome.json["next"] == [f"fp4convert merge {out}"]
