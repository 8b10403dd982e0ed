"""Look up what a finding or an error means."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from fp4convert.errors import InputError, did_you_mean, read_catalogue

LITTLE_WORDS = frozenset(["a", "and", "from", "holds", "in", "inside", "of", "one", "the", "what"])
Rows = dict[str, dict[str, Any]]
"""code -> the keys of its row in catalogue.toml"""


@cache
def explanations(kind: Literal["errors", "findings"]) -> Rows:
    """Return the rows of all errors or findings, in the catalogue's order."""
    rows: Rows = {}
    for topic in read_catalogue()[kind]:
        rows |= topic["codes"]
    return rows


def explain(code: str) -> dict[str, object]:
    """Explain a code as a finding and as an error; some codes are both.

    Returns  what `explain CODE --json` prints
    Raises   InputError for a code that is neither
    """
    code = code.strip().lower()
    errors, findings = explanations("errors"), explanations("findings")
    if code not in errors and code not in findings:
        near = did_you_mean(code, [*findings, *errors])
        raise InputError(
            "unknown-code",
            f"{code!r} is not the code of a finding or an error, nor a subject{near}",
            "See: fp4convert explain",
        )
    return {"code": code, "finding": findings.get(code), "error": errors.get(code)}


def explain_all(subject: str = "") -> dict[str, list[dict[str, Any]]]:
    """List every code as `explain --json` prints it.

    subject  of these alone: a heading, a word of one, or words that codes begin with
    """
    return {
        kind: [
            {"code": code, **row, "subject": topic["heading"]}
            for topic in read_catalogue()[kind]
            for code, row in topic["codes"].items()
            if _is_of(subject.strip().lower(), code, topic["heading"].lower())
        ]
        for kind in ("findings", "errors")
    }


def _is_of(subject: str, code: str, heading: str) -> bool:
    """Tell whether a code is of a subject: by whole words, never by letters."""
    words = [word.strip(",") for word in heading.split() if word not in LITTLE_WORDS]
    of_heading = {heading, *words, *(word.removesuffix("s") for word in words)}
    return not subject or subject in of_heading or code.startswith(f"{subject.rstrip('-')}-")


def is_subject(word: str) -> bool:
    """Tell whether codes are of that subject, and no code is the word."""
    is_code = any(word.strip().lower() in explanations(kind) for kind in ("findings", "errors"))
    return not is_code and bool(word.strip()) and any(explain_all(word).values())
