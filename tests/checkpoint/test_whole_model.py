"""Adapters and single shards are no models."""

import json

import pytest
from checkpoints import FIRST, INDEX, pack_shard, run, weight, write_llama, write_single

BELOW = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(folder, names=("lora_A", "lora_B"), base="meta-llama/Llama-3.1-8B"):
    folder.mkdir()
    tensors = {f"{BELOW}.{name}.weight": weight(rows=16) for name in names}
    (folder / "adapter_model.safetensors").write_bytes(pack_shard(tensors))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def error_of(source, tmp_path):
    out = tmp_path / "out"
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out, "--json")
    assert (outcome.code, out.exists()) == (2, False)
    return outcome.json["error"]


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_an_adapter_is_refused_by_its_base_models_name(names, tmp_path):
    source = write_adapter(tmp_path / "lora", names)
    error = error_of(source, tmp_path)
    assert error["code"] == "adapter"
    assert "is a LoRA adapter of meta-llama/Llama-3.1-8B" in error["message"]
    command = f"fp4convert quantize meta-llama/Llama-3.1-8B --format nvfp4 --lora {source}"
    assert error["next"] == f"Give its base model, and merge it on the way: {command}"
    single = error_of(source / "adapter_model.safetensors", tmp_path)
    assert (single["code"], "its base model" in single["next"]) == ("adapter", True)


def test_a_model_with_low_rank_factors_beside_its_weights_is_none(tmp_path):
    """Phi-4-multimodal has two adapters inside; most of its tensors are their factors."""
    layer, words = "model.layers.0.mlp.up_proj", ("A.speech", "B.speech", "A.vision", "B.vision")
    tensors = {f"{layer}.base_layer.weight": weight()}
    tensors |= {f"{layer}.lora_{word}.weight": weight(rows=16) for word in words}
    config = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    source = write_single(tmp_path / "m", tensors, config)
    out = tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    patterns = run("inspect", out, "--json").json["patterns"]
    assert [each["pattern"] for each in patterns] == [f"{layer}.base_layer"], "factors stay"


def test_a_numbered_shard_is_refused_and_inspect_takes_it(tmp_path):
    source = write_llama(tmp_path / "m")
    error = error_of(source / FIRST, tmp_path)
    assert error["code"] == "one-shard"
    assert f"{FIRST} is shard 1 of 2" in error["message"]
    assert error["next"] == f"Give the folder: {source}"
    made = tmp_path / "made"
    assert run("quantize", source, "--format", "nvfp4", "-o", made).code == 0
    assert run("inspect", made / FIRST, "--json").json["format"] == "nvfp4"
    out = tmp_path / "out"
    for words in (
        ("dequantize", made / FIRST, "-o", out),
        ("transcode", made / FIRST, "--dialect", "modelopt", "-o", out),
        ("verify", made / FIRST),
        ("compare", made, made / FIRST, "--source", source),
    ):
        outcome = run(*words, "--json")
        assert (outcome.code, outcome.json["error"]["code"], out.exists()) == (
            2,
            "one-shard",
            False,
        )


def test_a_shard_is_known_by_the_index_beside_it(tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    weight_map = {}
    for name in "ab":
        tensor = f"model.layers.0.{name}.weight"
        (source / f"{name}.safetensors").write_bytes(pack_shard({tensor: weight()}))
        weight_map[tensor] = f"{name}.safetensors"
    (source / "other.safetensors").write_bytes(pack_shard({"model.layers.0.c.weight": weight()}))
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert (
        "b.safetensors is shard 2 of 2" in error_of(source / "b.safetensors", tmp_path)["message"]
    )
    other = source / "other.safetensors"
    assert run("quantize", other, "--format", "nvfp4", "-o", tmp_path / "out").code == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_who_looks_at_an_adapter_is_not_told_to_quantize_it(command, tmp_path):
    error = run(command, write_adapter(tmp_path / "lora"), "--json").json["error"]
    assert (error["exit"], error["code"]) == (2, "adapter")
    assert error["next"].startswith("Give its base model")


def test_who_looks_at_ordinary_weights_is_told_the_command(tmp_path):
    error = run("inspect", write_llama(tmp_path / "a model"), "--json").json["error"]
    model = tmp_path / "a model"
    assert error["next"] == f"Quantize it: fp4convert quantize '{model}' --format nvfp4"
