"""Make, read and check quantization_report.json.

The report stands beside the weights for people and for `verify`: no engine reads it, no digest counts it.  What was taken over
from a source that was four-bit already has no line in it, for nothing was rounded; the report says how many modules these are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.error_sums import Account, summarise
from fp4convert.numerics.formats import CODES
from fp4convert.storage.checkpoint_files import REPORT
from fp4convert.storage.source import Source

LARGEST_CODES, ZERO_CODES = (7, 15), (0, 8)  # of E2M1
HEAD = ("producer", "format", "scale_rule", "method")  # of our record
LIMIT = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounts of an artifact.

    accounts    of every module that was rounded, by the name of what holds it in the artifact
    taken_over  how many modules came with codes of their own
    """

    accounts: Mapping[str, Account]
    taken_over: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        """Of all tensors, as error_sums.summarise has it."""
        return summarise((one.name, one.sums) for one in self.accounts.values())

    def as_text(self, record: Mapping[str, object]) -> str:
        """The file, a tensor to a line.

        record  our own of the artifact
        """
        head = {
            **{key: record.get(key) for key in HEAD},
            "summary": self.summary,
            "taken_over": self.taken_over,
        }
        lines = ",\n".join(
            "  " + json.dumps(describe(module, one), ensure_ascii=False)
            for module, one in self.accounts.items()
        )
        return f'{json.dumps(head, ensure_ascii=False, indent=1)[:-2]},\n "tensors": [\n{lines}\n ]\n}}\n'


def describe(module: str, account: Account) -> dict[str, Any]:
    """What the report says of a tensor."""
    sums = account.sums
    return {
        "name": account.name,
        "module": module,
        "format": account.format,
        "against": account.against,
        "elements": sums.elements,
        "mse": sums.mse,
        "sqnr_db": sums.sqnr_db,
        "max_abs": sums.max_abs,
        "cosine": sums.cosine,
        "nmse": sums.nmse,
        "clipped": sums.clipped / sums.elements,
        **shares(sums.histogram),
    }


def shares(histogram: tuple[int, ...]) -> dict[str, Any]:
    """The shares of codes that are the largest, and that are zero; None where codes have more than four bits."""
    total = sum(histogram)
    of = {"saturated": LARGEST_CODES, "zero": ZERO_CODES}
    found = {
        name: sum(histogram[code] for code in codes) / total if total else None
        for name, codes in of.items()
    }
    return {**found, "histogram": list(histogram) if total else None}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a report says of a tensor.

    against  `source`, or what the weights were before they were rounded
    sqnr_db, cosine  None as in error_sums.Sums
    """

    name: str
    module: str
    format: str
    against: str
    mse: float
    max_abs: float
    histogram: tuple[int, ...]
    sqnr_db: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A report that was read."""

    summary: dict[str, Any]
    entries: tuple[Entry, ...]


def _read_report(source: Source) -> Recorded | None:
    """The report that stands beside weights; None where there is none.

    Raises InputError where it is there and is none
    """
    if not source.has_file(REPORT):
        return None
    try:
        if source.file_nbytes(REPORT) > LIMIT:
            raise ValueError("too long")
        with source.open_file(REPORT) as stream:
            document = json.loads(stream.read())
        return Recorded(_summary(document["summary"]), tuple(map(_entry, document["tensors"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        detail = f"{REPORT} is damaged; expected the numbers that quantize measured"
        raise InputError("report-damaged", detail, "Remove it, or convert again.") from None


def _summary(entry: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {
        key: None if entry[key] is None else float(entry[key])
        for key in ("sqnr_db_min", "sqnr_db_mean", "nmse")
    }
    return {**numbers, "worst": None if entry["worst"] is None else str(entry["worst"])}


def _entry(entry: Mapping[str, Any]) -> Entry:
    histogram = tuple(int(count) for count in entry["histogram"] or ())
    if len(histogram) not in (0, CODES):
        raise ValueError("no histogram of four bits")
    name, module, fmt, against = (
        str(entry[key]) for key in ("name", "module", "format", "against")
    )
    sqnr_db, cosine = (
        None if entry[key] is None else float(entry[key]) for key in ("sqnr_db", "cosine")
    )
    return Entry(
        name,
        module,
        fmt,
        against,
        float(entry["mse"]),
        float(entry["max_abs"]),
        histogram,
        sqnr_db,
        cosine,
    )


def merged(parts: Iterable[tuple[Mapping[str, Account], int]]) -> Ledger:
    """The accounts of all tasks as one, in the order of names."""
    accounts: dict[str, Account] = {}
    taken_over = 0
    for own, count in parts:
        accounts |= own
        taken_over += count
    return Ledger({module: accounts[module] for module in sorted(accounts)}, taken_over)


def read_recorded(artifact: Artifact) -> tuple[Recorded | None, list[Finding]]:
    """The report of an artifact of ours; a finding where it cannot be read."""
    try:
        return (_read_report(artifact.source) if artifact.record else None), []
    except InputError as error:
        return None, [Finding("error", "report-damaged", None, error.message)]
