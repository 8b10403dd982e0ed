"""What Quark leaves on a disk: a model that it quantized and exported by itself."""

from __future__ import annotations

from pathlib import Path


def export_quark(source: Path, scheme: str, folder: Path) -> Path:
    """The folder, now with Quark's artifact; the scheme is one of its templates."""
    import torch
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import template
    from quark.torch.quantization.config.config import QConfig
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantizer = ModelQuantizer(
        QConfig(global_quant_config=getattr(template, scheme)().config, exclude=["lm_head"])
    )
    frozen = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(1, 17).reshape(1, -1)]))
    with torch.no_grad():
        export_safetensors(frozen, str(folder))
    return folder
