"""Tensors of an artifact, changed."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints import (
    pack_shard,
    read_shard,
)


def rewrite(folder: Path, file: str, name: str, data: bytes) -> None:
    """Replace the bytes of one tensor, its dtype and shape kept."""
    tensors = read_shard(folder / file)
    dtype, shape, before = tensors[name]
    assert len(data) == len(before)
    (folder / file).write_bytes(pack_shard({**tensors, name: (dtype, shape, data)}))


def forget_hashes(folder: Path) -> None:
    """Take the files out of an artifact's record, as if it had been made as it is now."""
    path = folder / "quantization_config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "files": {}}))
