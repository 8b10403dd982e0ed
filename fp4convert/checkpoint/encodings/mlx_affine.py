"""Find and read MLX's integers of 4 or 8 bits, as routers have them.

  M.weight U32 [rows, columns * bits / 32], M.scales and M.biases [rows, columns / group_size]
  value = scale * code + bias

Source: mlx 0.32, mx.quantize, mode affine; mlx-lm 0.32, quant_predicate of Qwen3-MoE.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear
from fp4convert.checkpoint.encodings.floats import MATRIX_DIMENSIONS
from fp4convert.numerics.codec import FLOAT_DTYPES, as_matrix
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

KEYS = ("quantization", "quantization_config")  # of config.json, by module where they differ


@dataclass(frozen=True, slots=True)
class Affine(CodingDefaults):
    """Codes of so many bits, the first of a word in its lowest ones."""

    bits: int
    is_packed = True
    format = None

    @property
    def word(self) -> str:
        return f"int{self.bits} of MLX"

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True

    def weights(self, linear: Linear, source: Source) -> Weights:
        codes, *numbers = linear.refs

        def fetch(first: int, last: int) -> Matrix:
            stored = _rows(source, codes, first, last).view(np.uint8)
            if self.bits == 4:
                stored = np.stack((stored & 15, stored >> 4), axis=-1).reshape(last - first, -1)
            scales, biases = (
                _rows(source, ref, first, last).view(FLOAT_DTYPES[ref.dtype]).astype(np.float32)
                for ref in numbers
            )
            grouped = stored.reshape(last - first, scales.shape[1], -1).astype(np.float32)
            values = scales[..., None] * grouped + biases[..., None]
            return as_matrix(values.reshape(last - first, linear.shape[1]))

        return FetchedWeights("F32", linear.shape, fetch)


def _rows(source: Source, ref: TensorRef, first: int, last: int) -> NDArray[np.uint8]:
    width = ref.nbytes // ref.shape[0]
    stored = source.read_range(ref, first * width, last * width)
    return np.frombuffer(stored, np.uint8).reshape(last - first, width)


def find_affine(clues: Clues) -> dict[str, Linear]:
    """Find the modules that config.json names with bits and a group size.

    What its tensors contradict is left: it is quantized in a way that nobody reads.
    """
    said = [numbers for key in KEYS if isinstance(numbers := clues.config.get(key), dict)]
    found: dict[str, Linear] = {}
    for module, numbers in said[0].items() if said else ():
        if not isinstance(numbers, dict) or numbers.get("mode", "affine") != "affine":
            continue
        names = (module + WEIGHT, f"{module}.scales", f"{module}.biases")
        refs = tuple(ref for name in names if (ref := clues.tensors.get(name)))
        bits, size = numbers.get("bits"), numbers.get("group_size")
        if len(refs) < len(names) or bits not in (4, 8) or not isinstance(size, int):
            continue
        codes, scales, biases = refs
        is_fit = (
            codes.dtype == "U32" and scales.dtype in FLOAT_TYPES and biases.dtype in FLOAT_TYPES
        )
        is_fit = is_fit and len(codes.shape) == len(scales.shape) == MATRIX_DIMENSIONS
        if not is_fit or scales.shape != biases.shape:
            continue
        shape = codes.shape[0], codes.shape[1] * 32 // bits
        if (shape[0], shape[1]) == (scales.shape[0], scales.shape[1] * size):
            found[module] = Linear(module, shape, Affine(bits), refs)
    return found
