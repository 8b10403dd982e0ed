"""Families with experts, one by one under names of their own: how they are published and how
transformers saves them.
"""

from __future__ import annotations

from typing import Any

from families_dense import ATTENTION, OUTPUT, SIZES
from family import Family, Tensors

FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
}
LATENT: dict[str, Any] = {
    **{
        **SIZES,
        **ROUTED,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    **{
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
    },
}
LINEAR = {
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
}
EXPERTS = (
    "model.layers.{0-1}.mlp.experts.{0-3}.(gate_proj up_proj)",
    "model.layers.{0-1}.mlp.experts.{0-3}.down_proj",
)
SHARED_EXPERT = (
    "model.layers.{0-1}.mlp.shared_expert.(gate_proj up_proj)",
    "model.layers.{0-1}.mlp.shared_expert.down_proj",
)
MIXTRAL = (
    "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.(w1 w3)",
    "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.w2",
)
DENSE_FIRST = "model.layers.0.mlp.(gate_proj up_proj)", "model.layers.0.mlp.down_proj"
EXPERTS_SECOND = (
    "model.layers.1.mlp.experts.{0-3}.(gate_proj up_proj)",
    "model.layers.1.mlp.experts.{0-3}.down_proj",
)
SHARED_SECOND = (
    "model.layers.1.mlp.shared_experts.(gate_proj up_proj)",
    "model.layers.1.mlp.shared_experts.down_proj",
)
ATTENTION_TENSORS = {"q_proj": (96, 64), "k_proj": (48, 64), "v_proj": (48, 64), "o_proj": (64, 96)}
LATENT_TENSORS = {
    **{
        "q_a_proj": (48, 64),
        "q_b_proj": (96, 48),
        "kv_a_proj_with_mqa": (40, 64),
        "kv_b_proj": (192, 32),
        "o_proj": (64, 128),
    },
    **{"q_a_layernorm": (48,), "kv_a_layernorm": (32,)},
}


def _mtp_layer(prefix: str, attention: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A layer for multi-token prediction as DeepSeek V3 and GLM-4.5 publish it, numbered after the
    last one of the model.
    """
    return {
        **{
            f"{prefix}.{name}.weight": (64,)
            for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        },
        **{f"{prefix}.{name}.weight": (160, 64) for name in ("embed_tokens", "shared_head.head")},
        f"{prefix}.eh_proj.weight": (64, 128),
        **{f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()},
        f"{prefix}.mlp.gate.weight": (4, 64),
        **{
            f"{prefix}.mlp.{where}.{name}.weight": (48, 64)
            for where in _EXPERTS
            for name in ("gate_proj", "up_proj")
        },
        **{f"{prefix}.mlp.{where}.down_proj.weight": (64, 48) for where in _EXPERTS},
    }


_EXPERTS = ("shared_experts", "experts.0", "experts.1", "experts.2", "experts.3")


def unprefixed(tensors: Tensors) -> Tensors:
    """DeepSeek V4 was published under names without `model.`; transformers adds it when it reads,
    and leaves it when it saves.
    """
    names = {
        "model.embed_tokens.weight": "embed.weight",
        **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in HC_PARTS},
    }
    return {
        names.get(name, name.removeprefix("model.")): tensor for name, tensor in tensors.items()
    }


HC_PARTS = ("fn", "base", "scale")
DEEPSEEK_V4 = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    **{
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 96,
    },
    **{
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 32,
    },
    **{
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "sliding_window": 16,
        "num_hash_layers": 1,
    },
    **{"qk_rope_head_dim": 16, "num_nextn_predict_layers": 1},
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
}
V4_EXPERTS = ("layers.{0-1}.ffn.experts.{0-3}.(w1 w3)", "layers.{0-1}.ffn.experts.{0-3}.w2")

ONE_BY_ONE = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
        (ATTENTION, OUTPUT, *MIXTRAL),
        runs="restored",
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**SIZES, **FOUR, "shared_expert_intermediate_size": 112},
        (ATTENTION, OUTPUT, *EXPERTS, *SHARED_EXPERT),
        runs="restored",
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**SIZES, **FOUR},
        (ATTENTION, OUTPUT, *EXPERTS),
        runs="restored",
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        {
            **SIZES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "head_dim": 16,
            "num_key_value_heads": 2,
        },
        (ATTENTION, OUTPUT, *EXPERTS),
        runs="restored",
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**LATENT, "topk_method": "greedy"},
        (*DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND),
        runs="restored",
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**LATENT, "num_nextn_predict_layers": 1},
        (*DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND),
        runs="restored",
        extra=_mtp_layer("model.layers.2", LATENT_TENSORS),
        beside="model.layers.2.",
    ),
    Family(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        DEEPSEEK_V4,
        V4_EXPERTS,
        published=unprefixed,
        runs="restored",
        extra={"mtp.0.e_proj.weight": (128, 128)},
        beside="mtp.",
    ),
    Family(
        "kimi_k2",
        "DeepseekV3ForCausalLM",
        LATENT,
        EXPERTS_SECOND,
        model_type="kimi_k2",
        runs="restored",
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            **SIZES,
            **ROUTED,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
        },
        EXPERTS_SECOND,
        runs="restored",
        extra=_mtp_layer("model.layers.2", ATTENTION_TENSORS),
        beside="model.layers.2.",
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "num_nextn_predict_layers": 1},
        (*EXPERTS_SECOND, *SHARED_SECOND),
        runs="restored",
        extra=_mtp_layer("model.layers.2", LATENT_TENSORS),
        beside="model.layers.2.",
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
            **{"index_topk": 8, "index_n_heads": 4, "index_head_dim": 24},
        },
        tuple(line.replace(".1.", ".3.", 1) for line in (*EXPERTS_SECOND, *SHARED_SECOND)),
        runs="restored",
        extra=_mtp_layer("model.layers.4", LATENT_TENSORS),
        beside="model.layers.4.",
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
        MIXTRAL,
        runs="restored",
    ),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        {
            **SIZES,
            **FOUR,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (*DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND),
        runs="restored",
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **SIZES,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
        (ATTENTION, OUTPUT, *DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND),
        runs="restored",
        # The names of ERNIE-4.5-21B-A3B's one block for multi-token prediction.
        beside="model.mtp_",
        extra={
            "model.mtp_block.0.self_attn.q_proj.weight": (96, 64),
            "model.mtp_block.0.mlp.gate_proj.weight": (80, 64),
            "model.mtp_linear_proj.0.weight": (64, 128),
            "model.mtp_emb_norm.0.weight": (64,),
        },
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {**SIZES, "num_experts": 4, "moe_topk": 2, "intermediate_size": 48},
        (
            ATTENTION,
            OUTPUT,
            *EXPERTS,
            "model.layers.{0-1}.mlp.shared_mlp.(gate_proj up_proj)",
            "model.layers.{0-1}.mlp.shared_mlp.down_proj",
        ),
        runs="restored",
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {**SIZES, **FOUR, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
        (
            "model.layers.1.self_attn.(q_proj k_proj v_proj)",
            "model.layers.1.self_attn.out_proj",
            "model.layers.0.feed_forward.(w1 w3)",
            "model.layers.0.feed_forward.w2",
            "model.layers.1.feed_forward.experts.{0-3}.(w1 w3)",
            "model.layers.1.feed_forward.experts.{0-3}.w2",
        ),
        runs="restored",
    ),
)
