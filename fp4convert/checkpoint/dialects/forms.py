"""Form: a module's format, and how it is stored.

A Group is the modules of one form, as a record names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from fp4convert.numerics.formats import Format

ACTIVATIONS_FP4 = 4
Granularity = (
    str | tuple[int, int]
)  # "tensor", "row", or (rows, columns) of a block: what one scale stands for
SCALE_DTYPES = ("F32", "BF16", "F16")  # of FP8 and int4 scales
ACTIVATIONS_FP8 = 8


@dataclass(frozen=True, slots=True)
class Form:
    """What an artifact says of some of its weights, or of all, beside their names.

    activations   16: only weights are quantized; 4 or 8: engines quantize activations to so many bits, NVFP4 with an input scale
    scale_layout  in which order block scales lie; a name in scale_layouts.py
    kv_cache      "fp8" where engines keep the cache of keys and values in FP8, or None
    shapes        (rows, columns) of the modules whose tensors cannot tell
    granularity   of FP8 and int4
    stored_scales safetensors' dtype of the scales of FP8 and int4
    """

    format: Format
    activations: int = 16
    scale_layout: str = "linear"
    kv_cache: str | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    granularity: Granularity | None = None
    stored_scales: str = "F32"

    @property
    def has_input_scale(self) -> bool:
        return self.activations == ACTIVATIONS_FP4 and self.format.has_global_scale

    @property
    def word(self) -> str:
        """The form in a few letters for people: nvfp4, fp8 row, fp8 128x128."""
        if self.granularity is None:
            return self.format.name
        return f"{self.format.name} {granularity_word(self.granularity)}"


def granularity_word(granularity: Granularity) -> str:
    return granularity if isinstance(granularity, str) else "x".join(map(str, granularity))


class Group(NamedTuple):
    """Modules of one form, as a record names them.

    modules  names; as they are read, also patterns, of which "*" stands for all that no other group names
    """

    form: Form
    modules: tuple[str, ...]


def group_modules(forms: Iterable[tuple[str, Form]]) -> tuple[Group, ...]:
    """Modules by their form, in the order in which forms come first."""
    gathered: list[tuple[Form, list[str]]] = []
    for form, run in groupby(forms, itemgetter(1)):
        own = next((modules for known, modules in gathered if known == form), None)
        if own is None:
            gathered.append((form, own := []))
        own += [module for module, _ in run]
    return tuple(Group(form, tuple(modules)) for form, modules in gathered)


def everywhere(form: Form | None) -> tuple[Group, ...]:
    """What `recognise` says of an artifact whose modules are all of one form."""
    return (Group(form, ("*",)),) if form else ()


def merged(found: Iterable[tuple[Form, Iterable[str]]]) -> tuple[Group, ...]:
    """Groups as a record lists them, those of one form together, and what holds for all that no other names last."""
    groups = group_modules((name, form) for form, names in found for name in names)
    return tuple(sorted(groups, key=lambda group: "*" in group.modules))
