"""Families that are published packed: which modules are, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from families_dense import DECODER, SIZES
from families_experts import DENSE_FIRST, EXPERTS_SECOND, LATENT, MIXTRAL, SHARED_SECOND
from family import Family, Tensors, build, modules_of
from packings import Packing, compressed, fp8_blocks, modelopt_fp8, pack_checkpoint

# Multiples of 128: transformers refuses other FP8 matrices, or takes their blocks for smaller ones.
WIDE = {
    **SIZES,
    "hidden_size": 256,
    "num_attention_heads": 6,
    "head_dim": 64,
    "intermediate_size": 512,
}
WIDE_LATENT = {
    **{
        **LATENT,
        "hidden_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    },
    **{"head_dim": 32, "v_head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128},
}
UNEVEN_LATENT = {
    **WIDE_LATENT,
    "hidden_size": 208,
    "kv_lora_rank": 128,
    "intermediate_size": 336,
    "moe_intermediate_size": 144,
}
LATENT_ATTENTION = (
    "model.layers.{0-1}.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj}"
)
DEEPSEEK = (*DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND)
MTP = {
    "model.layers.2.eh_proj.weight": (256, 512),
    "model.layers.2.enorm.weight": (256,),
    **{f"model.layers.2.mlp.experts.{expert}.gate_proj.weight": (128, 256) for expert in range(4)},
    "model.layers.2.self_attn.o_proj.weight": (256, 256),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A family whose checkpoint is published in some packing.

    packed   the modules that are, in the notation of families
    options  how transformers reads the source itself, where it can: the judge's own judge
    """

    family: Family
    packing: Callable[[], Packing]
    packed: tuple[str, ...]
    options: Callable[[], Mapping[str, Any]] | None = None

    def __str__(self) -> str:
        return self.family.name

    def build(self, folder: Path) -> Tensors:
        """The folder now holds the packed checkpoint; what it is worth, under the names of ordinary
        weights.
        """
        return pack_checkpoint(
            build(self.family, folder), [(self.packing(), modules_of(*self.packed))]
        )


def _fine_grained(*block: int) -> Mapping[str, Any]:
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config(dequantize=True, weight_block_size=block)}


def _decompressing() -> Mapping[str, Any]:
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _deepseek(
    name: str, config: Mapping[str, Any], extra: Mapping[str, tuple[int, ...]] | None = None
) -> Family:
    beside = "model.layers.2." if extra else ""
    return Family(
        name, "DeepseekV3ForCausalLM", config, DEEPSEEK, runs="restored", extra=extra, beside=beside
    )


def _qwen3(name: str, packing: Callable[[], Packing], has_engine: bool = True) -> Case:
    return Case(
        Family(name, "Qwen3ForCausalLM", WIDE, DECODER),
        packing,
        DECODER,
        _decompressing if has_engine else None,
    )


MINIMAX = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
CASES = (
    Case(
        _deepseek("deepseek_v3-fp8", WIDE_LATENT, MTP),
        partial(fp8_blocks, 128, 128),
        (
            LATENT_ATTENTION,
            *DEEPSEEK,
            "model.layers.2.{eh_proj,self_attn.o_proj}",
            "model.layers.2.mlp.experts.{0-3}.gate_proj",
        ),
        partial(_fine_grained, 128, 128),
    ),
    Case(
        _deepseek("deepseek_v3-fp8-uneven", UNEVEN_LATENT),
        partial(fp8_blocks, 128, 128),
        (LATENT_ATTENTION, *DEEPSEEK),
    ),
    Case(
        Family("minimax_m2-fp8-e8m0", "MiniMaxM2ForCausalLM", MINIMAX, MIXTRAL, runs="restored"),
        partial(fp8_blocks, 32, 32, "float8_e8m0fnu"),
        ("model.layers.{0-1}.self_attn.{q_proj,k_proj,v_proj,o_proj}", *MIXTRAL),
        partial(_fine_grained, 32, 32),
    ),
    Case(
        Family("qwen3-mxfp8", "Qwen3ForCausalLM", WIDE, DECODER),
        partial(fp8_blocks, 1, 32, "uint8"),
        DECODER,
        partial(_fine_grained, 1, 32),
    ),
    Case(Family("qwen3-modelopt-fp8", "Qwen3ForCausalLM", WIDE, DECODER), modelopt_fp8, DECODER),
    _qwen3(
        "qwen3-ct-fp8-tensor", partial(compressed, "FP8"), has_engine=False
    ),  # of a static input_scale transformers knows nothing
    _qwen3("qwen3-ct-fp8-channel", partial(compressed, "FP8_DYNAMIC")),
    _qwen3("qwen3-ct-fp8-block", partial(compressed, "FP8_BLOCK")),
    _qwen3("qwen3-ct-mxfp8", partial(compressed, "MXFP8A16")),
    _qwen3("qwen3-ct-int4-asymmetric", partial(compressed, "W4A16_ASYM")),
    _qwen3("qwen3-ct-int8", partial(compressed, "W8A16")),
    Case(  # Kimi K2 Thinking: only the routed experts are packed
        Family(
            "kimi_k2-int4",
            "DeepseekV3ForCausalLM",
            WIDE_LATENT,
            EXPERTS_SECOND,
            model_type="kimi_k2",
            runs="restored",
        ),
        partial(compressed, "W4A16", "group", 32),
        EXPERTS_SECOND,
    ),
)
