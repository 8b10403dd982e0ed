"""deepseek: FP8 as DeepSeek-V3 stores it, MXFP4 as V4 its experts.

FP8, as many other families' publishers write it:

  M.weight            F8_E4M3 [rows, columns]
  M.weight_scale_inv  F32     [rows / 128, columns / 128], a multiplier whatever its name says

Engines quantize activations in groups of 128 as they come. Record: quantization_config of the
method "fp8" with the size of the blocks and the modules that stay.

MXFP4:

  M.weight  I8      [rows, columns / 2]
  M.scale   F8_E8M0 [rows, columns / 32]

Only routed experts are four-bit; their engine takes every other matrix for FP8 with 128x128 blocks,
and those stay as they are. Record: "expert_dtype" in config.json, beside a quantization_config of
FP8.
Source: transformers 5.23, integrations/finegrained_fp8; vLLM 0.33, models/deepseek_v4 (names and
views of V4's; no published file was compared).
Readers: vLLM, SGLang, transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    ignores_none,
    no_doubts,
    nothing,
    positive_pair,
    stems_of_scales,
    whole,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP8,
    Form,
    Granularity,
    Group,
    everywhere,
)
from fp4convert.checkpoint.dialects.registry import METHODS
from fp4convert.checkpoint.dialects.tables import Fp8Table, Scalars, Table, scale_grid
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import FP8, MXFP4
from fp4convert.storage.safetensors import TensorRef, TensorSpec

METHOD = METHODS["deepseek"]
BLOCK = (128, 128)


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    return scale_grid(shape, granularity) if isinstance(granularity, tuple) else None


TRAITS = Traits(
    writes=(MXFP4, FP8),
    scalars=Scalars(None),
    fp8=Fp8Table(
        BLOCK, _scale_shape, activations={BLOCK: ACTIVATIONS_FP8}, scales=".weight_scale_inv"
    ),
)
TABLE = Table((".weight", "I8"), ".scale", {MXFP4: "F8_E8M0"}, TRAITS.scalars, fp8=TRAITS.fp8)
encode, decode, stems = TABLE.encode, TABLE.decode, each_alone
stored_shape, slots, unfit = TABLE.stored_shape, whole, TABLE.unfit
notes, judge, ignores = nothing, no_doubts, ignores_none
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.w[123]")
_READ = re.compile(r"(?:.*\.)?experts\.\d+\.(?:w[123]|(?:gate|up|down)_proj)")


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    if stem and form.format.is_fp4 and not _EXPERT.fullmatch(stem):
        detail = f"{stem} is four-bit; dialect deepseek holds only routed experts"
        detail = f"{detail}, named ...experts.N.w1, w2 and w3"
        raise ChoiceError("dialect-module", detail, tensor=stem)
    return TABLE.outputs(stem, shape, form)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [stem for stem in stems_of_scales(tensors, (".scale",)) if _READ.fullmatch(stem)]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    fmt, granularity = groups[0].form.format, groups[0].form.granularity
    record = {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if fmt.is_fp4 else {}),
        "weight_block_size": list(granularity if isinstance(granularity, tuple) else BLOCK),
        "modules_to_not_convert": list(ignored.modules),
    }
    experts = {"expert_dtype": "fp4"} if fmt.is_fp4 else {}
    return {"config.json": {**experts, "quantization_config": record}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    if clues.record.get("quant_method") != METHOD:
        return ()
    if clues.config.get("expert_dtype") == "fp4":
        return everywhere(Form(MXFP4))
    block = positive_pair(clues.record.get("weight_block_size"))
    if block is None or not any(name.endswith(".weight_scale_inv") for name in clues.tensors):
        return ()
    return everywhere(Form(FP8, ACTIVATIONS_FP8, granularity=block))
