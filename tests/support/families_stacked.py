"""Families that are published with one tensor for all experts of a layer, in every orientation that
there is.
"""

from __future__ import annotations

from typing import Any

from families_dense import SIZES
from families_experts import FOUR, LINEAR
from families_hybrid import GEMMA4_REST, QWEN_MTP, QWEN_TOKENS, QWEN_VISION
from family import Family, Stack, Tensors

PAIR = ("gate_proj", "up_proj")
LAYERS = "model.language_model.layers.{0-1}"
TEXT_ATTENTION = (f"{LAYERS}.self_attn.(q_proj k_proj v_proj)", f"{LAYERS}.self_attn.o_proj")
TEXT_EXPERTS = (
    f"{LAYERS}.mlp.experts.{{0-3}}.(gate_proj up_proj)",
    f"{LAYERS}.mlp.experts.{{0-3}}.down_proj",
)
DBRX = "transformer.blocks.{0-1}.ffn.experts.mlp"
LLAMA4 = "language_model.model.layers"
QWEN_STACKS = (
    Stack(f"{LAYERS}.mlp.experts.gate_up_proj", PAIR),
    Stack(f"{LAYERS}.mlp.experts.down_proj", ("down_proj",)),
)
QWEN_STACKS_TRANSPOSED = (
    Stack(f"{LAYERS}.mlp.experts.gate_up_proj", PAIR, is_transposed=True),
    Stack(f"{LAYERS}.mlp.experts.down_proj", ("down_proj",), is_transposed=True),
)


def _stacked(tensors: Tensors) -> Tensors:
    """Qwen3.5's experts as they are published: one stack with gates before ups, one of downs;
    transformers saves single ones.
    """
    import torch

    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, experts, tail = name.partition(".mlp.experts.")
        if not experts:
            result[name] = tensor
        elif tail == "0.gate_proj.weight":
            every = [
                [tensors[f"{head}{experts}{e}.{member}.weight"] for member in (*PAIR, "down_proj")]
                for e in range(4)
            ]
            result[f"{head}{experts}gate_up_proj"] = torch.stack(
                [torch.cat([gate, up]) for gate, up, _ in every]
            )
            result[f"{head}{experts}down_proj"] = torch.stack([down for _, _, down in every])
    return result


def _transposed(tensors: Tensors) -> Tensors:
    """Qwen3-VL's experts as they are published, (experts, in, out), which transformers 4.57 held
    them in; 5 turns them round.
    """
    return {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }


