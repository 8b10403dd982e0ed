"""What becomes four-bit is a linear layer and no head: judged by the classes of transformers' own
models.
"""

from __future__ import annotations

from typing import Any

import pytest
from meta_models import model_of

from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.safetensors import WEIGHT

# Whose tables of queries, tokens and positions, or layers of other arithmetic, were quantized.
MODEL_TYPES = (
    *("cohere_asr", "dac", "gpt-sw3", "ibert", "kosmos-2.5", "lw_detr", "mask2former", "rf_detr"),
    *("sam", "sam2", "sam2_video", "sam3", "sam3_tracker", "sam3_video", "sam_hq", "timesfm"),
)
HEADS = (
    ("dia", "decoder.logits_dense"),
    ("granite_speech5_ctc", "ctc_head"),
    ("granite_speech5_ctc", "encoder.out"),
    ("janus", "model.generation_head.vision_head"),
    ("nemotron_asr_streaming", "joint.head"),
    ("parakeet_rnnt", "joint.head"),
    ("qwen2_5_omni", "talker.codec_head"),
    ("ultrabert", "head.decoder"),
)
OTHERS = (
    ("gemma3n", "model.language_model.layers.0.per_layer_input_gate"),
    ("gemma3n", "model.language_model.per_layer_model_projection"),
    ("glm_moe_dsa", "model.layers.3.self_attn.indexer.weights_proj"),
    ("lfm3", "model.layers.0.conv.in_proj"),
)
MOST_FAILED = (
    0.15  # of the model types: those whose own config makes no model, or not without values
)


def not_linear(model: Any) -> list[tuple[str, str]]:
    """(class, module) of what becomes four-bit and is no linear layer, or is the head."""
    from torch.nn import Linear

    recipe = build_recipe(Target("nvfp4"), model.config.to_dict())
    modules = dict(model.named_modules())
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    found = []
    for name, tensor in model.state_dict().items():
        module = modules.get(name.removesuffix(WEIGHT))
        if tensor.dim() != 2 or not name.endswith(WEIGHT) or module is None:
            continue
        if isinstance(module, Linear) and module is not head:
            continue
        if recipe.reason_to_keep(name.removesuffix(WEIGHT)) is None:
            found.append((type(module).__name__, name))
    return found


@pytest.mark.sweep(5)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tables_and_other_arithmetic_stay(model_type):
    assert not_linear(model_of(model_type)) == []


@pytest.mark.parametrize(("model_type", "module"), [*HEADS, *OTHERS])
def test_heads_and_what_is_kept_for_accuracy_stay(model_type, module):
    recipe = build_recipe(Target("nvfp4"), {"model_type": model_type})
    assert recipe.reason_to_keep(module) is not None


@pytest.mark.slow
def test_of_every_model_type_only_linear_layers_become_four_bit():
    from transformers import CONFIG_MAPPING

    built, failed, found = 0, [], {}
    for model_type in CONFIG_MAPPING:
        try:
            model = model_of(model_type)
        except LookupError:  # a part of others
            continue
        except Exception as error:  # of transformers, whose own configs make no model
            failed.append((model_type, error))
            continue
        built += 1
        if bad := not_linear(model):
            found[model_type] = bad
    assert found == {}
    assert len(failed) < MOST_FAILED * built
