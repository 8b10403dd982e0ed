"""Match regular expressions of anybody in bounded time.

Python's own matcher tries every way that an expression can fit: "(a|a)+$" doubles its time with
every letter.  Expressions that cannot do so are left to it, for some seconds in all; others are
matched here by the set of places that each part can reach, which grows no larger than the name is
long, in steps that are counted.  What takes too many is refused.  Whether an expression fits is the
same either way (tests/recipes/test_expressions.py).
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from fp4convert.errors import InputError

LONGEST = 16384  # characters of an expression
MOST_WAYS = 27.0  # log2 of the ways in which one fits a name that Python tries: at worst a second
FEW_WAYS = 16.0  # that take no time worth counting
STEPS_PER_SECOND = 2_000_000
MOST_STEPS = 200_000  # for one name, some 0.1 s
FREE_STEPS = 3_000  # of each name; an honest expression takes fewer
MOST_LEFT = 20_000_000  # more of all names, some 10 s
_PARSER: Any = import_module("re._parser")
_LOOPS = frozenset({"MAX_REPEAT", "MIN_REPEAT"})
_KINDS: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda letter: letter.isalnum() or letter == "_",
}
Places = frozenset[int]


class Expression:
    """A regular expression, asked whether it fits the beginning of names.

    Raises  InputError for what is none, or can be matched in no bounded time
    """

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > LONGEST:
            raise self._bad(f"has {len(text)} characters; expected at most {LONGEST}")
        try:
            # FutureWarning: of what may once mean something else
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                self._python = re.compile(text)
                self._parsed = _PARSER.parse(text)
            self._loops, self._choices = _count_ways(self._parsed)
        except (re.error, OverflowError) as error:
            raise self._bad(f"is not a regular expression: {error}") from None
        except RecursionError:
            raise self._bad("is nested too deep; expected a simpler expression") from None
        self._left = MOST_LEFT  # steps

    def match(self, name: str) -> bool:
        """Tell whether the expression fits the beginning of a name.

        Raises  InputError where that takes too long
        """
        # Loops that follow one another end at places in that order: of len + 1, with repetition.
        loops, places = self._loops, len(name) + 1
        counts = math.lgamma(places + loops + 1), math.lgamma(places + 1), math.lgamma(loops + 1)
        ways = (counts[0] - counts[1] - counts[2]) / math.log(2) + self._choices
        if ways <= FEW_WAYS:
            return self._python.match(name) is not None
        if ways <= MOST_WAYS and self._left > 0:
            began = time.perf_counter()
            fits = self._python.match(name) is not None
            self._left -= int(STEPS_PER_SECOND * (time.perf_counter() - began))
            return fits
        walk = _Walk(name, min(MOST_STEPS, self._left))
        try:
            if self._python.flags != re.UNICODE:
                raise _TooLongError("has flags and many ways to fit")
            return bool(walk.follow(self._parsed, frozenset({0})))
        except (_TooLongError, RecursionError) as error:
            found = str(error) if isinstance(error, _TooLongError) else "is nested too deep"
            raise self._bad(f"{found}; expected a simpler expression") from None
        finally:
            self._left -= max(0, walk.steps - FREE_STEPS)

    def _bad(self, found: str) -> InputError:
        shown = self._text if len(self._text) < 100 else f"{self._text[:100]}..."
        return InputError("bad-pattern", f"{'re:' + shown!r} {found}")


class _TooLongError(Exception):
    """What an expression would take."""


def _count_ways(parsed: Iterable[tuple[Any, Any]], is_inside: bool = False) -> tuple[float, float]:
    """Count in how many ways an expression may fit; Python tries all.

    Returns  the loops, each of which may end at every letter of a name, and log2 of the choices;
             infinity where a loop or a choice stands in a loop: they double with every letter
    """
    loops = choices = 0.0
    for operation, value in parsed:
        kind, inner = str(operation), (0.0, 0.0)
        if kind in _LOOPS:
            least, most, body = value
            is_choice = least != most
            loops += most > 1 and is_choice
            choices += math.inf if is_inside and is_choice else is_choice
            inner = _count_ways(body, is_inside or most > 1)
        elif kind == "BRANCH":
            ways = [_count_ways(branch, is_inside) for branch in value[1]]
            inner = max(each for each, _ in ways), max(each for _, each in ways)
            choices += math.inf if is_inside else math.log2(len(ways))
        elif kind == "SUBPATTERN":
            inner = _count_ways(value[3], is_inside)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            inner = _count_ways(value[1], is_inside)
        elif kind not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            choices = math.inf
        loops, choices = loops + inner[0], choices + inner[1]
    return loops, choices


class _Walk:
    """The places of one name that the parts of an expression reach."""

    def __init__(self, name: str, most_steps: int) -> None:
        self._name = name
        self._most_steps = most_steps
        self.steps = 0

    def follow(self, parsed: Iterable[tuple[Any, Any]], places: Places) -> Places:
        """Return where a sequence of parts ends that begins at these places."""
        for operation, value in parsed:
            if not places:
                break
            self.steps += 1 + len(places)
            if self.steps > self._most_steps:
                raise _TooLongError("takes too many steps")
            places = self._pass(str(operation), value, places)
        return places

    def _pass(self, kind: str, value: Any, places: Places) -> Places:
        """Return where one part ends."""
        name = self._name
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            items = value if kind == "IN" else [(kind, value)]
            inside = (at for at in places if at < len(name))
            return frozenset(at + 1 for at in inside if _is_in(items, name[at]))
        if kind in _LOOPS:
            return self._repeat(value, places)
        if kind == "BRANCH":
            return frozenset().union(*(self.follow(each, places) for each in value[1]))
        if kind == "SUBPATTERN" and not value[1] and not value[2]:
            return self.follow(value[3], places)
        if kind in ("ASSERT", "ASSERT_NOT"):
            wanted = kind == "ASSERT"
            return frozenset(at for at in places if self._looks(value, at) is wanted)
        if kind == "AT":
            return frozenset(at for at in places if self._is_at(str(value), at))
        raise _TooLongError("has parts that can take forever")

    def _repeat(self, value: tuple[int, int, Any], places: Places) -> Places:
        least, most, body = value
        for _ in range(least):
            before, places = places, self.follow(body, places)
            if places == before:  # and ever after
                break
        reached, found = places, places
        for _ in range(min(most - least, len(self._name) + 1)):
            found = self.follow(body, found) - reached
            if not found:
                break
            reached |= found
        return reached

    def _looks(self, value: tuple[int, Any], at: int) -> bool:
        """Tell whether what looks ahead or behind finds what it seeks."""
        direction, body = value
        if direction > 0:
            return bool(self.follow(body, frozenset({at})))
        width = body.getwidth()[0]  # of what looks behind there is one
        return at >= width and at in self.follow(body, frozenset({at - width}))

    def _is_at(self, where: str, at: int) -> bool:
        name, end = self._name, len(self._name)
        if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return at == 0
        if where == "AT_END_STRING":
            return at == end
        if where == "AT_END":
            return at == end or (at == end - 1 and name[at] == "\n")
        is_word = _KINDS["CATEGORY_WORD"]
        before, after = at > 0 and is_word(name[at - 1]), at < end and is_word(name[at])
        return (before != after) is (where == "AT_BOUNDARY")


def _is_in(items: Iterable[tuple[Any, Any]], letter: str) -> bool:
    """Tell whether a letter is one of a set, as the parser writes sets."""
    wanted = True
    for operation, value in items:
        kind = str(operation)
        if kind == "NEGATE":
            wanted = False
        elif kind == "ANY":
            return letter != "\n"
        elif kind == "NOT_LITERAL":
            return letter != chr(value)
        elif kind == "LITERAL":
            if letter == chr(value):
                return wanted
        elif kind == "RANGE":
            if value[0] <= ord(letter) <= value[1]:
                return wanted
        elif _is_of(str(value), letter):
            return wanted
    return not wanted


def _is_of(category: str, letter: str) -> bool:
    is_not = "_NOT_" in category
    return _KINDS[category.replace("_NOT_", "_")](letter) is not is_not
