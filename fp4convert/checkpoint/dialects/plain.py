"""plain: codes in one file, scales in another, for own kernels.

model.safetensors (or shards of it), beside everything that stays:
  M.weight        U8   [rows, columns / 2]
scales.safetensors (scales-00001-of-00002.safetensors beside model-00001-of-00002.safetensors):
  M.block_scale   F8_E4M3 or F8_E8M0 [rows, blocks] where they are linear, U8 [all bytes] in another order
  M.global_scale  F32  [], a multiplier
  M.input_scale   F32  [], a multiplier, with four-bit activations

In the layouts that join codes and scales there is no M.block_scale:
  interleaved     M.weight is U8 [rows, blocks * (bytes of a block + 1)]
  appended        M.weight is U8 [all codes, then all scales], and our record holds the shapes

No engine reads it: it is for people who feed kernels themselves.  quantization_config.json alone says what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    always_fit,
    each_alone,
    ignores_none,
    no_doubts,
    no_notes,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.tables import Part, Read, Scalars, half_columns, whole_blocks
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized, Spans
from fp4convert.numerics.scale_layouts import LAYOUTS as ORDERS
from fp4convert.numerics.scale_layouts import SCALE_LAYOUTS, interleave, split_runs
from fp4convert.storage.safetensors import TensorRef, TensorSpec

SCALARS = Scalars(".global_scale", ".input_scale", is_apart=True)
TRAITS = Traits(
    writes=(NVFP4, MXFP4),
    scalars=SCALARS,
    activations=(NVFP4, MXFP4),
    layouts=SCALE_LAYOUTS,
    holds_embeddings=True,
    suffixes=(".block_scale", ".global_scale"),
    companions=(".input_scale",),
)
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes, ignores, judge, unfit = (
    each_alone,
    whole,
    no_notes,
    ignores_none,
    no_doubts,
    always_fit,
)


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    blocks, block_nbytes = columns // form.format.block_size, form.format.block_size // 2
    scale_dtype = "F8_E4M3" if form.format is NVFP4 else "F8_E8M0"
    if form.scale_layout == "interleaved":
        specs = [TensorSpec(f"{stem}.weight", "U8", (rows, blocks * (block_nbytes + 1)))]
    elif form.scale_layout == "appended":
        specs = [TensorSpec(f"{stem}.weight", "U8", (rows * blocks * (block_nbytes + 1),))]
    elif form.scale_layout == "linear":
        specs = [TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2))]
        specs.append(TensorSpec(f"{stem}.block_scale", scale_dtype, (rows, blocks), is_apart=True))
    else:
        padded_rows, padded_blocks = ORDERS[form.scale_layout].padded((rows, blocks))
        specs = [TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2))]
        specs.append(
            TensorSpec(f"{stem}.block_scale", "U8", (padded_rows * padded_blocks,), is_apart=True)
        )
    return (*specs, *SCALARS.specs(stem, form))


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    linear = (shape[0], shape[1] // form.format.block_size)
    block_scales = bytearray()
    for rows in panels:
        if form.scale_layout == "interleaved":
            yield (
                f"{stem}.weight",
                interleave((rows.packed, form.format.block_size // 2), (rows.block_scales, 1)),
            )
        else:
            yield f"{stem}.weight", rows.packed
            if form.scale_layout == "linear":
                yield f"{stem}.block_scale", rows.block_scales
            else:
                block_scales += rows.block_scales
    if form.scale_layout == "appended":
        yield f"{stem}.weight", memoryview(block_scales)
    elif form.scale_layout not in ("linear", "interleaved"):
        yield (
            f"{stem}.block_scale",
            ORDERS[form.scale_layout].arrange(memoryview(block_scales), linear),
        )


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """With their scales joined to their codes, modules of MXFP4 are known by the type of their weights alone."""
    named = stems_named(tensors, TRAITS.suffixes)
    packed = [
        stem
        for stem in stems_named(tensors, (".weight",))
        if tensors[f"{stem}.weight"].dtype == "U8"
    ]
    return sorted({*named, *packed})


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    block_nbytes = form.format.block_size // 2 + 1
    if form.scale_layout == "appended":
        return form.shapes.get(stem)
    if form.scale_layout != "interleaved":
        return half_columns(stem, packed, form)
    if len(packed.shape) != 2 or packed.shape[1] % block_nbytes:
        return None
    return whole_blocks(
        (packed.shape[0], packed.shape[1] // block_nbytes * form.format.block_size), form
    )


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    blocks = columns // form.format.block_size
    multiplier = SCALARS.decode_global(stem, form, read)
    stored = read(f"{stem}.weight")
    if form.scale_layout == "interleaved":
        width = stored.nbytes // rows

        def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
            packed, scales = split_runs(
                stored[first * width : last * width], form.format.block_size // 2, 1
            )
            return packed, scales

        return Fetched(form.format, (rows, columns), multiplier, "multiplier", fetch)
    if form.scale_layout == "appended":
        split, half = rows * columns // 2, columns // 2

        def fetch_apart(first: int, last: int) -> tuple[memoryview, memoryview]:
            return stored[first * half : last * half], stored[
                split + first * blocks : split + last * blocks
            ]

        return Fetched(form.format, (rows, columns), multiplier, "multiplier", fetch_apart)
    if form.scale_layout == "linear":
        return Spans(form.format, (rows, columns), stored, read(f"{stem}.block_scale"), multiplier)
    block_scales = ORDERS[form.scale_layout].restore_lazily(
        lambda: read(f"{stem}.block_scale")[:], (rows, blocks)
    )

    def fetch_scales(first: int, last: int) -> tuple[memoryview, memoryview]:
        return stored[first * columns // 2 : last * columns // 2], block_scales(first, last)

    return Fetched(
        form.format, (rows, columns), multiplier, "multiplier", fetch_scales, block_scales
    )


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    return {}


def recognise(clues: Clues) -> tuple[Group, ...]:
    return ()
