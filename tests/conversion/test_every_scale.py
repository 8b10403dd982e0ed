"""W4A4 never leaves without every scale: whatever the source stores, whoever made it, however many
processes worked on it.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import (
    INDEX,
    LAYER,
    LLAMA,
    Tensor,
    bf16,
    done,
    pack_shard,
    read_folder,
    read_shard,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from gguf_donors import model, write_donor
from spellings import KEPT, module_of, write_artifact

TARGETS = {  # dialect -> endings of the block scales and of the input scales of an NVFP4 module
    "compressed-tensors": (".weight_packed", ".input_global_scale"),
    "modelopt": (".weight_scale_2", ".input_scale"),
    "quark": (".weight_scale_2", ".input_scale_2"),
    "comfy": (".weight_scale_2", ".input_scale"),
    "plain": (".block_scale", ".input_scale"),
}
MLP = [f"{LAYER}.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
EXPERTS = [
    f"{LAYER}.mlp.experts.{number}.{leaf}_proj"
    for number in range(2)
    for leaf in ("gate", "up", "down")
]
DEEPSEEK = [
    f"layers.0.ffn.experts.{number}.{leaf}" for number in range(2) for leaf in ("w1", "w3", "w2")
]
STACKS = ("--stack-order", "out_in", "--stack-rows", "concatenated")


def floats(folder: Path) -> Path:
    return write_llama(folder)


def stacks(folder: Path) -> Path:
    """Two experts in stacks, as some families keep them."""
    shapes = {"gate_up_proj": (2, 64, 64), "down_proj": (2, 64, 32)}
    tensors: dict[str, Tensor] = {
        f"{LAYER}.mlp.experts.{name}": ("BF16", shape, bf16(*shape, seed=5))
        for name, shape in shapes.items()
    }
    return write_single(folder, tensors, {**LLAMA, "model_type": "nobody_knows"})


def eight_bits(folder: Path) -> Path:
    """FP8 by rows, with scales of activations that mean nothing to four-bit modules."""
    tensors: dict[str, Tensor] = {}
    for module in MLP:
        tensors[f"{module}.weight"] = ("F8_E4M3", (64, 64), bytes(range(64)) * 64)
        tensors[f"{module}.weight_scale"] = ("F32", (64, 1), struct.pack("<f", 0.5) * 64)
        tensors[f"{module}.input_scale"] = ("F32", (), struct.pack("<f", 0.25))
    record = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": EIGHT},
    }
    return write_checkpoint(
        folder, {"model.safetensors": tensors}, {**LLAMA, "quantization_config": record}
    )


EIGHT = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": None,
}


def four_bits(dialect: str, fmt: str, activations: int = 16) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        names = {"gpt-oss": EXPERTS, "deepseek": DEEPSEEK}.get(dialect, MLP)
        inputs = 0.25 if activations == 4 and fmt == "nvfp4" else None
        multiplier = {"nvfp4": 0.01}.get(fmt) if dialect != "mlx" else None
        matrices = {
            name: module_of(number, fmt, (64, 64), multiplier, inputs)
            for number, name in enumerate(names)
        }
        return write_artifact(folder, dialect, fmt, matrices, activations)

    return make


SOURCES = {
    "floats": floats,
    "stacks": stacks,
    "fp8": eight_bits,
    **{
        f"nvfp4 {name}": four_bits(name, "nvfp4")
        for name in ("compressed-tensors", "modelopt", "quark", "comfy", "plain/128x4", "mlx")
    },
    **{
        f"mxfp4 {name}": four_bits(name, "mxfp4")
        for name in ("compressed-tensors", "quark", "gpt-oss", "deepseek", "mlx")
    },
    "w4a4 modelopt": four_bits("modelopt", "nvfp4", 4),
    "w4a4 compressed-tensors": four_bits("compressed-tensors", "nvfp4", 4),
}


def assert_whole(folder: Path, dialect: str, count: int) -> None:
    """Every NVFP4 module has one positive float32, inspect finds nothing wrong,
    and verify neither.
    """
    tensors, (marked, ending) = read_folder(folder), TARGETS[dialect]
    modules = {name.removesuffix(marked) for name in tensors if name.endswith(marked)}
    scaled = {
        name.removesuffix(ending): data
        for name, (_, _, data) in tensors.items()
        if name.endswith(ending)
    }
    assert len(modules) == count
    assert modules == scaled.keys()
    assert all(0 < struct.unpack("<f", data)[0] < np.inf for data in scaled.values())
    found = run("inspect", folder, "--json").json
    assert (found["activations"], found["tensors"]["quantized"]) == (4, count)
    assert [one for one in found["findings"] if one["level"] == "error"] == []
    done("verify", folder)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dialect", TARGETS)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_module_has_its_scale(kind, dialect, tmp_path):
    """By a constant, and copied from the artifact that this made."""
    source = SOURCES[kind](tmp_path / "source")
    options = ("--format", "nvfp4", "--dialect", dialect, "--activations", 4, "-q")
    options = (*options, *(STACKS if kind == "stacks" else ()))
    for folder, scale in (("constant", "0.5"), ("copied", tmp_path / "constant")):
        done("quantize", source, *options, "--input-scale", scale, "-o", tmp_path / folder)
        count = {"floats": 7, "stacks": 6, "mxfp4 gpt-oss": 6, "mxfp4 deepseek": 6}.get(kind, 3)
        assert_whole(tmp_path / folder, dialect, count)
    left, right = (read_folder(tmp_path / folder) for folder in ("constant", "copied"))
    assert left == right


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_parts_that_are_merged(dialect, tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    for index in (1, 0):
        options = ("--format", "nvfp4", "--dialect", dialect, "--activations", 4, "-o", out)
        done("quantize", source, *options, "--shard-index", index, "--num-shards", 2)
    done("merge", out)
    assert_whole(out, dialect, 7)


def test_what_stays_packed_beside_them(tmp_path):
    """NVFP4 that stays as it is, in an artifact whose record says W4A4, has a scale too."""
    source = four_bits("modelopt", "nvfp4")(tmp_path / "source")
    options = ("--format", "nvfp4", "--dialect", "modelopt", "--activations", 4, "--keep-packed")
    done("quantize", source, *options, "--exclude", "*down_proj", "-o", tmp_path / "out")
    assert_whole(tmp_path / "out", "modelopt", 3)


@pytest.mark.parametrize("dialect", TARGETS)
def test_a_lost_scale_is_found(dialect, tmp_path):
    out = tmp_path / "out"
    source = write_single(tmp_path / "source", {f"{MLP[2]}.weight": weight(3), **KEPT})
    done("quantize", source, "--format", "nvfp4",
               "--dialect", dialect, "--activations", 4, "-o", out)  # fmt: skip
    name = f"{MLP[2]}{TARGETS[dialect][1]}"
    lose(out, name)
    found = run("inspect", out, "--json").json["findings"]
    assert ("error", "tensor-missing", name) in [
        (one["level"], one["code"], one["tensor"]) for one in found
    ]


def lose(folder: Path, name: str) -> None:
    """The file of that tensor without it, its notes as they were."""
    for path in folder.glob("*.safetensors"):
        tensors = read_shard(path)
        if name in tensors:
            del tensors[name]
            (length,) = struct.unpack("<Q", path.read_bytes()[:8])
            path.write_bytes(
                pack_shard(tensors, json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"])
            )
    if (index := folder / INDEX).exists():
        listed = json.loads(index.read_text())
        del listed["weight_map"][name]
        index.write_text(json.dumps(listed))


def test_gguf_files_have_them_too(tmp_path):
    """Also copied from one: names are llama.cpp's in both."""
    donor, options = (
        write_donor(tmp_path / "donor.gguf", model()),
        ("--format", "nvfp4", "--dialect", "gguf", "--activations", 4),
    )
    done("quantize", donor, *options, "--input-scale", 0.5, "-o", tmp_path / "a")
    done("quantize", donor, *options, "--input-scale", tmp_path / "a", "-o", tmp_path / "b")
    for folder in ("a", "b"):
        tensors = {
            each.name: each for each in gguf.GGUFReader(tmp_path / folder / "donor.gguf").tensors
        }
        packed = {
            name.removesuffix(".weight")
            for name, each in tensors.items()
            if each.tensor_type.name == "NVFP4"
        }
        assert len(packed) == 7
        assert {
            name.removesuffix(".input_scale") for name in tensors if name.endswith(".input_scale")
        } == packed
        assert all(tensors[f"{stem}.input_scale"].data.tolist() == [0.5] for stem in packed)
