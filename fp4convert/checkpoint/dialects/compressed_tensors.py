"""compressed-tensors: NVFP4 and MXFP4, the default dialect.

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
from collections.abc import Callable, Iterator, Mapping, Sequence

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    each_alone,
    no_notes,
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
    merged,
)
from fp4convert.checkpoint.dialects.tables import (
    Fp8Table,
    Scalars,
    Table,
    from_layers,
    scale_grid,
    schemes_of,
    targets_of,
)
from fp4convert.errors import Doubt
from fp4convert.numerics.formats import FP8, INT4, MXFP4, NVFP4, Format
from fp4convert.recipes.patterns import matches, matches_any
from fp4convert.storage.safetensors import TensorRef


def _scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...]:
    return (1,) if granularity == "tensor" else scale_grid(shape, granularity)


SCALARS = Scalars(".weight_global_scale", ".input_global_scale", (1,), "divisor")
TRAITS = Traits(
    writes=(NVFP4, MXFP4),
    scalars=SCALARS,
    ignores_by_name=True,
    activations=(NVFP4, MXFP4),
    shares_scales=True,
    packed=".weight_packed",
    suffixes=(".weight_packed", ".weight_scale", ".weight_global_scale"),
    companions=(
        ".input_global_scale",
        ".input_scale",
        ".weight_shape",
    ),  # the first is an output where the form says so
    cache_scales=("k_scale", "v_scale"),
    mixes=(NVFP4, MXFP4, FP8, INT4),
    labels=(".weight_shape",),
    fp8=Fp8Table("row", _scale_shape),
)
TABLE = Table(
    (".weight_packed", "U8"),
    ".weight_scale",
    {NVFP4: "F8_E4M3", MXFP4: "U8"},
    SCALARS,
    fp8=TRAITS.fp8,
)
outputs, stored_shape, encode, decode, unfit = (
    TABLE.outputs,
    TABLE.stored_shape,
    TABLE.encode,
    TABLE.decode,
    TABLE.unfit,
)
encode_scalars, decode_input_scale = SCALARS.encode, SCALARS.decode_input
stems, slots, notes = each_alone, whole, no_notes
_PREFIX = r"(?:.*\.)?"  # that an engine may put before a name
_SPANNING = ("mixed-precision", "naive-quantized")
_STRATEGIES = ((NVFP4.block_size, "tensor_group"), (MXFP4.block_size, "group"))
_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    """All but FP8 modules, which have a .weight beside their .weight_scale."""
    return [
        stem for stem in stems_named(tensors, TRAITS.suffixes) if f"{stem}.weight" not in tensors
    ]


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    formats = [_word(group.form.format) for group in groups]
    schemes = [_scheme(group.form, ["Linear"]) for group in groups]
    if len(groups) > 1:
        others = [
            [module for other in groups if other is not group for module in other.modules]
            for group in groups
        ]
        schemes = [
            {**_scheme(group.form, targets_of(group.modules, rest, _PREFIX)), "format": name}
            for group, rest, name in zip(groups, others, formats, strict=True)
        ]
    record: Json = {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        "ignore": _declare(ignored, groups),
    }
    if groups[0].form.kv_cache:
        record["kv_cache_scheme"] = dict(_FP8_CACHE)
    return {"config.json": {"quantization_config": record}}


def _word(fmt: Format) -> str:
    """The format of a group, in the words of this dialect."""
    return {FP8: "float-quantized", INT4: "pack-quantized"}.get(fmt, f"{fmt.name}-pack-quantized")


def _scheme(form: Form, targets: list[str]) -> Json:
    """A group of modules: their names, weights and activations."""
    numbers = _fp4_numbers(form) if form.format.is_fp4 else _beside_numbers(form)
    return {"targets": targets, **numbers}


def _fp4_numbers(form: Form) -> Json:
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
    inputs = {
        **weights,
        **(
            {"dynamic": "local", "observer": "static_minmax"} if fmt is NVFP4 else {"dynamic": True}
        ),
    }
    return {
        "weights": weights,
        "input_activations": inputs if form.activations == ACTIVATIONS_FP4 else None,
    }


def _beside_numbers(form: Form) -> Json:
    """Of FP8 and int4: the strategy is what one scale stands for."""
    bits, kind = (8, "float") if form.format is FP8 else (4, "int")
    numbers: Json = {"num_bits": bits, "type": kind, "symmetric": True}
    weights, inputs = (
        {**numbers, "dynamic": False},
        {**numbers, "dynamic": True, "strategy": "token"},
    )
    match form.granularity:
        case "tensor":
            weights["strategy"] = "tensor"
        case (1, int(columns)):
            weights |= {"strategy": "group", "group_size": columns}
        case (int(rows), int(columns)):
            weights |= {"strategy": "block", "block_structure": [rows, columns]}
            inputs |= {"strategy": "group", "group_size": columns}
        case _:
            weights["strategy"] = "channel"
    return {
        "weights": weights,
        "input_activations": inputs if form.activations == ACTIVATIONS_FP8 else None,
    }


def _declare(ignored: Ignored, groups: Sequence[Group]) -> list[str]:
    """Exact names, and expressions after "re:".

    A module apart, and a pattern of some layer, is also named under whatever an engine has before its layers.
    """
    names = [name for name in ignored.apart() if not name.startswith("re:")]
    quantized = [module for group in groups for module in group.modules]
    cores = {from_layers(module) for module in quantized}
    apart = (name if from_layers(name) in cores else from_layers(name) for name in ignored.apart())
    prefixed = [f"re:{_PREFIX}{re.escape(core)}$" for core in dict.fromkeys(apart)]
    of_layers = [
        _elsewhere(pattern) for pattern in ignored.patterns if from_layers(pattern) != pattern
    ]
    clear = [told for told in of_layers if not any(matches(told, module) for module in quantized)]
    return [
        *names,
        *prefixed,
        *(_expression(pattern) for pattern in ignored.patterns),
        *dict.fromkeys(clear),
    ]


def _elsewhere(pattern: str) -> str:
    """A glob with layer numbers as an expression for whatever stands before its layers."""
    inner = _expression(f"{from_layers(pattern)}*").removeprefix("re:").removesuffix(".*$")
    return f"re:{_PREFIX}{inner}$"


def _expression(pattern: str) -> str:
    """A glob as an expression that engines match from the start; a name without wildcards stays as it is."""
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
    """A module belongs to the group that names it, before one whose expression fits it, before one of its class ("Linear")."""
    if clues.record.get("quant_method") != "compressed-tensors":
        return ()
    cache = clues.record.get("kv_cache_scheme")
    kv_cache = _cache_named(cache) if isinstance(cache, dict) else None
    found = [
        (form, scheme)
        for scheme in schemes_of(clues.record)
        if (form := _form(clues, scheme, kv_cache))
    ]
    if not found:
        bare = _form(clues, {}, kv_cache)
        return everywhere(bare if bare and bare.format.is_fp4 else None)
    if not any(form.format.is_fp4 for form, _ in found):
        return ()
    if all(form == found[0][0] for form, _ in found):
        return everywhere(found[0][0])
    return merged((form, _patterns(strings(scheme.get("targets")))) for form, scheme in found)


def _patterns(targets: list[str]) -> list[str]:
    """Targets as patterns of ours; names of classes hold for all that no other group names."""
    return list(
        dict.fromkeys(
            "*" if target[:1].isupper() and "." not in target else target for target in targets
        )
    )


def _form(clues: Clues, scheme: Json, kv_cache: str | None) -> Form | None:
    """What a group says of its modules; None where it is nothing that this dialect reads."""
    declared = str(scheme.get("format") or clues.record.get("format", ""))
    weights = scheme.get("weights")
    numbers = weights if isinstance(weights, dict) else {}
    bits = _bits(scheme, "input_activations")
    fmt = next((known for known in TRAITS.reads if declared == _word(known)), None)
    beside = {"8 float": FP8, "4 int": INT4}.get(f"{numbers.get('num_bits')} {numbers.get('type')}")
    if fmt and (beside is None or scheme.get("format")):
        return Form(fmt, ACTIVATIONS_FP4 if bits == ACTIVATIONS_FP4 else 16, kv_cache=kv_cache)
    granularity = _granularity(numbers)
    if (
        beside is None
        or granularity is None
        or (scheme.get("format") and declared not in (_word(beside), *_SPANNING))
    ):
        return None
    activations = ACTIVATIONS_FP8 if bits == ACTIVATIONS_FP8 else 16
    return Form(beside, activations, kv_cache=kv_cache, granularity=granularity)


def _granularity(weights: Json) -> Granularity | None:
    """What one scale stands for; None for a strategy that nothing here reads."""
    structure, size = weights.get("block_structure"), weights.get("group_size")
    match weights.get("strategy"):
        case "tensor":
            return "tensor"
        case "channel":
            return "row"
        case "group" if isinstance(size, int) and size > 0:
            return (1, size)
        case "block" if (
            isinstance(structure, list)
            and len(structure) == 2
            and all(type(n) is int and n > 0 for n in structure)
        ):
            return (structure[0], structure[1])
    return None


def _cache_named(scheme: Json) -> str:
    """fp8, or what else a scheme says, such as int8."""
    return (
        f"{'fp' if scheme.get('type') == 'float' else scheme.get('type')}{scheme.get('num_bits')}"
    )


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
        yield Doubt(
            "error",
            "record-transform",
            "weights are rotated (transform_config), which nothing but its engine undoes",
        )
    for scheme in schemes_of(clues.record):
        own = str(scheme.get("format") or clues.record.get("format", ""))
        weights = scheme.get("weights")
        if own.endswith("-pack-quantized") and own.startswith(
            tuple(fmt.name for fmt in TRAITS.reads)
        ):
            yield from _judge_scheme(
                weights if isinstance(weights, dict) else {}, scheme.get("targets")
            )


def _judge_scheme(weights: Json, targets: object) -> Iterator[Doubt]:
    """What a group of four-bit modules says of its weights."""
    if (weights.get("group_size"), weights.get("strategy")) not in _STRATEGIES:
        detail = f"a group of modules has strategy {weights.get('strategy')!r} and group_size {weights.get('group_size')!r}"
        yield Doubt(
            "error", "record-strategy", f'{detail}; expected "tensor_group" of 16 or "group" of 32'
        )
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True))
    if kind != (4, "float", True):
        detail = f"a group of modules has num_bits {kind[0]!r}, type {kind[1]!r} and symmetric {kind[2]!r}"
        yield Doubt("error", "record-strategy", f'{detail}; expected 4, "float" and true')
    if not strings(targets):
        yield Doubt(
            "error", "record-strategy", 'a group of modules has no targets; expected ["Linear"]'
        )


def ignores(clues: Clues) -> Callable[[str], bool]:
    """`ignore` holds exact names, names of classes, and expressions after "re:" that are matched from the start."""
    patterns = strings(clues.record.get("ignore"))
    names, expressions = (
        frozenset(patterns),
        tuple(pattern for pattern in patterns if pattern.startswith("re:")),
    )
    return lambda module: "Linear" in names or module in names or matches_any(expressions, module)
