"""Match names with globs, re: expressions and layer numbers.

`{a:b}` in a pattern of a recipe file stands for the numbers a..b-1: `expand` reads a and b in
config.json.  `sift` and `matches_any` match many patterns at once, mostly by strings.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache

from fp4convert.errors import InputError, shell_line
from fp4convert.recipes.expressions import Expression

LONG_NAME, LONG_END = 1000, 200  # characters
SHAPES = 1 << 12  # of names that are remembered
MOST_LAYERS = 4096  # in one range; no model has more
# Nested configs of multimodal models with the number of layers.
TEXT_CONFIGS = ("text_config", "language_config", "llm_config")
_DIGIT = re.compile("[0-9]")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_PLAIN = re.compile(
    r"""
    re:
    (?P<above>\(\?:\.\*\\\.\)\?)?               # (?:.*\.)?: of any module, or of none
    (?P<head>\.\*)?                             # .*
    (?P<text>(?:[\w/-]|\\[!-)+-/:-@\[-`{-~])+)  # literal text; escaped signs but "*"
    (?P<tail>\.\*)?                             # .*
    (?P<end>\$)?                                # without it, names may go on
    """,
    re.VERBOSE,
)
_RANGE = re.compile(r"\{([^{}:]*):([^{}:]*)\}")
_TERM = re.compile(r"([+-]?)(?:(\d+)|([A-Za-z_]\w*))")


def matches(pattern: str, module: str) -> bool:
    """Return whether a glob fits a name, or a "re:" expression its beginning."""
    return bool(compiled(pattern).match(module))


def exclude_option(*modules: str) -> str:
    """Write --exclude options for modules, as words of a shell.

    A name longer than any model has becomes a glob of its ends: Linux takes no word of 128 KiB.
    """
    globs = [_glob_of(module) for module in modules]
    return " ".join(shell_line("--exclude", pattern) for pattern in globs)


def _glob_of(module: str) -> str:
    """Return a glob that fits a name; of a very long one it holds the ends."""
    pattern = glob.escape(module)
    if len(module) > LONG_NAME:
        pattern = f"{glob.escape(module[:LONG_END])}*{glob.escape(module[-LONG_END:])}"
    return f"[r]{pattern[1:]}" if pattern.startswith("re:") else pattern


def matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """Return whether one of the patterns matches."""
    return bool(patterns) and _asker_of_all(patterns)(module, _shape_of(module))


def sift(patterns: tuple[str, ...], modules: Collection[str]) -> list[str]:
    """Pick the modules that one of the patterns matches, in their order."""
    if not patterns:
        return []
    ask = _asker_of_all(patterns)
    shapes = _shape_of("\n".join(modules)).split("\n")  # faster than one by one
    if len(shapes) != len(modules):
        return [module for module in modules if ask(module, _shape_of(module))]
    return [module for module, shape in zip(modules, shapes, strict=True) if ask(module, shape)]


def pick_fitting(patterns: Collection[str], modules: Collection[str]) -> set[str]:
    """Pick the patterns that fit a module or more."""
    modules = sift(tuple(patterns), modules)  # of many modules, most fit none
    shapes = [*dict.fromkeys(map(_shape_of, modules))]
    return {
        pattern
        for pattern in dict.fromkeys(patterns)
        if any(matches(pattern, one) for one in (modules if _is_numbered(pattern) else shapes))
    }


@cache
def _asker_of_all(patterns: tuple[str, ...]) -> Callable[[str, str], bool]:
    """Return a function of a name and its shape: whether a pattern fits.

    Most patterns are text with stars around it, which strings find faster than expressions.  A
    shape has a zero for every digit: a pattern without digits fits all names of a shape or none,
    so the modules of many layers are few shapes.
    """
    texts: set[str] = set()  # with stars at their ends
    numbered_texts: set[str] = set()
    others: list[str] = []
    numbered_others: list[str] = []
    shapes: set[str] = set()  # of names that a pattern with digits may fit
    for pattern in patterns:
        if plain := _texts_of(pattern):
            numbered = [text for text in plain if _DIGIT.search(text)]
            texts.update(text for text in plain if text not in numbered)
            numbered_texts.update(numbered)
            shapes.update(map(_shape_of, numbered))
        elif pattern.startswith("re:"):
            numbered_others.append(pattern)
            shapes.add("*")
        elif _DIGIT.search(pattern):
            numbered_others.append(pattern)
            shapes.add(_shape_of(f"{re.split('[*?[]', pattern)[0]}*"))
        else:
            others.append(pattern)
    fits = lru_cache(SHAPES)(_asker(texts, others))
    may_fit = lru_cache(SHAPES)(_asker(shapes, ()))
    fits_numbers = _asker(numbered_texts, numbered_others)

    def ask(module: str, shape: str) -> bool:
        if "\n" in shape:  # no dot of an expression fits it
            return any(matches(pattern, module) for pattern in patterns)
        return fits(shape) or (may_fit(shape) and fits_numbers(module))

    return ask


def _is_numbered(pattern: str) -> bool:
    """Return whether a pattern may fit some names of a shape, and not others."""
    texts = _texts_of(pattern)
    is_foreign = pattern.startswith("re:") and not texts
    return is_foreign or bool(_DIGIT.search("".join(texts) or pattern))


def _asker(texts: Collection[str], patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that matches a name with texts and patterns.

    texts  may have stars at their ends
    """
    expressions = [compiled(pattern) for pattern in patterns]
    names = frozenset(text for text in texts if "*" not in text)
    starred = [text for text in texts if "*" in text]
    inside = [text.strip("*") for text in starred if text[0] == text[-1] == "*"]
    beginnings = tuple(text.rstrip("*") for text in starred if text[0] != "*")
    ends = tuple(text.lstrip("*") for text in starred if text[-1] != "*")

    def fits(name: str) -> bool:
        return (
            name in names
            or name.startswith(beginnings)
            or name.endswith(ends)
            or any(map(name.__contains__, inside))
            or any(expression.match(name) for expression in expressions)
        )

    return fits


def _shape_of(name: str) -> str:
    """Return a name with 0 for every digit; bytes are ten times as fast."""
    return name.encode("utf-8", "surrogatepass").translate(_ZEROS).decode("utf-8", "surrogatepass")


def _texts_of(pattern: str) -> tuple[str, ...]:
    """Return texts with stars that fit the same names of one line; or ().

    () is for patterns that have no such texts.
    """
    if not pattern.startswith("re:"):
        return () if set(pattern.strip("*")) & set("*?[") else (pattern,)
    if not (plain := _PLAIN.fullmatch(pattern)):
        return ()
    text = re.sub(r"\\(.)", r"\1", plain["text"])
    head = "*" if plain["head"] else ""
    tail = "" if plain["end"] and not plain["tail"] else "*"
    core = f"{head}{text}{tail}"
    return (core, f"*.{core}") if plain["above"] and not plain["head"] else (core,)


@cache
def compiled(pattern: str) -> re.Pattern[str] | Expression:
    """Compile a pattern; raise InputError for a wrong one."""
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    text = pattern.removeprefix("re:")
    return re.compile(text) if _PLAIN.fullmatch(pattern) else Expression(text)


def expand_all(patterns: Iterable[str], config: Mapping[str, object]) -> tuple[str, ...]:
    """Expand every pattern that has a range; check every expression.

    Raises  InputError as expand and compiled do
    """
    names: list[str] = []
    for pattern in patterns:
        names += expand(pattern, config) if "{" in pattern else [pattern]
    for name in names:
        if name.startswith("re:"):
            compiled(name)
    return tuple(names)


def expand(pattern: str, config: Mapping[str, object]) -> tuple[str, ...]:
    """Return a pattern for each layer number that its `{a:b}` stands for.

    config   of the model; integer_of finds the keys of a and b
    Returns  none where config.json lacks a key of a or b
    Raises   InputError where a or b is no sum of integers and keys, or where the range is absurd
    """
    span = _RANGE.search(pattern)
    if not span:
        return (pattern,)
    first, end = (_bound(text, pattern, config) for text in span.groups())
    if first is None or end is None:
        return ()
    if not 0 <= first <= MOST_LAYERS or end > MOST_LAYERS:
        detail = (
            f"{pattern!r}: by config.json its layers are {first} to {end - 1}; "
            f"expected numbers from 0 to {MOST_LAYERS - 1}"
        )
        raise InputError("layer-range", detail)
    head, tail = pattern[: span.start()], pattern[span.end() :]
    names: list[str] = []
    for number in range(first, end):
        names += expand(f"{head}{number}{tail}", config)
        if len(names) > MOST_LAYERS:
            raise InputError(
                "layer-range",
                f"{pattern!r} stands for more than {MOST_LAYERS} names; expected fewer",
                "Use a glob.",
            )
    return tuple(names)


def _bound(text: str, pattern: str, config: Mapping[str, object]) -> int | None:
    """Return the sum of a or b of a range; None where a key is missing."""
    terms = _TERM.findall(text)
    is_whole = "".join("".join(term) for term in terms) == text
    if not terms or not is_whole or any(not sign for sign, _, _ in terms[1:]):
        detail = (
            f"{pattern!r}: {text!r} is not a layer number; "
            "expected an integer, a key of config.json, or a sum such as key+1"
        )
        raise InputError("bad-pattern", detail)
    total = 0
    for sign, digits, key in terms:
        value = int(digits) if digits else integer_of(config, key)
        if value is None:
            return None
        total += -value if sign == "-" else value
    return total


def integer_of(config: Mapping[str, object], key: str) -> int | None:
    """Return the integer under a key of config.json, or None.

    The top level comes first, then the config of the text model, then any other.
    """
    if not key:
        return None
    values = (nested[key] for nested in configs_in(config) if key in nested)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool)), None
    )


def configs_in(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a config.json and every config in it, a text model's first."""
    waiting = [config]
    while waiting:
        yield (current := waiting.pop())
        nested = {name: value for name, value in current.items() if isinstance(value, Mapping)}
        names = sorted(nested, key=lambda name: name not in TEXT_CONFIGS)
        waiting += [nested[name] for name in reversed(names)]
