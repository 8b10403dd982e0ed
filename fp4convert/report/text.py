"""Make text safe to print; describe artifacts, findings and errors."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fp4convert.errors import InputError, did_you_mean, read_catalogue
from fp4convert.progress import count_text
from fp4convert.storage.safetensors import WEIGHT

Document = dict[str, Any]  # what --json prints
# Control, format (bidi), surrogate, private, unassigned, separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
CELL_WIDTH = 100
LONGEST_WORD, LONGEST_LINE = 5000, 20_000  # characters; Linux has paths of 4096 at most
AGENTS = Path(__file__).with_name("agents.md")  # what `explain agents` prints
MOST_ALIKE = 4  # lines of findings of one code
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_MEASURED = ("sqnr-low", "nmse-high", "output-error-high")  # verify lists the worst first
LITTLE_WORDS = frozenset(["a", "and", "from", "holds", "in", "inside", "of", "one", "the", "what"])
Rows = dict[str, dict[str, Any]]
"""code -> the keys of its row in catalogue.toml"""


def escape(text: object) -> str:
    """Write whatever could act on a terminal as \\xNN or \\uNNNN."""
    string = str(text)
    if string.isprintable():
        return string
    return "".join(c if unicodedata.category(c) not in _HIDDEN else spell(c) for c in string)


def spell(character: str) -> str:
    """Write a character as \\xNN, \\uNNNN or \\UNNNNNNNN."""
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def badness(sqnr_db: float | None, mse: float | None) -> float:
    """Return a key that sorts tensors, the worst first.

    First: without an mse (not measurable) or a ratio (the source is zero); last: exact ones.
    """
    if mse == 0:
        return math.inf
    return -math.inf if mse is None or sqnr_db is None else sqnr_db


def fidelity_text(summary: Document) -> str:
    """Say in a line how much was lost."""
    mean, least = summary["sqnr_db_mean"], summary["sqnr_db_min"]
    if mean is None:
        return "nothing was lost"
    return f"SQNR {mean:.2f} dB on average, lowest {least:.2f} dB ({summary['worst']})"


def adapter_text(summary: Document) -> str:
    """Say in a line how much of an adapter is left, by a report's summary."""
    kept = f"{summary['db_mean']:.1f} dB on average of {summary['modules']} modules"
    return f"adapter kept: {kept}, lowest {summary['db_min']:.1f} dB ({summary['worst']})"


def fake_quantized_text(summary: Document) -> str:
    """Say in a line how many blocks of fake-quantized weights are exact."""
    share = 100 * summary["exact"] / max(summary["blocks"], 1)
    counted = f"{summary['modules']} modules, {summary['blocks']:,} blocks"
    text = f"trained with fake quantization ({counted}): {share:.4g} % of blocks come back exact"
    if summary["share_min"] == 1:
        return text
    return f"{text}, lowest {100 * summary['share_min']:.4g} % ({summary['worst']})"


def shorten(text: str, width: int = CELL_WIDTH) -> str:
    """Leave out the middle of a long text."""
    return text if len(text) <= width else f"{text[: width // 2]}...{text[-width // 2 :]}"


def shorten_words(text: str) -> str:
    """Leave out the middle of words and lines that nobody can read."""
    if len(text) <= LONGEST_WORD:
        return text
    return shorten(_LONG_WORD.sub(lambda word: shorten(word[0], LONGEST_WORD), text), LONGEST_LINE)


def artifact_rows(artifact: Document) -> dict[str, str]:
    """Describe an artifact in rows of a word and its text.

    artifact  the document of `inspect`; findings and recorded losses have no rows
    """
    layout = artifact["scale_layout"]
    declared = f"{layout['declared']} (declared)" if layout["declared"] else "undeclared"
    # Small matrices and smooth weights show no order: that says nothing against the declared one.
    order = f"{declared}, {layout['detected']} (detected)" if layout["detected"] else declared
    if "forms" in artifact:
        rows = {"format": artifact["format"]}
        for number, form in enumerate(artifact["forms"], 1):
            rows[f"  {form['format']} ({number})"] = _form_text(form)
        rows |= {"dialect": artifact["dialect"], "scale layout": order}
    else:
        rows = _form_rows(artifact, order)
    if cache := artifact.get("kv_cache"):
        scales = "without scales: engines take 1"
        if cache["scales"]:
            values = f"{cache['smallest']:.4g} to {cache['largest']:.4g}"
            scales = f"{cache['scales']} scales from {values}"
        rows["cache"] = f"keys and values in {cache['dtype']}, {scales}"
    counts, bits = artifact["tensors"], artifact["bits_per_weight"]
    rows["tensors"] = f"{counts['quantized']} quantized, {counts['other']} other"
    parts = "codes, block scales and global scales"
    if "forms" not in artifact and not artifact["global_scale"]:
        parts = "codes and block scales"
    rows["bits per weight"] = "none" if bits is None else f"{bits:.3f} ({parts})"
    rows["share read"] = f"{100 * artifact['share_read']:.0f} % of the block scales"
    return rows


