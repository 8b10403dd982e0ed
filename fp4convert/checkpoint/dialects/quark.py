"""quark: MXFP4 and NVFP4 as AMD Quark exports them.

  M.weight          U8   [rows, columns / 2]
  M.weight_scale    mxfp4: U8 [rows, columns / 32]; nvfp4: F8_E4M3 [rows, columns / 16]
  M.weight_scale_2  nvfp4: F32 [], a multiplier: amax / 2688
  M.input_scale_2   nvfp4 with four-bit activations: F32 [], a multiplier; mxfp4 scales activations as they come

Quark's own exporter shares no scale within a group and writes no -0; its readers take both as they are.
Source: amd-quark 0.13, torch/export; vLLM 0.33, quantization/quark.  Readers: vLLM, SGLang, transformers with Quark
(transformers 5.23 not for nvfp4: it leaves the global scales out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    always_fit,
    each_alone,
    is_fp8,
    no_notes,
    stems_named,
    strings,
    whole,
)
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group, everywhere
from fp4convert.checkpoint.dialects.tables import Scalars, Table
from fp4convert.errors import Doubt
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.storage.safetensors import TensorRef

SCALARS = Scalars(".weight_scale_2", ".input_scale_2")
TRAITS = Traits(
    writes=(MXFP4, NVFP4),
    scalars=SCALARS,
    ignores_by_name=True,
    activations=(MXFP4, NVFP4),
    suffixes=(".weight_scale", ".weight_scale_2"),
    companions=(".input_scale_2", ".input_scale"),
)
TABLE = Table((".weight", "U8"), ".weight_scale", {NVFP4: "F8_E4M3", MXFP4: "U8"}, SCALARS)
outputs, stored_shape, encode, decode = (
    TABLE.outputs,
    TABLE.stored_shape,
    TABLE.encode,
    TABLE.decode,
)
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes, unfit = each_alone, whole, no_notes, always_fit


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [
        stem
        for stem in stems_named(tensors, TRAITS.suffixes)
        if not is_fp8(tensors, f"{stem}.weight")
    ]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    form = groups[0].form
    weights = _spec(form, is_dynamic=False)
    inputs = _spec(form, is_dynamic=True) if form.activations == ACTIVATIONS_FP4 else None
    globs = [pattern for pattern in ignored.patterns if not pattern.startswith("re:")]
    config: Json = {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "exclude": [*Ignored(ignored.modules, tuple(globs)).apart(), *globs],
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {
            "weight": weights,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
        },
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "softmax_quant_spec": None,
        "version": "0.13",
    }
    return {"config.json": {"quantization_config": config}}


def _spec(form: Form, is_dynamic: bool) -> object:
    """How Quark describes a four-bit tensor: for nvfp4 in two stages, the blocks and then their scales."""
    is_mx = form.format is MXFP4
    blocks = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": form.format.block_size,
        "ch_axis": -1,
        "is_dynamic": is_dynamic,
        "is_scale_quant": False,
        "observer_cls": "PerBlockMXObserver",
        "round_method": "half_even",
        "scale_calculation_mode": "even" if is_mx else None,
        "scale_format": "e8m0" if is_mx else "float32",
        "scale_type": "float" if is_mx else "float32",
        "symmetric": None,
        "mx_element_dtype": None,
    }
    scales = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_tensor",
        "group_size": None,
        "ch_axis": None,
        "is_dynamic": False,
        "is_scale_quant": True,
        "observer_cls": "PerTensorMinMaxObserver",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float32",
        "symmetric": True,
        "mx_element_dtype": None,
    }
    return blocks if is_mx else [blocks, scales]


def recognise(clues: Clues) -> tuple[Group, ...]:
    if clues.record.get("quant_method") != "quark":
        return ()
    declared = clues.record.get("global_quant_config")
    scheme = declared if isinstance(declared, dict) else {}
    weights, inputs = (_first(scheme.get(key)) for key in ("weight", "input_tensors"))
    fmt = next(
        (
            fmt
            for fmt in TRAITS.reads
            if fmt.block_size == weights.get("group_size") and weights.get("dtype") == "fp4"
        ),
        None,
    )
    activations = ACTIVATIONS_FP4 if inputs.get("dtype") == "fp4" else 16
    return everywhere(Form(fmt, activations) if fmt else None)


def _first(spec: object) -> dict[str, object]:
    """The description of the blocks, where there may be two stages."""
    entry = spec[0] if isinstance(spec, list) and spec else spec
    return entry if isinstance(entry, dict) else {}


def judge(clues: Clues) -> Iterator[Doubt]:
    if "rotation" in str(clues.record.get("algo_config")):
        yield Doubt(
            "error",
            "record-transform",
            "weights are rotated (algo_config), which nothing but its engine undoes",
        )


def ignores(clues: Clues) -> Callable[[str], bool]:
    """`exclude` holds names and wildcards."""
    patterns = strings(clues.record.get("exclude"))
    return lambda module: any(fnmatchcase(module, pattern) for pattern in patterns)