QWEN3_5_MOE = {
    "text_config": {**SIZES, **FOUR, **LINEAR, "shared_expert_intermediate_size": 112},
    "vision_config": QWEN_VISION,
    **QWEN_TOKENS,
}
QWEN3_VL_MOE = {
    "text_config": {
        **{**SIZES, **FOUR},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 4, 4],
        },
    },
    "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    **QWEN_TOKENS,
}
STACKED = (
    Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        QWEN3_5_MOE,
        TEXT_EXPERTS,
        QWEN_STACKS,
        published=_stacked,
        runs="restored",
        beside="mtp.",
        extra={
            **QWEN_MTP,
            "mtp.layers.0.mlp.experts.gate_up_proj": (4, 96, 64),
            "mtp.layers.0.mlp.experts.down_proj": (4, 64, 48),
        },
    ),
    Family(
        "qwen3_5_moe-single",
        "Qwen3_5MoeForConditionalGeneration",
        QWEN3_5_MOE,
        TEXT_EXPERTS,
        runs="restored",
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        QWEN3_VL_MOE,
        (*TEXT_ATTENTION, *TEXT_EXPERTS),
        QWEN_STACKS_TRANSPOSED,
        published=_transposed,
        runs="restored",
    ),
    Family(  # as transformers 5 saves it
        "qwen3_vl_moe-saved",
        "Qwen3VLMoeForConditionalGeneration",
        QWEN3_VL_MOE,
        (*TEXT_ATTENTION, *TEXT_EXPERTS),
        QWEN_STACKS,
        runs="restored",
    ),
    Family(
        "llama4",
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **{
                    **SIZES,
                    "intermediate_size": 48,
                    "intermediate_size_mlp": 80,
                    "num_local_experts": 4,
                },
                **{
                    "interleave_moe_layer_step": 2,
                    "layer_types": ["chunked_attention", "full_attention"],
                },
                "attention_chunk_size": 32,
            },
            "vision_config": {
                **{
                    "hidden_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "intermediate_size": 128,
                },
                **{"image_size": 28, "patch_size": 14},
                **{"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
            },
            **{"image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152},
        },
        (
            f"{LLAMA4}.0.feed_forward.(gate_proj up_proj)",
            f"{LLAMA4}.0.feed_forward.down_proj",
            f"{LLAMA4}.1.feed_forward.shared_expert.(gate_proj up_proj)",
            f"{LLAMA4}.1.feed_forward.shared_expert.down_proj",
            f"{LLAMA4}.1.feed_forward.experts.{{0-3}}.(gate_proj up_proj)",
            f"{LLAMA4}.1.feed_forward.experts.{{0-3}}.down_proj",
        ),
        (
            Stack(f"{LLAMA4}.1.feed_forward.experts.gate_up_proj", PAIR, is_transposed=True),
            Stack(f"{LLAMA4}.1.feed_forward.experts.down_proj", ("down_proj",), is_transposed=True),
        ),
        runs="restored",
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **{
                **SIZES,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 48,
                "sliding_window": 16,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (
            "model.layers.{0-1}.mlp.experts.{0-3}.(gate_proj up_proj)",
            "model.layers.{0-1}.mlp.experts.{0-3}.down_proj",
        ),
        (
            Stack(
                "model.layers.{0-1}.mlp.experts.gate_up_proj",
                PAIR,
                is_transposed=True,
                is_interleaved=True,
            ),
            Stack("model.layers.{0-1}.mlp.experts.down_proj", ("down_proj",), is_transposed=True),
        ),
        runs="restored",
    ),
    Family(
        "gemma4-moe",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{
                    **SIZES,
                    "global_head_dim": 32,
                    "sliding_window": 16,
                    "tie_word_embeddings": True,
                },
                **{
                    "layer_types": ["sliding_attention", "full_attention"],
                    "hidden_size_per_layer_input": 0,
                },
                **{
                    "enable_moe_block": True,
                    "num_experts": 4,
                    "top_k_experts": 2,
                    "moe_intermediate_size": 48,
                },
                **{"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            },
            **GEMMA4_REST,
        },
        (
            f"{LAYERS}.self_attn.o_proj",
            "model.language_model.layers.0.self_attn.(q_proj k_proj v_proj)",
            "model.language_model.layers.1.self_attn.(q_proj k_proj)",  # its keys are its values
            f"{LAYERS}.mlp.(gate_proj up_proj)",
            f"{LAYERS}.mlp.down_proj",
            f"{LAYERS}.experts.{{0-3}}.(gate_proj up_proj)",
            f"{LAYERS}.experts.{{0-3}}.down_proj",
        ),
        (
            Stack(f"{LAYERS}.experts.gate_up_proj", PAIR),
            Stack(f"{LAYERS}.experts.down_proj", ("down_proj",)),
        ),
        runs="restored",
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {
            **{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
            **{
                "shared_intermediate_size": 112,
                "layer_types": ["mamba", "attention"],
                "mamba_n_heads": 4,
            },
            **{"mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2},
        },
        (
            "model.layers.0.mamba.{in_proj,out_proj}",
            "model.layers.1.self_attn.(q_proj k_proj v_proj)",
            "model.layers.1.self_attn.o_proj",
            "model.layers.{0-1}.shared_mlp.{input_linear,output_linear}",
            "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.(gate_proj up_proj)",
            "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.down_proj",
        ),
        (
            Stack(
                "model.layers.{0-1}.block_sparse_moe.input_linear.weight",
                PAIR,
                named="{parent}.experts.{expert}.{member}",
            ),
            Stack(
                "model.layers.{0-1}.block_sparse_moe.output_linear.weight",
                ("down_proj",),
                named="{parent}.experts.{expert}.{member}",
            ),
        ),
        runs="restored",
    ),
    Family(
        "dbrx",
        "DbrxForCausalLM",
        {
            **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 160},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
            **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        },
        (
            "transformer.blocks.{0-1}.norm_attn_norm.attn.{Wqkv,out_proj}",
            f"{DBRX}.{{0-3}}.(w1 v1)",
            f"{DBRX}.{{0-3}}.w2",
        ),
        (
            Stack(f"{DBRX}.w1", ("w1",), experts=4),
            Stack(f"{DBRX}.v1", ("v1",), experts=4),
            Stack(f"{DBRX}.w2", ("w2",), is_transposed=True, experts=4),
        ),
        runs="restored",
    ),
)
