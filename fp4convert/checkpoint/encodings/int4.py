"""Find and read integers of compressed-tensors and of MLX.

Those of compressed-tensors have 4 or 8 bits, MLX's 2 to 6 or 8.

  M.weight_packed      I32 [rows, columns / 8]: column 8i + j in bits 4j..4j+3, 8 (of 8 bits: 128)
                       above its value
  M.weight_scale       float [rows, columns / group_size], or [rows, 1]
  M.weight_zero_point  I32 [rows / 8, groups], where integers are not symmetric: subtracted before
                       they are scaled
  M.weight_shape       I64 or I32 [2]: rows and columns

Source: compressed-tensors 0.20, compressors/pack_quantized.  Producers: Kimi K2, llm-compressor.

MLX stores scale * code + bias, of an artifact in four-bit floats the routers alone:

  M.weight U32 [rows, columns * bits / 32], M.scales and M.biases [rows, columns / group_size]

Source: mlx 0.32, mx.quantize, mode affine; mlx-lm 0.32, utils.py (quantize_model).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fp4convert.checkpoint.dialects.base import Clues, Json, Packed, json_object, schemes_of
from fp4convert.checkpoint.dialects.forms import Form, Granularity
from fp4convert.checkpoint.dialects.registry import MLX_KEYS
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.encodings.base import (
    PACKED_DTYPE,
    CodingDefaults,
    Linear,
    scales_missing,
    stored_beside,
)
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_matrix
from fp4convert.numerics.formats import FLOAT_TYPES, INT4
from fp4convert.numerics.fp8_int import Grid, read_zero_points
from fp4convert.numerics.matrices import FetchedWeights, Matrix, StoredRows, Weights, row_panels
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

PACKED, SCALE, ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"
SHAPE, ORDER = ".weight_shape", ".weight_g_idx"
INT4_IDLE = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
ITEM_BITS, ITEM_NBYTES, INT4_BITS = 32, 4, 4
OFFSETS, AFFINE_BITS = ".biases", (2, 3, 4, 5, 6, 8)  # of MLX


@dataclass(frozen=True, slots=True)
class Integers(CodingDefaults):
    """Integers of so many bits, `group` columns under one scale."""

    bits: int
    group: int
    has_zero_points: bool
    is_packed = True
    format = None

    @property
    def word(self) -> str:
        return f"int{self.bits} {self.group}"

    def weights(self, linear: Linear, source: Source) -> Weights:
        self.check(linear, source)
        stored = partial(self._stored, linear, source)
        return FetchedWeights("F32", linear.shape, partial(self._decode, linear, source), stored)

    def _decode(self, linear: Linear, source: Source, first: int, last: int) -> Matrix:
        """Return rows of integers times scales, as float32."""
        shape = last - first, linear.shape[1]
        codes, grid, zeros = self._read(linear, source, first, last)
        return as_matrix(Cpu().decode_integers(codes, shape, grid, self.bits, zeros))

    def _stored(self, linear: Linear, source: Source, first: int, last: int) -> StoredRows:
        codes, grid, zeros = self._read(linear, source, first, last)
        items = np.frombuffer(codes, np.uint8).reshape(last - first, -1, ITEM_NBYTES)
        scales, layout = native_grid(grid, (last - first, linear.shape[1]))
        taken_off = 0 if zeros is None else zeros
        return StoredRows(f"decode_int{self.bits}", (items, scales, taken_off, layout))

    def _read(
        self, linear: Linear, source: Source, first: int, last: int
    ) -> tuple[memoryview, Grid, Float32s | None]:
        """Read the codes, scales and zero points of rows."""
        packed, scales, *zero_points = linear.refs
        codes = _row_bytes(source, packed, first, last)
        values = _float_rows(source, scales, first, last)
        groups, zeros = scales.shape[1], None
        if zero_points:  # an item holds those of several rows
            count = ITEM_BITS // self.bits
            begin, end, width = first // count, -(-last // count), groups * ITEM_NBYTES
            items = source.read_range(zero_points[0], begin * width, end * width)
            rows = min(end * count, linear.shape[0]) - begin * count
            skipped = first - begin * count
            whole = read_zero_points(items, (rows, groups), self.bits)
            zeros = np.ascontiguousarray(whole[skipped : skipped + last - first])
        return codes, Grid(values, (1, self.group)), zeros

    def check(self, linear: Linear, source: Source) -> None:
        """Raise InputError where the stored shape, which engines read, is wrong."""
        stored = linear.idle[0]
        data = source.read_range(stored, 0, stored.nbytes)
        numbers = np.frombuffer(data, np.dtype(f"<i{stored.nbytes // 2}"))
        if tuple(numbers) != linear.shape:
            detail = f"{stored.file}: {stored.name} says {numbers.tolist()}, and the integers are"
            detail = f"{detail} of {list(linear.shape)}"
            raise InputError("packed-shape", detail, tensor=stored.name)

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        if self.bits != INT4_BITS or self.has_zero_points:
            return None
        scales = linear.refs[1]
        granularity: Granularity = "row" if self.group == linear.shape[1] else (1, self.group)
        return replace(
            form_of(target), format=INT4, granularity=granularity, stored_scales=scales.dtype
        )

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        self.check(linear, source)
        packed, scales = linear.refs
        for panel in row_panels(linear.shape):
            yield _row_bytes(source, packed, *panel), _row_bytes(source, scales, *panel)


def _row_bytes(source: Source, ref: TensorRef, first: int, last: int) -> memoryview:
    width = ref.nbytes // ref.shape[0]
    return source.read_range(ref, first * width, last * width)


def _float_rows(source: Source, ref: TensorRef, first: int, last: int) -> Float32s:
    """Return rows of scales or offsets as float32."""
    stored = np.frombuffer(_row_bytes(source, ref, first, last), np.uint8)
    return stored.view(FLOAT_DTYPES[ref.dtype]).reshape(last - first, -1).astype(np.float32)


def integers_of(packed: Packed) -> Integers:
    """Return the coding of a module of integers in an artifact."""
    granularity = packed.form.granularity
    group = granularity[1] if isinstance(granularity, tuple) else packed.shape[1]
    return Integers(INT4_BITS, group, has_zero_points=False)


def find_integers(clues: Clues) -> dict[str, Linear]:
    """Find every matrix of packed integers."""
    refs = {
        name.removesuffix(PACKED): ref
        for name, ref in clues.tensors.items()
        if name.endswith(PACKED) and ref.dtype == PACKED_DTYPE and len(ref.shape) == 2
    }
    if not refs:
        return {}
    bits = _declared_bits(clues.record, next(iter(refs.values())))
    return {module: _linear(module, ref, bits, clues) for module, ref in refs.items()}


def _linear(module: str, ref: TensorRef, bits: int, clues: Clues) -> Linear:
    rows, columns = ref.shape[0], ref.shape[1] * ITEM_BITS // bits
    if module + ORDER in clues.tensors:
        detail = (
            f"{ref.file}: {module} has a {ORDER[1:]}, by which its columns may have an order of"
            " their own; fp4convert undoes none, and does not look whether there is one"
        )
        raise InputError("unsaid-tensors", detail, tensor=module + ORDER)
    scales, shape, zeros = (clues.tensors.get(module + ending) for ending in (SCALE, SHAPE, ZERO))
    if scales is None or shape is None:
        missing = module + (SCALE if scales is None else SHAPE)
        detail = f"{ref.file}: {ref.name} has packed integers, and {missing} is missing"
        raise scales_missing(detail, missing)
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    zeros_shape = -(-rows * bits // ITEM_BITS), groups
    is_fit = (
        scales.dtype in FLOAT_DTYPES
        and scales.shape == (rows, groups)
        and groups
        and columns % groups == 0
        and (zeros is None or (zeros.dtype, zeros.shape) == ("I32", zeros_shape))
        and shape.shape == (2,)
        and shape.dtype in ("I64", "I32")
    )
    refs = (scales, *([zeros] if zeros else []))
    if not is_fit:
        listed = (scales, shape, *refs[1:])
        found = ", ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in listed)
        detail = (
            f"{ref.file}: beside {ref.name} {list(ref.shape)} of {bits}-bit integers stand {found};"
            " expected a scale for each group of columns"
        )
        next_step = "Start from the original weights."
        raise InputError("scales-shape", detail, next_step, scales.name)
    coding = Integers(bits, columns // groups, zeros is not None)
    idle = (shape, *stored_beside(clues.tensors, module, INT4_IDLE))
    return Linear(module, (rows, columns), coding, (ref, *refs), idle)


def _declared_bits(record: Json, ref: TensorRef) -> int:
    """Read the number of bits from the record: 4 or 8."""
    schemes = [json_object(scheme.get("weights")) for scheme in schemes_of(record)]
    declared = {scheme.get("num_bits") for scheme in schemes if scheme.get("type") == "int"}
    if len(declared) != 1 or not declared <= {4, 8}:
        detail = (
            f"{ref.file}: {ref.name} holds packed integers, and config.json gives"
            f" {sorted(map(str, declared))} for num_bits; expected one group of 4 or of 8"
        )
        raise InputError("packed-bits", detail, tensor=ref.name)
    return 4 if declared == {4} else 8


@dataclass(frozen=True, slots=True)
class Affine(CodingDefaults):
    """MLX's codes: a stream of bits, the first code in the lowest ones."""

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
            stored = np.frombuffer(_row_bytes(source, codes, first, last), np.uint8)
            if self.bits == 4:
                stored = np.stack((stored & 15, stored >> 4), axis=-1)
            elif self.bits != 8:
                digits = np.unpackbits(stored, bitorder="little").reshape(-1, self.bits)
                stored = np.packbits(digits, axis=1, bitorder="little")
            scales, biases = (_float_rows(source, ref, first, last) for ref in numbers)
            grouped = stored.reshape(last - first, scales.shape[1], -1).astype(np.float32)
            values = scales[..., None] * grouped + biases[..., None]
            return as_matrix(values.reshape(last - first, linear.shape[1]))

        return FetchedWeights("F32", linear.shape, fetch)


