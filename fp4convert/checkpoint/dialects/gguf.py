"""gguf: MXFP4 and NVFP4 as llama.cpp reads them.

  M.weight       MXFP4: for 32 columns the E8M0 byte, then 16 bytes
                 NVFP4: for 64 columns four E4M3 bytes, then 4 x 8 bytes
  M.scale        nvfp4: F32 [1], a multiplier: amax / 2688; llama-quantize writes none, which is 1
  M.input_scale  nvfp4 with four-bit activations: F32 [1], a multiplier

A block's first half is in bits 0-3 of its bytes, its second half in bits 4-7. llama.cpp reads -0 as
0, an E4M3 scale without its sign and a NaN scale as 0 or as infinity: scales with a sign or NaN are
refused. Columns must divide by 64 for NVFP4. Names and the order of rows are llama.cpp's own, so
only a GGUF file, or a donor's frame, becomes one.
Source: llama.cpp, ggml-common.h and ggml-quants.c (block_mxfp4, block_nvfp4).  Readers: llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Traits,
    doubt_stacks,
    each_alone,
    ignores_none,
    nothing,
    whole,
)
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import GGUF_TYPES
from fp4convert.checkpoint.dialects.tables import Part, Read, Scalars, whole_blocks
from fp4convert.errors import Finding
from fp4convert.numerics.formats import MXFP4, NVFP4, format_named
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized
from fp4convert.numerics.scale_layouts import from_halves, interleave, split_runs, to_halves
from fp4convert.storage.safetensors import TensorRef, TensorSpec

SCALARS = Scalars(".scale", ".input_scale", (1,))
TRAITS = Traits(
    writes=(MXFP4, NVFP4),
    scalars=SCALARS,
    activations=(NVFP4,),
    container="gguf",
    layouts=("gguf",),
    nibble_order="half_split",
    holds_embeddings=True,
    companions=(".input_scale",),  # no suffixes: the type of M.weight tells
    implied=(".scale",),
    highest_scale={NVFP4: 126, MXFP4: 254},  # above it a sign, or NaN
)
stems, slots, notes, ignores, records = each_alone, whole, nothing, ignores_none, nothing
_TYPES = {word: format_named(word.lower()) for word in GGUF_TYPES}
_SCALED = (  # what llama.cpp loads a .scale for; any other one makes it refuse the file
    *(f".attn_{name}" for name in ("q", "k", "v", "qkv", "output", "gate")),
    *(f".ffn_{name}{kind}" for name in ("gate", "up", "down") for kind in ("", "_shexp")),
)
_BLOCKS_PER_RUN = {MXFP4: 1, NVFP4: 4}
_RUN_NBYTES = {  # of scales, and of codes
    fmt: (blocks, blocks * fmt.block_size // 2) for fmt, blocks in _BLOCKS_PER_RUN.items()
}


def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    if form.format.has_global_scale and not module.endswith(_SCALED):
        return "no place for a global scale in llama.cpp"
    columns = _BLOCKS_PER_RUN[form.format] * form.format.block_size
    return (
        f"{shape[1]} columns, not a multiple of the {columns} of GGUF's type"
        if shape[1] % columns
        else None
    )


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    row_nbytes = columns // form.format.block_size * (form.format.block_size // 2 + 1)
    return (
        TensorSpec(f"{stem}.weight", form.format.name.upper(), (rows, row_nbytes)),
        *SCALARS.specs(stem, form),
    )


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    scales_nbytes, codes_nbytes = _RUN_NBYTES[form.format]
    for rows in panels:
        codes = to_halves(rows.packed, form.format.block_size // 2)
        runs = interleave((rows.block_scales, scales_nbytes), (codes, codes_nbytes))
        yield f"{stem}.weight", runs


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Find matrices of one four-bit type, NVFP4 where there are both."""
    form = _form(tensors)
    kind = form.format.name.upper() if form else ""
    matrices = (name for name, ref in tensors.items() if ref.dtype == kind and len(ref.shape) == 2)
    return sorted(name.removesuffix(".weight") for name in matrices)


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    columns = packed.shape[-1] // (form.format.block_size // 2 + 1) * form.format.block_size
    return whole_blocks((*packed.shape[:-1], columns), form) if len(packed.shape) == 2 else None


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    stored = read(f"{stem}.weight")
    width = stored.nbytes // rows
    multiplier = SCALARS.decode_global(stem, form, read)

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        block_scales, codes = split_runs(
            stored[first * width : last * width], *_RUN_NBYTES[form.format]
        )
        return from_halves(codes, form.format.block_size // 2), block_scales

    return Fetched(form.format, (rows, columns), multiplier, "multiplier", fetch)


def recognise(clues: Clues) -> tuple[Group, ...]:
    return everywhere(_form(clues.tensors))


def _form(tensors: Mapping[str, TensorRef]) -> Form | None:
    """Return the form that types and scales of tensors tell."""
    for name, fmt in reversed(_TYPES.items()):
        found = [ref.name.removesuffix(".weight") for ref in tensors.values() if ref.dtype == name]
        if found:
            has_inputs = all(f"{stem}.input_scale" in tensors for stem in found)
            is_fp4 = fmt.has_global_scale and has_inputs
            return Form(fmt, ACTIVATIONS_FP4 if is_fp4 else 16, TRAITS.layouts[0])
    return None


def judge(clues: Clues) -> Iterator[Finding]:
    refs = [ref for ref in clues.tensors.values() if ref.dtype in _TYPES]
    yield from doubt_stacks([ref for ref in refs if len(ref.shape) > 2])
    if len({ref.dtype for ref in refs}) > 1:
        detail = "the file holds MXFP4 and NVFP4; only its NVFP4 weights are checked"
        yield Finding("warning", "formats-mixed", None, detail)
