"""Real architectures: what is quantized is exactly what the engine's own matching takes for
quantized, tied heads included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import fp4convert, offline

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.linears import linears_of
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


def build(name: str) -> Any:
    """A tiny random model of that class."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**ARCHITECTURES[name]))


def plan_of(model: Any) -> Plan:
    """The plan for the tensors that the model would save; tied ones are saved once, under their
    first name.
    """
    seen: set[int] = set()
    refs = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            refs.append(TensorRef(name, "BF16", tuple(tensor.shape), "model.safetensors", 0))
    header = Header("model.safetensors", 0, tuple(refs), SafetensorsFrame({}))
    config = model.config.to_dict()
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
    record = dialect_named("compressed-tensors").records(
        [Group(Form(FP4_FORMATS["nvfp4"]), tuple(plan.quantized))], plan.ignored
    )["config.json"]
    taken = {
        module
        for module, _ in match_named_modules(
            model, ["Linear"], record["quantization_config"]["ignore"]
        )
    }
    assert taken == set(plan.quantized)


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
