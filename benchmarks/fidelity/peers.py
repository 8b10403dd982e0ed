"""What other packages make of a matrix by default: their own quantization, and their own values of it, as float32.

    python peers.py WEIGHTS.safetensors VALUES.safetensors PEER ...

runs where the packages are (make bench-peers makes an environment for those that do not resolve with the rest), and writes
PEER/NAME for every matrix NAME.  Nothing of fp4convert is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX v1.0, 5.3.3


def modelopt_nvfp4(x: Tensor) -> Tensor:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    stored, block_scales, global_scale = NVFP4QTensor.quantize(x, 16)
    return stored.dequantize(dtype=torch.float32, scale=block_scales, double_scale=global_scale, block_sizes={-1: 16})


def modelopt_mxfp4(x: Tensor) -> Tensor:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    stored, block_scales = MXFP4QTensor.quantize(x, 32)
    return stored.dequantize(dtype=torch.float32, scale=block_scales, block_sizes={-1: 32})


def compressed_tensors_nvfp4(x: Tensor) -> Tensor:
    from compressed_tensors.quantization.utils import generate_gparam

    largest = x.abs().max()
    return _compressed(x, "NVFP4A16", generate_gparam(-largest, largest))


def compressed_tensors_mxfp4(x: Tensor) -> Tensor:
    return _compressed(x, "MXFP4A16", None)


def _compressed(x: Tensor, preset: str, global_scale: Tensor | None) -> Tensor:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme(preset, ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, args.group_size))
    block_scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
    return fake_quantize(x, block_scales, None, args, global_scale=global_scale)


def torchao_nvfp4(x: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    stored = NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    return stored.dequantize(torch.float32)


def torchao_mxfp4(x: Tensor) -> Tensor:
    return _torchao_mx(x, "rceil")


def torchao_floor_mxfp4(x: Tensor) -> Tensor:
    return _torchao_mx(x, "floor")


def _torchao_mx(x: Tensor, mode: str) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    stored = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode(mode))
    return stored.dequantize(torch.float32)


def quark_nvfp4(x: Tensor) -> Tensor:
    from quark.torch.quantization.config import template
    from quark.torch.quantization.config.config import QLayerConfig

    return _quark(x, QLayerConfig(weight=template.FP4Block16ScaleE4M3Scheme().config.weight))


def quark_mxfp4(x: Tensor) -> Tensor:
    from quark.torch.quantization.config import template

    return _quark(x, template.MXFP4WeightOnlyScheme().config)


def _quark(x: Tensor, layer: Any) -> Tensor:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig

    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], x.shape[0], bias=False))
    model[0].weight.data.copy_(x)
    quantizer = ModelQuantizer(QConfig(global_quant_config=layer))
    frozen = quantizer.freeze(quantizer.quantize_model(model, [torch.zeros(1, x.shape[1])]))
    with torch.no_grad():
        return frozen[0](torch.eye(x.shape[1])).T  # W I, exact: every sum has one term


def mlx_nvfp4(x: Tensor) -> Tensor:
    return _mlx(x, "nvfp4")


def mlx_mxfp4(x: Tensor) -> Tensor:
    return _mlx(x, "mxfp4")


def _mlx(x: Tensor, mode: str) -> Tensor:
    import mlx.core as mx
    import numpy as np

    codes, block_scales = mx.quantize(mx.array(x.numpy()), mode=mode)
    return torch.from_numpy(np.array(mx.dequantize(codes, block_scales, mode=mode, dtype=mx.float32)))


def fouroversix_nvfp4(x: Tensor) -> Tensor:
    return _fouroversix(x, "nvfp4", "mse")


def fouroversix_mxfp4(x: Tensor) -> Tensor:
    return _fouroversix(x, "mxfp4", "static_6")


def _fouroversix(x: Tensor, dtype: str, rule: str) -> Tensor:
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

    stored = quantize_to_fp4(x, QuantizationConfig(backend="pytorch", dtype=dtype, scale_rule=rule))
    return dequantize(stored, torch.float32)[: x.shape[0], : x.shape[1]]


def llmcompressor_nvfp4(x: Tensor) -> Tensor:
    return _llmcompressor(x, "NVFP4A16")


def llmcompressor_mxfp4(x: Tensor) -> Tensor:
    return _llmcompressor(x, "MXFP4A16")


def _llmcompressor(x: Tensor, preset: str) -> Tensor:
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    from llmcompressor.entrypoints.model_free.validate import validate_config

    config = validate_config(None, preset, [])
    made = ModelFreePtqConverter(config).process({"model.layers.0.self_attn.o_proj.weight": x})
    stored = {name.rpartition(".")[2]: tensor for name, tensor in made.items()}
    packed, block_scales = stored["weight_packed"], stored["weight_scale"]
    if preset == "NVFP4A16":
        steps = block_scales.float() / stored["weight_global_scale"].float()
    else:
        steps = block_scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return (torch.tensor(E2M1)[codes].unflatten(-1, (steps.shape[-1], -1)) * steps.unsqueeze(-1)).flatten(-2)


PEERS: dict[str, Callable[[Tensor], Tensor]] = {
    name: value for name, value in list(globals().items()) if name.endswith(("_nvfp4", "_mxfp4")) and not name.startswith("_")
}


def main() -> None:
    weights_file, values_file, *names = sys.argv[1:]
    weights = load_file(weights_file)
    values = {f"{peer}/{name}": PEERS[peer](x).detach().float().contiguous() for peer in names for name, x in weights.items()}
    save_file(values, values_file)


if __name__ == "__main__":
    main()
