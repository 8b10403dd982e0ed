"""Find and read E4M3 codes under scales of blocks, rows or the whole.

  M.weight            F8_E4M3  [rows, columns]
  M.weight_scale_inv  [rows / 128, columns / 128], a multiplier whatever its name says: DeepSeek V3,
                      Kimi, MiniMax, Qwen
  M.scale             the same, F8_E8M0 in DeepSeek V4
  M.weight_scale      F32 or BF16, [] or [1] of the whole, [rows] or [rows, 1] of rows, or of
                      blocks: compressed-tensors, ModelOpt
  M.weight_scale      [rows / 128, 1, columns / 128, 1]: ModelOpt's FP8_PB_WO
  M.weight_scale      U8, E8M0 [rows, columns / 32]: MXFP8
  M.scale_weight      F32 [] of the whole: files for ComfyUI
  M.qscale_weight     float [] of the whole: Mistral's own files, whose record is in params.json
  T.weight_scale      F32 [] of a table of n-grams, whose rows are in T.shard_N.weight: Qwen4-Exp;
                      it stays, and ple_embedding_dtype in config.json tells engines (vLLM 0.33)

The record has the size of a block: weight_block_size, or block_structure or group_size of a group
of compressed-tensors. Where ranks of tensor parallelism made a fused matrix, each has blocks of its
own, whose last may be cut (MiMo V2.5: 8 x 27 rows of scales). Codes without a record, and without
any float beside them, are values themselves.
Source: transformers 5.23, integrations/finegrained_fp8; compressed-tensors 0.20, compressors;
ModelOpt 0.47, torch/export; vllm-project/vllm pulls 39293 and 53242.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Clues, Json, Packed, positive_pair, schemes_of
from fp4convert.checkpoint.dialects.forms import Form, Granularity
from fp4convert.checkpoint.dialects.target_forms import fp8_form
from fp4convert.checkpoint.encodings.base import (
    CACHE_SCALES,
    CodingDefaults,
    Linear,
    check_scales_finite,
    input_scale_of,
    scales_missing,
    scales_not_finite,
    stored_beside,
)
from fp4convert.checkpoint.record import TABLE
from fp4convert.checkpoint.unread import UNSAID_ENDINGS, find_beside
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, as_matrix, decode_e8m0
from fp4convert.numerics.formats import FP8, MXFP8, Format
from fp4convert.numerics.fp8_int import FP8_DTYPES, Grid, encode_e8m0
from fp4convert.numerics.fp8_rounding import Block
from fp4convert.numerics.matrices import (
    Matrix,
    RowReader,
    StoredReader,
    StoredRows,
    Weights,
    row_panels,
)
from fp4convert.numerics.scale_layouts import LAYOUTS, LINEAR
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

E8M0_DTYPES = ("F8_E8M0", "U8")
SCALE_DTYPES = (*FLOAT_DTYPES, *E8M0_DTYPES)
SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".scale_weight", ".qscale_weight")
IDLE = (
    *(".input_scale", ".activation_scale", ".scale_input", ".qscale_act"),
    *(".k_scale", ".v_scale", ".output_scale"),
)
# Of activations, of a cache, and of an embedding's output.
OTHER_SCALE = re.compile(r"act|input|output|embed|prob|_[qkv]_|[._](?:[qkv]|kv|in|out|x|y)_")
BIAS = "bias"  # ends e_score_correction_bias, too
BITS = 8
RANKS = (2, 4, 8, 16, 32)  # of tensor parallelism
DECODED_BY_GPU = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Fp8(CodingDefaults):
    """E4M3 or E5M2 codes under a scale for each block.

    block     rows and columns that share a scale
    layout    of the scales
    artifact  whose records describe it; None: the names of tensors do
    ranks     equal parts of the rows, with blocks of their own
    is_at_home  engines read it in any dialect: a table of n-grams
    """

    word: str
    block: Block
    layout: str = "linear"
    format: Format = FP8
    artifact: Artifact | None = field(default=None, compare=False, repr=False)
    ranks: int = 1
    is_at_home: bool = False
    is_packed = True

    def weights(self, linear: Linear, source: Source) -> Weights:
        codes, *scales = linear.refs
        return _Scaled(source, codes, linear.shape, self, *scales)

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return linear.refs[0].dtype == "F8_E5M2"

    def check(self, linear: Linear, source: Source) -> None:
        """Raise NumericError for a table that stays, under a scale of no use."""
        if self.is_at_home and (fault := fault_of_table(source, linear.refs[1])):
            raise scales_not_finite(linear.module, fault)

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        codes, *scales = linear.refs
        if (
            codes.dtype == "F8_E5M2" or not scales or self.ranks > 1
        ):  # words of several codes are E4M3
            return None
        if self.format is MXFP8:
            return fp8_form(target, self.block, "U8", MXFP8)
        words: dict[Block, Granularity] = {(1, linear.shape[1]): "row"}
        if len(scales[0].shape) < 2:  # a matrix of one block has a scale for each of its dimensions
            words[linear.shape] = "tensor"
        granularity = words.get(self.block, self.block)
        stored = scales[0].dtype
        return fp8_form(target, granularity, stored, is_static=input_scale_of(linear) is not None)

    def kept(
        self, linear: Linear, source: Source, form: Form
    ) -> Iterator[tuple[memoryview, memoryview]]:
        codes, scales = linear.refs
        for part in row_panels(linear.shape):
            stored = source.read_range(codes, *(row * linear.shape[1] for row in part))
            yield stored, memoryview(b"")
        rows = self.read_scales(source, scales, linear.shape, (0, linear.shape[0]))
        check_scales_finite(linear, rows.scales)
        yield memoryview(b""), as_stored(rows.scales, form)

    def read_scales(
        self, source: Source, ref: TensorRef, shape: tuple[int, int], rows: tuple[int, int]
    ) -> Grid:
        """Read the scales of rows (first, end) of a matrix of that shape."""
        height, width = (min(own, whole) for own, whole in zip(self.block, shape, strict=True))
        across, (first, last) = -(-shape[1] // width), rows
        if self.ranks > 1:
            every = decode_scales(source.read_range(ref, 0, ref.nbytes), ref.dtype)
            own = shape[0] // self.ranks  # rows of a rank
            at = np.arange(first, last)
            blocks = at // own * -(-own // height) + at % own // height
            return Grid(every.reshape(-1, across)[blocks], (1, width))
        above, below = first // height, -(-last // height)
        is_arranged = self.layout in LAYOUTS and self.layout != LINEAR.name
        if is_arranged and len(ref.shape) == 2 and across > 1:
            size = (-(-shape[0] // height), across)
            stored = LAYOUTS[self.layout].restore(source.read_range(ref, 0, ref.nbytes), size)
            part = stored[above * across : below * across]
        else:
            item = ref.nbytes // ref.elements
            part = source.read_range(ref, *(at * across * item for at in (above, below)))
        scales = decode_scales(part, ref.dtype).reshape(-1, across)
        return Grid(scales, (height, width), first - above * height)


@dataclass(frozen=True, slots=True)
class _Scaled(RowReader):
    """Codes times scales, as float32."""

    source: Source
    codes: TensorRef
    shape: tuple[int, int]
    coding: Fp8
    scales: TensorRef | None = None
    dtype = "F32"

    @property
    def kind(self) -> str:
        """Return the dtype of the codes; words of several are E4M3."""
        return self.codes.dtype if self.codes.dtype in FP8_DTYPES else DECODED_BY_GPU

    def rows(self, first: int, last: int) -> Matrix:
        shape = (last - first, self.shape[1])
        grid = self._grid(first, last)
        return as_matrix(Cpu().decode_fp8(self._codes(first, last), shape, grid, self.kind))

    def amaxes(self) -> Iterator[float] | None:
        columns, dtype = self.shape[1], self.kind
        panels = (
            (self._codes(*panel), (panel[1] - panel[0], columns), self._grid(*panel))
            for panel in row_panels(self.shape)
        )
        return (Cpu().amax_fp8(*panel, dtype) for panel in panels)

    def stored_reader(self) -> StoredReader | None:
        return self._stored if self.kind == DECODED_BY_GPU else None

    def _stored(self, first: int, last: int) -> StoredRows:
        shape = (last - first, self.shape[1])
        own = native_grid(self._grid(first, last), shape)
        codes = np.frombuffer(self._codes(first, last), np.uint8).reshape(shape)
        return StoredRows("decode_fp8", (codes, *own))

    def _codes(self, first: int, last: int) -> memoryview:
        return self.source.read_range(self.codes, first * self.shape[1], last * self.shape[1])

    def _grid(self, first: int, last: int) -> Grid:
        """Read the scales of those rows."""
        if self.scales is None:
            return Grid(np.ones((1, 1), np.float32), self.shape, first)
        return self.coding.read_scales(self.source, self.scales, self.shape, (first, last))


def decode_scales(stored: memoryview, dtype: str) -> Float32s:
    """Return scales of that dtype as flat float32; exact."""
    flat = np.frombuffer(stored, np.uint8)
    if dtype in E8M0_DTYPES:
        return decode_e8m0(flat)
    return np.frombuffer(stored, FLOAT_DTYPES[dtype]).astype(np.float32)


def fault_of_table(source: Source, ref: TensorRef) -> str:
    """Say what is wrong with the one scale of a table; "" for nothing."""
    (scale,) = decode_scales(source.read_range(ref, 0, ref.nbytes), ref.dtype)
    is_useful = 0 < scale < np.inf
    return "" if is_useful else f"the scale of its table, {ref.name}, is {scale:g}"


def as_stored(scales: Float32s, form: Form) -> memoryview:
    """Return the bytes of scales in the dtype of a form."""
    if form.stored_scales in E8M0_DTYPES:
        return encode_e8m0(scales).reshape(-1).data
    return scales.astype(FLOAT_DTYPES[form.stored_scales]).reshape(-1).view(np.uint8).data


def block_of(form: Form, shape: tuple[int, int]) -> Block:
    """Return the rows and columns that share a scale in such a matrix."""
    words: dict[object, Block] = {"tensor": shape, "row": (1, shape[1])}
    granularity = form.granularity
    return granularity if isinstance(granularity, tuple) else words[granularity]


def fp8_of(packed: Packed, artifact: Artifact) -> Fp8:
    """Return the coding of a module of FP8 in an artifact."""
    form = packed.form
    block = block_of(form, packed.shape)
    return Fp8(form.word, block, form.scale_layout, form.format, artifact)


def find_fp8(
    clues: Clues, known: Collection[str] = (), is_strict: bool = True
) -> dict[str, Linear]:
    """Find every matrix of FP8 codes.

    known      modules of a record, which are left out
    is_strict  raise InputError for scales that are missing, have a name that is not read, or do not
               fit; else leave such a matrix out
    """
    blocks, found = tuple(_declared_blocks(clues.record)), {}
    matrices = {
        ref.name.removesuffix(WEIGHT): ref
        for ref in clues.tensors.values()
        if ref.dtype in FP8_DTYPES and ref.name.endswith(WEIGHT) and len(ref.shape) == 2
    }
    unread = _unread_floats(clues, matrices)
    for module, ref in matrices.items():
        try:
            if module in unread:
                _refuse_unread(ref, module, unread[module])
            if module not in known:
                found[module] = _linear(module, ref, clues, blocks)
        except InputError:
            if is_strict:
                raise
    return found


def _unread_floats(clues: Clues, matrices: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Find a float that nothing reads beside each matrix.

    Beside a matrix with scales, only possible other scales count.
    """
    # Scales that are read, that multiply no weight, or that are refused elsewhere.
    harmless = {*SCALES, *IDLE, *UNSAID_ENDINGS}
    found: dict[str, TensorRef] = {}
    for one in find_beside(clues.tensors, [ref.name for ref in matrices.values()]):
        module = one.weight.removesuffix(WEIGHT)
        is_float = one.ref.dtype.startswith(("F", "BF"))
        is_suspect = is_float or one.is_scale
        if any(module + ending in clues.tensors for ending in SCALES):
            is_suspect = is_float and "scale" in one.ending and not OTHER_SCALE.search(one.ending)
        if one.ending in harmless or one.ref.name.endswith((BIAS, *CACHE_SCALES)):
            continue
        if is_suspect and (module not in found or (one.is_scale and "weight" in one.ending)):
            found[module] = one.ref
    return found


