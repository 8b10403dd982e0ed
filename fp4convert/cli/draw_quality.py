"""Draw what inspect, verify, compare and analyze found."""

from __future__ import annotations

import math
from textwrap import wrap
from typing import Any

from fp4convert.cli.screen import Screen, draw_findings, draw_verdict
from fp4convert.numerics.formats import FORMATS, Format
from fp4convert.progress import duration_text, size_text
from fp4convert.report.text import Document, artifact_rows, badness, fidelity_text

CODE = "seem"  # E2M1, bit 3 first
SCALES = {"fp8_e4m3": "-eeeemmm", "e8m0": "eeeeeeee"}  # of a scale that is positive
SHOWN = 2  # bytes at the beginning of a block, before the dots


def elements_of(fmt: Format, nibble_order: str) -> list[tuple[int, int]]:
    """(element in bits 7-4, element in bits 3-0) of every byte of a block's codes.

    nibble_order  low_first, high_first or half_split, as Traits.nibble_order
    """
    half = fmt.block_size // 2
    if nibble_order == "half_split":
        return [(byte + half, byte) for byte in range(half)]
    pairs = [(2 * byte + 1, 2 * byte) for byte in range(half)]
    return pairs if nibble_order == "low_first" else [(low, high) for high, low in pairs]


def draw_block(fmt: Format, nibble_order: str) -> list[str]:
    """Three lines: numbers of bits, what they mean, of which elements of the block; ValueError for a format without blocks."""
    if fmt.scale_dtype not in SCALES:
        raise ValueError(f"{fmt.name} has no blocks to draw")
    elements = elements_of(fmt, nibble_order)
    first, last = ([_byte(*pair) for pair in part] for part in (elements[:SHOWN], elements[-1:]))
    scale = ("76543210", SCALES[fmt.scale_dtype], f"all {fmt.block_size}")
    return [
        "  ".join(line).rstrip()
        for line in zip(*first, ("   ", "...", "   "), *last, scale, strict=True)
    ]


def _byte(high: int, low: int) -> tuple[str, str, str]:
    return "7654 3210", f"{CODE} {CODE}", f"{high:>4} {low:>4}"


MOST_PATTERNS = 24  # of modules that are shown


def draw_artifact(screen: Screen, artifact: Document) -> None:
    """What `inspect` found out."""
    recorded = (
        {"recorded": fidelity_text(fidelity)} if (fidelity := artifact.get("fidelity")) else {}
    )
    for key, value in {**artifact_rows(artifact), **recorded, **_picture(artifact)}.items():
        screen.line(f"{key:<16}{value}")
    for entry in artifact["patterns"][:MOST_PATTERNS]:
        screen.line(f"{entry['modules']:>9}  {entry['form']:<12}  {entry['pattern']}")
    if (more := len(artifact["patterns"]) - MOST_PATTERNS) > 0:
        screen.line(f"{'':<25}and {more} patterns more: --json")
    draw_findings(screen, artifact["findings"])
    draw_verdict(screen, artifact["healthy"], "healthy", "not healthy")


def _picture(artifact: Document) -> dict[str, str]:
    """The bits of a block, where all blocks are of one format."""
    fmt = FORMATS.get(artifact["format"])
    return (
        dict(
            zip(
                ("bits", "meaning", "elements"),
                draw_block(fmt, artifact["nibble_order"]),
                strict=True,
            )
        )
        if fmt
        else {}
    )


MOST_SHOWN, MOST_COMPARED = 5, 10  # tensors
SIDES = {
    "artifact": "artifact",
    "formats": "formats",
    "dialect": "dialect",
    "scale_rule": "scale rule",
    "scale_layout": "scale layout",
    "quantized": "quantized",
    "bits_per_weight": "bits per weight",
    "sqnr_db_mean": "SQNR dB, mean",
    "sqnr_db_min": "SQNR dB, worst",
    "worst": "worst tensor",
    "output_error": "output error",
}
FORMS = {"bits_per_weight": ".3f", "sqnr_db_mean": ".2f", "sqnr_db_min": ".2f", "output_error": ""}


