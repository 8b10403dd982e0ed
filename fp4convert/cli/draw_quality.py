"""Draw the documents of commands that check and measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap
from typing import Any

from fp4convert.cli.screen import WIDEST, Screen, draw_findings, draw_verdict
from fp4convert.engines.files import known_engines
from fp4convert.numerics.formats import FP4_FORMATS, Format
from fp4convert.progress import duration_text, size_text
from fp4convert.report.text import (
    Document,
    artifact_rows,
    badness,
    evaluation_rows,
    fidelity_text,
    most_lines,
)

CODE = "seem"  # E2M1, bit 3 first
SCALES = {"fp8_e4m3": "-eeeemmm", "e8m0": "eeeeeeee"}  # of a scale that is positive
SHOWN = 2  # bytes at the beginning of a block, before the dots
UNTRIED = {"read": "read only in", "not-tried": "not tried in"}
MOST_PATTERNS = 24  # of modules that are shown
MOST_SHOWN, MOST_COMPARED = 5, 10  # tensors
GRADES = {"worse than usual": "yellow", "damaged": "bold red"}
MOST_BESIDE = 6  # artifacts beside each other; more are below each other, without their layers
SIDES = {
    "artifact": "artifact",
    "formats": "formats",
    "dialect": "dialect",
    "scale_rule": "scale rule",
    "scale_layout": "scale layout",
    "bytes": "size",
    "quantized": "quantized",
    "bits_per_weight": "bits per weight",
    "sqnr_db_mean": "SQNR dB, mean",
    "sqnr_db_min": "SQNR dB, worst",
    "worst": "worst tensor",
    "output_error": "output error",
    "best": "best on",
}
SHORT = ("artifact", "formats", "bits_per_weight", "sqnr_db_mean", "output_error", "best")
FORMS = {"bits_per_weight": ".3f", "sqnr_db_mean": ".2f", "sqnr_db_min": ".2f"}
WHOLE = ("format", "rule", "block", "bits/weight", "SQNR dB", "output error", "")
KIND = ("kind", "matrices", "weights")


def elements_of(fmt: Format, nibble_order: str) -> list[tuple[int, int]]:
    """Return the two elements in every byte of a block's codes.

    nibble_order  low_first, high_first or half_split, as Traits.nibble_order
    Returns       (element in bits 7-4, element in bits 3-0)
    """
    half = fmt.block_size // 2
    if nibble_order == "half_split":
        return [(byte + half, byte) for byte in range(half)]
    pairs = [(2 * byte + 1, 2 * byte) for byte in range(half)]
    return pairs if nibble_order == "low_first" else [(low, high) for high, low in pairs]


def draw_block(fmt: Format, nibble_order: str) -> list[str]:
    """Draw a block in three lines: bits, their meaning, their elements.

    Raises  ValueError for a format without blocks
    """
    if fmt.scale_dtype not in SCALES:
        raise ValueError(f"{fmt.name} has no blocks to draw")
    columns = [
        ("7654 3210", f"{CODE} {CODE}", f"{high:>4} {low:>4}")
        for high, low in elements_of(fmt, nibble_order)
    ]
    dots = ("   ", "...", "   ")
    scale = ("76543210", SCALES[fmt.scale_dtype], f"all {fmt.block_size}")
    lines = zip(*columns[:SHOWN], dots, columns[-1], scale, strict=True)
    return ["  ".join(line).rstrip() for line in lines]


def draw_artifact(screen: Screen, artifact: Document) -> None:
    """Draw the document of `inspect`."""
    rows = dict(artifact_rows(artifact))
    if fidelity := artifact.get("fidelity"):
        rows["recorded"] = fidelity_text(fidelity)
    # The bits of a block, where all blocks are of one format and in an order of their own.
    if (fmt := FP4_FORMATS.get(artifact["format"])) and artifact["nibble_order"] != "low_first":
        bits = draw_block(fmt, artifact["nibble_order"])
        rows |= dict(zip(("bits", "meaning", "elements"), bits, strict=True))
    for key, value in rows.items():
        screen.line(f"{key:<16}{value}", hang=16)
    for entry in artifact["patterns"][:MOST_PATTERNS]:
        screen.line(f"{entry['modules']:>9}  {entry['form']:<12}  {entry['pattern']}")
    if (more := len(artifact["patterns"]) - MOST_PATTERNS) > 0:
        screen.line(f"{'':<25}and {more} more patterns: --json")
    _draw_engines(screen, artifact)
    draw_findings(screen, artifact["findings"])
    good = "healthy by its records and scales; verify --source compares the values"
    if source := artifact.get("source"):
        good = f"healthy; a sample of its values matches {source}"
    draw_verdict(screen, artifact["healthy"], good, "not healthy")


def _draw_engines(screen: Screen, artifact: Document) -> None:
    """Draw the engines that load it, and others that read its dialect."""
    if not artifact["healthy"]:
        return
    readers = {engine.key for engine in known_engines() if artifact["dialect"] in engine.dialects}
    for verdict in artifact["engines"]:
        name = f"{verdict['engine']:<13} {verdict['versions']:<10}"
        if verdict["loads"]:
            screen.line(f"{'loads in':<16}{name.rstrip()}")
        elif verdict["engine"] in readers:
            word = "not in" if verdict["loads"] is False else UNTRIED[verdict["evidence"]]
            screen.line(f"{word:<16}{name} {verdict['why']}", "yellow")


def draw_verification(screen: Screen, report: Document) -> None:
    """Draw the totals of `verify` and the tensors with the largest errors.

    Output errors where they were measured, else errors of weights.
    """
    if report["verdict"]:
        screen.line(report["verdict"], "bold red")
    tensors, summary, has_outputs = report["tensors"], report["summary"], "inputs" in report

    def rank(tensor: Document) -> float:
        if not has_outputs:
            return badness(tensor["sqnr_db"], tensor["mse"])
        return -math.inf if tensor["output_error"] is None else -float(tensor["output_error"])

    if worst := sorted(tensors, key=rank)[:MOST_SHOWN]:
        keys = {"sqnr_db": ".2f", "mse": ".3g", "max_abs": ".3g", "cosine": ".6f"}
        headings = ["worst tensors", "SQNR dB", "MSE", "max |error|", "cosine"]
        rows = [[each["name"], *(number(each[key], keys[key]) for key in keys)] for each in worst]
        if has_outputs:
            headings.append("output error")
            for row, tensor in zip(rows, worst, strict=True):
                row.append(percent(tensor["output_error"]))
        screen.table(headings, rows)
        mean, low = number(summary["sqnr_db_mean"], ".2f"), number(summary["sqnr_db_min"], ".2f")
        nmse = number(summary["nmse"], ".4g")
        screen.line(f"{len(tensors)} tensors: SQNR mean {mean} dB, lowest {low} dB; NMSE {nmse}")
        if has_outputs:
            mean, most = percent(summary["output_error_mean"]), percent(summary["output_error_max"])
            screen.line(f"output error: mean {mean}, largest {most}; {_inputs_text(report)}")
    if recorded := report["recorded"]:
        screen.line(f"recorded when it was quantized: {fidelity_text(recorded)}")
    draw_findings(screen, report["findings"], len(tensors), most_lines(report["verdict"]))
    from fp4convert.quality.verification import NO_FAULT

    word = "passed" if report["checked"]["gated"] else NO_FAULT
    draw_verdict(screen, report["passed"], f"{word}: {_checked_text(report['checked'])}", "failed")


def _inputs_text(document: Document) -> str:
    """Return the inputs of the output errors, and the option for real ones."""
    better = "" if document["calibration"] else " (random; --calibration FILE for recorded ones)"
    return f"inputs: {document['inputs']}{better}"


def _checked_text(checked: Document) -> str:
    """Return the parts that were checked, and the option for the others."""
    hashed = f"{checked['files']} files hashed" if checked["files"] else "no hashes are recorded"
    read = f"scales of {checked['modules']} modules read"
    if word := checked["signature"]:
        read = f"{read}, signature {word}"
    if checked["source"]:
        return f"{hashed}, {read}, {checked['tensors']} tensors compared with {checked['source']}"
    return f"{hashed}, {read}; values were not compared: add --source"


def draw_comparison(screen: Screen, found: Document) -> None:
    """Draw the artifacts, the layers that differ most, and the verdict."""
    # the artifacts as a whole
    sides = found["artifacts"]
    if len(sides) <= MOST_BESIDE:
        rows = [(SIDES[key], *(_side_text(one, key) for one in sides.values())) for key in SIDES]
        screen.table(("", *sides), rows)
        screen.line("")
        _draw_layers(screen, found)
    else:
        rows = [(name, *(_side_text(one, key) for key in SHORT)) for name, one in sides.items()]
        screen.table(("", *(SIDES[key] for key in SHORT)), rows)
    # the number of quantized layers, and the best artifacts
    totals = found["totals"]
    counts = [f"quantized by all {totals['quantized_by_all']}"]
    for letter, alone in totals["quantized_by_one"].items():
        if alone:
            counts.append(f"by {letter} alone {alone}")
    screen.line(f"{totals['compared']} linear layers: {', '.join(counts)}")
    _draw_best(screen, found)
    is_well = found["passed"] is not False
    _draw_predictions(screen, sides, is_well)
    for letter, side in sides.items():
        told = ({**one, "detail": f"{letter}: {one['detail']}"} for one in side["findings"])
        draw_findings(screen, told)
    if not is_well:
        why = "a module with a finding counts for no best"
        draw_verdict(screen, False, "", f"failed: {why if totals['judged'] else 'no verdict'}")


def _draw_layers(screen: Screen, found: Document) -> None:
    """Draw the linear layers that differ most."""
    sides = found["artifacts"]
    lost = ("SQNR dB", "output error") if len(sides) == 2 else ("output error",)
    headings = [word for letter in sides for word in (letter, *lost)]
    ranked = sorted(found["tensors"], key=_output_difference, reverse=True)
    screen.table(
        ("linear layers that differ most", *headings, "best"),
        [_contrast_row(tensor, lost) for tensor in ranked[:MOST_COMPARED]],
    )
    if len(ranked) > MOST_COMPARED:
        screen.line(f"and {len(ranked) - MOST_COMPARED} more: --json has them all, --report, too")


def _draw_best(screen: Screen, found: Document) -> None:
    """Draw the number of layers on which each is best, if that was judged."""
    sides, totals = found["artifacts"], found["totals"]
    if not totals["judged"]:
        return
    best = ", ".join(f"{letter} on {side['best']}" for letter, side in sides.items())
    how = f"several alike on {totals['shared']}, by output error"
    screen.line(f"best: {best}; {how}; {_inputs_text(found)}", "bold")
    for letter, side in sides.items():
        if letter != "a" and (mean := side["difference_db_mean"]) is not None:
            screen.line(f"SQNR of {letter} - a: {mean:+.2f} dB on average")


def _draw_predictions(screen: Screen, sides: Document, is_ranked: bool) -> None:
    """Draw the loss of each artifact's predictions, if a text was read."""
    if not all("predictions" in side for side in sides.values()):
        return
    known = {letter: side["predictions"] for letter, side in sides.items()}
    rows = [{**evaluation_rows(each), "grade": each["grade"]} for each in known.values()]
    keys = dict.fromkeys(key for row in rows for key in row)
    table = [(key, *(row.get(key, "-") for row in rows)) for key in keys]
    screen.table(("predictions", *known), table)
    _draw_costs(screen, known)
    if not is_ranked:
        return
    from fp4convert.quality.comparison import is_alike

    means = {letter: each["kl"]["mean"] for letter, each in known.items()}
    ranked = sorted(means, key=means.__getitem__)
    words = ranked[0]
    for before, after in pairwise(ranked):
        words += f" {'=' if is_alike(means[before], means[after]) else '<'} {after}"
    screen.line(f"mean KL divergence, least first: {words}", "bold")


