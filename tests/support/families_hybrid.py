"""Families whose layers are of several kinds: attention beside linear attention, state spaces or
convolutions.
"""

from __future__ import annotations

from families_dense import MLP, SIZES
from families_experts import EXPERTS, FOUR, LATENT, LINEAR, SHARED_EXPERT
from family import Family

QWEN_VISION = {
    **{"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 14},
    **{"out_hidden_size": 64, "num_position_embeddings": 16},
}
QWEN_TOKENS = {
    **{
        "image_token_id": 150,
        "video_token_id": 151,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    },
    "tie_word_embeddings": False,
}
GEMMA4_REST = {
    "vision_config": {
        **{
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        **{
            "intermediate_size": 48,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
    },
    "audio_config": None,
    **{
        "image_token_id": 150,
        "boi_token_id": 151,
        "eoi_token_id": 152,
        "audio_token_id": 153,
        "video_token_id": 154,
    },
}
# Of gated attention q_proj makes the gate too, and stays; so k_proj and v_proj stay with it.
GATED_OUTPUT = "model.layers.1.self_attn.o_proj"
QWEN_MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (192, 64),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 96),
}


HYBRID = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**SIZES, **FOUR, **LINEAR, "shared_expert_intermediate_size": 112},
        (GATED_OUTPUT, *EXPERTS, *SHARED_EXPERT),
        runs="restored",
        beside="mtp.",
        extra={
            **QWEN_MTP,
            **{
                f"mtp.layers.0.mlp.experts.{expert}.gate_proj.weight": (48, 64)
                for expert in range(4)
            },
        },
    ),
    Family(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {"text_config": {**SIZES, **LINEAR}, "vision_config": QWEN_VISION, **QWEN_TOKENS},
        tuple(line.replace("model.", "model.language_model.", 1) for line in MLP),
        beside="mtp.",
        extra={**QWEN_MTP, "mtp.layers.0.mlp.gate_proj.weight": (80, 64)},
    ),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            **{
                **SIZES,
                "num_hidden_layers": 4,
                "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            },
            **{
                "mamba_num_heads": 4,
                "mamba_head_dim": 24,
                "ssm_state_size": 16,
                "n_groups": 2,
                "expand": 2,
            },
            **{
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "n_group": 1,
                "topk_group": 1,
            },
            "moe_shared_expert_intermediate_size": 112,
        },
        (  # no gates
            "backbone.layers.1.mixer.experts.{0-3}.{up_proj,down_proj}",
            "backbone.layers.3.mixer.{up_proj,down_proj}",
        ),
        runs="restored",
        beside="mtp.",
        extra={
            "mtp.layers.0.eh_proj.weight": (64, 128),
            **{
                f"mtp.layers.1.mixer.experts.{expert}.up_proj.weight": (48, 64)
                for expert in range(4)
            },
        },
    ),
    Family(
        "lfm2",
        "Lfm2ForCausalLM",
        {**SIZES, "layer_types": ["conv", "full_attention"]},
        (
            "model.layers.1.self_attn.(q_proj k_proj v_proj)",
            "model.layers.1.self_attn.out_proj",
            "model.layers.{0-1}.feed_forward.(w1 w3)",
            "model.layers.{0-1}.feed_forward.w2",
        ),
    ),
    Family(
        "longcat_flash",
        "LongcatFlashForCausalLM",  # zero experts have no weights, and transformers 5.23 wants some
        {
            **{
                **LATENT,
                "num_layers": 2,
                "num_hidden_layers": 4,
                "ffn_hidden_size": 80,
                "expert_ffn_hidden_size": 48,
            },
            **{"moe_topk": 2, "zero_expert_num": 0, "num_nextn_predict_layers": 1},
        },
        (
            "model.layers.{0-1}.self_attn.{0-1}.(q_a_proj kv_a_proj_with_mqa)",
            "model.layers.{0-1}.self_attn.{0-1}.{q_b_proj,kv_b_proj,o_proj}",
            "model.layers.{0-1}.mlps.{0-1}.(gate_proj up_proj)",
            "model.layers.{0-1}.mlps.{0-1}.down_proj",
            *EXPERTS,
        ),
        runs="restored",
        beside="model.mtp.",
        extra={
            "model.mtp.layers.0.eh_proj.weight": (64, 128),
            "model.mtp.embed_tokens.weight": (160, 64),
        },
    ),
    Family(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{
                    **SIZES,
                    "num_hidden_layers": 4,
                    "global_head_dim": 32,
                    "sliding_window": 16,
                    "tie_word_embeddings": True,
                },
                **{
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_kv_shared_layers": 2,
                },
                **{
                    "use_double_wide_mlp": True,
                    "hidden_size_per_layer_input": 16,
                    "vocab_size_per_layer_input": 160,
                },
            },
            **GEMMA4_REST,
        },
        (
            # The two last layers use the keys and values of the two first.
            "model.language_model.layers.{0-1}.self_attn.(q_proj k_proj v_proj)",
            "model.language_model.layers.{2-3}.self_attn.q_proj",
            "model.language_model.layers.{0-3}.self_attn.o_proj",
            "model.language_model.layers.{0-3}.mlp.(gate_proj up_proj)",
            "model.language_model.layers.{0-3}.mlp.down_proj",
        ),
    ),
)
