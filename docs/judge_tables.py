"""Write what engines' own loaders made of artifacts, from the results of `make engines`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from engine_tables import table

JUDGES = Path(__file__).parent.parent / "tests" / "engines" / "judges"
RESULTS = JUDGES / "results"
OPTIONS = {
    "": "",
    "mixed": ", FP8 beside",
    "kv": ", FP8 cache",
    "experts": ", experts alone",
    "kept": ", experts kept",
}
Json = dict[str, Any]


def pages() -> list[Json]:
    """Read the results of every engine and version."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"), reverse=True)]


def reasons(engine: str, row: Json) -> list[str]:
    """Return why an engine does not hold an artifact, once each; "" for what nobody explained."""
    return list(dict.fromkeys(_why(engine, row, fault) for fault in row["faults"]))


def _why(engine: str, row: Json, fault: str) -> str:
    for known in known_reasons():
        fits = all(row[key] in known[key] for key in row.keys() & known.keys())
        says = any(re.fullmatch(pattern, fault) for pattern in known["says"])
        if known["engine"] == engine and fits and says:
            return str(known["why"])
    return ""


@cache
def known_reasons() -> list[Json]:
    """Read reasons.toml."""
    return tomllib.loads((JUDGES / "reasons.toml").read_text())["reason"]  # type: ignore[no-any-return]


def judged() -> Iterator[str]:
    """List, for each kind of artifact, how many families every engine holds byte for byte."""
    judges = pages()
    kinds: dict[tuple[str, ...], None] = {}
    cells: dict[tuple[str, ...], str] = {}
    whys: dict[str, int] = {}
    for number, page in enumerate(judges):
        groups: dict[tuple[str, ...], list[Json]] = {}
        for row in page["rows"]:
            activations = f"W4A{row['activations']}{OPTIONS[row['options']]}"
            kind = (row["dialect"], row["format"].upper(), activations)
            groups.setdefault(kind, []).append(row)
        for kind, rows in groups.items():
            kinds[kind] = None
            cells[*kind, str(number)] = _cell(page["engine"], rows, whys)
    heads = [f"{page['engine']} {page['version']}" for page in judges]
    yield from table(
        ("dialect", "format", "activations", *heads),
        [
            (*kind, *(cells.get((*kind, str(number)), "") for number in range(len(judges))))
            for kind in sorted(kinds)
        ],
    )
    yield ""
    for why, number in whys.items():
        yield f"{number}. {why}"
    yield ""
    exact = sum(row["outcome"] == "exact" for page in judges for row in page["rows"])
    families = sorted({row["family"] for page in judges for row in page["rows"]})
    days = sorted({page["date"] for page in judges})
    counted = sum(len(page["rows"]) for page in judges)
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    yield f"{exact} of {counted} are exact. Judged {when}."
    yield f"Families, each as a tiny model with random weights: {', '.join(families)}."


def _cell(engine: str, rows: list[Json], whys: dict[str, int]) -> str:
    """Count the exact ones; name the others with the numbers of their reasons."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] != "exact":
            told = [why or "not explained" for why in reasons(engine, row)]
            numbers = ", ".join(str(whys.setdefault(why, len(whys) + 1)) for why in told)
            failed.setdefault(numbers, []).append(row["family"])
    held = [row["family"] for row in rows if row["outcome"] == "exact"]
    every = ", ".join(dict.fromkeys(", ".join(failed).split(", ")))
    if not held:
        return f"none ({every})"
    if len(held) * 2 < len(rows):
        return f"{len(held)} of {len(rows)}: {', '.join(held)} ({every})"
    names = (f"not {', '.join(names)} ({numbers})" for numbers, names in failed.items())
    return "; ".join([f"{len(held)} of {len(rows)}" if failed else f"all {len(held)}", *names])


def classes() -> Iterator[str]:
    """Count the classes that each engine was given, and list what it does not load."""
    rows: list[tuple[object, ...]] = []
    failed: list[tuple[object, ...]] = []
    for file in sorted((RESULTS / "classes").glob("*.json")):
        page = json.loads(file.read_text())
        name = f"{page['engine']} {page['version']}"
        by_class: dict[str, list[Json]] = {}
        for row in page["rows"]:
            by_class.setdefault(row["class"], []).append(row)
        own = {
            outcome: [each for each, all_ in by_class.items() if outcome in outcomes(all_)]
            for outcome in ("exact", "refuses", "wrong", "source", "refused")
        }
        faulty = [each for each in by_class if each in {*own["refuses"], *own["wrong"]}]
        unable = [each for each in own["source"] if outcomes(by_class[each]) == {"source"}]
        answered = len(by_class) - len(unable)
        rows.append((name, answered, len(own["exact"]), len(faulty), len(unable)))
        failed += [(name, each, _dialects(by_class[each])) for each in sorted(faulty)]
    yield from table(("engine", "classes judged", "load", "in part or not", "not built"), rows)
    yield ""
    yield from table(("engine", "class", "does not load, by dialect"), failed)


def outcomes(rows: list[Json]) -> set[str]:
    """Return what became of a class in all dialects."""
    return {row["outcome"] for row in rows}


def _dialects(rows: list[Json]) -> str:
    """List the dialects that an engine does not load, once for each fault."""
    whys: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] in ("refuses", "wrong"):
            fault = " ".join(row["faults"][0].split())[:110].replace("|", "/").replace("`", "'")
            whys.setdefault(fault, []).append(row["dialect"])
    return "; ".join(f"{', '.join(dialects)}: `{fault}`" for fault, dialects in whys.items())


def whole_engine() -> Iterator[str]:
    """List the log-probabilities of vLLM's whole engine against the dequantized checkpoint."""
    page = json.loads((RESULTS / "forward" / "vllm.json").read_text())
    rows: list[tuple[object, ...]] = [
        (row["artifact"].replace("--", " "), f"{row['kl']:.1e}", f"{row['largest']:.4f}")
        for row in page["rows"]
    ]
    headings = ("artifact", "KL divergence", "largest difference of a log-probability")
    yield from table(headings, rows)
    yield ""
    yield f"vLLM {page['version']}, {page['date']}."
