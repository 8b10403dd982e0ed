"""Configs of transformers as trees: shortened, with other layer kinds, with one setting flipped."""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from conditions import Conditions
from flips import Settings, changed

COUNT = re.compile(
    r"((num|n|encoder|decoder|num_(encoder|decoder|hidden)|n_(encoder|decoder)|num_(text|vision)"
    r"(_encoder|_decoder)?|speech_encoder|speech_decoder|t2u_(encoder|decoder))_)?(hidden_)?"
    r"(layers?|depth|blocks)"
)
KINDS = re.compile(r"layer_types|layers_block_type|block_types|layer_kinds|layer_pattern")
LISTS = re.compile(r"layer|block|moe|sparse|attn|indices|idx")
NEVER = re.compile(
    r"^_(?!remove)|(?<!mask)(?<!cls)_token(_id|_index)?s?$|_token_ids?$|dropout|drop_|initializer|^return_|^output_|^use_cache$"
    r"|^tie_|^dtype$|^torch|^transformers_version$|^architectures$|^problem_type$|label|^name_or_path$"
    r"|gradient|^rope_|_eps$|epsilon|loss|^attn_implementation|^base_model|^model_type$|_coef$"
    r"|^pruned_heads$|^is_encoder_decoder$|vocab_size|^hidden_size$|^max_|_std$|^per_layer_config$"
)
SIZE = re.compile(r"heads$|_size$|_dim$|^n_embd$|^d_model$|kernel|stride")
PART = re.compile(r"shared|expert|moe|rank|latent|per_layer")  # sizes of what a model may lack
FILLED = (  # what a None size is filled with: by its name, of another setting or a small number
    (r"experts_per_tok|top_?k|num_shared|n_shared", 2),
    (r"rank|_dim$|dim_|head_size", 64),
    (r"expert.*size|intermediate|ffn|inner", "intermediate_size"),
    (r"heads|groups", "num_attention_heads"),
    (r"num|^n_|count", 4),
    (r"hidden|embed|d_model|width", "hidden_size"),
    (r"", 8),
)


