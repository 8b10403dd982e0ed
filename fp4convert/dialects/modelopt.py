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
    is_fp8,
    no_notes,
    stems_named,
    strings,
    whole,
)
from fp4convert.formats import MXFP4, NVFP4, Blocks, Kind, Quantized, Spans
from fp4convert.shard import TensorRef, TensorSpec

READS = (NVFP4, MXFP4)
WRITES = (NVFP4,)
ACTIVATIONS = (NVFP4,)
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = "multiplier"
SHARES_SCALES = True
HOLDS_EMBEDDINGS = False
PACKED = ".weight"
SUFFIXES = (".weight_scale", ".weight_scale_2")
COMPANIONS = (".input_scale", ".k_scale", ".v_scale")
LABELS: tuple[str, ...] = ()
CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
_ALGORITHMS = {ACTIVATIONS_FP4: "NVFP4", 16: "W4A16_NVFP4"}
_MX_ALGORITHMS = ("mxfp4", "MXFP4", "W4A8_MXFP4_FP8")
stems, slots, notes, stored_shape, unfit = each_alone, whole, no_notes, half_columns, always_fit


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    is_nvfp4 = form.format is NVFP4
    specs = [
        TensorSpec(f"{stem}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}.weight_scale", "F8_E4M3" if is_nvfp4 else "U8", (rows, columns // form.format.block_size)),
    ]
    if is_nvfp4:
        specs.append(TensorSpec(f"{stem}.weight_scale_2", "F32", ()))
    if form.has_input_scale:
        specs.append(TensorSpec(f"{stem}.input_scale", "F32", ()))
    return tuple(specs)


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}.weight", rows.packed
        yield f"{stem}.weight_scale", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    yield f"{stem}.weight_scale_2", encode_global_scale(q, "multiplier")
    if input_scale is not None:
        yield f"{stem}.input_scale", encode_scalar(input_scale)


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return [stem for stem in stems_named(tensors, SUFFIXES) if not is_fp8(tensors, f"{stem}.weight")]


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    multiplier = decode_scalar(read(f"{stem}.weight_scale_2")) if form.format.has_global_scale else None
    rows, columns = shape
    return Spans(form.format, (rows, columns), read(f"{stem}.weight"), read(f"{stem}.weight_scale"), multiplier)


def decode_input_scale(module: str, read: Read) -> float:
    return decode_scalar(read(f"{module}.input_scale"))


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
    first, second = clues.record.get("quant_algo"), nested.get("quant_algo")
    if first != second:
        yield Doubt("error", "records-disagree", f"config.json says {first!r}, hf_quant_config.json {second!r}")
    ours, theirs = set(strings(clues.record.get("ignore"))), set(strings(nested.get("exclude_modules")))
    if ours != theirs:
        example = min(ours ^ theirs)
        yield Doubt("error", "records-disagree", f"only one of config.json and hf_quant_config.json excludes {example!r}")


def is_ignored(clues: Clues, module: str) -> bool:
    """`ignore` holds wildcards; engines also look for each entry as a part of the name."""
    patterns = strings(clues.record.get("ignore")) or strings(_nested(clues).get("exclude_modules"))
    return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)