def _form_rows(artifact: Document, order: str) -> dict[str, str]:
    """Describe codes and scales of modules with one form, in rows."""
    stored = artifact["global_scale"]
    return {
        "format": f"{artifact['format']}: {artifact['element_dtype']} codes, "
        f"{_shared_by(artifact)}, {artifact['scale_dtype']} block scales",
        "dialect": artifact["dialect"],
        "global scale": f"{stored['dtype']}, stored as a {stored['stored_as']}"
        if stored
        else "none",
        "scale layout": order,
        **({"nibble order": order} if (order := artifact["nibble_order"]) else {}),
        "activations": "16 bits"
        if artifact["activations"] == 16
        else f"{artifact['activations']} bits, quantized by the engine",
    }


def _shared_by(form: Document) -> str:
    """Say which codes of a form share a scale."""
    size = form["block_size"]
    if size is None:
        return f"one scale to a {form['granularity']}"
    return f"{'x'.join(map(str, size)) if isinstance(size, list) else size} to a block"


def _form_text(form: Document) -> str:
    """Describe codes and scales of one form, in a line."""
    return (
        f"{form['element_dtype']} codes, {_shared_by(form)}, {form['scale_dtype']} scales; "
        f"{form['modules']} modules, {form['bits_per_weight']:.3f} bits a weight, "
        f"activations of {form['activations']} bits"
    )


def most_lines(verdict: str | None) -> int:
    """Return the most lines for findings of a code: few beside a verdict."""
    return 1 if verdict else MOST_ALIKE


def fold_findings(
    findings: Iterable[Document], of: int = 0, most: int = MOST_ALIKE
) -> list[Document]:
    """Write findings in few lines: equal ones share a line.

    of       number of measured tensors, if known
    most     lines of findings of one code
    Returns  findings with two more keys: `lead`, words before the tensor, and `is_folded`; `tensor`
             may be a pattern of names with their number, and is "" for none
    """
    alike: dict[tuple[str, str], list[Document]] = defaultdict(list)
    for finding in findings:
        alike[finding["level"], finding["code"]].append(finding)
    lines = []
    for (level, code), held in alike.items():
        own = [("", *line) for line in _share_lines(held)]
        is_folded = len(own) > most
        for lead, tensor, detail in [_fold_all(code, held, of)] if is_folded else own:
            line = {"level": level, "code": code, "lead": lead, "tensor": tensor}
            lines.append({**line, "detail": detail, "is_folded": is_folded})
    return lines


