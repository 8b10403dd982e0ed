"""--for chooses what the engine loads, lets options given by hand win where it may, and refuses the
rest before a byte is written.
"""

import json
import shlex
from itertools import product

import pytest
from checkpoints import LAYER, LLAMA, done, run, weight, write_llama, write_single
from diffusion import flux_shards, wan_tensors, write_component, write_wan
from gguf_donors import model, write_donor

from fp4convert import InputError, preview_quantize
from fp4convert.conversion.engine_choice import choose_options
from fp4convert.engines.files import known_engines
from fp4convert.options.writing import QuantizeOptions


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
    "bert": lambda folder: write_single(
        folder,
        {f"{LAYER}.self_attn.o_proj.weight": weight()},
        {**LLAMA, "model_type": "bert", "architectures": ["BertModel"]},
    ),
    "flux": lambda folder: write_single(
        folder, {name: tensor for shard in flux_shards() for name, tensor in shard.items()}, {}
    ),
}
NVFP4, MXFP4 = ("nvfp4", "compressed-tensors", 16), ("mxfp4", "compressed-tensors", 16)
W4A4 = ("nvfp4", "modelopt", 4)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("llama", "vllm", NVFP4),
        ("llama", "vLLM:0.33", NVFP4),
        ("llama", "vllm==0.33", NVFP4),
        ("llama", "vllm:0.33.0rc1", NVFP4),
        ("llama", "vllm:0.33.0+cu129", NVFP4),
        ("gguf", "llama.cpp:b4567", ("mxfp4", "gguf", 16)),
        ("llama", "sglang", NVFP4),
        ("llama", "sglang:0.5.21", W4A4),
        ("llama", "tensorrt-llm", W4A4),
        ("llama", "trtllm", W4A4),
        ("llama", "transformers", NVFP4),
        ("llama", "mlx", ("mxfp4", "mlx", 16)),
        ("bert", "mlx", "engine-refuses"),
        ("bert", "vllm", NVFP4),
        ("bert", "sglang", NVFP4),
        ("llama", "comfyui", ("nvfp4", "comfy", 16)),  # a text encoder
        ("flux", "comfyui --recipe flux", ("nvfp4", "comfy", 16)),
        ("gguf", "llama.cpp", ("mxfp4", "gguf", 16)),
        ("moe", "vllm", NVFP4),
        ("moe", "transformers", MXFP4),
        ("moe", "sglang", NVFP4),
        ("moe", "sglang:0.5.12", W4A4),
        ("gpt-oss", "sglang --format nvfp4", "dialect-format"),
        ("wan", "vllm", "engine-refuses"),
        ("wan", "comfyui", "engine-refuses"),
        ("wan", "diffusers", W4A4),
        ("llama", "diffusers", "engine-refuses"),
        # engines of pipelines that were read
        ("wan", "sglang-diffusion", W4A4),
        ("wan", "vLLM-Omni", W4A4),
        ("wan", "visualgen", W4A4),
        ("wan", "sglang-diffusion --activations 16", "engine-refuses"),
        ("wan", "trtllm-visualgen --activations 16", "engine-refuses"),
        ("llama", "sglang-diffusion", "engine-refuses"),
        ("llama", "fouroversix", "engine-refuses"),
        ("llama", "vllm:0.20", "engine-refuses"),
        ("llama", "llama.cpp", "dialect-container"),
        # what several load
        ("llama", "vllm,sglang", NVFP4),
        ("moe", "vllm,transformers", MXFP4),
        ("llama", "vllm,tensorrt-llm", W4A4),
        ("llama", "vllm,mlx", "engine-refuses"),
        ("llama", "vllm,", "unknown-engine"),
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
@pytest.mark.sweep(4)
def test_the_first_choice_that_the_engine_loads_is_taken(name, words, expected, tmp_path):
    source, options = MAKERS[name](tmp_path / "m"), ("--for", *words.split())
    outcome = run("quantize", source, *options, "-o", tmp_path / "out", "--dry-run", "--json")
    if isinstance(expected, str):
        assert (outcome.json["error"]["code"], outcome.code) == (expected, 2)
        assert not (tmp_path / "out").exists()
        return
    done("quantize", source, *options, "-o", tmp_path / "out", "--json")
    assert (outcome.json["format"], outcome.json["dialect"]) == expected[:2]
    place = tmp_path / "out" / "transformer" if name == "wan" else tmp_path / "out"
    place = next(place.glob("*.gguf")) if name == "gguf" else place
    found = run("inspect", place, "--for", words.split()[0], "--json")
    shown = {key: found.json[key] for key in ("format", "dialect", "activations")}
    assert (*shown.values(),) == expected
    assert (found.code, found.json["healthy"]) == (0, True), found.json["findings"]


