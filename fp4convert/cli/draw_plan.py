"""Draw a dry run on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from fp4convert.checkpoint.module_names import join_words, split_leaf
from fp4convert.cli.screen import GAP, Screen
from fp4convert.progress import duration_text, size_text
from fp4convert.report.text import Document, escape, shorten

HEADINGS = ("modules", "count", "becomes", "before", "after", "why")
WORDS = {
    "copy": "stays",
    "skip": "skipped",
    "prune": "fewer",
    "dequantize": "bf16",
    "write": "added",
    "fold": "folded",
}  # what becomes of others than four-bit modules
STYLES = {"copy": "", "write": "", "skip": "yellow", "dequantize": "yellow"}
INDENT = "  "
RIGHT = (1, 3, 4)  # columns of numbers
WHY_WIDTH = 20  # at least
LINEAR = "a linear layer"  # goes without saying where a scale is shared
LONGEST_NAME = 1000  # one of more characters is nobody's

Row = tuple[str, ...]


def draw_plan(screen: Screen, plan: Document) -> None:
    """Print what becomes of every kind of module, and why; then sizes and time."""
    rows = [HEADINGS, *map(_cells, plan["patterns"])]
    numbers = [max(len(row[at]) for row in rows) for at in range(1, len(HEADINGS) - 1)]
    left = screen.width - sum(numbers) - len(GAP) * (len(numbers) + 1)
    # A name that leaves no room for the reason has a line to itself.
    fitting = [len(row[0]) for row in rows if len(row[0]) <= left - WHY_WIDTH]
    name_width = max(fitting, default=len(HEADINGS[0]))
    widths = [name_width, *numbers, max(WHY_WIDTH, left - name_width)]
    screen.row(HEADINGS, widths, "bold", RIGHT)
    above = part_of = ""
    for row, (name, *cells) in zip(plan["patterns"], rows[1:], strict=True):
        parent, component = _parent_of(row["pattern"]), row.get("component", "")
        if component != part_of:
            screen.line(f"{component}/", "bold")
            part_of, above = component, ""
        if parent and parent != above:
            for part in _broken(_told(parent.removesuffix(".")), screen.width):
                screen.line(part, "bold")
        above = parent
        style = STYLES.get(row["action"], "green")
        is_long = len(name) > name_width
        for part in _broken(name, screen.width) if is_long else ():
            screen.line(part, style)
        screen.row(("" if is_long else name, *cells), widths, style, RIGHT)
    screen.line("")
    for word, told in _totals(plan):
        screen.line(f"{word:<9}{told}", "bold" if word == "total" else "")


def _told(name: str) -> str:
    """A name or a pattern for the terminal: all of it, unless one of its words is longer than any that a model has."""
    return shorten(",".join(map(shorten, escape(name).split(","))), LONGEST_NAME)


def _broken(name: str, width: int) -> Iterator[str]:
    """Lines of a name too long for one, each but the last up to a comma: in ranges and in braces nothing is left out."""
    line = ""
    for piece in name.split(","):
        if line.strip() and len(line) + len(piece) >= width:
            yield line
            line = INDENT * 2
        line += f"{piece},"
    yield line[:-1]


def _cells(row: Document) -> Row:
    parent = _parent_of(row["pattern"])
    name = _told(row["pattern"].removeprefix(parent))
    shared = f"one scale: {join_words(row['group'].split('/'))}" if row["group"] else ""
    why = row["reason"].removeprefix(LINEAR).removeprefix(", ") if shared else row["reason"]
    sizes = (size_text(row[key]) for key in ("source_bytes", "output_bytes"))
    becomes = str(row["format"] or WORDS.get(row["action"], row["action"]))
    return (
        f"{INDENT if parent else ''}{name}",
        f"{row['count']:,}",
        becomes,
        *sizes,
        escape("; ".join(filter(None, (why, shared)))),
    )


def _parent_of(pattern: str) -> str:
    """What stands above a row, where that tells of many; otherwise nothing, and the row has its whole name.

    A number alone is no name: it stands in the row with the word before it, to_out.0 and net.0.proj.
    """
    parent, word, _ = split_leaf(pattern)
    while (
        parent
        and not parent.endswith("].")
        and (not set(word) - set("0123456789[],-") or parent.split(".")[-2].isdigit())
    ):
        parent, word, _ = split_leaf(parent.removesuffix("."))
    return parent if "[" in parent else ""


def _totals(plan: Document) -> Iterator[tuple[str, str]]:
    """What the rows come to, and what it costs."""
    rows, seconds = plan["patterns"], plan["seconds_estimated"]
    for name in dict.fromkeys(row["format"] for row in rows if row["format"]):
        yield name, _sum_text([row for row in rows if row["format"] == name], "modules")
    if experts := plan.get("experts"):
        yield (
            "experts",
            f"{experts['before']} -> {experts['kept']} in each of {experts['layers']} layers",
        )
    for word, is_added in (("stays", False), ("added", True)):
        if others := [
            row for row in rows if not row["format"] and (row["action"] == "write") == is_added
        ]:
            yield word, _sum_text(others, "tensors")
    if copied := plan.get("copied_bytes"):
        yield (
            "copied",
            f"{size_text(copied)} outside {' and '.join(part['name'] for part in plan['components'])}",
        )
    before, after, bits = (plan[key] for key in ("source_bytes", "output_bytes", "bits_per_weight"))
    share = f" ({100 * after / before:.0f} %)" if before else ""
    weights = f", {bits:.3f} bits per weight where it is quantized" if bits else ""
    yield "total", f"{size_text(before)} -> {size_text(after)}{share}{weights}"
    if plan["added_bytes"] > 0:
        added = size_text(plan["added_bytes"])
        yield (
            "bf16",
            f"adds {added}: packed weights that stay; --keep-packed leaves them as they are",
        )
    yield (
        "peak",
        f"memory {size_text(plan['peak_memory_bytes'])}, disk {size_text(plan['peak_disk_bytes'])}",
    )
    parts = ", ".join(f"{key} {duration_text(seconds[key])}" for key in ("arithmetic", "hashing"))
    yield (
        "work",
        f"{duration_text(seconds['work'])} on {seconds['device']}: {parts}; writing to the disk apart",
    )
    reading = [
        duration_text(seconds["reading"][f"at_{rate}_per_second"]) for rate in ("1_gb", "100_mb")
    ]
    yield "source", f"to be read meanwhile, in {reading[0]} at 1 GB/s, in {reading[1]} at 100 MB/s"


def _sum_text(rows: list[Document], what: str) -> str:
    before, after = (sum(row[key] for row in rows) for key in ("source_bytes", "output_bytes"))
    change = f" -> {size_text(after)}" if after != before else ""
    count = sum(row["count"] for row in rows)
    return (
        f"{count:,} {what if count != 1 else what.removesuffix('s')}, {size_text(before)}{change}"
    )