def _side_text(side: Document, key: str) -> str:
    """Return one value of an artifact in words."""
    value = side[key]
    if value is None:
        return "-"
    if key in FORMS:
        return format(value, FORMS[key])
    if key in ("output_error", "bytes"):
        return percent(value) if key == "output_error" else size_text(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def _output_difference(tensor: Document) -> float:
    """Return the range of the output errors; infinity if one is unknown."""
    errors = [(held or {}).get("output_error") for held in tensor["held"].values()]
    known = [error for error in errors if error is not None]
    return math.inf if len(known) < len(errors) else max(known) - min(known)


def _contrast_row(tensor: Document, lost: Sequence[str]) -> list[str]:
    """Return the cells of one linear layer."""
    cells = [tensor["name"]]
    for held in tensor["held"].values():
        if not held:
            cells += ["not there", *("-" for _ in lost)]
            continue
        known = {
            "SQNR dB": number(held["sqnr_db"], ".2f"),
            "output error": percent(held["output_error"]),
        }
        cells += [held["stored"], *(known[key] for key in lost)]
    best = tensor["best"]
    if best is None:
        return [*cells, "-"]
    return [*cells, "all" if len(best) == len(tensor["held"]) else ", ".join(best)]


def number(value: float | None, form: str, unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3f} %"


def draw_study(screen: Screen, study: Document) -> None:
    """Draw the document of `analyze`: all forms, all kinds, and advice."""
    # what was sampled
    share = 100 * study["sampled_weights"] / study["weights"]
    matrices = f"{study['sampled_matrices']} of {study['matrices']} matrices"
    what = f"{matrices}, {share:.3g} % of {study['weights']:,} weights"
    read = f"{size_text(study['sampled_bytes'])} read; inputs: {study['inputs']}"
    screen.line(f"{study['source']}: {what}, {read}", "bold")
    # the whole by every form
    rows = []
    for way in study["ways"]:
        block = "" if way["block"] is None else str(way["block"])
        errors = (number(way["sqnr_db"], ".2f", "exact"), percent(way["output_error"]))
        use = "for study" if way["for_study"] else ""
        bits = f"{way['bits_per_weight']:.3f}"
        rows.append((way["format"], way["rule"] or "", block, bits, *errors, use))
    screen.table(WHOLE, rows)
    screen.line("")
    # kinds by the forms that engines read, each told from others of its format
    used = [way for way in study["ways"] if not way["for_study"]]
    headings = []
    for way in used:
        told_by = way["block"] if isinstance(way["block"], str) else way["rule"]
        headings.append(f"{way['format']}\n{told_by or ''}")
    screen.line("output error of every kind in the forms that engines read, in percent", "bold")
    kinds = [_kind_row(kind, used, study["weights"]) for kind in study["kinds"]]
    screen.table((*KIND, *headings), kinds)
    screen.line("")
    for sentence in study["recommendation"]["words"]:
        for line in wrap(sentence, min(screen.width, WIDEST)):
            screen.line(line)


def _kind_row(kind: dict[str, Any], used: list[dict[str, Any]], weights: int) -> tuple[str, ...]:
    """Return the cells of one kind of module: its share and errors."""
    keys = ("format", "rule", "block")
    errors = {tuple(way[key] for key in keys): way["output_error"] for way in kind["ways"]}
    known = [errors.get(tuple(way[key] for key in keys)) for way in used]
    cells = ("" if error is None else f"{100 * error:.2f}" for error in known)
    return kind["kind"], str(kind["matrices"]), f"{100 * kind['weights'] / weights:.3g} %", *cells


def draw_evaluation(screen: Screen, found: Document) -> None:
    """Draw the figures of `evaluate`, and the layers that cost most."""
    for key, value in evaluation_rows(found).items():
        style = GRADES.get(found["grade"], "") if key == "grade" else ""
        screen.line(f"{key:<16}{value}", style, hang=16)
    _draw_costs(screen, {"": found})
    draw_findings(screen, found["findings"])
    if found["passed"] is None:
        from fp4convert.quality.evaluation import NO_GATE

        screen.line(NO_GATE, "bold")
    else:
        draw_verdict(screen, found["passed"], "passed", "failed")


def _draw_costs(screen: Screen, known: Document) -> None:
    """Draw the cost of each layer in each artifact, if that was measured."""
    costs = {
        letter: {row["layer"]: row for row in each["by_layer"]} for letter, each in known.items()
    }
    layers = dict.fromkeys(layer for rows in costs.values() for layer in rows)
    if not layers:
        return
    words = ("KL alone", "KL with all before it")
    headings = [f"{letter} {word}".strip() for letter in costs for word in words]
    keys = ("alone", "cumulated")
    table = [
        (layer, *(number(rows[layer][key], ".4g") for rows in costs.values() for key in keys))
        for layer in layers
    ]
    screen.table(("layer", *headings), table)


def draw_calibrated(screen: Screen, found: Document) -> None:
    """Draw the document of `calibrate`."""
    screen.unwrapped(found["output"], "bold")
    seconds = duration_text(found["seconds"])
    screen.line(f"  {found['samples']} samples, {found['tokens']:,} tokens in {seconds}")
    experts = f", {found['experts']} experts" if found["experts"] else ""
    linears = f"statistics of {found['linears']} linear layers{experts}"
    screen.line(f"  {linears}, {size_text(found['output_bytes'])}")
    screen.line(f"  sha256 {found['sha256']}")
