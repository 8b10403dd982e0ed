"""Every error: exit code and next step; and findings.

Fp4Error              1  never raised itself; anything else that escapes is our bug, and exits 1
├── InputError        2  bad input or usage; nothing was written
│   ├── ChoiceError   2  a dialect, format or activations that do not do; others may
│   └── NumericError  2  weights that four bits cannot hold (NaN, Inf)
├── DeviceError       2  a GPU that is not there, lacks memory or fails; resumable
├── SourceError       3  the source went away or changed; resumable
├── AccessError       4  the Hub gives no access, or none to write: a licence, a token; resumable
├── OutputError       5  disk full, read-only, other content, a Hub that takes nothing; resumable
├── GateError         6  the result is whole, and misses a gate that was asked for
└── Interrupted     130  Ctrl-C; 143 for SIGTERM; resumable

report/catalogue.toml says what each code means and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

CORRUPT = "source-corrupt"  # bytes that do not have the announced hash; the reader tries again
NEAR, MOST_NEAR = 0.7, 8  # least likeness of a slip and its word, 0 to 1; most words suggested
CATALOGUE = Path(__file__).with_name("report") / "catalogue.toml"
# Before @ of an address, in its query, or a token of the Hub by itself.
_SECRETS = re.compile(
    r"(?<=//)[^/\s@]+(?=@)|(?<![\w/.])[^\s/:@'\"]+:[^\s/@'\"]+(?=@[\w.-]+/)"
    r"|(?<=[?&]token=)[^&\s]+|\bhf_[A-Za-z0-9]{16,}\b"
)


def hide_secrets(text: str) -> str:
    """Replace passwords and tokens by ***."""
    return _SECRETS.sub("***", text)


@cache
def read_catalogue() -> dict[str, Any]:
    """Read the meaning of every code: "errors" and "findings", by headings."""
    import tomllib

    return tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))


class Fp4Error(Exception):
    """An expected failure, with the next step for the user.

    code       stable slug for scripts, such as "header-length"
    message    one sentence: the fact, its place, the expectation; one line for each problem
    lines      those sentences; a name that holds a newline begins no line
    next_step  what the user can do now, from the raiser or else from the catalogue
    tensor     full name of the tensor concerned, or None
    """

    exit_code = 1

    def __init__(
        self,
        code: str,
        message: str | tuple[str, ...],
        next_step: str = "",
        tensor: str | None = None,
    ) -> None:
        lines = (message,) if isinstance(message, str) else message
        self.lines = tuple(map(hide_secrets, lines))
        self.message = "\n".join(self.lines)
        super().__init__(self.message)
        self.code = code
        self._known_step = hide_secrets(next_step)
        self.tensor = tensor

    @property
    def next_step(self) -> str:
        """Return the next step for the user, in one sentence."""
        if self._known_step:
            return self._known_step
        try:
            topics = read_catalogue()["errors"]
        except OSError:  # no file can be opened any more
            return f"See what it means: fp4convert explain {self.code}"
        for topic in topics:
            if row := topic["codes"].get(self.code):
                sentence = row["remedy"].replace("`", "").partition(". ")[0]
                return f"{sentence.removesuffix('.')}."
        return ""

    def as_json(self) -> dict[str, object]:
        """Return the document that --json prints for this error."""
        body = {"code": self.code, "exit": self.exit_code, "message": self.message}
        return {"error": {**body, "tensor": self.tensor, "next": self.next_step or None}}


class InputError(Fp4Error):
    """Source, artifact or command line is wrong; nothing was written."""

    exit_code = 2


class ChoiceError(InputError):
    """A dialect, format or activation bits that cannot be; others may."""


class NumericError(InputError):
    """Weights that no four-bit format can hold."""


class DeviceError(Fp4Error):
    """The device is not there, lacks memory or fails; a re-run continues."""

    exit_code = 2


class SourceError(Fp4Error):
    """The source cannot be reached, or has changed; a re-run continues."""

    exit_code = 3


class AccessError(Fp4Error):
    """The Hub gives no access; once it does, a re-run continues."""

    exit_code = 4


class OutputError(Fp4Error):
    """The output folder, disk or repository fails; a re-run continues."""

    exit_code = 5


class GateError(Fp4Error):
    """The result is whole, and misses a gate that was asked for."""

    exit_code = 6


class Interrupted(Fp4Error):  # noqa: N818 - not a failure
    """The run was told to stop; its command continues, or begins again.

    command    the command line for that
    exit_code  130, or 143 for SIGTERM
    kept       the part of the work that stays, in words; None for nothing
    """

    def __init__(self, command: str, exit_code: int, kept: str | None) -> None:
        verb = "Continue" if kept else "Begin again"
        message = f"interrupted: {kept or 'this command keeps nothing'}"
        super().__init__("interrupted", message, f"{verb} with: {command}")
        self.exit_code = exit_code


def shell_line(*words: object) -> str:
    """Quote words for a shell; the line stands at the end of a text.

    No full stop follows it. A path that begins with a dash gets ./ before it. Characters that
    cannot be shown are written as bash, zsh and ksh read them: $'\\033'.
    """
    return " ".join(map(_quote, words))


def _quote(word: object) -> str:
    """Quote one word for a shell."""
    from shlex import quote
    from unicodedata import category

    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    hidden = {c for c in text if not c.isprintable() and category(c) != "Zs"}
    if hidden:
        inner = "".join(
            "".join(f"\\{byte:03o}" for byte in _utf8(c))
            if c in hidden
            else f"\\{c}"
            if c in "\\'"
            else c
            for c in text
        )
        return f"$'{inner}'"
    # A full stop at its end would be taken for the sentence's.
    is_bare = text.endswith(".") and text.rpartition("/")[2] not in (".", "..")
    return f"'{text}'" if is_bare and quote(text) == text else quote(text)


def _utf8(character: str) -> bytes:
    """Return the bytes of a character, also of a file's name in no UTF-8."""
    try:
        return character.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return character.encode("utf-8", "surrogatepass")


