"""Read versions of engines, and compare them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOUND = re.compile(r"(>=|<)(\d+(?:\.\d+)*)")
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions from one on, before another; None where there is no such end."""

    since: Version | None = None
    before: Version | None = None

    def __contains__(self, version: Version) -> bool:
        return not (
            (self.since is not None and version < self.since)
            or (self.before is not None and version >= self.before)
        )

    def __str__(self) -> str:
        """Return what read_versions takes: ">=0.5.12,<0.5.22"."""
        ends = ((">=", self.since), ("<", self.before))
        return ",".join(f"{sign}{version_text(end)}" for sign, end in ends if end is not None)


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


def read_versions(text: str) -> Versions:
    """Read ">=0.5.12,<0.5.22"; ValueError for anything else."""
    ends: dict[str, Version] = {}
    for bound in filter(None, text.split(",")):
        found = _BOUND.fullmatch(bound)
        if found is None or found[1] in ends:
            raise ValueError(f"{text!r} names no versions")
        ends[found[1]] = read_version(found[2])
    return Versions(ends.get(">="), ends.get("<"))


def read_version(text: str) -> Version:
    """Read 0.5.22; ValueError for anything else."""
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no version")
    return tuple(map(int, found[1].split(".")))
