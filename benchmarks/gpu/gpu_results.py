"""Read what GPUs did from the pages that `make gpu` has left in results/.

Of their tables those with a naive kernel or another package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.measure import RESULTS
from harness.sections import Row, Section

COLUMNS = ("ms", "GB/s", "output")
RATIO = "% of copy"


def tables(page: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Title and lines, by heading, of every table."""
    for part in page.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        cells = [
            re.split(r"\s*\|\s*", line.strip())[1:-1]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        if cells:
            headings, _, *rest = cells
            yield title, [dict(zip(headings, line, strict=True)) for line in rest]


def row_of(title: str, line: dict[str, str]) -> Row:
    share, bar = line[RATIO], re.match(r">= ([\d.]+) ", line["bar"])
    return Row(
        (title, line["what"]),
        tuple(line[column] for column in COLUMNS),
        float(share) / 100 if share else None,
        float(bar[1]) / 100 if bar else None,
    )


def section_of(page: str, name: str) -> Section:
    """The GPU and the rows; when and of which commit they are, the page itself says."""
    head = page.split("\n## ", maxsplit=1)[0].split("\n\n")
    device = head[1].partition(",")[0]
    chosen = [
        row_of(title, line)
        for title, lines in tables(page)
        if title.startswith("Others") or any("_naive" in line["what"] for line in lines)
        for line in lines
    ]
    about = f"Copied from [{name}]({name}), which says when and of which commit they were measured."
    return Section(
        f"GPU: {device}", about, ("data", "what", *COLUMNS), tuple(chosen), "of a copy's rate"
    )


def sections(is_quick: bool) -> list[Section]:
    pages = [] if is_quick else sorted(RESULTS.glob("gpu-*.md"))
    if not pages and not is_quick:
        return [
            Section(
                "GPU",
                "No GPU results yet: `make gpu`, on a machine with an NVIDIA GPU, writes them.",
            )
        ]
    return [section_of(path.read_text(encoding="utf-8"), path.name) for path in pages]
