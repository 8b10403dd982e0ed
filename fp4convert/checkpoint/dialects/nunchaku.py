"""nunchaku: NVFP4 beside low-rank corrections, for Diffusers.

  M.qweight        I8       [rows, columns / 2], in the order of the kernels' tiles
  M.wscales        F8_E4M3  [columns / 16, rows], likewise
  M.wtscale        BF16     [1], a multiplier
  M.wcscales       BF16     [rows], factors of the rows of the codes' values: 1
  M.smooth_factor  BF16     [columns], divisors of the inputs of the codes
  M.proj_down      BF16     [columns, rank], multiplied with inputs that are not divided
  M.proj_up        BF16     [rows, rank]
  M.bias           BF16     [rows], where the layer has one

Tiles are 128 rows, or 128 elements of a vector. Where each lies, slowest first:
  codes    32-bit words of 8, element i in bits 4i: row 16 b + 8 c + d, word 8 e + 4 f + g of a
           tile are at [e][b][d][g][c][f]
  wscales  row 32 b + 8 c + d, block 4 e + f at [e][d][c][b][f]
  vectors  element 16 b + 8 c + 2 d + e at [b][d][c][e]
  factors  16 x 16: row 8 b + c, column 8 d + 2 e + f at [c][e][b][d][f]; tiles of proj_up, and of
           proj_down as (rank, columns), lie [rows or columns / 16][rank / 16]
Rows and columns must be multiples of 128, and the rank one of 16.
config.json's quantization_config names every module ("targets"); Diffusers looks each up, and its
kernels quantize activations to four bits as they come.
Source: Diffusers 0.42, quantizers/nunchaku (names, dtypes, shapes); pull request 14608 of
huggingface/diffusers and cache-dit 1.5.3, quantization/svdquant/packing.py (orders).
Readers: Diffusers' Nunchaku Lite, on NVIDIA Blackwell GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    json_object,
    nothing,
    stems_named,
    strings,
    whole,
)
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group
from fp4convert.checkpoint.dialects.registry import METHODS, SUFFIXES
from fp4convert.checkpoint.dialects.tables import CorrectionTable, Part, Read, Scalars
from fp4convert.errors import Finding
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.low_rank import Correction
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized
from fp4convert.numerics.scale_layouts import Layout
from fp4convert.storage.safetensors import TensorRef, TensorSpec

TILE = 128  # rows, and also what columns are a multiple of
RANK, STEP = 32, 16  # a rank is a multiple of the second
ORDER = "nunchaku"
SCALES = Layout(ORDER, (4, 4, 8), (4,), (0, 4, 3, 2, 1, 5), (TILE, 4))
# How a tile is split, and the sequence in which its axes are stored.
Axes = tuple[int, ...]
_CODES: Axes = (3, 0, 2, 5, 1, 4)  # of _split_codes
_VECTOR: tuple[Axes, Axes] = (8, 2, 4, 2), (0, 2, 1, 3)
_FACTOR: tuple[Axes, Axes] = (2, 8, 2, 4, 2), (1, 3, 0, 2, 4)
_SCALARS = Scalars(".wtscale", shape=(1,), dtype="BF16")
_METHOD, _SECTION = METHODS["nunchaku"], "svdq_w4a4"


def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    if not any(size % TILE for size in shape):
        return None
    return f"{shape[0]} x {shape[1]}, and Nunchaku's tiles need multiples of {TILE}"


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    (rows, columns), rank = shape, form.rank or RANK
    return (
        TensorSpec(f"{stem}.qweight", "I8", (rows, columns // 2)),
        TensorSpec(f"{stem}.wscales", "F8_E4M3", (columns // form.format.block_size, rows)),
        *_SCALARS.specs(stem, form),
        TensorSpec(f"{stem}.wcscales", "BF16", (rows,)),
        TensorSpec(f"{stem}.smooth_factor", "BF16", (columns,)),
        TensorSpec(f"{stem}.proj_down", "BF16", (columns, rank)),
        TensorSpec(f"{stem}.proj_up", "BF16", (rows, rank)),
    )


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    if len(packed.shape) != 2:
        return None
    rows, columns = packed.shape[0], packed.shape[1] * 2
    return None if not rows * columns or unfit(stem, (rows, columns), form) else (rows, columns)


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    columns, blocks = shape[1], shape[1] // form.format.block_size
    codes, scales = bytearray(), bytearray()
    for rows in panels:
        codes += rows.packed
        scales += rows.block_scales
        height = len(scales) // blocks // TILE * TILE  # of the tiles that are complete
        if height:
            words = np.frombuffer(bytes(codes[: height * columns // 2]), "<u4")
            stored = _in_tiles(words, _split_codes(columns), _CODES)
            yield f"{stem}.qweight", stored.view(np.uint8).data
            linear = memoryview(bytes(scales[: height * blocks]))
            yield f"{stem}.wscales", SCALES.arrange(linear, (height, blocks))
            del codes[: height * columns // 2], scales[: height * blocks]


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    blocks = columns // form.format.block_size
    packed, stored = read(f"{stem}.qweight"), read(f"{stem}.wscales")

    def fetch_scales(first: int, last: int) -> memoryview:
        begin, end = first // TILE * TILE, -(-last // TILE) * TILE
        linear = SCALES.restore(stored[begin * blocks : end * blocks], (end - begin, blocks))
        return linear[(first - begin) * blocks : (last - begin) * blocks]

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        begin, end = first // TILE * TILE, -(-last // TILE) * TILE
        words = np.frombuffer(packed[begin * columns // 2 : end * columns // 2], "<u4")
        codes = _out_of_tiles(words, _split_codes(columns), _CODES).view(np.uint8).data
        own = codes[(first - begin) * columns // 2 : (last - begin) * columns // 2]
        return own, fetch_scales(first, last)

    multiplier, kind = _SCALARS.decode_global(stem, form, read), _SCALARS.kind
    return Fetched(form.format, (rows, columns), multiplier, kind, fetch, fetch_scales)


def encode_correction(stem: str, correction: Correction) -> Iterator[Part]:
    """Yield the bytes of a correction, which bf16 holds exactly."""
    smooth, down, up, channels = correction
    ones = np.ones(len(up), np.float32)
    yield f"{stem}.wcscales", _vector(ones if channels is None else channels)
    yield f"{stem}.smooth_factor", _vector(smooth)
    yield f"{stem}.proj_down", Cpu().to_bf16(_factor_tiles(down).swapaxes(0, 1).reshape(-1))
    yield f"{stem}.proj_up", Cpu().to_bf16(_factor_tiles(up).reshape(-1))


def decode_correction(stem: str, shape: tuple[int, int], read: Read) -> Correction:
    """Return the correction of a matrix of that shape."""
    rows, columns = shape
    channels, smooth, down, up = (
        np.frombuffer(read(f"{stem}.{name}")[:], FLOAT_DTYPES["BF16"]).astype(np.float32)
        for name in ("wcscales", "smooth_factor", "proj_down", "proj_up")
    )
    rank = up.size // rows
    turned = down.reshape(columns // STEP, rank // STEP, -1).swapaxes(0, 1)
    return Correction(
        _out_of_tiles(smooth, *_VECTOR),
        _factor_of(turned, (rank, columns)),
        _factor_of(up, (rows, rank)),
        _out_of_tiles(channels, *_VECTOR),
    )


def order_of(count: int) -> NDArray[np.intp]:
    """Return which value of a vector stands at each place."""
    return _in_tiles(np.arange(count, dtype=np.intp), *_VECTOR)


def _split_codes(columns: int) -> Axes:
    return (8, 2, 8, columns // 64, 2, 4)


def _vector(values: Float32s) -> memoryview:
    return Cpu().to_bf16(_in_tiles(values, *_VECTOR))


def _factor_tiles(factor: Float32s) -> Float32s:
    """Return a factor as (tiles of rows, tiles of columns, values of a tile)."""
    tall, wide = factor.shape[0] // STEP, factor.shape[1] // STEP
    tiles = np.ascontiguousarray(factor.reshape(tall, STEP, wide, STEP).swapaxes(1, 2))
    return _in_tiles(tiles.reshape(-1), *_FACTOR).reshape(tall, wide, -1)


def _factor_of(tiles: Float32s, shape: tuple[int, int]) -> Float32s:
    """Return the factor of that shape whose tiles these are."""
    tall, wide = shape[0] // STEP, shape[1] // STEP
    straight = _out_of_tiles(np.ascontiguousarray(tiles).reshape(-1), *_FACTOR)
    turned = straight.reshape(tall, wide, STEP, STEP).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(shape)


def _in_tiles(values: NDArray[Any], split: Axes, order: Axes) -> NDArray[Any]:
    """Put values into the sequence in which tiles hold them."""
    axes = (0, *(axis + 1 for axis in order))
    return np.ascontiguousarray(values.reshape(-1, *split).transpose(axes)).reshape(-1)


def _out_of_tiles(values: NDArray[Any], split: Axes, order: Axes) -> NDArray[Any]:
    """Undo `_in_tiles`."""
    stored = values.reshape(-1, *(split[axis] for axis in order))
    axes = (0, *(order.index(axis) + 1 for axis in range(len(order))))
    return np.ascontiguousarray(stored.transpose(axes)).reshape(-1)


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    form = groups[0].form
    section = {
        "precision": form.format.name,
        "group_size": form.format.block_size,
        "rank": form.rank,
        "targets": sorted(module for group in groups for module in group.modules),
    }
    record = {"quant_method": _METHOD, "compute_dtype": "bfloat16", _SECTION: section}
    return {"config.json": {"quantization_config": record}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Read the section of NVFP4; integers are another format."""
    section = _section(clues)
    targets = tuple(strings(section.get("targets")))
    match section.get("precision"), section.get("group_size"), section.get("rank"):
        case NVFP4.name, NVFP4.block_size, int(rank) if rank > 0 and targets:
            return (Group(Form(NVFP4, ACTIVATIONS_FP4, ORDER, rank=rank), targets),)
    return ()


def judge(clues: Clues) -> Iterator[Finding]:
    """Find targets that are no quantized module here."""
    for target in strings(_section(clues).get("targets")):
        if not any(f"{target}{ending}" in clues.tensors for ending in TRAITS.suffixes):
            detail = "config.json names it as a target, and it has no scales"
            yield Finding("error", "packed-missing", target, detail)


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Take modules that are no targets for ordinary layers."""
    targets = frozenset(strings(_section(clues).get("targets")))
    return lambda module: module not in targets


def _section(clues: Clues) -> Json:
    section = clues.record.get(_SECTION) if clues.record.get("quant_method") == _METHOD else None
    return json_object(section)


TRAITS = Traits(
    writes=(NVFP4,),
    scalars=_SCALARS,
    activations=(NVFP4,),
    layouts=(ORDER,),
    packed=".qweight",
    suffixes=SUFFIXES["nunchaku"],
    correction=CorrectionTable(RANK, encode_correction, decode_correction, ".bias", order_of),
)
stems, slots, notes = each_alone, whole, nothing
find = partial(stems_named, endings=TRAITS.suffixes)
