"""Families in sizes that engines take: heads of 64, and matrices that their kernels divide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from family import Family, build

SIZES = {
    **{"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 640},
    **{"vocab_size": 512, "max_position_embeddings": 256, "moe_intermediate_size": 192},
    **{"shared_expert_intermediate_size": 384, "moe_shared_expert_intermediate_size": 384},
    **{"q_lora_rank": 96, "kv_lora_rank": 64, "v_head_dim": 64},
    **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 64},
    **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32},
}
LATENT = {"num_key_value_heads": 8}  # latent attention has keys for every head, and no cache scale
OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": {**LATENT, "index_head_dim": 128, "index_n_heads": 8, "qk_rope_head_dim": 64},
    "gpt_oss": {"intermediate_size": 192},
    "kimi_k2": LATENT,
    "granitemoehybrid": {
        **{"head_dim": 32, "intermediate_size": 192, "shared_intermediate_size": 384},
        **{"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32},
    },
    "gemma3": {"vision_config": {"vision_use_head": False}},
    "qwen3_5": {"vision_config": {"deepstack_visual_indexes": []}},
    "qwen3_5_moe": {"vision_config": {"deepstack_visual_indexes": []}},
    "lfm2": {"head_dim": 32, "tie_word_embeddings": True},
    "lfm2_moe": {"head_dim": 32, "tie_word_embeddings": True},
    "llama4": {"intermediate_size": 192, "intermediate_size_mlp": 640},
    "mixtral": {"intermediate_size": 192, "head_dim": 32},
    "qwen2": {"head_dim": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "qwen3_vl_moe": {
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0},
            "mrope_section": [12, 10, 10],
        }
    },
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
}
# What published config.json files say and transformers does not write.
ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**ROUTER, "rope_parameters": YARN},
    "kimi_k2": {**ROUTER, "rope_parameters": YARN},
    "glm_moe_dsa": {**ROUTER, "rope_parameters": YARN},  # SGLang has no other on a CPU
    "lfm2": {"conv_dim": 256, "conv_dim_out": 256, "block_dim": 256, "block_ff_dim": 640},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "mamba_n_groups": 2,
    },
    "qwen3_5": {"full_attention_interval": 2},
    "qwen3_5_moe": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
JUDGED = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next", "qwen3_5"),
    *("qwen3_vl_moe", "nemotron_h", "gpt_oss", "gemma4-moe", "llama4", "kimi_k2", "qwen3_5_moe"),
    *("lfm2", "lfm2_moe", "granitemoehybrid"),
)


def enlarged(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's configuration in sizes that engines take; vision towers stay small."""
    sizes = {**SIZES, **own}
    made = {name: sizes.get(name, value) for name, value in config.items()}
    if "text_config" in config:
        made["text_config"] = enlarged(config["text_config"], own)
        made["vision_config"] = {**config["vision_config"], **own.get("vision_config", {})}
        if "out_hidden_size" in made["vision_config"]:
            made["vision_config"]["out_hidden_size"] = SIZES["hidden_size"]
    return made


def source(family: Family, folder: Path) -> Path:
    """Make the family's checkpoint, without the layers beside the model."""
    own = OWN_SIZES.get(family.name, {})
    made = folder.with_suffix(".part")
    build(replace(family, config=enlarged(family.config, own), extra=None), made)
    file = made / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config).update(PUBLISHED.get(family.name, {}))
    file.write_text(json.dumps(config, indent=1))
    return made.rename(folder)