def tree(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the config and those inside it by their paths."""
    yield path, config
    for key, value in sorted(vars(config).items()):
        if hasattr(value, "model_type") and not key.startswith("_"):
            yield from tree(value, f"{path}.{key}" if path else key)


def settings_of(config: Any) -> dict[str, Any]:
    """Return what a config says itself, without those inside it."""
    return {
        key: value
        for key, value in sorted(vars(config).items())
        if not NEVER.search(key) and not hasattr(value, "model_type")
    }


def said(config: Any) -> dict[str, Any]:
    """Return a config inside another as that one's author would write it: what differs."""
    try:
        default = type(config)().to_dict()
    except Exception:
        default = {}
    own = config.to_dict()
    return {
        key: value
        for key, value in own.items()
        if key == "model_type" or (key not in default or default[key] != value)
    }


def set_at(base: Settings, root: Any, path: str, value: Any) -> Settings:
    """Return settings with one more; a config on its path that they do not name is written out."""
    made, node, names = base, root, path.split(".")
    for depth, name in enumerate(names[:-1]):
        node = getattr(node, name)
        inner = ".".join(names[: depth + 1])
        if _at(made, inner) is None:
            made = changed(made, inner, said(node))
    return changed(made, path, value)


def _at(settings: Settings, path: str) -> Any:
    found: Any = settings
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def make(config_class: type, settings: Settings) -> Any:
    """Return the config of settings."""
    return config_class(**copy.deepcopy(dict(settings)))


def layer_counts(config: Any) -> dict[str, int]:
    """Return the settings that count layers."""
    return {
        key: value
        for key, value in vars(config).items()
        if COUNT.fullmatch(key) and type(value) is int and 0 < value < 1000
    }


def shortened(config_class: type, base: Settings, count: int) -> Settings:
    """Return settings of a config with that many layers, one of each kind of the default."""
    root = make(config_class, base)
    short: Settings = base
    for path, node in tree(root):
        for key, value in layer_counts(node).items():
            if value > count:
                short = set_at(short, root, _joined(path, key), count)
    try:
        stale = set(_layer_lists(make(config_class, short), _lengths(root)))
    except Exception:  # lists of the old length
        stale = set(_layer_lists(root, _lengths(root)))
    for path, node in tree(root):
        lists = {key: each for key, each in _lists_of(node, _lengths(root)) if (path, key) in stale}
        for length in {len(each) for each in lists.values()}:
            alike = {key: each for key, each in lists.items() if len(each) == length}
            places = _telling(list(zip(*alike.values(), strict=True)), count)
            for key, each in alike.items():
                chosen = [each[place] for place in places]
                short = set_at(short, root, _joined(path, key), chosen)
    return short


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _lengths(root: Any) -> set[int]:
    return {count for _, node in tree(root) for count in layer_counts(node).values() if count > 1}


def _lists_of(node: Any, lengths: set[int]) -> Iterator[tuple[str, list[Any]]]:
    for key, value in sorted(vars(node).items()):
        if isinstance(value, list | tuple) and len(value) in lengths and LISTS.search(key):
            yield key.removeprefix("_"), list(value)


def _layer_lists(root: Any, lengths: set[int]) -> Iterator[tuple[str, str]]:
    for path, node in tree(root):
        for key, _ in _lists_of(node, lengths):
            yield path, key


def _telling(rows: list[Any], count: int) -> list[int]:
    """Return places of the first row of each kind, then others, in order."""
    seen: dict[str, int] = {}
    for place, row in enumerate(rows):
        seen.setdefault(repr(row), place)
    chosen = list(seen.values())[:count]
    others = [place for place in range(len(rows)) if place not in chosen]
    return sorted(chosen + others[: count - len(chosen)])


def variants(
    config_class: type, base: Settings, conditions: Conditions, words: Iterable[str]
) -> Iterator[Settings]:
    """Yield settings in which all layers are of one kind, for each kind there may be."""
    root = make(config_class, base)
    for path, node in tree(root):
        for key, value in uniform(node, conditions, words):
            yield set_at(base, root, _joined(path, key), value)


def uniform(node: Any, conditions: Conditions, words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield settings of one config, and values with which all layers are of one kind."""
    count = max(layer_counts(node).values(), default=0)
    for key, value in settings_of(node).items() if count else ():
        is_list = value is None or isinstance(value, list | tuple)
        others: Iterable[Any] = ()
        if KINDS.search(key) and is_list:
            length = len(value) if value else count
            others = [[word] * length for word in sorted({*words, *map(str, value or ())})]
        elif key in conditions.per_layer and type(value) is int:
            others = (0, 1, 2, count)
        elif key in conditions.per_layer and is_list:
            others = ([], list(range(count)))
        yield from ((key, other) for other in others if other != value)


OPPOSITE = {"==": "!=", "!=": "==", ">": "<=", "<=": ">", "<": ">=", ">=": "<"}
MEETS: Mapping[str, Callable[[Any, Any], bool]] = {
    **{"==": operator.eq, "!=": operator.ne, ">": operator.gt},
    **{"<=": operator.le, "<": operator.lt, ">=": operator.ge},
}
MIRROR = {"==": "==", "!=": "!=", ">": "<", "<=": ">=", "<": ">", ">=": "<="}
MOST_COMPARED = 40


def compared(root: Any, conditions: Conditions) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield path, condition and values of numbers that conditions compare with others."""
    numbers = dict(_numbers(root, conditions))
    ends: dict[str, list[str]] = defaultdict(list)
    for path in numbers:
        ends[path.rpartition(".")[2]].append(path)
    done = set()
    for one in sorted(conditions.comparisons, key=str):
        is_number = isinstance(one.right, int | float)
        for left in ends.get(one.left, ()):
            for right in [one.right] if is_number else ends.get(str(one.right), ()):
                if left == right or (left, right) in done or (right, left) in done:
                    continue
                done.add((left, right))
                value, bound = numbers[left], numbers.get(str(right), right)
                if bound is None:
                    continue
                others = (one.operator, OPPOSITE[one.operator])
                meets = value is not None and MEETS[one.operator](value, bound)
                for wanted in others if value is None else (others[meets],):
                    yield left, f"{wanted} {right}", _near(value, bound, wanted)


def mirrored(root: Any, conditions: Conditions, path: str, condition: str) -> tuple[str, list[Any]]:
    """Return the setting that another is compared with, and values that meet the condition."""
    wanted, _, right = condition.partition(" ")
    numbers = dict(_numbers(root, conditions))
    value, bound = numbers.get(right), numbers.get(path)
    return (
        (right, [])
        if value is None or bound is None
        else (right, _near(value, bound, MIRROR[wanted]))
    )


def _numbers(root: Any, conditions: Conditions) -> Iterator[tuple[str, float | None]]:
    for path, node in tree(root):
        types = {each.name: str(each.type) for each in fields(node)} if is_dataclass(node) else {}
        counts, defaults = layer_counts(node), conditions.other_defaults
        lacking = {
            key: getattr(node, other, None)
            for key, other in defaults.items()
            if not hasattr(node, key)
        }
        for key, value in {**lacking, **dict(sorted(vars(node).items()))}.items():
            may_be = value is None and re.search("int|float", types.get(key, ""))
            if key not in counts and (type(value) in (int, float) or may_be):
                yield _joined(path, key), value


def _near(value: float | None, bound: float, wanted: str) -> list[Any]:
    """Return values that meet a condition, of the type of a value."""
    start = bound if value is None else value
    others = (bound, start * 2, start // 2, bound + 1, bound - 1, bound * 2, bound // 2)
    typed = dict.fromkeys(type(start)(other) for other in others if other >= 0)
    return [other for other in typed if MEETS[wanted](other, bound)][:4]


def flips(root: Any, conditions: Conditions) -> Iterator[tuple[str, bool | str, list[Any]]]:
    """Yield path, condition and values of settings that conditions ask for."""
    for path, node in tree(root):
        types = {each.name: str(each.type) for each in fields(node)} if is_dataclass(node) else {}
        for key, condition, wanted in flips_of(node, types, conditions):
            yield _joined(path, key), condition, wanted
        yield from _inner_configs(path, node, conditions)
    yield from islice(compared(root, conditions), MOST_COMPARED)


def flips_of(
    node: Any, types: Mapping[str, str], conditions: Conditions, also: str = "^$"
) -> Iterator[tuple[str, bool | str, list[Any]]]:
    """Yield the same of one config, with the types that it says its settings have."""
    counts, own = layer_counts(node), settings_of(node)
    asked = {key: value for key, value in sorted(vars(node).items()) if re.search(also, key)}
    lacking = {
        key: value
        for key, value in conditions.defaults.items()
        if key not in own and not hasattr(node, key) and not NEVER.search(key)
    }
    for key, value in {**own, **asked, **lacking}.items():
        is_of_layers = KINDS.search(key) or key in conditions.per_layer - conditions.tested
        if key not in counts and not is_of_layers:
            for condition, wanted in values(node, key, value, types.get(key, ""), conditions):
                yield key, condition, wanted


def _inner_configs(
    path: str, node: Any, conditions: Conditions
) -> Iterator[tuple[str, bool | str, list[Any]]]:
    """Configs that may be absent: of a tower for sound, say."""
    for key, spec in sorted(getattr(type(node), "sub_configs_defaults", {}).items()):
        if key in conditions.mentioned and getattr(node, key, None) is None:
            yield _joined(path, key), True, [{}]
        elif key in conditions.mentioned and spec.optional:
            yield _joined(path, key), False, [None]


def values(
    node: Any, key: str, value: Any, annotation: str, conditions: Conditions
) -> Iterator[tuple[bool | str, list[Any]]]:
    """Yield conditions that a setting of that value does not meet, and values that meet them."""
    is_tested, is_mentioned = key in conditions.tested, key in conditions.mentioned
    may_be_none = "None" in annotation
    match value:
        case bool() if is_mentioned:
            yield not value, [not value]
        case str():
            for word in sorted(conditions.words.get(key, set()) - {value}):
                yield word, [word]
            if is_tested and may_be_none:
                yield False, [None]
        case None if is_mentioned:
            yield from _something(node, key, annotation, conditions)
        case int() | float() if is_tested and not isinstance(value, bool):
            if not value:
                yield True, [type(value)(1), filled(node, key)]
            elif may_be_none or not SIZE.search(key) or PART.search(key):
                yield False, [None if may_be_none else 0]
        case list() | tuple() | dict() if is_tested and value:
            yield False, [None, type(value)()]
            words = conditions.words.get(key, set()) if isinstance(value, list) else set()
            yield from ((word, [[*value, word]]) for word in sorted(words - set(map(str, value))))


def _something(
    node: Any, key: str, annotation: str, conditions: Conditions
) -> Iterator[tuple[bool | str, list[Any]]]:
    if "bool" in annotation:
        yield True, [True]
    elif "str" in annotation:
        for word in sorted(conditions.words.get(key, set())):
            yield word, [word, [word]]
    elif "float" in annotation and "int" not in annotation:
        yield True, [1.0]
    elif "int" in annotation or not annotation:
        yield True, [filled(node, key)]


def filled(node: Any, key: str) -> int:
    """Return a size for a setting that has none."""
    for pattern, size in FILLED:
        if re.search(pattern, key):
            made = vars(node).get(size) if isinstance(size, str) else size
            if isinstance(made, int):
                return made
    return 8


def with_sizes_filled(
    config_class: type, settings: Settings, path: str, before: Any = None
) -> Settings:
    """Return settings in which every None of one config that may be a number is one.

    before  a config whose numbers others have set to None on purpose
    """
    numbers = vars(dict(tree(before))[path]) if before is not None else {}
    root = make(config_class, settings)
    node = dict(tree(root))[path]
    for field in fields(node) if is_dataclass(node) else ():
        if NEVER.search(field.name) or vars(node).get(field.name, 0) is not None:
            continue
        if numbers.get(field.name) is not None:
            continue
        if "int" in str(field.type) and "list" not in str(field.type):
            size = filled(node, field.name)
            settings = set_at(settings, root, _joined(path, field.name), size)
    return settings
