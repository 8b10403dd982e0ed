"""Read the experts that ModelOpt leaves in stacks.

  M.weight            U8       [experts, rows, columns / 2]: Step 3.7, as its checkpoint stacks them
  M.weight_scale      F8_E4M3  [experts, rows, columns / 16]
  M.weight_scale_2    F32      [experts]; M.input_scale the same

  M                   U8       [experts, columns / 2, rows]: parameters of x @ M, stored across
  M_weight_scale      F8_E4M3  [experts, columns / 16, rows]
  M_weight_scale_2    F32      []; M_input_scale the same

M is "X.gate_up_proj" or "X.down_proj", gate above up; where the stack has a bias (gpt-oss) their
rows take turns, as in its class. A stack that lies across has the shape (experts, 1, rows,
columns) here. Modules are X.N.gate_proj, or X.experts.N.gate_proj where X is no "experts".
Source: ModelOpt 0.47, torch/export/unified_export_hf.py; vLLM 0.33, models/step3p5.py and
models/llama4.py.  Readers: vLLM; TensorRT-LLM, which takes stacks apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.dialects.base import whole
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS, STACK_DIMENSIONS, Rows, Slot
from fp4convert.checkpoint.dialects.tables import (
    SCALAR_NBYTES,
    Read,
    Table,
    decode_scalar,
    whole_blocks,
)
from fp4convert.numerics.matrices import Blocks, Fetched, Span
from fp4convert.storage.safetensors import TensorRef, TensorSpec

ACROSS = "_weight_scale"
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}


class Stacks(NamedTuple):
    """The functions of a dialect whose matrices may be stacks.

    table  of single matrices
    """

    table: Table

    def find(self, tensors: Mapping[str, TensorRef]) -> list[str]:
        """Find the stacks that lie across."""
        stems = (name.removesuffix(ACROSS) for name in tensors if name.endswith(ACROSS))
        return [
            stem
            for stem in stems
            if (ref := tensors.get(stem)) and ref.dtype == "U8" and len(ref.shape) > 2
        ]

    def stored_shape(self, stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        if len(packed.shape) != STACK_DIMENSIONS or not form.format.is_fp4:
            return self.table.stored_shape(stem, packed, form)
        experts, rows, columns = packed.shape
        if packed.name == stem:
            return whole_blocks((experts, 1, columns, rows * 2), form)
        return whole_blocks((experts, rows, columns * 2), form)

    def slots(self, stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        if len(shape) == MATRIX_DIMENSIONS:
            return whole(stem, shape)
        parent, _, leaf = stem.rpartition(".")
        members = FUSED.get(leaf, (leaf,))
        above = parent if parent.endswith("experts") else f"{parent}.experts"
        height = shape[-2] // len(members)
        return tuple(
            (Rows(f"{above}.{number}.{member}", 0, height),)
            for number in range(shape[0])
            for member in members
        )

    def outputs(self, stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        if len(shape) == MATRIX_DIMENSIONS:
            return self.table.outputs(stem, shape, form)
        experts, *_, rows, columns = shape
        codes, blocks = columns // 2, columns // form.format.block_size
        dtype = self.table.scale_dtypes[form.format]
        scalars = self.table.scalars.specs("", form)
        if len(shape) == STACK_DIMENSIONS:
            return (
                TensorSpec(f"{stem}.weight", "U8", (experts, rows, codes)),
                TensorSpec(f"{stem}.weight_scale", dtype, (experts, rows, blocks)),
                *(spec._replace(name=stem + spec.name, shape=(experts,)) for spec in scalars),
            )
        return (
            TensorSpec(stem, "U8", (experts, codes, rows)),
            TensorSpec(stem + ACROSS, dtype, (experts, blocks, rows)),
            *(spec._replace(name=f"{stem}_{spec.name[1:]}") for spec in scalars),
        )

    def decode(self, stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        if len(shape) == MATRIX_DIMENSIONS:
            return self.table.decode(stem, shape, form, read)
        experts, *_, rows, columns = shape
        scalars = None
        if len(shape) == STACK_DIMENSIONS:
            found = self.table.decode(stem, shape, form, _first_scalar(read))
            if not isinstance(found, Fetched) or not form.format.has_global_scale:
                return found
            scalars = read(f"{stem}.weight_scale_2")

            def scale_of(row: int) -> float:
                begin = row // rows * SCALAR_NBYTES
                return decode_scalar(scalars[begin : begin + SCALAR_NBYTES])

            return found._replace(scale_of=scale_of)
        codes, scales = read(stem), read(stem + ACROSS)
        half, blocks = columns // 2, columns // form.format.block_size

        def fetch_scales(first: int, last: int) -> memoryview:
            return _turned(scales, (blocks, rows), first, last)

        def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
            return _turned(codes, (half, rows), first, last), fetch_scales(first, last)

        multiplier = None
        if form.format.has_global_scale:
            multiplier = decode_scalar(read(f"{stem}_weight_scale_2"))
        matrix = (experts * rows, columns)
        return Fetched(form.format, matrix, multiplier, "multiplier", fetch, fetch_scales)


def _first_scalar(read: Read) -> Read:
    """Return a reader that gives the first of a stack's scalars."""

    def first(name: str) -> Span:
        return read(name)[:SCALAR_NBYTES] if name.endswith(".weight_scale_2") else read(name)

    return first


def _turned(stored: Span, shape: tuple[int, int], first: int, last: int) -> memoryview:
    """Return rows of matrices that are stored across, one below the other.

    shape  of a stored matrix: (bytes of a row, rows)
    """
    width, rows = shape
    parts = []
    for number in range(first // rows, -(-last // rows)):
        begin, size = number * rows, math.prod(shape)
        whole_matrix = np.frombuffer(stored[number * size : (number + 1) * size], np.uint8)
        part = slice(max(first - begin, 0), min(last - begin, rows))
        parts.append(whole_matrix.reshape(width, rows)[:, part].T.tobytes())
    return memoryview(b"".join(parts))
