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
import struct
from collections.abc import Callable, Iterable, Mapping

from fp4convert.dialects import ACTIVATIONS_FP4, Form, Ignored, encode_global_scale, encode_scalar, strings
from fp4convert.formats import MXFP4, NVFP4, Format, Kind, Quantized
from fp4convert.recipe import matches
from fp4convert.shard import TensorSpec

FORMATS = (NVFP4, MXFP4)
GLOBAL_SCALE_KIND: Kind = "divisor"
SUFFIXES = (".weight_packed", ".weight_scale", ".weight_global_scale")
COMPANIONS = (".input_global_scale", ".input_scale")  # the first is an output where the form says so
_SCALE_DTYPE = {NVFP4: "F8_E4M3", MXFP4: "U8"}


def outputs(module: str, shape: tuple[int, int], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    specs = [
        TensorSpec(f"{module}.weight_packed", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.weight_scale", _SCALE_DTYPE[form.format], (rows, columns // form.format.block_size)),
    ]
    if form.format.has_global_scale:
        specs.append(TensorSpec(f"{module}.weight_global_scale", "F32", (1,)))
    if form.has_input_scale:
        specs.append(TensorSpec(f"{module}.input_global_scale", "F32", (1,)))
    return tuple(specs)


def encode(module: str, rows: Quantized) -> dict[str, memoryview]:
    return {f"{module}.weight_packed": rows.packed, f"{module}.weight_scale": rows.block_scales}


def encode_global(module: str, q: Quantized, input_scale: float | None) -> dict[str, memoryview]:
    parts = {f"{module}.weight_global_scale": encode_global_scale(q, GLOBAL_SCALE_KIND)} if q.format.has_global_scale else {}
    if input_scale is not None:
        parts[f"{module}.input_global_scale"] = encode_scalar(input_scale, is_inverse=True)
    return parts


def decode(module: str, shape: tuple[int, int], fmt: Format, read: Callable[[str], memoryview]) -> Quantized:
    divisor = struct.unpack("<f", read(f"{module}.weight_global_scale"))[0] if fmt.has_global_scale else None
    packed, block_scales = read(f"{module}.weight_packed"), read(f"{module}.weight_scale")
    return Quantized(fmt, shape, packed, block_scales, divisor, "divisor")


def decode_input_scale(module: str, read: Callable[[str], memoryview]) -> float:
    (divisor,) = struct.unpack("<f", read(f"{module}.input_global_scale"))
    return 1 / divisor if divisor else math.inf


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, dict[str, object]]:
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
    return {
        "config.json": {
            "quant_method": "compressed-tensors",
            "format": f"{fmt.name}-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
            "ignore": _declare(ignored),
        }
    }


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


def recognise(quantization_config: Mapping[str, object]) -> Form | None:
    if quantization_config.get("quant_method") != "compressed-tensors":
        return None
    declared = str(quantization_config.get("format", ""))
    fmt = next((fmt for fmt in FORMATS if declared == f"{fmt.name}-pack-quantized"), None)
    groups = quantization_config.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    inputs = [scheme.get("input_activations") for scheme in schemes if isinstance(scheme, dict)]
    is_w4a4 = any(isinstance(numbers, dict) and numbers.get("num_bits") == ACTIVATIONS_FP4 for numbers in inputs)
    return Form(fmt, ACTIVATIONS_FP4 if is_w4a4 else 16) if fmt else None


def is_ignored(quantization_config: Mapping[str, object], module: str) -> bool:
    """`ignore` holds exact names, and expressions after "re:" that are matched from the start."""
    patterns = strings(quantization_config.get("ignore"))
    return any(pattern == module or (pattern.startswith("re:") and matches(pattern, module)) for pattern in patterns)
