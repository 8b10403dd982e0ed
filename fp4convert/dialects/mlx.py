"""mlx: NVFP4 and MXFP4 as MLX stores them.

  M.weight  U32  [rows, columns / 8]: eight codes to a word, the first in bits 0-3, so the bytes are those of two codes each
  M.scales  U8   [rows, columns / 16] or [rows, columns / 32]

There is no global scale: an NVFP4 block's step is its E4M3 scale alone.  What has a global scale other than 1 cannot be said.
Records: config.json's "quantization", and the same again as "quantization_config"; a module without scales is an ordinary one.
Source: mlx 0.32, mx.quantize; mlx-lm 0.32, utils.load_model.  Readers: mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fp4convert.dialects import (
    Clues,
    Form,
    Ignored,
    Json,
    Part,
    Read,
    always_fit,
    each_alone,
    never_ignored,
    no_doubts,
    no_notes,
    stems_named,
    whole,
    whole_blocks,
)
from fp4convert.errors import InputError
from fp4convert.formats import FORMATS, MXFP4, NVFP4, Blocks, Format, Kind, Quantized, Spans
from fp4convert.shard import TensorRef, TensorSpec

READS = WRITES = (NVFP4, MXFP4)
ACTIVATIONS: tuple[Format, ...] = ()
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = None
SHARES_SCALES = False
HOLDS_EMBEDDINGS = True
PACKED = ".weight"
SUFFIXES = (".scales",)
COMPANIONS = ()
LABELS: tuple[str, ...] = ()
CACHE_SCALES: tuple[str, ...] = ()
CODES_PER_WORD = 8
stems, slots, notes, is_ignored, judge, unfit = each_alone, whole, no_notes, never_ignored, no_doubts, always_fit


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    return (
        TensorSpec(f"{stem}.weight", "U32", (rows, columns // CODES_PER_WORD)),
        TensorSpec(f"{stem}.scales", "U8", (rows, columns // form.format.block_size)),
    )


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}.weight", rows.packed
        yield f"{stem}.scales", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    if q.global_scale not in (None, 1.0):
        detail = f"{stem} has the global scale {q.global_scale:g}, stored as a {q.kind}; mlx has no place for one, expected 1"
        next_step = "Quantize the original weights with --dialect mlx, or dequantize the artifact first."
        raise InputError("dialect-global-scale", detail, next_step, stem)
    yield from ()


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    stems_found = stems_named(tensors, SUFFIXES)
    return [stem for stem in stems_found if tensors[f"{stem}.scales"].dtype == "U8"]


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    if len(packed.shape) != 2:
        return None
    return whole_blocks((packed.shape[0], packed.shape[1] * CODES_PER_WORD), form)


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    global_scale = 1.0 if form.format.has_global_scale else None
    return Spans(form.format, (rows, columns), read(f"{stem}.weight"), read(f"{stem}.scales"), global_scale)


def decode_input_scale(module: str, read: Read) -> float:
    raise RuntimeError("mlx has no input scales")


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
    numbers = {"group_size": form.format.block_size, "bits": 4, "mode": form.format.name}
    return {"config.json": {"quantization": numbers, "quantization_config": numbers}}


def recognise(clues: Clues) -> Form | None:
    declared = clues.config.get("quantization", clues.record)
    numbers = declared if isinstance(declared, dict) else {}
    fmt = FORMATS.get(str(numbers.get("mode")))
    return Form(fmt) if fmt and numbers.get("bits") == 4 and numbers.get("group_size") == fmt.block_size else None
