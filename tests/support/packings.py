"""How sources are published that are quantized already: each packed by an outside tool, or by hand,
and judged likewise.

No value here comes from fp4convert: `unpack` says, in float32, what the stored bytes are worth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from family import Tensors, write_shards
from tiny_models import read_json, read_tensors
from torch_formulas import mxfp4_weight

Parts = dict[str, Any]  # what follows the module's name -> tensor
E4M3_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to store a matrix.

    record  config.json's quantization_config
    pack    a weight -> its tensors, by their names' endings
    unpack  those tensors -> float32 values
    files   records in files of their own
    """

    name: str
    record: Mapping[str, Any]
    pack: Callable[[Any], Parts]
    unpack: Callable[[Parts], Any]
    files: Mapping[str, Mapping[str, Any]]


def pack_checkpoint(folder: Path, packed: Sequence[tuple[Packing, Sequence[str]]]) -> Tensors:
    """What the judges say of the checkpoint in the folder, which is packed now: codes and scales
    are dealt out to all shards.

    packed  a packing, and the modules that are; the first one's record is the checkpoint's
    """
    tensors = read_tensors(folder)
    judged = dict(tensors)
    for packing, modules in packed:
        for module in modules:
            parts = packing.pack(tensors.pop(f"{module}.weight"))
            judged[f"{module}.weight"] = packing.unpack(parts)
            tensors |= {f"{module}{ending}": tensor for ending, tensor in parts.items()}
    write_shards(tensors, folder)
    packing, _ = packed[0]
    config = {**read_json(folder / "config.json"), "quantization_config": packing.record}
    (folder / "config.json").write_text(json.dumps(config))
    for name, record in packing.files.items():
        (folder / name).write_text(json.dumps(record))
    return judged


def fp8_blocks(
    height: int,
    width: int,
    scale_dtype: str = "float32",
    ending: str = ".weight_scale_inv",
) -> Packing:
    """DeepSeek V3's: E4M3 codes and one multiplier for each block; the last ones of a row or column
    may be smaller.

    Source: DeepSeek-V3's inference/kernel.py, weight_dequant_kernel; transformers 5.23 refuses what
    blocks do not fill.
    scale_dtype  float32; float8_e8m0fnu, or uint8 for the same bytes: powers of two
    """
    import torch

    def spread(values: Any, shape: tuple[int, int]) -> Any:
        return values.repeat_interleave(height, 0).repeat_interleave(width, 1)[
            : shape[0], : shape[1]
        ]

    def pack(weight: Any) -> Parts:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
        blocks = padded.unflatten(0, (-1, height)).unflatten(-1, (-1, width))
        multipliers = blocks.abs().amax((1, 3)).clamp(min=1e-12) / E4M3_LARGEST
        if scale_dtype != "float32":
            multipliers = multipliers.log2().ceil().exp2()
        codes = (weight.float() / spread(multipliers, weight.shape)).to(torch.float8_e4m3fn)
        stored = multipliers if scale_dtype == "float32" else multipliers.to(torch.float8_e8m0fnu)
        return {
            ".weight": codes,
            ending: stored.view(torch.uint8) if scale_dtype == "uint8" else stored,
        }

    def unpack(parts: Parts) -> Any:
        stored = parts[ending]
        values = (stored.view(torch.float8_e8m0fnu) if scale_dtype == "uint8" else stored).float()
        return parts[".weight"].float() * spread(values, parts[".weight"].shape)

    record = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [height, width],
    }
    if scale_dtype != "float32":
        record["scale_fmt"] = "ue8m0"
    name = (
        f"fp8-{height}x{width}"
        + {"float32": "", "float8_e8m0fnu": "-e8m0", "uint8": "-e8m0-bytes"}[scale_dtype]
    )
    return Packing(name, record, pack, unpack, {})


def mxfp4_experts() -> Packing:
    """DeepSeek V4's routed experts: two E2M1 codes in a byte, the first in the low bits, and one
    E8M0 scale for 32 of them.

    Packed by torchao's to_mx; judged by the formula alone.
    """
    import torch

    def pack(weight: Any) -> Parts:
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        stored, codes = to_mx(weight.float(), torch.float4_e2m1fn_x2, 32)
        return {".weight": codes.view(torch.int8), ".scale": stored.view(torch.float8_e8m0fnu)}

    def unpack(parts: Parts) -> Any:
        return mxfp4_weight(parts[".weight"].view(torch.uint8), parts[".scale"].view(torch.uint8))

    return Packing("mxfp4-experts", {}, pack, unpack, {})


def modelopt_fp8() -> Packing:
    """ModelOpt's FP8: one multiplier for the whole matrix, amax / 448, and one for what goes in."""
    import torch

    def pack(weight: Any) -> Parts:
        multiplier = weight.float().abs().max() / E4M3_LARGEST
        codes = (weight.float() / multiplier).to(torch.float8_e4m3fn)
        return {".weight": codes, ".weight_scale": multiplier, ".input_scale": torch.tensor(0.05)}

    def unpack(parts: Parts) -> Any:
        return parts[".weight"].float() * parts[".weight_scale"]

    group = {
        kind: {"dynamic": False, "num_bits": 8, "type": "float"}
        for kind in ("weights", "input_activations")
    }
    producer = {"name": "modelopt", "version": "0.47.0"}
    record = {
        **{
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head"],
            "producer": producer,
        },
        "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
    }
    quantization = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    }
    files = {"hf_quant_config.json": {"producer": producer, "quantization": quantization}}
    return Packing("modelopt-fp8", record, pack, unpack, files)


def compressed(preset: str, strategy: str | None = None, group_size: int | None = None) -> Packing:
    """What compressed-tensors makes of a weight, and makes of that again; its own compressor, asked
    for float32.

    preset    its name of a scheme
    strategy  tensor, channel or group, where it is not the preset's
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if strategy:
        scheme.weights = scheme.weights.model_copy(
            update={"strategy": strategy, "group_size": group_size}
        )
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)

    def pack(weight: Any) -> Parts:
        parts = compressor.compress({"weight": weight, **_observed(weight, scheme.weights)}, scheme)
        if scheme.input_activations and not scheme.input_activations.dynamic:
            parts["input_scale"] = torch.tensor([0.05])
        return {f".{name}": tensor for name, tensor in parts.items()}

    def unpack(parts: Parts) -> Any:
        state = {
            name.removeprefix("."): tensor
            for name, tensor in parts.items()
            if name != ".input_scale"
        }
        if state["weight_scale"].is_floating_point():
            state["weight_scale"] = state["weight_scale"].float()
        return compressor.decompress(state, scheme)["weight"].float()

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="compressed"
    )
    record = {
        **config.model_dump(mode="json"),
        "quant_method": "compressed-tensors",
        "format": scheme.format.value,
    }
    return Packing(f"ct-{preset}{f'-{strategy}' if strategy else ''}", record, pack, unpack, {})


def _observed(weight: Any, args: Any) -> Parts:
    """Scales, and zero points where integers are not symmetric,
    of what shares one in that scheme.
    """
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "block":
        height, width = args.block_structure
        blocks = (
            weight.unflatten(0, (-1, height)).unflatten(-1, (-1, width)).transpose(1, 2).flatten(2)
        )
    elif args.strategy == "tensor":
        blocks = weight.flatten()
    else:
        blocks = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    block_scales, zero_points = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    shape = {"tensor": (1,), "channel": (len(weight), 1)}.get(
        str(args.strategy), tuple(block_scales.shape)
    )
    return {
        "weight_scale": block_scales.reshape(shape),
        "weight_zero_point": zero_points.reshape(shape),
    }
