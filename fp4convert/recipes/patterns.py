"""Match names with globs, re: expressions and layer numbers.

`{a:b}` in a pattern of a recipe file stands for the numbers a..b-1: `expand` reads a and b in config.json.
Many patterns are asked about many names as one question (`sift`, `matches_any`), mostly by strings.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache

from fp4convert.errors import InputError

SHAPES = 1 << 12  # of names that are remembered
MOST_LAYERS = 4096  # in one range; a config.json that says more is not one of a model
TEXT_CONFIGS = (
    "text_config",
    "language_config",
    "llm_config",
)  # where models of several kinds of input keep the layers' numbers


def matches(pattern: str, module: str) -> bool:
    """True where a glob fits the whole name, or a "re:" expression its beginning."""
    return compiled(pattern).match(module) is not None


def matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """True where one of the patterns matches."""
    return bool(patterns) and _sieve(patterns).holds(module)


def sift(patterns: tuple[str, ...], modules: Collection[str]) -> list[str]:
    """The modules that one of the patterns matches, in their order."""
    return _sieve(patterns).sift(modules) if patterns else []


class _Sieve:
    """Many patterns as one question: most are text with stars around it, which strings find far sooner than expressions do.

    A pattern without digits fits all names that differ in digits alone, or none of them: so the modules of many layers are few
    shapes, which are asked once.  A shape has a zero for every digit.  Of patterns with digits it says where they may fit.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        others = [pattern for pattern in patterns if not _texts_of(pattern)]
        blind = [
            pattern
            for pattern in others
            if not _DIGIT.search(pattern) and not pattern.startswith("re:")
        ]
        numbered = [pattern for pattern in others if pattern not in blind]
        texts = {text for pattern in patterns for text in _texts_of(pattern)}
        counting = {text for text in texts if _DIGIT.search(text)}
        possible = {_shape_of(text) for text in (*counting, *map(_beginning_of, numbered))}
        self._fits = lru_cache(SHAPES)(_Texts(texts - counting, blind).fit)
        self._may_fit = lru_cache(SHAPES)(_Texts(possible, ()).fit)
        self._fits_numbers = _Texts(counting, numbered).fit

    def holds(self, module: str) -> bool:
        return self._holds(module, _shape_of(module))

    def sift(self, modules: Collection[str]) -> list[str]:
        shapes = _shape_of("\n".join(modules)).split(
            "\n"
        )  # at once, which takes less than one by one
        if len(shapes) != len(modules):
            return [module for module in modules if self.holds(module)]
        return [
            module
            for module, shape in zip(modules, shapes, strict=True)
            if self._holds(module, shape)
        ]

    def _holds(self, module: str, shape: str) -> bool:
        if "\n" in shape:  # which no dot of an expression fits
            return any(matches(pattern, module) for pattern in self._patterns)
        return self._fits(shape) or (self._may_fit(shape) and self._fits_numbers(module))


class _Texts:
    """Texts with stars at their ends, sorted by where these stand, and other patterns."""

    def __init__(self, texts: Collection[str], patterns: Iterable[str]) -> None:
        self._expressions = [compiled(pattern) for pattern in patterns]
        self._names = frozenset(text for text in texts if "*" not in text)
        starred = [text for text in texts if "*" in text]
        self._inside = [text.strip("*") for text in starred if text[0] == text[-1] == "*"]
        self._beginnings = tuple(text.rstrip("*") for text in starred if text[0] != "*")
        self._ends = tuple(text.lstrip("*") for text in starred if text[-1] != "*")

    def fit(self, name: str) -> bool:
        return (
            name in self._names
            or name.startswith(self._beginnings)
            or name.endswith(self._ends)
            or any(map(name.__contains__, self._inside))
            or any(expression.match(name) for expression in self._expressions)
        )


_sieve = cache(_Sieve)
_DIGIT = re.compile("[0-9]")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_PLAIN = re.compile(
    r"""
    re:
    (?P<above>\(\?:\.\*\\\.\)\?)?               # (?:.*\.)?: of any module, or of none
    (?P<head>\.\*)?                             # .*
    (?P<text>(?:[\w/-]|\\[!-)+-/:-@\[-`{-~])+)  # what stands for itself, and escaped signs but for the star
    (?P<tail>\.\*)?                             # .*
    (?P<end>\$)?                                # without it, names may go on
    """,
    re.VERBOSE,
)


