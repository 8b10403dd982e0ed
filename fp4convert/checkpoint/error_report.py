"""Make, read and check quantization_report.json.

The report lies beside the weights for people and for `verify`: no engine reads it, no digest
includes it. Modules that were four-bit in the source have no line in it, since they were not
rounded; the report has their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.formats import CODES
from fp4convert.storage.checkpoint_files import REPORT
from fp4convert.storage.json_text import MISSHAPEN
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source

if TYPE_CHECKING:
    from fp4convert.numerics.error_sums import Account

LARGEST_CODES, ZERO_CODES = (7, 15), (0, 8)  # of E2M1
HEAD = ("producer", "format", "scale_rule", "method")  # of our record
LIMIT = 1 << 30  # bytes


def merge_accounts(
    parts: Iterable[tuple[Mapping[str, Account], int]],
) -> tuple[dict[str, Account], int]:
    """Join the accounts of all tasks, in the order of names.

    parts    accounts of each task, by module or stack of the artifact, and its number of modules
             whose codes were taken over from the source
    Returns  all accounts, and the number of all modules that were taken over
    """
    accounts: dict[str, Account] = {}
    taken_over = 0
    for task_accounts, count in parts:
        accounts |= task_accounts
        taken_over += count
    return dict(sorted(accounts.items())), taken_over


def report_text(
    accounts: Mapping[str, Account],
    taken_over: int,
    record: Mapping[str, object],
    norms: Mapping[str, bool],
) -> str:
    """Write the report of an artifact with that record, a tensor to a line.

    norms  norms that stay: whether they hold zeros alone
    """
    from fp4convert.numerics.error_sums import summarise, summarise_adapter, summarise_exact

    summary: dict[str, Any] = {**summarise((one.name, one.sums) for one in accounts.values())}
    if adapter := summarise_adapter(accounts.values()):
        summary["adapter"] = adapter
    if exact := summarise_exact(accounts.values()):
        summary["fake_quantized"] = exact
    zeros = [one.name for one in accounts.values() if not one.sums.signal]
    zeros += odd_zeros([name for name in sorted(norms) if norms[name]], len(norms))
    if zeros:
        summary["zeros"] = {"tensors": len(zeros), "first": zeros[0]}
    head = {
        **{key: record.get(key) for key in HEAD},
        "summary": summary,
        "taken_over": taken_over,
    }
    lines = []
    for module, account in accounts.items():
        sums = account.sums
        entry = {
            "name": account.name,
            "module": module,
            "format": account.format,
            "against": account.against,
            "source_dtype": account.source_dtype,
            "elements": sums.elements,
            "mse": sums.mse,
            "sqnr_db": sums.sqnr_db,
            "max_abs": sums.max_abs,
            "cosine": sums.cosine,
            "nmse": sums.nmse,
            "clipped": sums.clipped / sums.elements,
            **shares(sums.histogram),
        }
        if account.adapter is not None:
            entry["adapter_db"] = account.adapter_db
        if account.exact is not None:
            entry["exact"] = account.exact[1] / max(account.exact[0], 1)
        lines.append("  " + json.dumps(entry, ensure_ascii=False))
    text, tensors = json.dumps(head, ensure_ascii=False, indent=1)[:-2], ",\n".join(lines)
    return f'{text},\n "tensors": [\n{tensors}\n ]\n}}\n'


def is_norm(name: str) -> bool:
    """Return whether a tensor has the name of a norm's weight."""
    leaf = name.removesuffix(WEIGHT).rpartition(".")[2].lower()
    return name.endswith(WEIGHT) and ("norm" in leaf or leaf.startswith("ln"))


def odd_zeros(zeros: list[str], count: int) -> list[str]:
    """Return norms of zeros, of so many norms; [] where most are zero.

    Those are added to 1, as in fresh models of Gemma and Qwen3-Next.
    """
    return zeros if 2 * len(zeros) <= count else []


def shares(histogram: tuple[int, ...]) -> dict[str, Any]:
    """Return the shares of largest and zero codes; None without a histogram."""
    total = sum(histogram)
    if not total:
        return {"saturated": None, "zero": None, "histogram": None}
    largest, zeros = (
        sum(histogram[code] for code in codes) / total for codes in (LARGEST_CODES, ZERO_CODES)
    )
    return {"saturated": largest, "zero": zeros, "histogram": list(histogram)}


class Entry(NamedTuple):
    """A line of a report.

    against          the values that losses are counted against: `source`, or a changed source
    source_dtype     "" in reports that lack it
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
    source_dtype: str


class Recorded(NamedTuple):
    """A report that was read."""

    summary: dict[str, Any]
    entries: tuple[Entry, ...]


def _read_report(source: Source) -> Recorded:
    """Read the report beside weights; InputError where it is none."""
    try:
        if source.file_nbytes(REPORT) > LIMIT:
            raise ValueError("too long")
        with source.open_file(REPORT) as stream:
            document = json.loads(stream.read())
        found = document["summary"]
        keys = ("sqnr_db_min", "sqnr_db_mean", "nmse")
        summary: dict[str, Any] = {key: _number(found[key]) for key in keys}
        summary["worst"] = None if found["worst"] is None else str(found["worst"])
        if len({summary[key] is None for key in ("sqnr_db_min", "sqnr_db_mean", "worst")}) > 1:
            raise ValueError("a mean without a least, or without the tensor that has it")
        entries = []
        for entry in document["tensors"]:
            histogram = tuple(int(count) for count in entry["histogram"] or ())
            if len(histogram) not in (0, CODES):
                raise ValueError("no histogram of four bits")
            entries.append(
                Entry(
                    name=str(entry["name"]),
                    module=str(entry["module"]),
                    format=str(entry["format"]),
                    against=str(entry["against"]),
                    mse=float(entry["mse"]),
                    max_abs=float(entry["max_abs"]),
                    histogram=histogram,
                    sqnr_db=_number(entry["sqnr_db"]),
                    cosine=_number(entry["cosine"]),
                    source_dtype=str(entry.get("source_dtype", "")),
                )
            )
        return Recorded(summary, tuple(entries))
    except MISSHAPEN:
        detail = f"{REPORT} is damaged; expected the numbers that quantize measured"
        raise InputError("report-damaged", detail) from None


def read_recorded(artifact: Artifact) -> tuple[Recorded | None, list[Finding]]:
    """Read the report of an artifact of ours, or a finding that it is damaged."""
    if not artifact.record or not artifact.source.has_file(REPORT):
        return None, []
    try:
        return _read_report(artifact.source), []
    except InputError as error:
        return None, [Finding("error", "report-damaged", None, error.message)]


def source_dtypes(artifact: Artifact) -> dict[str, str]:
    """Return the known dtypes of the source, by module or stack."""
    recorded, _ = read_recorded(artifact)
    entries = recorded.entries if recorded else ()
    return {entry.module: entry.source_dtype for entry in entries if entry.source_dtype}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
