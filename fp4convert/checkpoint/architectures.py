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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate, combinations
from typing import Any, NamedTuple

from fp4convert.checkpoint.name_mapping import Renamed, Renaming, rename, settle

TRANSFORMERS, DIFFUSERS = "transformers", "diffusers"

LINEAR = frozenset({"L", "X", "Y"})  # letters of linear layers, and of stacks of experts
EMBEDDING = "E"
TYPES = {  # letters of the table
    **{"L": "a linear layer", "b": "a bias", EMBEDDING: "an embedding", "C": "a convolution"},
    **{"N": "a norm", "H": "an output head", "R": "a router", "T": "a transposed linear layer"},
    **{"X": "a stack of experts", "Y": "a stack of experts", "V": "a vector"},
    **{"O": "a parameter of another type", "u": "a buffer", "-": "a list of layers"},
}
# A number that stands alone, or behind "_" at the end of a word: a child of a list, or of a dict.
_NUMBER = re.compile(r"(?<![^._])(?:0|[1-9][0-9]*)(?![^.])")
MOST_NUMBERS = 6  # in a name that is looked up
MOST_DIGITS = 9
MOST_DEPTH = 8  # of configs inside configs
MOST_LETTERS = 100  # of a class's name in a message
MISSING = object()
POOLER = "pooler."  # of a model that another may build without
MARK = 1000  # times n stands for the n-th number of a name while it is renamed
OTHER_SIZE = "another size"  # a condition of the table: sizes that differ, or are the same
OWN_CODE = "auto_map"  # in config.json: classes of Python code beside the weights
OF_MLX = "quantization"  # in config.json: names are those of mlx-lm's classes
RECORDS = frozenset({"quantization_config", OF_MLX})  # in config.json: of no model
FEWEST_NUMBERS = 4  # of sizes in a config.json that is whole
_HEAD = re.compile(r".*(?<![^._])(?:0|[1-9][0-9]*)\.")  # a name up to its last number before a dot
# Prefix, part, and the number of each child: the place of a number in the name, -1 for none, and
# what is added to it.
_Match = tuple[str, str, tuple[tuple[int, int], ...]]
_Known = tuple[_Match, "Origin"]
Kinds = tuple[frozenset[str], ...]  # of the children of a list: the parts that each may have


class Origin(NamedTuple):
    """How a tensor becomes a parameter.

    source   the word for it among those that become the parameter together; "" of one alone
    sources  the words of all of them: gate_proj, up_proj
    is_part  others may become the same parameter
    is_bare  its name lacks the prefix of the base model, or has one that the class does not have
    """

    source: str = ""
    sources: tuple[str, ...] = ()
    is_part: bool = False
    is_bare: bool = False


class Place(NamedTuple):
    """A parameter of a class, and which of the class's layers holds it.

    prefix  of the innermost list, with "#" for numbers: "model.layers.#."; "" outside of lists
    part    the name behind it
    child   the numbers that "#" stands for
    """

    prefix: str
    part: str
    child: tuple[int, ...] = ()
    origin: Origin = Origin()

    @property
    def name(self) -> str:
        """Return the parameter's name in the class."""
        numbers = iter(self.child)
        return re.sub("#", lambda _: str(next(numbers, "#")), self.prefix + self.part)


