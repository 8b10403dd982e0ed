"""Packed sources and stacks of experts from the Hub: what comes over the network becomes what the
folder becomes, to the byte.
"""

import json

import numpy as np
import pytest
from checkpoints import FIRST, SECOND, Tensor, bf16, read_folder, run, write_checkpoint

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"
ROWS, COLUMNS = 1536, 2048  # a matrix takes several pieces of a stream
NAMES = [f"{LAYER}.{leaf}_proj" for leaf in ("self_attn.q", "mlp.gate", "mlp.up", "mlp.down")]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def random_bytes(nbytes: int, highest: int = 0x7E) -> bytes:
    return np.random.default_rng(5).integers(0, highest, nbytes, np.uint8).tobytes()


def floats(*shape: int) -> bytes:
    return np.random.default_rng(6).random(shape, np.float32).tobytes()


def fp8_shards() -> dict[str, dict[str, Tensor]]:
    """Codes before and behind their scales, and in another shard than these."""
    code = ("F8_E4M3", (ROWS, COLUMNS), random_bytes(ROWS * COLUMNS))
    codes: dict[str, Tensor] = {f"{name}.weight": code for name in NAMES}
    scale = ("F32", (12, 16), floats(12, 16))
    scales: dict[str, Tensor] = {f"{name}.weight_scale_inv": scale for name in NAMES}
    first = {name: codes[name] for name in list(codes)[:2]} | dict(list(scales.items())[:3])
    second = dict(list(scales.items())[3:]) | {name: codes[name] for name in list(codes)[2:]}
    return {FIRST: first, SECOND: second}


def stack_shards() -> dict[str, dict[str, Tensor]]:
    """gpt-oss: transposed, gate and up in turns."""
    shapes = {"gate_up_proj": (3, 512, 2048), "down_proj": (3, 1024, 512)}
    return {
        file: {f"{EXPERTS}.{leaf}": ("BF16", shape, bf16(*shape, seed=7))}
        for file, (leaf, shape) in zip((FIRST, SECOND), shapes.items(), strict=True)
    }


def mxfp4_shards() -> dict[str, dict[str, Tensor]]:
    """gpt-oss as it is published: blocks in one shard, scales in the other."""
    blocks = ("U8", (4, 1024, 16, 16), random_bytes(4 * 1024 * 256, 256))
    scales = (np.random.default_rng(8).integers(115, 125, 4 * 1024 * 16, np.uint8)).tobytes()
    return {
        FIRST: {f"{EXPERTS}.gate_up_proj_blocks": blocks},
        SECOND: {f"{EXPERTS}.gate_up_proj_scales": ("U8", (4, 1024, 16), scales)},
    }


FP8 = {"model_type": "llama", "quantization_config": BLOCKS}
MXFP4 = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
SOURCES = {
    "fp8": (fp8_shards, FP8, ("--exclude", "*q_proj")),
    "stacks": (stack_shards, {"model_type": "gpt_oss", "hidden_size": 512}, ()),
    "mxfp4": (mxfp4_shards, MXFP4, ()),
}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_from_the_hub_becomes_what_its_folder_becomes(name, format, hub, tmp_path):
    make, config, options = SOURCES[name]
    folder = write_checkpoint(tmp_path / "m", make(), config)
    hub.add("org/m", folder)
    digests = set()
    for source, out in ((folder, "local"), ("org/m", "hub")):
        outcome = run("quantize", source, "--format", format, "-o", tmp_path / out, *options)
        assert outcome.code == 0, outcome.err
        digests.add(files_digest(tmp_path / out))
    assert len(digests) == 1


def test_stacks_come_back_from_the_hub_as_from_a_folder(hub, tmp_path):
    make, config, options = SOURCES["stacks"]
    folder = write_checkpoint(tmp_path / "m", make(), config)
    assert run("quantize", folder, "--format", "mxfp4", "-o", tmp_path / "a", *options).code == 0
    hub.add("org/a", tmp_path / "a")
    for source, out in ((tmp_path / "a", "local"), ("org/a", "hub")):
        outcome = run("dequantize", source, "-o", tmp_path / out, "-q")
        assert outcome.code == 0, outcome.err
    local, streamed = (read_folder(tmp_path / out) for out in ("local", "hub"))
    assert local == streamed
    stored = {name: each for tensors in make().values() for name, each in tensors.items()}
    assert {name: each[:2] for name, each in local.items()} == {
        name: each[:2] for name, each in stored.items()
    }


def files_digest(folder):
    """All files but our state and where the weights came from, as one value."""
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.*")) if path.is_file()}
    record = {**json.loads(files.pop("quantization_config.json")), "source": None}
    return tuple(files.items()), json.dumps(record)
