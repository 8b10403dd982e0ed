"""Tensors of an artifact, changed."""

from __future__ import annotations

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
