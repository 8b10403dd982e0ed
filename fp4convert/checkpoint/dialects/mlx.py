"""mlx: NVFP4 and MXFP4 as MLX stores them.

  M.weight  U32  [rows, columns / 8]: eight codes to a word, the first in bits 0-3, so the bytes are those of two codes each
  M.scales  U8   [rows, columns / 16] or [rows, columns / 32]

There is no global scale: an NVFP4 block's step is its E4M3 scale alone.  What has a global scale other than 1 cannot be said.
Records: config.json's "quantization", and the same again as "quantization_config"; a module without scales is an ordinary one.
Source: mlx 0.32, mx.quantize; mlx-lm 0.32, utils.load_model.  Readers: mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    always_fit,
    each_alone,
    ignores_none,
    no_notes,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import Form, Group, everywhere
from fp4convert.checkpoint.dialects.tables import Scalars, Table
from fp4convert.errors import Doubt
from fp4convert.numerics.formats import FORMATS, MXFP4, NVFP4
from fp4convert.storage.safetensors import TensorRef

MATRIX_DIMENSIONS = 2
MXFP8_WORDS = 8  # to a scale
SCALARS = Scalars(None)
TRAITS = Traits(
    writes=(NVFP4, MXFP4), scalars=SCALARS, holds_embeddings=True, suffixes=(".scales",)
)
TABLE = Table((".weight", "U32"), ".scales", {NVFP4: "U8", MXFP4: "U8"}, SCALARS, codes_per_item=8)
outputs, stored_shape, encode, decode = (
    TABLE.outputs,
    TABLE.stored_shape,
    TABLE.encode,
    TABLE.decode,
)
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes, ignores, unfit = each_alone, whole, no_notes, ignores_none, always_fit


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Not those of other widths, which have other shares of scales: 2 words to a scale are nvfp4, 4 mxfp4, 8 mxfp8."""
    return [stem for stem in stems_named(tensors, TRAITS.suffixes) if _is_four_bit(tensors, stem)]


def _is_four_bit(tensors: Mapping[str, TensorRef], stem: str) -> bool:
    block_scales, packed = tensors[f"{stem}.scales"], tensors.get(f"{stem}.weight")
    if len(block_scales.shape) > MATRIX_DIMENSIONS:
        return False
    words, scales = (ref.shape[-1] if ref and ref.shape else 0 for ref in (packed, block_scales))
    return block_scales.dtype == "U8" and words != MXFP8_WORDS * scales


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    form = groups[0].form
    numbers = {"group_size": form.format.block_size, "bits": 4, "mode": form.format.name}
    return {"config.json": {"quantization": numbers, "quantization_config": numbers}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    declared = clues.config.get("quantization", clues.record)
    numbers = declared if isinstance(declared, dict) else {}
    fmt = FORMATS.get(str(numbers.get("mode")))
    return everywhere(
        Form(fmt)
        if fmt and numbers.get("bits") == 4 and numbers.get("group_size") == fmt.block_size
        else None
    )


def judge(clues: Clues) -> Iterator[Doubt]:
    stacks = [
        ref
        for name, ref in clues.tensors.items()
        if name.endswith(".scales") and len(ref.shape) > MATRIX_DIMENSIONS
    ]
    if stacks:
        yield Doubt(
            "warning",
            "stack-unread",
            f"{len(stacks)} stacks of experts are not looked into, the first {stacks[0].name}",
        )