def _refuse_unread(ref: TensorRef, module: str, beside: TensorRef) -> None:
    """Raise InputError: the tensor beside the codes may be their scale."""
    detail = (
        f"{ref.file}: {ref.name} is FP8, and fp4convert does not read {beside.name}"
        f" ({beside.dtype} {list(beside.shape)}) beside it; expected only {module}{SCALES[1]} or"
        f" {module}{SCALES[0]}"
    )
    next_step = (
        "Start from the original weights in bf16; or, if it alone multiplies the weight, rename it"
        f" to {module}{SCALES[1]}, and so in every module (of activations: {module}{IDLE[0]})."
    )
    raise InputError("scales-unread", detail, next_step, ref.name)


def _linear(module: str, ref: TensorRef, clues: Clues, blocks: tuple[Block, ...]) -> Linear:
    rows, columns = ref.shape
    scales, idle = (stored_beside(clues.tensors, module, endings) for endings in (SCALES, IDLE))
    if table := TABLE.fullmatch(module):
        scales = scales or stored_beside(clues.tensors, table[1], SCALES)
    if not scales and clues.is_recorded:
        detail = (
            f"{ref.file}: {ref.name} is FP8, and has no scales; expected {module}{SCALES[0]} or"
            f" {module}{SCALES[1]}"
        )
        raise scales_missing(detail, ref.name)
    if not scales:
        return Linear(module, (rows, columns), Fp8("fp8", (rows, columns)), (ref,), idle)
    if len(scales) > 1:
        detail = (
            f"{ref.file}: {ref.name} has scales of two names, {scales[0].name} and"
            f" {scales[1].name}; expected one"
        )
        raise InputError("scales-shape", detail, tensor=scales[1].name)
    block, ranks = _block_of(scales[0].shape, (rows, columns), blocks), 1
    if block is None:
        block, ranks = _block_of_ranks(scales[0].shape, (rows, columns), blocks)
    if block is None or scales[0].dtype not in SCALE_DTYPES:
        sizes = " or ".join(f"{height}x{width}" for height, width in blocks) or "no size"
        detail = (
            f"{scales[0].file}: {scales[0].name} is {scales[0].dtype} {list(scales[0].shape)} for"
            f" codes of {[rows, columns]}; expected a float for the matrix, for each row, or for"
            f" each block (config.json gives {sizes} of blocks)"
        )
        raise InputError("scales-shape", detail, tensor=scales[0].name)
    kind = {(rows, columns): "", (1, columns): " rows"}.get(block, f" {block[0]}x{block[1]}")
    is_whole = block == (rows, columns)
    coding = Fp8(f"fp8{kind}", block, ranks=ranks, is_at_home=bool(table) and is_whole)
    if scales[0].dtype in E8M0_DTYPES and block == (1, MXFP8.block_size):
        coding = Fp8(MXFP8.name, block, format=MXFP8)
    return Linear(module, (rows, columns), coding, (ref, scales[0]), idle)


