"""Names are held against the class in config.json: whole models of transformers are explained,
and every name that is changed, and every tensor that is taken away, is named.
"""

import json
import random
import time

import pytest
import transformers
from meta_models import default_model
from model_names import judged, unsound, whole, with_experts_apart
from transformers.models.auto import modeling_auto as auto

from fp4convert.checkpoint.class_table import find_architecture, note_on_class
from fp4convert.checkpoint.missing_parts import judge_names
from fp4convert.recipes.recipe import model_recipe

KINDS = {  # classes of every kind, as transformers makes them
    "dense": ("llama", "qwen3", "gemma3_text", "phi3", "glm4", "olmo2"),
    "mixtures": ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text"),
    "hybrids": ("lfm2", "granitemoehybrid", "qwen3_next", "nemotron_h", "minimax"),
    "with towers": ("qwen3_vl", "gemma3", "granite_speech", "llava"),
    "encoders and decoders": ("whisper", "t5", "bart"),
    "encoders": ("bert", "modernbert", "clip"),
}
EVERY = [name for names in KINDS.values() for name in names]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model_type", EVERY)
def test_a_whole_model_is_explained(model_type):
    names, config = whole(model_type)
    assert unsound(names, config) == (set(), set())


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model_type", EVERY)
def test_every_change_of_a_name_and_every_lack_is_named(model_type):
    names, config = whole(model_type)
    stored = [name for name in names if not name.endswith("num_batches_tracked")]  # engines count
    for name in random.Random(model_type).sample(stored, min(len(stored), 12)):
        rest = [one for one in names if one != name]
        parts = name.split(".")
        at = random.Random(name).choice([i for i, part in enumerate(parts) if not part.isdigit()])
        strange = ".".join([*parts[:at], f"{parts[at]}_x", *parts[at + 1 :]])
        unexplained, _ = unsound([*rest, strange], config)
        assert strange in unexplained
        assert unsound(rest, config)[1], name


def test_a_setting_of_config_json_decides_what_is_missing():
    """Biases of attention are parameters only where config.json says so."""
    names, config = whole("llama")
    biases = [
        f"model.layers.{layer}.self_attn.{one}_proj.bias"
        for layer in range(config["num_hidden_layers"])
        for one in "qkvo"
    ]
    assert unsound(names + biases, {**config, "attention_bias": True}) == (set(), set())
    _, missing = unsound(names, {**config, "attention_bias": True})
    assert "model.layers.0.self_attn.q_proj.bias" in missing


def test_experts_are_the_stacks_that_transformers_makes_of_them():
    names, config = whole("qwen3_moe")
    assert unsound(with_experts_apart(names, config), config) == (set(), set())


@pytest.mark.parametrize("lost", ["gate", "up", "down"])
@pytest.mark.parametrize("layers", [(1,), (0, 1, 2, 3)])
def test_all_of_one_source_of_a_merge_is_missed(lost, layers):
    """transformers merges gate_proj and up_proj of all experts: one alone is no half."""
    names, config = whole("qwen3_moe")
    gone = tuple(f"model.layers.{layer}.mlp.experts." for layer in layers)
    rest = [
        name
        for name in with_experts_apart(names, config)
        if not (name.startswith(gone) and f".{lost}_proj." in name)
    ]
    _, missing = unsound(rest, config)
    for start in gone if lost != "down" else gone[:1]:  # one name stands for all layers
        assert any(one.startswith(start) and f"{lost}_proj" in one for one in missing)


@pytest.mark.parametrize(
    ("model_type", "name", "other"),
    [
        ("llama", "model.embed_tokens.weight", "embed_tokens.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        (
            "bert",
            "bert.encoder.layer.0.output.LayerNorm.weight",
            "bert.encoder.layer.0.output.LayerNorm.gamma",
        ),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", None),
    ],
)
def test_two_tensors_of_one_parameter_are_named(model_type, name, other):
    names, config = whole(model_type)
    assert name in names
    other = other or name.replace("gate_up_proj", "0.gate_proj.weight")
    unexplained, _ = unsound([*names, other], config)
    assert unexplained & {name, other}


@pytest.mark.parametrize("number", ["00", "01", "\u0661", "+1"])
def test_a_number_is_written_in_one_way(number):
    names, config = whole("llama")
    odd = [name.replace("layers.1.", f"layers.{number}.") for name in names]
    unexplained, missing = unsound(odd, config)
    assert unexplained == set(odd) - set(names)
    assert "model.layers.1" in missing


@pytest.mark.parametrize("change", [("model.", ""), ("model.", "model.model.")])
def test_names_of_one_list_begin_alike(change):
    names, config = whole("llama")
    others = [name.replace(*change) for name in names]
    mixed = [b if "layers.2." in a else a for a, b in zip(names, others, strict=True)]
    assert unsound(mixed, config)[0] == set(mixed) - set(names)
    if not change[1]:  # of the model without its head
        assert unsound(others, config) == (set(), set())


