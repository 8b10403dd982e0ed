"""Rename tensors of a checkpoint as transformers does when it loads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

MERGE, GROUP, OFFSET = "merge", "group", "offset"
# "*" of transformers stands for the number of an expert.
_ANY, _EXPERT = r"..*\.", r"\.(?:0|[1-9][0-9]*)\."


class Renamed(NamedTuple):
    """What a tensor is called in a class.

    names    several where it is split
    source   the word for it among those that become one parameter together; "" of one alone
    sources  the words of all of them: gate_proj, up_proj
    is_part  others become the same parameter, too
    """

    names: tuple[str, ...]
    source: str = ""
    sources: tuple[str, ...] = ()
    is_part: bool = False


class Renaming(NamedTuple):
    """A renaming of transformers, of core_model_loading.py.

    kind     "rename"; "merge": of tensors that become one or several others; "prefix"; "group": one
             of several, by the alternative that fits; "offset": changes a number
    pattern  alternatives in groups with names
    targets  of a merge several where a tensor is split
    scope    names below this module alone; None: all names
    base     the module that may stand before the scope
    offset   of the number
    """

    kind: str
    pattern: re.Pattern[str]
    targets: tuple[str, ...]
    scope: str | None = None
    base: str = ""
    offset: int = 0

    @classmethod
    def parse(cls, row: Sequence[object]) -> Renaming:
        """Read a row of the table."""
        kind, pattern, targets, scope, base, offset = row
        assert isinstance(targets, list)
        found = re.compile(str(pattern).replace(_ANY, _EXPERT))
        prefix = None if scope is None else str(scope)
        return cls(str(kind), found, tuple(targets), prefix, str(base or ""), int(str(offset or 0)))

    @property
    def text(self) -> str:
        """Return all that it may look for or write."""
        return " ".join((self.pattern.pattern, *self.targets))

    def within(self, place: str) -> Renaming:
        """Return the renaming of a model that another holds at a place."""
        scopes = filter(None, (place, self.base, self.scope))
        return self._replace(scope=".".join(scopes) if self.scope is not None else place, base="")

    def apply(self, name: str) -> Renamed | None:
        """Return the new names; None where it does not fit."""
        before = self._scope_of(name)
        if before is None or not (match := self.pattern.search(rest := name[len(before) :])):
            return None
        group = next((key for key, value in match.groupdict().items() if value is not None), None)
        words = _words_of(self.pattern.pattern) if self.kind == MERGE else {}
        first = self.pattern.groupindex[group] if group else 0
        targets = self.targets
        if self.kind == GROUP and group:
            targets = (targets[int(group[1:])],)
        elif self.kind == OFFSET:
            targets = (targets[0].replace(r"\1", str(int(match[first + 1]) + self.offset)),)
        names = tuple(
            before + rest[: match.start()] + _filled(target, match, first) + rest[match.end() :]
            for target in targets
        )
        source = words.get(group or "", "")
        return Renamed(names, source, tuple(words.values()), self.kind == MERGE)

    def _scope_of(self, name: str) -> str | None:
        """Return the part of a name before its scope; None outside of it."""
        if self.scope is None:
            return ""
        inner = f"{self.scope}." if self.scope else ""
        outer = f"{self.base}.{inner}" if self.base else inner
        return next((start for start in (outer, inner) if name.startswith(start)), None)


def _filled(target: str, match: re.Match[str], first: int) -> str:
    numbered = re.sub(r"\\(\d)", lambda one: match[first + int(one[1])] or "", target)
    return numbered.replace("\\.", ".")


def settle(renamings: Iterable[Renaming], names: Iterable[str]) -> tuple[Renaming, ...]:
    """Leave out group renamings whose first alternative fits no name."""
    kept, names = [], list(names)
    for one in renamings:
        if one.kind != GROUP or any(
            (match := one.pattern.search(name)) and match.groupdict().get("g0") for name in names
        ):
            kept.append(one)
    return tuple(kept)


def rename(renamings: Iterable[Renaming], name: str) -> Renamed:
    """Return what a tensor is called in the class, after all renamings."""
    for one in renamings:
        if one.kind != MERGE and (renamed := one.apply(name)):
            name = renamed.names[0]
    merged = (one.apply(name) for one in renamings if one.kind == MERGE)
    return next((each for each in merged if each and each.names != (name,)), Renamed((name,)))


@cache
def _words_of(pattern: str) -> dict[str, str]:
    """Return the word in which the alternatives of a merge differ.

    Returns  group -> its word; {} of one alternative alone
    """
    groups = re.findall(r"\(\?P<(g\d+)>", pattern)
    texts = re.split(r"\|?\(\?P<g\d+>", pattern)[1:]
    words = [re.findall(r"(?<!\\)[a-zA-Z]\w*", text.removesuffix(r"(?!\w))")) for text in texts]
    columns = zip(*words, strict=False)
    differing = (each for each in columns if len(set(each)) == len(texts) > 1)
    return dict(zip(groups, next(differing, ()), strict=False))
