"""Let vLLM choose its own emulation where a CPU has no kernel; nothing else of it is replaced.

Linear layers in NVFP4 and MXFP4 get a kernel by vLLM's own register_linear_kernel. For weight-only
layers, FP8, experts and sparse attention it has none: there the function that chooses is replaced.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nn
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import (
    Nvfp4QuantizationEmulationTritonExperts as Nvfp4Experts,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as mxfp4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_experts,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
)
from vllm.platforms import PlatformEnum, current_platform

SPARSE = "vllm.v1.attention.backends.mla.xpu_mla_sparse.XPUMLASparseBackend"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = 32


class WeightOnlyNvfp4(linear.EmulationNvFp4LinearKernel):
    """Multiply by weights that vLLM's own emulation dequantizes; inputs stay as they are."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        held = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale
        return nn.linear(x, dequantize_to_dtype(*held, x.dtype, 16, swizzle=False), bias)


class WeightOnlyMxfp4(linear.EmulationMxfp4LinearKernel):
    """Multiply by dequantized weights; vLLM's own emulation needs Quark and Triton."""

    def __init__(self, config: object) -> None:
        self.config = config

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        held = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)
        layer.weight_scale = held

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        held = dequantize_mxfp4(layer.weight.data, layer.weight_scale.data)
        return nn.linear(x, held.to(x.dtype), bias)


class Fp8:
    """Stand for an FP8 kernel: weights load, and nothing is computed."""

    input_dtype = weight_dtype = quant_fp8 = None

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def input_quant_key(self) -> None:
        return None

    def process_weights_after_loading(self, layer: object) -> None:
        pass

    def apply_weights(self, *given: object, **named: object) -> torch.Tensor:
        raise NotImplementedError("FP8 is not computed here")


def dequantize_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 values; low nibble first, scales 2**(byte - 127): OCP MX v1.0."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.cat([E2M1, -E2M1])[codes].unflatten(-1, (-1, BLOCK))
    return (values * torch.exp2(exponents.float() - 127).unsqueeze(-1)).flatten(-2)


def choose_attention(choose: Any, selected: Any, attn_selector_config: Any, **rest: Any) -> str:
    """Choose as vLLM does for a CPU, which has no sparse attention."""
    if attn_selector_config.use_sparse:
        return SPARSE
    return str(choose(selected, attn_selector_config=attn_selector_config, **rest))


def install() -> None:
    """Make vLLM choose these kernels, in every module of it that is imported by now."""
    cpu = PlatformEnum.CPU
    linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, cpu, "nvfp4")
    linear.register_linear_kernel(WeightOnlyMxfp4, cpu, "mxfp4")
    choose = linear.init_nvfp4_linear_kernel
    platform: Any = type(current_platform)
    platform.get_attn_backend_cls = partial(choose_attention, platform.get_attn_backend_cls)

    def choose_nvfp4(use_a16: bool = False) -> Any:
        config = linear.NvFp4LinearLayerConfig()
        return WeightOnlyNvfp4(config) if use_a16 else choose()

    chosen: dict[str, Any] = {
        "init_nvfp4_linear_kernel": choose_nvfp4,
        "init_fp8_linear_kernel": Fp8,
        "init_wfp8_a16_linear_kernel": Fp8,
        "select_nvfp4_moe_backend": lambda *_, **__: (NvFp4MoeBackend.EMULATION, Nvfp4Experts),
        "select_mxfp4_moe_backend": lambda *_, **__: (Mxfp4MoeBackend.EMULATION, None),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm."):
            for function in chosen.keys() & vars(module).keys():
                setattr(module, function, chosen[function])


def compute_experts() -> None:
    """Let vLLM's own kernel for bf16 compute four-bit experts, for which it has none on a CPU."""
    for kind in (
        nvfp4_experts.CompressedTensorsW4A4Nvfp4MoEMethod,
        mxfp4_experts.CompressedTensorsW4A4Mxfp4MoEMethod,
        ModelOptNvFp4FusedMoE,
    ):
        kind.process_weights_after_loading = _restore_experts


def _restore_experts(method: Any, layer: Any) -> None:
    """Restore experts as vLLM 0.33 does to quantize them otherwise; MXFP4 as above."""
    if layer.w13_weight_scale.dtype == torch.uint8:
        held = ((layer.w13_weight_packed, layer.w13_weight_scale),)
        held += ((layer.w2_weight_packed, layer.w2_weight_scale),)
        restored = [dequantize_mxfp4(*map(torch.Tensor.detach, each)).bfloat16() for each in held]
    else:
        restored = method.dequantize_weight(layer)
    for name, weight in zip(("w13_weight", "w2_weight"), restored, strict=True):
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    plain = UnquantizedFusedMoEMethod(method.moe)
    layer._replace_quant_method(plain)
    plain.process_weights_after_loading(layer)
