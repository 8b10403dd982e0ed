"""Read INT8 matrices of files for ComfyUI.

  M.weight        I8   [rows, columns]
  M.weight_scale  F32  [], [rows] or [rows, 1], a multiplier
  M.comfy_quant   U8   {"format": "int8_tensorwise"}; with "convrot" the weights are rotated, too

A longer mark than that one may say so, and such a matrix is left unread; a mark of zeros is as long
as the one that it should have been. Source: ComfyUI, comfy/ops.py at 0271a46,
_load_quantized_module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.dialects.registry import COMFY_MARK
from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear, stored_beside
from fp4convert.numerics.codec import as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

PLAIN_NBYTES = len('{"format": "int8_tensorwise"}')


@dataclass(frozen=True, slots=True)
class Int8(CodingDefaults):
    """Signed bytes under one scale, or one for each row."""

    word = "int8"
    is_packed = True
    format = None

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True

    def weights(self, linear: Linear, source: Source) -> Weights:
        codes, scales = linear.refs
        columns = linear.shape[1]
        factors = np.frombuffer(source.read(scales), np.float32).reshape(-1, 1)

        def fetch(first: int, last: int) -> Matrix:
            stored = source.read_range(codes, first * columns, last * columns)
            values = np.frombuffer(stored, np.int8).reshape(-1, columns).astype(np.float32)
            return as_matrix(values * (factors[first:last] if len(factors) > 1 else factors))

        return FetchedWeights("F32", linear.shape, fetch)


def find_int8(tensors: Mapping[str, TensorRef]) -> dict[str, Linear]:
    """Find the matrices of INT8 whose mark is that of plain ones."""
    found: dict[str, Linear] = {}
    for name, mark in tensors.items():
        if not name.endswith(COMFY_MARK) or mark.nbytes > PLAIN_NBYTES:
            continue
        module = name.removesuffix(COMFY_MARK)
        refs = stored_beside(tensors, module, (WEIGHT, ".weight_scale"))
        if [ref.dtype for ref in refs] != ["I8", "F32"] or len(refs[0].shape) != 2:
            continue
        rows, columns = refs[0].shape
        if refs[1].shape in ((), (1,), (rows,), (rows, 1)):
            found[module] = Linear(module, (rows, columns), Int8(), refs, (mark,))
    return found
