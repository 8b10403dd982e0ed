"""Sources whose experts, or all of whose layers, are four-bit already, made by others, and what
they are worth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch_formulas as formulas
from compressed_tensors_export import export_compressed
from families_experts import DEEPSEEK_V4, V4_EXPERTS, unprefixed
from family import PARTS, Family, Tensors, build, modules_of
from gptoss_models import listed_experts as gptoss_experts
from gptoss_models import make_gptoss
from modelopt_export import export_modelopt
from packings import fp8_blocks, mxfp4_experts, pack_checkpoint
from tiny_models import make_llama, read_json, read_tensors
from torch_formulas import mxfp4_weight

V4 = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    {**DEEPSEEK_V4, "hidden_size": 256, "moe_intermediate_size": 128},
    V4_EXPERTS,
    published=unprefixed,
    extra={
        "mtp.0.e_proj.weight": (256, 256),
        **{f"mtp.0.ffn.experts.{expert}.w1.weight": (128, 256) for expert in range(4)},
    },
    beside="mtp.",
)
V4_FP8 = (
    "layers.{0-1}.attn.{wq_a,wq_b,wkv,wo_a,wo_b}",
    "layers.{0-1}.ffn.shared_experts.{w1,w2,w3}",
    "mtp.0.e_proj",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and what its tensors are worth in float32, under the names that they have when
    every module has its own.

    four_bit  module -> its packed codes and block scales, as safetensors holds them
    judged    every tensor, as an ordinary weight
    """

    folder: Path
    format: str
    four_bit: dict[str, tuple[Any, Any]]
    judged: Tensors


def make_gpt_oss(folder: Path) -> Source:
    """Every code and seven exponents; gates are the even rows of gate_up, ups the odd ones."""
    tensors = read_tensors(make_gptoss(folder))
    judged = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("_blocks", "_scales"))
    }
    four_bit = gptoss_experts(folder)
    return Source(
        folder,
        "mxfp4",
        four_bit,
        judged | {f"{name}.weight": mxfp4_weight(*parts) for name, parts in four_bit.items()},
    )


def make_deepseek_v4(folder: Path) -> Source:
    """Routed experts in MXFP4, those for multi-token prediction among them, attention and the
    shared expert in FP8.
    """
    build(V4, folder)
    fp8, fp4 = fp8_blocks(128, 128, "float8_e8m0fnu", ".scale"), mxfp4_experts()
    experts, draft = modules_of(*V4_EXPERTS), modules_of("mtp.0.ffn.experts.{0-3}.w1")
    judged = pack_checkpoint(folder, [(fp8, modules_of(*V4_FP8)), (fp4, [*experts, *draft])])
    config = read_json(folder / "config.json")
    config["quantization_config"]["expert_dtype"] = config["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(folder)
    return Source(
        folder,
        "mxfp4",
        {
            name: (tensors[f"{name}.weight"], tensors[f"{name}.scale"])
            for name in [*experts, *draft]
        },
        judged,
    )


def make_nvfp4_ct(folder: Path) -> Source:
    plain = make_llama(folder.parent / "plain")
    export_compressed(plain, (("NVFP4A16", "Linear"),), folder)
    tensors, judged = read_tensors(folder), read_tensors(plain)
    four_bit = {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        packed, block_scales, divisor = (tensors[f"{module}.{part}"] for part in PARTS)
        four_bit[module] = (packed, block_scales)
        judged[f"{module}.weight"] = formulas.decoded(
            formulas.unpacked(packed), formulas.e4m3(block_scales) / divisor
        )
    return Source(folder, "nvfp4", four_bit, judged)


def make_nvfp4_modelopt(folder: Path) -> Source:
    plain = make_llama(folder.parent / "plain")
    export_modelopt(plain, "NVFP4_DEFAULT_CFG", folder)
    tensors = read_tensors(folder)
    weights = formulas.quark_weights(tensors)
    four_bit = {
        name.removesuffix(".weight"): (tensors[name], tensors[f"{name}_scale"]) for name in weights
    }
    return Source(folder, "nvfp4", four_bit, read_tensors(plain) | weights)


MAKERS = {
    "gpt_oss-mxfp4": make_gpt_oss,
    "deepseek_v4-fp4": make_deepseek_v4,
    "llama-ct-nvfp4": make_nvfp4_ct,
    "llama-modelopt-nvfp4": make_nvfp4_modelopt,
}