@dataclass(frozen=True)
class Architecture:
    """The parameters of a class under a model's config.json.

    parts     by prefix: the part -> its letter in TYPES and its number of dimensions, "L2", over
              all settings; "L" where that number differs
    kinds     by prefix: the sets of parts that children have under the settings of config.json
    base      the module that holds the model without its head; names may lack it
    tied      parameter -> the one that it may share
    absent    expressions for names that checkpoints may lack
    extra     expressions for names that checkpoints may have beside those of the class
    optional  prefixes and parts that some models have under these settings
    """

    name: str
    parts: Mapping[str, Mapping[str, str]]
    kinds: Mapping[str, Kinds]
    renamings: tuple[Renaming, ...] = ()
    base: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[re.Pattern[str], ...] = ()
    extra: tuple[re.Pattern[str], ...] = ()
    optional: frozenset[tuple[str, str]] = frozenset()
    _heads: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _known: dict[tuple[str, str], tuple[_Known, ...]] = field(default_factory=dict, init=False)

    def places(self, tensor: str) -> tuple[Place, ...]:
        """Return the parameters that a tensor of a checkpoint becomes.

        A tensor may become several parameters, several tensors may become one, and () stands for a
        tensor that the class does not have.
        """
        end = match.end() if (match := _HEAD.match(tensor)) else 0
        head, tail = tensor[:end], tensor[end:]
        if head not in self._heads:
            self._heads[head] = self._read_head(head)
        key, numbers = self._heads[head]
        if head and not key:
            return ()
        if (key, tail) not in self._known:
            self._known[key, tail] = self._find(key + tail)
        return tuple(
            [
                Place(
                    prefix,
                    part,
                    tuple([numbers[at] + more if at >= 0 else more for at, more in child]),
                    origin,
                )
                for (prefix, part, child), origin in self._known[key, tail]
            ]
        )

    def has(self, place: Place) -> bool:
        """Return whether the class has it under the settings of config.json."""
        return place.part in self._current[place.prefix] or place[:2] in self.optional

    @cached_property
    def _current(self) -> dict[str, frozenset[str]]:
        return {prefix: frozenset().union(*kinds) for prefix, kinds in self.kinds.items()}

    def _read_head(self, head: str) -> tuple[str, tuple[int, ...]]:
        """Return a name's beginning with marks for numbers, and its numbers."""
        texts = _NUMBER.findall(head)
        if len(texts) > MOST_NUMBERS or any(len(text) > MOST_DIGITS for text in texts):
            return "", ()  # of no class
        numbers = tuple(map(int, texts))
        marks = (
            str(number if number < self._literals else MARK * at)
            for at, number in enumerate(numbers, 1)
        )
        return _NUMBER.sub(lambda _: next(marks), head), numbers

    def knowing(self, place: str, other: Architecture) -> Architecture:
        """Return the class that may have the parts of another at a place, too."""
        parts = {prefix: dict(own) for prefix, own in self.parts.items()}
        for prefix, own in other.parts.items():
            if prefix:
                inner = parts.setdefault(f"{place}.{prefix}", {})
                parts[f"{place}.{prefix}"] = {**own, **inner}
            else:
                named = {f"{place}.{part}": letter for part, letter in own.items()}
                parts[""] = named | parts.get("", {})
        kinds = dict.fromkeys(parts.keys() - self.kinds.keys(), ())
        return replace(
            self,
            parts=parts,
            kinds={**self.kinds, **kinds},
            optional=self.optional | other.everything_at(place),
        )

    def everything_at(self, place: str) -> frozenset[tuple[str, str]]:
        """Return the parts under the settings, inside another class."""
        inside = [(prefix, part) for prefix, parts in self._current.items() for part in parts]
        return frozenset(
            (f"{place}.{prefix}", part) if prefix else ("", f"{place}.{part}")
            for prefix, part in (*inside, *self.optional)
        )

    def holding(self, place: str, other: Architecture | None) -> Architecture:
        """Replace the model at a place by another class.

        other  None for a class of no table: names there may be any
        """
        start = f"{place}."
        parts = {
            prefix: {part: letter for part, letter in own.items() if not part.startswith(start)}
            for prefix, own in self.parts.items()
            if not prefix.startswith(start)
        }
        kinds = {
            prefix: tuple(frozenset(parts[prefix].keys() & kind) for kind in self.kinds[prefix])
            for prefix in parts
        }
        if other is None:
            free = re.compile(rf"(?:^|\.){re.escape(start)}")
            return replace(self, parts=parts, kinds=kinds, extra=(*self.extra, free))
        for prefix, own in other.parts.items():
            if prefix:
                parts[start + prefix], kinds[start + prefix] = dict(own), other.kinds[prefix]
        inside = {start + part: letter for part, letter in other.parts.get("", {}).items()}
        always = [
            {start + part for part in kind if not part.startswith(POOLER)}
            for kind in other.kinds.get("", ())
        ] or [set()]
        parts[""] = parts.get("", {}) | inside
        kinds[""] = tuple(a | b for a in kinds.get("", (frozenset(),)) for b in always)
        return replace(
            self,
            parts=parts,
            kinds=kinds,
            renamings=(*self.renamings, *(one.within(place) for one in other.renamings)),
            absent=(*self.absent, *other.absent),
            extra=(*self.extra, *other.extra),
            optional=self.optional | other.everything_at(place),
        )

    @cached_property
    def _shapes(self) -> frozenset[str]:
        """Return all names with "#" for every number: few others fit."""
        names = (prefix + part for prefix, parts in self.parts.items() for part in parts)
        return frozenset(_NUMBER.sub("#", name) for name in names)

    @cached_property
    def _literals(self) -> int:
        """Return the number from which on numbers in names are all alike."""
        names = (prefix + part for prefix, parts in self.parts.items() for part in parts)
        texts = (*names, *(one.text for one in self.renamings))
        return 1 + max(
            (int(text) for one in texts for text in re.findall(r"\d{1,2}", one)), default=-1
        )

    def _find(self, name: str) -> tuple[_Known, ...]:
        start = f"{self.base}."
        for renamed in (rename(self.renamings, name), Renamed((name,))):
            without = tuple(each.removeprefix(start) for each in renamed.names)
            with_base = tuple(start + each for each in renamed.names)
            variants = {renamed.names: self._is_base and name.startswith(start)}
            if self._is_base or name not in renamed.names:  # renamings may add the prefix
                variants.setdefault(without, name.startswith(start))
            if self.base and not self._is_base:
                variants.setdefault(with_base, True)
            for names, is_bare in variants.items():
                matches = [self._match(each) for each in names]
                if all(matches):
                    origin = Origin(renamed.source, renamed.sources, renamed.is_part, is_bare)
                    return tuple((each, origin) for each in matches if each)
        return ()

    def is_in_base(self, place: Place) -> bool:
        """Return whether a name may have or lack the base model's prefix."""
        return bool(self.base) and (
            self._is_base or (place.prefix + place.part).startswith(f"{self.base}.")
        )

    @cached_property
    def _is_base(self) -> bool:
        return not any(name.startswith(f"{self.base}.") for name in self._shapes)

    def _match(self, name: str) -> _Match | None:
        """Find a name in the table, whose numbers are of children or literal."""
        if _NUMBER.sub("#", name) not in self._shapes:
            return None
        texts, numbers = _NUMBER.split(name), _NUMBER.findall(name)
        if len(numbers) > MOST_NUMBERS or any(len(text) > MOST_DIGITS for text in numbers):
            return None
        every, other = range(len(numbers)), None
        for count in range(len(numbers), -1, -1):
            for chosen in combinations(every, count):
                words = ["#" if at in chosen else numbers[at] for at in every]
                pattern = "".join(a + b for a, b in zip(texts, (*words, ""), strict=True))
                end = pattern.rfind("#.") + 2 if "#." in pattern else 0
                prefix, part = pattern[:end], pattern[end:]
                if part in self.parts.get(prefix, ()):
                    marks = (divmod(int(numbers[at]), MARK) for at in chosen)
                    match = prefix, part, tuple((at - 1, more) for at, more in marks)
                    if self.has(Place(prefix, part)):
                        return match
                    other = other or match  # of other settings than the model's
        return other


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
    if package == TRANSFORMERS and not (names and all(isinstance(one, str) for one in names)):
        why = f"architectures in config.json is {json.dumps(classes)[:MOST_LETTERS]}, no class"
    elif len(names) > 1:
        why = f"config.json names {len(names)} classes"
    elif name in _read_index()["classes"][package]:
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
    """Return types by the path of their configs, or the defaults of the class."""
    config = config if isinstance(config, Mapping) else {}
    types: dict[str, str] = {}
    for key, model_type, mapping in _read_row(package, name)[0].get("inner", {}).values():
        inner = _at(config, key)
        said = inner.get("model_type") if isinstance(inner, Mapping) else None
        types[key] = "".join(str(said or model_type)[:MOST_LETTERS].split())
        inside = _types_inside(package, _read_index()[mapping].get(types[key], ""), inner)
        types |= {f"{key}.{path}": word for path, word in inside.items()}
    return types


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


