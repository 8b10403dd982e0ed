"""Read the global scales and input scales of many modules."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.recipes.recipe import gather_groups, group_members, scale_groups
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source, read_each


@dataclass(frozen=True, slots=True)
class Agreement:
    """One scale group of an artifact.

    scales  what each member stores: module -> scale, in the order in which the artifact has them
    """

    scales: dict[str, float]

    @property
    def members(self) -> list[str]:
        return list(self.scales)

    @property
    def is_kept(self) -> bool:
        """True where all members store one scale; NaN is none."""
        values = list(self.scales.values())
        return all(value == values[0] for value in values)


def find_agreements(artifact: Artifact, stored: Mapping[str, float]) -> list[Agreement]:
    """The scale groups of several members among these modules.

    stored  module -> global or input scale
    """
    groups = scale_groups(stored, group_members(artifact.source.checkpoint.config))
    return [
        Agreement({member: stored[member] for member in members})
        for members in gather_groups(groups).values()
        if len(members) > 1
    ]


NBYTES = 4  # of a float32


def read_global_scales(artifact: Artifact, modules: Collection[str]) -> dict[str, float]:
    """module -> the global scale that it stores, as its dialect's traits say it is meant, of those modules that have one."""
    scalars = artifact.spelling.TRAITS.scalars
    having = [module for module in modules if artifact.modules[module].form.format.has_global_scale]
    if scalars.global_scale is None:
        return dict.fromkeys(having, 1.0)
    names = [artifact.modules[module].stem + scalars.global_scale for module in having]
    return dict(zip(having, _read(artifact, names), strict=True))


def read_input_scales(artifact: Artifact, modules: Collection[str]) -> dict[str, float]:
    """module -> its input scale, a multiplier, of those modules whose form has one."""
    scalars = artifact.spelling.TRAITS.scalars
    having = [module for module in modules if artifact.modules[module].form.has_input_scale]
    stored = _read(artifact, [scalars.input_name(module) for module in having])
    return {
        module: scalars.as_multiplier(scale) for module, scale in zip(having, stored, strict=True)
    }


def _read(artifact: Artifact, names: list[str]) -> list[float]:
    """The float32 in each of those tensors; where a sound module lacks one, it is implied to be 1."""
    wanted = set(names)
    runs = list(_runs(ref for name, ref in artifact.tensors.items() if name in wanted))
    found: dict[str, float] = {}
    for values in read_each(artifact.source, lambda run: _values(artifact.source, run), runs):
        found.update(values)
    return [found.get(name, 1.0) for name in names]


def _runs(refs: Iterable[TensorRef]) -> Iterator[list[TensorRef]]:
    """Tensors of one float32 each, in the order of their files: those that follow one another."""
    run: list[TensorRef] = []
    for ref in refs:
        if run and (ref.start != run[-1].start + NBYTES or ref.file != run[-1].file):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run


def _values(source: Source, run: list[TensorRef]) -> Iterator[tuple[str, float]]:
    """The name and the number of each."""
    buffer = memoryview(bytearray(NBYTES * len(run)))
    source.read_into(run[0]._replace(dtype="F32", shape=(len(run),)), 0, buffer)
    return zip([ref.name for ref in run], struct.unpack(f"<{len(run)}f", buffer), strict=True)
