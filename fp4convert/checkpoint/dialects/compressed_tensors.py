"""compressed-tensors: NVFP4, MXFP4, FP8 and MXFP8, the default dialect.

  M.weight_packed        U8  [rows, columns / 2]
  M.weight_scale         nvfp4: F8_E4M3 [rows, columns / 16]; mxfp4: U8 [rows, columns / 32]
  M.weight_global_scale  nvfp4: F32 [1], a divisor: 1 / global scale
  M.input_global_scale   nvfp4 with four-bit activations: F32 [1], a divisor; mxfp4 scales
                         activations as they come

FP8 and MXFP8, alone or beside these:

  M.weight        F8_E4M3 [rows, columns]
  M.weight_scale  fp8: F32 [rows, 1], a multiplier; also read: [1] of the whole, one to a block;
                  mxfp8: U8 [rows, columns / 32], E8M0
  M.input_scale   fp8 of the whole, where the record says that activations have a static scale:
                  F32 [1], a multiplier

Traps (each loads and computes garbage, or does not load): the scalar shape [] for the global scale;
F8_E8M0 as the dtype of MXFP4 scales; a missing quantization_status or strategy; an unknown key
inside config_groups.
Source: compressed-tensors 0.20, compressors/nvfp4, mxfp4, mxfp8 and naive_quantized.
Readers: vLLM, SGLang, transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    json_object,
    nothing,
    positive_pair,
    schemes_of,
    stems_named,
    strings,
    whole,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    Form,
    Granularity,
    Group,
    everywhere,
    from_layers,
    merge_groups,
    targets_of,
    with_values,
)
from fp4convert.checkpoint.dialects.registry import METHODS, SUFFIXES
from fp4convert.checkpoint.dialects.tables import CacheScales, Fp8Table, Scalars, Table, scale_grid
from fp4convert.errors import Finding
from fp4convert.numerics.formats import (
    E4M3_MAX,
    FP8,
    GLOBAL_RANGE,
    INT4,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
)
from fp4convert.recipes.patterns import matches, matches_any
from fp4convert.storage.safetensors import TensorRef


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...]:
    return (1,) if granularity == "tensor" else scale_grid(shape, granularity)


METHOD = METHODS["compressed-tensors"]
_RECIPROCAL = (
    "as AutoRound writes them; compressed-tensors' own Python code takes them for their reciprocals"
)
TRAITS = Traits(
    writes=(NVFP4, MXFP4, FP8, MXFP8),
    scalars=Scalars(".weight_global_scale", ".input_global_scale", (1,), "divisor"),
    ignores_by_name=True,
    activations=(NVFP4, MXFP4),
    shares_scales=True,
    packed=".weight_packed",
    suffixes=SUFFIXES["compressed-tensors"],
    # The first is an output where the form says so.
    companions=(".input_global_scale", ".input_scale", ".weight_shape"),
    cache_scales={
        FP8.name: CacheScales(("k_scale", "v_scale"), E4M3_MAX),
        NVFP4.name: CacheScales(("k_global_scale", "v_global_scale"), GLOBAL_RANGE, _RECIPROCAL),
    },
    mixes=(NVFP4, MXFP4, FP8, MXFP8, INT4),
    labels=(".weight_shape",),
    fp8=Fp8Table("row", _scale_shape, ".input_scale", is_open=True),
)
TABLE = Table(
    (TRAITS.packed, "U8"),
    ".weight_scale",
    {NVFP4: "F8_E4M3", MXFP4: "U8"},
    TRAITS.scalars,
    fp8=TRAITS.fp8,
)
outputs, encode, decode = TABLE.outputs, TABLE.encode, TABLE.decode
stems, stored_shape, slots, unfit = each_alone, TABLE.stored_shape, whole, TABLE.unfit
notes = nothing
_PREFIX = r"(?:.*\.)?"  # that an engine may put before a name
_SPANNING = ("mixed-precision", "naive-quantized")
_WORDS = {FP8: "float-quantized", MXFP8: "mxfp8-quantized", INT4: "pack-quantized"}
# By the format; a dtype is also written without "torch.".
_SCALE_DTYPES = {
    NVFP4.name: ("torch.float8_e4m3fn", "float8_e4m3fn"),
    MXFP4.name: ("torch.uint8", "uint8"),
    MXFP8.name: ("torch.uint8", "uint8"),
}
# That compressed-tensors 0.20 takes in QuantizationScheme and QuantizationArgs; it forbids others.
_SCHEME_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# The arguments of weights and activations that it takes, and their defaults.
_ARGUMENTS: Json = {
    **{"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None},
    **{"strategy": None, "block_structure": None, "actorder": None, "scale_dtype": None},
    **{"zp_dtype": None, "observer": None, "observer_kwargs": None},
}
_OF_MAKERS = {"zp_dtype", "observer", "observer_kwargs"}  # no engine reads them of four bits
# Values that engines take for those of _scheme.
_ALSO: dict[str, dict[str, tuple[object, ...]]] = {
    "weights": {"actorder": (False, "weight", "static")},
    "input_activations": {"dynamic": (True,)},
}
_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Leave out FP8 modules, which have a .weight beside their .weight_scale."""
    return [
        stem for stem in stems_named(tensors, TRAITS.suffixes) if f"{stem}.weight" not in tensors
    ]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    formats = [_word(group.form.format) for group in groups]
    if len(groups) == 1:
        schemes = [_scheme(groups[0].form, ["Linear"])]
    else:
        quantized = [module for group in groups for module in group.modules]
        known = {*ignored.modules, *ignored.patterns, *quantized}
        named = [
            with_values(_with_names(group.modules, ignored.renamed), known) for group in groups
        ]
        schemes = []
        for (form, _), names, word in zip(groups, named, formats, strict=True):
            others = [module for other in named if other is not names for module in other]
            schemes.append({**_scheme(form, targets_of(names, others, _PREFIX)), "format": word})
    record: Json = {
        "quant_method": METHOD,
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        "ignore": _declare(ignored, groups),
    }
    if cache := groups[0].form.kv_cache:
        four_bit = _scheme(Form(NVFP4, ACTIVATIONS_FP4), [])["input_activations"]
        record["kv_cache_scheme"] = dict(_FP8_CACHE) if cache == "fp8" else four_bit
    return {"config.json": {"quantization_config": record}}


