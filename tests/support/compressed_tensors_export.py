"""What llm-compressor leaves on a disk: weights observed, and quantized, compressed and saved by
compressed-tensors itself.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from tiny_models import read_tensors

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Schemes = tuple[tuple[str, str], ...]


def export_compressed(
    source: Path, schemes: Schemes, folder: Path, has_fp8_cache: bool = False
) -> dict[str, Any]:
    """The weights that compressed-tensors decompresses again, by name; the folder now holds its
    artifact.

    schemes  (preset, targets)
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        apply_quantization_config,
    )
    from compressed_tensors.quantization import preset_name_to_scheme as scheme
    from transformers import AutoModelForCausalLM

    cache = QuantizationArgs(
        num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True
    )
    groups = {
        f"group_{number}": scheme(name, [target]) for number, (name, target) in enumerate(schemes)
    }
    cache_scheme = cache if has_fp8_cache else None
    config = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], kv_cache_scheme=cache_scheme
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    apply_quantization_config(model, config)
    _observe(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")
    }
    stored = read_tensors(folder)
    packed = {name for name in weights if f"{name}_packed" in stored}
    if not packed:  # eight bits are not
        packed = {name for name in weights if f"{name}_scale" in stored}
    return {name: tensor.detach().clone() for name, tensor in weights.items() if name in packed}


def _observe(model: Any) -> None:
    """Scales of weights, the global one shared by what engines fuse, and of activations, all
    different.
    """
    import torch
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    modules = {name: each for name, each in model.named_modules() if hasattr(each, "weight_scale")}
    amax: dict[object, list[Any]] = defaultdict(list)
    for name, module in modules.items():
        amax[_group(name)].append(module.weight.data.abs().max())
    for name, module in modules.items():
        args, weight, global_scale = module.quantization_scheme.weights, module.weight.data, None
        if hasattr(module, "weight_global_scale"):
            largest = max(amax[_group(name)])
            global_scale = module.weight_global_scale.data = generate_gparam(-largest, largest)
        width = args.group_size or weight.shape[-1]
        blocks = (
            weight.flatten() if args.strategy == "tensor" else weight.unflatten(-1, (-1, width))
        )
        block_scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
        module.weight_scale.data = block_scales.reshape(module.weight_scale.shape)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data = torch.tensor(
                [2688 / (1 + 0.1 * sum(map(ord, str(_group(name)))) % 7)]
            )
    for name, parameter in model.named_parameters():
        if name.endswith(("self_attn.k_scale", "self_attn.v_scale")):
            parameter.data.fill_(0.02)


def _group(name: str) -> tuple[str, tuple[str, ...]]:
    head, _, leaf = name.rpartition(".")
    return head, next((group for group in FUSED if leaf in group), (leaf,))
