"""Four-bit artifacts of every dialect, spelled in plain NumPy after each dialect's source, and
never by fp4convert's own code.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from checkpoints import FIRST, SECOND, Tensor, bf16, weight, write_checkpoint
from typed_records import QUARK_MXFP4_BLOCKS, QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES

PLAIN_LAYOUTS = ("linear", "128x4", "8x4", "deepgemm", "k_major", "interleaved", "appended")
PLAIN = tuple(f"plain/{layout}" for layout in PLAIN_LAYOUTS)
BLOCK = {"nvfp4": 16, "mxfp4": 32}
PADDING = {"128x4": [128, 4], "8x4": [8, 4], "deepgemm": [4, 4]}
MARK = b'{"format":"nvfp4"}'
KEPT: dict[str, Tensor] = {
    "model.norm.weight": ("BF16", (64,), bf16(64, seed=3)),
    "lm_head.weight": weight(4, 16, 64),
}
CT_NUMBERS = {
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}


@dataclass(frozen=True, slots=True)
class Module:
    """A four-bit matrix: codes 0-15 (rows, columns), scale bytes (rows, blocks), and scalars as
    multipliers.
    """

    codes: np.ndarray
    scales: np.ndarray
    multiplier: float | None
    input_multiplier: float | None = None

    @property
    def low_first(self) -> bytes:
        return (self.codes[:, ::2] | self.codes[:, 1::2] << 4).tobytes()


def module_of(
    seed: int,
    fmt: str,
    shape: tuple[int, int],
    multiplier: float | None,
    inputs: float | None = None,
) -> Module:
    """Random codes of both signs, and scales that weights have: numbers, and exponents within seven
    octaves.
    """
    chance, (rows, columns) = np.random.default_rng(seed), shape
    lowest, highest = (1, 0x7E) if fmt == "nvfp4" else (114, 121)
    scales = chance.integers(lowest, highest + 1, (rows, columns // BLOCK[fmt]), np.uint8)
    return Module(chance.integers(0, 16, shape, np.uint8), scales, multiplier, inputs)


def arranged(scales: np.ndarray, layout: str) -> bytes:
    """Scale bytes one by one at the offsets that the kernels' own sources give."""
    rows, blocks = scales.shape
    tall, wide = PADDING.get(layout, [1, 1])
    high, long = -(-rows // tall) * tall, -(-blocks // wide) * wide
    stored = bytearray(high * long)
    for r in range(rows):
        for c in range(blocks):
            offset = {
                "128x4": ((r // 128) * (long // 4) + c // 4) * 512
                + (r % 32) * 16
                + ((r % 128) // 32) * 4
                + c % 4,
                "8x4": ((r // 8) * (long // 4) + c // 4) * 32 + (r % 8) * 4 + c % 4,
                "deepgemm": (c // 4) * high * 4 + r * 4 + c % 4,
                "k_major": c * rows + r,
            }[layout]
            stored[offset] = scales[r, c]
    return bytes(stored)


def _f32(value: float, shape: tuple[int, ...] = ()) -> Tensor:
    return "F32", shape, struct.pack("<f", value)


def spelled(dialect: str, fmt: str, name: str, q: Module) -> dict[str, Tensor]:
    """The tensors of one module; `dialect` is a name, or plain/LAYOUT."""
    (rows, columns), blocks = q.codes.shape, q.scales.shape[1]
    packed: Tensor = ("U8", (rows, columns // 2), q.low_first)
    scale_dtype = "F8_E4M3" if fmt == "nvfp4" else "U8"
    scales: Tensor = (scale_dtype, (rows, blocks), q.scales.tobytes())
    if dialect.startswith("plain/"):
        return _spelled_plain(dialect.partition("/")[2], fmt, name, q)
    if dialect == "mlx":
        return {
            f"{name}.weight": ("U32", (rows, columns // 8), q.low_first),
            f"{name}.scales": ("U8", (rows, blocks), q.scales.tobytes()),
        }
    if dialect == "deepseek":
        return {
            f"{name}.weight": ("I8", packed[1], packed[2]),
            f"{name}.scale": ("F8_E8M0", (rows, blocks), q.scales.tobytes()),
        }
    tensors = {
        f"{name}.weight_packed" if dialect == "compressed-tensors" else f"{name}.weight": packed
    }
    tensors[f"{name}.weight_scale"] = scales
    if dialect == "comfy":
        high_first = (q.codes[:, ::2] << 4 | q.codes[:, 1::2]).tobytes()
        padded = (-(-rows // 128) * 128, -(-blocks // 4) * 4)
        tensors[f"{name}.weight"] = ("U8", (rows, columns // 2), high_first)
        tensors[f"{name}.weight_scale"] = ("F8_E4M3", padded, arranged(q.scales, "128x4"))
        tensors[f"{name}.comfy_quant"] = ("U8", (len(MARK),), MARK)
    if dialect == "compressed-tensors":
        scalars = {"weight_global_scale": q.multiplier, "input_global_scale": q.input_multiplier}
        return tensors | {
            f"{name}.{part}": _f32(1 / value, (1,))
            for part, value in scalars.items()
            if value is not None
        }
    inputs = "input_scale_2" if dialect == "quark" else "input_scale"
    scalars = {"weight_scale_2": q.multiplier, inputs: q.input_multiplier}
    return tensors | {
        f"{name}.{part}": _f32(value) for part, value in scalars.items() if value is not None
    }


def _spelled_plain(layout: str, fmt: str, name: str, q: Module) -> dict[str, Tensor]:
    (rows, columns), blocks, half = q.codes.shape, q.scales.shape[1], BLOCK[fmt] // 2
    packed = np.frombuffer(q.low_first, np.uint8).reshape(rows, blocks, half)
    scalars = {"global_scale": q.multiplier, "input_scale": q.input_multiplier}
    tensors = {
        f"{name}.{part}": _f32(value) for part, value in scalars.items() if value is not None
    }
    if layout == "interleaved":
        joined = b"".join(
            packed[r, c].tobytes() + bytes([q.scales[r, c]])
            for r in range(rows)
            for c in range(blocks)
        )
        return {f"{name}.weight": ("U8", (rows, blocks * (half + 1)), joined), **tensors}
    if layout == "appended":
        joined = packed.tobytes() + q.scales.tobytes()
        return {f"{name}.weight": ("U8", (len(joined),), joined), **tensors}
    tensors[f"{name}.weight"] = ("U8", (rows, columns // 2), q.low_first)
    if layout == "linear":
        linear_dtype = "F8_E4M3" if fmt == "nvfp4" else "F8_E8M0"
        tensors[f"{name}.block_scale"] = (linear_dtype, (rows, blocks), q.scales.tobytes())
    else:
        stored = arranged(q.scales, layout)
        tensors[f"{name}.block_scale"] = ("U8", (len(stored),), stored)
    return tensors


def spelled_stacks(parent: str, experts: dict[str, Module]) -> dict[str, Tensor]:
    """gpt-oss: all experts of `parent`, named N.gate_proj, N.up_proj, N.down_proj."""
    count = len(experts) // 3
    tensors = {}
    for stack, members in (
        ("gate_up_proj", ("gate_proj", "up_proj")),
        ("down_proj", ("down_proj",)),
    ):
        columns, rows = [], []
        for number in range(count):
            parts = [experts[f"{parent}.{number}.{member}"] for member in members]
            height = parts[0].codes.shape[0]
            packed = [np.frombuffer(part.low_first, np.uint8).reshape(height, -1) for part in parts]
            columns += [table[row] for row in range(height) for table in packed]
            rows += [part.scales[row] for row in range(height) for part in parts]
        height, blocks = len(rows) // count, rows[0].size
        tensors[f"{parent}.{stack}_blocks"] = (
            "U8",
            (count, height, blocks, 16),
            np.concatenate(columns).tobytes(),
        )
        tensors[f"{parent}.{stack}_scales"] = (
            "U8",
            (count, height, blocks),
            np.concatenate(rows).tobytes(),
        )
    return tensors


def records(
    dialect: str, fmt: str, modules: dict[str, Module], activations: int
) -> dict[str, object]:
    """File name -> what a folder of that dialect says of itself,
    in as few words as engines need.
    """
    four = activations == 4
    if dialect.startswith("plain/"):
        return {
            "config.json": {"model_type": "x"},
            "quantization_config.json": _plain_record(dialect, fmt, modules, activations),
        }
    if dialect == "compressed-tensors":
        group = {
            "targets": ["Linear"],
            "weights": CT_NUMBERS[fmt],
            "input_activations": CT_NUMBERS[fmt] if four else None,
        }
        declared = {
            "format": f"{fmt}-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"g": group},
        }
        record: dict[str, object] = {"quant_method": dialect, **declared, "ignore": ["lm_head"]}
    elif dialect == "modelopt":
        record = {
            "quant_method": dialect,
            "quant_algo": "NVFP4" if four else "W4A16_NVFP4",
            "ignore": ["lm_head"],
        }
    elif dialect == "quark":
        stages = QUARK_MXFP4_BLOCKS if fmt == "mxfp4" else [QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES]
        scheme = {"weight": stages, "input_tensors": stages if four else None}
        record = {"quant_method": dialect, "global_quant_config": scheme, "exclude": ["lm_head"]}
        record["export"] = {"kv_cache_group": []}
    elif dialect == "mlx":
        return {
            "config.json": {
                "model_type": "x",
                "quantization": {"group_size": BLOCK[fmt], "bits": 4, "mode": fmt},
            }
        }
    elif dialect == "deepseek":
        return {
            "config.json": {
                "model_type": "x",
                "expert_dtype": "fp4",
                "quantization_config": {"quant_method": "fp8"},
            }
        }
    elif dialect == "gpt-oss":
        record = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    else:
        return {"config.json": {"model_type": "x"}}
    return {"config.json": {"model_type": "x", "quantization_config": record}}


def _plain_record(
    dialect: str, fmt: str, modules: dict[str, Module], activations: int
) -> dict[str, object]:
    layout = dialect.partition("/")[2]
    return {
        "format": fmt,
        "block_size": BLOCK[fmt],
        "element_dtype": "fp4_e2m1",
        "scale_dtype": "fp8_e4m3" if fmt == "nvfp4" else "e8m0",
        "scale_layout": layout,
        "scale_padding": PADDING.get(layout),
        "nibble_order": "low_first",
        "block_axis": -1,
        "global_scale": {"dtype": "fp32", "stored_as": "multiplier"} if fmt == "nvfp4" else None,
        "activations": activations,
        "dialect": "plain",
        "shapes": {name: list(q.codes.shape) for name, q in modules.items()},
    }


def tensors_of(dialect: str, fmt: str, modules: dict[str, Module]) -> dict[str, Tensor]:
    """Every tensor of an artifact with those modules, and what is kept beside them."""
    if dialect == "gpt-oss":
        parent = next(iter(modules)).rpartition(".experts.")[0] + ".experts"
        return spelled_stacks(parent, modules) | KEPT
    return {
        name: tensor
        for module, q in modules.items()
        for name, tensor in spelled(dialect, fmt, module, q).items()
    } | KEPT


def write_artifact(
    folder: Path,
    dialect: str,
    fmt: str,
    modules: dict[str, Module],
    activations: int = 16,
    is_split: bool = False,
) -> Path:
    """An artifact that fp4convert never saw; split, every second tensor lies in a second shard."""
    tensors = tensors_of(dialect, fmt, modules)
    names = sorted(tensors)
    shards = {FIRST: names[::2], SECOND: names[1::2]} if is_split else {"model.safetensors": names}
    said = records(dialect, fmt, modules, activations)
    config = said.pop("config.json")
    more = {file: json.dumps(record).encode() for file, record in said.items()}
    return write_checkpoint(
        folder,
        {file: {name: tensors[name] for name in part} for file, part in shards.items()},
        config,
        **more,
    )
