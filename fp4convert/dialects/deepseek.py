"""deepseek: MXFP4 as DeepSeek-V4 stores its routed experts.

  M.weight  I8      [rows, columns / 2]
  M.scale   F8_E8M0 [rows, columns / 32]

Only routed experts are four-bit; their engine takes every other matrix for FP8 with 128x128 blocks, and those stay as they are.
Record: "expert_dtype" in config.json, beside a quantization_config of FP8.
Source: vLLM 0.33, models/deepseek_v4 (names and views); no published file was compared.  Readers: vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fp4convert.dialects import (
    Clues,
    Form,
    Ignored,
    Json,
    Part,
    Read,
    always_fit,
    half_columns,
    is_fp8,
    never_ignored,
    no_doubts,
    no_notes,
    stems_named,
    whole,
)
from fp4convert.errors import InputError
from fp4convert.formats import MXFP4, Blocks, Format, Kind, Quantized, Spans
from fp4convert.shard import TensorRef, TensorSpec

READS = WRITES = (MXFP4,)
ACTIVATIONS: tuple[Format, ...] = ()
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = None
SHARES_SCALES = False
HOLDS_EMBEDDINGS = False
PACKED = ".weight"
SUFFIXES: tuple[str, ...] = ()  # ".scale" ends names of ordinary norms too
COMPANIONS = ()
LABELS: tuple[str, ...] = ()
CACHE_SCALES: tuple[str, ...] = ()
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.w[123]")
slots, notes, stored_shape, is_ignored, judge, unfit = whole, no_notes, half_columns, never_ignored, no_doubts, always_fit


def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    for module in shapes:
        if not _EXPERT.fullmatch(module):
            detail = f"{module} is four-bit; dialect deepseek holds only routed experts, named ...experts.N.w1, w2 and w3"
            raise InputError("dialect-module", detail, "Choose another --dialect.", module)
    return dict(shapes)


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    return (
        TensorSpec(f"{stem}.weight", "I8", (rows, columns // 2)),
        TensorSpec(f"{stem}.scale", "F8_E8M0", (rows, columns // form.format.block_size)),
    )


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}.weight", rows.packed
        yield f"{stem}.scale", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    yield from ()


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [
        stem for stem in stems_named(tensors, (".scale",)) if _EXPERT.fullmatch(stem) and not is_fp8(tensors, f"{stem}.weight")
    ]


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    rows, columns = shape
    return Spans(form.format, (rows, columns), read(f"{stem}.weight"), read(f"{stem}.scale"), None)


def decode_input_scale(module: str, read: Read) -> float:
    raise RuntimeError("deepseek has no input scales")


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
    record = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignored.modules),
    }
    return {"config.json": {"expert_dtype": "fp4", "quantization_config": record}}


def recognise(clues: Clues) -> Form | None:
    is_one = clues.config.get("expert_dtype") == "fp4" and clues.record.get("quant_method") == "fp8"
    return Form(MXFP4) if is_one else None
