"""What `analyze` and `calibrate` found, on a terminal.

Of an analysis every form of the whole, the forms that engines read kind by kind, and advice in words; of a calibration how much
text went through how many layers, and which file came of it.
"""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from fp4convert.progress import duration_text, size_text
from fp4convert.render import Document, Screen

WIDEST = 130  # of a sentence, also in a pipe
WHOLE = ("format", "rule", "block", "bits/weight", "SQNR dB", "output error", "")
KIND = ("kind", "matrices", "weights")


def draw_study(screen: Screen, study: Document) -> None:
    """The whole by every form; kinds by the forms that engines read; words."""
    share = 100 * study["sampled_weights"] / study["weights"]
    what = f"{study['sampled_matrices']} of {study['matrices']} matrices, {share:.3g} % of {study['weights']:,} weights"
    screen.line(f"{study['source']}: {what}, {size_text(study['sampled_bytes'])} read; inputs: {study['inputs']}", "bold")
    screen.table(WHOLE, [_row(way) for way in study["ways"]])
    screen.line("")
    used = [way for way in study["ways"] if not way["for_study"]]
    headings = [f"{way['format']}\n{_rule(way)}" for way in used]
    screen.line("output error of every kind in the forms that engines read, in percent", "bold")
    screen.table((*KIND, *headings), [_kind_row(kind, used, study["weights"]) for kind in study["kinds"]])
    screen.line("")
    for sentence in study["recommendation"]["words"]:
        for line in wrap(sentence, min(screen.width, WIDEST)):
            screen.line(line)


def draw_calibrated(screen: Screen, found: Document) -> None:
    """What `calibrate` wrote."""
    screen.line(found["output"], "bold")
    screen.line(f"  {found['samples']} samples, {found['tokens']:,} tokens in {duration_text(found['seconds'])}")
    experts = f", {found['experts']} experts" if found["experts"] else ""
    screen.line(f"  statistics of {found['linears']} linear layers{experts}, {size_text(found['output_bytes'])}")
    screen.line(f"  sha256 {found['sha256']}")


def _row(way: dict[str, Any]) -> tuple[str, ...]:
    sqnr = "exact" if way["sqnr_db"] is None else f"{way['sqnr_db']:.2f}"
    block = "" if way["block"] is None else str(way["block"])
    numbers = (f"{way['bits_per_weight']:.3f}", sqnr, _percent(way))
    return way["format"], way["rule"] or "", block, *numbers, "for study" if way["for_study"] else ""


def _rule(way: dict[str, Any]) -> str:
    """What tells a form from others of its format."""
    return str(way["block"] if isinstance(way["block"], str) else way["rule"] or "")


def _kind_row(kind: dict[str, Any], used: list[dict[str, Any]], weights: int) -> tuple[str, ...]:
    found = {_key(way): way for way in kind["ways"]}
    cells = (f"{100 * found[_key(way)]['output_error']:.2f}" if _key(way) in found else "" for way in used)
    return kind["kind"], str(kind["matrices"]), f"{100 * kind['weights'] / weights:.3g} %", *cells


def _key(way: dict[str, Any]) -> tuple[object, ...]:
    return way["format"], way["rule"], way["block"]


def _percent(way: dict[str, Any]) -> str:
    return f"{100 * way['output_error']:.3f} %"
