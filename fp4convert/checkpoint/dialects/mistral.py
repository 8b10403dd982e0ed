"""mistral: FP8 in Mistral's own form, which is read and not written.

  M.weight         F8_E4M3     [rows, columns]
  M.qscale_weight  float       [], a multiplier
  M.qscale_act     float       [], a multiplier; absent where activations are scaled as they come

Record: "quantization" in params.json, with qformat_weight and qscheme_act: TENSOR (its default) or
NO_SCALES. Caches have scales of their own (k_fake_quantizer.qscale_act), which are left alone.
Source: vLLM 0.33, transformers_utils/configs/mistral.py, _remap_mistral_quantization_args.
"""

from __future__ import annotations

from functools import partial

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Traits,
    each_alone,
    ignores_none,
    no_doubts,
    nothing,
    stems_named,
    whole,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP8,
    Form,
    Granularity,
    Group,
    everywhere,
)
from fp4convert.checkpoint.dialects.registry import MISTRAL_KEY
from fp4convert.checkpoint.dialects.tables import Fp8Table, Scalars, Table
from fp4convert.numerics.formats import FP8

SCALE = ".qscale_weight"


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    return () if granularity == "tensor" else None


TRAITS = Traits(
    writes=(),
    scalars=Scalars(None, ".qscale_act"),
    suffixes=(SCALE,),
    fp8=Fp8Table("tensor", _scale_shape, ".qscale_act", is_open=True, scales=SCALE),
)
TABLE = Table((".weight", "U8"), SCALE, {}, TRAITS.scalars, fp8=TRAITS.fp8)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stems, stored_shape, slots, unfit = each_alone, TABLE.stored_shape, whole, TABLE.unfit
find, notes, records = partial(stems_named, endings=TRAITS.suffixes), nothing, nothing
judge, ignores = no_doubts, ignores_none


def recognise(clues: Clues) -> tuple[Group, ...]:
    if clues.record.get(MISTRAL_KEY) != "fp8_e4m3":
        return ()
    is_static = clues.record.get("qscheme_act") != "NO_SCALES"
    return everywhere(Form(FP8, ACTIVATIONS_FP8, granularity="tensor", is_static=is_static))
