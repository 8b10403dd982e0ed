"""Artifacts and calibrations of a small Llama whose modules have input scales of their own."""

import json
import struct
from pathlib import Path

import numpy as np
from calibrations import write_calibration
from checkpoints import (
    LAYER,
    LLAMA,
    pack_shard,
    read_folder,
    read_shard,
    run,
    weight,
    write_checkpoint,
)

from fp4convert.storage.open import open_source

ENDINGS = {  # of an input scale's name, and whether it is stored as a divisor
    "compressed-tensors": (".input_global_scale", True),
    "modelopt": (".input_scale", False),
    "quark": (".input_scale_2", False),
    "comfy": (".input_scale", False),
    "plain": (".input_scale", False),
}
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
GROUPS = [[f"{ATTENTION}.{name}_proj" for name in "qkv"], [f"{MLP}.gate_proj", f"{MLP}.up_proj"]]
ALONE = [f"{ATTENTION}.o_proj", f"{MLP}.down_proj"]
MODULES = [*GROUPS[0], *GROUPS[1], *ALONE]
STORED = {  # float32 as a divisor; no reciprocal of them is one
    **dict.fromkeys(GROUPS[0], 7.3),
    **dict.fromkeys(GROUPS[1], 411.7),
    ALONE[0]: 1e-3,
    ALONE[1]: 3.0,
}
AMAX = {module: 0.7 + number * 1.3 for number, module in enumerate(MODULES)}


def quantized(
    source: Path, folder: Path, dialect: str = "compressed-tensors", *options: object
) -> Path:
    done = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--activations",
        4,
        "-o",
        folder,
        *options,
    )
    assert done.code == 0, done
    return folder


def donor(source: Path, folder: Path, dialect: str, stored: dict[str, float]) -> Path:
    """An artifact of somebody else with these numbers in its input scales, as they are stored."""
    quantized(source, folder, dialect)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = read_shard(path)
        for module, value in stored.items():
            name = module + ENDINGS[dialect][0]
            if name in tensors:
                tensors[name] = (*tensors[name][:2], struct.pack("<f", value))
        metadata = json.loads(
            path.read_bytes()[8 : 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
        )["__metadata__"]
        path.write_bytes(pack_shard(tensors, metadata))
    return folder


def input_scales(folder: Path, dialect: str) -> dict[str, float]:
    """The float32 that every module has, as it is stored."""
    ending = ENDINGS[dialect][0]
    found = {name: tensor for name, tensor in read_folder(folder).items() if name.endswith(ending)}
    return {
        name.removesuffix(ending): struct.unpack("<f", data)[0]
        for name, (_, _, data) in found.items()
    }


def calibrate(source: Path, path: Path, amax: dict[str, float], **notes: str) -> Path:
    columns = {module: 128 if module == f"{MLP}.down_proj" else 64 for module in amax}
    found = {f"{module}.input_amax": np.float32(value) for module, value in amax.items()}
    found |= {
        f"{module}.input_channel_amax": np.full(columns[module], value, np.float32)
        for module, value in amax.items()
    }
    return write_calibration(path, open_source(str(source)), found, **notes)


def eight_bit_recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        'about = "attention in FP8"\n\n[[format]]\nformat = "fp8"\nmodules = ["*self_attn*"]\n'
    )
    return path


def with_own_scale(folder: Path) -> Path:
    """A source whose o_proj is FP8 with one scale, and has a scale of activations."""
    stem = f"{ATTENTION}.o_proj"
    tensors = {
        f"{stem}.weight": ("F8_E4M3", (32, 64), bytes(range(64)) * 32),
        f"{stem}.weight_scale": ("F32", (), struct.pack("<f", 0.5)),
        f"{stem}.input_scale": ("F32", (), struct.pack("<f", 0.375)),
        f"{MLP}.down_proj.weight": weight(3, 64, 128),
    }
    record = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return write_checkpoint(
        folder, {"model.safetensors": tensors}, {**LLAMA, "quantization_config": record}
    )
