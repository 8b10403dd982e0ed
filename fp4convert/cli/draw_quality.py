"""Draw the documents of commands that check and measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    "bits_quantized": "of quantized ones",
    "sqnr_db_mean": "SQNR dB, mean",
    "sqnr_db_min": "SQNR dB, worst",
    "worst": "worst tensor",
    "output_error": "output error",
    "best": "best on",
}
SHORT = ("artifact", "formats", "bits_per_weight", "sqnr_db_mean", "output_error", "best")
FORMS = {
    "bits_per_weight": ".3f",
    "bits_quantized": ".3f",
    "sqnr_db_mean": ".2f",
    "sqnr_db_min": ".2f",
}
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
    if "gpu" in artifact:
        from fp4convert.engines.gpus import lines_of

        for line in lines_of(artifact["gpu"]):
            screen.line(line, hang=4)
    draw_findings(screen, artifact["findings"])
    good = "healthy by its records and scales; verify --source compares the values"
    if source := artifact.get("source"):
        good = f"healthy; a sample of its values matches {source}"
    bad = _bad_word(artifact["findings"], "not healthy")
    draw_verdict(screen, artifact["healthy"], good, bad)


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
    from fp4convert.quality.evaluation import UsualSqnr
    from fp4convert.quality.verification import NO_FAULT

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
        if usual := report["usual"]:
            screen.line(UsualSqnr(**usual).words)
        if has_outputs:
            mean, most = percent(summary["output_error_mean"]), percent(summary["output_error_max"])
            screen.line(f"output error: mean {mean}, largest {most}; {_inputs_text(report)}")
    if recorded := report["recorded"]:
        screen.line(f"recorded when it was quantized: {fidelity_text(recorded)}")
    draw_findings(screen, report["findings"], len(tensors), most_lines(report["verdict"]))
    word = "passed" if report["checked"]["gated"] else NO_FAULT
    bad = _bad_word(report["findings"], "failed")
    draw_verdict(screen, report["passed"], f"{word}: {_checked_text(report['checked'])}", bad)


def _bad_word(findings: Sequence[Document], word: str) -> str:
    from fp4convert.quality.checks import fault_word

    return fault_word((one["code"] for one in findings if one["level"] == "error"), word)


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
    """Draw the verdict, the artifacts and the layers that differ most."""
    sides, verdict, is_well = found["artifacts"], found["verdict"], found["passed"] is not False
    screen.line(verdict["words"], "bold" if is_well else "bold red")
    _draw_ranking(screen, found)
    # the artifacts as a whole
    has_best = verdict["by"] == "output_error"
    keys = [key for key in (SIDES if len(sides) <= MOST_BESIDE else SHORT) if key != "best"]
    keys += ["best"] * has_best
    table = [[_side_text(one, key) for key in keys] for one in sides.values()]
    if len(sides) <= MOST_BESIDE:
        cells = zip(*table, strict=True)
        screen.table(
            ("", *sides), [(SIDES[key], *row) for key, row in zip(keys, cells, strict=True)]
        )
        screen.line("")
        _draw_layers(screen, found, has_best)
    else:
        rows = [(name, *row) for name, row in zip(sides, table, strict=True)]
        screen.table(("", *(SIDES[key] for key in keys)), rows)
    # the number of quantized layers, and the differences of SQNR
    totals = found["totals"]
    counts = [f"quantized by all {totals['quantized_by_all']}"]
    for letter, alone in totals["quantized_by_one"].items():
        if alone:
            counts.append(f"by {letter} alone {alone}")
    screen.line(f"{totals['compared']} linear layers: {', '.join(counts)}")
    for letter, side in sides.items():
        if totals["judged"] and letter != "a" and (mean := side["difference_db_mean"]) is not None:
            screen.line(f"SQNR of {letter} - a: {mean:+.2f} dB on average")
    for letter, side in sides.items():
        told = ({**one, "detail": f"{letter}: {one['detail']}"} for one in side["findings"])
        draw_findings(screen, told)
    if not is_well:
        draw_verdict(screen, False, "", "failed")


def _draw_ranking(screen: Screen, found: Document) -> None:
    """Draw the artifacts by their KL, and the cost of layers."""
    sides, rows = found["artifacts"], []
    for one in found["verdict"]["ranking"]:
        known = sides[one["letter"]]["predictions"]
        difference = _with_error(one["difference"], one["difference_se"], "+.2g")
        figures = (_with_error(one["kl"], one["se"], ".5g"), difference, f"{known['top1']:.2%}")
        bits, ppl = number(one["bits_per_weight"], ".3f"), f"{known['ppl']['artifact']:.5g}"
        rows.append((one["letter"], bits, *figures, ppl, known["grade"]))
    if not rows:
        return
    headings = ("bits", "KL, nats", "to the one above", "same top", "perplexity", "grade")
    screen.table(("by KL", *headings), rows)
    for letter, side in sides.items():
        known = side["predictions"]
        if known["activations"] != 16 or known["kv_cache"]:
            cache = known["kv_cache"] or "16-bit"
            screen.line(f"{letter}: {known['activations']}-bit activations, KV cache {cache}")
    text = f"{known['tokens']:,} tokens in {known['windows']} windows"
    screen.line(f"{text}; perplexity of the source {known['ppl']['source']:.5g}")
    _draw_costs(screen, {letter: side["predictions"] for letter, side in sides.items()})


def _draw_layers(screen: Screen, found: Document, has_best: bool) -> None:
    """Draw the linear layers that differ most, by the same inputs."""
    sides = found["artifacts"]
    lost = ("SQNR dB", "output error") if len(sides) == 2 else ("output error",)
    headings = [word for letter in sides for word in (letter, *lost)]
    ranked = sorted(found["tensors"], key=_output_difference, reverse=True)
    rows = [_contrast_row(tensor, lost)[: None if has_best else -1] for tensor in ranked]
    words = (*headings, *["best"] * has_best)
    screen.table(("linear layers that differ most", *words), rows[:MOST_COMPARED])
    screen.line(_inputs_text(found))
    if len(ranked) > MOST_COMPARED:
        screen.line(f"and {len(ranked) - MOST_COMPARED} more: --json has them all, --report, too")


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


def _with_error(value: float | None, error: float | None, form: str) -> str:
    return number(value, form) + ("" if error is None else f" ± {error:.2g}")


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
