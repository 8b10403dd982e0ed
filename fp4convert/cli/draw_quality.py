"""What `verify` and `compare` found and what `explain` explains, on a terminal."""

from __future__ import annotations

import math

from fp4convert.render import Document, Screen, badness, draw_findings, draw_verdict, fidelity_text

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
        rows = [[tensor["name"], *(number(tensor[key], form) for key, form in keys.items())] for tensor in worst]
        headings = ["worst tensors", "SQNR dB", "MSE", "max |error|", "cosine"]
        if has_outputs:
            headings.append("output error")
            rows = [[*row, percent(tensor["output_error"])] for row, tensor in zip(rows, worst, strict=True)]
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
    screen.table(("", "a", "b"), [(words, *(_side_text(found[side], key) for side in "ab")) for key, words in SIDES.items()])
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
    counts += [f"by {side} alone {totals[f'quantized_by_{side}_alone']}" for side in "ab" if totals[f"quantized_by_{side}_alone"]]
    screen.line(f"{totals['compared']} linear layers: {', '.join(counts)}")
    mean = number(totals["difference_db_mean"], "+.2f")
    judged = any(tensor["better"] for tensor in found["tensors"])
    better = f"a is better on {totals['better_a']}, b on {totals['better_b']}, equal on {totals['equal']}"
    if judged:
        screen.line(f"{better}, by output error; SQNR of b - a {mean} dB on average; inputs: {found['inputs']}", "bold")
    for side in "ab":
        draw_findings(screen, ({**finding, "detail": f"{side}: {finding['detail']}"} for finding in found[side]["findings"]))
    if not found["passed"]:
        draw_verdict(screen, False, "", "failed: what findings name is judged by nobody" if judged else "failed: no verdict")


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
        lost = [number(held["sqnr_db"], ".2f"), percent(held["output_error"])] if held else ["-", "-"]
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
        _draw_rows(screen, {"means": finding["meaning"], "seen": finding["seen"], "what to do": finding["remedy"]})
    if failure:
        screen.line(f"{explained['code']}: an error (exit code {_exits(failure)})", "bold")
        _draw_rows(screen, {"means": failure["meaning"], "comes from": failure["origin"], "what to do": failure["remedy"]})


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
