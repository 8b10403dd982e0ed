"""What a look at a repository costs: headers and a sample, however large it is."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import pack_header
from hub_cases import ask

LAYERS, EXPERTS, ROWS, COLUMNS = 36, 128, 8192, 16384
LEAVES = ("down_proj", "gate_proj", "up_proj")
PARTS = {
    "weight_global_scale": ("F32", [1]),
    "weight_packed": ("U8", [ROWS, COLUMNS // 2]),
    "weight_scale": ("F8_E4M3", [ROWS, COLUMNS // 16]),
}


def write_layer(path: Path, layer: int) -> dict[str, int]:
    """A sparse shard as compressed-tensors names it, zero but for its global scales; returns the
    size of each tensor.
    """
    listed, sizes, scales = {}, {}, []
    end = 0
    experts = f"model.layers.{layer}.mlp.experts"
    for module in (f"{experts}.{expert}.{leaf}" for expert in range(EXPERTS) for leaf in LEAVES):
        for part, (dtype, shape) in PARTS.items():
            name, nbytes = f"{module}.{part}", int(np.prod(shape)) * (4 if dtype == "F32" else 1)
            offsets = [end, end + nbytes]
            listed[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            sizes[name] = nbytes
            scales += [end] if dtype == "F32" else []
            end += nbytes
    header = pack_header(json.dumps(listed).encode())
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + end)
        for at in scales:
            stream.seek(len(header) + at)
            stream.write(np.float32(2688.0).tobytes())
    return sizes


@pytest.fixture
def huge(tmp_path):
    """A terabyte of codes and scales that takes little disk."""
    folder = tmp_path / "huge"
    folder.mkdir()
    weight_map, total = {}, 0
    for layer in range(LAYERS):
        file = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"
        sizes = write_layer(folder / file, layer)
        weight_map.update(dict.fromkeys(sizes, file))
        total += sum(sizes.values())
    assert total > 1e12
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    record = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
    }
    record["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mixtral", "quantization_config": record})
    )
    return folder


def test_a_terabyte_costs_at_most_50_megabytes(hub, huge):
    hub.add("org/huge", huge)
    document = ask("inspect", "org/huge", "--json").json
    assert document["tensors"] == {"quantized": LAYERS * EXPERTS * len(LEAVES), "other": 0}
    assert 0 < document["share_read"] < 0.001
    assert document["findings"] == []
    assert hub.sent_nbytes() <= 50e6
    assert len(hub.seen) < 1000
