"""Read versions of engines, and ranges of them, in the order of PEP 440.

The local part of a build (0.33.0+cu129) makes no difference; 0.33.0rc1 comes before 0.33.0. Build
numbers of llama.cpp (b4567) are versions, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version as PublicVersion

_BOUND = re.compile(r"(>=|<)([0-9]+(?:\.[0-9]+)*)")
_BUILD = re.compile(r"b([0-9]+)")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version: compared without its local part, shown as it was written."""

    public: PublicVersion
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


def read_version(text: str) -> Version:
    """Read 0.33.0rc1, 0.33.0+cu129 or b4567; ValueError for anything else."""
    from packaging.version import Version as PublicVersion  # the command line starts without it

    build = _BUILD.fullmatch(text)
    parsed = PublicVersion(build[1] if build else text)  # InvalidVersion is a ValueError
    return Version(PublicVersion(parsed.public), text.strip().removeprefix("v"))


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of versions; None where it has no such end.

    since   the first version in it
    before  the first version behind it; its release candidates lie in the range
    """

    since: Version | None = None
    before: Version | None = None

    def __contains__(self, version: Version) -> bool:
        return not (
            (self.since is not None and version < self.since)
            or (self.before is not None and version >= self.before)
        )

    def __str__(self) -> str:
        """Return the text that read_versions takes: ">=0.5.12,<0.5.22"."""
        ends = ((">=", self.since), ("<", self.before))
        return ",".join(f"{sign}{end}" for sign, end in ends if end is not None)


@cache
def read_versions(text: str) -> Versions:
    """Read ">=0.5.12,<0.5.22"; ValueError for anything else."""
    ends: dict[str, Version] = {}
    for bound in filter(None, text.split(",")):
        match = _BOUND.fullmatch(bound)
        if match is None or match[1] in ends:
            raise ValueError(f"{text!r} is no range of versions; expected one as >=0.5.12,<0.5.22")
        ends[match[1]] = read_version(match[2])
    return Versions(ends.get(">="), ends.get("<"))
