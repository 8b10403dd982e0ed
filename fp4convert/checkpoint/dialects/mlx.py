"""mlx: NVFP4, MXFP4 and MXFP8 as MLX stores them.

  M.weight  U32  [rows, columns / 8]: eight codes to a word, the first in bits 0-3, so the bytes are
                 those of two codes each
                 (mxfp8: [rows, columns / 4], four E4M3 codes to a word)
  M.scales  U8   [rows, columns / 16] or [rows, columns / 32]

Experts are stacks: M is "X.switch_mlp.gate_proj" and its kin, the number of experts before the
rows; mlx-lm's classes call them X.experts.gate_proj (gpt-oss, Llama 4), X.experts.switch_glu (Gemma
4), X.experts.switch_mlp (DeepSeek V4.1) and X.switch_mlp.fc1 (Nemotron-H) too. As modules they have
the names of transformers' checkpoints: X.experts.N.gate_proj; w1, w3 and w2 where X ends with
block_sparse_moe. Written they are one by one. Other modules may be integers: encodings/int4.py.

There is no global scale: an NVFP4 block's step is its E4M3 scale alone. Modules with a global scale
other than 1 have no place. Records: config.json's "quantization", and the same again as
"quantization_config"; a module that it names has a format of its own, and one without scales is an
ordinary one.
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
    json_object,
    nothing,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import (
    MXFP8_BLOCK,
    MXFP8_FORM,
    Form,
    Granularity,
    Group,
    merge_groups,
)
from fp4convert.checkpoint.dialects.registry import MLX_KEYS, SUFFIXES
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS, STACK_DIMENSIONS, Rows, Slot
from fp4convert.checkpoint.dialects.tables import Fp8Table, Scalars, Table, scale_grid, whole_blocks
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FORMATS, MXFP4, MXFP8, NVFP4, Format
from fp4convert.storage.safetensors import TensorRef

STACK = re.compile(
    r"(.+?)(?:\.experts(?:\.switch_\w+)?|\.switch_\w+)\.(gate_proj|up_proj|down_proj|fc1|fc2)"
)
RENAMED = {  # by the last part of X, where transformers' names differ
    "block_sparse_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "mixer": {"fc1": "up_proj", "fc2": "down_proj"},
}
MXFP8_WORDS = 8  # to a scale


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    return scale_grid(shape, granularity) if granularity == MXFP8_BLOCK else None


TRAITS = Traits(
    writes=(NVFP4, MXFP4, MXFP8),
    scalars=Scalars(None),
    holds_embeddings=True,
    has_own_stacks=True,
    suffixes=SUFFIXES["mlx"],
    mixes=(NVFP4, MXFP4, MXFP8),
    fp8=Fp8Table(
        MXFP8_BLOCK,
        _scale_shape,
        activations={MXFP8_BLOCK: 16},
        codes=("U32", 4),
        scales=".scales",
    ),
)
SCALE_DTYPES = {NVFP4: "U8", MXFP4: "U8"}
TABLE = Table((".weight", "U32"), ".scales", SCALE_DTYPES, TRAITS.scalars, 8, TRAITS.fp8)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stems, unfit, notes = each_alone, TABLE.unfit, nothing


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Leave out scales of the affine mode, and stacks of MXFP8."""
    found = []
    for stem in stems_named(tensors, TRAITS.suffixes):
        packed, block_scales = tensors.get(f"{stem}.weight"), tensors[f"{stem}.scales"]
        words, scales = (
            ref.shape[-1] if ref and ref.shape else 0 for ref in (packed, block_scales)
        )
        is_matrix = len(block_scales.shape) <= MATRIX_DIMENSIONS
        is_stack = STACK.fullmatch(stem) and words != MXFP8_WORDS * scales
        if block_scales.dtype == "U8" and (is_matrix or is_stack):
            found.append(stem)
    return found


def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    stack = STACK.fullmatch(stem)
    if len(shape) < STACK_DIMENSIONS or stack is None:
        return whole(stem, shape)
    parent, leaf = stack.groups()
    leaf = RENAMED.get(parent.rpartition(".")[2], {}).get(leaf, leaf)
    return tuple(
        (Rows(f"{parent}.experts.{number}.{leaf}", 0, shape[1]),) for number in range(shape[0])
    )


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    if len(packed.shape) != STACK_DIMENSIONS:
        return TABLE.stored_shape(stem, packed, form)
    return whole_blocks((*packed.shape[:-1], packed.shape[-1] * TABLE.codes_per_item), form)


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    numbers = _numbers(groups[0].form.format)
    for form, modules in groups[1:]:
        numbers |= {module: _numbers(form.format) for module in modules}
    return {"config.json": {"quantization": numbers, "quantization_config": numbers}}


def _numbers(fmt: Format) -> Json:
    """Describe a format in mlx-lm's words."""
    bits = 4 if fmt.is_fp4 else 8
    return {"group_size": fmt.block_size, "bits": bits, "mode": fmt.name}


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Read the form of all modules, and those of single modules."""
    numbers = json_object(clues.config.get("quantization", clues.record))
    found = [
        (form, [name])
        for name, declared in [("*", numbers), *numbers.items()]
        if (form := _form(json_object(declared)))
    ]
    return merge_groups(found) if any(names == ["*"] for _, names in found) else ()


def _form(numbers: Json) -> Form | None:
    """Return the form of such numbers; None for one that is not read."""
    fmt = FORMATS.get(str(numbers.get("mode")))
    if fmt not in TRAITS.writes or any(numbers.get(key) != n for key, n in _numbers(fmt).items()):
        return None
    return MXFP8_FORM if fmt is MXFP8 else Form(fmt)


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read which modules config.json leaves unquantized, by `false`."""
    records = [json_object(clues.config.get(key)) for key in MLX_KEYS]
    names = {name for record in records for name, value in record.items() if value is False}
    return names.__contains__


def judge(clues: Clues) -> Iterator[Finding]:
    found = [declared for key in MLX_KEYS if isinstance(declared := clues.config.get(key), dict)]
    if any(declared != found[0] for declared in found):
        detail = "quantization and quantization_config of config.json differ; expected two alike"
        yield Finding("error", "records-disagree", None, detail)
    numbers = json_object(clues.config.get(MLX_KEYS[0]))
    for module in numbers.keys() & {*find(clues.tensors)}:
        if (own := json_object(numbers[module])) and _form(own) is None:
            detail = f"config.json says {own} of it; its scales are of four bits, or of MXFP8"
            yield Finding("error", "record-strategy", module, detail)
    yield from doubt_stacks(
        [
            ref
            for name, ref in clues.tensors.items()
            if name.endswith(TRAITS.suffixes)
            and len(ref.shape) > MATRIX_DIMENSIONS
            and not STACK.fullmatch(name.removesuffix(".scales"))
        ]
    )
