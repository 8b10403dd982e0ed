"""Read what engines load, by version: configs/engines/*.toml.

A file is an engine: what to type for it, how it serves, and rows of facts.  A row says what the
engine does with artifacts of a kind; nothing else in the program, and no page, says so.  What is
in an artifact comes from planning/engines.py for a plan, and from quality/engines.py for a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple

from fp4convert.errors import InputError, did_you_mean

ENGINES = (  # as --for has them, in the order in which they are listed
    "vllm",
    "sglang",
    "tensorrt-llm",
    "transformers",
    "llama.cpp",
    "mlx",
    "comfyui",
    "diffusers",
)
NICKNAMES = {
    "trtllm": "tensorrt-llm",
    "tensorrt": "tensorrt-llm",
    "llama": "llama.cpp",
    "ollama": "llama.cpp",
    "lm-studio": "llama.cpp",
    "mlx-lm": "mlx",
    "hf": "transformers",
    "huggingface": "transformers",
    "llm-compressor": "vllm",
}
FOUR_BIT = ("nvfp4", "mxfp4")
EXPERTS = ".experts."  # in the name of a module; not of shared experts, which are like other MLPs
# Of rows: it is read and computes what the artifact says; it does so slowly; it is read and
# computes something else; it is not read.
Effect = Literal["loads", "slow", "garbage", "refuses"]
FAILS: tuple[Effect, ...] = ("garbage", "refuses")
# How anybody came to know: a test here runs the engine; its own loader was run by hand; its
# source, documentation or a thread was read.
Tried = Literal["run", "loaded", "read"]
_BOUND = re.compile(r"(>=|<)(\d+(?:\.\d+)*)")
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)")

Version = tuple[int, ...]


class Part(NamedTuple):
    """Quantized modules of one kind.

    format  its word: nvfp4, mxfp4, int4, fp8 tensor, fp8 row, fp8 128x128
    """

    format: str
    activations: int
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """What of an artifact decides which engines load it.

    model      model_type of config.json
    classes    names of classes in config.json
    keeps_draft  experts of layers that draft tokens (MTP) stay as they are
    findings   codes of inspect's; none for a plan
    """

    dialect: str
    parts: frozenset[Part]
    model: str = ""
    classes: tuple[str, ...] = ()
    is_diffusers: bool = False
    is_sharded: bool = False
    has_cache: bool = False
    keeps_draft: bool = False
    findings: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Condition:
    """Which artifacts a row is about; what is left out asks nothing.

    formats      of four-bit modules; has_experts, has_others and activations are about these
    models       globs on model_type; not_models: none of these fits
    classes      globs on names of classes
    beside       globs on words of formats that other modules have
    has_experts  some of the modules are experts, or none is
    has_others   some of them are no experts, or none is
    is_mixed     modules have several formats
    findings     codes, of which the artifact has one
    """

    dialects: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    not_models: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    activations: int | None = None
    has_experts: bool | None = None
    has_others: bool | None = None
    is_mixed: bool | None = None
    is_diffusers: bool | None = None
    is_sharded: bool | None = None
    has_cache: bool | None = None
    keeps_draft: bool | None = None

    def fits(self, contents: Contents) -> bool:
        """Tell whether an artifact is one of those."""
        wanted = self.formats or FOUR_BIT
        four_bit = [part for part in contents.parts if part.format in wanted]
        words = {part.format for part in contents.parts}
        is_expert = {part.is_expert for part in four_bit}
        facts = {
            "activations": min((part.activations for part in four_bit), default=16),
            "has_experts": True in is_expert,
            "has_others": False in is_expert,
            "is_mixed": len(words) > 1,
            "is_diffusers": contents.is_diffusers,
            "is_sharded": contents.is_sharded,
            "has_cache": contents.has_cache,
            "keeps_draft": contents.keeps_draft,
        }
        return (
            bool(four_bit)
            and (not self.dialects or contents.dialect in self.dialects)
            and (not self.models or _fit_any(self.models, (contents.model,)))
            and not _fit_any(self.not_models, (contents.model,))
            and (not self.classes or _fit_any(self.classes, contents.classes))
            and (not self.beside or _fit_any(self.beside, words - set(FOUR_BIT)))
            and (not self.findings or not contents.findings.isdisjoint(self.findings))
            and all(getattr(self, name) in (None, value) for name, value in facts.items())
        )


def _fit_any(globs: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


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


@dataclass(frozen=True, slots=True)
class Row:
    """One fact: what an engine does with artifacts of a kind.

    says     a predicate whose subject is the engine
    instead  what to do, as a clause; "" where it loads
    source   address of a thread, or package, version and file that was read or run
    tried    how it is known
    proof    the test here that runs it; "" for none
    lines    FILE: TEXT of that package's code, which `make engines` looks for
    """

    condition: Condition
    versions: Versions
    effect: Effect
    says: str
    instead: str
    source: str
    tried: Tried
    proof: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """What to type for an engine, best first.

    only     models that it is for, for people; "" for all
    models   globs on their model_type
    source   what stands there for the source
    options  beside these words, such as a recipe
    others   "keep" where the engine reads no such modules but experts
    """

    dialect: str
    format: str
    activations: int = 16
    only: str = ""
    models: tuple[str, ...] = ()
    source: str = "./Model"
    options: str = ""
    others: str = ""
    note: str = ""

    @property
    def words(self) -> str:
        """Return the options that --for puts in its place, without defaults."""
        words = f"--format {self.format}"
        if self.dialect != "compressed-tensors":
            words += f" --dialect {self.dialect}"
        return f"{words} --activations {self.activations}" if self.activations != 16 else words


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its names, what to type, how it serves, what it loads.

    key       as --for has it
    version   the newest that was looked at; None where it has none
    tried     how, in a few words
    serve     the command that serves a folder {output}, or a file {file} under the {name}; or ""
    code      lines of Python that load {output} into {auto}; or ""
    packages  what to install for the code, by dialect
    cache     what `serve` needs beside for an FP8 cache
    """

    key: str
    name: str
    version: Version | None
    tried: str
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    serve: str = ""
    code: str = ""
    cache: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def dialects(self) -> set[str]:
        """Return the dialects of which it loads some artifacts."""
        loaded = (row.condition.dialects for row in self.rows if row.effect == "loads")
        return {dialect for dialects in loaded for dialect in dialects}

    def rows_on(self, contents: Contents) -> list[Row]:
        """List rows about an artifact; without dialects: of all that are read."""
        is_read = contents.dialect in self.dialects
        return [
            row
            for row in self.rows
            if row.condition.fits(contents) and (row.condition.dialects or is_read)
        ]

    def called(self, versions: Versions | None = None) -> str:
        """Name the engine with versions: those, or the newest looked at."""
        if versions is not None and versions.before is not None:
            return f"{self.name} before {version_text(versions.before)}"
        return f"{self.name} {version_text(self.version)}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an engine does with an artifact.

    versions  for which that is so; "" where it has none, or none are known
    loads     True: and computes what the artifact says; False; None: nobody knows
    why       the reason, in words
    instead   what to do where it does not load
    row       that decided; None where there is none
    """

    engine: Engine
    versions: str
    loads: bool | None
    why: str
    instead: str = ""
    row: Row | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "engine": self.engine.key,
            "versions": self.versions,
            "loads": self.loads,
            "why": self.why,
        }


@cache
def known_engines() -> tuple[Engine, ...]:
    """Read every file of configs/engines, in the order of ENGINES."""
    import tomllib
    from importlib.resources import files

    folder = files("fp4convert").joinpath("configs").joinpath("engines")
    return tuple(
        _read_engine(key, tomllib.loads(folder.joinpath(f"{key}.toml").read_text(encoding="utf-8")))
        for key in ENGINES
    )


def _read_engine(key: str, table: dict[str, Any]) -> Engine:
    """Read a file; TypeError or ValueError for what none has."""
    rows = tuple(map(_read_row, table.pop("row", ())))
    choices = tuple(Choice(**_as_tuples(choice)) for choice in table.pop("choice", ()))
    version = read_version(table.pop("version")) if "version" in table else None
    return Engine(key=key, version=version, rows=rows, choices=choices, **table)


def _read_row(table: dict[str, Any]) -> Row:
    asked = {each.name for each in fields(Condition)}
    condition = Condition(**_as_tuples({key: table[key] for key in table if key in asked}))
    rest = {key: value for key, value in table.items() if key not in asked}
    versions = read_versions(rest.pop("versions", ""))
    return Row(condition=condition, versions=versions, **{"instead": "", **_as_tuples(rest)})


def _as_tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def engine_called(word: str) -> Engine | None:
    """Find the engine that a person calls so, if any."""

    def plain(word: str) -> str:
        return "".join(filter(str.isalnum, word.lower()))

    known = {plain(key): key for key in ENGINES}
    known |= {plain(nickname): key for nickname, key in NICKNAMES.items()}
    key = known.get(plain(word))
    return next((engine for engine in known_engines() if engine.key == key), None)


def engine_asked(word: str) -> tuple[Engine, Version | None]:
    """Read ENGINE or ENGINE:VERSION; InputError for what is neither."""
    name, colon, number = word.partition(":")
    engine = engine_called(name)
    if engine is None:
        detail = f"engine {name!r} is not known; expected one of {', '.join(ENGINES)}"
        raise InputError("unknown-engine", detail + did_you_mean(name, ENGINES))
    if not colon:
        return engine, engine.version
    try:
        return engine, read_version(number)
    except ValueError:
        detail = f"{number!r} is no version of {engine.name}; expected numbers and dots"
        example = version_text(engine.version) if engine.version else "1.0"
        raise InputError("unknown-engine", detail, f"For example: {name}:{example}.") from None


def judge_contents(engine: Engine, contents: Contents, version: Version | None = None) -> Verdict:
    """Tell what an engine does with an artifact.

    version  None: the newest that was looked at, and since which it is so
    """
    at = version or engine.version or ()
    fitting = engine.rows_on(contents)
    row = _decisive(fitting, at)
    if row is None:
        return Verdict(engine, "", *_unknown(engine, contents, fitting))
    loads = row.effect not in FAILS
    if version is not None:
        shown = version_text(version)
    elif loads:
        shown = str(Versions(_first_that_loads(fitting, at)))
    else:
        shown = str(row.versions)
    return Verdict(engine, shown, loads, row.says, row.instead, row)


def _decisive(rows: Iterable[Row], version: Version) -> Row | None:
    """Choose the row that decides: failures before slowness before loading."""
    ranks = ("garbage", "refuses", "slow", "loads")
    here = [row for row in rows if not version or version in row.versions]
    if not any(row.effect == "loads" for row in here):
        here = [row for row in here if row.effect in FAILS]
    return min(here, key=lambda row: ranks.index(row.effect), default=None)


def _first_that_loads(rows: Iterable[Row], version: Version) -> Version | None:
    """Find the oldest version from which on it loads up to that one.

    None: none of the rows names an older one.
    """
    rows = list(rows)
    ends = {end for row in rows for end in (row.versions.since, row.versions.before) if end}
    first = None
    for end in sorted((end for end in ends if end <= version), reverse=True):
        row = _decisive(rows, end)
        if row is None or row.effect in FAILS:
            return first
        first = end
    older = _decisive(rows, (0,))
    return first if older is None or older.effect in FAILS else None


def _unknown(
    engine: Engine, contents: Contents, fitting: list[Row]
) -> tuple[bool | None, str, str]:
    """Say why no row decides: another dialect or version, or none knows."""
    if contents.dialect not in engine.dialects:
        able = sorted(engine.dialects)
        instead = f"use --dialect {' or '.join(able)}"
        return False, f"reads no artifact of dialect {contents.dialect}", instead
    later = [row.versions.since for row in fitting if row.effect == "loads" and row.versions.since]
    if later:
        first = version_text(min(later))
        why = f"is known to load such artifacts from version {first} on"
        return None, why, f"use {first} or newer"
    return None, "is not known to load such artifacts: nobody has tried or read it", ""


def verdicts_on(contents: Contents) -> list[Verdict]:
    """Tell what every engine does with an artifact."""
    return [judge_contents(engine, contents) for engine in known_engines()]


def traps_of(contents: Contents) -> Iterator[tuple[Engine, Row]]:
    """Find what engines of the dialect are known to fail at.

    Garbage of any version, and what the newest refuses; of a Diffusers pipeline what its own
    engines refuse, too, whatever the dialect.
    """
    for engine in known_engines():
        if contents.dialect not in engine.dialects and not contents.is_diffusers:
            continue
        for row in engine.rows_on(contents):
            is_now = engine.version is None or engine.version in row.versions
            if row.effect == "garbage" or (row.effect == "refuses" and is_now):
                yield engine, row


def trap_text(engine: Engine, row: Row) -> str:
    """Tell a row in a line: who does what, and what to do."""
    return "; ".join(filter(None, (f"{engine.called(row.versions)} {row.says}", row.instead)))
