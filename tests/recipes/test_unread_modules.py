"""Modules that engines do not read quantized: embeddings, tied heads, plain parts of ComfyUI's
files.  --for refuses them; without it a warning says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import LAYER, LLAMA, Tensor, run, weight, write_single

DOWN = f"{LAYER}.mlp.down_proj"
HEAD = "lm_head"
TABLES = (  # as GPT-2, BLOOM, GPT-NeoX, Llama, OPT, T5, Mamba and Mistral's own files call them
    *("transformer.wte", "transformer.wpe", "transformer.word_embeddings", "gpt_neox.embed_in"),
    *("model.embed_tokens", "model.decoder.embed_positions", "shared", "backbone.embeddings"),
    *("tok_embeddings", "language_model.model.embed_tokens"),
)
LINEAR = ("model.time_embed.0", "model.x_embedder", "model.vision_embed_tokens")
KEPT_BY_COMFY = (  # prefixes: comfy/supported_models.py
    *("text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",),
    *("text_encoders.clip_g.transformer.text_model.encoder.layers.0.self_attn.q_proj",),
    *("cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc2",),
    *("cond_stage_model.model.transformer.resblocks.0.mlp.c_fc",),
    *("conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1",),
    *("conditioner.embedders.1.model.transformer.resblocks.0.attn.out_proj",),
    *("conditioner.conditioners.prompt.model.encoder.block.0.layer.0.SelfAttention.q",),
    *("text_encoders.pile_t5xl.transformer.encoder.block.0.layer.0.SelfAttention.q",),
    *("text_encoders.t5base.transformer.encoder.block.0.layer.0.SelfAttention.q",),
    *("first_stage_model.decoder.mid.attn_1.q", "vae.decoder.mid_block.attentions.0.to_q"),
    *("text_model.encoder.layers.0.self_attn.k_proj", "transformer.resblocks.0.mlp.c_proj"),
    *("model.encoder.layers.0.mixer.Wqkv", "encoder.mid_block.attentions.0.to_k"),
)
FOLDING = "confidence_head.folding_trunk.layers.0.pair_transition.mlp.down_proj"
MADE_FOR_COMFY = (
    *("model.diffusion_model.double_blocks.0.img_attn.qkv",),
    *("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q",),
    *("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q",),
    *("text_encoders.qwen3_4b.transformer.model.layers.0.self_attn.q_proj",),
    *("model.layers.0.self_attn.q_proj", "encoder.block.0.layer.0.SelfAttention.q"),
)


def write(folder: Path, *names: str, **config: object) -> Path:
    tensors = {f"{name}.weight": weight(at, rows=64) for at, name in enumerate((*names, DOWN))}
    return write_single(folder, tensors, {**LLAMA, **config})


def include(*names: str) -> list[str]:
    return [word for name in names for word in ("--include", name)]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "tensorrt-llm"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.sweep(4)
def test_for_an_engine_no_embedding_becomes_four_bit(
    engine: str, name: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "m", name)
    asked = ("quantize", source, "--for", engine, "-o", tmp_path / "q", "--json")
    refused = run(*asked, *include(name))
    assert (refused.code, refused.json["error"]["code"]) == (2, "engine-refuses")
    assert "embedding" in refused.json["error"]["message"]
    assert not (tmp_path / "q").exists()
    assert run(*asked).code == 0
    found = run("inspect", tmp_path / "q", "--json").json["findings"]
    assert [each["code"] for each in found if each["code"] == "embedding-quantized"] == []


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
@pytest.mark.sweep(4)
def test_without_an_engine_plan_result_and_inspect_say_so(
    dialect: str, name: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "m", name)
    asked = ("quantize", source, "--format", "nvfp4", "--dialect", dialect, *include(name))
    planned = run(*asked, "--dry-run", "--json").json["warnings"]
    made = run(*asked, "-o", tmp_path / "q", "--json")
    said = f"{name} is an embedding, which no engine of dialect {dialect} reads in four bits"
    assert said in planned
    assert said in made.json["warnings"]
    assert said in made.err
    told = run("inspect", tmp_path / "q", "--json").json
    assert ("embedding-quantized", name) in {
        (each["code"], each["tensor"]) for each in told["findings"]
    }
    assert [each["engine"] for each in told["engines"] if each["loads"]] == []
    for each in ("vllm", "sglang"):
        assert run("inspect", tmp_path / "q", "--for", each).code == 6


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("way", ["fp8", "mxfp8", "[[format]]", "--keep-packed"])
def test_eight_bits_are_refused_told_and_found_as_four(
    way: str, engine: str, tmp_path: Path
) -> None:
    name = "model.embed_tokens"
    source, recipe = write(tmp_path / "m", name), tmp_path / "mine.toml"
    recipe.write_text(f'[[format]]\nmodules = ["{name}"]\nformat = "fp8"\n')
    words = ["--format", way, *include(name)]
    if way == "[[format]]":
        words = ["--format", "nvfp4", "--recipe", str(recipe), *include(name)]
    if way == "--keep-packed":
        made = run("quantize", source, "--format", "fp8", *include(name), "-o", tmp_path / "eight")
        assert made.code == 0
        source, words = tmp_path / "eight", ["--format", "nvfp4", "--keep-packed"]
    asked = ("quantize", source, *words, "-o", tmp_path / "q", "--json")
    refused = run(*asked, "--for", engine)
    assert (refused.code, refused.json["error"]["code"]) == (2, "engine-refuses")
    assert "embedding" in refused.json["error"]["message"]
    assert not (tmp_path / "q").exists()
    told = " ".join(run(*asked, "--dialect", "compressed-tensors").json["warnings"])
    assert f"{name} is an embedding, which no engine of dialect" in told
    assert "reads in eight bits" in told
    assert run("inspect", tmp_path / "q", "--for", engine).code == 6
    codes = [each["code"] for each in run("inspect", tmp_path / "q", "--json").json["findings"]]
    assert codes == ["embedding-quantized"]


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
def test_a_head_of_eight_bits_is_told_where_it_is_tied(fmt: str, tmp_path: Path) -> None:
    words = ("--format", fmt, *include(HEAD), "--json")
    for is_tied in (True, False):
        source = write(tmp_path / f"{is_tied}", HEAD, tie_word_embeddings=is_tied)
        out, again = tmp_path / f"q{is_tied}", tmp_path / f"t{is_tied}"
        asked = run("quantize", source, *words, "--for", "transformers", "--dry-run")
        assert asked.code == (2 if is_tied else 0)
        made = run("quantize", source, *words, "--dialect", "compressed-tensors", "-o", out)
        other = ("--dialect", "compressed-tensors", "-o", again, "--json")
        for told in (made, run("transcode", out, *other)):
            assert ("ties to the embedding" in " ".join(told.json["warnings"])) is is_tied
        told = run("inspect", out, "--json").json
        assert ("tied-head-quantized" in {each["code"] for each in told["findings"]}) is is_tied
        loads = {each["engine"] for each in told["engines"] if each["loads"]}
        assert ("transformers" in loads) is not is_tied


@pytest.mark.parametrize("fmt", ["target", "nvfp4"])
def test_a_row_of_format_makes_no_embedding_four_bit(fmt: str, tmp_path: Path) -> None:
    source, recipe = write(tmp_path / "m", "model.embed_tokens"), tmp_path / "mine.toml"
    recipe.write_text(f'[[format]]\nmodules = ["*.embed_tokens", "*_proj"]\nformat = "{fmt}"\n')
    asked = ("quantize", source, "--recipe", recipe, "--for", "vllm", "--dry-run", "--json")
    actions = {row["name"]: row["action"] for row in run(*asked).json["tensors"]}
    assert actions == {"model.embed_tokens.weight": "copy", f"{DOWN}.weight": "quantize"}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_that_embed_are_no_embeddings(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "m", name)
    asked = ("quantize", source, "--for", "vllm", "-o", tmp_path / "q", "--json")
    made = run(*asked, *include(name))
    assert made.code == 0
    assert made.json["warnings"] == []
    assert run("inspect", tmp_path / "q", "--for", "vllm").code == 0


@pytest.mark.parametrize(
    ("model", "name", "layer", "is_embedding"),
    [  # an nn.Embedding whose name no pattern knows; an nn.Linear, where "*.embed" names embeddings
        ("EomtForUniversalSegmentation", "query", "layers.0.attention.q_proj", True),
        ("EsmFold2Model", "msa_encoder.embed", FOLDING, False),
    ],
)
def test_the_class_decides_what_is_an_embedding(
    model: str, name: str, layer: str, is_embedding: bool, tmp_path: Path
) -> None:
    tensors = {f"{one}.weight": weight(at, rows=64) for at, one in enumerate((name, layer))}
    sizes = dict.fromkeys(("hidden_size", "image_size", "patch_size", "num_queries"), 64)
    source = write_single(tmp_path / "m", tensors, {"architectures": [model], **sizes})
    asked = ("quantize", source, "--format", "nvfp4", *include(name), "--json")
    made = run(*asked, "-o", tmp_path / "q")
    assert made.code == 0, made.err
    told = f"{name} is an embedding, which no engine of dialect"
    assert (told in " ".join(made.json["warnings"])) is is_embedding
    assert (told in " ".join(run(*asked, "--dry-run").json["warnings"])) is is_embedding
    found = run("inspect", tmp_path / "q", "--json").json["findings"]
    codes = {one["code"] for one in found if one["tensor"] == name}
    assert ("embedding-quantized" in codes) is is_embedding
    out = ("--dialect", "modelopt", "-o", tmp_path / "t", "--json")
    moved = run("transcode", tmp_path / "q", *out)
    assert moved.code == (2 if is_embedding else 0)
    if is_embedding:
        assert moved.json["error"]["code"] == "dialect-module"


def test_an_untied_head_goes_where_an_engine_reads_it(tmp_path: Path) -> None:
    """vLLM and SGLang read packed heads of ModelOpt's form alone: both were run."""
    source = write(tmp_path / "m", HEAD)
    for engine, dialect in (
        *(("vllm", "modelopt"), ("sglang", "modelopt")),
        ("transformers", "compressed-tensors"),
    ):
        out = tmp_path / engine
        made = run("quantize", source, "--for", engine, *include(HEAD), "-o", out, "--json")
        assert (made.code, run("inspect", out, "--json").json["dialect"]) == (0, dialect)
        assert run("inspect", out, "--for", engine).code == 0


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_tied_head_is_told(dialect: str, tmp_path: Path) -> None:
    source = write(tmp_path / "m", HEAD, tie_word_embeddings=True)
    words = (*include(HEAD), "--json", "-o", tmp_path / "q")
    refused = run("quantize", source, "--for", "vllm", *words)
    assert (refused.code, refused.json["error"]["code"]) == (2, "engine-refuses")
    made = run("quantize", source, "--format", "nvfp4", "--dialect", dialect, *words)
    assert "ties to the embedding" in " ".join(made.json["warnings"])
    told = run("inspect", tmp_path / "q", "--json").json
    assert "tied-head-quantized" in {each["code"] for each in told["findings"]}
    assert {each["engine"] for each in told["engines"] if each["loads"]} <= {"tensorrt-llm"}


