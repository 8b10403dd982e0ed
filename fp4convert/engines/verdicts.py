"""Judge artifacts by the rows of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from fp4convert.engines.files import Engine, ModelList, known_engines
from fp4convert.engines.rows import FAILS, Contents, Row
from fp4convert.engines.versions import Version, Versions, read_version

Evidence = Literal["loaded", "read", "not-tried"]
WORDS: Mapping[Evidence, str] = {  # for people, after a verdict
    "loaded": "loaded by {engine} itself, as a tiny {name}{inside}",
    "read": "read in its source or documentation, not loaded",
    "not-tried": "not tried with this class{inside}",
}
KERNELS = "its kernels run"  # the evidence of an engine that was not run itself


class Verdict(NamedTuple):
    """Whether an engine loads an artifact, and how that is known.

    versions  the range of versions; "" where none is known
    loads     True: it loaded this class, dialect, formats and activations; False: it does not;
              None: nobody loaded it
    why       a predicate whose subject is the engine
    instead   advice where it does not load
    row       the row that decided, if any
    evidence  "loaded" by a judge or a test here, "read" in the engine's source, or neither
    name      the class, or the model's type without one
    inner     types of the models inside it that config.json chooses
    """

    engine: Engine
    versions: str
    loads: bool | None
    why: str
    instead: str = ""
    row: Row | None = None
    evidence: Evidence = "not-tried"
    name: str = ""
    inner: str = ""

    @property
    def may_load(self) -> bool:
        """Return whether a row says that such artifacts load."""
        return bool(self.loads) or (self.loads is None and self.row is not None)

    @property
    def words(self) -> str:
        """Say for people how it is known."""
        inside = f" ({self.inner.replace(',', ', ')})" if self.inner else ""
        name = self.name or "model"
        if self.evidence == "loaded" and self.engine.tried == KERNELS:
            return f"{self.engine.name}'s kernels compute such weights; it was not run itself"
        return WORDS[self.evidence].format(engine=self.engine.name, name=name, inside=inside)

    def reason(self, version: Version | None) -> str:
        """Return the reason as a clause, with the engine and a version."""
        return f"{self.engine.at(version)} {self.why}"

    def as_json(self) -> dict[str, object]:
        return {
            "engine": self.engine.key,
            "versions": self.versions,
            "loads": self.loads,
            "evidence": self.evidence,
            "class": self.name,
            "why": self.why,
        }


def judge(engine: Engine, contents: Contents, version: Version | None = None) -> Verdict:
    """Judge whether an engine loads an artifact.

    version  None: the newest that was examined; the verdict names the range that it begins
    """
    verdict = _weigh(_judge_rows(engine, contents, version), contents, version)
    if verdict.loads is False or not contents.fault:
        return verdict
    why = f"has an artifact with errors before it: {contents.fault}"
    return Verdict(engine, "", False, why, evidence="read", name=verdict.name)


def _weigh(verdict: Verdict, contents: Contents, version: Version | None) -> Verdict:
    """Claim no more than what was loaded."""
    row, tried = verdict.row, verdict.engine.loaded_classes
    names = contents.classes or tuple(filter(None, (contents.model,)))
    verdict = verdict._replace(
        name=", ".join(names), inner=contents.inner, evidence=_evidence_of(verdict)
    )
    if not verdict.loads or row is None:
        return verdict
    if not {*names, contents.model}.isdisjoint(row.ran):
        return verdict
    if tried is not None and version in (None, tried.version):
        inside = f":{contents.inner}" if contents.inner else ""
        keys = [(name + inside, contents.dialect, contents.formats) for name in names]
        fault = next((tried.rows[key] for key in keys if key in tried.rows), None)
        if fault == "":
            return verdict._replace(evidence="loaded")
        if fault:
            versions, why = str(tried.version), f"fails at this class: {fault}"
            return verdict._replace(loads=False, versions=versions, why=why, evidence="loaded")
    if row.tried == "read":
        why = f"was read, not loaded: it {row.says}"
        return verdict._replace(loads=None, why=why, evidence="read")
    verdict = verdict._replace(loads=None, evidence="not-tried")
    return verdict._replace(why=f"was {verdict.words}; elsewhere it {row.says}")


def _evidence_of(verdict: Verdict) -> Evidence:
    """Return how a verdict of rows is known; lists were read."""
    if verdict.row is not None:
        return "read" if verdict.row.tried == "read" else "loaded"
    return "not-tried" if verdict.loads is None else "read"


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
            dialect for dialect, other in others.items() if _judge_rows(engine, other, at).may_load
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
