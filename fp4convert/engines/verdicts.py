"""Judge artifacts by the rows of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fp4convert.engines.files import Engine, ModelList, known_engines
from fp4convert.engines.rows import FAILS, Contents, Row
from fp4convert.engines.versions import Version, Versions, read_version

EVIDENCE = {  # words for Row.tried
    "run": "run by {proof}",
    "loaded": "its own loader took such artifacts; no model was run",
    "read": "read in its source or documentation; not run",
}


class Verdict(NamedTuple):
    """Whether an engine loads an artifact, and why.

    versions  the range of versions; "" where none is known
    loads     True: it loads and computes the artifact's values; None: nobody knows
    why       a predicate whose subject is the engine
    instead   advice where it does not load
    row       the row that decided, if any
    """

    engine: Engine
    versions: str
    loads: bool | None
    why: str
    instead: str = ""
    row: Row | None = None

    def reason(self, version: Version | None) -> str:
        """Return the reason as a clause, with the engine and a version."""
        return f"{self.engine.at(version)} {self.why}"

    @property
    def evidence(self) -> str:
        """Return the evidence of the row that decided; "" without one."""
        return EVIDENCE[self.row.tried].format(proof=self.row.proof) if self.row else ""

    def as_json(self) -> dict[str, object]:
        return {
            "engine": self.engine.key,
            "versions": self.versions,
            "loads": self.loads,
            "why": self.why,
        }


def judge(engine: Engine, contents: Contents, version: Version | None = None) -> Verdict:
    """Judge whether an engine loads an artifact.

    version  None: the newest that was examined; the verdict names the range that it begins
    """
    verdict = _judge_rows(engine, contents, version)
    if verdict.loads is False or not contents.fault:
        return verdict
    why = f"has an artifact with errors before it: {contents.fault}"
    return Verdict(engine, "", False, why)


def _judge_rows(engine: Engine, contents: Contents, version: Version | None) -> Verdict:
    """Judge an artifact without faults."""
    at = version or engine.version
    fitting = engine.rows_on(contents)
    row = _decisive(fitting, at)
    if row is None:
        if contents.dialect in engine.dialects and engine.models:
            unknown = _without_class(engine, engine.models, contents)
            if unknown:
                return unknown
        return Verdict(engine, "", *_unknown(engine, contents, fitting, version))
    loads = row.effect not in FAILS
    if loads and engine.models and (unknown := _without_class(engine, engine.models, contents)):
        return unknown
    if version is not None:
        shown = str(version)
    elif loads:
        shown = str(Versions(_first_that_loads(fitting, at)))
    else:
        shown = str(row.versions)
    return Verdict(engine, shown, loads, row.says, row.instead, row)


def _without_class(engine: Engine, models: ModelList, contents: Contents) -> Verdict | None:
    """Judge a model without a class; None where it may have one."""
    names = models.lacks(contents)
    if not names or (contents.has_code and models.by == "model_type"):
        return None
    why = f"has no class for {names} ({models.source})"
    if engine.fallback:
        return Verdict(engine, "", None, f"{why}; {engine.fallback}")
    return Verdict(engine, "", False, why)


def _decisive(rows: Iterable[Row], version: Version | None) -> Row | None:
    """Return the row that decides: failure before slowness before loading."""
    ranks = ("garbage", "refuses", "slow", "loads")
    here = [row for row in rows if version is None or version in row.versions]
    if not any(row.effect == "loads" for row in here):
        here = [row for row in here if row.effect in FAILS]
    return min(here, key=lambda row: ranks.index(row.effect), default=None)


def _first_that_loads(rows: Iterable[Row], version: Version | None) -> Version | None:
    """Return the oldest version that loads, and all up to the given one too.

    None where no row names an older end.
    """
    if version is None:
        return None
    rows = list(rows)
    ends = {end for row in rows for end in (row.versions.since, row.versions.before) if end}
    first = None
    for end in sorted((end for end in ends if end <= version), reverse=True):
        row = _decisive(rows, end)
        if row is None or row.effect in FAILS:
            return first
        first = end
    older = _decisive(rows, read_version("0"))
    return first if older is None or older.effect in FAILS else None


def _unknown(
    engine: Engine, contents: Contents, fitting: list[Row], at: Version | None
) -> tuple[bool | None, str, str]:
    """Return loads, why and instead of a verdict without a row."""
    if contents.dialect not in engine.dialects:
        others = {dialect: contents._replace(dialect=dialect) for dialect in engine.dialects}
        able = sorted(
            dialect for dialect, other in others.items() if _judge_rows(engine, other, at).loads
        )
        instead = f"use --dialect {' or '.join(able)}" if able else ""
        return False, f"reads no artifact of dialect {contents.dialect}", instead
    later = [row.versions.since for row in fitting if row.effect == "loads" and row.versions.since]
    if later:
        first = str(min(later))
        why = f"is known to load such artifacts from version {first} on"
        return None, why, f"use {first} or newer"
    return None, "is not known to load such artifacts: nobody has tried or read it", ""


def judge_all(contents: Contents) -> list[Verdict]:
    """Judge an artifact for every engine, in the order of ENGINES."""
    return [judge(engine, contents) for engine in known_engines()]


def find_traps(contents: Contents) -> Iterator[tuple[Engine, Row]]:
    """Find known failures of the engines that read the dialect.

    These are garbage in any version, and refusals of the newest version.  Diffusers pipelines have
    their own engines: these count for every dialect.
    """
    for engine in known_engines():
        if contents.dialect not in engine.dialects and not contents.is_diffusers:
            continue
        for row in engine.rows_on(contents):
            is_newest = engine.version is None or engine.version in row.versions
            if row.effect == "garbage" or (row.effect == "refuses" and is_newest):
                yield engine, row


def trap_text(engine: Engine, row: Row) -> str:
    """Return a trap as a line: engine, failure, what to do instead."""
    return "; ".join(filter(None, (f"{engine.called(row.versions)} {row.says}", row.instead)))
