"""Fake quantization by packages that train with it: values of four bits in wider dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import LAYER, LLAMA

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
SHAPES = {
    "self_attn.q_proj": (128, 256),
    "self_attn.k_proj": (64, 256),
    "self_attn.v_proj": (64, 256),
    "self_attn.o_proj": (256, 128),
    "mlp.gate_proj": (192, 256),
    "mlp.up_proj": (192, 256),
    "mlp.down_proj": (256, 192),
}


def by_modelopt(weight: Any, amax: Any) -> Any:
    """What ModelOpt's NVFP4 makes of a matrix under that amax, float32."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, block_scales, global_scale = NVFP4QTensor.quantize(
        weight, 16, weights_scaling_factor_2=amax.float() / (6 * 448)
    )
    return made.dequantize(
        dtype=torch.float32,
        block_sizes={-1: 16},
        scale=block_scales,
        double_scale=global_scale,
    )


def by_torchao(weight: Any, amax: Any) -> Any:
    """What torchao's NVFP4 makes of it; its fake quantization dequantizes the same tensor."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(amax.float()))
    return made.dequantize(torch.float32)


def mxfp4_by_modelopt(weight: Any, amax: Any) -> Any:
    """What ModelOpt's MXFP4 makes of it, which has no amax."""
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    made, block_scales = MXFP4QTensor.quantize(weight, 32)
    return made.dequantize(dtype=torch.float32, block_sizes={-1: 32}, scale=block_scales)


def write_fake_quantized(
    folder: Path, quantizer: Any, master: Any, stored: Any, frozen: float = 1, shared: bool = True
) -> Path:
    """A layer of a Llama whose matrices are values of four bits; returns the folder.

    master  dtype of the weights that were fake-quantized; stored: that they are saved in
    frozen  the amax they were fake-quantized under, beside their own
    shared  matrices that engines fuse have one amax
    """
    import json

    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(0)
    spread = {"k_proj": 0.7, "v_proj": 0.45, "up_proj": 0.8}
    weights = {
        name: (torch.randn(shape, generator=made) * 0.02 * spread.get(name.split(".")[1], 1))
        for name, shape in SHAPES.items()
    }
    tensors = {}
    for group in GROUPS:
        own = {name: w.to(master) for name, w in weights.items() if name.split(".")[1] in group}
        amaxes = {name: w.abs().amax() * frozen for name, w in own.items()}
        for name, w in own.items():
            amax = max(amaxes.values()) if shared else amaxes[name]
            tensors[f"{LAYER}.{name}.weight"] = quantizer(w, amax).to(stored).contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder
