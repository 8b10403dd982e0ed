"""comfy: NVFP4, FP8 and MXFP8 as ComfyUI reads them.

  M.weight          U8       [rows, columns / 2], the even column in bits 4-7 (high first)
  M.weight_scale    F8_E4M3  [rows to 128, blocks to 4], in the order 128x4 of cuBLAS
  M.weight_scale_2  F32      [], a multiplier: amax / 2688
  M.input_scale     F32      [], a multiplier, with four-bit activations; without it ComfyUI scales
                             them as they come
  M.comfy_quant     U8       JSON: {"format": "nvfp4"}

Beside it or alone, with activations that ComfyUI rounds to eight bits as they come:

  M.weight          F8_E4M3  [rows, columns]
  M.weight_scale    float8_e4m3fn: F32 [], a multiplier; mxfp8: U8, E8M0, [rows to 128, blocks to
                             4], in the order 128x4
  M.comfy_quant     U8       JSON: {"format": "float8_e4m3fn"} or {"format": "mxfp8"}

The file's own metadata names the modules again under "_quantization_metadata", or it alone does:
{"layers": {M: {"format": "nvfp4"}}}, from which ComfyUI makes the marks.  Beside a tensor
"scaled_fp8" it reads M.scale_weight and M.scale_input, the names of 2024.  Rows must be a multiple
of 16, of mxfp8 of 32. Where rows divide by 128 and blocks by 4, names, dtypes and shapes are
modelopt's; in a file that nothing marks statistics of the scales decide.
Source: comfy-kitchen 0.2.40, tensor/nvfp4, tensor/mxfp8 and float_utils; ComfyUI, QUANTIZATION.md,
comfy/ops.py at 0271a46, _load_quantized_module, and comfy/utils.py, convert_old_quants.
Readers: ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Traits,
    each_alone,
    ignores_none,
    json_object,
    nothing,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    MXFP8_BLOCK,
    MXFP8_FORM,
    Form,
    Granularity,
    Group,
    everywhere,
    merge_groups,
)
from fp4convert.checkpoint.dialects.registry import COMFY_MARK, COMFY_SIGNS, OLD_MARK, SUFFIXES
from fp4convert.checkpoint.dialects.tables import Fp8Table, Part, Read, Scalars, Table, scale_grid
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.formats import FLOAT_TYPES, FP8, MXFP8, NVFP4
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS as ORDERS
from fp4convert.numerics.scale_layouts import swap_nibbles
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import TensorRef, TensorSpec

SCALARS = Scalars(".weight_scale_2", ".input_scale")
ORDER = ORDERS["128x4"]
_WORDS = {NVFP4: NVFP4.name, FP8: "float8_e4m3fn", MXFP8: MXFP8.name}
_ROWS = {NVFP4: 16, MXFP8: 32}  # that ComfyUI pads to


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    if granularity == MXFP8_BLOCK:
        return ORDER.padded(scale_grid(shape, granularity))
    return {"tensor": (), "row": (shape[0], 1)}.get(str(granularity))


def _mark(form: Form) -> tuple[str, bytes]:
    """Return the tensor that names a module's format for ComfyUI."""
    return COMFY_MARK, json.dumps({"format": _WORDS[form.format]}, separators=(",", ":")).encode()


TRAITS = Traits(
    writes=(NVFP4, FP8, MXFP8),
    scalars=SCALARS,
    activations=(NVFP4,),
    layouts=("128x4",),
    nibble_order="high_first",
    fuses_none=True,
    holds_embeddings=True,
    suffixes=SUFFIXES["comfy"],
    companions=(".input_scale", ".scale_input"),
    implied=(COMFY_MARK,),
    labels=(COMFY_MARK,),
    mixes=(NVFP4, FP8, MXFP8),
    fp8=Fp8Table(
        "tensor",
        _scale_shape,
        activations={"tensor": ACTIVATIONS_FP8, MXFP8_BLOCK: ACTIVATIONS_FP8},
        arrange=ORDER.arrange,
        mark=_mark,
        older={".weight_scale": ".scale_weight"},
    ),
)
# For shapes alone: nibbles and scales are in orders of their own.
TABLE = Table((".weight", "U8"), ".weight_scale", {NVFP4: "F8_E4M3"}, SCALARS, fp8=TRAITS.fp8)
stems, slots, stored_shape = each_alone, whole, TABLE.stored_shape
records, ignores = nothing, ignores_none


