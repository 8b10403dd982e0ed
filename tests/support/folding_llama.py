"""A Llama whose norms and layers can be folded."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import Tensor, weight


def bf16_norm(size: int) -> Tensor:
    """A norm's weight, or a bias, near 1."""
    values = 1 + 0.2 * np.random.default_rng(size).standard_normal(size).astype(np.float32)
    return "BF16", (size,), values.astype(ml_dtypes.bfloat16).tobytes()


LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


NORMS = {
    f"model.layers.0.{name}.weight": bf16_norm(64)
    for name in ("input_layernorm", "post_attention_layernorm")
}


SHAPES = {
    **{
        "self_attn.q_proj": (128, 64),
        "self_attn.k_proj": (64, 64),
        "self_attn.v_proj": (64, 64),
        "self_attn.o_proj": (64, 128),
    },
    **{"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)},
}


TENSORS: dict[str, Tensor] = {
    **NORMS,
    **{
        f"model.layers.0.{name}.weight": weight(seed, *shape)
        for seed, (name, shape) in enumerate(SHAPES.items())
    },
}
