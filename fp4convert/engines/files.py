"""Read what engines load, by version: configs/engines/*.toml.

A file is an engine: what to type for it, how it serves, and rows of facts.  A row says what the
engine does with artifacts of a kind; nothing else in the program, and no page, says so.  What is
in a plan's result is told by planning/engine_facts.py, in a folder by quality/engine_check.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.engines.rows import Condition, Contents, Row
from fp4convert.engines.versions import (
    Version,
    Versions,
    read_version,
    read_versions,
)
from fp4convert.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

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


class Preset(NamedTuple):
    """One choice of what to type for an engine.

    only          models that it is for, for people; "" for all
    models        globs on their model_type
    source        what stands there for the source
    options       beside these words, such as a recipe
    keeps_others  the engine reads no such modules but experts: all others stay
    """

    dialect: str
    format: str
    activations: int = 16
    only: str = ""
    models: tuple[str, ...] = ()
    source: str = "./Model"
    options: str = ""
    keeps_others: bool = False
    note: str = ""

    @property
    def words(self) -> str:
        """Return the options that --for puts in its place, without defaults."""
        words = f"--format {self.format}"
        if self.dialect != "compressed-tensors":
            words += f" --dialect {self.dialect}"
        return f"{words} --activations {self.activations}" if self.activations != 16 else words


class ModelList(NamedTuple):
    """The models that an engine has a class for: configs/engines/models.

    source   the package, its version and the file that says so
    by       what the names are: "class" or "model_type"
    endings  of names of classes that the engine takes for one another
    """

    source: str
    by: str
    names: frozenset[str]
    endings: tuple[str, ...] = ()

    def lacks(self, contents: Contents) -> str:
        """Return what no class is there for; "" where one is, or may be."""
        given = contents.classes if self.by == "class" else tuple(filter(None, (contents.model,)))
        return "" if any(map(self._has, given)) else ", ".join(given)

    def _has(self, name: str) -> bool:
        stems = [name.removesuffix(ending) for ending in self.endings if name.endswith(ending)]
        others = {stem + ending for stem in stems for ending in self.endings}
        return not self.names.isdisjoint({name, *others})


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its names, what to type, how it serves, what it loads.

    key       as --for has it
    presets   best first
    version   the newest that was looked at; None where it has none
    tried     how, in a few words
    serve     the command that serves a folder {output}, or a file {file} under the {name}; or ""
    code      lines of Python that load {output} into {auto}; or ""
    class_code  the same by dialect, of a class {name} and {output}, or the one {file} in it, with
              {source} for its configuration
    packages  what to install for the code, by dialect
    cache     what `serve` needs beside for a cache of keys and values, by what that holds
    fallback  what it may do with models that it has no class for, as a clause; "" for nothing
    models    those that it has a class for; None where nobody has a list
    """

    key: str
    name: str
    version: Version | None
    tried: str
    rows: tuple[Row, ...]
    presets: tuple[Preset, ...]
    serve: str = ""
    code: str = ""
    class_code: Mapping[str, str] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)
    fallback: str = ""
    models: ModelList | None = None
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def dialects(self) -> set[str]:
        """Return the dialects of which it loads some artifacts."""
        loaded = (row.condition.dialects for row in self.rows if row.effect == "loads")
        return {dialect for dialects in loaded for dialect in dialects}

    def serving(self, cache: str | None) -> str:
        """Return the command that serves, with its words for such a cache."""
        return " ".join(filter(None, (self.serve, self.cache.get(cache or ""))))

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
            return f"{self.name} before {versions.before}"
        return self.at(self.version)

    def at(self, versions: object) -> str:
        """Name the engine with a version or several, where it has one."""
        return f"{self.name} {versions}" if versions else self.name


@cache
def known_engines() -> tuple[Engine, ...]:
    """Read every file of configs/engines, in the order of ENGINES."""
    import tomllib
    from importlib.resources import files

    folder = files("fp4convert").joinpath("configs").joinpath("engines")
    lists = folder.joinpath("models")

    def read(place: Traversable) -> dict[str, Any]:
        return tomllib.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}

    return tuple(
        _read_engine(key, read(folder.joinpath(f"{key}.toml")), read(lists.joinpath(f"{key}.toml")))
        for key in ENGINES
    )


def _read_engine(key: str, table: dict[str, Any], models: dict[str, Any]) -> Engine:
    """Read its files; TypeError or ValueError for what none has."""
    if models:
        names = frozenset(models.pop("names").split())
        table["models"] = ModelList(names=names, **_as_tuples(models))
    rows = tuple(map(_read_row, table.pop("row", ())))
    presets = tuple(Preset(**_as_tuples(preset)) for preset in table.pop("preset", ()))
    version = read_version(table.pop("version")) if "version" in table else None
    return Engine(key=key, version=version, rows=rows, presets=presets, **table)


def _read_row(table: dict[str, Any]) -> Row:
    asked = Condition._fields
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


def engine_asked(word: object) -> tuple[Engine, Version | None]:
    """Read ENGINE, ENGINE:VERSION or ENGINE==VERSION; InputError for others."""
    if not isinstance(word, str):
        detail = f"engine {word!r} is no text; expected one of {', '.join(ENGINES)}"
        raise InputError("unknown-engine", detail, 'For example: engine="vllm".')
    name, colon, number = word.replace("==", ":", 1).partition(":")
    engine = engine_called(name)
    if engine is None:
        detail = f"engine {name!r} is not known; expected one of {', '.join(ENGINES)}"
        raise InputError("unknown-engine", detail + did_you_mean(name, ENGINES))
    if not colon:
        return engine, engine.version
    try:
        return engine, read_version(number)
    except ValueError:
        detail = f"{number!r} is no version of {engine.name}; expected one as 0.33.0"
        example = str(engine.version) if engine.version else "1.0"
        raise InputError("unknown-engine", detail, f"For example: {name}:{example}.") from None
