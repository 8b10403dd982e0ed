"""modelopt: NVFP4, FP8 and MXFP8 as NVIDIA's Model Optimizer exports them.

  M.weight          U8       [rows, columns / 2]
  M.weight_scale    F8_E4M3  [rows, columns / 16]
  M.weight_scale_2  F32      [], a multiplier: amax / 2688
  M.input_scale     F32      [], a multiplier, with four-bit activations

FP8 and MXFP8, alone or beside it: M.weight F8_E4M3 [rows, columns] and
  FP8                       M.weight_scale F32 [], M.input_scale F32 []: engines quantize
                            activations with it, so it must be there
  FP8_PER_CHANNEL_PER_TOKEN M.weight_scale F32 [rows]
  FP8_PB_WO                 M.weight_scale F32 [rows / 128, 1, columns / 128, 1]
  MXFP8                     M.weight_scale U8 [rows, columns / 32], E8M0
A record of the algorithm MIXED_PRECISION names the algorithm of every module ("quantized_layers");
vLLM 0.33 knows FP8, NVFP4 and W4A16_NVFP4 in one, later ones and SGLang FP8_PB_WO too.
Experts may be stacks, M.weight U8 [experts, rows, columns / 2] with scales of three dimensions and
one scalar for each (Step 3.7), or lie across (Llama 4, gpt-oss): modelopt_stacks.py reads both.
Written they are one by one, as vLLM takes them too.
MXFP4 (U8 scales of [rows, columns / 32], no others) is only read: no engine takes ModelOpt's own
record of it.
Two records: config.json's quantization_config ("ignore") and hf_quant_config.json
("exclude_modules"). Engines match these names as wildcards and also as substrings, so that a module
named "output" would exclude "attention.output.dense" too: such a name is written with its last
letter in brackets, which fits only as a wildcard.
Source: ModelOpt 0.47, torch/export; vLLM 0.33, quantization/modelopt.py.
Readers: vLLM, SGLang, TensorRT-LLM, llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    json_object,
    nothing,
    schemes_of,
    stems_of_scales,
    strings,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    MXFP8_BLOCK,
    MXFP8_FORM,
    Form,
    Granularity,
    Group,
    everywhere,
    group_modules,
    parents_of,
)
from fp4convert.checkpoint.dialects.modelopt_stacks import Stacks
from fp4convert.checkpoint.dialects.registry import METHODS, SUFFIXES
from fp4convert.checkpoint.dialects.tables import CacheScales, Fp8Table, Scalars, Table, scale_grid
from fp4convert.errors import Finding
from fp4convert.numerics.formats import E4M3_MAX, FP8, MXFP4, MXFP8, NVFP4
from fp4convert.storage.checkpoint_files import ENGINE_RECORD
from fp4convert.storage.safetensors import TensorRef

_FP8_ACTIVATIONS: dict[Granularity, int] = {
    "tensor": ACTIVATIONS_FP8,
    "row": ACTIVATIONS_FP8,
    (128, 128): 16,
    MXFP8_BLOCK: ACTIVATIONS_FP8,
}


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...] | None:
    rows, columns = scale_grid(shape, granularity)
    return {
        "tensor": (),
        "row": (rows,),
        (128, 128): (rows, 1, columns, 1),
        MXFP8_BLOCK: (rows, columns),
    }.get(granularity)


METHOD = METHODS["modelopt"]
_CACHE_ENDINGS = ("k_proj.k_scale", "v_proj.v_scale")
_OTHERS = (
    "as ModelOpt writes them for Hugging Face, and vLLM and TensorRT-LLM read them; from Megatron"
    " ModelOpt writes / 2688, which older versions of TensorRT-LLM expect"
)
TRAITS = Traits(
    writes=(NVFP4, FP8, MXFP8),
    scalars=Scalars(".weight_scale_2", ".input_scale"),
    ignores_by_name=True,
    activations=(NVFP4,),
    shares_scales=True,
    suffixes=SUFFIXES["modelopt"],
    companions=(".input_scale", ".k_scale", ".v_scale"),
    cache_scales={
        FP8.name: CacheScales(_CACHE_ENDINGS, E4M3_MAX),
        NVFP4.name: CacheScales(_CACHE_ENDINGS, E4M3_MAX, _OTHERS),
    },
    mixes=(NVFP4, FP8, MXFP8),
    takes_turns="_bias",
    fp8=Fp8Table("tensor", _scale_shape, ".input_scale", activations=_FP8_ACTIVATIONS),
)
SCALE_DTYPES = {NVFP4: "F8_E4M3", MXFP4: "U8"}
TABLE = Table((".weight", "U8"), ".weight_scale", SCALE_DTYPES, TRAITS.scalars, fp8=TRAITS.fp8)
STACKS = Stacks(TABLE)
outputs, encode, decode, slots = STACKS.outputs, TABLE.encode, STACKS.decode, STACKS.slots
stems, stored_shape, unfit = each_alone, STACKS.stored_shape, TABLE.unfit
notes = nothing
_ALGORITHMS = {ACTIVATIONS_FP4: "NVFP4", 16: "W4A16_NVFP4"}
_FP8_ALGORITHMS: dict[Granularity, str] = {
    "tensor": "FP8",
    "row": "FP8_PER_CHANNEL_PER_TOKEN",
    (128, 128): "FP8_PB_WO",
    MXFP8_BLOCK: MXFP8.name.upper(),
}
_MX_ALGORITHMS = ("mxfp4", "MXFP4", "W4A8_MXFP4_FP8")


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return sorted({*stems_of_scales(tensors, TRAITS.suffixes), *STACKS.find(tensors)})


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    everything = "\n".join(module for group in groups for module in group.modules)
    globs = [pattern for pattern in ignored.patterns if not pattern.startswith("re:")]
    # Names too, not wildcards alone: of a fused layer vLLM looks for the exact names of its parts.
    patterns = [
        f"{name[:-1]}[{name[-1]}]" if name in everything else name
        for name in (*ignored.with_engine_names(), *globs)
    ]
    producer = {"name": "modelopt", "version": "0.47.0"}
    is_mixed, kv_cache = len(groups) > 1, groups[0].form.kv_cache
    algorithm = "MIXED_PRECISION" if is_mixed else _algorithm(groups[0].form)
    schemes = [
        _scheme(group.form, sorted(group.modules) if is_mixed else ["Linear"]) for group in groups
    ]
    layers: Json = {}
    for form, modules in groups:
        entry: Json = {"quant_algo": _algorithm(form)}
        if form.format.block_size:
            entry["group_size"] = form.format.block_size
        names = (name for each in modules for name in (each, *ignored.renamed.get(each, ())))
        layers |= {name: dict(entry) for name in names}
    mixed: Json = {"quantized_layers": dict(sorted(layers.items()))} if is_mixed else {}
    record: Json = {
        "quant_method": METHOD,
        "quant_algo": algorithm,
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        **mixed,
        "ignore": patterns,
        "producer": producer,
    }
    if kv_cache == "fp8":
        record["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif kv_cache:
        record["kv_cache_scheme"] = kv_cache.upper()
    formats = sorted((group.form.format for group in groups), key=lambda fmt: not fmt.is_fp4)
    sizes = [fmt.block_size for fmt in formats if fmt.block_size]
    return {
        "config.json": {"quantization_config": record},
        ENGINE_RECORD: {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": kv_cache.upper() if kv_cache else None,
                **({"group_size": sizes[0]} if sizes else {}),
                "exclude_modules": patterns,
                **mixed,
            },
        },
    }


def _algorithm(form: Form) -> str:
    """Name the algorithm of a form; of FP8 by its granularity."""
    if form.format.is_fp4:
        return _ALGORITHMS[form.activations]
    return _FP8_ALGORITHMS[form.granularity or "tensor"]


def _scheme(form: Form, targets: list[str]) -> Json:
    """Describe a group of modules: their names, weights and activations."""
    bits = 4 if form.format.is_fp4 else 8
    numbers: Json = {"dynamic": False, "num_bits": bits, "type": "float"}
    if form.format.block_size:
        numbers["group_size"] = form.format.block_size
    weights, has_inputs = dict(numbers), form.has_input_scale or not form.format.is_fp4
    if form.granularity == "row":
        weights["strategy"] = "channel"
    elif isinstance(form.granularity, tuple) and form.format is FP8:
        weights |= {"strategy": "block", "block_structure": list(form.granularity)}
        has_inputs = False
    inputs = {"input_activations": numbers} if has_inputs else {}
    return {"targets": targets, "weights": weights, **inputs}


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Read config.json's record, or else hf_quant_config.json.

    Where no group of modules has input_activations, engines quantize weights alone under NVFP4.
    """
    record = clues.record
    if not record:
        return _groups(_nested(clues)) if clues.hf_quant_config else ()
    if record.get("quant_method") != METHOD:
        return ()
    groups, schemes = _groups(record), schemes_of(record)
    if schemes and not any(scheme.get("input_activations") for scheme in schemes):
        groups = tuple(
            Group(replace(form, activations=16) if form.format.is_fp4 else form, names)
            for form, names in groups
        )
    return groups


