"""Sources in bf16 whose cache of keys and values alone is quantized: they convert, and the scales
are carried or left out, and never stand there twice.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import LAYER, LLAMA, SECOND, done, llama_shards, read_folder, write_checkpoint

VALUE = np.array([0.25], np.float32).tobytes()
ATTENTION = f"{LAYER}.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CT = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale", (1,)),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale", ()),
}


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("record", [CT, MODELOPT, None], ids=["ct", "modelopt", "none"])
def test_scales_of_the_cache_are_carried_once_or_left_out(record, dialect, tmp_path):
    shards = llama_shards()
    source = "modelopt" if record is MODELOPT else "compressed-tensors"
    *endings, shape = NAMES[source]
    shards[SECOND] |= {f"{ATTENTION}.{ending}": ("F32", shape, VALUE) for ending in endings}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = {**LLAMA, **heads, "num_hidden_layers": 1}
    if record:
        config["quantization_config"] = record
    folder = write_checkpoint(tmp_path / "source", shards, config)
    words = ("quantize", folder, "--format", "nvfp4", "--dialect", dialect)
    done(*words, "--kv-cache", "fp8", "-o", tmp_path / "kept")
    made = read_folder(tmp_path / "kept")
    *endings, shape = NAMES[dialect]
    scales = {name: tensor[1:] for name, tensor in made.items() if name[-8:-5] in (".k_", ".v_")}
    assert {name: np.prod(size, dtype=int) for name, (size, _) in scales.items()} == {
        f"{ATTENTION}.{ending}": 1 for ending in endings
    }
    assert {data for _, data in scales.values()} == {VALUE}
    record = json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]
    assert record["kv_cache_scheme"]["num_bits"] == 8
    told = done(*words, "-o", tmp_path / "without", "--json").json["warnings"]
    assert any("cache" in line for line in told), told
    assert not any(".k_scale" in name for name in read_folder(tmp_path / "without"))
