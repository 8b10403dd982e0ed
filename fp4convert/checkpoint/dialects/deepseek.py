"""deepseek: FP8 as DeepSeek-V3 stores it, four-bit experts as V4.

FP8, as many other families' publishers write it:

  M.weight            F8_E4M3 [rows, columns]
  M.weight_scale_inv  F32     [rows / 128, columns / 128], a multiplier whatever its name says

Engines quantize activations in groups of 128 as they come. Record: quantization_config of the
method "fp8" with the size of the blocks and the modules that stay.

MXFP4:

  M.weight  I8      [rows, columns / 2]
  M.scale   F8_E8M0 [rows, columns / 32]

NVFP4, as NVIDIA ships DeepSeek-V4:

  M.weight          U8       [rows, columns / 2]
  M.weight_scale    F8_E4M3  [rows, columns / 16]
  M.weight_scale_2  F32      [], a multiplier
  M.input_scale     F32      [], a multiplier: engines quantize activations, too

Only routed experts are four-bit; their engine takes every other matrix for FP8 with 128x128 blocks
under M.scale F8_E8M0, and those stay as they are. Record: "expert_dtype" in config.json, beside a
quantization_config of FP8; for NVFP4 that has moe_quant_algo (vLLM), and also quant_algo and
group_size (SGLang 0.5.23, srt/configs/model_config.py:776).
Source: transformers 5.23, integrations/finegrained_fp8; vLLM 0.33, models/deepseek_v4 (names and
views of V4's; quant_config.py: NVFP4; no published file was compared).
Readers: vLLM, SGLang, transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    Form,
    Granularity,
    Group,
    everywhere,
)
from fp4convert.checkpoint.dialects.registry import METHODS
from fp4convert.checkpoint.dialects.tables import Fp8Table, Part, Read, Scalars, Table, scale_grid
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import FP8, MXFP4, NVFP4
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.storage.safetensors import TensorRef, TensorSpec

METHOD = METHODS["deepseek"]
BLOCK = (128, 128)


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    return scale_grid(shape, granularity) if isinstance(granularity, tuple) else None


TRAITS = Traits(
    writes=(MXFP4, NVFP4, FP8),
    scalars=Scalars(".weight_scale_2", ".input_scale"),
    activations=(NVFP4,),
    shares_scales=True,
    companions=(".input_scale",),
    mixes=(MXFP4, NVFP4, FP8),
    fp8=Fp8Table(
        BLOCK,
        _scale_shape,
        activations={BLOCK: ACTIVATIONS_FP8},
        scales=".weight_scale_inv",
        older={".weight_scale_inv": ".scale"},
        e8m0=".scale",
    ),
)
TABLES = {
    MXFP4: Table((".weight", "I8"), ".scale", {MXFP4: "F8_E8M0"}, TRAITS.scalars, fp8=TRAITS.fp8),
    NVFP4: Table((".weight", "U8"), ".weight_scale", {NVFP4: "F8_E4M3"}, TRAITS.scalars),
}
stems, slots, unfit = each_alone, whole, TABLES[MXFP4].unfit
notes, judge, ignores = nothing, no_doubts, ignores_none
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.w[123]")
_READ = re.compile(r"(?:.*\.)?experts\.\d+\.(?:w[123]|(?:gate|up|down)_proj)")


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    if stem and form.format.is_fp4 and not _EXPERT.fullmatch(stem):
        detail = f"{stem} is four-bit; dialect deepseek holds only routed experts"
        detail = f"{detail}, named ...experts.N.w1, w2 and w3"
        raise ChoiceError("dialect-module", detail, tensor=stem)
    return _table(form).outputs(stem, shape, form)


def _table(form: Form) -> Table:
    return TABLES.get(form.format, TABLES[MXFP4])


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    return _table(form).stored_shape(stem, packed, form)


def encode(
    stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
) -> Iterator[Part]:
    return _table(form).encode(stem, shape, form, panels)


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    return _table(form).decode(stem, shape, form, read)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    found = stems_of_scales(tensors, (".scale", ".weight_scale_2"))
    return [stem for stem in found if _READ.fullmatch(stem)]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    forms = [group.form for group in groups]
    fmt = next((form.format for form in forms if form.format.is_fp4), FP8)
    granularity = next((form.granularity for form in forms if form.format is FP8), None)
    if fmt.is_fp4 and any(one.format is FP8 and one.stored_scales != "F8_E8M0" for one in forms):
        detail = "FP8 beside four-bit experts has scales in float32; engines of dialect deepseek"
        step = "Leave --keep-packed out; or choose another --dialect: modelopt."
        raise ChoiceError("dialect-mixed", f"{detail} expect powers of two in F8_E8M0", step)
    if any(form.format is NVFP4 and not form.has_input_scale for form in forms):
        detail = "engines of dialect deepseek quantize activations of NVFP4 experts, too"
        raise ChoiceError(
            "dialect-activations", f"{detail}; expected --activations 4", "Add --activations 4."
        )
    experts: Json = {"expert_dtype": "fp4"} if fmt.is_fp4 else {}
    nvfp4: Json = {}
    if fmt is NVFP4:
        nvfp4 = {
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "group_size": NVFP4.block_size,
            "ignore": [name for name in ignored.modules if _EXPERT.fullmatch(name)],
        }
    record = {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if fmt.is_fp4 else {}),
        "weight_block_size": list(granularity if isinstance(granularity, tuple) else BLOCK),
        "modules_to_not_convert": list(ignored.modules),
    }
    return {"config.json": {**experts, "quantization_config": {**record, **nvfp4}}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    if clues.record.get("quant_method") != METHOD:
        return ()
    block = positive_pair(clues.record.get("weight_block_size"))
    if str(clues.record.get("moe_quant_algo")).upper() == "NVFP4":
        eight = Form(FP8, ACTIVATIONS_FP8, granularity=block or BLOCK, stored_scales="F8_E8M0")
        draft = [stem for stem in find(clues.tensors) if f"{stem}.scale" in clues.tensors]
        return (
            *([Group(Form(MXFP4), tuple(draft))] if draft else ()),
            Group(Form(NVFP4, ACTIVATIONS_FP4), (f"re:{_READ.pattern}$",)),
            Group(eight, ("*",)),
        )
    if clues.config.get("expert_dtype") == "fp4":
        return everywhere(Form(MXFP4))
    if block is None or not any(name.endswith(".weight_scale_inv") for name in clues.tensors):
        return ()
    return everywhere(Form(FP8, ACTIVATIONS_FP8, granularity=block))