def _read_row(package: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the row of a class, and the table of its family; empty without one."""
    index = _read_index()
    family = index["classes"].get(package, {}).get(name)
    if family is None:
        return {}, {}
    start, length, at = index["families"][package][family]
    folder = files("fp4convert").joinpath("configs", "architectures")
    with folder.joinpath(f"{package}.zlib").open("rb") as file:
        file.seek(start)
        table = json.loads(zlib.decompress(file.read(length)).splitlines()[at])
    return table["classes"][name], table


def _read_class(package: str, name: str, config: Mapping[str, object]) -> Architecture | None:
    """Read a class of the table, if it is there, under a config's settings."""
    index, (row, table) = _read_index(), _read_row(package, name)
    if not row:
        return None
    words = [part.split(" ", 1) for part in table["parts"]]
    parts: dict[str, dict[str, str]] = {}

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
    flips = [(path, wanted, read(changed)) for path, wanted, changed in row.get("flips", ())]
    active = [changed for path, wanted, changed in flips if _holds(config, path, wanted)]
    optional = frozenset(
        (prefix, part)
        for _, wanted, changed in flips
        if wanted == OTHER_SIZE
        for prefix, kinds in changed.items()
        for part in frozenset().union(*kinds)
    )
    made = Architecture(
        name,
        parts,
        {
            prefix: _combined(
                usual.get(prefix, ()), [one[prefix] for one in active if prefix in one]
            )
            for prefix in parts
        },
        tuple(map(Renaming.parse, (table["renamings"][at] for at in row.get("renamings", ())))),
        row.get("base", ""),
        row.get("tied", {}) if _ties(config, row.get("ties", False)) else {},
        _compiled((*row.get("absent", ()), *map(re.escape, row.get("skip", ())))),
        _compiled(row.get("unexpected", ())),
        optional,
    )
    for place, (key, model_type, mapping) in row.get("inner", {}).items():
        inner = _at(config, key)
        if not isinstance(inner, Mapping) or (other := inner.get("model_type")) is None:
            continue
        chosen = _read_class(package, index[mapping].get(str(other), ""), inner)
        if other != model_type:
            made = made.holding(place, chosen)
        elif chosen:  # whose settings may add parts
            made = made.knowing(place, chosen)
    return made


def _compiled(expressions: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, expressions))


def _ties(config: Mapping[str, object], default: bool) -> bool:
    """Return whether a model's head is its embedding."""
    inner = config.get("text_config")
    for one in (config, inner):
        if isinstance(one, Mapping) and isinstance(value := one.get("tie_word_embeddings"), bool):
            return value
    return default


def _holds(config: Mapping[str, object], path: str, wanted: object) -> bool:
    """Return whether config.json has a setting: a word, or any or no value."""
    value = _at(config, path)
    if value is MISSING:
        return False
    return bool(value) is wanted if isinstance(wanted, bool) else value == wanted


def _at(config: Mapping[str, object], path: str) -> object:
    """Return a value inside a config.json; MISSING where it has none."""
    value: object = config
    for key in path.split("."):
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def _combined(usual: Kinds, changed: list[Kinds]) -> Kinds:
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
