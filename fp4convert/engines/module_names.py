"""Names of an engine's modules that differ from a checkpoint's.

configs/engines/names has a file for each engine whose records are read by its own names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class NameTable(NamedTuple):
    """Lines of one model type, NAME > NAMES; the first that fits counts.

    entries  an expression for the beginning of a name, and what stands for it
    """

    entries: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]

    @classmethod
    def parse(cls, lines: Iterable[str]) -> NameTable:
        """Read lines; # stands for a number."""
        entries = []
        for line in lines:
            name, _, others = line.partition(" > ")
            beginning = re.escape(name).replace(r"\#", r"(\d+)")
            entries.append((re.compile(rf"{beginning}(?=\.|$)"), tuple(others.split())))
        return cls(tuple(entries))

    def names(self, module: str) -> tuple[str, ...]:
        """Return the engine's names of a module, or the given name."""
        for pattern, others in self.entries:
            if match := pattern.match(module):
                rest = module[match.end() :]
                return tuple(_numbered(other, match.groups()) + rest for other in others)
        return (module,)


def _numbered(name: str, numbers: Iterable[str]) -> str:
    for number in numbers:
        name = name.replace("#", number, 1)
    return name


def engine_names(
    config: Mapping[str, object], modules: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the names of modules that an engine renames.

    config  config.json, whose model_type chooses the tables
    """
    tables = [
        NameTable.parse(table.split("\n"))
        for table in (names.get(str(config.get("model_type"))) for names in _tables())
        if table
    ]
    if not tables:
        return {}
    renamed = {}
    for module in modules:
        names = dict.fromkeys(name for table in tables for name in table.names(module))
        if others := tuple(name for name in names if name != module):
            renamed[module] = others
    return renamed


@cache
def _tables() -> tuple[Mapping[str, str], ...]:
    """Read the names of every engine, by model type."""
    folder = files("fp4convert").joinpath("configs", "engines", "names")
    items = sorted(folder.iterdir(), key=lambda item: item.name)
    texts = [item.read_text(encoding="utf-8") for item in items if item.name.endswith(".toml")]
    return tuple(
        {
            model: text.strip()
            for models, text in tomllib.loads(each)["names"].items()
            for model in models.split()
        }
        for each in texts
    )
