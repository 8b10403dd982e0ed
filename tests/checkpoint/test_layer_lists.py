"""Lists of layers have as many as config.json says, of the kinds that it says."""

import pytest
import transformers
from meta_models import default_model
from model_names import judged, unsound, whole


def without(names, start):
    return [name for name in names if not name.startswith(start)]


@pytest.mark.parametrize(
    ("of", "last", "count"),
    [
        ("LlamaForCausalLM", "model.layers.3", 4),
        ("WhisperForConditionalGeneration", "model.encoder.layers.3", 4),
        ("WhisperForConditionalGeneration", "model.decoder.layers.3", 4),
        ("BartForConditionalGeneration", "model.encoder.layers.3", 4),
        ("T5ForConditionalGeneration", "encoder.block.3", 4),
        ("T5ForConditionalGeneration", "decoder.block.5", 6),
        ("LlavaForConditionalGeneration", "model.vision_tower.encoder.layers.3", 4),
        ("LlavaForConditionalGeneration", "model.language_model.layers.3", 4),
        ("Qwen2_5_VLForConditionalGeneration", "model.visual.blocks.3", 4),
    ],
)
def test_every_list_ends_where_config_json_says(of, last, count):
    """Of an encoder, a decoder and a tower, however long the others are."""
    model = default_model(getattr(transformers, of))
    names, config = list(model.state_dict()), {**model.config.to_dict(), "architectures": [of]}
    assert unsound(names, config) == (set(), set())
    rest = without(names, f"{last}.")
    assert len(rest) < len(names)
    assert unsound(rest, config) == (set(), {last})
    (fault,) = judged(rest, config).faults
    stack = last.rpartition(".")[0]
    words = f"config.json has {count} layers, and {stack} ends after {count - 1}"
    assert words in fault.detail


def test_a_setting_that_is_left_out_is_what_another_one_says():
    names, config = whole("t5")  # 4 and 6 layers
    rest = without(without(names, "decoder.block.4."), "decoder.block.5.")
    for silent in ({**config, "num_decoder_layers": None}, dict(config)):
        if silent["num_decoder_layers"]:
            del silent["num_decoder_layers"]
        assert unsound(rest, silent) == (set(), set())
        assert unsound(without(rest, "decoder.block.3."), silent) == (set(), {"decoder.block.3"})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": "5"},
        {"num_hidden_layers": [5]},
        {"num_hidden_layers": True},
        {"num_hidden_layers": -1},
    ],
)
def test_a_count_that_is_none_says_nothing(change):
    names, config = whole("llama")
    assert unsound(names, {**config, **change}) == (set(), set())


def test_a_default_holds_where_config_json_has_no_other_count():
    """A Llama has 32 layers, unless an older name of a setting says another number."""
    names, config = whole("llama")
    del config["num_hidden_layers"]
    assert unsound(names, config) == (set(), {"model.layers.4"})
    assert unsound(names, {**config, "n_layer": 4}) == (set(), set())
    assert unsound(names, {**config, "model_type": "another"}) == (set(), set())


def test_a_config_of_an_older_version_has_the_counts_at_its_top():
    names, config = whole("qwen2_5_vl")
    old = {**config["text_config"], **config}
    del old["text_config"]
    assert unsound(names, old) == (set(), set())
    rest = without(names, "model.language_model.layers.3.")
    assert unsound(rest, old) == (set(), {"model.language_model.layers.3"})


def test_layers_beyond_the_count_are_unexplained_and_drafts_are_not():
    names, config = whole("llama")
    more = [
        name.replace("layers.3.", "layers.4.")
        for name in names
        if name.startswith("model.layers.3.")
    ]
    assert unsound(names + more, config) == (set(more), set())
    found = judged(names + more, config)
    assert {one.reason for one in found.unexplained} == {"config.json has 4 layers"}
    assert found.kept.keys() >= set(more)
    names, config = whole("deepseek_v3")
    drafts = [f"model.layers.4.{part}" for part in ("eh_proj.weight", "mlp.gate.weight")]
    assert unsound(names + drafts, config) == (set(), set())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("modernbert", "model.layers.2.attn_norm.weight"),  # the first one has none
    ],
)
def test_what_one_end_alone_has_or_lacks(model_type, name):
    names, config = whole(model_type)
    lost = name.removesuffix(".weight")
    assert unsound([one for one in names if one != name], config) == (set(), {lost})


def test_a_layer_of_another_kind_than_config_json_says():
    names, config = whole("qwen3_next")
    assert config["layer_types"][2:] == ["linear_attention", "full_attention"]
    swapped = {**config, "layer_types": [*config["layer_types"][:2], *config["layer_types"][:1:-1]]}
    assert unsound(names, swapped) == (set(), {"model.layers.2", "model.layers.3"})
    for silent in (None, [], ["linear_attention"], ["other"] * 4, "full_attention", [1, 2, 3, 4]):
        assert unsound(names, {**config, "layer_types": silent}) == (set(), set())
