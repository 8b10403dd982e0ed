"""Options that several functions have, and checks of their words.

A command that computes has one function of its name: convert.py writes, quality.py looks and tells, analysis.py measures,
calibration.py needs torch.  Words have the names and the defaults of the command line's options; those that several commands
have are here.  Nothing is printed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from fp4convert.errors import InputError
from fp4convert.progress import Phases
from fp4convert.storage.source import Access

MOST_MEMORY = 1e6  # GB; inf, too, means no limit

Reference = str | os.PathLike[str]
"""A folder, a file, or ORG/NAME on the Hub."""
Patterns = str | Iterable[str] | None
"""Globs on module names, or re:REGEX."""


class AccessOptions(TypedDict, total=False):
    """How sources and artifacts are found and read.

    revision   on the Hub: branch, tag or commit; default: main
    subfolder  of a folder or repository, where the checkpoint is
    token      for the Hub; default: the one that is logged in
    memory     GB of what the Hub sends that are kept for a second reading; default 1
    transport  from the Hub: http (default), or xet
    tell       gets lines for people: what is waited for, which part this is, which page was written; default: nobody hears them
    """

    revision: str | None
    subfolder: str | None
    token: str | None
    memory: float
    transport: str
    tell: Callable[[str], None]


class WorkOptions(AccessOptions, total=False):
    """How a command that writes works; nothing here changes a byte.

    workers  threads; default 0: as many as suit the device
    force    discard what an earlier run left in the output
    phases   learns how far the work is
    warn     gets what a person should know before the work; default: Python's warnings
    """

    workers: int
    force: bool
    phases: Phases
    warn: Callable[[Iterable[str]], None]


class PartOptions(WorkOptions, total=False):
    """Which part of the work this process does, of one that several share.

    join         take tasks as they come, beside other processes that begin together
    shard_index  do this part alone, from 0; then `merge`
    num_shards   how many parts; default for both: what Slurm, torchrun or SkyPilot say
    """

    join: bool
    shard_index: int | None
    num_shards: int | None


def check_words(options: Mapping[str, Any], known: type) -> None:
    """TypeError for a word that is not known, as Python itself has it."""
    for word in options:
        if word not in known.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {word!r}; expected one of {', '.join(known.__annotations__)}"
            )


def words_of(kind: type[Any], options: Mapping[str, Any], **named: str) -> dict[str, Any]:
    """The given words that are fields of a dataclass, as it has them; the defaults of all others are its own.

    named  the word of a field that has another name
    """
    of_field = {field.name: named.get(field.name, field.name) for field in fields(kind)}
    return {
        name: _AS.get(word, _itself)(options[word])
        for name, word in of_field.items()
        if word in options
    }


def access_of(options: AccessOptions, output: Path | None = None) -> Access:
    """How the Hub is asked.

    output  where an unfinished plan may lie, which says of which commit it is
    """
    return Access(**words_of(Access, options, memory_nbytes="memory") | {"output": output})


def original_access(options: AccessOptions) -> Access:
    """The same for the source of an artifact, whose revision is its own."""
    return access_of(AccessOptions(**{**options, "revision": None}))


def given(token: str | None) -> str | None:
    """None for a token of nothing, as --token "$TOKEN" gives where that is not set."""
    return (token or "").strip() or None


def patterns(words: Patterns) -> tuple[str, ...]:
    """One pattern or several as several."""
    return (words,) if isinstance(words, str) else tuple(words or ())


def as_nbytes(gigabytes: float) -> int:
    """Bytes; as many as anybody can have for inf.  InputError for less than nothing, and for NaN."""
    if not gigabytes >= 0:
        raise InputError(
            "usage", f"{gigabytes:g} GB of memory; expected 0 or more", "Give a number of GB."
        )
    return int(min(gigabytes, MOST_MEMORY) * 10**9)


def as_count(workers: int) -> int:
    """The number itself; InputError for less than none."""
    if workers < 0:
        raise InputError(
            "usage",
            f"workers is {workers}; expected 0 or more",
            "Leave it out: as many as suit the device.",
        )
    return workers


def as_reference(file: Reference | None) -> str | None:
    """A file that may not be named, as a string."""
    return None if file is None else os.fspath(file)


def as_path(file: Reference | None) -> Path | None:
    """A file that may not be named."""
    return None if file is None else Path(file)


def _itself(value: object) -> object:
    return value


_AS: Mapping[str, Callable[[Any], object]] = {  # what becomes of a word
    "include": patterns,
    "exclude": patterns,
    "token": given,
    "calibration": as_reference,
    "memory": as_nbytes,
    "hold": as_nbytes,
    "workers": as_count,
}


def ignore(line: str) -> None:
    """Nobody hears it."""


def as_warnings(lines: Iterable[str]) -> None:
    """Python's own warnings, where the caller of the package stands, with nothing in them that could act on a terminal."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("fp4convert."):
        level += 1
    for line in lines:
        from fp4convert.report.text import escape

        warnings.warn(escape(line), UserWarning, stacklevel=level + 1)
