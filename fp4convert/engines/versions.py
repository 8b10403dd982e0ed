"""Read versions of engines, and compare them as PEP 440 does.

What a build adds (0.33.0+cu129) makes no difference; 0.33.0rc1 comes before 0.33.0.  The numbers of
llama.cpp's builds (b4567) are versions, too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_BOUND = re.compile(r"(>=|<)([0-9]+(?:\.[0-9]+)*)")
_BUILD = re.compile(r"b([0-9]+)")
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>a|alpha|b|beta|rc|c|pre|preview)[-_.]?(?P<number>\d*))?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d*))?"
    r"(?:[-_.]?dev[-_.]?(?P<dev>\d*))?"
    r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?",
    re.IGNORECASE | re.ASCII,
)
_FINAL = "z", 0  # behind every letter that goes before a release


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version: compared by its key, told as it was written."""

    key: tuple[tuple[int, ...], tuple[str, int], int, float]
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


def read_version(text: str) -> Version:
    """Read 0.33.0rc1, 0.33.0+cu129 or b4567; ValueError for others."""
    if build := _BUILD.fullmatch(text):
        return Version(((int(build[1]),), _FINAL, -1, math.inf), text)
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no version")
    release = tuple(map(int, found["release"].split(".")))
    while len(release) > 1 and not release[-1]:
        release = release[:-1]
    # A development version comes before its release, and before what is to be tried of it.
    dev = math.inf if found["dev"] is None else int(found["dev"] or 0)
    post = -1 if found["post"] is None else int(found["post"] or 0)
    if found["pre"] is not None:
        letter = found["pre"][0].lower()
        pre = ("r" if letter in "cp" else letter, int(found["number"] or 0))  # c, pre: rc
    else:
        pre = ("", 0) if post < 0 and dev < math.inf else _FINAL
    return Version((release, pre, post, dev), text.removeprefix("v"))


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
        return ",".join(f"{sign}{end}" for sign, end in ends if end is not None)


def read_versions(text: str) -> Versions:
    """Read ">=0.5.12,<0.5.22"; ValueError for anything else."""
    ends: dict[str, Version] = {}
    for bound in filter(None, text.split(",")):
        found = _BOUND.fullmatch(bound)
        if found is None or found[1] in ends:
            raise ValueError(f"{text!r} names no versions")
        ends[found[1]] = read_version(found[2])
    return Versions(ends.get(">="), ends.get("<"))
