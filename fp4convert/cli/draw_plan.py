"""Draw a dry run on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fp4convert.checkpoint.module_names import join_words, split_leaf
from fp4convert.cli.screen import GAP, Screen
from fp4convert.numerics.formats import FP4_FORMATS
from fp4convert.progress import count_text, duration_text, size_text
from fp4convert.report.text import Document, escape, shorten

HEADINGS = ("modules", "count", "becomes", "before", "after", "why")
WORDS = {  # action -> the result of modules that do not become four-bit
    "copy": "kept",
    "skip": "skipped",
    "prune": "fewer",
    "dequantize": "bf16",
    "write": "added",
    "fold": "folded",
    "merge": "merged",
    "reorder": "reordered",
}
STYLES = {"copy": "", "write": "", "skip": "yellow", "dequantize": "yellow"}
LONGEST_NAME = 1000  # characters: no model has one of as many
INDENT = "  "
RIGHT = (1, 3, 4)  # columns of numbers
NARROW = 80  # characters: below them the sizes stand in the totals alone
WHY_WIDTH = 20  # at least
LINEAR = "a linear layer"  # goes without saying where a scale is shared

Row = tuple[str, ...]


def draw_plan(screen: Screen, plan: Document) -> None:
    """Print the result of every kind of module; then sizes and time."""
    rows = [HEADINGS, *map(_cells, plan["patterns"])]
    if screen.width < NARROW:
        rows = [(*row[:3], row[-1]) for row in rows]
    numbers = [max(len(row[at]) for row in rows) for at in range(1, len(rows[0]) - 1)]
    left = screen.width - sum(numbers) - len(GAP) * (len(numbers) + 1)
    # A name that leaves no room for the reason gets its own line.
    fitting = [len(row[0]) for row in rows if len(row[0]) <= left - WHY_WIDTH]
    name_width = max(fitting, default=len(HEADINGS[0]))
    widths = [name_width, *numbers, max(WHY_WIDTH, left - name_width)]
    right = RIGHT[: len(numbers) - 1]
    screen.row(rows[0], widths, "bold", right)
    above = part_of = ""
    for row, (name, *cells) in zip(plan["patterns"], rows[1:], strict=True):
        parent, component = _parent_of(row["pattern"]), row.get("component", "")
        if component != part_of:
            screen.line(f"{component}/", "bold")
            part_of, above = component, ""
        if parent and parent != above:
            for part in _break_name(_escape_name(parent.removesuffix(".")), screen.width):
                screen.line(part, "bold")
        above = parent
        style = STYLES.get(row["action"], "green")
        is_long = len(name) > name_width
        for part in _break_name(name, screen.width) if is_long else ():
            screen.line(part, style)
        screen.row(("" if is_long else name, *cells), widths, style, right)
    screen.line("")
    for word, text in _sum_up(plan):
        screen.line(f"{word:<9}{text}", "bold" if word == "total" else "", hang=9)


def _escape_name(name: str) -> str:
    """Escape a name or a pattern; shorten words longer than any model's."""
    return shorten(",".join(map(shorten, escape(name).split(","))), LONGEST_NAME)


def _break_name(name: str, width: int) -> Iterator[str]:
    """Break a long name after commas; nothing of it is left out."""
    line = ""
    for piece in name.split(","):
        if line.strip() and len(line) + len(piece) >= width:
            yield line
            line = INDENT * 2
        line += f"{piece},"
    yield line[:-1]


def _cells(row: Document) -> Row:
    """Return the cells of one kind of module, as HEADINGS has them."""
    parent = _parent_of(row["pattern"])
    name = _escape_name(row["pattern"].removeprefix(parent))
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
    """Return the heading of a row: its parent, if that has many modules.

    "" otherwise, and the row has its whole name.  A number alone is no name: it stands in the row
    with the word before it, to_out.0 and net.0.proj.
    """
    parent, word, _ = split_leaf(pattern)
    while (
        parent
        and not parent.endswith("].")
        and (not set(word) - set("0123456789[],-") or parent.split(".")[-2].isdigit())
    ):
        parent, word, _ = split_leaf(parent.removesuffix("."))
    return parent if "[" in parent else ""


