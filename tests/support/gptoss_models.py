"""gpt-oss as it is published, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import read_json, read_tensors
from torch_formulas import mxfp4_weight

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 128, 64


SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "sliding_window": 32,
}


KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


STACKED = ("gate_up_proj", "down_proj")


def make_gptoss(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**SHAPE)).bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(0, 0.02)
        model.save_pretrained(folder)
        tensors = {}
        for name, tensor in read_tensors(folder).items():
            if name.endswith(STACKED):
                experts, columns, rows = tensor.shape  # transformers holds them transposed
                tensors[f"{name}_blocks"] = torch.randint(
                    0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
                )
                tensors[f"{name}_scales"] = torch.randint(
                    116, 122, (experts, rows, columns // 32), dtype=torch.uint8
                )
            else:
                tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    record = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    config = {**read_json(folder / "config.json"), "quantization_config": record}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected_weights(native: Path) -> dict[str, Any]:
    """Name -> bfloat16 weight of every stack of experts, transposed as transformers holds it; no
    rounding happens.
    """
    tensors = read_tensors(native)
    return {
        name.removesuffix("_blocks"): mxfp4_weight(
            blocks.flatten(-2), tensors[name.replace("_blocks", "_scales")]
        )
        .transpose(1, 2)
        .bfloat16()
        for name, blocks in tensors.items()
        if name.endswith("_blocks")
    }


def listed_experts(native: Path) -> dict[str, tuple[Any, Any]]:
    """Module of one expert -> its packed codes and block scales: gate is every even row of gate_up,
    up every odd one.
    """
    tensors = read_tensors(native)
    modules = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        for expert in range(EXPERTS):
            for stack, projection, rows in (
                ("gate_up_proj", "gate_proj", slice(0, None, 2)),
                ("gate_up_proj", "up_proj", slice(1, None, 2)),
                ("down_proj", "down_proj", slice(None)),
            ):
                blocks, scales = (
                    tensors[f"{prefix}.{stack}_{part}"][expert, rows]
                    for part in ("blocks", "scales")
                )
                modules[f"{prefix}.{expert}.{projection}"] = (blocks.flatten(-2), scales)
    return modules
