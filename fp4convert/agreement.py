"""Which modules of an artifact share a scale, and whether they store the same one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fp4convert.artifact import Artifact
from fp4convert.recipe import group_members, scale_group


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
    groups = group_members(artifact.source.checkpoint.config)
    gathered: dict[object, dict[str, float]] = defaultdict(dict)
    for module, scale in stored.items():
        if key := scale_group(module, groups):
            gathered[key][module] = scale
    return [Agreement(scales) for scales in gathered.values() if len(scales) > 1]
