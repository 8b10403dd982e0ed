"""Read the files of engines: configs/engines/*.toml.

A file holds presets for --for, commands that serve, and rows of facts by version.  Nothing else in
the program, and no page, knows what an engine loads.  planning/engine_facts.py collects the facts
of a plan that rows ask about, quality/engine_check.py those of an artifact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.errors import InputError, did_you_mean

if TYPE_CHECKING:  # the command line starts with the names of engines alone
    from fp4convert.engines.rows import Contents, Row
    from fp4convert.engines.versions import Version, Versions

ENGINES = (  # words of --for, in the order of lists
    "vllm",
    "sglang",
    "tensorrt-llm",
    "transformers",
    "llama.cpp",
    "mlx",
    "comfyui",
    "diffusers",
)
SERVERS = ENGINES[:4]  # which read the class of a model in config.json
# Programs made of an engine, which nobody looked at themselves.
MADE_OF = {"lm-studio": "llama.cpp", "koboldcpp": "llama.cpp", "llamafile": "llama.cpp"}
# Engines of --for that no list of engines has: they were read, and no model was loaded in them.
OTHERS = ("ollama", "sglang-diffusion", "vllm-omni", "visualgen", "fouroversix")
NICKNAMES = {
    "trtllm": "tensorrt-llm",
    "tensorrt": "tensorrt-llm",
    "llama": "llama.cpp",
    "mlx-lm": "mlx",
    "hf": "transformers",
    "huggingface": "transformers",
    "llm-compressor": "vllm",
    "trtllm-visualgen": "visualgen",
}


class Preset(NamedTuple):
    """Options that make an artifact for an engine.

    only          the models, in words for people; "" for all models
    models        globs on their model_type
    source        an example of a source
    options       further options, such as a recipe
    keeps_others  the engine reads only experts in this format: all other modules stay
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
        """Return the options that --for chooses, without defaults."""
        words = f"--format {self.format}"
        if self.dialect != "compressed-tensors":
            words += f" --dialect {self.dialect}"
        return f"{words} --activations {self.activations}" if self.activations != 16 else words


class ModelList(NamedTuple):
    """Models that an engine has a class for: configs/engines/models.

    source   the package, its version and the file with the list
    by       the kind of names: "class" or "model_type"
    endings  endings of class names that the engine treats as equal
    """

    source: str
    by: str
    names: frozenset[str]
    endings: tuple[str, ...] = ()

    def lacks(self, contents: Contents) -> str:
        """Return the names without a class; "" where one has a class."""
        names = contents.classes if self.by == "class" else tuple(filter(None, (contents.model,)))
        return "" if any(map(self._has, names)) else ", ".join(names)

    def _has(self, name: str) -> bool:
        stems = [name.removesuffix(ending) for ending in self.endings if name.endswith(ending)]
        others = {stem + ending for stem in stems for ending in self.endings}
        return not self.names.isdisjoint({name, *others})


class LoadedClasses(NamedTuple):
    """Tiny models that an engine loaded: configs/engines/loaded.

    rows  (class:inner types, dialect, formats): "" where it held every value, else what became
          of it; "LlavaForConditionalGeneration:text_config=llama,vision_config=clip_vision_model"
    """

    version: Version
    rows: Mapping[tuple[str, str, str], str]


class Engine(NamedTuple):
    """An engine: names, presets, commands that serve, facts about artifacts.

    key       the word of --for
    version   the newest version that was examined; None for engines without versions
    tried     a few words on the evidence
    dialects  dialects with artifacts that it loads
    presets   best first
    serve     the command that serves a folder {output}, or a file {file} under a {name} in one of
              `places`; or ""
    join      Python that writes the files of a folder as that one; or ""
    places    folders of the engine, each with globs on tensors; the first that fits is the place
    code      lines of Python that load {output} into {auto}; or ""
    class_code  by dialect: lines of Python with a class {name}, {output} or the one {file} in it,
              and {source} for its configuration
    cache     options of `serve` for a KV cache, by its format
    fallback  a clause on models without a class; "" where it refuses them
    packages  packages that the code needs, by dialect
    """

    key: str
    name: str
    version: Version | None
    tried: str
    rows: tuple[Row, ...]
    dialects: frozenset[str]
    presets: tuple[Preset, ...]
    serve: str = ""
    join: str = ""
    places: tuple[Mapping[str, Any], ...] = ()
    code: str = ""
    class_code: Mapping[str, str] = {}
    cache: Mapping[str, str] = {}
    fallback: str = ""
    packages: Mapping[str, str] = {}

    @property
    def models(self) -> ModelList | None:
        """Return the models with a class; None where nobody has a list."""
        return _read_models(self.key)

    @property
    def loaded_classes(self) -> LoadedClasses | None:
        """Return the models that it was given; None where nobody tried."""
        return _read_judged(self.key)

    def as_json(self) -> dict[str, Any]:
        """Make the document of `explain ENGINE`: its rows."""
        rows = [
            {
                "effect": row.effect,
                "versions": str(row.versions),
                "dialects": list(row.condition.dialects),
                "formats": list(row.condition.formats),
                "says": row.says,
                "instead": row.instead,
                "evidence": row.tried,
                "source": row.source,
            }
            for row in self.rows
        ]
        version = str(self.version) if self.version else None
        known = {"key": self.key, "name": self.name, "version": version, "tried": self.tried}
        return {**known, "serve": self.serve or self.code.strip(), "rows": rows}

    def place_of(self, names: Collection[str]) -> str:
        """Return the folder where the engine looks for such tensors; or ""."""
        from fp4convert.engines.rows import fit_any

        fitting = (row["folder"] for row in self.places if fit_any(row["tensors"], names))
        return next(fitting, "")

    def serving(self, cache: str | None) -> str:
        """Return the command that serves, with its options for a KV cache."""
        return " ".join(filter(None, (self.serve, self.cache.get(cache or ""))))

    def rows_on(self, contents: Contents) -> list[Row]:
        """List the rows that fit an artifact.

        A row without dialects is about every dialect that the engine reads.
        """
        dialect = contents.dialect
        return [
            row
            for row in self.rows
            if dialect in (row.condition.dialects or self.dialects) and row.condition.fits(contents)
        ]

    def called(self, versions: Versions | None = None) -> str:
        """Return the name with the end of a range, or the newest version."""
        if versions is not None and versions.before is not None:
            return f"{self.name} before {versions.before}"
        return self.at(self.version)

    def at(self, versions: object) -> str:
        """Return the name with a version or a range, if any."""
        return f"{self.name} {versions}" if versions else self.name