def test_what_another_setting_would_add_is_unexplained():
    names, config = whole("llama")
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert unsound([*names, bias], config) == ({bias}, set())
    assert "settings" in judged([*names, bias], config).unexplained[0].reason


@pytest.mark.parametrize(
    "name", ["foo.k_scale", "model.layers.9.self_attn.v_scale", "a.b.inv_freq"]
)
def test_scales_and_buffers_stand_beside_modules(name):
    names, config = whole("llama")
    beside = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert unsound([*names, *beside], config) == (set(), set())
    assert unsound([*names, *beside, name], config) == ({name}, set())


def test_dimensions_are_counted():
    names, config = whole("llama")
    shapes = {"model.norm": (64,), "model.layers.0.mlp.up_proj": (1, 64, 64)}
    found = judge_names(names, shapes, config, model_recipe(config))
    assert [one.name for one in found.unexplained] == ["model.layers.0.mlp.up_proj.weight"]


def test_a_model_inside_is_of_the_class_that_its_own_config_names():
    """LLaVA's own is a Llama; here it is a Gemma 2, whose layers have four norms."""
    import torch

    text = transformers.Gemma2Config(num_hidden_layers=3)
    config = transformers.LlavaConfig(text_config=text)
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    written = {**config.to_dict(), "architectures": ["LlavaForConditionalGeneration"]}
    names = list(model.state_dict())
    assert unsound(names, written) == (set(), set())
    lost = "model.language_model.layers.1.pre_feedforward_layernorm"
    _, missing = unsound([name for name in names if name != f"{lost}.weight"], written)
    assert missing == {lost}


def test_names_of_old_versions_are_those_of_the_class():
    names, config = whole("bert")
    old = [
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        for name in names
    ]
    assert old != names
    assert unsound(old, config) == (set(), set())


@pytest.mark.parametrize("digits", [9, 10, 19, 300, 4301])
def test_numbers_of_any_length_are_of_no_class(digits):
    names, config = whole("llama")
    for name in (f"model.layers.{'9' * digits}.x.weight", f"model.layers.0.x.{'9' * digits}"):
        assert unsound([*names, name], config)[0] == {name}


def test_a_gap_is_one_finding():
    names, config = whole("llama")
    config["num_hidden_layers"] = 9
    more = [name.replace("layers.0.", f"layers.{layer}.") for layer in (7, 8) for name in names]
    _, missing = unsound(sorted({*names, *more}), config)
    assert missing == {"model.layers.4"}


@pytest.mark.parametrize(
    ("model_type", "name", "letter"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", "L"),
        ("llama", "lm_head.weight", "H"),
        ("llama", "model.embed_tokens.weight", "E"),
        ("llama", "model.norm.weight", "N"),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "T"),
        ("qwen3_moe", "model.layers.0.mlp.experts.down_proj", "X"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "R"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", "Y"),
        ("llama4_text", "model.layers.0.feed_forward.experts.down_proj", "Y"),
        ("modernbert", "head.dense.weight", "H"),
    ],
)
def test_types_of_parameters(model_type, name, letter):
    names, config = whole(model_type)
    assert name in names
    architecture = find_architecture(config, names)
    assert architecture
    (place,) = architecture.places(name)
    assert architecture.parts[place.prefix][place.part][0] == letter


def test_code_of_its_own_is_judged_only_where_all_fits():
    names, config = whole("llama")
    own = {**config, "auto_map": {"AutoModel": "m.M"}}
    assert judged(names, own).kept
    other = judged([*names, "model.layers.0.memory.weight"], own)
    assert (other.kept, other.unexplained) == ({}, ())


@pytest.mark.parametrize("classes", ["LlamaForCausalLM", 3, [], None, [5]])
def test_architectures_that_name_no_class_are_said(classes):
    names, config = whole("llama")
    found = judged(names, {**config, "architectures": classes})
    assert found.note.startswith(f"architectures in config.json is {json.dumps(classes)}, no class")


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen2ForSequenceClassification"])
def test_a_class_of_another_model_type_is_said(name):
    names, config = whole("llama")
    note = judged(names, {**config, "architectures": [name]}).note
    assert f"model_type is 'llama', and the class {name} of another family" in note
    assert judged(names, {**config, "architectures": [name], "model_type": "mine"}).note == ""
    assert judged(names, config).note == ""


def test_every_class_that_transformers_has_for_a_model_type_is_of_it():
    mappings = [getattr(auto, name) for name in dir(auto) if name.endswith("_MAPPING_NAMES")]
    pairs = {
        (model_type, name)
        for mapping in mappings
        for model_type, names in mapping.items()
        for name in ((names,) if isinstance(names, str) else names)
    }
    sizes = dict.fromkeys("abcd", 64)
    notes = {
        pair: note_on_class({"model_type": pair[0], "architectures": [pair[1]], **sizes}, True)
        for pair in pairs
    }
    assert len(pairs) > 2000
    assert not [pair for pair, note in notes.items() if note]