def _share_lines(findings: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Yield patterns of names with their shared text."""
    from fp4convert.checkpoint.module_names import join_names

    details: dict[str, list[str | None]] = defaultdict(list)
    for finding in findings:
        details[finding["detail"]].append(finding["tensor"])
    for detail, tensors in details.items():
        named = [
            (tensor.removesuffix(WEIGHT), WEIGHT if tensor.endswith(WEIGHT) else "")
            for tensor in tensors
            if tensor
        ]
        if len(named) < len(tensors):
            yield "", detail
        for pattern, held in join_names(named):
            count = f" ({len(held)} of them)" if len(held) > 1 else ""
            yield f"{pattern}{named[held[0]][1]}{count}", detail


def _fold_all(code: str, findings: Sequence[Document], of: int) -> tuple[str, str, str]:
    """Return the number of findings in words, then tensor and text of one."""
    is_measured = code in _MEASURED
    first = findings[0]
    count = f"{len(findings)} of {of}" if is_measured and of else str(len(findings))
    how = "the worst" if is_measured else "such as"
    lead = f"{count} {'tensors' if first['tensor'] else 'of them'}, {how} "
    return lead, first["tensor"] or "", first["detail"]


def count_levels(findings: Sequence[Document]) -> str:
    """Count errors and warnings, behind a colon; "" without any."""
    levels = Counter(finding["level"] for finding in findings)
    counts = [count_text(levels[level], level) for level in ("error", "warning") if levels[level]]
    return f": {', '.join(counts)}" if counts else ""


def evaluation_rows(found: Document) -> dict[str, str]:
    """Return the figures of `evaluate` in rows of a word and its text."""
    kl, ppl, flips, usual = found["kl"], found["ppl"], found["flips"], found["usual"]
    error = "" if kl["se"] is None else f", standard error {kl['se']:.2g}"
    sure = f"of the {flips['of']:,} tokens of which the source was sure"
    flipped = "none" if flips["share"] is None else f"{100 * flips['share']:.2f} %"
    beside = ""
    if usual:
        beside = f"; usual are KL {usual['kl']:.3g} and {100 * usual['top1']:.1f} % for"
        beside += f" {usual['format']} by {usual['method']}, {usual['activations']}-bit"
        beside += f" activations and {count_text(usual['parameters'], 'parameter')}"
    rows = {
        "grade": f"{found['grade']}{beside}",
        "KL divergence": f"{kl['mean']:.5g} nats a token{error}; 99.9 % are below"
        f" {kl['p999']:.4g}, the largest is {kl['max']:.4g}",
        "same top token": f"{100 * found['top1']:.2f} %",
        "confident flips": f"{flipped} {sure} ({100 * flips['threshold']:.0f} % or more)",
        "perplexity": f"{ppl['source']:.5g} -> {ppl['artifact']:.5g}"
        f" ({100 * (ppl['artifact'] / ppl['source'] - 1):+.2f} %)",
        "text": f"{found['tokens']:,} tokens in {found['windows']} windows",
        "activations": f"{found['activations']}-bit",
    }
    if found["kv_cache"]:
        rows["KV cache"] = found["kv_cache"]
    if other := found.get("baseline"):
        rows["baseline"] = f"KL {other['kl']:.5g}; the difference is {other['difference']:+.4g}"
        rows["baseline"] += f" nats, standard error {other['se']:.2g}, paired by window"
    return rows


def make_visible(value: Any) -> Any:
    """Return the same document with control characters made visible."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): make_visible(each) for key, each in value.items()}
    return [make_visible(each) for each in value] if isinstance(value, list | tuple) else value


@cache
def explanations(kind: Literal["errors", "findings"]) -> Rows:
    """Return the rows of all errors or findings, in the catalogue's order."""
    rows: Rows = {}
    for topic in read_catalogue()[kind]:
        rows |= topic["codes"]
    return rows


def explain_findings(findings: Iterable[Document]) -> list[Document]:
    """Add the meaning and the remedy to findings."""
    known = explanations("findings")
    return [
        {**one, **{key: known.get(one["code"], {}).get(key, "") for key in ("meaning", "remedy")}}
        for one in findings
    ]


def explain(code: str) -> dict[str, object]:
    """Explain a code as a finding and as an error; some codes are both.

    Returns  the document of `explain CODE --json`
    Raises   InputError for an unknown code
    """
    code = code.strip().lower()
    errors, findings = explanations("errors"), explanations("findings")
    if code not in errors and code not in findings:
        near = did_you_mean(code, [*findings, *errors])
        detail = f"{code!r} is no code of a finding or an error, no subject, engine or card{near}"
        raise InputError("unknown-code", detail, "See: fp4convert explain")
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
    """Tell whether a code is of a subject, by whole words."""
    words = [word.strip(",") for word in heading.split() if word not in LITTLE_WORDS]
    of_heading = {heading, *words, *(word.removesuffix("s") for word in words)}
    return not subject or subject in of_heading or code.startswith(f"{subject.rstrip('-')}-")


def is_subject(word: str) -> bool:
    """Tell whether a word is a subject of codes, and no code itself."""
    is_code = any(word.strip().lower() in explanations(kind) for kind in ("findings", "errors"))
    return not is_code and bool(word.strip()) and any(explain_all(word).values())