def write_file(path: Path, *names: str, **shapes: tuple[int, int]) -> Path:
    """A single file without config.json, as ComfyUI has them."""
    tensors: dict[str, Tensor] = {
        f"{name}.weight": weight(at, 64, 128) for at, name in enumerate(names)
    }
    tensors |= {f"{name}.weight": weight(3, *shape) for name, shape in shapes.items()}
    folder = write_single(path.parent / "made", tensors, {})
    return (folder / "model.safetensors").rename(path)


def becomes(source: Path, *options: str) -> dict[str, str]:
    """What becomes of every weight, and why."""
    told = run("quantize", source, "--for", "comfyui", *options, "--dry-run", "--json").json
    return {
        row["name"].removesuffix(".weight"): f"{row['action']}: {row['reason']}"
        for row in told["tensors"]
    }


def test_what_comfyui_builds_plain_stays(tmp_path: Path) -> None:
    source = write_file(tmp_path / "all.safetensors", *KEPT_BY_COMFY, *MADE_FOR_COMFY)
    told = becomes(source)
    kept = {name for name, what in told.items() if what.startswith("copy")}
    assert kept == set(KEPT_BY_COMFY)
    assert all("which ComfyUI builds of ordinary layers" in told[name] for name in kept)


def test_other_dialects_quantize_a_clip_of_its_own(tmp_path: Path) -> None:
    source = write_file(tmp_path / "clip_l.safetensors", KEPT_BY_COMFY[-4])
    made = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json")
    assert [row["action"] for row in made.json["tensors"]] == ["quantize"]