def test_a_class_of_no_table_is_said_to_be_one():
    _, config = whole("llama")
    found = judged(["model.w.weight"], {**config, "architectures": ["MyOwnForCausalLM"]})
    assert "class-unknown" in [one.code for one in found.findings]
    assert "MyOwnForCausalLM" in found.note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "names 2 classes"),
        ({"auto_map": {"AutoModel": "m.M"}}, "code of its own"),
        ({"quantization": {"bits": 4}}, ""),  # of mlx-lm
    ],
)
def test_why_a_class_is_not_asked_is_said(change, words):
    names, config = whole("llama")
    note = judged([*names, "model.layers.0.memory.weight"], {**config, **change}).note
    assert words in note
    assert bool(note) == bool(words)


def test_a_class_is_read_in_5_ms():
    _, config = whole("qwen3_moe")
    find_architecture(config)  # reads the index
    start = time.process_time()
    for _ in range(20):
        find_architecture(config)
    assert (time.process_time() - start) / 20 < 0.005


@pytest.mark.slow
def test_every_class_of_transformers_is_explained(monkeypatch):
    """With other numbers of layers than those of the table."""
    monkeypatch.setattr("meta_models.MOST_LAYERS", 7)
    from meta_models import model_classes

    known, wrong = 0, {}
    for made in model_classes():
        try:
            model = default_model(made)
        except Exception:  # configs that make no model
            continue
        config = {**model.config.to_dict(), "architectures": [made.__name__]}
        found = judged(list(model.state_dict()), config)
        known += bool(found.kept)
        missing = [one.tensor for one in found.faults if one.code == "module-missing"]
        if found.unexplained or missing:
            wrong[made.__name__] = (found.unexplained[:3], missing[:3])
    assert known > 1700
    assert len(wrong) <= known // 200, wrong


def test_the_table_names_the_version_it_was_made_of():
    import json
    from importlib.resources import files

    table = files("fp4convert").joinpath("configs", "architectures", "index.json")
    sources = json.loads(table.read_text(encoding="ascii"))["sources"]
    assert sources["transformers"]["version"] == transformers.__version__


def test_a_config_of_another_form_is_of_no_class():
    """Qwen3-ASR as it is published: thinker_config, and names that transformers' class has not."""
    names, config = whole("qwen3_asr")
    inner = {key: config.pop(key) for key in ("text_config", "audio_config")}
    other = {**config, "thinker_config": inner}
    found = judged([f"thinker.{name}" for name in names], other)
    assert (found.kept, found.unexplained) == ({}, ())
    assert "thinker_config" in found.note
    assert judged(names, {**config, **inner}).kept


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "DebertaV2Model",  # DeBERTa-v3 as it is published: layers share keys of positions
            {
                "relative_attention": True,
                "share_att_key": True,
                "pos_att_type": "p2c|c2p",
                "norm_rel_ebd": "layer_norm",
                "position_biased_input": False,
            },
        ),
        ("Wav2Vec2ForCTC", {"do_stable_layer_norm": True, "conv_bias": True}),
        ("Wav2Vec2ForCTC", {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
        ("Wav2Vec2ForCTC", {"adapter_attn_dim": 8}),
    ],
)
def test_a_third_setting_takes_parts_away(name, settings):
    import torch

    made = getattr(transformers, name)
    config = made.config_class(num_hidden_layers=2, **settings)
    with torch.device("meta"):
        model = made(config)
    tied = set(model.all_tied_weights_keys)
    names = [one for one in model.state_dict() if one not in tied]
    assert unsound(names, {**config.to_dict(), "architectures": [name]}) == (set(), set())


@pytest.mark.parametrize("number", ["01", "\u0661"])
def test_experts_are_numbered_in_one_way(number):
    names, config = whole("qwen3_moe")
    apart, start = with_experts_apart(names, config), "model.layers.0.mlp.experts"
    odd = [name.replace(f"{start}.1.", f"{start}.{number}.") for name in apart]
    assert unsound(odd, config)[0] == set(odd) - set(apart)


def test_experts_beyond_the_count_are_unexplained():
    names, config = whole("mixtral")
    more = [
        f"model.layers.0.block_sparse_moe.experts.{number}.{one}.weight"
        for number in range(config["num_local_experts"] + 1)
        for one in ("w1", "w2", "w3")
    ]
    apart = [name for name in names if "model.layers.0." not in name or ".experts." not in name]
    assert unsound([*apart, *more[:-3]], config) == (set(), set())
    assert unsound([*apart, *more], config) == (set(more[-3:]), set())


def test_a_config_that_names_no_class_is_said():
    names, config = whole("llama")
    del config["architectures"]
    found = judged(names, config)
    assert "names no class" in found.note
    assert found.kept == {}
