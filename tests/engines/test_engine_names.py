"""Names that engines give modules: what the tables say is typed here from the engines' own code."""

from __future__ import annotations

import pytest

from fp4convert.engines.module_names import NameTable, engine_names

# transformers 5.23, conversion_mapping.py, "hunyuan_vl"
TOWER, IN_MODEL = "vit.layers.12", "model.vision_tower.layers.12"


@pytest.mark.parametrize(
    ("model_type", "module", "names"),
    [
        (
            "hunyuan_vl",
            f"{TOWER}.self_attn.q_proj",
            "model.vision_tower.layers.12.self_attn.q_proj",
        ),
        ("hunyuan_vl", f"{TOWER}.mlp.dense_h_to_4h", f"{IN_MODEL}.mlp.fc1"),
        ("hunyuan_vl", "vit.perceive.mlp", "model.vision_tower.patch_merger.mlp"),
        ("hunyuan_vl", "model.layers.3.mlp.up_proj", "model.language_model.layers.3.mlp.up_proj"),
        ("hunyuan_vl", "vitality.mlp", ""),
        ("granite_speech", "encoder.layers.9.attn.to_q", "model.encoder.layers.9.attn.to_q"),
        ("granite_speech", "encoder", "model.encoder"),
        ("granite_speech_plus", "projector.linear", "model.projector.linear"),
        ("cosmos3_omni", "blocks.2.attn.qkv", "model.visual.blocks.2.attn.qkv"),
        # one matrix of the checkpoint is three of the model
        (
            "nemo_speechlm",
            "perception.encoder.asr_encoder.layers.7.attn.w_qkv",
            " ".join(
                f"model.audio_tower.asr_encoder.layers.7.self_attn.{each}_proj" for each in "qkv"
            ),
        ),
        # vLLM 0.33, models/lfm2.py and granitemoehybrid.py
        ("lfm2", "model.layers.1.conv.in_proj", "model.layers.1.short_conv.in_proj"),
        ("lfm2", "model.layers.1.self_attn.q_proj", ""),
        ("granitemoehybrid", "model.layers.4.mamba.in_proj", "model.layers.4.mixer.in_proj"),
        (
            "granitemoehybrid",
            "model.layers.4.block_sparse_moe.output_linear",
            "model.layers.4.block_sparse_moe.experts"
            " model.layers.4.block_sparse_moe.experts.0.down_proj",
        ),
        # vLLM 0.33, models/whisper.py: its model has no name, and layers have that word twice
        ("whisper", "model.encoder.layers.1.fc2", ".encoder.layers.1.layers.mlp.fc2"),
        (
            "whisper",
            "model.encoder.layers.1.self_attn.q_proj",
            ".encoder.layers.1.layers.self_attn.q_proj",
        ),
        ("whisper", "model.decoder.layers.1.fc2", ""),
        # vLLM's name and SGLang's
        (
            "lfm2_moe",
            "model.layers.0.feed_forward.w1",
            "model.layers.0.feed_forward.gate_up_proj",
        ),
        ("lfm2_moe", "model.layers.2.feed_forward.experts.3.w1", ""),
        ("llama", "model.layers.0.mlp.up_proj", ""),
        ("", "vit.layers.0.mlp.fc1", ""),
    ],
)
def test_what_engines_call_a_module(model_type: str, module: str, names: str) -> None:
    found = engine_names({"model_type": model_type}, [module])
    assert found == ({module: tuple(names.split())} if names else {})


def test_a_config_without_a_model_type_has_no_names() -> None:
    assert engine_names({}, ["encoder.layers.0.attn.to_q"]) == {}


def test_the_first_line_that_fits_counts() -> None:
    table = NameTable.parse(["a.#.b.0 > c.#.d e.#", "a > f"])
    assert table.names("a.12.b.0.x") == ("c.12.d.x", "e.12.x")
    assert table.names("a.12.b.1") == ("f.12.b.1",)
    assert table.names("a.x.b.0") == ("f.x.b.0",)
    assert table.names("ab") == ("ab",)
