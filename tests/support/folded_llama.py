"""A small llama with every kind of fold, what its layers are given, and artifacts of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from calibrations import statistics_of, write_calibration
from checkpoints import FIRST, SECOND, Tensor, read_folder, run, values_of, write_checkpoint
from folding_llama import LLAMA, TENSORS
from made_up_inputs import correlated

from fp4convert.storage.open import open_source

LAYER = "model.layers.0"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.v_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
INPUTS = {
    maker: correlated(
        128 if maker == "self_attn.v_proj" else 96 if "up" in maker else 64, seed=len(maker)
    )
    for maker in READERS
}
Arrays = dict[str, np.ndarray]


def calibrated(folder: Path, path: Path, block: int = 0, **changes: np.ndarray) -> Path:
    """A calibration file with those inputs."""
    tensors: Arrays = {}
    for maker, readers in READERS.items():
        for reader in readers:
            tensors |= statistics_of(f"{LAYER}.{reader}", INPUTS[maker], block)
    return write_calibration(
        path,
        open_source(str(folder)),
        {**tensors, **changes},
        gram=f"block:{block}" if block else "diag",
    )


def write_source(folder: Path) -> Path:
    """A llama whose neighbours lie in different shards."""
    names = list(TENSORS)
    shards = {
        FIRST: {name: TENSORS[name] for name in names[::2]},
        SECOND: {name: TENSORS[name] for name in names[1::2]},
    }
    return write_checkpoint(folder, shards, LLAMA)


def made(
    source: Path, out: Path, method: str, calibration: Path, *options: object
) -> dict[str, Tensor]:
    """The artifact's tensors."""
    outcome = run(
        *("quantize", source, "--format", "nvfp4", "--scale-rule", "amax", "--method", method),
        *("--calibration", calibration, "-o", out, "-q", *options),
    )
    assert outcome.code == 0, outcome.err
    return read_folder(out)


def stored_weights() -> Arrays:
    """By short names, float32."""
    return {
        name.removeprefix(f"{LAYER}.").removesuffix(".weight"): values_of(tensor).astype(np.float32)
        for name, tensor in TENSORS.items()
    }


def changed(out: Path, folder: Path, name: str, change) -> Path:
    """A copy of the artifact in which one tensor is another, under hashes that are right."""
    folder.mkdir()
    for path in (path for path in out.iterdir() if path.is_file()):
        (folder / path.name).write_bytes(path.read_bytes())
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        length = int.from_bytes(data[:8], "little")
        if entry := json.loads(data[8 : 8 + length]).get(name):
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            data[first:last] = change(bytes(data[first:last]))
            shard.write_bytes(data)
    record = json.loads((folder / "quantization_config.json").read_text())
    record["files"] = {
        file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in record["files"]
    }
    (folder / "quantization_config.json").write_text(json.dumps(record))
    return folder


def doubled(place: int):
    """One bf16 number of a vector, twice as large: its exponent one more."""

    def change(data: bytes) -> bytes:
        values = np.frombuffer(data, "<u2").copy()
        values[place] += 0x80
        return values.tobytes()

    return change
