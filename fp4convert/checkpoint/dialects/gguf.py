"""gguf: MXFP4 and NVFP4 as llama.cpp reads them.

  M.weight       MXFP4: for 32 columns the E8M0 byte, then 16 bytes
                 NVFP4: for 64 columns four E4M3 bytes, then 4 x 8 bytes
  M.scale        nvfp4: F32 [1], a multiplier: amax / 2688; llama-quantize writes none, which is 1
  M.input_scale  nvfp4 with four-bit activations: F32 [1], a multiplier

Experts are stacks, M being "blk.N.ffn_gate_exps" and its kin: [experts, rows, columns], and both
scales F32 [experts]. As modules they are M.0, M.1, ...
A block's first half is in bits 0-3 of its bytes, its second half in bits 4-7. llama.cpp reads -0 as
0, an E4M3 scale without its sign and a NaN scale as 0 or as infinity: scales with a sign or NaN are
refused. A file with a tensor that it has no use for, such as M.weight.scale, is refused, too.
Columns must divide by 64 for NVFP4. Names and the order of rows are llama.cpp's own, so only a GGUF
file, or a donor's frame, becomes one.
Source: llama.cpp, ggml-common.h and ggml-quants.c (block_mxfp4, block_nvfp4).  Readers: llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Traits,
    doubt_stacks,
    ignores_none,
    nothing,
    shape_of_all,
    whole,
)
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import GGUF_TYPES
from fp4convert.checkpoint.dialects.stacks import STACK_DIMENSIONS, Rows, Slot
from fp4convert.checkpoint.dialects.tables import (
    SCALAR_NBYTES,
    Part,
    Read,
    Scalars,
    decode_scalar,
    whole_blocks,
)
from fp4convert.checkpoint.unread import find_unread_in_gguf
from fp4convert.errors import ChoiceError, Finding
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
    q8_0=True,
    # llama-quant.cpp, tensor_allows_quantization: names that end in "weight", but for these; and
    # what conversion/base.py, prepare_tensors, writes as F32. Operators on the rest, such as
    # ggml_add_id of the biases of experts, assert F32. Kernels of convolutions are F16 or F32.
    floats=(
        "re:(?!.*weight$)",
        *("*_norm.weight", "*ffn_gate_inp*", "*ffn_gate_tid2eid*", "*altup*", "*laurel*"),
        *("*per_layer_model_proj*", "*attn_rel_b*", "*position_embd*", "token_types*"),
        *("*conv1d*", "*shortconv.conv*", "*.conv1.*", "*.conv2.*", "*.dw.*", "*time_mix_*"),
        *("*indexer.proj*", "*indexer.[kq]_proj*"),
        *("v.*", "a.*", "mm.*"),  # towers, which clip.cpp reads
    ),
)
notes, ignores, records = nothing, ignores_none, nothing
_TYPES = {word: format_named(word.lower()) for word in GGUF_TYPES}
_SCALED = (  # llama.cpp loads a .scale for these, and refuses a file with any other
    *(f".attn_{name}" for name in ("q", "k", "v", "qkv", "output", "gate")),
    *(f".ffn_{name}{kind}" for name in ("gate", "up", "down") for kind in ("", "_shexp", "_exps")),
)
STACK = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps")
_EXPERT = re.compile(rf"({STACK.pattern})\.(0|[1-9]\d{{0,8}})")
_BLOCKS_PER_RUN = {MXFP4: 1, NVFP4: 4}
_RUN_NBYTES = {  # of scales, and of codes
    fmt: (blocks, blocks * fmt.block_size // 2) for fmt, blocks in _BLOCKS_PER_RUN.items()
}


def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Stack the experts of a layer; all must be there, of one shape."""
    found: dict[str, tuple[int, ...]] = {}
    experts: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for module, shape in shapes.items():
        if match := _EXPERT.fullmatch(module):
            experts[match[1]][int(match[2])] = shape
            found.setdefault(match[1], ())
        else:
            found[module] = shape
    for stem, members in experts.items():
        matrix = shape_of_all(members.get(number) for number in range(len(members)))
        if matrix is None:
            detail = f"{stem}: dialect gguf stores all experts as one stack"
            detail = f"{detail}; expected every one of them, and all of one shape"
            raise ChoiceError("dialect-module", detail, tensor=stem)
        found[stem] = (len(members), *matrix)
    return found


