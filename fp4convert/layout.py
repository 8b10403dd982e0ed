"""Where block scales lie: the layouts that kernels read, written from and turned back into the linear one, byte for byte.

A layout of scales alone cuts the (rows, blocks a row) matrix of scale bytes into tiles and stores its axes in another order:

  linear     [row][block]
  128x4      [row / 128][block / 4][row % 32][row / 32 % 4][block % 4]   CUTLASS, cuBLAS, FlashInfer, vLLM
  8x4        [row / 8][block / 4][row % 8][block % 4]                    TensorRT-LLM, FlashInfer
  deepgemm   [block / 4][row][block % 4]                                 DeepGEMM: four bytes to an int32, MN-major
  k_major    [block][row]

and is padded with zeros to whole tiles.  Two more hold codes and scales in one tensor:

  interleaved  for every block its codes, then its scale byte
  appended     all codes, then all scale bytes

Sources: NVIDIA cuBLAS documentation, "1D block scaling factors layout" (128x4); FlashInfer, get_sf_out_offset_8x4; DeepGEMM,
get_mn_major_tma_aligned_packed_ue8m0_tensor.  This module knows bytes; which tensor holds them is a dialect's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import InputError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layout:
    """One order of scale bytes.

    rows, blocks  factors that a row and a block index are split into, fastest last; the first of each is what is left
    order         the axes (those of rows, then those of blocks) as they are stored, slowest first
    padding       rows and blocks are padded to multiples of these
    """

    name: str
    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    order: tuple[int, ...]
    padding: tuple[int, int]

    def padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape with its padding."""
        rows, blocks = (-(-size // multiple) * multiple for size, multiple in zip(shape, self.padding, strict=True))
        return rows, blocks

    def arrange(self, block_scales: Bytes) -> Bytes:
        """(rows, blocks) linear bytes -> the stored bytes, flat, with their padding."""
        padded = np.zeros(self.padded((block_scales.shape[0], block_scales.shape[1])), np.uint8)
        padded[: block_scales.shape[0], : block_scales.shape[1]] = block_scales
        return np.ascontiguousarray(padded.reshape(self._split(padded.shape)).transpose(self.order)).reshape(-1)

    def restore(self, stored: Bytes, shape: tuple[int, int]) -> Bytes:
        """The linear bytes of (rows, blocks) behind what `arrange` stored; raises InputError where the number is not that."""
        padded = self.padded(shape)
        if stored.size != math.prod(padded):
            detail = f"{stored.size} scale bytes; {self.name} has {math.prod(padded)} for {shape[0]} x {shape[1]}"
            raise InputError("scale-layout", detail)
        split = self._split(padded)
        axes = stored.reshape([split[axis] for axis in self.order]).transpose(np.argsort(self.order))
        return np.ascontiguousarray(axes.reshape(padded)[: shape[0], : shape[1]])

    def _split(self, padded: tuple[int, ...]) -> tuple[int, ...]:
        rows, blocks = padded
        return (rows // math.prod(self.rows), *self.rows, blocks // math.prod(self.blocks), *self.blocks)


LINEAR = Layout("linear", (), (), (0, 1), (1, 1))
LAYOUTS = {
    layout.name: layout
    for layout in (
        LINEAR,
        Layout("128x4", (4, 32), (4,), (0, 3, 2, 1, 4), (128, 4)),
        Layout("8x4", (8,), (4,), (0, 2, 1, 3), (8, 4)),
        Layout("deepgemm", (), (4,), (1, 0, 2), (4, 4)),
        Layout("k_major", (), (), (1, 0), (1, 1)),
    )
}
JOINED = ("interleaved", "appended")


def join(packed: Bytes, block_scales: Bytes, kind: str) -> Bytes:
    """Codes and scales of whole rows as one run of bytes.

    packed        (rows, columns / 2)
    block_scales  (rows, blocks), linear
    kind          interleaved: (rows, blocks * (bytes of a block + 1)); appended: flat
    """
    if kind == "appended":
        return np.concatenate([packed.reshape(-1), block_scales.reshape(-1)])
    rows, blocks = block_scales.shape
    return np.concatenate([packed.reshape(rows, blocks, -1), block_scales[..., None]], axis=-1).reshape(rows, -1)


def part(joined: Bytes, shape: tuple[int, int], block_nbytes: int, kind: str) -> tuple[Bytes, Bytes]:
    """What `join` joined: codes (rows, blocks * block_nbytes) and scales (rows, blocks) for a shape of (rows, blocks)."""
    rows, blocks = shape
    if joined.size != rows * blocks * (block_nbytes + 1):
        detail = f"{joined.size} bytes; {kind} has {rows * blocks * (block_nbytes + 1)} for {rows} x {blocks} blocks"
        raise InputError("scale-layout", detail)
    if kind == "appended":
        packed, block_scales = np.split(joined.reshape(-1), [rows * blocks * block_nbytes])
        return packed.reshape(rows, -1), block_scales.reshape(rows, blocks)
    whole = joined.reshape(rows, blocks, block_nbytes + 1)
    return np.ascontiguousarray(whole[..., :-1]).reshape(rows, -1), np.ascontiguousarray(whole[..., -1])
