"""Look up what a finding or an error means, in docs/."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache

from fp4convert.errors import ERRORS, InputError, rows_of

FINDINGS = "findings.md"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A row of docs/findings.md.

    levels   that the finding may have, most serious first
    meaning  what is wrong
    seen     who can tell
    remedy   what to do
    """

    levels: tuple[str, ...]
    meaning: str
    seen: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A row of docs/errors.md.

    exits    codes that the command ends with
    meaning  what is wrong
    origin   what a person asked for, or what was looked at
    remedy   what to do
    """

    exits: tuple[int, ...]
    meaning: str
    origin: str
    remedy: str


@cache
def explanations() -> dict[str, Explanation]:
    """Those of every finding, by its code; in the order of the page."""
    return {
        code: Explanation(tuple(levels.split(", ")), *words)
        for code, (levels, *words) in rows_of(FINDINGS).items()
    }


@cache
def failures() -> dict[str, Failure]:
    """Those of every error, by its code; in the order of the page."""
    return {
        code: Failure(tuple(map(int, exits.split(", "))), *words)
        for code, (exits, *words) in rows_of(ERRORS).items()
    }


def explain(code: str) -> dict[str, object]:
    """The document of `explain CODE --json`: what it means as a finding and as an error; some codes are both.

    Raises  InputError for a code that is neither
    """
    code = code.strip().lower()
    finding, failure = explanations().get(code), failures().get(code)
    if not (finding or failure):
        known = get_close_matches(code, [*explanations(), *failures()], 3)
        near = f"; like it: {', '.join(dict.fromkeys(known))}" if known else ""
        raise InputError(
            "unknown-code",
            f"{code!r} is the code of no finding and no error{near}",
            "See: fp4convert explain.",
        )
    return {
        "code": code,
        "finding": asdict(finding) if finding else None,
        "error": asdict(failure) if failure else None,
    }


def explain_all() -> dict[str, object]:
    """The document of `explain --json`."""
    return {
        "findings": [{"code": code, **asdict(one)} for code, one in explanations().items()],
        "errors": [{"code": code, **asdict(one)} for code, one in failures().items()],
    }