def _groups(record: Json) -> tuple[Group, ...]:
    """Read the algorithm of all modules, or of each."""
    kv_cache = _cache_asked(record)
    if record.get("quant_algo") != "MIXED_PRECISION":
        return everywhere(_form(record.get("quant_algo"), kv_cache))
    known: list[tuple[str, Form]] = []
    for name, entry in json_object(record.get("quantized_layers")).items():
        if form := _form(json_object(entry).get("quant_algo"), kv_cache):
            known += [(name, form), (f"{name}.*", form)]
    return group_modules(known)


def _cache_asked(record: Json) -> str | None:
    """Read the format of the cache from either record; None for unknown words."""
    scheme = record.get("kv_cache_scheme") or record.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        is_four_bit = scheme.get("num_bits") == 4 and scheme.get("type") == "float"
        return "fp8" if scheme.get("num_bits") == 8 else "nvfp4" if is_four_bit else None
    word = str(scheme).lower()
    return word if word in TRAITS.cache_scales else None


def _form(algorithm: object, kv_cache: str | None) -> Form | None:
    """Return the form of an algorithm; None for one that is not read."""
    if algorithm in _MX_ALGORITHMS:
        return Form(MXFP4, kv_cache=kv_cache)
    for activations, name in _ALGORITHMS.items():
        if algorithm == name:
            return Form(NVFP4, activations, kv_cache=kv_cache)
    for granularity, name in _FP8_ALGORITHMS.items():
        if str(algorithm).upper() == name:
            is_mx = granularity == MXFP8_BLOCK
            form = MXFP8_FORM if is_mx else Form(FP8, granularity=granularity)
            return replace(form, activations=_FP8_ACTIVATIONS[granularity], kv_cache=kv_cache)
    return None


