"""Run every benchmark; make bench, make bench-check, make gpu and make bench-fidelity call it.

    python benchmarks/bench.py [PART ...]           measure parts, all by default; write
    results/cpu.json, and cpu.md from it
    python benchmarks/bench.py --check [PART ...]   measure less of them, on as many bytes; 1 where
    a ratio has lost too much, or where a page of results is not of this code
    python benchmarks/bench.py PAGE [OPTION ...]    write a page of its own: hub, gpu, variants,
    bars, host, mixed, fidelity, chats, adapter or scale_search

Processors without AVX-512 have pages of their own, such as cpu-avx2.md: their ratios are others.  A
part is a module with
sections(is_quick); it is measured in a process of its own, and its rows replace those it had.  A
page is a module with
main(arguments).  Imports name the folder (`from harness.measure import table`): Python puts the
                  folder of this file on its path.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from harness import age, gate
from harness.measure import commit, machine, results
from harness.sections import Section, as_document, from_document

MODULES = (
    *(
        "cpu.kernels",
        "cpu.compilers",
        "peers.beside_quantizers",
        "cpu.conversion",
        "cpu.beside_copying",
        "cpu.workers",
        "peers.beside_converters",
    ),
    *("cpu.sources", "cpu.evaluation", "cpu.planning", "cpu.startup", "gpu.gpu_results"),
)
PARTS = {module.rpartition(".")[2]: module for module in MODULES}  # in the order of the page
UNCHECKED = (
    "beside_converters",
    "evaluation",
    "planning",
    "gpu_results",
)  # slow, or no ratio of two things measured in turn
PAGES = {
    "hub": "hub.beside_downloading",
    "gpu": "gpu.kernels",
    "variants": "gpu.variants",
    "bars": "gpu.bars",
    "host": "gpu.host_costs",
    "mixed": "cpu.mixed",
    "fidelity": "quality.fidelity",
    "chats": "quality.chats",
    "adapter": "quality.adapter",
    "scale_search": "quality.scale_search",
}
RESULTS = results("cpu", "json")

Document = dict[str, Any]  # part -> {"machine": where, what and when, "sections": [...]}


def sections_of(part: str, is_quick: bool) -> list[Section]:
    return importlib.import_module(PARTS[part]).sections(is_quick)


def measure(part: str, is_quick: bool = False) -> list[Section]:
    """Its sections, from a process of its own."""
    print(f"measuring {part}", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(sections_of, part, is_quick).result()


def page_of(document: Document) -> str:
    """cpu.md: nothing is in it that is not in the document."""
    parts = [
        (part, [from_document(each) for each in document.get(part, {}).get("sections", ())])
        for part in PARTS
    ]
    verdicts = [
        text for _, sections in parts for section in sections for text in section.verdicts()
    ]
    missed = sum(text.endswith("NOT MET") for text in verdicts)
    head = (
        "# CPU results\n\nWritten by `make bench`, one part by `python benchmarks/bench.py "
        "PART`. Ratios are of two things"
        " measured in turn in the same run.\n"
        f"Of {len(verdicts)} ratios with a bar, {len(verdicts) - missed} meet it and {missed} do "
        "not (NOT MET)."
    )
    texts = [head]
    for part, sections in parts:
        texts += [section.markdown() for section in sections]
        measured = document[part]["machine"] if part in document else "not measured yet"
        texts.append(f"Part `{part}`: {measured}.")
    return "\n\n".join(texts) + "\n"


def write(document: Document, path: Path) -> None:
    path.write_text(
        json.dumps({part: document[part] for part in PARTS if part in document}, indent=1) + "\n",
        encoding="utf-8",
    )
    path.with_suffix(".md").write_text(page_of(document), encoding="utf-8")


def read(path: Path) -> Document:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def bench(parts: Iterable[str], path: Path) -> None:
    """Each part is written as soon as it is known."""
    for part in parts:
        sections = measure(part)
        gate.ratios(sections)  # names must tell rows apart
        write(
            {
                **read(path),
                part: {
                    "machine": machine(),
                    "sections": [as_document(section) for section in sections],
                },
            },
            path,
        )


def check(parts: Iterable[str], path: Path) -> int:
    """Compare; a part with a loss is measured once more, and what is lost twice is lost."""
    document = read(path)
    if not document:
        print(
            f"there are no figures in {path} to compare with: run `make bench` first",
            file=sys.stderr,
        )
        return 1
    count, lost = 0, []
    for part in parts:
        committed = [from_document(each) for each in document.get(part, {}).get("sections", ())]
        found = gate.compare(committed, measure(part, is_quick=True))
        count += len(found)
        losses = [each for each in found if each.is_lost]
        if losses:
            again = {
                each.key: each for each in gate.compare(committed, measure(part, is_quick=True))
            }
            losses = [again[each.key] for each in losses if again[each.key].is_lost]
        lost += losses
        where = document.get(part, {}).get("machine", "nothing: run `make bench`")
        print(f"{part}: {len(found)} ratios compared with {where}", flush=True)
    for each in lost:
        print(f"LOST {each}")
    print(f"{count} ratios compared, {len(lost)} lost more than {gate.TOLERANCE:.0%} twice")
    return 1 if lost or not count else 0


def check_pages() -> int:
    """Tell of every page of results that is not of this code."""
    old = list(age.old_pages())
    for line in old:
        print(f"OLD {line}")
    print(f"{len(old)} pages, or parts of them, are not of this code")
    return 1 if old else 0


def main(arguments: list[str]) -> int:
    is_writing = not {"--check", "--help", "-h", "--results"} & set(arguments)
    if is_writing and commit().endswith("-dirty"):
        print(f"commit {commit()}; expected a commit: commit your files first", file=sys.stderr)
        return 1
    if arguments and arguments[0] in PAGES:
        return importlib.import_module(PAGES[arguments[0]]).main(arguments[1:])
    parser = argparse.ArgumentParser(
        description="Measure, or compare with what is committed.",
        epilog="Pages of their own, with options of their own: "
        f"{', '.join(f'bench.py {page}' for page in PAGES)}.",
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the figures; the page stands beside them"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if options.check:
        parts = options.parts or [part for part in PARTS if part not in UNCHECKED]
        return check_pages() | check(parts, options.results)
    bench(options.parts or PARTS, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
