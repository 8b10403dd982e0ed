"""Real architectures: what is quantized is exactly what the engine's own matching takes for
quantized, tied heads included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from meta_models import model_of
from tiny_models import fp4convert, offline

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.linears import linears_of
from fp4convert.conversion.artifact_job import ignored_by_engines
from fp4convert.numerics.formats import FP4_FORMATS
from fp4convert.planning.plan import Plan
from fp4convert.planning.quantize_plan import plan_quantize
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.safetensors import Header, SafetensorsFrame, TensorRef
from fp4convert.storage.source import Checkpoint

pytestmark = pytest.mark.engine
H = 64
BASE = {
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
DENSE = {**BASE, "intermediate_size": 128}
DECODER = {**DENSE, "num_key_value_heads": 2}
GPT = {"n_embd": H, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 64}
SEQ2SEQ = {
    **{
        "d_model": H,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    **{
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 320,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
}
VISION = {
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 16,
}
WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAVA = {
    "text_config": {**DECODER, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "image_token_id": 300,
}
QWEN_VL = {
    "text_config": {**DECODER, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision_config": {
        "embed_dim": H,
        "depth": 2,
        "num_heads": 4,
        "hidden_size": H,
        "patch_size": 14,
    },
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": DENSE,
    "BertForSequenceClassification": DENSE,
    "DistilBertForMaskedLM": {
        "dim": H,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 128,
        "vocab_size": 320,
    },
    "AlbertForMaskedLM": {**DENSE, "embedding_size": 32},
    "XLMRobertaForMaskedLM": {**DENSE, "max_position_embeddings": 80},
    "DebertaV2ForMaskedLM": DENSE,
    "ModernBertForMaskedLM": {
        **DENSE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "ElectraForMaskedLM": {**DENSE, "embedding_size": H},
    "FNetForMaskedLM": {"hidden_size": H, "num_hidden_layers": 1, "intermediate_size": 128},
    "BartForConditionalGeneration": SEQ2SEQ,
    "MBartForConditionalGeneration": SEQ2SEQ,
    "M2M100ForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ,
    "PegasusForConditionalGeneration": SEQ2SEQ,
    "LEDForConditionalGeneration": SEQ2SEQ,
    "T5ForConditionalGeneration": {
        "d_model": H,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 320,
    },
    "WhisperForConditionalGeneration": WHISPER,
    "GPT2LMHeadModel": GPT,
    "OpenAIGPTLMHeadModel": GPT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 8},
    "CodeGenForCausalLM": {**GPT, "rotary_dim": 8},
    "GPTBigCodeForCausalLM": GPT,
    "GPTNeoXForCausalLM": DENSE,
    "OPTForCausalLM": {
        **BASE,
        "ffn_dim": 128,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "BloomForCausalLM": {"hidden_size": H, "n_layer": 2, "n_head": 4, "vocab_size": 320},
    "FalconForCausalLM": {
        "hidden_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
    },
    "MptForCausalLM": {
        "d_model": H,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 64,
        "vocab_size": 320,
    },
    "CTRLLMHeadModel": {"n_embd": H, "dff": 128, "n_layer": 1, "n_head": 4, "vocab_size": 320},
    "XLNetLMHeadModel": {
        "d_model": H,
        "n_layer": 1,
        "n_head": 4,
        "d_inner": 128,
        "vocab_size": 320,
    },
    "XLMWithLMHeadModel": {"emb_dim": H, "n_layers": 1, "n_heads": 4, "vocab_size": 320},
    "BioGptForCausalLM": DENSE,
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "Qwen2ForCausalLM": {**DECODER, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {**DECODER, "head_dim": 16},
    "PhiForCausalLM": DECODER,
    "Phi3ForCausalLM": {**DECODER, "pad_token_id": 0},
    "GemmaForCausalLM": {**DECODER, "head_dim": 16},
    "CohereForCausalLM": DECODER,
    "Olmo2ForCausalLM": DECODER,
    "StableLmForCausalLM": DECODER,
    "NemotronForCausalLM": DECODER,
    "MambaForCausalLM": {
        "hidden_size": H,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "state_size": 16,
        "time_step_rank": 16,
    },
    "ViTForImageClassification": VISION,
    "CLIPModel": {"text_config": DENSE, "vision_config": VISION, "projection_dim": 32},
    "SiglipModel": {"text_config": {**DENSE, "projection_size": H}, "vision_config": VISION},
    "LlavaForConditionalGeneration": LLAVA,
    "Qwen2VLForConditionalGeneration": QWEN_VL,
}
LOADED = [
    *(
        "BartForConditionalGeneration",
        "BertForMaskedLM",
        "DistilBertForMaskedLM",
        "WhisperForConditionalGeneration",
    ),
    *(
        "LlavaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Phi3ForCausalLM",
    ),
]


# Whose modules transformers calls otherwise than their checkpoints: towers, heads, and what is kept
# for accuracy; of the last two a pattern fits what a quantized module is called.
RENAMED = (
    *("axk2", "bailing_hybrid", "cosmos3_omni", "deepseek_ocr2", "deepseek_v4", "dots3_note"),
    *("ernie4_5_vl_moe", "granite_speech", "granite_speech_plus", "hunyuan_vl", "hy_v4"),
    *("hyperclovax_vision_v2", "inkling2", "inkling_mm_model", "kimi_linear", "lfm3"),
    *("mistral_large4", "nemo_speechlm", "nemotron_h_omni", "paddleocr_vl", "phimoe"),
    *("qianfan_ocr", "step3p7", "unlimited_ocr", "cohere_asr", "pi0"),
)
GRANITE_SPEECH = {
    "text_config": {**DECODER, "model_type": "granite"},
    "encoder_config": {
        **{"hidden_dim": H, "num_layers": 2, "num_heads": 4, "input_dim": 32, "output_dim": H},
        "dim_head": 16,
    },
    "projector_config": {
        **{"model_type": "blip_2_qformer", "hidden_size": H, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "intermediate_size": 128, "encoder_hidden_size": H},
    },
    "has_lora_adapter": False,
    "audio_token_index": 300,
}
TOWERS: dict[str, dict[str, Any]] = {
    "GraniteSpeechForConditionalGeneration": GRANITE_SPEECH,
    "GraniteSpeechPlusForConditionalGeneration": GRANITE_SPEECH,
    "HunYuanVLForConditionalGeneration": {
        "text_config": {**DECODER, "head_dim": 16},
        "vision_config": {**VISION, "out_hidden_size": H},
    },
    "Cosmos3OmniForConditionalGeneration": {
        "text_config": {**DECODER, "head_dim": 16},
        "vision_config": {
            **{"depth": 2, "hidden_size": H, "intermediate_size": 128, "num_heads": 4},
            **{"out_hidden_size": H, "deepstack_visual_indexes": [0]},
        },
    },
}


def build(name: str) -> Any:
    """A tiny random model of that class."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**ARCHITECTURES, **TOWERS}[name]))