def draw_verification(screen: Screen, report: Document) -> None:
    """The totals and the worst tensors: by their outputs where these were measured, else by their weights."""
    tensors, summary, has_outputs = report["tensors"], report["summary"], "inputs" in report
    worst = sorted(tensors, key=_output_badness if has_outputs else _badness)[:MOST_SHOWN]
    if worst:
        keys = {"sqnr_db": ".2f", "mse": ".3g", "max_abs": ".3g", "cosine": ".6f"}
        rows = [
            [tensor["name"], *(number(tensor[key], form) for key, form in keys.items())]
            for tensor in worst
        ]
        headings = ["worst tensors", "SQNR dB", "MSE", "max |error|", "cosine"]
        if has_outputs:
            headings.append("output error")
            rows = [
                [*row, percent(tensor["output_error"])]
                for row, tensor in zip(rows, worst, strict=True)
            ]
        screen.table(headings, rows)
        mean, low = number(summary["sqnr_db_mean"], ".2f"), number(summary["sqnr_db_min"], ".2f")
        nmse = number(summary["nmse"], ".4g")
        screen.line(f"{len(tensors)} tensors: SQNR mean {mean} dB, lowest {low} dB; NMSE {nmse}")
        if has_outputs:
            mean, most = percent(summary["output_error_mean"]), percent(summary["output_error_max"])
            screen.line(f"output error: mean {mean}, largest {most}; inputs: {report['inputs']}")
    if recorded := report["recorded"]:
        screen.line(f"recorded when it was quantized: {fidelity_text(recorded)}")
    draw_findings(screen, report["findings"])
    draw_verdict(screen, report["passed"], "passed", "failed")


def draw_comparison(screen: Screen, found: Document) -> None:
    """What both artifacts are, the linear layers that differ most, and who holds how many of them better."""
    screen.table(
        ("", "a", "b"),
        [(words, *(_side_text(found[side], key) for side in "ab")) for key, words in SIDES.items()],
    )
    screen.line("")
    ranked = sorted(found["tensors"], key=_contrast, reverse=True)
    headings = (
        "linear layers that differ most",
        "a",
        "SQNR dB",
        "output error",
        "b",
        "SQNR dB",
        "output error",
        "b - a",
        "better",
    )
    screen.table(headings, [_contrast_row(tensor) for tensor in ranked[:MOST_COMPARED]])
    if len(ranked) > MOST_COMPARED:
        screen.line(f"and {len(ranked) - MOST_COMPARED} more: --json has them all")
    totals = found["totals"]
    counts = [f"quantized by both {totals['quantized_by_both']}"]
    counts += [
        f"by {side} alone {totals[f'quantized_by_{side}_alone']}"
        for side in "ab"
        if totals[f"quantized_by_{side}_alone"]
    ]
    screen.line(f"{totals['compared']} linear layers: {', '.join(counts)}")
    mean = number(totals["difference_db_mean"], "+.2f")
    judged = any(tensor["better"] for tensor in found["tensors"])
    better = f"a is better on {totals['better_a']}, b on {totals['better_b']}, equal on {totals['equal']}"
    if judged:
        screen.line(
            f"{better}, by output error; SQNR of b - a {mean} dB on average; inputs: {found['inputs']}",
            "bold",
        )
    for side in "ab":
        draw_findings(
            screen,
            (
                {**finding, "detail": f"{side}: {finding['detail']}"}
                for finding in found[side]["findings"]
            ),
        )
    if not found["passed"]:
        draw_verdict(
            screen,
            False,
            "",
            "failed: what findings name is judged by nobody" if judged else "failed: no verdict",
        )


def _side_text(side: Document, key: str) -> str:
    value = side[key]
    if value is None:
        return "-"
    if key in FORMS:
        return percent(value) if key == "output_error" else format(value, FORMS[key])
    return ", ".join(value) if isinstance(value, list) else str(value)


def _contrast(tensor: Document) -> float:
    """How far the two are apart, as a difference of output errors; those of which nothing can be said come first."""
    a, b = ((tensor[side] or {}).get("output_error") for side in "ab")
    return math.inf if a is None or b is None else abs(a - b)


def _contrast_row(tensor: Document) -> list[str]:
    cells = [tensor["name"]]
    for side in "ab":
        held = tensor[side]
        lost = (
            [number(held["sqnr_db"], ".2f"), percent(held["output_error"])] if held else ["-", "-"]
        )
        cells += [held["stored"] if held else "not there", *lost]
    return [*cells, number(tensor["difference_db"], "+.2f"), tensor["better"] or "-"]


def draw_codes(screen: Screen, known: Document) -> None:
    """Every code in a line."""
    width = max(len(one["code"]) for one in (*known["findings"], *known["errors"]))
    screen.line("findings of inspect and verify", "bold")
    for one in known["findings"]:
        screen.line(f"  {one['code']:{width}}  {one['meaning']}")
    screen.line("errors, with the exit code of the command", "bold")
    for one in known["errors"]:
        screen.line(f"  {one['code']:{width}}  {_exits(one)}: {one['meaning']}")


