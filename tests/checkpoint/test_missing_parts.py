"""Layers, experts and heads that are not there are found, and none where a model has none."""

import time

import pytest
from checkpoints import pack_shard, read_shard, run
from families import FAMILIES
from family import build
from tiny_models import make_qwen3_moe, read_json, read_tensors

from fp4convert.checkpoint.config_sizes import WHOLE
from fp4convert.checkpoint.missing_parts import judge_names
from fp4convert.recipes.recipe import model_recipe

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
PLAIN = {**LLAMA, **dict.fromkeys(WHOLE, 64), "num_hidden_layers": 4}
MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 3}
NINES = "9" * 5000  # longer than Python reads as a number


def layers(*numbers, stack="model.layers"):
    return {f"{stack}.{number}.{part}" for number in numbers for part in ("attn", "mlp", "norm")}


def decoder(count):
    """The modules of a Llama."""
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{one}_proj" for one in "qkvo"]
    parts += [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    modules = {f"model.layers.{at}.{part}" for at in range(count) for part in parts}
    return modules | {"model.norm", "lm_head", "model.embed_tokens"}


def experts(*numbers, layer=0, leaves="gate up down"):
    return {
        f"model.layers.{layer}.mlp.experts.{number}.{leaf}_proj"
        for number in numbers
        for leaf in leaves.split()
    }


def test_buffers_of_some_layers_are_no_parts():
    some = {f"model.layers.{at}.self_attn.rotary_emb" for at in range(3)}
    assert missing(decoder(4) | some, PLAIN) == []


def test_a_plain_decoder_has_an_embedding():
    modules = decoder(4) - {"model.embed_tokens"}
    assert missing(modules, PLAIN) == ["model.embed_tokens"]
    assert missing(modules, {**PLAIN, "tie_word_embeddings": True}) == []  # lm_head has it


def test_experts_with_strange_names_are_not_compared_with_all_others():
    modules = {f"model.layers.0.mlp.experts.{at}.part{at:04}" for at in range(8000)}
    begun = time.process_time()
    lacks = missing(modules, {"num_experts": 8000})
    assert time.process_time() - begun < 2  # else 9 s, and four times as much for twice as many
    assert sorted(lacks)[:2] == [
        f"model.layers.0.mlp.experts.{at}.part{1 - at:04}" for at in (0, 1)
    ]
    assert len(lacks) == 8000


def test_a_count_of_experts_beyond_any_size_is_a_count():
    huge = {**MOE, "num_experts": 10**25}
    assert missing(experts(0, 1) | layers(0, 1), huge) == ["model.layers.0.mlp.experts.2"]


def missing(modules, config):
    """The modules that are missing beside these, each with a weight."""
    judged = judge_names([f"{one}.weight" for one in modules], {}, config, model_recipe(config))
    return [one.tensor for one in judged.faults if one.code == "module-missing"]


@pytest.mark.parametrize(
    ("modules", "config", "first"),
    [
        (layers(0, 2), LLAMA, "model.layers.1"),
        (layers(0, 1), LLAMA, "model.layers.2"),
        (layers(1, 2), LLAMA, "model.layers.0"),
        (layers(0, 2, stack="h"), {}, "h.1"),
        (
            layers(0, 1) | layers(*range(9), stack="vision_tower.layers"),
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 4}},
            "model.layers.2",
        ),
        (experts(0, 2) | layers(0, 1), MOE, "model.layers.0.mlp.experts.1"),
        (experts(0, 1) | layers(0, 1), MOE, "model.layers.0.mlp.experts.2"),
        (experts(0, 2), {}, "model.layers.0.mlp.experts.1"),
        (
            experts(0, 1, 2) - experts(1, leaves="down") | layers(0, 1),
            MOE,
            "model.layers.0.mlp.experts.1.down_proj",
        ),
    ],
)
def test_what_is_missing_is_named(modules, config, first):
    assert missing({*modules, "lm_head"}, config) == [first]


