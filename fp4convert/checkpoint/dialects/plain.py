"""plain: codes in one file, scales in another, for own kernels.

model.safetensors (or shards of it), beside everything that stays:
  M.weight        U8   [rows, columns / 2]
scales.safetensors (scales-00001-of-00002.safetensors beside model-00001-of-00002.safetensors):
  M.block_scale   F8_E4M3 or F8_E8M0 [rows, blocks] where they are linear, U8 [all bytes] in another
                  order
  M.global_scale  F32  [], a multiplier
  M.input_scale   F32  [], a multiplier, with four-bit activations

In the layouts that join codes and scales there is no M.block_scale:
  interleaved     M.weight is U8 [rows, blocks * (bytes of a block + 1)]
  appended        M.weight is U8 [all codes, then all scales], and our record holds the shapes

No engine reads it: it is for people who feed kernels themselves. quantization_config.json alone
describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Traits,
    each_alone,
    ignores_none,
    no_doubts,
    nothing,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import SUFFIXES
from fp4convert.checkpoint.dialects.tables import Part, Read, Scalars, Table, whole_blocks
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS as ORDERS
from fp4convert.numerics.scale_layouts import SCALE_LAYOUTS, interleave, split_runs
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec

SCALARS = Scalars(".global_scale", ".input_scale", is_apart=True)
TRAITS = Traits(
    writes=(NVFP4, MXFP4),
    scalars=SCALARS,
    activations=(NVFP4, MXFP4),
    layouts=SCALE_LAYOUTS,
    holds_embeddings=True,
    suffixes=SUFFIXES["plain"],
    companions=(".input_scale",),
)
# Of the layout linear; the others have shapes of their own.
SCALE_DTYPES = {NVFP4: "F8_E4M3", MXFP4: "F8_E8M0"}
TABLE = Table((".weight", "U8"), ".block_scale", SCALE_DTYPES, SCALARS)
stems, slots, unfit, notes = each_alone, whole, TABLE.unfit, nothing
records, judge, ignores = nothing, no_doubts, ignores_none


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    blocks = columns // form.format.block_size
    joined_nbytes = blocks * (form.format.block_size // 2 + 1)  # of a row's codes and scales
    packed, scales = TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2)), []
    if form.scale_layout == "interleaved":
        packed = packed._replace(shape=(rows, joined_nbytes))
    elif form.scale_layout == "appended":
        packed = packed._replace(shape=(rows * joined_nbytes,))
    else:
        dtype = SCALE_DTYPES[form.format]
        spec = TensorSpec(f"{stem}.block_scale", dtype, (rows, blocks), is_apart=True)
        if form.scale_layout != "linear":
            padded = ORDERS[form.scale_layout].padded((rows, blocks))
            spec = spec._replace(dtype="U8", shape=(math.prod(padded),))
        scales = [spec]
    return (packed, *scales, *SCALARS.specs(stem, form))


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    linear = (shape[0], shape[1] // form.format.block_size)
    block_scales = bytearray()
    for rows in panels:
        if form.scale_layout == "interleaved":
            block_nbytes = form.format.block_size // 2
            yield f"{stem}.weight", interleave((rows.packed, block_nbytes), (rows.block_scales, 1))
        else:
            yield f"{stem}.weight", rows.packed
            if form.scale_layout == "linear":
                yield f"{stem}.block_scale", rows.block_scales
            else:
                block_scales += rows.block_scales
    if form.scale_layout == "appended":
        yield f"{stem}.weight", memoryview(block_scales)
    elif form.scale_layout not in ("linear", "interleaved"):
        arranged = ORDERS[form.scale_layout].arrange(memoryview(block_scales), linear)
        yield f"{stem}.block_scale", arranged


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Find modules by their scales, or by the dtype of joined codes."""
    packed = stems_named(
        {name: ref for name, ref in tensors.items() if ref.dtype == "U8"}, (WEIGHT,)
    )
    return sorted({*stems_named(tensors, TRAITS.suffixes), *packed})


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    block_nbytes = form.format.block_size // 2 + 1
    if form.scale_layout == "appended":
        return form.shapes.get(stem)
    if form.scale_layout != "interleaved":
        return TABLE.stored_shape(stem, packed, form)
    if len(packed.shape) != 2 or packed.shape[1] % block_nbytes:
        return None
    columns = packed.shape[1] // block_nbytes * form.format.block_size
    return whole_blocks((packed.shape[0], columns), form)


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    half, blocks = columns // 2, columns // form.format.block_size
    if form.scale_layout == "linear":
        return TABLE.decode(stem, shape, form, read)
    multiplier = SCALARS.decode_global(stem, form, read)
    stored = read(f"{stem}.weight")
    if form.scale_layout == "interleaved":
        width = stored.nbytes // rows

        def fetch_joined(first: int, last: int) -> tuple[memoryview, memoryview]:
            joined = stored[first * width : last * width]
            packed, scales = split_runs(joined, form.format.block_size // 2, 1)
            return packed, scales

        return Fetched(form.format, (rows, columns), multiplier, SCALARS.kind, fetch_joined)
    fetch_scales: Callable[[int, int], memoryview]
    if form.scale_layout == "appended":
        split = rows * half

        def fetch_appended(first: int, last: int) -> memoryview:
            return stored[split + first * blocks : split + last * blocks]

        fetch_scales = fetch_appended
    else:
        fetch_scales = ORDERS[form.scale_layout].restore_lazily(
            lambda: read(f"{stem}.block_scale")[:], (rows, blocks)
        )

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        return stored[first * half : last * half], fetch_scales(first, last)

    return Fetched(form.format, (rows, columns), multiplier, SCALARS.kind, fetch, fetch_scales)


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Recognise nothing: only our own record describes it."""
    return ()
