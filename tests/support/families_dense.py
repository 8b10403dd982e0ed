"""Families without experts: every linear layer of the decoder becomes four-bit, unless its row says
why not.

Names and shapes are those that transformers 5.23 saves, which are the published ones: `published`
tells where they are not.
"""

from __future__ import annotations

from typing import Any

from family import Family, Tensors

# Of two sizes that a mistake could exchange none are equal: 64 in, 96 queries, 48 keys, 80 or 112
# in the middle.
SIZES: dict[str, Any] = {
    **{
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
    },
    **{
        "intermediate_size": 80,
        "vocab_size": 160,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
SIGLIP = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
}
ATTENTION = "model.layers.{0-1}.self_attn.(q_proj k_proj v_proj)"
OUTPUT = "model.layers.{0-1}.self_attn.o_proj"
MLP = ("model.layers.{0-1}.mlp.(gate_proj up_proj)", "model.layers.{0-1}.mlp.down_proj")
DECODER = (ATTENTION, OUTPUT, *MLP)


def _siglip_inside(tensors: Tensors) -> Tensors:
    """Gemma 3 was published when SigLIP's tower had one more module inside:
    vision_tower.vision_model.encoder...
    """
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
    }


DENSE = (
    Family("llama", "LlamaForCausalLM", SIZES, DECODER),
    Family("llama-tied", "LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}, DECODER),
    Family("mistral", "MistralForCausalLM", SIZES, DECODER),
    Family("qwen2", "Qwen2ForCausalLM", SIZES, DECODER),
    Family("qwen3", "Qwen3ForCausalLM", SIZES, DECODER),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        SIZES,
        # Published fused, so that one global scale is all they have.
        (
            "model.layers.{0-1}.self_attn.{qkv_proj,o_proj}",
            "model.layers.{0-1}.mlp.{gate_up_proj,down_proj}",
        ),
    ),
    Family("gemma2", "Gemma2ForCausalLM", {**SIZES, "tie_word_embeddings": True}, DECODER),
    Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**SIZES, "tie_word_embeddings": True},
            "vision_config": SIGLIP,
            **{
                "mm_tokens_per_image": 4,
                "image_token_index": 150,
                "boi_token_index": 151,
                "eoi_token_index": 152,
            },
        },
        tuple(f"language_model.{line}" for line in DECODER),
        published=_siglip_inside,
    ),
    Family("cohere", "CohereForCausalLM", {**SIZES, "tie_word_embeddings": True}, DECODER),
    Family("olmo2", "Olmo2ForCausalLM", SIZES, DECODER),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            **{
                "d_model": 64,
                "encoder_layers": 1,
                "decoder_layers": 2,
                "encoder_ffn_dim": 80,
                "decoder_ffn_dim": 112,
            },
            **{
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "num_mel_bins": 16,
                "vocab_size": 160,
            },
            **{"max_source_positions": 24, "max_target_positions": 32},
            **{
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                "decoder_start_token_id": 1,
            },
        },
        (
            "model.encoder.layers.0.self_attn.(q_proj k_proj v_proj)",
            "model.encoder.layers.0.{self_attn.out_proj,fc1,fc2}",
            "model.decoder.layers.{0-1}.{self_attn,encoder_attn}.(q_proj k_proj v_proj)",
            "model.decoder.layers.{0-1}.{self_attn.out_proj,encoder_attn.out_proj,fc1,fc2}",
        ),
    ),
)
