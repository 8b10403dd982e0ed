"""Write a comparison as a page, and its figures as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fp4convert.checkpoint.module_names import Numbers
from fp4convert.errors import InputError
from fp4convert.progress import size_text
from fp4convert.quality import comparison
from fp4convert.quality.source_compare import mean_output_error
from fp4convert.report.datasheet import round_figure
from fp4convert.report.html import COMPARISON, PAGE, check_page, make_page
from fp4convert.report.places import find_places, group_names, reading_order
from fp4convert.report.text import (
    Document,
    count_levels,
    escape,
    explain_findings,
    fold_findings,
    make_visible,
)
from fp4convert.report.user_files import Paper, check_apart, check_place, write_papers
from fp4convert.version import __version__

PRODUCER = "fp4convert compare"
FIRST_COLUMNS = ("layer", "weights", "best")  # of the CSV
OF_EACH = ("stored", "bits_per_weight", "sqnr_db", "nmse", "output_error", "difference_db")
_FIRST = "".join(f'"{name}",' for name in (*FIRST_COLUMNS, f"a_{OF_EACH[0]}"))
TABLE = Paper("--report", "FILE.html", _FIRST)
FIGURES = Paper("--report", "FILE.html", f'{{\n  "producer": "{PRODUCER}",\n')
MOST_CHARTS = 24
ROOM, OF_ROW, OF_SIDE = (
    150_000,
    20,
    45,
)  # bytes for charts and rows, for a row, and for an artifact in it
# Signs that a spreadsheet takes for the beginning of a formula, wide ones among them.
FORMULAS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
Row = tuple[str, list[str], list[int]]  # a word, the cells of artifacts, the places of the best
# What the table of layers shows, and how: key, words, kind, digits, and whether the most is best.
METRICS = (
    ("output_error", "output error", "share", 0, False),
    ("sqnr_db", "SQNR, dB", "number", 2, True),
    ("bits_per_weight", "bits per weight", "number", 3, False),
    ("stored", "stored as", "text", 0, False),
)


def check_comparison(page: Path, folders: Iterable[Path | None]) -> None:
    """Raise OutputError if the page or a file beside it cannot be written.

    folders  of the artifacts on this disk
    Raises   InputError for a name of a file beside it, or a place in an artifact's folder
    """
    check_page(page)
    table, figures = _beside(page)
    if page.suffix.lower() in (table.suffix, figures.suffix):
        detail = f"--report {page} is the name of the figures beside the page"
        raise InputError("usage", f"{detail}; expected FILE.html", "Give --report FILE.html.")
    for folder in folders:
        check_apart({PAGE: page, TABLE: table, FIGURES: figures}, folder)
    check_place(table, TABLE)
    check_place(figures, FIGURES)


def save_comparison(page: Path, found: Document) -> str:
    """Write the page of `compare`, and its figures beside it.

    found    the document of `compare --json`
    Returns  a line that names the files
    Raises   OutputError if a file cannot be written
    """
    table, figures = _beside(page)
    text = json.dumps({"producer": PRODUCER, **found}, indent=2, allow_nan=False)
    sheet = make_page(make_sheet(found), COMPARISON)
    write_papers(
        (page, sheet, PAGE), (table, make_table(found), TABLE), (figures, f"{text}\n", FIGURES)
    )
    return f"report: {page}, {size_text(page.stat().st_size)}; figures: {table}, {figures}"


def _beside(page: Path) -> tuple[Path, Path]:
    return page.with_suffix(".csv"), page.with_suffix(".json")


def make_table(found: Document) -> str:
    """Return the CSV: linear layers by rows, artifacts by columns.

    Unknown figures are empty.  Names of layers are visible text (text.escape).
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    letters = list(found["artifacts"])
    writer.writerow([*FIRST_COLUMNS, *(f"{each}_{key}" for each in letters for key in OF_EACH)])
    for row in found["tensors"]:
        name = escape(row["name"])
        safe = f"'{name}" if name.startswith(FORMULAS) else name
        held = [(row["held"][each] or {}).get(key) for each in letters for key in OF_EACH]
        cells = ["" if value is None else value for value in held]
        best = " ".join(row["best"] or ())
        writer.writerow([safe, row["weights"], best, *cells])
    return stream.getvalue()


