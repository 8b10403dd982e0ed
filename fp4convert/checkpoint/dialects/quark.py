"""quark: MXFP4 and NVFP4 as AMD Quark exports them.

  M.weight          U8   [rows, columns / 2]
  M.weight_scale    mxfp4: U8 [rows, columns / 32]; nvfp4: F8_E4M3 [rows, columns / 16]
  M.weight_scale_2  nvfp4: F32 [], a multiplier: amax / 2688
  M.input_scale_2   nvfp4 with four-bit activations: F32 [], a multiplier; mxfp4 scales
                    activations as they come

Quark's own exporter shares no scale within a group and writes no -0; its readers take both as they
are. `exclude` names every module that stays: vLLM and SGLang match no wildcards there.
Source: amd-quark 0.13, torch/export; vLLM 0.33, quantization/quark.  Readers: vLLM, SGLang,
transformers with Quark (transformers 5.23 not for nvfp4: it leaves the global scales out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    json_object,
    nothing,
    stems_of_scales,
    strings,
    whole,
)
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import METHODS, SUFFIXES
from fp4convert.checkpoint.dialects.tables import Scalars, Table
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FLOAT_TYPES, MXFP4, NVFP4
from fp4convert.recipes.patterns import matches_any, sift
from fp4convert.storage.safetensors import WEIGHT

METHOD = METHODS["quark"]
TRAITS = Traits(
    writes=(MXFP4, NVFP4),
    scalars=Scalars(".weight_scale_2", ".input_scale_2"),
    ignores_by_name=True,
    activations=(MXFP4, NVFP4),
    suffixes=SUFFIXES["quark"],
    companions=(".input_scale_2", ".input_scale"),
)
SCALE_DTYPES = {NVFP4: "F8_E4M3", MXFP4: "U8"}
TABLE = Table((".weight", "U8"), ".weight_scale", SCALE_DTYPES, TRAITS.scalars)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stems, stored_shape, slots, unfit = each_alone, TABLE.stored_shape, whole, TABLE.unfit
_CONFIGS = ("global_quant_config", "layer_quant_config", "layer_type_quant_config")
# Of specs: keys that Quark needs, and those that say how codes were made.
_NEEDED = ("symmetric", "is_dynamic", "ch_axis")
_OF_MAKERS = {
    *("symmetric", "mx_element_dtype", "round_method", "scale_calculation_mode", "scale_type")
}
_APART = ("*embed*", "*head*", "*wte*", "*wpe*", "*norm*")  # which engines build without a record
find, notes = partial(stems_of_scales, endings=TRAITS.suffixes), nothing


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    form = groups[0].form
    weights = _spec(form, is_dynamic=False)
    inputs = _spec(form, is_dynamic=True) if form.activations == ACTIVATIONS_FP4 else None
    globs = [pattern for pattern in ignored.patterns if not pattern.startswith("re:")]
    config: Json = {
        "quant_method": METHOD,
        "quant_mode": "eager_mode",
        "algo_config": None,
        # Quark matches wildcards; vLLM and SGLang know exact names alone.
        "exclude": [*ignored.with_engine_names(), *globs],
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
    """Describe four-bit blocks; for nvfp4 [blocks, their scales]."""
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
    if clues.record.get("quant_method") != METHOD:
        return ()
    scheme = json_object(clues.record.get("global_quant_config"))
    # A description of the blocks, or a list of two: blocks, then their scales.
    stages = [scheme.get(key) for key in ("weight", "input_tensors")]
    first = [spec[0] if isinstance(spec, list) and spec else spec for spec in stages]
    weights, inputs = map(json_object, first)
    if weights.get("dtype") != "fp4":
        return ()
    size = weights.get("group_size")
    fmt = next((fmt for fmt in TRAITS.writes if fmt.block_size == size), None)
    activations = ACTIVATIONS_FP4 if inputs.get("dtype") == "fp4" else 16
    return everywhere(Form(fmt, activations) if fmt else None)


def judge(clues: Clues) -> Iterator[Finding]:
    if "rotation" in str(clues.record.get("algo_config")):
        detail = "weights are rotated (algo_config), which only its engine can undo"
        yield Finding("error", "record-transform", None, detail)
    groups = recognise(clues)
    faults = _find_faults(clues, groups[0].form) if groups else ()
    for fault in dict.fromkeys(filter(None, faults)):
        yield Finding("error", "record-strategy", None, f"{fault}, with which readers refuse it")
    if hidden := _by_wildcard(clues):
        detail = f"`exclude` names {len(hidden)} linear layers by wildcards alone, the first"
        detail = f"{detail} {hidden[0]}: vLLM and SGLang would take them for four-bit ones"
        yield Finding("warning", "exclude-wildcard", None, detail)


def _find_faults(clues: Clues, form: Form) -> Iterator[str]:
    """Describe numbers that no reader takes for those of the codes."""
    weights = _spec(form, is_dynamic=False)
    everything, named, types = (json_object(clues.record.get(key)) for key in _CONFIGS)
    yield _differ(everything.get("weight"), weights)
    odd = {key: _differ(json_object(named[key]).get("weight"), weights) for key in named}
    fitting = any(sift(tuple(key for key in odd if odd[key]), find(clues.tensors)))
    yield from odd.values() if fitting else ()
    yield from (_differ(json_object(each).get("weight"), weights) for each in types.values())
    inputs = everything.get("input_tensors")
    dtype = json_object(inputs[0] if isinstance(inputs, list) and inputs else inputs).get("dtype")
    if dtype == "fp4":
        yield _differ(inputs, _spec(form, is_dynamic=True))
    elif inputs and not str(dtype).startswith("fp"):  # vLLM reads FP8 and FP6
        yield f"dtype {dtype!r} of input_tensors"
    yield from (f"{key} are quantized" for key in ("output_tensors", "bias") if everything.get(key))
    caches = json_object(clues.record.get("export")).get("kv_cache_group")
    if not isinstance(caches, list) or not {*strings(caches)} <= named.keys():
        yield f"kv_cache_group {caches!r} of export"


def _differ(found: object, wanted: object) -> str:
    """Describe how a spec of tensors differs from ours; "" if not."""
    specs = [each if isinstance(each, list) else [each] for each in (found, wanted)]
    for own, expected in zip_longest(*(map(json_object, each) for each in specs), fillvalue=Json()):
        for key, value in expected.items():
            is_other = key not in _OF_MAKERS and (own.get(key) or None) != (value or None)
            if is_other or (key in _NEEDED and key not in own):
                return f"{key} {own.get(key)!r}, expected {value!r}"
    return ""


def _by_wildcard(clues: Clues) -> list[str]:
    """List linear layers that only a wildcard excludes."""
    patterns = strings(clues.record.get("exclude"))
    wildcards = tuple(pattern for pattern in patterns if set(pattern) & set("*?["))
    if not wildcards:
        return []
    named = tuple(pattern for pattern in patterns if pattern.startswith("re:"))
    return [
        module
        for name, ref in clues.tensors.items()
        if name.endswith(WEIGHT) and len(ref.shape) == 2 and ref.dtype in FLOAT_TYPES
        if (module := name.removesuffix(WEIGHT)) not in patterns
        if not matches_any(_APART, module) and not matches_any(named, module)
        if matches_any(wildcards, module)
    ]


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read `exclude`, which holds names and wildcards."""
    patterns = strings(clues.record.get("exclude"))
    return lambda module: any(fnmatchcase(module, pattern) for pattern in patterns)
