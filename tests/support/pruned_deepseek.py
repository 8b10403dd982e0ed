"""A small DeepSeek to be pruned, and its calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from calibrations import write_calibration
from checkpoints import FIRST, SECOND, Tensor, weight

from fp4convert.storage.open import open_source

MOE, AHEAD = "model.layers.1.mlp", "model.layers.2.mlp"


SALIENCY = [3, 1, 2, 4, 9, 8, 7, 0]


DEEPSEEK = {
    **{
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
    },
    **{"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "vision": {"n_routed_experts": 8, "depth": 3},
}


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Bytes below 0x70: numbers in every dtype."""
    nbytes = (
        int(np.prod(shape))
        * {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}[dtype]
    )
    return dtype, shape, np.random.default_rng(seed).integers(0, 0x70, nbytes, np.uint8).tobytes()


def layer(name: str, experts: int = 8) -> dict[str, Tensor]:
    """A layer of DeepSeek V3's names, in FP8: experts, router, a shared expert."""
    tensors = {
        f"{name}.gate.weight": random_tensor("BF16", (experts, 64), 1),
        f"{name}.gate.e_score_correction_bias": random_tensor("F32", (experts,), 2),
    }
    for at, expert in enumerate(
        (*(f"experts.{number}" for number in range(experts)), "shared_experts")
    ):
        for number, leaf in enumerate(("gate_proj", "up_proj", "down_proj")):
            shape = (64, 32) if leaf == "down_proj" else (32, 64)
            tensors[f"{name}.{expert}.{leaf}.weight"] = random_tensor(
                "F8_E4M3", shape, 10 * at + number
            )
            tensors[f"{name}.{expert}.{leaf}.weight_scale_inv"] = random_tensor(
                "F32", (1, 1), 10 * at + 5 + number
            )
    return tensors


def deepseek_shards(is_ahead: bool = True) -> dict[str, dict[str, Tensor]]:
    """Neighbours in different shards."""
    dense = {"model.layers.0.mlp.up_proj.weight": weight(1), "lm_head.weight": weight(2)}
    tensors = {**dense, **layer(MOE), **(layer(AHEAD) if is_ahead else {})}
    if is_ahead:
        tensors["model.layers.2.eh_proj.weight"] = weight(3)
    return {FIRST: dict(list(tensors.items())[::2]), SECOND: dict(list(tensors.items())[1::2])}


def statistics(mixture: str = MOE, saliency=SALIENCY, tokens: int = 1000) -> dict[str, np.ndarray]:
    return {
        f"{mixture}.expert_saliency": np.array(saliency, np.float32),
        f"{mixture}.expert_tokens": np.full(len(saliency), tokens, np.int64),
    }


def calibrated(source: Path, found: dict[str, np.ndarray] | None = None) -> Path:
    """A calibration file of that source, beside it; the same one each time, unless it is to say
    something else.
    """
    path = source.parent / "calibration.safetensors"
    if found is None and path.exists():
        return path
    return write_calibration(
        path, open_source(str(source)), statistics() if found is None else found
    )