def _word(fmt: Format) -> str:
    """Name the format of a group in the words of this dialect."""
    return _WORDS.get(fmt, f"{fmt.name}-pack-quantized")


def _scheme(form: Form, targets: list[str]) -> Json:
    """Describe a group of modules: their names, weights and activations."""
    fmt = form.format
    if fmt.is_fp4:
        weights: Json = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group" if fmt is NVFP4 else "group",
            "group_size": fmt.block_size,
            "dynamic": False,
            "scale_dtype": _SCALE_DTYPES[fmt.name][0],
        }
        inputs: Json = {**weights, "dynamic": True}
        if fmt is NVFP4:
            inputs |= {"dynamic": "local", "observer": "static_minmax"}
    else:
        bits, kind = (4, "int") if fmt is INT4 else (8, "float")
        weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
        if fmt is MXFP8:
            weights["scale_dtype"] = _SCALE_DTYPES[fmt.name][0]
        inputs = {**weights, "dynamic": True, "strategy": "token"}
        match form.granularity:
            case "tensor":
                weights["strategy"] = "tensor"
                if form.is_static:
                    inputs |= {"dynamic": False, "strategy": "tensor"}
            case (1, int(columns)):
                weights |= {"strategy": "group", "group_size": columns}
                if fmt is MXFP8:
                    inputs |= {"strategy": "group", "group_size": columns}
            case (int(rows), int(columns)):
                weights |= {"strategy": "block", "block_structure": [rows, columns]}
                inputs |= {"strategy": "group", "group_size": columns}
            case _:
                weights["strategy"] = "channel"
    is_quantized = form.activations == (ACTIVATIONS_FP4 if fmt.is_fp4 else ACTIVATIONS_FP8)
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if is_quantized else None,
    }


