"""What a model has beside its decoder stays: names are those of transformers' own models, as it
holds and as it saves them.

transformers says which module is the decoder; nothing that decides here is taken from a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from meta_models import model_of

from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.safetensors import WEIGHT

MODEL_TYPES = (
    # towers of images and films
    *(
        "blip-2",
        "instructblip",
        "kosmos-2",
        "lighton_ocr",
        "molmo2",
        "unlimited_ocr",
        "video_llama_3",
        "video_llava",
    ),
    *("cosmos3_edge", "cosmos3_omni", "hyperclovax_vision_v2", "minicpmv4_6", "paddleocr_vl"),
    *("pix2struct", "pp_formulanet", "vision-encoder-decoder"),
    # of sound
    *(
        "dots3_note",
        "granite_speech",
        "granite_speech_plus",
        "seamless_m4t",
        "speech-encoder-decoder",
        "vibevoice_asr",
    ),
)


def matrices_of(model: Any) -> Iterator[tuple[str, list[str]]]:
    """(module that holds it, all names that the module has in checkpoints) of every matrix."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in model.state_dict().items():
        if tensor.dim() == 2 and name.endswith(WEIGHT):
            names = {name, *revert_weight_conversion(model, {name: tensor})}
            yield (
                name.removesuffix(WEIGHT),
                [each.removesuffix(WEIGHT) for each in sorted(names) if each.endswith(WEIGHT)],
            )


@pytest.mark.sweep(8)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_beside_the_decoder_stays_and_the_decoder_does_not(model_type):
    model = model_of(model_type)
    recipe = build_recipe(Target("nvfp4"), model.config.to_dict())
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    matrices = dict(matrices_of(model))
    inside = [
        name for owner in matrices if owner.startswith(f"{decoder}.") for name in matrices[owner]
    ]
    outside = [name for names in matrices.values() for name in names if name not in inside]
    assert len(outside) > 2
    assert [name for name in outside if recipe.reason_to_keep(name) is None] == []
    assert [name for name in inside if recipe.kind_of(name) == "tower"] == []
    assert any(recipe.reason_to_keep(name) is None for name in inside)


def test_tables_of_relative_positions_are_embeddings():
    recipe = build_recipe(Target("nvfp4"), {"model_type": "granite_speech_encoder"})
    assert recipe.kind_of("layers.0.attn.rel_pos_emb") == "embedding"
