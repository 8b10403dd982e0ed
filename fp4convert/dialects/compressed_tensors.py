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

import re
from collections.abc import Iterable, Iterator, Mapping

from fp4convert.dialects import Clues, Doubt, Ignored, Json, Traits, always_fit, each_alone, no_notes, stems_named, strings, whole
from fp4convert.errors import InputError
from fp4convert.formats import MXFP4, NVFP4
from fp4convert.patterns import matches
from fp4convert.shard import TensorRef
from fp4convert.spelling import ACTIVATIONS_FP4, Form, Scalars, Table

SCALARS = Scalars(".weight_global_scale", ".input_global_scale", (1,), "divisor")
TRAITS = Traits(
    writes=(NVFP4, MXFP4),
    scalars=SCALARS,
    ignores_by_name=True,
    activations=(NVFP4, MXFP4),
    shares_scales=True,
    packed=".weight_packed",
    suffixes=(".weight_packed", ".weight_scale", ".weight_global_scale"),
    companions=(".input_global_scale", ".input_scale"),  # the first is an output where the form says so
    cache_scales=("k_scale", "v_scale"),
)
TABLE = Table((".weight_packed", "U8"), ".weight_scale", {NVFP4: "F8_E4M3", MXFP4: "U8"}, SCALARS)
outputs, stored_shape, encode, decode = TABLE.outputs, TABLE.stored_shape, TABLE.encode, TABLE.decode
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes, unfit = each_alone, whole, no_notes, always_fit
_STRATEGIES = ((NVFP4.block_size, "tensor_group"), (MXFP4.block_size, "group"))
_FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """All but FP8 modules, which have a .weight beside their .weight_scale."""
    return [stem for stem in stems_named(tensors, TRAITS.suffixes) if f"{stem}.weight" not in tensors]


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
    found = [fmt for fmt in TRAITS.reads if f"{fmt.name}-pack-quantized" in declared]
    if len(found) > 1:
        detail = "config.json: groups of NVFP4 and of MXFP4 in one artifact; this version reads one four-bit format at a time"
        raise InputError("formats-mixed", detail, "Convert them apart.")
    if not found:
        return None
    inputs = [_bits(scheme, "input_activations") for scheme in _schemes(clues) if _bits(scheme, "weights") == 4]
    is_w4a4 = bool(inputs) and all(bits == ACTIVATIONS_FP4 for bits in inputs)
    cache = clues.record.get("kv_cache_scheme")
    kv_cache = _cache_named(cache) if isinstance(cache, dict) else None
    return Form(found[0], ACTIVATIONS_FP4 if is_w4a4 else 16, kv_cache=kv_cache)


def _cache_named(scheme: Json) -> str:
    """fp8, or what else a scheme says, such as int8."""
    return f"{'fp' if scheme.get('type') == 'float' else scheme.get('type')}{scheme.get('num_bits')}"


def _schemes(clues: Clues) -> list[dict[str, object]]:
    groups = clues.record.get("config_groups")
    return [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []


def _bits(scheme: dict[str, object], key: str) -> object:
    numbers = scheme.get(key)
    return numbers.get("num_bits") if isinstance(numbers, dict) else None


def judge(clues: Clues) -> Iterator[Doubt]:
    """What engines load without a word, and then compute garbage with."""
    if clues.record.get("quant_method") != "compressed-tensors":
        return
    if clues.record.get("quantization_status") != "compressed":
        detail = 'quantization_status is not "compressed": transformers would take the packed codes for weights'
        yield Doubt("error", "record-status", detail)
    if clues.record.get("transform_config"):
        yield Doubt("error", "record-transform", "weights are rotated (transform_config), which nothing but its engine undoes")
    for scheme in _schemes(clues):
        own = str(scheme.get("format") or clues.record.get("format", ""))
        weights = scheme.get("weights")
        if own.endswith("-pack-quantized") and own.startswith(tuple(fmt.name for fmt in TRAITS.reads)):
            yield from _judge_scheme(weights if isinstance(weights, dict) else {}, scheme.get("targets"))


def _judge_scheme(weights: Json, targets: object) -> Iterator[Doubt]:
    """What a group of four-bit modules says of its weights."""
    if (weights.get("group_size"), weights.get("strategy")) not in _STRATEGIES:
        detail = f"a group of modules has strategy {weights.get('strategy')!r} and group_size {weights.get('group_size')!r}"
        yield Doubt("error", "record-strategy", f'{detail}; expected "tensor_group" of 16 or "group" of 32')
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True))
    if kind != (4, "float", True):
        detail = f"a group of modules has num_bits {kind[0]!r}, type {kind[1]!r} and symmetric {kind[2]!r}"
        yield Doubt("error", "record-strategy", f'{detail}; expected 4, "float" and true')
    if not strings(targets):
        yield Doubt("error", "record-strategy", 'a group of modules has no targets; expected ["Linear"]')


def is_ignored(clues: Clues, module: str) -> bool:
    """`ignore` holds exact names, names of classes, and expressions after "re:" that are matched from the start."""
    patterns = strings(clues.record.get("ignore"))
    return "Linear" in patterns or any(
        pattern == module or (pattern.startswith("re:") and matches(pattern, module)) for pattern in patterns
    )
