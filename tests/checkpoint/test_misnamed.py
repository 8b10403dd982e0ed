"""Models that are still wrapped for training are refused; names of classes are not."""

import shutil
import subprocess
import sys

import pytest
from checkpoints import (
    LAYER,
    LLAMA,
    llama_shards,
    pack_shard,
    read_folder,
    read_shard,
    run,
    weight,
    write_llama,
    write_single,
)

from fp4convert.checkpoint.misnamed import find_misnamed
from fp4convert.storage.open import open_source

WHOLE_LLAMA = {
    **{**LLAMA, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 16, "vocab_size": 96},
}


def llama_tensors():
    shards = llama_shards()
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def write(folder, rename, config=LLAMA):
    """Write a Llama under other names."""
    tensors = {rename(name): tensor for name, tensor in llama_tensors().items()}
    return write_single(folder, tensors, config)


def below(word, module):
    """Rename what lies in a module as the wrapper does that it is in."""
    return lambda name: name.replace(f"{module}.", f"{module}.{word}.")


def error_of(source, tmp_path):
    """The error of quantize, which --for does not change."""
    out = tmp_path / "out"
    words = ("quantize", source, "--format", "nvfp4", "-o", out, "--json")
    outcome, with_engine = run(*words), run(*words, "--for", "vllm")
    assert (outcome.code, with_engine.code, out.exists()) == (2, 2, False)
    assert outcome.json["error"] == with_engine.json["error"]
    return outcome.json["error"]


