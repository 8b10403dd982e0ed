"""Look up what a model class is made of: configs/architectures.

The table is made of the packages themselves (`make architectures`): the parameters of each class of
transformers, diffusers and mlx-lm, their types, the settings that add or remove some, and the
renamings that transformers applies to a checkpoint. tests/architectures/README.md says how it
is written.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import accumulate, repeat
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from fp4convert.checkpoint.architectures import Architecture, Kinds
from fp4convert.checkpoint.layer_lists import MISSING, read_lists, value_at
from fp4convert.checkpoint.name_mapping import Renaming, settle

TRANSFORMERS, DIFFUSERS = "transformers", "diffusers"
MOST_DEPTH = 8  # of configs inside configs
MOST_LETTERS = 100  # of a class's name in a message
RELATIONS = {"==": eq, "!=": ne, ">": gt, "<=": le, "<": lt, ">=": ge}
_NUMERIC = re.compile(r"-?[\d.]+(?:e-?\d+)?")
OTHER_SIZE = "another size"  # a condition of the table: sizes that differ, or are the same
OWN_CODE = "auto_map"  # in config.json: classes of Python code beside the weights
OF_MLX = "quantization"  # in config.json: names are those of mlx-lm's classes
_CONFIG = re.compile(r"_config$")  # of a model inside
RECORDS = frozenset({"quantization_config", OF_MLX})  # in config.json: of no model
FEWEST_NUMBERS = 4  # of sizes in a config.json that is whole


def find_architecture(
    config: Mapping[str, object], names: Iterable[str] = ()
) -> Architecture | None:
    """Return the class in a config.json; None if no table has it.

    A config.json of a few lines, from which no engine builds a model, has none; that of an artifact
    of mlx-lm has the names of other classes.

    names  of the checkpoint's tensors, for renamings that depend on them
    """
    package, name = _class_in(config)
    if OF_MLX in config or _count_numbers(config) < FEWEST_NUMBERS:
        return None
    if (made := _read_class(package, name, config)) is None:
        return None
    legacy = map(Renaming.parse, _read_index().get("legacy", ()))
    return replace(made, renamings=settle((*made.renamings, *legacy), names))


def note_on_class(config: Mapping[str, object], is_explained: bool = False) -> str:
    """Say why names are held against no class, or a doubtful one; or "".

    is_explained  names are held against the class in config.json
    """
    package, name = _class_in(config)
    classes = config.get("architectures", [name])
    if OF_MLX in config or _count_numbers(config) < FEWEST_NUMBERS:
        return ""
    if package == TRANSFORMERS and _is_of_other_type(name, config.get("model_type")):
        what = f"model_type is {config['model_type']!r}, and the class {name} of another family"
        return f"config.json: {what}: engines go by one or the other"
    names = classes if isinstance(classes, list) else []
    if package == TRANSFORMERS and "architectures" not in config:
        why = "config.json names no class in architectures" if "model_type" in config else ""
    elif package == TRANSFORMERS and not (names and all(isinstance(one, str) for one in names)):
        why = f"architectures in config.json is {json.dumps(classes)[:MOST_LETTERS]}, no class"
    elif len(names) > 1:
        why = f"config.json names {len(names)} classes"
    elif (table := _read_family(package, name)) and (key := _other_form(table, name, config)):
        why = f"config.json has {key}, which {name} of {package} does not have"
    elif table:
        why = f"the model has code of its own, whose names are not those of {name}"
    else:
        why = f"{name[:MOST_LETTERS]} is in no table of model classes" if name else ""
    return f"{why}: names and shapes alone decide" if why and not is_explained else ""


def types_inside(config: Mapping[str, object]) -> str:
    """Return the types of models inside a model, where config.json chooses.

    "text_config=llama,vision_config=clip_vision_model"; "" for classes with fixed models inside
    """
    types = _types_inside(*_class_in(config), config)
    return ",".join(f"{key}={types[key]}" for key in sorted(types))


def _types_inside(package: str, name: str, config: object) -> dict[str, str]:
    """Return types by path of their configs.

    Where a config says none, the class's default counts.
    """
    config = config if isinstance(config, Mapping) else {}
    types: dict[str, str] = {}
    if (table := _read_family(package, name)) is None:
        return types
    for key, model_type, mapping in table["classes"][name].get("inner", {}).values():
        inner = value_at(config, key)
        said = inner.get("model_type") if isinstance(inner, Mapping) else None
        types[key] = "".join(str(said or model_type)[:MOST_LETTERS].split())
        inside = _types_inside(package, _read_index()[mapping].get(types[key], ""), inner)
        types |= {f"{key}.{path}": word for path, word in inside.items()}
    return types


def classes_of(model_type: str) -> tuple[str, ...]:
    """Return the classes that a model type is published with, if any."""
    index = _read_index()
    names = (index["causal"].get(model_type), index["types"].get(model_type))
    return tuple(name for name in names if name)


def _is_of_other_type(name: str, model_type: object) -> bool:
    """Return whether a class and a model type are of two families.

    Bare models serve several types (Sam2Model), and so do families of no type (JevForDecision).
    """
    index = _read_index()
    classes, types = index["classes"][TRANSFORMERS], index["types"]
    owner = types.get(model_type) if isinstance(model_type, str) else None
    if name not in classes or owner not in classes or name.endswith("Model"):
        return False
    return classes[name] != classes[owner] and any(
        classes.get(one) == classes[name] for one in types.values()
    )


def _class_in(config: Mapping[str, object]) -> tuple[str, str]:
    """Return the package and the name of the only class in a config.json."""
    if isinstance(name := config.get("_class_name"), str):
        return DIFFUSERS, name
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    return TRANSFORMERS, name if isinstance(name, str) else ""


def _count_numbers(config: Mapping[str, object], depth: int = 0) -> int:
    """Count the whole numbers in a config.json, most of which are sizes."""
    if depth > MOST_DEPTH:
        return 0
    parts = (one for key, one in config.items() if key not in RECORDS and isinstance(one, Mapping))
    inner = sum(_count_numbers(part, depth + 1) for part in parts)
    return inner + sum(type(value) is int for value in config.values())


@cache
def _read_index() -> dict[str, Any]:
    file = files("fp4convert").joinpath("configs", "architectures", "index.json")
    table: dict[str, Any] = json.loads(file.read_text(encoding="ascii"))
    return table


def _read_class(package: str, name: str, config: Mapping[str, object]) -> Architecture | None:
    """Read a class of the table, if it is there, under a config's settings."""
    if (table := _read_family(package, name)) is None or _other_form(table, name, config):
        return None
    index = _read_index()
    row, words = table["classes"][name], [part.split(" ", 1) for part in table["parts"]]
    parts: dict[str, dict[str, str]] = {}

    def block(number: int) -> frozenset[str]:
        return frozenset(words[at][1] for at in accumulate(table["blocks"][number]))

    def read(layout: Mapping[str, list[int]]) -> dict[str, Kinds]:
        found = {}
        for prefix, blocks in layout.items():
            own = parts.setdefault(prefix, {})
            kinds = [[words[at] for at in accumulate(table["blocks"][block])] for block in blocks]
            for letter, part in (each for kind in kinds for each in kind):
                own[part] = letter if own.get(part, letter) == letter else letter[0]
            found[prefix] = tuple(frozenset(part for _, part in kind) for kind in kinds)
        return found

    usual = read(row.get("layout", {}))
    flips = [(*one, read(changed)) for *one, changed in row.get("flips", ())]
    changes = _changes(config, flips)
    sizes = [changed for _, wanted, changed in flips if wanted == OTHER_SIZE]
    unsure = _only_together(usual, flips)
    made = Architecture(
        name,
        parts,
        {prefix: combine(usual.get(prefix, ()), changes.get(prefix, ())) for prefix in parts},
        tuple(map(Renaming.parse, (table["renamings"][at] for at in row.get("renamings", ())))),
        row.get("base", ""),
        _tied_names(config, row),
        _compiled((*row.get("absent", ()), *map(re.escape, row.get("skip", ())))),
        _compiled(row.get("unexpected", ())),
        _parts_of(sizes) | unsure,
        unsure,
        read_lists(row, block, config),
    )
    for place, (key, model_type, mapping) in row.get("inner", {}).items():
        inner = value_at(config, key)
        if not isinstance(inner, Mapping) or (other := inner.get("model_type")) is None:
            continue
        chosen = _read_class(package, index[mapping].get(str(other), ""), inner)
        if other != model_type:
            made = made.holding(place, chosen)
        elif chosen:  # whose settings may add parts
            made = made.knowing(place, chosen)
    return made


