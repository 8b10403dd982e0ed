"""modelopt: NVFP4 as NVIDIA's Model Optimizer exports it: weights only (W4A16_NVFP4), or activations too (NVFP4).

  M.weight          U8       [rows, columns / 2]
  M.weight_scale    F8_E4M3  [rows, columns / 16]
  M.weight_scale_2  F32      [], a multiplier: amax / 2688
  M.input_scale     F32      [], a multiplier, with four-bit activations

Two records: config.json's quantization_config ("ignore") and hf_quant_config.json ("exclude_modules").  Engines match these
names as wildcards and also as substrings, so that a module named "output" would exclude "attention.output.dense" too:
such a name is written with its last letter in brackets, which fits only as a wildcard.
Source: ModelOpt 0.47, torch/export; vLLM 0.33, quantization/modelopt.py.  Readers: vLLM, SGLang, TensorRT-LLM, llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from fp4convert.dialects import ACTIVATIONS_FP4, Form, Ignored, encode_global_scale, encode_scalar, strings
from fp4convert.formats import NVFP4, Format, Kind, Quantized
from fp4convert.shard import TensorSpec

FORMATS = (NVFP4,)
GLOBAL_SCALE_KIND: Kind = "multiplier"
SUFFIXES = (".weight_scale", ".weight_scale_2")
COMPANIONS = (".input_scale", ".k_scale", ".v_scale")
_ALGORITHMS = {ACTIVATIONS_FP4: "NVFP4", 16: "W4A16_NVFP4"}


def outputs(module: str, shape: tuple[int, int], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    specs = (
        TensorSpec(f"{module}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // form.format.block_size)),
        TensorSpec(f"{module}.weight_scale_2", "F32", ()),
    )
    return (*specs, TensorSpec(f"{module}.input_scale", "F32", ())) if form.has_input_scale else specs


def encode(module: str, rows: Quantized) -> dict[str, memoryview]:
    return {f"{module}.weight": rows.packed, f"{module}.weight_scale": rows.block_scales}


def encode_global(module: str, q: Quantized, input_scale: float | None) -> dict[str, memoryview]:
    parts = {f"{module}.weight_scale_2": encode_global_scale(q, GLOBAL_SCALE_KIND)}
    return parts if input_scale is None else {**parts, f"{module}.input_scale": encode_scalar(input_scale)}


def decode(module: str, shape: tuple[int, int], fmt: Format, read: Callable[[str], memoryview]) -> Quantized:
    multiplier = struct.unpack("<f", read(f"{module}.weight_scale_2"))[0]
    return Quantized(fmt, shape, read(f"{module}.weight"), read(f"{module}.weight_scale"), multiplier, "multiplier")


def decode_input_scale(module: str, read: Callable[[str], memoryview]) -> float:
    return float(struct.unpack("<f", read(f"{module}.input_scale"))[0])


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, dict[str, object]]:
    everything = "\n".join(quantized)
    globs = [pattern for pattern in ignored.patterns if not pattern.startswith("re:")]
    covered = Ignored(ignored.modules, tuple(globs)).apart()
    patterns = [f"{name[:-1]}[{name[-1]}]" if name in everything else name for name in (*covered, *globs)]
    producer = {"name": "modelopt", "version": "0.47.0"}
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": form.format.block_size}
    scheme = {"targets": ["Linear"], "weights": numbers}
    if form.has_input_scale:
        scheme["input_activations"] = dict(numbers)
    algorithm = _ALGORITHMS[form.activations]
    return {
        "config.json": {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "config_groups": {"group_0": scheme},
            "ignore": patterns,
            "producer": producer,
        },
        "hf_quant_config.json": {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": form.format.block_size,
                "exclude_modules": patterns,
            },
        },
    }


def recognise(quantization_config: Mapping[str, object]) -> Form | None:
    """Engines take the algorithm NVFP4 for weights alone where no group of modules has input_activations."""
    if quantization_config.get("quant_method") != "modelopt":
        return None
    declared = quantization_config.get("quant_algo")
    activations = next((activations for activations, name in _ALGORITHMS.items() if name == declared), None)
    groups = quantization_config.get("config_groups")
    schemes = [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []
    if schemes and not any(scheme.get("input_activations") for scheme in schemes):
        activations = activations and 16
    return Form(NVFP4, activations) if activations else None


def is_ignored(quantization_config: Mapping[str, object], module: str) -> bool:
    """`ignore` holds wildcards; engines also look for each entry as a part of the name."""
    patterns = strings(quantization_config.get("ignore"))
    return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)