WRAPPED = {
    "torch.compile": ("_orig_mod", lambda name: f"_orig_mod.{name}"),
    "DDP": ("module", lambda name: f"module.{name}"),
    "DDP inside": ("module", lambda name: name.replace("model.", "model.module.", 1)),
    "PEFT": ("base_model.model", lambda name: f"base_model.model.{name}"),
    "FSDP": ("_fsdp_wrapped_module", below("_fsdp_wrapped_module", "mlp")),
    "activation checkpointing": (
        "_checkpoint_wrapped_module",
        below("_checkpoint_wrapped_module", LAYER),
    ),
    "Lightning Fabric": ("_forward_module", lambda name: f"_forward_module.{name}"),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_is_refused(kind, tmp_path):
    word, rename = WRAPPED[kind]
    error = error_of(write(tmp_path / "m", rename, WHOLE_LLAMA), tmp_path)
    assert error["code"] == "wrapped-names"
    assert word in error["tensor"]
    assert f"{word!r} is a word of {kind.removesuffix(' inside')}" in error["message"]
    escaped = word.replace(".", "[.]")
    assert f"(?:{escaped})" in error["next"].replace("\\.", "[.]", 1)


@pytest.mark.parametrize("kind", ["torch.compile", "FSDP"])
def test_the_next_step_of_a_wrapped_model_unwraps_it(kind, tmp_path):
    source = write(tmp_path / "a model", WRAPPED[kind][1], WHOLE_LLAMA)
    error = error_of(source, tmp_path)
    line = error["next"].partition("that this writes: ")[2]
    line = line.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    plain = tmp_path / "a model-plain"
    assert read_folder(plain) == llama_tensors()
    assert run("quantize", plain, "--format", "nvfp4", "-o", tmp_path / "out").code == 0


def test_the_next_step_unwraps_what_lies_in_folders(tmp_path):
    source = tmp_path / "m"
    write(source / "sub", WRAPPED["torch.compile"][1], WHOLE_LLAMA)
    out = tmp_path / "out"
    outcome = run(
        "quantize", source, "--subfolder", "sub", "--format", "nvfp4", "-o", out, "--json"
    )
    line = outcome.json["error"]["next"].partition("that this writes: ")[2]
    line = line.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    assert read_folder(tmp_path / "m-plain" / "sub") == llama_tensors()


@pytest.mark.parametrize("word", ["module", "base_model.model"])
def test_code_of_a_models_own_has_no_wrapper_around_everything(word, tmp_path):
    config = {**WHOLE_LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"}}
    source = write(tmp_path / "m", lambda name: f"{word}.{name}", config)
    assert error_of(source, tmp_path)["code"] == "wrapped-names"
    own = write(tmp_path / "own", below(word, "mlp"), config)
    assert find_misnamed(open_source(own).checkpoint) is None


def test_ddp_inside_any_class_of_transformers_is_refused(tmp_path):
    config = {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron"}
    for word, module in (("model.module", "model"), ("mlp.module", "mlp")):
        source = write(tmp_path / word, below("module", module), config)
        assert error_of(source, tmp_path)["code"] == "wrapped-names"


def test_factors_of_loralib_are_refused(tmp_path):
    tensors = llama_tensors()
    tensors[f"{LAYER}.self_attn.q_proj.lora_A"] = weight(rows=16)
    tensors[f"{LAYER}.self_attn.q_proj.lora_B"] = weight(columns=16)
    error = error_of(write_single(tmp_path / "m", tensors, WHOLE_LLAMA), tmp_path)
    assert (error["code"], error["tensor"]) == ("wrapped-names", f"{LAYER}.self_attn.q_proj.lora_A")


def test_several_words_are_all_stripped(tmp_path):
    source = write(tmp_path / "m", lambda name: f"module._orig_mod._fsdp_wrapped_module.{name}")
    error = error_of(source, tmp_path)
    assert "(?:_fsdp_wrapped_module|_orig_mod|module)" in error["next"]


ADAPTED = {
    "all": lambda name: f"base_model.model.{name}",
    "without the prefix": lambda name: name,
}


@pytest.mark.parametrize("factors", [True, False])
@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapter_that_is_not_merged_is_refused(kind, factors, tmp_path):
    rename, attention = ADAPTED[kind], f"{LAYER}.self_attn.q_proj"
    tensors = {rename(name): tensor for name, tensor in llama_tensors().items()}
    tensors[rename(f"{attention}.base_layer.weight")] = weight()
    if factors:
        tensors[rename(f"{attention}.lora_A.default.weight")] = weight(rows=16)
        tensors[rename(f"{attention}.lora_B.default.weight")] = weight(columns=16)
    error = error_of(write_single(tmp_path / "m", tensors, LLAMA), tmp_path)
    assert error["code"] == "wrapped-names"
    assert error["tensor"].startswith(rename(attention))
    assert "is a word of PEFT" in error["message"]
    assert "merge_and_unload()" in error["next"]
    assert "fp4convert quantize BASE --format nvfp4 --lora ADAPTER" in error["next"]


def test_a_head_that_peft_trained_whole_is_refused(tmp_path):
    tensors = llama_tensors()
    tensors["lm_head.modules_to_save.default.weight"] = tensors["lm_head.weight"]
    tensors["lm_head.original_module.weight"] = tensors.pop("lm_head.weight")
    error = error_of(write_single(tmp_path / "m", tensors, LLAMA), tmp_path)
    assert (error["code"], "merge_and_unload()" in error["next"]) == ("wrapped-names", True)


SOUND = {
    "LeViT's own module": (
        {"levit.encoder.stages.0.layers.1.module.linear_up.linear.weight": weight()},
        {
            **{"architectures": ["LevitForImageClassification"], "model_type": "levit"},
            **{"image_size": 224, "num_channels": 3, "kernel_size": 3, "stride": 2, "padding": 1},
        },
    ),
    "code of its own": (
        {"base_model.model.layers.0.module.up.weight": weight()},
        {"architectures": ["MyReward"], "model_type": "llama", "auto_map": {"AutoModel": "m.M"}},
    ),
    "ComfyUI's prefix": ({"model.diffusion_model.blocks.0.ff.weight": weight()}, {}),
    "low-rank parameters of Jina": (
        {
            "layers.0.Wqkv.parametrizations.weight.0.lora_A": weight(),
            "layers.0.fc1.weight": weight(),
        },
        {"auto_map": {"AutoModel": "m.M"}},
    ),
    "InternLM-XComposer's": (
        {"model.layers.0.attention.wqkv.Plora_A.weight": weight()},
        {"architectures": ["InternLMXComposer2ForCausalLM"], "auto_map": {"AutoModel": "m.M"}},
    ),
    "names that end so": ({f"{LAYER}.mlp.moe_module.weight": weight()}, LLAMA),
    "a draft head": (
        {"fc.weight": weight(), "midlayer.mlp.up_proj.weight": weight()},
        WHOLE_LLAMA,
    ),
    "a class of another's": (
        {"transformer.layers.0.mlp.up_proj.weight": weight()},
        {**WHOLE_LLAMA, "architectures": ["LlamaForQuestionAnswering"]},
    ),
}


@pytest.mark.parametrize("kind", SOUND)
def test_names_of_a_class_are_not_refused(kind, tmp_path):
    tensors, config = SOUND[kind]
    source = write_single(tmp_path / "m", tensors, config)
    assert find_misnamed(open_source(str(source)).checkpoint) is None


@pytest.mark.parametrize("prefix", ["actor.", "pretrained_model.", "language_model."])
def test_a_model_without_a_layer_of_its_class_is_refused(prefix, tmp_path):
    source = write(tmp_path / "m", lambda name: prefix + name, WHOLE_LLAMA)
    error = error_of(source, tmp_path)
    assert error["code"] == "foreign-names"
    assert "LlamaForCausalLM, has layers model.layers.N" in error["message"]
    assert "save_pretrained" in error["next"]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mixtral", "gemma3_text", "cohere2", "gpt2", "gpt_neo", "bloom", "falcon"],
)
def test_classes_of_transformers_name_their_layers_so(model_type, tmp_path):
    """Asked of transformers: its own state dict passes, and that below another name does not."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type)
    config.num_hidden_layers = 1
    for auto in (AutoModelForCausalLM, AutoModel):
        with torch.device("meta"):
            model = auto.from_config(config)
        known = {**config.to_dict(), "architectures": [type(model).__name__]}
        names = sorted(model.state_dict())
        for prefix, wrapped in (("", None), ("actor.", False), ("module.", True)):
            folder = tmp_path / f"{auto.__name__}{prefix}"
            tensors = {prefix + name: ("BF16", (1,), b"\0\0") for name in names}
            source = open_source(str(write_single(folder, tensors, known)))
            misnamed = find_misnamed(source.checkpoint)
            assert (misnamed and misnamed.is_wrapped) is wrapped, (type(model).__name__, prefix)


def test_inspect_finds_them_transcode_refuses_and_dequantize_does_not(tmp_path):
    """Values are not in doubt: dequantize gives back weights whose names can be mended."""
    made = tmp_path / "made"
    assert run("quantize", write_llama(tmp_path / "m"), "--format", "nvfp4", "-o", made).code == 0
    for file in made.glob("*.safetensors"):
        tensors = {f"_orig_mod.{name}": tensor for name, tensor in read_shard(file).items()}
        file.write_bytes(pack_shard(tensors))
    for file in (made / "quantization_config.json", made / "model.safetensors.index.json"):
        file.unlink()
    shutil.rmtree(made / ".fp4convert")
    document = run("inspect", made, "--json").json
    (finding,) = (each for each in document["findings"] if each["code"] == "wrapped-names")
    assert (finding["level"], document["healthy"]) == ("error", False)
    assert finding["tensor"].startswith("_orig_mod.")
    assert not any(each["loads"] for each in document["engines"])
    out = tmp_path / "out"
    outcome = run("transcode", made, "--dialect", "modelopt", "-o", out, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "wrapped-names")
    assert "the model that this was made of" in outcome.json["error"]["next"]
    assert run("dequantize", made, "-o", out).code == 0
    assert all(name.startswith("_orig_mod.") for name in read_folder(out))