def plan_of(model: Any) -> Plan:
    """The plan for the tensors that the model would save; tied ones are saved once, under their
    first name.
    """
    seen: set[int] = set()
    shapes = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tuple(tensor.shape)
    return plan_for(shapes, model.config.to_dict())


def plan_for(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]) -> Plan:
    """The plan for a checkpoint of those tensors."""
    refs = [
        TensorRef(name, "BF16", shape, "model.safetensors", 0) for name, shape in shapes.items()
    ]
    header = Header("model.safetensors", 0, tuple(refs), SafetensorsFrame({}))
    checkpoint = Checkpoint(None, None, config, (header,), (), (), (), {"model.safetensors": ""})
    recipe = build_recipe(Target("nvfp4", "compressed-tensors"), config)
    clues = Clues(config, {}, {ref.name: ref for ref in refs})
    return plan_quantize(checkpoint, recipe, linears_of(clues, recipe))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_takes_for_quantized_what_is_quantized(name: str) -> None:
    import torch
    from compressed_tensors.utils import match_named_modules

    with offline(), torch.device("meta"):
        model = build(name)
    plan = plan_of(model)
    modules = dict(model.named_modules())
    strays = {
        module: type(modules[module]).__name__
        for module in plan.quantized
        if not isinstance(modules[module], torch.nn.Linear)
    }
    assert not strays, "only linear layers can be quantized"
    taken = {module for module, _ in match_named_modules(model, ["Linear"], ignored(plan, {}))}
    assert taken == set(plan.quantized)


def ignored(plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """The list of a record of the default dialect."""
    group = Group(Form(FP4_FORMATS["nvfp4"]), tuple(plan.quantized))
    record = dialect_named("compressed-tensors").records([group], ignored_by_engines(plan, config))
    listed: list[str] = record["config.json"]["quantization_config"]["ignore"]  # type: ignore[index, call-overload]
    return listed


@pytest.mark.sweep(8)
@pytest.mark.parametrize("model_type", RENAMED)
def test_the_engine_takes_for_quantized_what_is_quantized_by_its_own_names(model_type: str) -> None:
    """Of checkpoints as transformers saves them; it says itself what it calls their modules."""
    import torch
    from compressed_tensors.utils import match_named_modules
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    model = model_of(model_type)
    state = model.state_dict()
    saved = revert_weight_conversion(model, state)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    config = model.config.to_dict()
    plan = plan_for(shapes, config)
    modules, mapping = dict(model.named_modules()), get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix
    owners = {
        rename_source_key(f"{module}.weight", renamings, converters, prefix, state)[0]
        for module in plan.quantized
    }
    expected = {owner.removesuffix(".weight") for owner in owners}
    listed = ignored(plan, config)
    taken = {module for module, _ in match_named_modules(model, ["Linear"], listed)}
    assert taken == {each for each in expected if isinstance(modules.get(each), torch.nn.Linear)}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("options", [("nvfp4",), ("mxfp4", "--dialect", "quark")], ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_that_is_called_otherwise_is_loaded_as_it_is(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    import torch
    import transformers

    with offline():
        torch.manual_seed(0)
        model = build(name).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "source")
        artifact = tmp_path / "artifact"
        fp4convert("quantize", tmp_path / "source", "--format", *options, "-o", artifact, "-q")
        kind = getattr(transformers, name)
        loaded, told = kind.from_pretrained(
            artifact, dtype=torch.bfloat16, output_loading_info=True
        )
    assert {key: sorted(names) for key, names in told.items() if names} == {}
    expected, got = model.state_dict(), loaded.state_dict()
    text = tuple(each for each in expected if "language_model.layers" in each or "head" in each)
    towers = [each for each in expected if each not in text]
    assert len(towers) > 20
    assert all(torch.equal(expected[each], got[each]) for each in towers)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LOADED)
def test_a_saved_model_is_loaded_whole(name: str, tmp_path: Path) -> None:
    """Nothing missing, nothing left over, whatever the engine makes of the checkpoint's names."""
    import torch
    import transformers

    with offline():
        torch.manual_seed(0)
        model = build(name).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "source")
        fp4convert(
            "quantize", tmp_path / "source", "--format", "nvfp4", "-o", tmp_path / "artifact", "-q"
        )
        kind = getattr(transformers, name)
        _, told = kind.from_pretrained(
            tmp_path / "artifact", dtype=torch.bfloat16, output_loading_info=True
        )
    assert {key: sorted(names) for key, names in told.items() if names} == {}
