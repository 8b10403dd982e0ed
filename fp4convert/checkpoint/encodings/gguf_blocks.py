"""Find and read matrices of GGUF's own types: Q8_0, Q4_K and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear
from fp4convert.checkpoint.encodings.floats import MATRIX_DIMENSIONS, STACK_DIMENSIONS
from fp4convert.numerics.codec import as_matrix
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.checkpoint_files import GGUF
from fp4convert.storage.gguf import BLOCK_TYPES, decode, shape_in_weights
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source


@dataclass(frozen=True, slots=True)
class GgufBlocks(CodingDefaults):
    """Whole rows of blocks.

    is_at_home  in a GGUF file, where they can stay
    """

    dtype: str
    is_at_home: bool
    is_packed = True
    is_gguf_type = True
    format = None

    @property
    def word(self) -> str:
        return self.dtype.lower()

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True

    def weights(self, linear: Linear, source: Source) -> Weights:
        ref = linear.refs[0]
        width = ref.nbytes // linear.shape[0]

        def fetch(first: int, last: int) -> Matrix:
            stored = source.read_range(ref, first * width, last * width)
            values = decode(stored, self.dtype).reshape(last - first, linear.shape[1])
            return as_matrix(np.ascontiguousarray(values))

        return FetchedWeights("F32", linear.shape, fetch)


def find_gguf_blocks(
    tensors: Mapping[str, TensorRef], rule_for: Callable[[str, tuple[int, ...]], StackRule | None]
) -> dict[str, Linear]:
    """Find matrices named ".weight", and those of stacks with a rule.

    The rule has one matrix for each expert, as llama.cpp stores them.
    """
    found: dict[str, Linear] = {}
    for ref in tensors.values():
        if ref.dtype not in BLOCK_TYPES or not ref.name.endswith(WEIGHT):
            continue
        shape = shape_in_weights(ref.dtype, ref.shape)
        if len(shape) == MATRIX_DIMENSIONS:
            module = ref.name.removesuffix(WEIGHT)
            found[module] = Linear(module, (shape[0], shape[1]), _coding(ref), (ref,))
        elif len(shape) == STACK_DIMENSIONS and (rule := rule_for(ref.name, shape)):
            found |= {linear.module: linear for linear in _split_stack(ref, rule)}
    return found


def _split_stack(ref: TensorRef, rule: StackRule) -> Iterator[Linear]:
    """Yield the matrix of every expert in a stack."""
    experts, rows, columns = shape_in_weights(ref.dtype, ref.shape)
    for number in range(experts):
        start = ref.start + number * (ref.nbytes // experts)
        part = ref._replace(name=f"{ref.name}[{number}]", shape=ref.shape[1:], start=start)
        module = rule.module(ref.name, number, rule.members[0])
        yield Linear(module, (rows, columns), _coding(ref), (part,), stack=ref)


def _coding(ref: TensorRef) -> GgufBlocks:
    return GgufBlocks(ref.dtype, ref.file.endswith(GGUF))