def known_engines(more: tuple[str, ...] = ()) -> tuple[Engine, ...]:
    """Read every engine, in the order of ENGINES, and more by their keys."""
    return tuple(map(read_engine, (*ENGINES, *more)))


@cache
def read_engine(key: str) -> Engine:
    """Read the file of an engine; TypeError or ValueError for unknown keys."""
    from fp4convert.engines.rows import read_row
    from fp4convert.engines.versions import read_version

    table = read_toml(f"{key}.toml")
    rows = tuple(read_row(as_tuples(row)) for row in table.pop("row", ()))
    loaded = (row.condition.dialects for row in rows if row.effect == "loads")
    return Engine(
        key=key,
        version=read_version(table.pop("version")) if "version" in table else None,
        rows=rows,
        dialects=frozenset(dialect for dialects in loaded for dialect in dialects),
        presets=tuple(Preset(**as_tuples(preset)) for preset in table.pop("preset", ())),
        **table,
    )


@cache
def _read_models(key: str) -> ModelList | None:
    table = as_tuples(read_toml(f"models/{key}.toml"))
    return ModelList(names=frozenset(table.pop("names").split()), **table) if table else None


@cache
def _read_judged(key: str) -> LoadedClasses | None:
    """Read lines of configs/engines/loaded, as their head says."""
    from fp4convert.engines.versions import read_version

    table = read_toml(f"loaded/{key}.toml")
    if not table:
        return None
    lines = (line.split(" ", 4) for line in table["rows"].splitlines())
    rows = {(words[0], words[1], words[2]): "".join(words[4:]) for words in lines}
    return LoadedClasses(read_version(table["version"]), rows)


def read_toml(name: str) -> dict[str, Any]:
    """Read a file below configs/engines; {} where there is none."""
    import tomllib
    from importlib.resources import files

    file = files("fp4convert").joinpath("configs", "engines", *name.split("/"))
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def as_tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


EngineAt = tuple[Engine, "Version | None"]  # a word of --for


def find_engine(word: str) -> Engine | None:
    """Find an engine by its name or a nickname, in any spelling."""

    def plain(word: str) -> str:
        return "".join(filter(str.isalnum, word.lower()))

    keys = {plain(key): key for key in (*ENGINES, *OTHERS)}
    keys |= {plain(nickname): key for nickname, key in (NICKNAMES | MADE_OF).items()}
    key = keys.get(plain(word))
    return read_engine(key) if key else None


def judged_as(words: str) -> list[str]:
    """Say which programs are judged as the engine that they are made of."""
    names = (word.partition(":")[0].strip() for word in words.split(","))
    plain = {"".join(filter(str.isalnum, name)): name for name in MADE_OF}
    made = {plain.get("".join(filter(str.isalnum, name.lower()))) for name in names}
    line = "{} itself was not looked at: judged as {}, of which it is made"
    return [line.format(name, MADE_OF[name]) for name in sorted(filter(None, made))]


def parse_engines(words: object) -> tuple[EngineAt, ...]:
    """Parse one engine, or several with commas between them; as parse_engine."""
    several = words.split(",") if isinstance(words, str) else [words]
    return tuple(parse_engine(word) for word in several)


def parse_engine(word: object) -> tuple[Engine, Version | None]:
    """Parse ENGINE, ENGINE:VERSION or ENGINE==VERSION.

    Returns  the engine and the version, without one the newest that was looked at
    Raises   InputError for others
    """
    from fp4convert.engines.versions import read_version

    if not isinstance(word, str):
        detail = f"engine {word!r} is no text; expected one of {', '.join(ENGINES)}"
        raise InputError("unknown-engine", detail, 'For example: engine="vllm".')
    name, colon, number = word.strip().replace("==", ":", 1).partition(":")
    engine = find_engine(name)
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