@pytest.mark.parametrize(
    ("shape", "action"),
    [
        ((768, 768), "copy"),
        ((5120, 2048), "copy"),
        ((384, 1472), "copy"),
        ((256, 4096), "quantize"),
    ],
)
def test_a_t5_encoder_is_known_by_its_width(
    shape: tuple[int, int], action: str, tmp_path: Path
) -> None:
    """Base 768, XL 2048, ByT5 small 1472, XXL 4096: detect_te_model in comfy/sd.py."""
    name = "encoder.block.0.layer.0.SelfAttention.q"
    source = write_file(tmp_path / "t5.safetensors", MADE_FOR_COMFY[0], **{name: shape})
    assert becomes(source)[name].startswith(action)


def test_a_clip_alone_is_refused_and_found(tmp_path: Path) -> None:
    clip = KEPT_BY_COMFY[-4]
    source = write_file(tmp_path / "clip_l.safetensors", clip)
    asked = ("quantize", source, "-o", tmp_path / "q", "--json")
    refused = run(*asked, "--for", "comfyui")
    assert (refused.code, refused.json["error"]["code"]) == (2, "no-linears")
    assert "CLIP text encoder, which ComfyUI builds" in refused.json["error"]["message"]
    assert "--include" not in refused.json["error"]["next"]
    forced = run(*asked, "--for", "comfyui", *include(clip))
    assert (forced.code, forced.json["error"]["code"]) == (2, "engine-refuses")
    assert not (tmp_path / "q").exists()
    made = run(*asked, "--format", "nvfp4", "--dialect", "comfy", *include(clip))
    assert any("which ComfyUI builds" in line for line in made.json["warnings"])
    told = run("inspect", tmp_path / "q", "--for", "comfyui", "--json")
    assert told.code == 6
    codes = [each["code"] for each in told.json["findings"]]
    assert codes == ["plain-quantized", "engine-refuses"]
    assert [each["engine"] for each in told.json["engines"] if each["loads"]] == []
