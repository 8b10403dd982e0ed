"""Families of text of the last year, as transformers 5.23 saves them under the published names:
what is unlike the older ones is their gates, indexers and recurrences.
"""

from __future__ import annotations

from typing import Any

from families_dense import ATTENTION, OUTPUT, SIZES
from family import Family, Stack

MIXTURE: dict[str, Any] = {
    **SIZES,
    **{"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "mlp_layer_types": ["dense", "sparse"],
}
LATENT = {
    **MIXTURE,
    **{"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "n_routed_experts": 4},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 8},
    **{"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8},
}
DENSE = ("model.layers.0.mlp.(gate_proj up_proj)", "model.layers.0.mlp.down_proj")
ROUTED = (
    "model.layers.1.mlp.experts.{0-3}.(gate_proj up_proj)",
    "model.layers.1.mlp.experts.{0-3}.down_proj",
)
LOW_RANK = "model.layers.{0-1}.self_attn.(q_a_proj kv_a_proj_with_mqa)"
NEWEST = (
    Family(
        "laguna",
        "LagunaForCausalLM",
        {**MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 32},
        (
            ATTENTION,
            OUTPUT,
            *DENSE,
            *ROUTED,
            "model.layers.1.mlp.shared_expert.(gate_proj up_proj)",
            "model.layers.1.mlp.shared_expert.down_proj",
        ),
        runs="restored",
    ),
    Family(
        "axk2",
        "AXK2ForCausalLM",
        {**LATENT, "gated_norm_rank": 32},
        (
            LOW_RANK,
            "model.layers.{0-1}.self_attn.{kv_b_proj,o_proj}",
            *DENSE,
            *ROUTED,
            "model.layers.1.mlp.shared_experts.(gate_proj up_proj)",
            "model.layers.1.mlp.shared_experts.down_proj",
        ),
        runs="restored",
    ),
    Family(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        {
            **LATENT,
            **{"num_local_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 24},
            "layer_types": ["linear_attention", "full_attention"],
        },
        (
            "model.layers.0.attention.(q_proj k_proj v_proj)",
            "model.layers.1.attention.{q_proj,kv_a_proj_with_mqa,kv_b_proj}",
            "model.layers.{0-1}.attention.dense",
            *DENSE,
            *ROUTED,
            "model.layers.1.mlp.shared_experts.(gate_proj up_proj)",
            "model.layers.1.mlp.shared_experts.down_proj",
        ),
        runs="restored",
        extra={
            f"model.layers.2.mlp.experts.{expert}.up_proj.weight": (48, 64) for expert in range(4)
        },
        beside="model.layers.2.",
    ),
    Family(
        "hy_v4",
        "HYV4ForCausalLM",
        LATENT,
        (
            LOW_RANK,
            "model.layers.{0-1}.self_attn.{q_b_proj,kv_b_proj,o_proj}",
            "model.layers.0.mlp.(linear_gate up_proj)",
            "model.layers.0.mlp.down_proj",
            *ROUTED,
            "model.layers.1.mlp.shared_experts.(linear_gate up_proj)",
            "model.layers.1.mlp.shared_experts.down_proj",
        ),
        (
            Stack("model.layers.1.mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
            Stack("model.layers.1.mlp.experts.down_proj", ("down_proj",)),
        ),
        runs="restored",
    ),
    Family(
        "zaya",
        "ZayaForCausalLM",
        {**MIXTURE, "num_experts": 4, "router_hidden_size": 32, "num_experts_per_tok": 1},
        (
            "model.layers.{0-1}.self_attn.qkv_proj.(q_proj k_proj)",
            "model.layers.{0-1}.self_attn.qkv_proj.{v_proj_current,v_proj_delayed}",
            OUTPUT,
            "model.layers.{0-1}.mlp.experts.{0-3}.(gate_proj up_proj)",
            "model.layers.{0-1}.mlp.experts.{0-3}.down_proj",
        ),
        (
            Stack("model.layers.{0-1}.mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
            Stack("model.layers.{0-1}.mlp.experts.down_proj", ("down_proj",)),
        ),
        runs="restored",
    ),
)
