"""Match regular expressions of foreign records and users in bounded time.

Python's matcher doubles its time for "(a|a)+$" with every letter and cannot be stopped.  The
package regex can: a limit that is reached is an error, never an answer.  It reads some texts
otherwise than Python and writes required repetitions out; such texts are refused beforehand.
"""

from __future__ import annotations

import re
import time
import warnings
from functools import cached_property
from typing import TYPE_CHECKING

from fp4convert.errors import InputError

if TYPE_CHECKING:
    import regex

LONGEST = 16384  # characters of an expression
LARGEST = 50_000  # parts of one, with its required repetitions written out: some 20 MB
NAME_SECONDS = 0.2  # of the CPU, for one name
FREE_SECONDS = 0.0001  # of each name, which honest expressions never take
ALL_SECONDS = 1.0  # more than these, for all names
_TOKEN = re.compile(
    r"""
    (?P<escape>\\.)
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<comment>\(\?\#[^)]*\))
    |(?P<open>\(\??)
    |(?P<close>\))
    |(?P<count>\{(?P<least>\d*)(?:,\d*)?\}|[*+?])
    |(?P<brace>\{)
    |.
    """,
    re.VERBOSE | re.DOTALL,
)
_VERBOSE_FLAG = re.compile(r"\(\?[a-zA-Z-]*x")


class Expression:
    """A regular expression, matched at the beginning of names as by re.match.

    Raises  InputError for a text that is no expression, or that needs unbounded time or memory
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._seconds = ALL_SECONDS
        if len(text) > LONGEST:
            raise self._bad(f"has {len(text)} characters; expected at most {LONGEST}")
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                re.compile(text)  # its syntax is that of the records
        except (re.error, OverflowError, ValueError) as error:
            raise self._bad(f"is not a regular expression: {error}") from None
        except RecursionError:
            raise self._bad("is nested too deep; expected a simpler expression") from None
        self._check_parts()

    def match(self, name: str) -> bool:
        """Return whether the expression fits the beginning of a name.

        Raises  InputError where that takes too long
        """
        # \w is another set of marks and numbers in both packages beyond ASCII.
        if not name.isascii() and not all(sign.isascii() or sign.isalpha() for sign in name):
            raise self._bad(f"has no certain meaning for {name!r}; expected a glob")
        compiled, began = self._compiled, time.thread_time()
        try:
            fits = compiled.match(name, timeout=min(NAME_SECONDS, self._seconds)) is not None
        except TimeoutError:
            self._seconds = 0.0
        seconds = min(NAME_SECONDS, time.thread_time() - began)  # no pause of the collector
        self._seconds = max(0.0, self._seconds - max(0.0, seconds - FREE_SECONDS))
        if not self._seconds:
            raise self._bad("takes too long to match; expected a simpler expression")
        return fits

    @cached_property
    def _compiled(self) -> regex.Pattern[str]:
        import regex  # 7 ms, which most commands do without

        try:
            return regex.compile(self._text, regex.VERSION0)
        except regex.error as error:
            raise self._bad(f"is not a regular expression: {error}") from None
        except RecursionError:
            raise self._bad("is nested too deep; expected a simpler expression") from None

    def _check_parts(self) -> None:
        """Refuse an expression that regex reads otherwise, or makes too large.

        regex writes required repetitions out: "(?:a{9}){9}" takes a hundred parts.
        """
        if _VERBOSE_FLAG.search(self._text):
            raise self._bad("has the flag x; expected an expression without it")
        sizes, last = [0], 0  # of the groups that are open, and of the part before
        for token in _TOKEN.finditer(self._text):
            kind = token.lastgroup
            if kind == "brace":
                raise self._bad(r"has a { that begins no count; expected \{")
            if kind == "set" and "[:" in token[0][1:]:
                raise self._bad(r"has [: in a set; expected \[:")
            if kind == "open":
                sizes.append(0)
            elif kind == "close":
                last = sizes.pop()
            else:
                least = int(token["least"] or 0) if token[0][0] == "{" else int(token[0] == "+")
                last = last * least if kind == "count" else 1
            if kind != "open":
                sizes[-1] += last
            if sizes[-1] > LARGEST:
                raise self._bad("repeats too much; expected a simpler expression")

    def _bad(self, problem: str) -> InputError:
        shown = self._text if len(self._text) < 100 else f"{self._text[:100]}..."
        return InputError("bad-pattern", f"{'re:' + shown!r} {problem}")
