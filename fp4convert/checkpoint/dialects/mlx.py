"""mlx: NVFP4 and MXFP4 as MLX stores them.

  M.weight  U32  [rows, columns / 8]: eight codes to a word, the first in bits 0-3, so the bytes are
                 those of two codes each
  M.scales  U8   [rows, columns / 16] or [rows, columns / 32]

Experts are stacks: M is "X.switch_mlp.gate_proj" and its kin, the number of experts before the
rows. As modules they have the names of transformers' checkpoints: X.experts.N.gate_proj; w1, w3
and w2 where X ends with block_sparse_moe. Written they are one by one. Routers may be integers:
encodings/mlx_affine.py.

There is no global scale: an NVFP4 block's step is its E4M3 scale alone. What has a global scale
other than 1 cannot be said. Records: config.json's "quantization", and the same again as
"quantization_config"; a module without scales is an ordinary one.
Source: mlx 0.32, mx.quantize; mlx-lm 0.32, utils.load_model.  Readers: mlx-lm.
"""

from __future__ import annotations

import re
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
from fp4convert.checkpoint.dialects.stacks import Rows, Slot
from fp4convert.checkpoint.dialects.tables import Scalars, Table, whole_blocks
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FORMATS, MXFP4, NVFP4
from fp4convert.storage.safetensors import TensorRef

MATRIX_DIMENSIONS, STACK_DIMENSIONS = 2, 3
STACK = re.compile(r"(.*)\.switch_mlp\.(gate|up|down)_proj")
MIXTRALS = "block_sparse_moe"
MIXTRALS_LEAVES = {"gate": "w1", "up": "w3", "down": "w2"}
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
stems, unfit = each_alone, TABLE.unfit
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
        is_read = len(block_scales.shape) <= MATRIX_DIMENSIONS or STACK.fullmatch(stem)
        if is_read and block_scales.dtype == "U8" and words != MXFP8_WORDS * scales:
            found.append(stem)
    return found


def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    stack = STACK.fullmatch(stem)
    if len(shape) < STACK_DIMENSIONS or stack is None:
        return whole(stem, shape)
    parent, kind = stack.groups()
    leaf = MIXTRALS_LEAVES[kind] if parent.endswith(MIXTRALS) else f"{kind}_proj"
    return tuple(
        (Rows(f"{parent}.experts.{number}.{leaf}", 0, shape[1]),) for number in range(shape[0])
    )


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    if len(packed.shape) != STACK_DIMENSIONS:
        return TABLE.stored_shape(stem, packed, form)
    return whole_blocks((*packed.shape[:-1], packed.shape[-1] * TABLE.codes_per_item), form)


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
            if name.endswith(TRAITS.suffixes)
            and len(ref.shape) > MATRIX_DIMENSIONS
            and not STACK.fullmatch(name.removesuffix(".scales"))
        ]
    )
