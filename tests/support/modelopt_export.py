"""ModelOpt's own export."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def export_modelopt(source: Path, config: str, folder: Path) -> Path:
    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(torch.arange(1, 17).reshape(1, -1))

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantized = quantization.quantize(model, getattr(quantization, config), forward_loop=calibrate)
    export_hf_checkpoint(quantized, export_dir=folder)
    return folder