def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    if form.granularity == "row":  # read, and not written
        return "FP8 with a scale for each row, of which ComfyUI's kernels take one"
    multiple = _ROWS.get(form.format, 1)
    if shape[0] % multiple:
        return f"{shape[0]} rows, which ComfyUI pads to a multiple of {multiple}"
    return TABLE.unfit(module, shape, form)


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    if form.format.is_fp8:
        return TABLE.outputs(stem, shape, form)
    rows, columns = shape
    ending, mark = _mark(form)
    scales = ORDER.padded((rows, columns // form.format.block_size))
    return (
        TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}.weight_scale", "F8_E4M3", scales),
        TensorSpec(stem + ending, "U8", (len(mark),)),
        *SCALARS.specs(stem, form),
    )


def notes(forms: Mapping[str, Form]) -> dict[str, str]:
    layers = {stem: {"format": _WORDS[form.format]} for stem, form in sorted(forms.items())}
    if not layers:
        return {}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    ending, mark = _mark(form)
    yield stem + ending, memoryview(mark)
    block_scales = bytearray()
    for rows in panels:
        yield f"{stem}.weight", swap_nibbles(rows.packed)
        block_scales += rows.block_scales
    linear = (shape[0], shape[1] // form.format.block_size)
    yield f"{stem}.weight_scale", ORDER.arrange(memoryview(block_scales), linear)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Find modules of NVFP4 by their mark and dtype, or their global scale."""
    marked = [
        stem
        for stem in stems_named(tensors, (COMFY_MARK,))
        if (ref := tensors.get(f"{stem}.weight")) and ref.dtype == "U8"
    ]
    return sorted({*marked, *stems_named(tensors, (".weight_scale_2",))})


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    packed = read(f"{stem}.weight")
    blocks = columns // form.format.block_size
    block_scales = ORDER.restore_lazily(lambda: read(f"{stem}.weight_scale")[:], (rows, blocks))

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        codes = swap_nibbles(packed[first * columns // 2 : last * columns // 2])
        return codes, block_scales(first, last)

    multiplier = SCALARS.decode_global(stem, form, read)
    return Fetched(form.format, (rows, columns), multiplier, SCALARS.kind, fetch, block_scales)


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Read the forms of modules from the dtypes of their tensors.

    They are marked, or named in a header; in a bare file names of tensors suffice.
    """
    stems = _marked(clues) | (_coded(clues) if clues.is_bare else set())
    found = [(form, [stem]) for stem in sorted(stems) if (form := _form(stem, clues.tensors))]
    nvfp4 = {form for form, _ in found if form.format is NVFP4}
    if len(nvfp4) > 1:  # with input scales that not every module has
        plain = {form: replace(form, activations=16) for form in nvfp4}
        found = [(plain.get(form, form), own) for form, own in found]
    forms = {form for form, _ in found}
    is_one = len(forms) == 1 and not nvfp4.isdisjoint(forms)  # FP8 without a scale is a float
    return everywhere(found[0][0]) if is_one else merge_groups(found)


def judge(clues: Clues) -> Iterator[Finding]:
    """Find modules that ComfyUI takes for ordinary ones, and the reverse."""
    marked, coded = _marked(clues), _coded(clues)
    if bare := sorted(coded - marked):
        forms = [form for stem in bare if (form := _form(stem, clues.tensors))]
        is_row = any(form.granularity == "row" for form in forms)
        step = "Round them anew: quantize" if is_row else "Mark them: transcode"
        detail = (
            f"{len(bare)} modules have codes and scales, and no {COMFY_MARK} and no header marks"
        )
        detail += f" them: ComfyUI takes codes for weights. {step} --dialect comfy"
        yield Finding("error", "unmarked", bare[0], detail)
    stored = {stem: clues.tensors.get(f"{stem}.weight") for stem in marked - coded}
    plain = sorted(stem for stem, ref in stored.items() if ref and ref.dtype in FLOAT_TYPES)
    if plain:
        detail = f"{len(plain)} modules are marked as quantized and hold ordinary weights, without"
        detail += " the scales that ComfyUI asks for. Strip the marks: transcode --dialect comfy"
        yield Finding("error", "marked-plain", plain[0], detail)


def _marked(clues: Clues) -> set[str]:
    """List the modules that ComfyUI takes for quantized."""
    stems = {*stems_named(clues.tensors, (COMFY_MARK,))}
    if any(name.rpartition(".")[2] == OLD_MARK for name in clues.tensors):
        stems |= {*stems_named(clues.tensors, (".scale_weight",))}
    for text in clues.notes:
        with suppress(InputError):
            stems |= json_object(parse_json_object(text.encode(), "header").get("layers")).keys()
    return stems


def _coded(clues: Clues) -> set[str]:
    """List the modules with codes of four or eight bits, and scales."""
    tensors = clues.tensors
    return {
        stem
        for stem in stems_named(tensors, COMFY_SIGNS[1:])
        if (ref := tensors.get(f"{stem}.weight")) and ref.dtype in ("U8", "F8_E4M3")
    }


def _form(stem: str, tensors: Mapping[str, TensorRef]) -> Form | None:
    """Return the form of a module; None for types that are not read."""
    weight = tensors.get(f"{stem}.weight")
    scales = tensors.get(f"{stem}.weight_scale", tensors.get(f"{stem}.scale_weight"))
    if f"{stem}.weight_scale_2" in tensors:
        has_input = f"{stem}.input_scale" in tensors
        return Form(NVFP4, ACTIVATIONS_FP4 if has_input else 16, "128x4")
    if weight is None or scales is None or weight.dtype != "F8_E4M3":
        return None
    granularity = "tensor" if scales.elements == 1 else "row"
    eight_bits = MXFP8_FORM if scales.dtype == "U8" else Form(FP8, granularity=granularity)
    return replace(eight_bits, activations=ACTIVATIONS_FP8, scale_layout="128x4")