def _only_together(
    usual: Mapping[str, Kinds], flips: Iterable[tuple[Any, Any, Mapping[str, Kinds]]]
) -> frozenset[tuple[str, str]]:
    """Return prefixes and parts that only settings together give a class.

    A third setting may take them away again.
    """
    together = [changed for path, _, changed in flips if isinstance(path, list)]
    alone = [changed for path, _, changed in flips if isinstance(path, str)]
    return _parts_of(together) - _parts_of([usual, *alone])


def _parts_of(layouts: Iterable[Mapping[str, Kinds]]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (prefix, part)
        for layout in layouts
        for prefix, kinds in layout.items()
        for part in frozenset[str]().union(*kinds)
    )


def _read_family(package: str, name: str) -> dict[str, Any] | None:
    """Read the line of a class's family; None if no table has the class."""
    index = _read_index()
    family = index["classes"].get(package, {}).get(name)
    if family is None:
        return None
    start, length, at = index["families"][package][family]
    folder = files("fp4convert").joinpath("configs", "architectures")
    with folder.joinpath(f"{package}.zlib").open("rb") as file:
        file.seek(start)
        table: dict[str, Any] = json.loads(zlib.decompress(file.read(length)).splitlines()[at])
    return table


def _other_form(table: Mapping[str, Any], name: str, config: Mapping[str, object]) -> str:
    """Return the key of a config inside that the class does not have; or "".

    Qwen3-ASR's publisher has a thinker_config, and names that go with it.
    """
    row = table["classes"][name]
    paths = (*row.get("counts", {}).values(), *row.get("defaults", ()), *row.get("words", ()))
    inside = {word for path in paths for word in re.findall(r"(\w+)\.", path)}
    inside |= {str(key).partition(".")[0] for key, *_ in row.get("inner", {}).values()}
    own = {key for key, one in config.items() if isinstance(one, Mapping) and _CONFIG.search(key)}
    others = sorted(own - inside - RECORDS)
    return others[0] if inside and others and not inside & own else ""


