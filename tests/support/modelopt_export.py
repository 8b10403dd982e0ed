"""What ModelOpt leaves on a disk: a model that it calibrated, quantized and exported by itself, on
the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Quantizers = dict[str, Any]
FP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3), "axis": None}
MXFP8 = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}


def with_exceptions(quantizers: Quantizers) -> Quantizers:
    """A configuration of ModelOpt's with those quantizers, by pattern, and with the modules that it
    leaves alone by default.
    """
    from modelopt.torch import quantization

    left_alone = [
        entry
        for entry in quantization.NVFP4_DEFAULT_CFG["quant_cfg"]
        if entry.get("enable") is False
    ]
    chosen = [
        {"quantizer_name": pattern, "cfg": numbers} for pattern, numbers in quantizers.items()
    ]
    return {"quant_cfg": [left_alone[0], *chosen, *left_alone[1:]], "algorithm": "max"}


def export_modelopt(source: Path, config: Quantizers | str, folder: Path) -> Path:
    """The folder, now with ModelOpt's artifact of that source; `config` may be the name of one of
    its own configurations.
    """
    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(torch.arange(1, 17).reshape(1, -1))

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    chosen = getattr(quantization, config) if isinstance(config, str) else config
    export_hf_checkpoint(
        quantization.quantize(model, chosen, forward_loop=calibrate), export_dir=folder
    )
    return folder