@pytest.mark.parametrize("count", [10**18, "3", None, -1, [3], 2.5, True])
def test_counts_of_any_kind_take_no_time(count):
    config = {"num_hidden_layers": count, "num_experts": count}
    modules = experts(0, 1, 2) | layers(0, 10**17) | {f"model.layers.{NINES}.mlp.down_proj"}
    assert len(missing(modules, config)) == (3 if count == 10**18 else 1)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_a_head_of_its_own(name):
    config = {**LLAMA, "architectures": [name]}
    modules = layers(0, 1, 2)
    assert missing(modules, config) == ["lm_head"]
    for head in ("lm_head", "output", "lm_head.out_proj"):
        assert missing({*modules, head}, config) == []


@pytest.mark.parametrize(
    ("modules", "config"),
    [
        (layers(0, 1, 2), {**LLAMA, "tie_word_embeddings": True}),
        (layers(0, 1, 2), {**LLAMA, "text_config": {"tie_word_embeddings": True}}),
        (layers(0, 1, 2), {**LLAMA, "architectures": ["LlamaModel"]}),
        # A layer behind the others that predicts further tokens, or a draft of such alone.
        (layers(0, 1, 2, 3) | {"lm_head"}, LLAMA),
        (layers(3) | {"lm_head"}, LLAMA),
        # Dense layers, and layers of another kind, among layers with experts.
        (experts(0, 1, 2, layer=1) | layers(0, 1), MOE),
        # A stack holds the experts that have no number.
        ({"model.layers.0.mlp.experts.gate_up_proj"} | layers(0, 1), MOE),
        # Several counts are of several kinds of mixtures, or of one that is asked in part.
        (experts(0, 1) | layers(0, 1), {**MOE, "vision_config": {"num_experts": 2}}),
        (layers(0, 2), {**LLAMA, "architectures": ["DeciLM"], "block_configs": [{}, {}, {}]}),
        # The names of llama.cpp, beside the config.json of a plain decoder.
        (
            {f"blk.{layer}.{part}" for layer in range(3) for part in ("attn_norm", "attn_q", "ffn")}
            | {"output", "output_norm"},
            {**LLAMA, **dict.fromkeys(WHOLE, 3)},
        ),
        # DPT: one of four has the size that is wanted, and resizes nothing.
        (
            {f"neck.stage.layers.{at}.{part}" for at in range(4) for part in ("project", "resize")}
            - {"neck.stage.layers.2.resize"},
            {"model_type": "dpt"},
        ),
        ({"model.layers.0.self_attn.q_proj", "lm_heads.0", "lm_heads.1"}, LLAMA | {"n_layer": 1}),
        # A decoder of which one layer has more than others: buffers, an adapter, drafts.
        (decoder(4) | {"model.layers.0.self_attn.rotary_emb"}, PLAIN),
        (decoder(4) | {"model.layers.1.self_attn"}, PLAIN),
        (decoder(4) | {"model.layers.1.mlp.up_proj.lora_A"}, PLAIN),
        (decoder(4) | {"model.layers.4.eh_proj", "model.layers.4.enorm"}, PLAIN),
        (
            decoder(4) - {"model.layers.2.input_layernorm", "model.layers.2.self_attn.q_proj"},
            PLAIN | {"auto_map": {}},
        ),
        # An encoder and a decoder that counts differ for.
        (layers(0, 1, stack="encoder.layers") | layers(0, stack="decoder.layers"), {"n_layers": 2}),
    ],
)
def test_what_a_model_does_not_have_is_not_missed(modules, config):
    assert missing(modules, config) == []


@pytest.mark.parametrize(
    "lost", ["model.layers.0.input_layernorm", "model.layers.3.mlp.up_proj", "model.norm"]
)
def test_the_ends_of_a_plain_decoder_are_judged(lost):
    assert missing(decoder(4) - {lost}, PLAIN) == [lost]


