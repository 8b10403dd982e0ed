"""deepseek: MXFP4 as DeepSeek-V4 stores its routed experts.

  M.weight  I8      [rows, columns / 2]
  M.scale   F8_E8M0 [rows, columns / 32]

Only routed experts are four-bit; their engine takes every other matrix for FP8 with 128x128 blocks,
and those stay as they are. Record: "expert_dtype" in config.json, beside a quantization_config of
FP8.
Source: vLLM 0.33, models/deepseek_v4 (names and views); no published file was compared.
Readers: vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    ignores_none,
    no_doubts,
    nothing,
    stems_of_scales,
    whole,
)
from fp4convert.checkpoint.dialects.forms import Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import METHODS
from fp4convert.checkpoint.dialects.tables import Scalars, Table
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import MXFP4
from fp4convert.storage.safetensors import TensorRef

METHOD = METHODS["deepseek"]
TRAITS = Traits(writes=(MXFP4,), scalars=Scalars(None))
TABLE = Table((".weight", "I8"), ".scale", {MXFP4: "F8_E8M0"}, TRAITS.scalars)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stored_shape, slots, unfit = TABLE.stored_shape, whole, TABLE.unfit
notes, judge, ignores = nothing, no_doubts, ignores_none
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.w[123]")


def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    for module in shapes:
        if not _EXPERT.fullmatch(module):
            detail = f"{module} is four-bit; dialect deepseek holds only routed experts"
            detail = f"{detail}, named ...experts.N.w1, w2 and w3"
            raise ChoiceError("dialect-module", detail, tensor=module)
    return dict(shapes)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [stem for stem in stems_of_scales(tensors, (".scale",)) if _EXPERT.fullmatch(stem)]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    record = {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignored.modules),
    }
    return {"config.json": {"expert_dtype": "fp4", "quantization_config": record}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    is_one = (
        clues.config.get("expert_dtype") == "fp4" and clues.record.get("quant_method") == METHOD
    )
    return everywhere(Form(MXFP4) if is_one else None)