def _block_of(
    scales: tuple[int, ...], shape: tuple[int, int], blocks: tuple[Block, ...]
) -> Block | None:
    """Return the block that shares a scale; None where nothing fits.

    scales  shape of the scales of a matrix of that shape
    """
    rows, columns = shape
    if len(scales) == 4 and scales[1] == scales[3] == 1:  # as ModelOpt shapes those of blocks
        scales = (scales[0], scales[2])
    for height, width in blocks:
        if scales == (-(-rows // height), -(-columns // width)):
            return height, width
    if scales in ((), (1,), (1, 1)):
        return shape
    return (1, columns) if scales in ((rows,), (rows, 1)) else None


def _block_of_ranks(
    scales: tuple[int, ...], shape: tuple[int, int], blocks: tuple[Block, ...]
) -> tuple[Block | None, int]:
    """Return the block and the number of ranks; None where nothing fits.

    Numbers of ranks that give blocks at other rows must not fit alike.
    """
    rows, columns = shape
    fitting = [
        ((height, width), ranks)
        for height, width in blocks
        for ranks in RANKS
        if rows % ranks == 0
        and scales == (ranks * -(-rows // ranks // height), -(-columns // width))
    ]
    whole = [one for one in fitting if rows // one[1] > one[0][0]]  # more than a block for each
    return whole[0] if len(whole) == 1 else (None, 1)


def _declared_blocks(record: Json) -> Iterator[Block]:
    """Yield the sizes of blocks that a record of any engine gives."""
    schemes = [scheme.get("weights") for scheme in schemes_of(record)]
    known = [scheme for scheme in schemes if isinstance(scheme, dict)]
    declared = [
        record.get("weight_block_size"),
        *(scheme.get("block_structure") for scheme in known),
        *([1, scheme.get("group_size")] for scheme in known if scheme.get("num_bits") == BITS),
    ]
    for block in declared:
        if block_size := positive_pair(block):
            yield block_size
