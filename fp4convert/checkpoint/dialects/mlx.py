"""mlx: NVFP4 and MXFP4 as MLX stores them.

  M.weight  U32  [rows, columns / 8]: eight codes to a word, the first in bits 0-3, so the bytes are
                 those of two codes each
  M.scales  U8   [rows, columns / 16] or [rows, columns / 32]

There is no global scale: an NVFP4 block's step is its E4M3 scale alone. What has a global scale
other than 1 cannot be said. Records: config.json's "quantization", and the same again as
"quantization_config"; a module without scales is an ordinary one.
Source: mlx 0.32, mx.quantize; mlx-lm 0.32, utils.load_model.  Readers: mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    doubt_stacks,
    each_alone,
    nothing,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import SUFFIXES
from fp4convert.checkpoint.dialects.tables import Scalars, Table
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FORMATS, MXFP4, NVFP4
from fp4convert.storage.safetensors import TensorRef

MATRIX_DIMENSIONS = 2
MXFP8_WORDS = 8  # to a scale
TRAITS = Traits(
    writes=(NVFP4, MXFP4),
    scalars=Scalars(None),
    holds_embeddings=True,
    suffixes=SUFFIXES["mlx"],
)
SCALE_DTYPES = {NVFP4: "U8", MXFP4: "U8"}
TABLE = Table((".weight", "U32"), ".scales", SCALE_DTYPES, TRAITS.scalars, codes_per_item=8)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stems, stored_shape, slots, unfit = each_alone, TABLE.stored_shape, whole, TABLE.unfit
notes = nothing
KEYS = ("quantization", "quantization_config")  # of config.json; mlx-lm reads the first


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Leave out modules of other widths, which have other shares of scales.

    2 words to a scale are nvfp4, 4 mxfp4, 8 mxfp8.
    """
    found = []
    for stem in stems_named(tensors, TRAITS.suffixes):
        packed, block_scales = tensors.get(f"{stem}.weight"), tensors[f"{stem}.scales"]
        words, scales = (
            ref.shape[-1] if ref and ref.shape else 0 for ref in (packed, block_scales)
        )
        is_matrix = len(block_scales.shape) <= MATRIX_DIMENSIONS
        if is_matrix and block_scales.dtype == "U8" and words != MXFP8_WORDS * scales:
            found.append(stem)
    return found


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    form = groups[0].form
    numbers = {"group_size": form.format.block_size, "bits": 4, "mode": form.format.name}
    return {"config.json": {"quantization": numbers, "quantization_config": numbers}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    declared = clues.config.get("quantization", clues.record)
    numbers = declared if isinstance(declared, dict) else {}
    fmt = FORMATS.get(str(numbers.get("mode")))
    if fmt is None or (numbers.get("bits"), numbers.get("group_size")) != (4, fmt.block_size):
        return ()
    return everywhere(Form(fmt))


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read which modules config.json says are not quantized, by `false`."""
    names = {name for numbers in _said(clues) for name, value in numbers.items() if value is False}
    return names.__contains__


def _said(clues: Clues) -> list[Json]:
    """List what config.json says of the quantization."""
    return [numbers for key in KEYS if isinstance(numbers := clues.config.get(key), dict)]


def judge(clues: Clues) -> Iterator[Finding]:
    said = _said(clues)
    if said and any(each != said[0] for each in said):
        detail = "quantization and quantization_config of config.json differ; expected two alike"
        yield Finding("error", "records-disagree", None, detail)
    yield from doubt_stacks(
        [
            ref
            for name, ref in clues.tensors.items()
            if name.endswith(TRAITS.suffixes) and len(ref.shape) > MATRIX_DIMENSIONS
        ]
    )
