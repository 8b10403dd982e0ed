"""Which modules of an artifact share a scale, and whether they store the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp4convert.artifact import Artifact
from fp4convert.recipe import gather_groups, group_members


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
    gathered = gather_groups(stored, group_members(artifact.source.checkpoint.config))
    return [Agreement({member: stored[member] for member in members}) for members in gathered.values() if len(members) > 1]