def test_an_engine_that_reads_no_foreign_weights_is_named_with_the_reason(tmp_path):
    source = MAKERS["llama"](tmp_path / "m")
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    found = run("inspect", tmp_path / "out", "--for", "fouroversix", "--json")
    (finding,) = (one for one in found.json["findings"] if one["level"] == "error")
    assert (found.code, finding["code"]) == (6, "engine-refuses")
    assert "reads what it saved itself" in finding["detail"]


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
    ("words", "copied", "told"),
    [
        ("mlx", 6, "as with --exclude '*.experts.*': mlx-lm 0.32 reads these modules in no four"),
        ("vllm", 0, ""),
        # something is given: it is left at that
        ("mlx --format mxfp4", None, "stacks the weights"),
        ("mlx --format mxfp8", None, "stacks the weights"),
    ],
)
def test_experts_that_the_engine_reads_in_no_four_bits_are_kept(words, copied, told, tmp_path):
    """mlx-lm does not load those of Qwen3-MoE."""
    source = write_moe(tmp_path / "m")
    made = run("quantize", source, "--for", *words.split(), "-o", tmp_path / "out", "--json")
    assert told in made.err or told in made.json["error"]["message"]
    assert made.code == (2 if copied is None else 0)
    if copied is not None:
        assert made.json["tensors"]["copied"] == copied
        assert ("--exclude" in made.err) == bool(copied)


@pytest.mark.parametrize(
    ("words", "why", "step"),
    [
        (
            "transformers --format nvfp4",
            "transformers 5.23 ignores the global scales of NVFP4 experts and computes garbage;"
            " it would be nvfp4 in dialect compressed-tensors with 16-bit activations",
            "Use --format mxfp4",
        ),
        ("vllm:0.20", "vLLM 0.20 is known to load", "vLLM 0.33 loads it: --for vllm"),
        ("vllm:0.24 --dialect compressed-tensors", "vLLM 0.24 is", "Use --dialect modelopt"),
        (
            "mlx --dialect modelopt",
            "mlx-lm 0.32 reads no artifact of dialect modelopt",
            "Use --dialect mlx --exclude '*.experts.*'",
        ),
        ("tensorrt-llm --activations 16", "nobody has tried or read it", "Use --activations 4"),
    ],
)
def test_a_refusal_has_the_rows_reason_and_what_to_do(words, why, step, tmp_path):
    source = write_moe(tmp_path / "m")
    error = run("quantize", source, "--for", *words.split(), "--json").json["error"]
    assert why in error["message"]
    assert error["next"] == step


def test_an_option_that_stands_in_the_way_is_named(tmp_path):
    asked = ("quantize", write_llama(tmp_path / "m"), "--for", "mlx", "--kv-cache", "fp8", "--json")
    assert run(*asked).json["error"]["next"] == "Leave out --kv-cache."


@pytest.mark.parametrize(
    ("words", "code", "step"),
    [
        ("vllm --exclude *", "no-linears", "Exclude fewer modules"),
        ("vllm --exclude *.no_such", "unmatched-pattern", ""),
        (
            "vllm --dialect gpt-oss --format mxfp4",
            "dialect-module",
            "Use --dialect compressed-tensors",
        ),
        ("vllm --exclude *.down_proj", "engine-refuses", "Use --exclude '*.experts.*'"),
    ],
)
def test_the_engine_is_named_where_its_row_is_the_cause(words, code, step, tmp_path):
    source = write_moe(tmp_path / "m")
    asked = ("quantize", source, "--for", *words.split(), "-o", tmp_path / "out", "--json")
    error = run(*asked).json["error"]
    assert error["code"] == code
    assert error["next"].startswith(step)
    names = [name for name in ("vLLM", "SGLang") if name in error["message"]]
    assert bool(names) == (code == "engine-refuses")