def find_affine(clues: Clues) -> dict[str, Linear]:
    """Find the modules with the bits and group size that config.json gives.

    It gives those of one module under its name, and those of all others.  A module whose tensors
    contradict it is left out: nothing here reads it.
    """
    said = [numbers for key in MLX_KEYS if isinstance(numbers := clues.config.get(key), dict)]
    found: dict[str, Linear] = {}
    for name in clues.tensors if said else ():
        module = name.removesuffix(OFFSETS)
        numbers = said[0].get(module, said[0])
        if not name.endswith(OFFSETS) or not isinstance(numbers, dict):
            continue
        refs = stored_beside(clues.tensors, module, (WEIGHT, ".scales", OFFSETS))
        bits, size = numbers.get("bits"), numbers.get("group_size")
        is_affine = numbers.get("mode", "affine") == "affine"
        if not is_affine or len(refs) < 3 or bits not in AFFINE_BITS or not isinstance(size, int):
            continue
        codes, scales, biases = refs
        is_fit = (
            codes.dtype == "U32"
            and {scales.dtype, biases.dtype} <= FLOAT_TYPES.keys()
            and len(codes.shape) == len(scales.shape) == MATRIX_DIMENSIONS
            and scales.shape == biases.shape
        )
        if not is_fit:
            continue
        shape = codes.shape[0], codes.shape[1] * ITEM_BITS // bits
        if shape == (scales.shape[0], scales.shape[1] * size):
            found[module] = Linear(module, shape, Affine(bits), refs)
    return found