def install_line(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml.

    It names the place that this package was installed from, while that is there, else the packages
    of the extra: no package index is trusted to have this one.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    how = "pip install"
    try:
        found = distribution("fp4convert")
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        wanted = found.requires or []
    except PackageNotFoundError:  # it runs from a folder that nobody installed
        origin, wanted = {}, []
    url = urlsplit(origin.get("url", ""))
    place = Path(url2pathname(url.path))
    if url.scheme == "file" and place.exists():
        how += " -e" if origin.get("dir_info", {}).get("editable") else ""
        return f"{how} {shell_line(f'{place}[{extra}]')}"
    of_extra = re.compile(rf"""extra == ['"]{extra}['"]""")
    packages = [one.partition(";")[0].strip() for one in wanted if of_extra.search(one)]
    return f"{how} {shell_line(*(packages or [f'.[{extra}]']))}"


def describe_missing(needing: str, extra: str) -> tuple[str, str]:
    """Return message and next step of an error for a missing package.

    needing  the beginning of the message: "quantize needs the package x"
    extra    the extra of pyproject.toml that installs it
    """
    return f"{needing}, which is not installed", f"Install it: {install_line(extra)}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a near miss of known words, else ""."""
    from difflib import get_close_matches

    word, known = str(word).lower(), list(known)
    begun = [each for each in known if len(word) > 1 and each.startswith(word)]
    near = list(dict.fromkeys([*begun, *get_close_matches(word, known, MOST_NEAR, NEAR)]))
    return f"; did you mean {' or '.join(near[:MOST_NEAR])}?" if near else ""


Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong (error), doubtful (warning) or worth knowing (note)."""

    level: Level
    code: str
    tensor: str | None
    detail: str


@contextmanager
def named(what: str) -> Iterator[None]:
    """Put a name before the messages of errors in here; "" changes nothing."""
    try:
        yield
    except Fp4Error as error:
        if not what:
            raise
        lines = tuple(f"{what}: {line}" for line in error.lines)
        raise type(error)(error.code, lines, error.next_step, error.tensor) from None