@pytest.mark.parametrize(
    ("model", "words", "step"),
    [
        ("qwen3", "sglang --kv-cache fp8", "Leave out --kv-cache."),  # no other choice does
        ("bert", "mlx", "Nothing of this model is known to load there; choose another engine."),
    ],
)
def test_what_no_other_choice_mends_is_not_answered_with_one(model, words, step, tmp_path):
    source = write_llama(tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": model}))
    error = run("quantize", source, "--for", *words.split(), "--json").json["error"]
    assert (error["code"], error["next"]) == ("engine-refuses", step)


def test_only_what_stands_in_the_way_is_to_be_excluded(tmp_path):
    """Experts of one layer whose width has no whole blocks (Nemotron Puzzle); wq and wk of
    Mistral's names, which vLLM reorders. The advised line is accepted.
    """
    names = [f"{n}.{leaf}" for n in (0, 1) for leaf in ("gate_proj", "up_proj", "down_proj")]
    widths = {0: 128, 1: 72}  # gate and up have columns of the model, down of the experts
    tensors = {}
    for layer, width in widths.items():
        for seed, name in enumerate(names):
            shape = (64, width) if "down" in name else (width, 64)
            tensors[f"model.layers.{layer}.mlp.experts.{name}.weight"] = weight(seed, *shape)
    puzzle = write_single(tmp_path / "moe", tensors, {**LLAMA, "model_type": "qwen3_moe"})
    leaves = ("attention.wq", "attention.wk", "attention.wo", "feed_forward.w1")
    tensors = {f"layers.0.{leaf}.weight": weight(seed) for seed, leaf in enumerate(leaves)}
    mistral = write_single(tmp_path / "mistral", tensors, LLAMA)
    for source, steps in (
        (puzzle, ["Use --exclude 'model.layers.1.mlp.experts.*'"]),
        (mistral, ["Use --exclude 'layers.*.attention.wq' --exclude 'layers.*.attention.wk'"]),
    ):
        asked = ("quantize", source, "--for", "vllm", "--format", "nvfp4", "--dry-run", "--json")
        error = run(*asked).json["error"]
        assert (error["code"], [error["next"]]) == ("engine-refuses", steps)
        done(*asked, *shlex.split(error["next"])[1:])


def test_blocks_of_another_format_that_fit_are_advised(tmp_path):
    tensors = {f"{LAYER}.self_attn.o_proj.weight": weight(0, 64, 48)}  # three blocks of 16
    source = write_single(tmp_path / "m", tensors, LLAMA)
    asked = ("quantize", source, "--for", "vllm", "-o", tmp_path / "out", "--json")
    error = run(*asked, "--format", "mxfp4").json["error"]
    assert (error["code"], error["next"]) == ("no-linears", "Use --format nvfp4")
    assert run(*asked).json["format"] == "nvfp4"


@pytest.mark.parametrize("before", [None, "here", "here/.fp4convert/measured"])
def test_formats_of_a_size_that_the_engine_does_not_load_are_told(before, tmp_path):
    """The weights were measured before that showed, and nothing of it stays."""
    source, out = write_llama(tmp_path / "m"), tmp_path / "here" / "deep" / "out"
    if before:
        (tmp_path / before).mkdir(parents=True)
        (tmp_path / before / "mine.json").write_text("{}")
        out = tmp_path / "here" if before.endswith("measured") else out
    there = sorted(tmp_path.rglob("*"))
    (source / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen3_vl"}))
    asked = ("quantize", source, "--for", "sglang", "--dialect", "modelopt", "-o", out)
    refused = run(*asked, "--target-bits", 8, "--json")
    error = refused.json["error"]
    step = "Use --dialect compressed-tensors, or one format for all modules."
    assert (error["code"], error["next"]) == (
        "engine-refuses",
        f"{step} Or leave --target-bits out.",
    )
    assert (refused.code, sorted(tmp_path.rglob("*"))) == (2, there)
    assert "MIXED_PRECISION" in error["message"]
    told = run(*asked, "--target-bits", 8, "--dry-run", "--json")
    assert told.json["error"]["code"] == "engine-refuses"
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("made", "words", "says"),
    [
        ("nvfp4", "mlx", "7 modules are nvfp4 and rounded again to mxfp4"),
        ("nvfp4", "vllm --format mxfp4", "7 modules are nvfp4 and rounded again to mxfp4"),
        ("mxfp4", "vllm", ""),
        ("nvfp4", "vllm", ""),
    ],
)
def test_four_bits_that_are_rounded_again_are_told(made, words, says, tmp_path):
    first = tmp_path / "first"
    run("quantize", write_llama(tmp_path / "m"), "--format", made, "-o", first, "-q")
    asked = ("quantize", first, "--for", *words.split(), "-o", tmp_path / "out", "--dry-run")
    told = [line for line in run(*asked, "--json").json["warnings"] if "rounded again" in line]
    assert len(told) == bool(says)
    assert all(line.startswith(says) for line in told)


@pytest.mark.parametrize("command", ["quantize", "inspect", "verify"])
def test_two_engines_are_refused(command, tmp_path):
    asked = (command, write_llama(tmp_path / "m"), "--for", "vllm", "--for", "sglang", "--json")
    told = run(*asked)
    assert (told.code, told.json["error"]["code"]) == (2, "usage")
    assert "--for is given twice" in told.json["error"]["message"]


def test_of_several_engines_every_one_is_judged(tmp_path):
    source = write_llama(tmp_path / "m")
    plan = preview_quantize(source, engine="vllm,sglang")
    assert [one["engine"] for one in plan["engines"]] == ["vllm", "sglang"]
    step = run("quantize", source, "--for", "vllm,mlx", "--json").json["error"]["next"]
    assert step == "Nothing is known that all of vllm,mlx load: make one for each."
    done("quantize", source, "--for", "vllm", "-o", tmp_path / "q")
    told = run("inspect", tmp_path / "q", "--for", "vllm,mlx,sglang", "--json")
    assert [one["code"] for one in told.json["findings"]] == ["engine-refuses"]


def choices_by_hand(engine):
    """Words of --for, and options given by hand."""
    old = {"vllm": ":0.24", "sglang": ":0.5.12", "transformers": ":4"}.get(engine.key, ":0.1")
    dialects = (None, "plain", *sorted(engine.dialects))
    every = product((engine.key, engine.key + old), dialects, (None, "nvfp4", "mxfp4"), (None, 4))
    for word, dialect, fmt, bits in every:
        given = {"dialect": dialect, "format": fmt, "activations": bits}
        yield {"engine": word, **{name: value for name, value in given.items() if value}}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("engine", known_engines(), ids=lambda engine: engine.key)
def test_what_a_refusal_advises_is_accepted(name, engine, tmp_path):
    source = MAKERS[name](tmp_path / "m")
    refused, accepted, unadvised = 0, 0, []
    for given in choices_by_hand(engine):
        try:
            choose_options(QuantizeOptions(source, **given))
            accepted += 1
            continue
        except InputError as caught:
            error = caught
        refused += 1
        words = error.next_step.partition("--")[2]
        is_other = error.code == "no-linears" and not error.next_step.startswith("Use --")
        is_other = is_other or " reads --" in error.next_step  # and widths stand in the way
        if error.code == "dialect-container" or is_other or not words:
            unadvised.append(given)
            continue
        words = shlex.split(words)
        bare = [word.removeprefix("--") for word in words[::2]]
        names = ["engine" if word == "for" else word for word in bare]
        pairs = dict(zip(names, words[1::2], strict=True))
        if "activations" in pairs:
            pairs["activations"] = int(pairs["activations"])
        chosen = choose_options(QuantizeOptions(source, **{**given, **pairs}))
        assert chosen.dialect in engine.dialects
    assert refused
    assert not (accepted and unadvised), "it loads other options, and nobody said which"


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
            ' AutoModelForCausalLM.from_pretrained("{out}", dtype="bfloat16")\'',
        ),
    ],
)
def test_the_result_says_which_versions_load_it_and_what_serves_it(
    engine, versions, line, tmp_path
):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    made = run("quantize", source, "--for", engine, "-o", out, "--json")
    told = made.json["engine"]
    loads = None if engine == "tensorrt-llm" else True  # whose code was read alone
    assert (told["engine"], told["versions"], told["loads"]) == (engine, versions, loads)
    assert made.json["next"][1:] == [line.format(out=out)]
    assert f" {versions}: " in made.err or not versions
    assert "engine" not in run("quantize", source, "--format", "nvfp4", "-o", out, "--json").json