def _shape_of(name: str) -> str:
    """The name with a zero for every digit: bytes are translated in a tenth of the time that text takes."""
    return name.encode("utf-8", "surrogatepass").translate(_ZEROS).decode("utf-8", "surrogatepass")


def _beginning_of(pattern: str) -> str:
    """How all names begin that a pattern fits, as a text with a star."""
    return "*" if pattern.startswith("re:") else f"{re.split('[*?[]', pattern)[0]}*"


def _texts_of(pattern: str) -> tuple[str, ...]:
    """Texts with stars around them, one of which fits a name of one line where the pattern does; none for other patterns."""
    if not pattern.startswith("re:"):
        return () if set(pattern.strip("*")) & set("*?[") else (pattern,)
    if not (found := _PLAIN.fullmatch(pattern)):
        return ()
    text = re.sub(r"\\(.)", r"\1", found["text"])
    core = (
        f"{'*' if found['head'] else ''}{text}{'' if found['end'] and not found['tail'] else '*'}"
    )
    return (core, f"*.{core}") if found["above"] and not found["head"] else (core,)


_ENDLESS = re.compile(
    r"\([^()]*[*+][^()]*\)[*+]"
)  # a repeat of what repeats: its time can double with every letter


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The expression behind a pattern; raises InputError where it is none."""
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # what may once mean something else
            if _ENDLESS.search(pattern):
                detail = f"{pattern!r} repeats what is repeated inside, which can take for ever; expected a simpler expression"
                raise InputError("bad-pattern", detail)
            return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise InputError("bad-pattern", f"{pattern!r} is no regular expression: {error}") from None


_RANGE = re.compile(r"\{([^{}:]*):([^{}:]*)\}")
_TERM = re.compile(r"([+-]?)(?:(\d+)|([A-Za-z_]\w*))")


def expand(pattern: str, config: Mapping[str, object]) -> tuple[str, ...]:
    """One pattern for each layer number that its `{a:b}` stands for; none where config.json lacks a key of a or b.

    config  of the model: keys are sought at the top, then in the config of its text model, then in any other nested one
    Raises  InputError where a or b is no sum of integers and keys, or where the range is beyond belief
    """
    found = _RANGE.search(pattern)
    if not found:
        return (pattern,)
    first, end = (_bound(text, pattern, config) for text in found.groups())
    if first is None or end is None:
        return ()
    if not 0 <= first <= MOST_LAYERS or end > MOST_LAYERS:
        detail = f"{pattern!r}: by config.json its layers are {first} to {end - 1}; expected numbers from 0 to {MOST_LAYERS - 1}"
        raise InputError("layer-range", detail)
    head, tail = pattern[: found.start()], pattern[found.end() :]
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
    """What a or b of a range comes to; None where a key is lacking."""
    terms = _TERM.findall(text)
    if (
        "".join("".join(term) for term in terms) != text
        or not terms
        or any(not term[0] for term in terms[1:])
    ):
        detail = f"{pattern!r}: {text!r} is no layer number; expected an integer, a key of config.json, or a sum such as key+1"
        raise InputError("bad-pattern", detail)
    total = 0
    for sign, digits, key in terms:
        value = int(digits) if digits else integer_of(config, key)
        if value is None:
            return None
        total += -value if sign == "-" else value
    return total


def integer_of(config: Mapping[str, object], key: str) -> int | None:
    """The integer under that key of config.json: at the top, then in the config of its text model, then in any other.

    None where there is none, and for no key
    """
    found = (one[key] for one in configs_in(config) if key and key in one)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool)), None
    )


def configs_in(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A config.json and every config nested in it, that of a text model before its siblings."""
    waiting = [config]
    while waiting:
        yield (one := waiting.pop())
        names = sorted(one, key=lambda name: name not in TEXT_CONFIGS)
        waiting += reversed([nested for name in names if isinstance(nested := one[name], Mapping)])
