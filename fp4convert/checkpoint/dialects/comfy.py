"""comfy: NVFP4 as ComfyUI reads it.

  M.weight          U8       [rows, columns / 2], the even column in bits 4-7 (high first)
  M.weight_scale    F8_E4M3  [rows to 128, blocks to 4], in the order 128x4 of cuBLAS
  M.weight_scale_2  F32      [], a multiplier: amax / 2688
  M.input_scale     F32      [], a multiplier, with four-bit activations; without it ComfyUI scales
                             them as they come
  M.comfy_quant     U8       JSON: {"format": "nvfp4"}

The file's own metadata names the modules again under "_quantization_metadata". Rows must be a
multiple of 16. Where rows divide by 128 and blocks by 4, names, dtypes and shapes are modelopt's,
and only comfy_quant tells them apart.
Source: comfy-kitchen 0.2.40, tensor/nvfp4 and float_utils; ComfyUI, QUANTIZATION.md.
Readers: ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

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
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import COMFY_MARK, SUFFIXES
from fp4convert.checkpoint.dialects.tables import Part, Read, Scalars, Table
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS as ORDERS
from fp4convert.numerics.scale_layouts import swap_nibbles
from fp4convert.storage.safetensors import TensorRef, TensorSpec

SCALARS = Scalars(".weight_scale_2", ".input_scale")
TRAITS = Traits(
    writes=(NVFP4,),
    scalars=SCALARS,
    activations=(NVFP4,),
    layouts=("128x4",),
    nibble_order="high_first",
    holds_embeddings=True,
    suffixes=SUFFIXES["comfy"],
    companions=(".input_scale",),
    labels=(COMFY_MARK,),
)
# For the shape of the codes alone: nibbles and scales are in orders of their own.
TABLE = Table((".weight", "U8"), ".weight_scale", {NVFP4: "F8_E4M3"}, SCALARS)
stems, slots, stored_shape = each_alone, whole, TABLE.stored_shape
records, judge, ignores = nothing, no_doubts, ignores_none
_MARK = json.dumps({"format": "nvfp4"}, separators=(",", ":")).encode()


def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    return f"{shape[0]} rows, which ComfyUI pads to a multiple of 16" if shape[0] % 16 else None


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    padded = ORDERS["128x4"].padded((rows, columns // form.format.block_size))
    specs = (
        TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}.weight_scale", "F8_E4M3", padded),
        TensorSpec(stem + COMFY_MARK, "U8", (len(_MARK),)),
    )
    return (*specs, *SCALARS.specs(stem, form))


def notes(form: Form, stems: Iterable[str]) -> dict[str, str]:
    layers = {stem: {"format": "nvfp4"} for stem in sorted(stems)}
    if not layers:
        return {}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    yield stem + COMFY_MARK, memoryview(_MARK)
    block_scales = bytearray()
    for rows in panels:
        yield f"{stem}.weight", swap_nibbles(rows.packed)
        block_scales += rows.block_scales
    linear = (shape[0], shape[1] // form.format.block_size)
    yield f"{stem}.weight_scale", ORDERS["128x4"].arrange(memoryview(block_scales), linear)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Leave out layers of other types, which are marked too."""
    marked = [
        stem
        for stem in stems_named(tensors, (COMFY_MARK,))
        if (ref := tensors.get(f"{stem}.weight")) and ref.dtype == "U8"
    ]
    return sorted({*marked, *stems_named(tensors, (".weight_scale_2",))})


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    packed = read(f"{stem}.weight")
    shape_of_scales = (rows, columns // form.format.block_size)
    block_scales = ORDERS["128x4"].restore_lazily(
        lambda: read(f"{stem}.weight_scale")[:], shape_of_scales
    )

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        codes = swap_nibbles(packed[first * columns // 2 : last * columns // 2])
        return codes, block_scales(first, last)

    global_scale = SCALARS.decode_global(stem, form, read)
    matrix = (rows, columns)
    return Fetched(form.format, matrix, global_scale, SCALARS.kind, fetch, block_scales)


def recognise(clues: Clues) -> tuple[Group, ...]:
    marked = stems_named(clues.tensors, (COMFY_MARK,))
    nvfp4 = [stem for stem in marked if f"{stem}.weight_scale_2" in clues.tensors]
    if not nvfp4:
        return ()
    has_inputs = all(f"{stem}.input_scale" in clues.tensors for stem in nvfp4)
    return everywhere(Form(NVFP4, ACTIVATIONS_FP4 if has_inputs else 16, "128x4"))