def test_a_stump_of_a_layer_hides_no_other():
    modules = layers(*range(8)) - layers(2) - {"model.layers.4.norm"}
    found = missing({*modules, "lm_head"}, {**LLAMA, "num_hidden_layers": 8})
    assert found == ["model.layers.2", "model.layers.4.norm"]


def test_functions_of_a_codec_have_no_weights():
    modules = {f"encoder.layers.{number}.conv" for number in (0, 3, 6, 9, 12)}
    modules |= {f"encoder.layers.{number}.block.{part}" for number in (1, 4, 7) for part in (1, 3)}
    assert missing(modules, {"model_type": "encodec"}) == []


LAYER = ("norm1", "attn", "attn.qkv", "mlp.fc1")


@pytest.mark.parametrize(
    ("lacking", "first"),
    [
        ({2: {"norm1"}}, ["encoder.layer.2.norm1"]),
        ({2: {"mlp.fc1"}}, ["encoder.layer.2.mlp.fc1"]),
        ({0: {"norm1"}}, []),
        ({4: {"norm1"}}, []),
        ({1: {"norm1"}, 3: {"norm1"}}, []),
        ({2: {"norm1", "mlp.fc1"}}, []),
        ({2: {"attn"}}, []),  # a parameter of its own, as of a window
    ],
)
def test_a_layer_that_lacks_what_all_others_have(lacking, first):
    modules = {
        f"encoder.layer.{number}.{part}"
        for number in range(5)
        for part in LAYER
        if part not in lacking.get(number, ())
    }
    assert missing(modules, {"model_type": "anything"}) == first


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_all_of_a_whole_model_is_there_and_explained(family, tmp_path):
    folder = build(family, tmp_path / "m")
    config, tensors = read_json(folder / "config.json"), read_tensors(folder)
    names = [one for one in tensors if not family.beside or not one.startswith(family.beside)]
    shapes = {
        one.removesuffix(".weight"): tuple(tensors[one].shape)
        for one in names
        if one.endswith(".weight")
    }
    judged = judge_names(names, shapes, config, model_recipe(config))
    assert (judged.faults, judged.unexplained) == ((), ())


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_inspect_and_verify_say_what_a_lost_tensor_takes_with_it(dialect, tmp_path):
    source, out = make_qwen3_moe(tmp_path / "m"), tmp_path / "out"
    run("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", out, "-q")
    assert run("inspect", out).code == 0
    last = f"experts.{read_json(out / 'config.json')['num_local_experts'] - 1}."
    (shard,) = out.glob("*.safetensors")
    whole = read_shard(shard)
    for lost, count in ((last, 2), ("layers.0.input_layernorm.", 1), ("model.norm.", 1)):
        shard.write_bytes(pack_shard({name: whole[name] for name in whole if lost not in name}))
        for command in ("inspect", "verify"):
            found = run(command, out, "--json")
            codes = [one["code"] for one in found.json["findings"]]
            assert (found.code, codes.count("module-missing")) == (6, count)


def test_what_the_source_lacks_too_is_no_fault(tmp_path):
    source, out = make_qwen3_moe(tmp_path / "m"), tmp_path / "out"
    (shard,) = source.glob("*.safetensors")
    whole, norm = read_shard(shard), "model.layers.0.input_layernorm"
    shard.write_bytes(pack_shard({name: whole[name] for name in whole if norm not in name}))
    run("quantize", source, "--format", "nvfp4", "-o", out, "-q")
    found = run("verify", out, "--source", source, "--json")
    told = [(one["code"], one["level"], one["tensor"]) for one in found.json["findings"]]
    assert (found.code, told) == (0, [("module-missing", "warning", norm)])
    assert run("verify", out, "--json").code == 6
    shard.write_bytes(pack_shard(whole))
    assert run("verify", out, "--source", source, "--json").code == 6
