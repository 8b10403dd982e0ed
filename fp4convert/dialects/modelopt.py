"""modelopt: NVFP4 as NVIDIA's Model Optimizer exports it: weights only (W4A16_NVFP4), or activations too (NVFP4).

  M.weight          U8       [rows, columns / 2]
  M.weight_scale    F8_E4M3  [rows, columns / 16]
  M.weight_scale_2  F32      [], a multiplier: amax / 2688
  M.input_scale     F32      [], a multiplier, with four-bit activations

A record of the algorithm MIXED_PRECISION names the algorithm of every module: those of FP8 are ordinary tensors here.
MXFP4 (U8 scales of [rows, columns / 32], no others) is only read: no engine takes ModelOpt's own record of it.
Two records: config.json's quantization_config ("ignore") and hf_quant_config.json ("exclude_modules").  Engines match these
names as wildcards and also as substrings, so that a module named "output" would exclude "attention.output.dense" too:
such a name is written with its last letter in brackets, which fits only as a wildcard.
Source: ModelOpt 0.47, torch/export; vLLM 0.33, quantization/modelopt.py.  Readers: vLLM, SGLang, TensorRT-LLM, llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from fp4convert.dialects import (
    Clues,
    Doubt,
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
from fp4convert.formats import MXFP4, NVFP4
from fp4convert.shard import TensorRef
from fp4convert.spelling import ACTIVATIONS_FP4, Form, Scalars, Table

SCALARS = Scalars(".weight_scale_2", ".input_scale")
TRAITS = Traits(
    writes=(NVFP4,),
    scalars=SCALARS,
    ignores_by_name=True,
    only_reads=(MXFP4,),
    activations=(NVFP4,),
    shares_scales=True,
    suffixes=(".weight_scale", ".weight_scale_2"),
    companions=(".input_scale", ".k_scale", ".v_scale"),
    cache_scales=("k_proj.k_scale", "v_proj.v_scale"),
)
TABLE = Table((".weight", "U8"), ".weight_scale", {NVFP4: "F8_E4M3", MXFP4: "U8"}, SCALARS)
outputs, stored_shape, encode, decode = TABLE.outputs, TABLE.stored_shape, TABLE.encode, TABLE.decode
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes, unfit = each_alone, whole, no_notes, always_fit
_ALGORITHMS = {ACTIVATIONS_FP4: "NVFP4", 16: "W4A16_NVFP4"}
_MX_ALGORITHMS = ("mxfp4", "MXFP4", "W4A8_MXFP4_FP8")


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [stem for stem in stems_named(tensors, TRAITS.suffixes) if not is_fp8(tensors, f"{stem}.weight")]


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
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
    record: Json = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": scheme},
        "ignore": patterns,
        "producer": producer,
    }
    if form.kv_cache:
        record["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {
        "config.json": {"quantization_config": record},
        "hf_quant_config.json": {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": "FP8" if form.kv_cache else None,
                "group_size": form.format.block_size,
                "exclude_modules": patterns,
            },
        },
    }


def recognise(clues: Clues) -> Form | None:
    """config.json's record says it, or else hf_quant_config.json.

    Engines take the algorithm NVFP4 for weights alone where no group of modules has input_activations.
    """
    if clues.record:
        return _of_config(clues.record) if clues.record.get("quant_method") == "modelopt" else None
    return _form(_nested(clues)) if clues.hf_quant_config else None


def _of_config(record: Json) -> Form | None:
    form = _form(record)
    groups = record.get("config_groups")
    schemes = [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []
    if form and schemes and not any(scheme.get("input_activations") for scheme in schemes):
        form = replace(form, activations=16)
    cache = record.get("kv_cache_scheme")
    return replace(form, kv_cache="fp8") if form and isinstance(cache, dict) and cache.get("num_bits") == 8 else form


def _form(record: Json) -> Form | None:
    """What the algorithm, or those of the single modules, say."""
    layers = record.get("quantized_layers")
    named = [entry.get("quant_algo") for entry in layers.values() if isinstance(entry, dict)] if isinstance(layers, dict) else []
    algorithms = named if record.get("quant_algo") == "MIXED_PRECISION" else [record.get("quant_algo")]
    kv_cache = "fp8" if record.get("kv_cache_quant_algo") == "FP8" else None
    found = {activations for activations, name in _ALGORITHMS.items() if name in algorithms}
    if found:
        return Form(NVFP4, max(found), kv_cache=kv_cache)
    return Form(MXFP4, kv_cache=kv_cache) if any(name in _MX_ALGORITHMS for name in algorithms) else None


def _nested(clues: Clues) -> Json:
    nested = clues.hf_quant_config.get("quantization")
    return nested if isinstance(nested, dict) else {}


def judge(clues: Clues) -> Iterator[Doubt]:
    form = recognise(clues)
    if form and form.format is MXFP4:
        yield Doubt(
            "warning", "record-refused", "vLLM and SGLang know no algorithm of that name, though the artifact is consistent"
        )
    nested = _nested(clues)
    if not clues.record or not nested:
        return
    size = form.format.block_size if form else None
    for file, record in (("config.json", clues.record), ("hf_quant_config.json", nested)):
        if size and record.get("group_size", size) != size:
            yield Doubt("error", "record-strategy", f"{file} says group_size {record['group_size']!r}; expected {size}")
    caches = ["fp8" if nested.get("kv_cache_quant_algo") == "FP8" else None, form.kv_cache if form else None]
    if caches[0] != caches[1]:
        yield Doubt("error", "records-disagree", "only one of config.json and hf_quant_config.json asks for an FP8 cache")
    first, second = clues.record.get("quant_algo"), nested.get("quant_algo")
    if first != second:
        yield Doubt("error", "records-disagree", f"config.json says {first!r}, hf_quant_config.json {second!r}")
    ours, theirs = set(strings(clues.record.get("ignore"))), set(strings(nested.get("exclude_modules")))
    if ours != theirs:
        example = min(ours ^ theirs)
        yield Doubt("error", "records-disagree", f"only one of config.json and hf_quant_config.json excludes {example!r}")


def is_ignored(clues: Clues, module: str) -> bool:
    """`ignore` holds wildcards, and engines also look for each entry as a part of the name; MIXED_PRECISION names the others."""
    listed = clues.record.get("quantized_layers", _nested(clues).get("quantized_layers"))
    if isinstance(listed, dict) and not any(name == module or module.startswith(f"{name}.") for name in listed):
        return True
    patterns = strings(clues.record.get("ignore")) or strings(_nested(clues).get("exclude_modules"))
    return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)
