"""compressed-tensors: nvfp4-pack-quantized and mxfp4-pack-quantized.

  M.weight_packed        U8  [rows, columns / 2]
  M.weight_scale         nvfp4: F8_E4M3 [rows, columns / 16]; mxfp4: U8 [rows, columns / 32]
  M.weight_global_scale  nvfp4: F32 [1], a divisor: 2688 / amax
  M.input_global_scale   nvfp4 with four-bit activations: F32 [1], a divisor; mxfp4 scales activations as they come

Traps (each loads and computes garbage, or does not load): the scalar shape [] for the global scale; F8_E8M0 as the dtype
of MXFP4 scales; a missing quantization_status or strategy; an unknown key inside config_groups.
Source: compressed-tensors 0.20, compressors/nvfp4 and compressors/mxfp4.  Readers: vLLM, SGLang, transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from fp4convert.dialects import (
    ACTIVATIONS_FP4,
    Clues,
    Doubt,
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
    no_notes,
    stems_named,
    strings,
    whole,
)
from fp4convert.formats import MXFP4, NVFP4, Blocks, Kind, Quantized, Spans
from fp4convert.recipe import matches
from fp4convert.shard import TensorRef, TensorSpec

READS = WRITES = (NVFP4, MXFP4)
ACTIVATIONS = (NVFP4, MXFP4)
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = "divisor"
SHARES_SCALES = True
HOLDS_EMBEDDINGS = False
PACKED = ".weight_packed"
SUFFIXES = (".weight_packed", ".weight_scale", ".weight_global_scale")
COMPANIONS = (".input_global_scale", ".input_scale")  # the first is an output where the form says so
LABELS: tuple[str, ...] = ()
CACHE_SCALES = ("k_scale", "v_scale")
_SCALE_DTYPE = {NVFP4: "F8_E4M3", MXFP4: "U8"}
_STRATEGIES = ((NVFP4.block_size, "tensor_group"), (MXFP4.block_size, "group"))
_FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
stems, slots, notes, stored_shape, unfit = each_alone, whole, no_notes, half_columns, always_fit


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    specs = [
        TensorSpec(f"{stem}.weight_packed", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}.weight_scale", _SCALE_DTYPE[form.format], (rows, columns // form.format.block_size)),
    ]
    if form.format.has_global_scale:
        specs.append(TensorSpec(f"{stem}.weight_global_scale", "F32", (1,)))
    if form.has_input_scale:
        specs.append(TensorSpec(f"{stem}.input_global_scale", "F32", (1,)))
    return tuple(specs)


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}.weight_packed", rows.packed
        yield f"{stem}.weight_scale", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    if q.format.has_global_scale:
        yield f"{stem}.weight_global_scale", encode_global_scale(q, "divisor")
    if input_scale is not None:
        yield f"{stem}.input_global_scale", encode_scalar(input_scale, is_inverse=True)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """All but FP8 modules, which have a .weight beside their .weight_scale."""
    return [stem for stem in stems_named(tensors, SUFFIXES) if f"{stem}.weight" not in tensors]


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    divisor = decode_scalar(read(f"{stem}.weight_global_scale")) if form.format.has_global_scale else None
    rows, columns = shape
    packed, block_scales = read(f"{stem}.weight_packed"), read(f"{stem}.weight_scale")
    return Spans(form.format, (rows, columns), packed, block_scales, divisor, "divisor")


def decode_input_scale(module: str, read: Read) -> float:
    divisor = decode_scalar(read(f"{module}.input_global_scale"))
    return 1 / divisor if divisor else math.inf


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
    fmt = form.format
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if fmt is NVFP4 else "group",
        "group_size": fmt.block_size,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if fmt is NVFP4 else "torch.uint8",
    }
    inputs = {**weights, **({"dynamic": "local", "observer": "static_minmax"} if fmt is NVFP4 else {"dynamic": True})}
    activations = inputs if form.activations == ACTIVATIONS_FP4 else None
    record: Json = {
        "quant_method": "compressed-tensors",
        "format": f"{fmt.name}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": _declare(ignored),
    }
    if form.kv_cache:
        record["kv_cache_scheme"] = dict(_FP8_CACHE)
    return {"config.json": {"quantization_config": record}}


def _declare(ignored: Ignored) -> list[str]:
    """Exact names, and expressions after "re:"; a module apart is also named under any prefix that an engine adds."""
    names = [name for name in ignored.apart() if not name.startswith("re:")]
    prefixed = [rf"re:(?:.*\.)?{re.escape(name)}$" for name in ignored.apart()]
    return [*names, *prefixed, *(_expression(pattern) for pattern in ignored.patterns)]


def _expression(pattern: str) -> str:
    """A glob as an expression that engines match from the start; a name without wildcards stays as it is."""
    if pattern.startswith("re:") or not set(pattern) & set("*?["):
        return pattern
    wildcards = {"*": ".*", "?": "."}
    parts = re.split(r"(\*|\?|\[[^\]]+\])", pattern)
    spelled = (part.replace("[!", "[^") if part.startswith("[") else wildcards.get(part, re.escape(part)) for part in parts)
    return f"re:{''.join(spelled)}$"


def recognise(clues: Clues) -> Form | None:
    if clues.record.get("quant_method") != "compressed-tensors":
        return None
    declared = {str(clues.record.get("format", ""))} | {str(scheme.get("format", "")) for scheme in _schemes(clues)}
    found = [fmt for fmt in READS if f"{fmt.name}-pack-quantized" in declared]
    if len(found) != 1:
        return None
    inputs = [scheme.get("input_activations") for scheme in _schemes(clues)]
    is_w4a4 = any(isinstance(numbers, dict) and numbers.get("num_bits") == ACTIVATIONS_FP4 for numbers in inputs)
    cache = clues.record.get("kv_cache_scheme")
    kv_cache = "fp8" if isinstance(cache, dict) and cache.get("num_bits") == 8 else None
    return Form(found[0], ACTIVATIONS_FP4 if is_w4a4 else 16, kv_cache=kv_cache)


def _schemes(clues: Clues) -> list[dict[str, object]]:
    groups = clues.record.get("config_groups")
    return [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []


def judge(clues: Clues) -> Iterator[Doubt]:
    """What engines load without a word, and then compute garbage with."""
    if clues.record.get("quant_method") != "compressed-tensors":
        return
    if clues.record.get("quantization_status") != "compressed":
        detail = 'quantization_status is not "compressed": transformers would take the packed codes for weights'
        yield Doubt("error", "record-status", detail)
    for scheme in _schemes(clues):
        weights = scheme.get("weights")
        numbers = weights if isinstance(weights, dict) else {}
        if numbers.get("num_bits") != 4:
            continue
        if (numbers.get("group_size"), numbers.get("strategy")) not in _STRATEGIES:
            detail = f"a group of modules has strategy {numbers.get('strategy')!r} and group_size {numbers.get('group_size')!r}"
            yield Doubt("error", "record-strategy", f'{detail}; expected "tensor_group" of 16 or "group" of 32')


def is_ignored(clues: Clues, module: str) -> bool:
    """`ignore` holds exact names, and expressions after "re:" that are matched from the start."""
    patterns = strings(clues.record.get("ignore"))
    return any(pattern == module or (pattern.startswith("re:") and matches(pattern, module)) for pattern in patterns)