def _sum_up(plan: Document) -> Iterator[tuple[str, str]]:
    """Sum up the rows and the cost of the conversion."""
    rows, seconds = plan["patterns"], plan["seconds_estimated"]
    # modules by format, experts, other tensors
    for name in dict.fromkeys(row["format"] for row in rows if row["format"]):
        yield name, _sum_text([row for row in rows if row["format"] == name], "modules")
    if experts := plan.get("experts"):
        kept = f"{experts['before']} -> {experts['kept']}"
        yield "experts", f"{kept} in each of {experts['layers']} layers"
    others = [row for row in rows if not row["format"]]
    for word, is_added in (("kept", False), ("added", True)):
        if chosen := [row for row in others if (row["action"] == "write") == is_added]:
            yield word, _sum_text(chosen, "tensors")
    for reason, count in Counter(one["reason"] for one in plan.get("left_out", ())).items():
        yield "left out", f"{count_text(count, 'tensor')}: {reason}"
    if copied := plan.get("copied_bytes"):
        components = " and ".join(part["name"] for part in plan["components"])
        yield "copied", f"{size_text(copied)} outside {components}"
    if adapter := plan.get("adapter"):
        merged = adapter["merged"]
        where = f"merged into {merged['rounded']:,} modules and {merged['kept']:,} kept tensors"
        is_kept = plan["method"] == "gptq" and plan["format"] in FP4_FORMATS
        how = "rounded so that it stays" if is_kept else "rounded to the nearest"
        yield "adapter", f"{adapter['name']}, {where}; method {plan['method']}: {how}"
    if exact := plan.get("fake_quantized"):
        share = 100 * exact["exact"] / exact["blocks"]
        where = f"{exact['found']} of {exact['modules']} modules looked at"
        how = f"{share:.4g} % of {exact['blocks']:,} blocks are E2M1 values times a step"
        yield "source", f"trained with fake quantization: {how} ({where}); these are kept"
    # the whole
    before, after, bits = (plan[key] for key in ("source_bytes", "output_bytes", "bits_per_weight"))
    share = f" ({100 * after / before:.0f} %)" if before else ""
    weights = f", {bits:.3f} bits per quantized weight" if bits else ""
    yield "total", f"{size_text(before)} -> {size_text(after)}{share}{weights}"
    if plan["added_bytes"] > 0:
        what = "packed weights that are kept; --keep-packed leaves them packed"
        yield "bf16", f"adds {size_text(plan['added_bytes'])}: {what}"
    if usual := plan.get("usual_loss"):
        loss = f"usually a KL of {usual['kl']:.2g} nats at this size"
        loss += f", top-1 {100 * usual['top1']:.0f} %"
        if best := usual["with_text"]:
            loss += f"; with a text (--text FILE) {best['kl']:.2g}"
        yield "loss", loss
    # memory, disk and time
    memory, disk = size_text(plan["peak_memory_bytes"]), size_text(plan["peak_disk_bytes"])
    yield "peak", f"memory {memory}, disk {disk}"
    if reason := seconds.get("device_reason"):
        yield "device", reason.removeprefix("device ")
    work = f"{duration_text(seconds['work'])} on {seconds['device']}"
    parts = ", ".join(f"{key} {duration_text(seconds[key])}" for key in ("arithmetic", "hashing"))
    yield "time", f"{work}: {parts}; disk writes not included"
    fast, slow = (
        duration_text(seconds["reading"][f"at_{rate}_per_second"]) for rate in ("1_gb", "100_mb")
    )
    yield "reading", f"meanwhile: {fast} at 1 GB/s, {slow} at 100 MB/s"


def _sum_text(rows: list[Document], what: str) -> str:
    """Return the count and size of rows; `what` is their noun, plural."""
    before, after = (sum(row[key] for row in rows) for key in ("source_bytes", "output_bytes"))
    change = f" -> {size_text(after)}" if after != before else ""
    count = sum(row["count"] for row in rows)
    named = what if count != 1 else what.removesuffix("s")
    return f"{count:,} {named}, {size_text(before)}{change}"