def draw_code(screen: Screen, explained: Document) -> None:
    """What one code means, where it comes from, and what to do."""
    finding, failure = explained["finding"], explained["error"]
    if finding:
        screen.line(f"{explained['code']}: a finding ({', '.join(finding['levels'])})", "bold")
        _draw_rows(
            screen,
            {"means": finding["meaning"], "seen": finding["seen"], "what to do": finding["remedy"]},
        )
    if failure:
        screen.line(f"{explained['code']}: an error (exit code {_exits(failure)})", "bold")
        _draw_rows(
            screen,
            {
                "means": failure["meaning"],
                "comes from": failure["origin"],
                "what to do": failure["remedy"],
            },
        )


def _draw_rows(screen: Screen, rows: dict[str, str]) -> None:
    for key, value in rows.items():
        screen.line(f"  {key:<12}{value}")


def _exits(failure: Document) -> str:
    return ", ".join(map(str, failure["exits"]))


def _badness(tensor: Document) -> float:
    return badness(tensor["sqnr_db"], tensor["mse"])


def _output_badness(tensor: Document) -> float:
    return -math.inf if tensor["output_error"] is None else -float(tensor["output_error"])


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3f} %"


WIDEST = 130  # of a sentence, also in a pipe
WHOLE = ("format", "rule", "block", "bits/weight", "SQNR dB", "output error", "")
KIND = ("kind", "matrices", "weights")


def draw_study(screen: Screen, study: Document) -> None:
    """The whole by every form; kinds by the forms that engines read; words."""
    share = 100 * study["sampled_weights"] / study["weights"]
    what = f"{study['sampled_matrices']} of {study['matrices']} matrices, {share:.3g} % of {study['weights']:,} weights"
    screen.line(
        f"{study['source']}: {what}, {size_text(study['sampled_bytes'])} read; inputs: {study['inputs']}",
        "bold",
    )
    screen.table(WHOLE, [_row(way) for way in study["ways"]])
    screen.line("")
    used = [way for way in study["ways"] if not way["for_study"]]
    headings = [f"{way['format']}\n{_rule(way)}" for way in used]
    screen.line("output error of every kind in the forms that engines read, in percent", "bold")
    screen.table(
        (*KIND, *headings), [_kind_row(kind, used, study["weights"]) for kind in study["kinds"]]
    )
    screen.line("")
    for sentence in study["recommendation"]["words"]:
        for line in wrap(sentence, min(screen.width, WIDEST)):
            screen.line(line)


def draw_calibrated(screen: Screen, found: Document) -> None:
    """What `calibrate` wrote."""
    screen.line(found["output"], "bold")
    screen.line(
        f"  {found['samples']} samples, {found['tokens']:,} tokens in {duration_text(found['seconds'])}"
    )
    experts = f", {found['experts']} experts" if found["experts"] else ""
    screen.line(
        f"  statistics of {found['linears']} linear layers{experts}, {size_text(found['output_bytes'])}"
    )
    screen.line(f"  sha256 {found['sha256']}")


def _row(way: dict[str, Any]) -> tuple[str, ...]:
    sqnr = "exact" if way["sqnr_db"] is None else f"{way['sqnr_db']:.2f}"
    block = "" if way["block"] is None else str(way["block"])
    numbers = (f"{way['bits_per_weight']:.3f}", sqnr, _percent(way))
    return (
        way["format"],
        way["rule"] or "",
        block,
        *numbers,
        "for study" if way["for_study"] else "",
    )


def _rule(way: dict[str, Any]) -> str:
    """What tells a form from others of its format."""
    return str(way["block"] if isinstance(way["block"], str) else way["rule"] or "")


def _kind_row(kind: dict[str, Any], used: list[dict[str, Any]], weights: int) -> tuple[str, ...]:
    found = {_key(way): way for way in kind["ways"]}
    cells = (
        f"{100 * found[_key(way)]['output_error']:.2f}" if _key(way) in found else ""
        for way in used
    )
    return kind["kind"], str(kind["matrices"]), f"{100 * kind['weights'] / weights:.3g} %", *cells


def _key(way: dict[str, Any]) -> tuple[object, ...]:
    return way["format"], way["rule"], way["block"]


def _percent(way: dict[str, Any]) -> str:
    return f"{100 * way['output_error']:.3f} %"
