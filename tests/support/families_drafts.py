"""Heads that draft tokens for another model: every linear layer of their decoder becomes four-bit,
and what they share with the model, or map to its words, stays.

Names and shapes are those of SafeAILab/EAGLE's cnets.py (EAGLE-1 and 2, and EAGLE-3's midlayer), of
ModelOpt 0.47's export/plugins/hf_spec_export.py (layers.0) and of speculators' Eagle3DraftModel,
as vllm/model_executor/models/llama_eagle.py and llama_eagle3.py read them.
"""

from __future__ import annotations

from typing import Any

from families_dense import SIZES
from family import Family

HIDDEN, DRAFTED = SIZES["hidden_size"], 96
CONFIG: dict[str, Any] = {**SIZES, "model_type": "llama", "num_hidden_layers": 1}
EAGLE3 = {**CONFIG, "draft_vocab_size": DRAFTED}
LINES = (
    "{layer}.self_attn.(q_proj k_proj v_proj)",
    "{layer}.self_attn.o_proj",
    "{layer}.mlp.(gate_proj up_proj)",
    "{layer}.mlp.down_proj",
)


def _quantized(layer: str) -> tuple[str, ...]:
    return tuple(line.replace("{layer}", layer) for line in LINES)


def _layer(name: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer whose attention reads so many columns."""
    inner, queries = SIZES["intermediate_size"], SIZES["num_attention_heads"] * SIZES["head_dim"]
    keys = SIZES["num_key_value_heads"] * SIZES["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        **{"self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs)},
        **{"self_attn.v_proj": (keys, inputs), "self_attn.o_proj": (HIDDEN, queries)},
        **{"mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN)},
        **{"mlp.down_proj": (HIDDEN, inner), "post_attention_layernorm": (HIDDEN,)},
    }
    if inputs > HIDDEN:
        shapes |= {"input_layernorm": (HIDDEN,), "hidden_norm": (HIDDEN,)}
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


EMBEDDING = {"embed_tokens.weight": (SIZES["vocab_size"], HIDDEN)}
OF_EAGLE3 = {
    **{"d2t": (DRAFTED,), "t2d": (SIZES["vocab_size"],)},
    **{"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,)},
    "lm_head.weight": (DRAFTED, HIDDEN),
}
DRAFTS = (
    Family(
        "eagle1",
        "",
        {**CONFIG, "architectures": ["LlamaForCausalLM"]},
        _quantized("layers.0"),
        extra={
            **EMBEDDING,
            **{"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)},
            **_layer("layers.0", HIDDEN),
        },
    ),
    Family(
        "eagle3",
        "",
        {**EAGLE3, "architectures": ["LlamaForCausalLMEagle3"]},
        _quantized("midlayer"),
        extra={**OF_EAGLE3, **_layer("midlayer", 2 * HIDDEN)},
    ),
    Family(
        "eagle3-speculators",
        "",
        {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": DRAFTED,
            "norm_before_residual": True,
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "Tiny/Model", "architectures": ["LlamaForCausalLM"]},
            },
            "tie_word_embeddings": False,
            "transformer_layer_config": CONFIG,
        },
        _quantized("layers.0"),
        extra={**EMBEDDING, **OF_EAGLE3, **_layer("layers.0", 2 * HIDDEN)},
    ),
)
