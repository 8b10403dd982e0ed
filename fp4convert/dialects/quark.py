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

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from fp4convert.dialects import (
    ACTIVATIONS_FP4,
    Clues,
    Form,
    Ignored,
    Json,
    Part,
    Read,
    always_fit,
    decode_scalar,
    each_alone,
    encode_global_scale,
    encode_scalar,
    half_columns,
    is_fp8,
    no_doubts,
    no_notes,
    stems_named,
    strings,
    whole,
)
from fp4convert.formats import MXFP4, NVFP4, Blocks, Kind, Quantized, Spans
from fp4convert.shard import TensorRef, TensorSpec

READS = WRITES = (MXFP4, NVFP4)
ACTIVATIONS = (MXFP4, NVFP4)
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = "multiplier"
SHARES_SCALES = False
HOLDS_EMBEDDINGS = False
PACKED = ".weight"
SUFFIXES = (".weight_scale", ".weight_scale_2")
COMPANIONS = (".input_scale_2", ".input_scale")
LABELS: tuple[str, ...] = ()
CACHE_SCALES: tuple[str, ...] = ()
stems, slots, notes, stored_shape, judge, unfit = each_alone, whole, no_notes, half_columns, no_doubts, always_fit


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    scale_dtype = "F8_E4M3" if form.format is NVFP4 else "U8"
    specs = [
        TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}.weight_scale", scale_dtype, (rows, columns // form.format.block_size)),
    ]
    if form.format.has_global_scale:
        specs.append(TensorSpec(f"{stem}.weight_scale_2", "F32", ()))
    if form.has_input_scale:
        specs.append(TensorSpec(f"{stem}.input_scale_2", "F32", ()))
    return tuple(specs)


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}.weight", rows.packed
        yield f"{stem}.weight_scale", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    if q.format.has_global_scale:
        yield f"{stem}.weight_scale_2", encode_global_scale(q, "multiplier")
    if input_scale is not None:
        yield f"{stem}.input_scale_2", encode_scalar(input_scale)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [stem for stem in stems_named(tensors, SUFFIXES) if not is_fp8(tensors, f"{stem}.weight")]


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    multiplier = decode_scalar(read(f"{stem}.weight_scale_2")) if form.format.has_global_scale else None
    rows, columns = shape
    return Spans(form.format, (rows, columns), read(f"{stem}.weight"), read(f"{stem}.weight_scale"), multiplier)


def decode_input_scale(module: str, read: Read) -> float:
    return decode_scalar(read(f"{module}.input_scale_2"))


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
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
        "global_quant_config": {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None},
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


def recognise(clues: Clues) -> Form | None:
    if clues.record.get("quant_method") != "quark":
        return None
    declared = clues.record.get("global_quant_config")
    scheme = declared if isinstance(declared, dict) else {}
    weights, inputs = (_first(scheme.get(key)) for key in ("weight", "input_tensors"))
    fmt = next((fmt for fmt in READS if fmt.block_size == weights.get("group_size") and weights.get("dtype") == "fp4"), None)
    activations = ACTIVATIONS_FP4 if inputs.get("dtype") == "fp4" else 16
    return Form(fmt, activations) if fmt else None


def _first(spec: object) -> dict[str, object]:
    """The description of the blocks, where there may be two stages."""
    entry = spec[0] if isinstance(spec, list) and spec else spec
    return entry if isinstance(entry, dict) else {}


def is_ignored(clues: Clues, module: str) -> bool:
    """`exclude` holds names and wildcards."""
    return any(fnmatchcase(module, pattern) for pattern in strings(clues.record.get("exclude")))
