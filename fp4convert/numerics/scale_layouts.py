"""Orders of block scales (linear, swizzled), and of nibbles.

An order cuts the (rows, blocks of a row) matrix of scale bytes into tiles and stores its axes in
another sequence:

  linear     [row][block]
  128x4      [row / 128][block / 4][row % 32][row / 32 % 4][block % 4]   CUTLASS, cuBLAS, vLLM
  8x4        [row / 8][block / 4][row % 8][block % 4]                    TensorRT-LLM, FlashInfer
  deepgemm   [block / 4][row][block % 4]                                 DeepGEMM: int32, MN-major
  k_major    [block][row]

and is padded with zeros to whole tiles. Two more layouts hold codes and scales in one tensor:
interleaved (for every block its codes, then its scale) and appended (all codes, then all scales).

Sources: NVIDIA cuBLAS documentation, "1D block scaling factors layout" (128x4); FlashInfer,
get_sf_out_offset_8x4; DeepGEMM, get_mn_major_tma_aligned_packed_ue8m0_tensor. This module knows
bytes; which tensor holds them is a dialect's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fp4convert.numerics.matrices import Blocks


class Layout(NamedTuple):
    """One order of scale bytes.

    rows, blocks  factors that a row's and a block's index are split into, slowest first, below what
                  is left of it
    order         the axes (what is left of rows, their factors, what is left of blocks, theirs) as
                  they are stored, slowest first
    padding       rows and blocks are padded to multiples of these
    """

    name: str
    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    order: tuple[int, ...]
    padding: tuple[int, int]

    def padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape with its padding."""
        rows, blocks = (-(-size // by) * by for size, by in zip(shape, self.padding, strict=True))
        return rows, blocks

    def arrange(self, block_scales: memoryview, shape: tuple[int, int]) -> memoryview:
        """Arrange (rows, blocks) linear bytes as stored, with their padding."""
        import numpy as np

        stored: memoryview = self.arrange_array(
            np.frombuffer(block_scales, np.uint8).reshape(shape), np
        ).data
        return stored

    def arrange_array(self, block_scales: Any, package: Any) -> Any:
        """Arrange a (rows, blocks) array of a package, NumPy or CuPy; flat."""
        rows, blocks = self.padded(block_scales.shape)
        more = (0, rows - block_scales.shape[0]), (0, blocks - block_scales.shape[1])
        padded = package.pad(block_scales, more)
        axes = padded.reshape(self._split((rows, blocks))).transpose(self.order)
        return package.ascontiguousarray(axes).reshape(-1)

    def restore_array(self, stored: Any, shape: tuple[int, int]) -> Any:
        """Restore the (rows, blocks) of what arrange_array made."""
        split = self._split(padded := self.padded(shape))
        tiles = stored.reshape([split[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(self.order))]
        return tiles.transpose(back).reshape(padded)[: shape[0], : shape[1]]

    def restore(self, stored: memoryview, shape: tuple[int, int]) -> memoryview:
        """Restore the linear bytes of (rows, blocks) that `arrange` stored."""
        import numpy as np

        return np.ascontiguousarray(self.restore_rows(stored, shape, 0, *shape)).reshape(-1).data

    def restore_rows(
        self, stored: memoryview, shape: tuple[int, int], first: int, last: int, blocks: int
    ) -> NDArray[np.uint8]:
        """Restore the first blocks of rows (first, last + 1), as a matrix.

        Only the tiles that hold them are copied. Raises InputError for another number of bytes.
        """
        import numpy as np

        padded = self.padded(shape)
        if stored.nbytes != math.prod(padded):
            detail = f"{stored.nbytes} scale bytes; expected {math.prod(padded)}, as {self.name}"
            raise InputError("scale-layout", f"{detail} has them for {shape[0]} x {shape[1]}")
        split = self._split(padded)
        stored_axes = np.frombuffer(stored, np.uint8).reshape([split[axis] for axis in self.order])
        tiles = stored_axes.transpose(np.argsort(self.order))
        height, width = math.prod(self.rows), math.prod(self.blocks)
        begin, end, across = first // height, -(-last // height), -(-blocks // width)
        held = tiles[(slice(begin, end), *[slice(None)] * len(self.rows), slice(across))]
        linear = held.reshape((end - begin) * height, across * width)
        return linear[first - begin * height : last - begin * height, :blocks]

    def restore_lazily(
        self, read: Callable[[], memoryview], shape: tuple[int, int]
    ) -> Callable[[int, int], memoryview]:
        """Return a reader of rows, which restores all when it is first asked."""
        linear = cache(lambda: self.restore(read(), shape))
        return lambda first, last: linear()[first * shape[1] : last * shape[1]]

    def _split(self, padded: tuple[int, ...]) -> tuple[int, ...]:
        down, across = padded[0] // math.prod(self.rows), padded[1] // math.prod(self.blocks)
        return down, *self.rows, across, *self.blocks


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
SCALE_LAYOUTS = (*LAYOUTS, "interleaved", "appended")  # all that a user can ask for, linear first


def arrange_scales(q: Blocks, layout: Layout) -> memoryview:
    """Arrange all block scales of a matrix, with their padding."""
    from fp4convert.numerics.matrices import row_panels

    linear = b"".join(q.scales(first, last) for first, last in row_panels(q.shape))
    return layout.arrange(memoryview(linear), (q.shape[0], q.shape[1] // q.format.block_size))


_SWAPPED = bytes(byte >> 4 | (byte & 15) << 4 for byte in range(256))


def interleave(*parts: tuple[memoryview, int]) -> memoryview:
    """Interleave parts: runs of so many bytes of each in turn."""
    import numpy as np

    runs = [np.frombuffer(part, np.uint8).reshape(-1, nbytes) for part, nbytes in parts]
    return np.concatenate(runs, axis=-1).reshape(-1).data


def split_runs(interleaved: memoryview, *sizes: int) -> list[memoryview]:
    """Split what `interleave` joined, of runs of so many bytes."""
    import numpy as np

    runs = np.frombuffer(interleaved, np.uint8).reshape(-1, sum(sizes))
    parts = np.split(runs, np.cumsum(sizes)[:-1], axis=1)
    return [np.ascontiguousarray(part).reshape(-1).data for part in parts]


def swap_nibbles(packed: memoryview) -> memoryview:
    """Swap bits 0-3 and 4-7 of each byte."""
    return memoryview(bytes(packed).translate(_SWAPPED))


def to_halves(packed: memoryview, nbytes: int) -> memoryview:
    """Rearrange pairs of neighbours as runs of `nbytes` bytes.

    The first half of a run's codes lies in bits 0-3, the second in bits 4-7.
    """
    import numpy as np

    pairs = np.frombuffer(packed, np.uint8).reshape(-1, nbytes)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 2 * nbytes)
    return np.ascontiguousarray(codes[:, :nbytes] | codes[:, nbytes:] << 4).reshape(-1).data


def from_halves(halves: memoryview, nbytes: int) -> memoryview:
    """Rearrange what `to_halves` made as it was before."""
    import numpy as np

    stored = np.frombuffer(halves, np.uint8).reshape(-1, nbytes)
    codes = np.concatenate([stored & 15, stored >> 4], axis=-1)
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1).data