def test_engines_of_pictures_have_a_line_that_loads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MAKERS["flux"](tmp_path / "f")
    write_wan(tmp_path / "wan")
    made = run("quantize", "f", "--for", "comfyui", "--recipe", "flux", "-o", "out", "--json")
    copied = "cp ./out/model.safetensors ComfyUI/models/diffusion_models/out.safetensors"
    assert made.json["next"] == ["fp4convert verify out --source f", copied]
    made = run("quantize", "wan", "--for", "diffusers", "-o", "out2", "--json")
    lines = [shlex.split(line)[-1] for line in made.json["next"][2:]]
    assert [line.partition("model = ")[2] for line in lines] == [
        "diffusers.WanTransformer3DModel.from_single_file("
        f'"./out2/{name}/diffusion_pytorch_model.safetensors", config="wan/{name}",'
        " quantization_config=config)"
        for name in ("transformer", "transformer_2")
    ]


def test_a_cache_is_asked_for_in_the_line_that_serves(tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    made = run("quantize", source, "--for", "vllm", "--kv-cache", "fp8", "-o", out, "--json")
    assert made.json["next"][1] == f"vllm serve {out} --kv-cache-dtype fp8"


def test_python_takes_an_engine_and_the_folder_is_named_by_what_it_chose(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_moe(tmp_path / "m")
    document = preview_quantize(source, engine="transformers")
    assert (document["format"], document["engine"]["engine"]) == ("mxfp4", "transformers")
    done("quantize", source, "--for", "transformers")
    assert (tmp_path / "m-MXFP4" / "quantization_config.json").exists()
    with pytest.raises(InputError, match="Missing option --format"):
        preview_quantize(source)


def test_a_pipeline_takes_the_global_scales_of_a_pipeline(tmp_path):
    """With --for and without it: each component those of its own folder."""
    source = write_wan(tmp_path / "m")
    run("quantize", source, "--for", "diffusers", "-o", tmp_path / "first", "--json")
    given = ("--global-scale", tmp_path / "first", "--json", "-o")
    own = run("quantize", source, "--for", "diffusers", *given, tmp_path / "own")
    words = ("--format", "nvfp4", "--dialect", "modelopt", "--activations", 4)
    by_hand = run("quantize", source, *words, *given, tmp_path / "hand")
    assert (own.code, by_hand.code) == (0, 0), own.err
    assert own.json["digest"] == by_hand.json["digest"]
    # Equal weights have these scales by themselves, too; the record alone says how it was asked.
    hashes = [
        json.loads((tmp_path / name / "transformer" / "quantization_config.json").read_text())[
            "files"
        ]
        for name in ("own", "first")
    ]
    assert hashes[0] == hashes[1]


def test_a_component_without_global_scales_is_named(tmp_path):
    source, scales = write_wan(tmp_path / "wan"), tmp_path / "scales.json"
    scales.write_text('{"blocks.0.ffn.net.2": 1.0}')
    for words in (("--for", "diffusers"), ("--format", "nvfp4")):
        asked = ("quantize", source, *words, "--global-scale", scales, "-o", tmp_path / "out")
        error = run(*asked, "--json").json["error"]
        assert error["code"] == "bad-global-scale"
        assert error["message"].startswith(f"transformer: --global-scale {scales} is one file for")
    assert not (tmp_path / "out").exists()


def test_a_pipeline_of_several_files_is_refused(tmp_path):
    folder = tmp_path / "wan"
    config = {"_class_name": "WanTransformer3DModel", "num_layers": 8}
    write_component(folder, [wan_tensors(), {"blocks.8.ffn.net.2.weight": weight()}], config)
    error = run("quantize", folder, "--for", "diffusers", "--json").json["error"]
    assert (error["code"], error["next"]) == (
        "engine-refuses",
        "Save the source as one file first.",
    )


def test_a_folder_without_a_config_is_served_by_nobody(tmp_path):
    source = write_single(tmp_path / "m", {f"{LAYER}.self_attn.o_proj.weight": weight()}, {})
    (source / "config.json").unlink()
    for engine in ("vllm", "sglang", "transformers"):
        found = run("quantize", source, "--for", engine, "--json", "-o", tmp_path / "out")
        assert (found.code, found.json["error"]["code"]) == (2, "engine-refuses")
        assert "has no config.json" in found.json["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_a_width_that_stands_in_the_way_is_named(tmp_path):
    """Of the formats that ComfyUI reads, none has blocks that divide 72 columns."""
    names = [f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    source = write_single(tmp_path / "m", {name: weight(1, 72, 72) for name in names}, LLAMA)
    refused = run("quantize", source, "--for", "comfyui", "--format", "mxfp4", "--json")
    next_step = refused.json["error"]["next"]
    assert (refused.code, refused.json["error"]["code"]) == (2, "dialect-format")
    assert "72 columns, not a multiple of the block of 16 (3)" in next_step
    assert "--dialect comfy --format nvfp4" in next_step