def _with_names(modules: Iterable[str], renamed: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield modules, each before its names in engines."""
    for module in modules:
        yield module
        yield from renamed.get(module, ())


def _declare(ignored: Ignored, groups: Sequence[Group]) -> list[str]:
    """Write `ignore`: exact names, and expressions after "re:".

    A module apart, and a pattern of some layer, is also written for any beginning that an engine
    puts before its layers.
    """
    quantized = [module for group in groups for module in group.modules]
    known = (*ignored.modules, *ignored.patterns, *quantized)
    kept, patterns = (with_values(names, known) for names in (ignored.apart(), ignored.patterns))
    exact = [name for name in kept if not name.startswith("re:")]
    cores = {from_layers(module) for module in quantized}
    # A name from its layers on, where no quantized module has that name elsewhere.
    apart = (name if from_layers(name) in cores else from_layers(name) for name in kept)
    prefixed = [f"re:{_PREFIX}{re.escape(core)}$" for core in dict.fromkeys(apart)]
    # Globs with layer numbers, for any beginning before the layers.
    of_layers = []
    for pattern in patterns:
        if (core := from_layers(pattern)) != pattern:
            inner = _expression(f"{core}*").removeprefix("re:").removesuffix(".*$")
            of_layers.append(f"re:{_PREFIX}{inner}$")
    clear = [each for each in of_layers if not any(matches(each, module) for module in quantized)]
    globs = [_expression(pattern) for pattern in patterns]
    declared = [*exact, *prefixed, *globs, *dict.fromkeys(clear)]
    return [*declared, *_declare_renamed(ignored, quantized, declared)]


def _declare_renamed(
    ignored: Ignored, quantized: Sequence[str], declared: Sequence[str]
) -> list[str]:
    """Write entries for names of engines that no entry fits.

    vLLM renames exact names of a record by its own tables, and no expressions; transformers renames
    none.
    """
    entries = frozenset(declared)
    expressions = tuple(entry for entry in declared if entry.startswith("re:"))
    strays = [
        (module, name)
        for module in ignored.modules
        for name in ignored.renamed.get(module, ())
        if name not in entries and not matches_any(expressions, name)
    ]
    if not strays:
        return []
    # An expression with a beginning of its own does not find a module under another beginning.
    anywhere = tuple(each for each in expressions if each.startswith(("re:.*", f"re:{_PREFIX}")))
    exact = [
        module
        for module in dict.fromkeys(module for module, _ in strays)
        if module not in entries and not matches_any(anywhere, module)
    ]
    quantized_names = tuple(_with_names(quantized, ignored.renamed))
    others = [name for _, name in strays if name not in quantized_names]
    return [*exact, *targets_of(others, quantized_names, _PREFIX)]


def _expression(pattern: str) -> str:
    """Turn a glob into an expression; a name without wildcards stays."""
    if pattern.startswith("re:") or not set(pattern) & set("*?["):
        return pattern
    wildcards = {"*": ".*", "?": "."}
    parts = re.split(r"(\*|\?|\[[^\]]+\])", pattern)
    spelled = (
        part.replace("[!", "[^") if part.startswith("[") else wildcards.get(part, re.escape(part))
        for part in parts
    )
    return f"re:{''.join(spelled)}$"


def recognise(clues: Clues) -> tuple[Group, ...]:
    """Read the groups of a record.

    A module belongs to the group that names it, before one whose expression fits it, before one of
    its class ("Linear").
    """
    record = clues.record
    if record.get("quant_method") != METHOD:
        return ()
    cache, kv_cache = record.get("kv_cache_scheme"), None
    if isinstance(cache, dict):  # fp8, nvfp4, or others such as int8
        kind = "fp" if cache.get("type") == "float" else cache.get("type")
        kv_cache = f"{kind}{cache.get('num_bits')}"
        blocks = cache.get("group_size"), cache.get("strategy")
        kv_cache = NVFP4.name if kv_cache == "fp4" and blocks == (16, "tensor_group") else kv_cache
    schemes = [(_form(record, scheme, kv_cache), scheme) for scheme in schemes_of(record)]
    found = [(form, strings(scheme.get("targets"))) for form, scheme in schemes if form]
    if not found:
        bare = _form(record, {}, kv_cache)
        return everywhere(bare if bare and bare.format.is_fp4 else None)
    if all(form == found[0][0] for form, _ in found):
        return everywhere(found[0][0])
    groups = []
    for form, targets in found:
        # Names of classes hold for all modules that no other group names.
        names = ("*" if name[:1].isupper() and "." not in name else name for name in targets)
        groups.append((form, dict.fromkeys(names)))
    return merge_groups(groups)


def _form(record: Json, scheme: Json, kv_cache: str | None) -> Form | None:
    """Read the form of a group's modules; None for one that is not read."""
    declared = str(scheme.get("format") or record.get("format", ""))
    weights, inputs = (json_object(scheme.get(key)) for key in ("weights", "input_activations"))
    bits = inputs.get("num_bits")
    fmt = next((known for known in (NVFP4, MXFP4) if declared == _word(known)), None)
    beside = {"8 float": FP8, "4 int": INT4}.get(f"{weights.get('num_bits')} {weights.get('type')}")
    is_mx = weights.get("scale_dtype") in _SCALE_DTYPES[MXFP8.name]
    if beside is FP8 and is_mx and weights.get("group_size") == MXFP8.block_size:
        beside = MXFP8
    if fmt and (beside is None or scheme.get("format")):
        return Form(fmt, ACTIVATIONS_FP4 if bits == ACTIVATIONS_FP4 else 16, kv_cache=kv_cache)
    granularity: Granularity | None
    match weights:
        case {"strategy": "tensor"}:
            granularity = "tensor"
        case {"strategy": "channel"}:
            granularity = "row"
        case {"strategy": "group", "group_size": int(size)} if size > 0:
            granularity = (1, size)
        case {"strategy": "block", "block_structure": structure}:
            granularity = positive_pair(structure)
        case _:
            return None
    if beside is None or granularity is None:
        return None
    if scheme.get("format") and declared not in (_word(beside), *_SPANNING):
        return None
    activations = ACTIVATIONS_FP8 if bits == ACTIVATIONS_FP8 else 16
    stored = "U8" if beside is MXFP8 else "F32"
    is_static = beside is FP8 and granularity == "tensor" and inputs.get("strategy") == "tensor"
    return Form(
        beside,
        activations,
        kv_cache=kv_cache,
        granularity=granularity,
        stored_scales=stored,
        is_static=is_static and activations == ACTIVATIONS_FP8 and not inputs.get("dynamic"),
    )


def judge(clues: Clues) -> Iterator[Finding]:
    """Find faults with which engines load, and compute garbage."""
    record = clues.record
    if record.get("quant_method") != METHOD:
        return
    if record.get("quantization_status") != "compressed":
        detail = 'quantization_status is not "compressed": transformers would take the packed codes'
        yield Finding("error", "record-status", None, f"{detail} for weights")
    if record.get("transform_config"):
        detail = "weights are rotated (transform_config), which only its engine can undo"
        yield Finding("error", "record-transform", None, detail)
    if json_object(record.get("sparsity_config")).get("targets"):
        detail = "weights are declared sparse (sparsity_config), which vLLM 0.33 refuses"
        yield Finding("error", "record-strategy", None, detail)
    for scheme in schemes_of(record):
        word = scheme.get("format") or record.get("format")
        fmt = next((known for known in (NVFP4, MXFP4) if word == _word(known)), None)
        yield from _judge_scheme(scheme, fmt)


def _judge_scheme(scheme: Json, fmt: Format | None) -> Iterator[Finding]:
    """Find the faults of a group of modules."""
    weights, inputs = (json_object(scheme.get(key)) for key in _ALSO)
    if unknown := {*scheme} - _SCHEME_KEYS | {*weights, *inputs} - _ARGUMENTS.keys():
        detail = f"a group of modules has the key {min(unknown)!r}"
        detail += ", which compressed-tensors 0.20 does not know: it refuses the whole record"
        yield Finding("error", "record-key", None, detail)
    if fmt is None:
        return
    scheme = _scheme(Form(fmt, ACTIVATIONS_FP4), [])
    # vLLM also reads MXFP4 with activations of FP8.
    is_fp8 = fmt is MXFP4 and (inputs.get("num_bits"), inputs.get("type")) == (8, "float")
    for (section, others), found in zip(_ALSO.items(), (weights, inputs), strict=True):
        expected = json_object(scheme[section])
        also = {**others, "scale_dtype": (None, *_SCALE_DTYPES[fmt.name])}
        is_read = found is weights or (inputs and not is_fp8)
        for key, default in _ARGUMENTS.items() if is_read else ():
            value, wanted = found.get(key, default), expected.get(key)
            if key not in _OF_MAKERS and value not in (wanted, *also.get(key, ())):
                detail = f"a group of modules has {key} {value!r} of {section}; expected {wanted!r}"
                yield Finding("error", "record-strategy", None, detail)


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read `ignore`: names, names of classes, and expressions after "re:"."""
    patterns = strings(clues.record.get("ignore"))
    names = frozenset(patterns)
    expressions = tuple(pattern for pattern in patterns if pattern.startswith("re:"))
    return lambda module: "Linear" in names or module in names or matches_any(expressions, module)
