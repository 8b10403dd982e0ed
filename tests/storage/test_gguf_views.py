"""GGUF models in parts, and models of images in GGUF files.

The parts, and the blocks in them, are written by llama.cpp's own package gguf.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import run
from gguf.quants import dequantize, quantize
from gguf_donors import model, write_donor
from tiny_models import fp4convert, fp4convert_json, read_tensors
from torch_formulas import nvfp4_weight

Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


def write_parts(path: Path, folder: Path, count: int) -> list[Path]:
    """Cut a GGUF file as llama-gguf-split does: keys in the first part, tensors in all."""
    reader = gguf.GGUFReader(path)
    folder.mkdir()
    parts = []
    for number in range(count):
        part = folder / f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                items = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def contents(path: Path) -> tuple[dict[str, bytes], dict[str, object]]:
    reader = gguf.GGUFReader(path)
    keys = {field.name: field.contents() for field in reader.fields.values()}
    return (
        {tensor.name: tensor.data.tobytes() for tensor in reader.tensors},
        {name: value for name, value in keys.items() if not name.startswith("GGUF.")},
    )


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_donor(tmp_path / "M-BF16.gguf", model())


@pytest.mark.parametrize("given", ["the folder", "the first", "the last"])
@pytest.mark.parametrize("count", [2, 5])
def test_parts_become_what_the_whole_becomes(
    tmp_path: Path, whole: Path, count: int, given: str
) -> None:
    """One file, of its type's name, with the keys of the whole and none of a part."""
    parts = write_parts(whole, tmp_path / "parts", count)
    source = {"the folder": tmp_path / "parts", "the first": parts[0], "the last": parts[-1]}[given]
    words = ("--format", "mxfp4", "--dialect", "gguf", "-q", "-o")
    fp4convert("quantize", source, *words, tmp_path / "out")
    fp4convert("quantize", whole, *words, tmp_path / "expected")
    ours, theirs = (contents(tmp_path / name / "M-MXFP4.gguf") for name in ("out", "expected"))
    assert ours == theirs
    assert fp4convert_json("verify", tmp_path / "out", "--source", source)["passed"]


def test_parts_that_are_missing_or_misnamed_are_refused(tmp_path: Path, whole: Path) -> None:
    parts = write_parts(whole, tmp_path / "parts", 3)
    parts[1].rename(tmp_path / "alone.gguf")
    words = ("--format", "mxfp4", "--dialect", "gguf")
    assert "M-BF16-00002-of-00003.gguf is missing" in run("quantize", parts[0], *words).err
    assert (
        "split.no = 1 and split.count = 3" in run("quantize", tmp_path / "alone.gguf", *words).err
    )


@pytest.mark.parametrize("kind", [Q8_0, Q4_0])
def test_models_of_images_become_files_for_comfyui(tmp_path: Path, kind: object) -> None:
    """Values as gguf decodes them; a matrix of short rows gets its own shape back, and what is no
    matrix becomes floats.
    """
    random = np.random.default_rng(0)
    shapes = {"double_blocks.0.img_attn.qkv": (96, 64), "img_in": (64, 16), "conv": (4, 2, 8, 32)}
    writer = gguf.GGUFWriter(tmp_path / "flux-Q8_0.gguf", "flux")
    values = {}
    for name, shape in shapes.items():
        x = random.normal(size=shape).astype(np.float32)
        if shape[-1] % 32:
            writer.add_array(f"comfy.gguf.orig_shape.{name}.weight", list(shape))
            x = x.reshape(-1, 64)
        blocks = quantize(x, kind)
        values[name] = dequantize(blocks, kind).reshape(shape)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source, out = tmp_path / "flux-Q8_0.gguf", tmp_path / "out"
    fp4convert("quantize", source, "--for", "comfyui", "-q", "-o", out)
    assert fp4convert_json("verify", out, "--source", source)["passed"]
    words = ("--format", "nvfp4", "--dialect", "modelopt", "-q", "-o", tmp_path / "linear")
    fp4convert("quantize", source, *words)
    for folder in (out, tmp_path / "linear"):
        tensors = read_tensors(folder)
        assert (folder / "flux.safetensors").exists()
        assert np.array_equal(tensors["conv.weight"].numpy(), values["conv"])
    for name in ("double_blocks.0.img_attn.qkv", "img_in"):
        packed, scales = (tensors[name + end] for end in (".weight", ".weight_scale"))
        found = nvfp4_weight(packed, scales, tensors[f"{name}.weight_scale_2"]).numpy()
        assert np.linalg.norm(found - values[name]) < 0.12 * np.linalg.norm(values[name])
    assert "has no class for flux" in run("quantize", source, "--for", "llama.cpp").err