def _nested(clues: Clues) -> Json:
    return json_object(clues.hf_quant_config.get("quantization"))


def judge(clues: Clues) -> Iterator[Finding]:
    """Find where its two records disagree, or engines refuse them."""
    groups = recognise(clues)
    form = groups[0].form if groups else None
    if any(group.form.format is MXFP4 for group in groups):
        detail = "vLLM and SGLang know no algorithm of that name, though the artifact is consistent"
        yield Finding("warning", "record-refused", None, detail)
    record, nested = clues.record, _nested(clues)
    if record.get("quant_algo") == _ALGORITHMS[ACTIVATIONS_FP4] and form and form.activations == 16:
        detail = f"quant_algo is {record['quant_algo']}, and no group has input_activations"
        detail = f"{detail}: only weights have four bits, which the name {_ALGORITHMS[16]} says"
        yield Finding("note", "activations-unsaid", None, detail)
    if not record and nested.get("quant_algo") == _ALGORITHMS[16]:
        detail = (
            f"config.json has no record: by {ENGINE_RECORD} alone vLLM knows no {_ALGORITHMS[16]}"
        )
        yield Finding("warning", "record-refused", None, detail)
    sizes = [size for group in groups if (size := group.form.format.block_size)]
    weights = [("config.json", json_object(one.get("weights"))) for one in schemes_of(record)]
    for file, each in (("config.json", record), *weights, (ENGINE_RECORD, nested)):
        if sizes and each.get("group_size", min(sizes)) not in sizes:
            detail = f"{file} says group_size {each['group_size']!r}; expected {min(sizes)}"
            yield Finding("error", "record-strategy", None, detail)
    if not record or not nested:
        return
    only_one = "only one of config.json and hf_quant_config.json"
    caches = {form.kv_cache if form else None, _cache_asked(nested)}
    if len(caches) > 1:
        words = " or ".join(sorted(cache.upper() for cache in caches if cache))
        yield Finding("error", "records-disagree", None, f"{only_one} asks for an {words} cache")
    first, second = record.get("quant_algo"), nested.get("quant_algo")
    if first != second:
        detail = f"config.json says {first!r}, hf_quant_config.json {second!r}"
        yield Finding("error", "records-disagree", None, detail)
    differing = set(strings(record.get("ignore"))) ^ set(strings(nested.get("exclude_modules")))
    if differing:
        detail = f"{only_one} excludes {min(differing)!r}"
        yield Finding("error", "records-disagree", None, detail)


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read `ignore`, and the modules that MIXED_PRECISION names.

    Entries are wildcards, which engines also match as parts of names. With quantized_layers, all
    other modules are ignored, too.
    """
    record, nested = clues.record, _nested(clues)
    listed = record.get("quantized_layers", nested.get("quantized_layers"))
    patterns = strings(record.get("ignore")) or strings(nested.get("exclude_modules"))

    def is_ignored(module: str) -> bool:
        if isinstance(listed, dict) and listed.keys().isdisjoint((module, *parents_of(module))):
            return True
        return any(pattern in module or fnmatchcase(module, pattern) for pattern in patterns)

    return is_ignored