def make_sheet(found: Document) -> Document:
    """Return the keys that page/comparison.js reads."""
    sides = found["artifacts"]
    verdict, unfair = found["verdict"], _why_unfair(found)
    words = f"{'failed; ' if found['passed'] is False else ''}{verdict['words']}"
    findings = [
        {**each, "lead": f"{letter}: {each['lead']}"}
        for letter, side in sides.items()
        for each in fold_findings(side["findings"])
    ]
    levels = count_levels([each for side in sides.values() for each in side["findings"]])
    charts = _charts(found)
    room = ROOM - len(json.dumps(charts[:MOST_CHARTS], separators=(",", ":")))
    rows = _grouped(found["tensors"], list(sides), max(room, ROOM // 5))
    more = f" The first {MOST_CHARTS} of {len(charts)} kinds." if len(charts) > MOST_CHARTS else ""
    kl = [
        side["predictions"]["kl"]["mean"] if "predictions" in side else None
        for side in sides.values()
    ]
    has_kl = None not in kl
    sheet = {
        "title": f"{len(sides)} artifacts of {found['source']}",
        "verdict": {"is_good": found["passed"], "words": f"{words}{levels}"},
        "about": f"{found['totals']['compared']:,} linear layers; their inputs: {found['inputs']}.",
        "artifacts": [
            {
                "letter": letter,
                "name": side["artifact"],
                "bits": round_figure(side["bits_per_weight"]),
                "output_error": round_figure(side["output_error"]),
                "kl": round_figure(mean),
            }
            for (letter, side), mean in zip(sides.items(), kl, strict=True)
        ],
        "rows": _rows(found, verdict["by"] == "output_error" and not unfair),
        "fairness": f"No means of layers are ranked: {unfair}." if unfair else "",
        "is_ranked": verdict["by"] == "output_error",
        "against": {
            "key": "kl" if has_kl else "output_error",
            "word": "mean KL, nats" if has_kl else "output error",
            "kind": "number" if has_kl else "share",
        },
        "charts": charts[:MOST_CHARTS],
        "depth": "The output error of each kind of module, from the first layer to the last;"
        f" experts of a layer are one.{more}",
        "metrics": [
            dict(zip(("key", "word", "kind", "digits", "is_most"), metric, strict=True))
            for metric in METRICS
        ],
        "layers": {
            "name": [row["name"] for row in rows],
            "weights": [row["weights"] for row in rows],
            "best": [[list(sides).index(each) for each in row["best"] or ()] for row in rows],
            **{key: [_column(rows, letter, key) for letter in sides] for key, *_ in METRICS},
        },
        "findings": explain_findings(findings),
        "producer": f"fp4convert {__version__}",
    }
    return {key: make_visible(value) for key, value in sheet.items()}


def _grouped(rows: list[Document], letters: list[str], room: int) -> list[Document]:
    """Let layers share rows where each alone makes the page too large."""
    groups = group_names([row["name"] for row in rows], room, OF_ROW + OF_SIDE * len(letters))
    grouped = []
    for label, group in groups:
        row, members = rows[group[0]], [rows[at] for at in group]
        if len(members) > 1:
            held = {letter: _held(members, letter) for letter in letters}
            weights = sum(one["weights"] for one in members)
            row = {"name": label, "weights": weights, "best": None, "held": held}
        grouped.append(row)
    return grouped


def _held(rows: list[Document], letter: str) -> Document | None:
    """Return what an artifact holds of layers, as of one."""
    held = [(row["weights"], one) for row in rows if (one := row["held"][letter])]
    if not held:
        return None
    known = [one["sqnr_db"] for _, one in held if one["sqnr_db"] is not None]
    bits = sum(weights * one["bits_per_weight"] for weights, one in held)
    return {
        "stored": " and ".join(dict.fromkeys(one["stored"] for _, one in held)),
        "output_error": _error_of(rows, letter),
        "sqnr_db": fmean(known) if known else None,
        "bits_per_weight": bits / sum(weights for weights, _ in held),
    }


def _why_unfair(found: Document) -> str:
    """Return the reason why no means of layers are ranked; "" if they are."""
    if found["passed"] is False:
        return "an artifact has failed, as the findings say"
    held = [one for row in found["tensors"] for one in row["held"].values()]
    if all(one and one["output_error"] is not None for one in held):
        return ""
    return "not every artifact has a figure for each of these layers"


def _column(rows: list[Document], letter: str, key: str) -> list[Any]:
    """Return a figure of all layers in one artifact."""
    values = [(row["held"][letter] or {}).get(key) for row in rows]
    if key == "stored":
        return [value or "not there" for value in values]
    return [round_figure(value) for value in values]


def _rows(found: Document, is_fair: bool) -> list[Row]:
    """List the properties and losses of artifacts; closeness is ranked.

    is_fair  means of layers can be ranked
    """
    every = list(found["artifacts"].values())

    def tell(word: str, key: str, form: str, is_ranked: bool = False, is_most: bool = False) -> Row:
        return _ranked(word, [side[key] for side in every], form, is_ranked, is_most)

    rows = [
        ("formats", [", ".join(side["formats"]) or "none" for side in every], []),
        ("dialect", [str(side["dialect"]) for side in every], []),
        ("scale rule", [str(side["scale_rule"] or "-") for side in every], []),
        tell("bits per weight", "bits_per_weight", ".3f"),
        tell("of quantized weights", "bits_quantized", ".3f"),
        ("files", [size_text(side["bytes"]) for side in every], []),
        tell("quantized layers", "quantized", ",d"),
        tell("output error", "output_error", ".3%", is_fair),
        tell("SQNR, mean dB", "sqnr_db_mean", ".2f", is_fair, True),
        ("SQNR, usual dB", [_usual(side["usual"]) for side in every], []),
        tell("SQNR, least dB", "sqnr_db_min", ".2f", is_fair, True),
        *([tell("best on, layers", "best", ",d", is_fair, True)] if is_fair else []),
    ]
    if ranking := found["verdict"]["ranking"]:
        is_ranked = found["verdict"]["by"] == "kl"
        known = [side["predictions"] for side in every]
        steps = {one["letter"]: _step(one) for one in ranking}
        rows += [
            _ranked("mean KL, nats", [each["kl"]["mean"] for each in known], ".5f", is_ranked),
            ("KL over the next closer one's", [steps[letter] for letter in found["artifacts"]], []),
            ("KL, 99.9th percentile", [f"{each['kl']['p999']:.4f}" for each in known], []),
            ("grade", [each["grade"] for each in known], []),
            _ranked("top-1", [each["top1"] for each in known], ".2%", is_ranked, is_most=True),
            ("perplexity", [f"{each['ppl']['artifact']:.4f}" for each in known], []),
            ("perplexity of the source", [f"{each['ppl']['source']:.4f}" for each in known], []),
            ("text", [f"{each['tokens']:,} tokens" for each in known], []),
            ("activations", [f"{each['activations']}-bit" for each in known], []),
            ("KV cache", [each["kv_cache"] or "16-bit" for each in known], []),
        ]
        if any(each["notes"] for each in known):
            rows.append(("known", ["; ".join(each["notes"]) or "-" for each in known], []))
    return rows


def _usual(usual: Document | None) -> str:
    """Return what is usual for a format and method, beside its name."""
    return "-" if usual is None else f"{usual['db']:g} ({usual['format']} by {usual['by']})"


def _ranked(
    word: str,
    values: Sequence[float | None],
    form: str,
    is_ranked: bool,
    is_most: bool = False,
) -> Row:
    """Return the row of a figure; one that is not known is "-"."""
    known = [value for value in values if value is not None]
    cells = ["-" if value is None else format(value, form).replace("%", " %") for value in values]
    # One that lost nothing has no SQNR: what is not known is not worse.
    if not is_ranked or len(known) < len(values):
        return word, cells, []
    best = max(known) if is_most else min(known)
    places = [at for at, value in enumerate(known) if comparison.is_alike(value, best)]
    return word, cells, places if len(places) < len(values) else []


def _step(ranked: Document) -> str:
    """Return the paired difference to the artifact one place closer."""
    if ranked["difference"] is None:
        return "closest"
    error = ranked["difference_se"]
    words = f"{ranked['difference']:+.2g}{'' if error is None else f' ± {error:.2g}'}"
    return f"{words}: alike" if ranked["is_alike"] else words


def _charts(found: Document) -> list[Document]:
    """Return a chart, artifacts by layer, for every module of several layers."""
    sides, rows = found["artifacts"], found["tensors"]
    held: dict[str, dict[str, dict[Numbers, list[Document]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row, place in zip(rows, find_places([row["name"] for row in rows]), strict=True):
        held[place.tower][place.module][place.layer].append(row)
    charts = []
    costs = [side.get("predictions", {}).get("by_layer") for side in sides.values()]
    if all(costs):
        names = [row["layer"] for row in costs[0]]
        values = [[round_figure(row["alone"]) for row in each] for each in costs]
        title = "KL of the predictions with one layer quantized alone, nats"
        charts.append({"title": title, "layers": names, "values": values, "kind": "number"})
    for tower, modules in held.items():
        for module in reading_order(modules):
            layers = modules[module]
            if len(layers) < 2:
                continue
            order = sorted(layers)
            charts.append(
                {
                    "title": f"{tower}.*.{module}" if tower else module,
                    "layers": [".".join(map(str, layer)) for layer in order],
                    "values": [
                        [round_figure(_error_of(layers[layer], letter)) for layer in order]
                        for letter in sides
                    ],
                    "kind": "share",
                }
            )
    return charts


def _error_of(rows: list[Document], letter: str) -> float | None:
    """Return the output error of an artifact in one place, its experts as one."""
    held = [(row["weights"], row["held"][letter]) for row in rows]
    return mean_output_error((weights, one["output_error"]) for weights, one in held if one)
