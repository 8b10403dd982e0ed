"""Find and read the integers of GPTQ and of AWQ: 2, 4 or 8 bits, of AWQ 4.

  M.qweight  GPTQ: I32 [columns * bits / 32, rows], a word holds consecutive columns of a row
             AWQ:  I32 [columns, rows / 8], a word holds eight rows in the order 0 2 4 6 1 3 5 7
  M.qzeros   I32 [groups, rows * bits / 32], words as AWQ's; GPTQ's rows are in their order, and
             all but version 2 store one less
  M.scales   float [groups, rows]
  M.g_idx    I32 [columns], the group of each column; without it groups are consecutive

A weight is (code - zero) * scale.  Words of zeros are added to as a whole, as GPTQModel does: a
zero of 0 has borrowed from the next one.
Sources: GPTQModel 7.7 (utils/model.py, convert_gptq_v1_to_v2_format_module), AutoAWQ 0.2.9
(modules/linear/gemm.py), AutoRound 0.16 (inference/backend.py: packing_format).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.dialects.base import Clues, Json
from fp4convert.checkpoint.encodings.base import PACKED_DTYPE, CodingDefaults, Linear, stored_beside
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

CODES, SCALES, ZEROS, ORDER = ".qweight", ".scales", ".qzeros", ".g_idx"
WORD, WORD_BITS = np.dtype("<u4"), 32
Words = NDArray[np.uint32]
GPTQ, GPTQ_V2, AWQ = "gptq", "gptq_v2", "awq"
AUTOROUND = {"auto_gptq": GPTQ, "auto_awq": AWQ, "auto_round": GPTQ_V2, "gptqmodel": GPTQ_V2}
PACKINGS: dict[str, tuple[str, dict[str, str]]] = {  # quant_method -> key of a word; its layout
    "gptq": ("checkpoint_format", {"": GPTQ, "gptq": GPTQ, "gptq_v2": GPTQ_V2}),
    "awq": ("version", {"": AWQ, "gemm": AWQ}),
    "auto-round": ("packing_format", AUTOROUND),
}
BITS = {GPTQ: (2, 4, 8), GPTQ_V2: (2, 4, 8), AWQ: (4,)}
ROWS_OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # in a word, from the lowest bits


@dataclass(frozen=True, slots=True)
class Transposed(CodingDefaults):
    """Integers stored by columns, of which `group` share a scale."""

    layout: str
    bits: int
    group: int
    is_packed = True
    format = None

    @property
    def word(self) -> str:
        return f"{'awq' if self.layout == AWQ else 'gptq'} int{self.bits} {self.group}"

    @property
    def is_spread(self) -> bool:
        return True

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True

    def weights(self, linear: Linear, source: Source) -> Weights:
        read = cache(partial(self._read, linear, source))  # every panel needs all columns

        def fetch(first: int, last: int) -> Matrix:
            words, scales, zeros, groups = read()
            if self.layout == AWQ:
                codes = self._unpack(words, first, last)
            else:  # a word holds columns
                codes = self._unpack(words[:, first:last].T, 0, linear.shape[1]).T
            values = codes - self._unpack(zeros, first, last)[groups]
            values *= scales[groups, first:last]
            return as_matrix(np.ascontiguousarray(values.T))

        return FetchedWeights("F32", linear.shape, fetch)

    def _read(
        self, linear: Linear, source: Source
    ) -> tuple[Words, Float32s, Words, NDArray[np.int64]]:
        """Read the codes, the scales, the zeros and the group of each column."""
        dtypes = (WORD, FLOAT_DTYPES[linear.refs[1].dtype], WORD, WORD)
        codes, scales, zeros, *order = (
            np.frombuffer(source.read(ref), dtype).reshape(ref.shape)
            for ref, dtype in zip(linear.refs, dtypes, strict=False)
        )
        if self.layout == GPTQ:
            zeros = zeros + np.uint32(sum(1 << at for at in range(0, WORD_BITS, self.bits)))
        groups = order[0] if order else np.arange(linear.shape[1]) // self.group
        if groups.max(initial=0) >= len(scales):
            detail = f"{linear.refs[3].name} has the group {groups.max()}; expected fewer than"
            step = "Download the checkpoint again."
            raise InputError("scales-shape", f"{detail} {len(scales)}", step, linear.refs[3].name)
        return codes, scales.astype(np.float32), zeros, groups.astype(np.int64)

    def _unpack(self, words: Words, first: int, last: int) -> Float32s:
        """Return some of the integers in each row of words."""
        count = WORD_BITS // self.bits
        order = np.argsort(ROWS_OF_AWQ) if self.layout == AWQ else np.arange(count)
        begin, shifts = first // count, (order * self.bits).astype(np.uint32)
        found = (words[:, begin : -(-last // count), None] >> shifts) & ((1 << self.bits) - 1)
        found = found.reshape(len(words), -1)[:, first - begin * count : last - begin * count]
        return found.astype(np.float32)


def find_transposed(clues: Clues) -> dict[str, Linear]:
    """Find the matrices of GPTQ or AWQ in a layout that is read.

    The record names it.  A module whose tensors contradict that is left out: nothing here reads it.
    """
    layout, group = _layout_of(clues.record), clues.record.get("group_size")
    if layout is None or not isinstance(group, int):
        return {}
    found: dict[str, Linear] = {}
    for name in clues.tensors:
        module = name.removesuffix(CODES)
        refs = stored_beside(clues.tensors, module, (CODES, SCALES, ZEROS, ORDER))
        if name.endswith(CODES) and (linear := _linear(module, refs, layout, group)):
            found[module] = linear
    return found


def _layout_of(record: Json) -> str | None:
    """Return the layout that a record names; None: it is not read."""
    method = str(record.get("quant_method")).lower().removeprefix("intel/")
    key, layouts = PACKINGS.get(method, ("", {}))
    return layouts.get(str(record.get(key) or "").lower().removeprefix("auto_round:"))


def _linear(module: str, refs: tuple[TensorRef, ...], layout: str, group: int) -> Linear | None:
    """Return a matrix whose tensors fit together; None: they do not.

    The number of bits, of which some modules have others, follows from the zeros.
    """
    if len(refs) < 3 or any(len(ref.shape) != 2 for ref in refs[:3]):
        return None
    codes, scales, zeros, *order = refs
    groups, rows = scales.shape
    bits = zeros.shape[1] * WORD_BITS // rows if rows else 0
    if bits not in BITS[layout]:
        return None
    columns = codes.shape[0] if layout == AWQ else codes.shape[0] * WORD_BITS // bits
    group = columns if group == -1 else group
    across = rows * bits // WORD_BITS
    is_fit = (
        {codes.dtype, zeros.dtype, *(ref.dtype for ref in order)} == {PACKED_DTYPE}
        and scales.dtype in FLOAT_DTYPES
        and across * WORD_BITS == rows * bits
        and codes.shape[1] == (across if layout == AWQ else rows)
        and zeros.shape == (groups, across)
        and group > 0
        and groups == -(-columns // group)
        and all(ref.shape == (columns,) for ref in order)
    )
    coding = Transposed(layout, bits, group)
    return Linear(module, (rows, columns), coding, refs) if is_fit else None
