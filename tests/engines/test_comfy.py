"""comfy-kitchen, ComfyUI's own kernels: it reads what the command writes, and the command reads
what it quantized.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import differing, fp4convert, fp4convert_json, make_llama, read_tensors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "comfy"
    fp4convert("quantize", source, "--format", "nvfp4", "--dialect", "comfy", "-o", folder, "-q")
    return folder


@pytest.fixture(scope="module")
def own(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that comfy-kitchen quantized, marked as ComfyUI marks its files."""
    import torch
    from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        stored = TensorCoreNVFP4Layout.state_dict_tensors(*TensorCoreNVFP4Layout.quantize(tensor))
        tensors |= {name + ending: part for ending, part in stored.items()}
        mark = json.dumps({"format": "nvfp4"}).encode()
        tensors[name.replace(".weight", ".comfy_quant")] = torch.frombuffer(
            bytearray(mark), dtype=torch.uint8
        )
    folder = tmp_path_factory.mktemp("own")
    save_file(tensors, folder / "model.safetensors")
    return folder


def _kitchens(folder: Path) -> dict[str, Any]:
    """Every marked weight as comfy-kitchen dequantizes it to float32."""
    import torch
    from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout

    tensors, weights = read_tensors(folder), {}
    for name in [name for name in tensors if name.endswith(".comfy_quant")]:
        weight = name.replace(".comfy_quant", ".weight")
        assert json.loads(bytes(tensors[name].tolist())) == {"format": "nvfp4"}
        codes = tensors[weight]
        params = TensorCoreNVFP4Layout.Params(
            scale=tensors[f"{weight}_scale_2"],
            orig_dtype=torch.float32,
            orig_shape=(codes.shape[0], codes.shape[1] * 2),
            block_scale=tensors[f"{weight}_scale"],
        )
        weights[weight] = TensorCoreNVFP4Layout.dequantize(codes, params)
    return weights


def _restored(folder: Path, target: Path) -> dict[str, Any]:
    fp4convert("dequantize", folder, "-o", target, "--dtype", "fp32", "-q")
    return read_tensors(target)


def test_engine_decodes_the_weights_that_dequantize_writes(artifact: Path, tmp_path: Path) -> None:
    theirs, ours = _kitchens(artifact), _restored(artifact, tmp_path / "restored")
    assert len(theirs) == 14
    assert differing({name: ours[name] for name in theirs}, theirs) == []


def test_the_files_metadata_names_every_layer(artifact: Path) -> None:
    from safetensors import safe_open

    with safe_open(artifact / "model.safetensors", framework="pt") as shard:
        layers = json.loads(shard.metadata()["_quantization_metadata"])["layers"]
    marked = {
        name.removesuffix(".comfy_quant")
        for name in read_tensors(artifact)
        if name.endswith(".comfy_quant")
    }
    assert layers == {name: {"format": "nvfp4"} for name in marked}


def test_its_own_file_is_known_and_decoded(own: Path, tmp_path: Path) -> None:
    found = fp4convert_json("inspect", own)
    assert (found["dialect"], found["format"], found["nibble_order"]) == (
        "comfy",
        "nvfp4",
        "high_first",
    )
    assert found["tensors"]["quantized"] == 14
    assert found["healthy"]
    theirs, ours = _kitchens(own), _restored(own, tmp_path / "restored")
    assert differing({name: ours[name] for name in theirs}, theirs) == []


def test_its_own_file_goes_to_modelopt_and_back(own: Path, tmp_path: Path) -> None:
    fp4convert("transcode", own, "-o", tmp_path / "modelopt", "--dialect", "modelopt", "-q")
    before, after = (
        _restored(folder, tmp_path / f"fp32-{n}")
        for n, folder in enumerate((own, tmp_path / "modelopt"))
    )
    assert differing(before, after) == []
    fp4convert(
        "transcode", tmp_path / "modelopt", "-o", tmp_path / "back", "--dialect", "comfy", "-q"
    )
    mine, theirs = read_tensors(tmp_path / "back"), read_tensors(own)
    marks = [name for name in theirs if name.endswith(".comfy_quant")]
    assert (
        differing(
            {k: v for k, v in mine.items() if k not in marks},
            {k: v for k, v in theirs.items() if k not in marks},
        )
        == []
    )