def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    if len(shape) < STACK_DIMENSIONS:
        return whole(stem, shape)
    return tuple((Rows(f"{stem}.{number}", 0, shape[1]),) for number in range(shape[0]))


def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    expert = _EXPERT.fullmatch(module)
    if form.format.has_global_scale and not (expert[1] if expert else module).endswith(_SCALED):
        return "no place for a global scale in llama.cpp"
    columns = _BLOCKS_PER_RUN[form.format] * form.format.block_size
    if shape[1] % columns == 0:
        return None
    return f"{shape[1]} columns, not a multiple of the {columns} of GGUF's type"


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    *above, columns = shape
    row_nbytes = columns // form.format.block_size * (form.format.block_size // 2 + 1)
    scalars = SCALARS.specs(stem, form)
    if len(shape) == STACK_DIMENSIONS:
        scalars = (spec._replace(shape=(shape[0],)) for spec in scalars)
    return (TensorSpec(f"{stem}.weight", form.format.name.upper(), (*above, row_nbytes)), *scalars)


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
    found = (ref for ref in tensors.values() if ref.dtype == kind and not _is_unread(ref))
    return sorted(ref.name.removesuffix(".weight") for ref in found)


def _is_unread(ref: TensorRef) -> bool:
    """Return whether it is a stack without llama.cpp's name of experts."""
    is_stack = len(ref.shape) != 2
    return is_stack and not STACK.fullmatch(ref.name.removesuffix(".weight"))


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    columns = packed.shape[-1] // (form.format.block_size // 2 + 1) * form.format.block_size
    is_known = len(packed.shape) in (2, STACK_DIMENSIONS)
    return whole_blocks((*packed.shape[:-1], columns), form) if is_known else None


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    *above, columns = shape
    rows, height = math.prod(above), above[-1]
    stored = read(f"{stem}.weight")
    width = stored.nbytes // rows
    multiplier = scale_of = None
    if form.format.has_global_scale:
        scales = read(f"{stem}.scale")
        multiplier = decode_scalar(scales[:SCALAR_NBYTES])
        if scales.nbytes > SCALAR_NBYTES:

            def scale_of(row: int) -> float:
                begin = row // height * SCALAR_NBYTES
                return decode_scalar(scales[begin : begin + SCALAR_NBYTES])

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        block_scales, codes = split_runs(
            stored[first * width : last * width], *_RUN_NBYTES[form.format]
        )
        return from_halves(codes, form.format.block_size // 2), block_scales

    matrix = (rows, columns)
    return Fetched(form.format, matrix, multiplier, "multiplier", fetch, scale_of=scale_of)


def recognise(clues: Clues) -> tuple[Group, ...]:
    return everywhere(_form(clues.tensors))


def _form(tensors: Mapping[str, TensorRef]) -> Form | None:
    """Return the form of the tensors' types and scales."""
    for name, fmt in reversed(_TYPES.items()):
        found = [ref.name.removesuffix(".weight") for ref in tensors.values() if ref.dtype == name]
        if found:
            has_inputs = all(f"{stem}.input_scale" in tensors for stem in found)
            is_fp4 = fmt.has_global_scale and has_inputs
            return Form(fmt, ACTIVATIONS_FP4 if is_fp4 else 16, TRAITS.layouts[0])
    return None


def judge(clues: Clues) -> Iterator[Finding]:
    refs = [ref for ref in clues.tensors.values() if ref.dtype in _TYPES]
    yield from doubt_stacks([ref for ref in refs if _is_unread(ref)])
    if unread := find_unread_in_gguf(clues.tensors):
        name = unread[0].ref.name
        detail = f"{len(unread)} tensors beside quantized weights have names that nobody reads,"
        detail = f"{detail} the first {name!r}; llama.cpp refuses such a file"
        yield Finding("error", "tensor-unread", name, detail)
    if len({ref.dtype for ref in refs}) > 1:
        detail = "the file holds MXFP4 and NVFP4; only its NVFP4 weights are checked"
        yield Finding("warning", "formats-mixed", None, detail)