def _changes(
    config: Mapping[str, object], flips: Iterable[tuple[Any, Any, Mapping[str, Kinds]]]
) -> dict[str, list[Kinds]]:
    """Return the kinds under each setting of a config, by prefix.

    Two settings together may have kinds of their own, which stand for those of each.
    """
    active = [(path, changed) for path, wanted, changed in flips if _holds(config, path, wanted)]
    pairs = [(path, changed) for path, changed in active if isinstance(path, list)]
    changes: dict[str, list[Kinds]] = defaultdict(list)
    for path, changed in active:
        for prefix, kinds in changed.items():
            if not any(path in paths and prefix in other for paths, other in pairs):
                changes[prefix].append(kinds)
    return changes


def _compiled(expressions: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, expressions))


def _tied_names(config: Mapping[str, object], row: Mapping[str, Any]) -> dict[str, str]:
    """Return the tied names under a config and the configs inside it."""
    tied = dict(row.get("tied", {})) if _ties(config, row.get("ties", False)) else {}
    for path, (default, pairs) in row.get("tied_inside", {}).items():
        said = value_at(config, f"{path}.tie_word_embeddings")
        if said if isinstance(said, bool) else default:
            tied |= pairs
    return tied


def _ties(config: Mapping[str, object], default: bool) -> bool:
    """Return whether a model's head is its embedding."""
    inner = config.get("text_config")
    for one in (config, inner):
        if isinstance(one, Mapping) and isinstance(value := one.get("tie_word_embeddings"), bool):
            return value
    return default


def _holds(config: Mapping[str, object], path: Any, wanted: Any) -> bool:
    """Return whether a config meets a condition, or all of a list."""
    if isinstance(path, list):
        return all(map(_holds, repeat(config), path, wanted))
    value: Any = value_at(config, path)
    if isinstance(wanted, bool) or value is MISSING:
        return value is not MISSING and bool(value) is wanted
    relation, _, right = str(wanted).partition(" ")
    if relation in RELATIONS:
        bound: Any = float(right) if _NUMERIC.fullmatch(right) else value_at(config, right)
        both = isinstance(value, int | float) and isinstance(bound, int | float)
        return both and bool(RELATIONS[relation](value, bound))
    return value == wanted or (isinstance(value, list) and wanted in value)


def combine(usual: Kinds, changed: Iterable[Kinds]) -> Kinds:
    """Return the kinds of children under several settings.

    A setting adds and removes the same parts, whatever other settings do. One that leaves kinds
    out counts layers of a kind, of which models have other numbers.
    """
    changed = [kinds for kinds in changed if not set(kinds) <= set(usual)]
    if len(changed) < 2:
        return changed[0] if changed else usual
    found = dict[frozenset[str], None]()
    for kind in (*usual, *(kind for kinds in changed for kind in kinds)):
        start, parts = _nearest(kind, usual), kind
        for kinds in changed:
            if kind not in kinds:
                end = _nearest(start, kinds)
                parts = parts - (start - end) | (end - start)
        found[parts] = None
    return tuple(found)


def _nearest(kind: frozenset[str], kinds: Kinds) -> frozenset[str]:
    return min(kinds, key=lambda other: len(kind ^ other), default=frozenset())
