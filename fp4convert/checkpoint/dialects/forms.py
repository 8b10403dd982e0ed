"""Forms of modules, and how records name the modules of each form."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from fp4convert.numerics.formats import FP8, MXFP4, MXFP8, Format

# Elements that share a scale: "tensor", "row", or (rows, columns) of a block.
Granularity = str | tuple[int, int]
MXFP8_BLOCK = (1, MXFP8.block_size)
ACTIVATIONS_FP4, ACTIVATIONS_FP8 = 4, 8
SCALE_DTYPES = ("F32", "BF16", "F16")  # of FP8 and int4 scales
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that counts layers or experts
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class Form:
    """The meaning of the tensors of some modules.

    activations   16: only weights are quantized; 4 or 8: engines quantize activations to so many
                  bits, NVFP4 with an input scale
    scale_layout  order of the block scales; a name in scale_layouts.py
    kv_cache      format of the cache of keys and values, "fp8" or "nvfp4"; None: not quantized
    shapes        (rows, columns) of modules whose tensors do not give them
    granularity   of FP8, MXFP8 and int4
    stored_scales safetensors' dtype of the scales of these
    rank          of the low-rank correction beside the codes; None: there is none
    is_static     FP8 in a dialect that leaves it open: a scale of activations is stored, too
    """

    format: Format
    activations: int = 16
    scale_layout: str = "linear"
    kv_cache: str | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    granularity: Granularity | None = None
    stored_scales: str = "F32"
    rank: int | None = None
    is_static: bool = False

    @property
    def has_input_scale(self) -> bool:
        """Return whether a four-bit module has a stored scale of activations.

        Engines that read corrections scale activations as they come.
        """
        is_four_bit = self.activations == ACTIVATIONS_FP4 and self.format.has_global_scale
        return is_four_bit and self.rank is None

    @property
    def word(self) -> str:
        """Name the form for people: nvfp4, mxfp8, fp8 row, fp8 128x128."""
        if self.granularity is None or self.format.block_size:
            return self.format.name
        return f"{self.format.name} {granularity_word(self.granularity)}"


def keeps_powers(fmt: Format | None, form: Form) -> bool:
    """Return whether blocks of a format keep their values in a form of FP8.

    Blocks of MXFP4 and MXFP8 have powers of two as scales: E4M3 under another power of two holds
    their values, unless they are 2^17 times smaller than the largest of its block.
    """
    is_in_blocks = form.format is FP8 and isinstance(form.granularity, tuple)
    return is_in_blocks and fmt in (MXFP4, MXFP8)


def granularity_word(granularity: Granularity) -> str:
    return granularity if isinstance(granularity, str) else "x".join(map(str, granularity))


MXFP8_FORM = Form(MXFP8, granularity=MXFP8_BLOCK, stored_scales="U8")


class Group(NamedTuple):
    """Modules of one form, as a record names them.

    modules  names; in groups that are read also patterns, "*" for all that no other group names
    """

    form: Form
    modules: tuple[str, ...]


def group_modules(forms: Iterable[tuple[str, Form]]) -> tuple[Group, ...]:
    """Group modules by their form, in the order of first appearance."""
    gathered: list[tuple[Form, list[str]]] = []  # a form's hash leaves `shapes` out
    for form, run in groupby(forms, itemgetter(1)):
        names = next((modules for known, modules in gathered if known == form), None)
        if names is None:
            gathered.append((form, names := []))
        names += [module for module, _ in run]
    return tuple(Group(form, tuple(modules)) for form, modules in gathered)


def everywhere(form: Form | None) -> tuple[Group, ...]:
    """Return the one group of an artifact whose modules have one form."""
    return (Group(form, ("*",)),) if form else ()


def merge_groups(found: Iterable[tuple[Form, Iterable[str]]]) -> tuple[Group, ...]:
    """Join groups of one form; the group that holds for all others is last."""
    groups = group_modules((name, form) for form, names in found for name in names)
    return tuple(sorted(groups, key=lambda group: "*" in group.modules))


def targets_of(modules: Iterable[str], others: Iterable[str], prefix: str = "") -> list[str]:
    """Make expressions that fit those modules and none of the others.

    Modules whose names differ in numbers alone share one expression where it fits no other.

    prefix  expression for the beginning of a name, up to its layers, in an engine; left out where
            another name would fit with it
    """
    others = list(others)
    fitting, strange = defaultdict(list), {_NUMBER.sub("0", other) for other in others}
    endings, ends = _endings(strange), {*others, *_endings(others)}
    for module in modules:
        fitting[_NUMBER.sub("0", module)].append(module)
    targets = []
    for template, names in fitting.items():
        before = "re:" + ("" if template in endings else prefix)
        if template in strange:
            is_open = bool(prefix) and before.endswith(prefix)
            for name in names:
                core = from_layers(name) if is_open else name
                targets.append(f"{before}{re.escape(name if core in ends else core)}$")
            continue
        core = from_layers(names[0])
        is_clear = bool(prefix) and not {_NUMBER.sub("0", core)} & (strange | endings)
        texts = _NUMBER.split(core if is_clear else names[0])
        targets.append(before + r"\d+".join(map(re.escape, texts)) + "$")
    return _with_fused_targets(targets)


def _endings(names: Iterable[str]) -> set[str]:
    """Return the ends of names behind each dot."""
    return {name[dot + 1 :] for name in names for dot, letter in enumerate(name) if letter == "."}


def _with_fused_targets(targets: Iterable[str]) -> list[str]:
    """Let a part's expression fit the fused matrix too.

    transformers warns of an expression that fits none of its modules.
    """
    joined = list(dict.fromkeys(targets))
    for whole, (part, *_) in _FUSED.items():
        for target in [known for known in joined if known.endswith(f"{whole}$")]:
            stem = target.removesuffix(f"{whole}$")
            if (alone := f"{stem}{part}$") in joined:
                joined[joined.index(alone)] = f"{stem}(?:{part}|{whole})$"
                joined.remove(target)
    return joined


def with_fused(names: Iterable[str]) -> tuple[str, ...]:
    """Add the names of the matrices that engines fuse out of these.

    SGLang 0.5.23 looks for these names, and for no others where its class of a model lists no
    fusions. No engine does so for experts.

    names  modules, or globs, that are treated alike
    """
    names = dict.fromkeys(names)
    fused: dict[str, None] = {}
    wholes = {parts[0]: (whole, parts) for whole, parts in _FUSED.items()}
    for name in names:
        parent, dot, word = name.rpartition(".")
        if word in wholes and ".experts." not in name:
            whole, parts = wholes[word]
            if all(parent + dot + part in names for part in parts):
                fused[parent + dot + whole] = None
    return tuple(names | fused)


def with_values(modules: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Name the values of layers that have keys alone, where others have both.

    Some layers of Gemma 4 have keys alone. vLLM 0.33 looks the values up, too, and refuses a record
    that lacks them or has the pattern of other layers for them.

    known  all modules, quantized or kept
    """
    modules = tuple(modules)
    values = {
        module: f"{module.removesuffix('k_proj')}v_proj"
        for module in modules
        if module.endswith("k_proj")
    }
    if not values or (known := set(known)).issuperset(values.values()):
        return tuple(dict.fromkeys(modules))
    patterns = {_NUMBER.sub("0", module) for module in known}
    listed: dict[str, None] = {}
    for module in modules:
        listed[module] = None
        value = values.get(module, module)
        if value not in known and _NUMBER.sub("0", value) in patterns:
            listed[value] = None
    return tuple(listed)


def from_layers(module: str) -> str:
    """Return a module's name from its layers on.

    model.language_model.layers.3.mlp.up_proj -> layers.3.mlp.up_proj; a name without numbers stays.
    Engines have other beginnings for models of several parts.
    """
    number = _NUMBER.search(module)
    if number is None or number.start() == 0:
        return module
    return module[module[: number.start() - 1].rfind(".") + 1 :]


def parents_of(module: str) -> Iterator[str]:
    """Yield the names above a module's, the nearest first."""
    while module := module.rpartition(".")[0]:
        yield module
