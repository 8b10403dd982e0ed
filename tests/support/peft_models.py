"""Tiny base models, LoRA adapters of them, and what PEFT itself makes of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiny_models import SHAPE, make_llama, make_qwen2, make_qwen3_moe

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_gpt2(folder: Path, dtype: str = "bf16") -> Path:
    """The folder, now with a two-layer GPT-2, whose layers are Conv1D, without its prefix."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32)
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    GPT2LMHeadModel(config).to(names[dtype]).save_pretrained(folder)
    return folder


class Case(NamedTuple):
    """A base model and the LoraConfig of its adapter.

    replaced  modules_to_save, whose copies are changed, too
    """

    make: Callable[..., Path]
    config: Mapping[str, Any]


CASES = {
    "llama": Case(make_llama, {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]}),
    "patterns": Case(
        make_llama,
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
        },
    ),
    "rslora": Case(
        make_llama, {"r": 3, "use_rslora": True, "target_modules": ["up_proj", "lm_head"]}
    ),
    "embedding": Case(
        make_llama, {"r": 4, "lora_alpha": 5, "target_modules": ["embed_tokens", "o_proj"]}
    ),
    "whole": Case(
        make_llama,
        {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "biases": Case(make_qwen2, {"r": 4, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "experts": Case(
        make_qwen3_moe,
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "gpt2": Case(
        make_gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    ),
}


def write_adapter(base: Path, folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """The folder, now with an adapter of the base model, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    adapted = get_peft_model(model, LoraConfig(**config))
    for name, values in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(values.data, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def merge_by_peft(base: Path, adapter: Path, folder: Path, scale: float = 1.0) -> Path:
    """The folder, now with the model that PEFT merges, under the names of the base's files."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    adapted = PeftModel.from_pretrained(model, adapter)
    for module in adapted.modules():
        if scale != 1 and hasattr(module, "scale_layer"):
            module.scale_layer(scale)
    adapted.merge_and_unload().save_pretrained(folder)
    return folder


def change_config(adapter: Path, **changed: object) -> Path:
    """The adapter, with other words in its config."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return adapter


__all__ = ["ATTENTION", "CASES", "MLP", "SHAPE", "change_config", "merge_by_peft", "write_adapter"]
