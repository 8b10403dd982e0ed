"""Describe a unit: the modules that one maker writes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.stacks import Slot
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef


class Stem(NamedTuple):
    """A matrix of the dialect, or a stack of matrices, named like its tensors.

    slots         modules of its rows
    input_scales  multipliers of activations: one, one for each matrix of a stack, or none
    """

    name: str
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    input_scales: tuple[float | None, ...] = ()

    @property
    def members(self) -> list[list[str]]:
        """List the modules of each slot; their rows take turns."""
        return [[rows.module for rows in slot] for slot in self.slots]


class Unit(NamedTuple):
    """Modules of one scale group in a shard, or of one stack.

    stems     outputs of the unit
    linears   linear layers with their values, by module
    measured  every member of the scale group, of any shard
    action    quantize, transcode or copy, as the verdict says
    group     name of the scale group, where it has other members; None otherwise
    amax      sets the global scale, where a file gives one
    """

    stems: tuple[Stem, ...]
    linears: Mapping[str, Linear]
    measured: tuple[Linear, ...]
    action: str
    form: Form
    target: Target
    group: str | None = None
    amax: float | None = None

    @property
    def is_stack(self) -> bool:
        """Tell whether the dialect stores several modules in one matrix or stack."""
        return self.stems[0].name not in self.linears


def fold_refs(linears: tuple[Linear, ...]) -> tuple[TensorRef, ...]:
    """List the tensors from which factors of folds are computed."""
    return tuple(
        [ref for linear in linears for folding in linear.coding.foldings for ref in folding.beside]
    )


def refs_of(linears: tuple[Linear, ...]) -> tuple[TensorRef, ...]:
    """List the tensors of linear layers, each once."""
    if len(linears) == 1:
        return linears[0].refs
    return tuple(dict.fromkeys([ref for linear in linears for ref in linear.refs]))
