"""Write what engines' own loaders made of artifacts, from the results of `make engines`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_tables import table

JUDGES = Path(__file__).parent.parent / "tests" / "engines" / "judges"
RESULTS = JUDGES / "results"
OPTIONS = {"": "", "mixed": ", FP8 beside", "kv": ", FP8 cache"}
Json = dict[str, Any]


def pages() -> list[Json]:
    """Read the results of every engine and version."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"), reverse=True)]


def reason(engine: str, row: Json) -> str:
    """Return why an engine does not hold an artifact; nothing where no reason is written down."""
    known = tomllib.loads((JUDGES / "reasons.toml").read_text())["reason"]
    for each in known:
        fits = all(each.get(key, row[key]) == row[key] for key in ("family", "dialect", "options"))
        if each["engine"] == engine and fits and each.get("says", "") in row["says"]:
            return str(each["why"])
    return ""


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
    """Say how many are exact, and which are not, with the number of the reason."""
    failed: dict[int, list[str]] = {}
    for row in rows:
        if row["outcome"] != "exact":
            number = whys.setdefault(reason(engine, row) or "not explained", len(whys) + 1)
            failed.setdefault(number, []).append(row["family"])
    held = [row["family"] for row in rows if row["outcome"] == "exact"]
    numbers = ", ".join(map(str, failed))
    if not held:
        return f"none ({numbers})"
    if len(held) * 2 < len(rows):
        return f"{len(held)} of {len(rows)}: {', '.join(held)} ({numbers})"
    names = (f"not {', '.join(names)} ({number})" for number, names in failed.items())
    return "; ".join([f"{len(held)} of {len(rows)}" if failed else f"all {len(held)}", *names])


def whole_engine() -> Iterator[str]:
    """List the log-probabilities of vLLM's whole engine against the dequantized checkpoint."""
    page = json.loads((RESULTS / "forward" / "vllm.json").read_text())
    yield from table(
        ("artifact", "KL divergence", "largest difference of a log-probability"),
        [
            (row["artifact"].replace("--", " "), f"{row['kl']:.1e}", f"{row['largest']:.4f}")
            for row in page["rows"]
        ],
    )
    yield ""
    yield f"vLLM {page['version']}, {page['date']}."
