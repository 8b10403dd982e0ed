"""Make the parts of README.md and docs/*.md that come from the code: `make docs`.

Such a part stands between `<!-- made: NAME -->` and `<!-- end -->`; the function of that name
writes it.  After `<!-- measured: FILE, HEADING -->` stand the tables below that heading of
benchmarks/results/FILE, and where they were measured.  A line that ends with `<!-- N is FILE,
HEADING, ROW, COLUMN -->` holds the figure N of such a table; ROW is how its first cells begin,
`A + B` of two.
The index of recipes is made here, too.

python docs/tables.py            # prints the files that differ, exits 1 where one does
python docs/tables.py --write    # replaces them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from carried_tables import carried
from engine_tables import cards, chosen, serve, table

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.dialects.target_forms import module_form
from fp4convert.cli.draw_quality import draw_block
from fp4convert.conversion.artifact_job import ENGINE_RECORDS
from fp4convert.numerics.formats import FORMATS, FP4_FORMATS, NVFP4, Format
from fp4convert.numerics.scale_layouts import LAYOUTS, Layout
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.toml_files import FAMILIES, known_file, known_names
from fp4convert.storage.checkpoint_files import CARD, ORIGINAL, OTHER_WEIGHTS, SIGNATURE, WEIGHTS

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
MADE = re.compile(r"(?<=<!-- made: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
MEASURED = re.compile(
    r"(?<=<!-- measured: )([\w.-]+), ([^\n]+?)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL
)
FIGURE = re.compile(r"<!-- (\S+) is ([\w.-]+\.md, [^\n]+?) -->")
RESULTS = DOCS.parent / "benchmarks" / "results"
ROWS, COLUMNS = 256, 128  # of the matrix that dialects are shown with
TILE = (256, 8)  # of scale bytes that layouts are shown with
SHOWN_ROWS, SHOWN_BLOCKS = (0, 1, 2, 7, 8, 31, 32, 33, 127, 128), (0, 1, 2, 3, 4, 7)
STEMS = {"gpt-oss": "model.layers.0.mlp.experts.down_proj", "deepseek": "layers.0.ffn.experts.0.w1"}
STACKED = ("gpt-oss",)  # one matrix for all experts
EXPERTS = 4


def blocks() -> Iterator[str]:
    """Draw a block of either four-bit format, in every order of nibbles."""
    yield "```"
    for fmt in FP4_FORMATS.values():
        traits = {name: dialect_named(name).TRAITS for name in DIALECTS}
        orders = {name: trait.nibble_order for name, trait in traits.items() if fmt in trait.writes}
        for order in dict.fromkeys(orders.values()):
            users = ", ".join(name for name, own in orders.items() if own == order)
            yield f"{fmt.name}, {order}: {users}"
            yield from (f"  {line}" for line in draw_block(fmt, order))
    yield "```"


def formats() -> Iterator[str]:
    """Compare the formats: blocks, scales, bits."""
    names = {"fp8_e4m3": "E4M3 (e4m3fn)", "e8m0": "E8M0", "fp32": "float32"}
    sizes = [fmt.block_size or "a row, the matrix or 128x128" for fmt in FORMATS.values()]
    global_scales = ["none", "float32, one to a matrix or scale group"]
    bits = [bits_of(fmt) for fmt in FORMATS.values()]
    rows: list[tuple[object, ...]] = [
        ("code", *("E2M1" if fmt.is_fp4 else "E4M3 (e4m3fn)" for fmt in FORMATS.values())),
        ("elements to a block", *sizes),
        ("block scale", *(names[fmt.scale_dtype] for fmt in FORMATS.values())),
        ("global scale", *(global_scales[fmt.has_global_scale] for fmt in FORMATS.values())),
        ("bits a weight", *(f"{each:g}" for each in bits)),
        ("GB for 70e9 weights", *(f"{70 * each / 8:.1f}" for each in bits)),
    ]
    yield from table(("", *FORMATS), rows)


def bits_of(fmt: Format) -> float:
    """Count the bits of a weight, with its share of a block scale.

    FP8's is one to many hundreds, and left out.
    """
    return (4 if fmt.is_fp4 else 8) + (8 / fmt.block_size if fmt.block_size else 0)


def codes() -> Iterator[str]:
    """List the sixteen codes, as ml_dtypes decodes them."""
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float)
    words = [f"{value:g}" for value in values]
    yield from table(("code", *(f"`{code:04b}`" for code in range(8))), [("value", *words[:8])])
    yield ""
    yield from table(("code", *(f"`{code:04b}`" for code in range(8, 16))), [("value", *words[8:])])


def scales() -> Iterator[str]:
    """List some bytes of block scales, as ml_dtypes decodes them."""
    kinds = {"E4M3": ml_dtypes.float8_e4m3fn, "E8M0": ml_dtypes.float8_e8m0fnu}
    rows: list[tuple[object, ...]] = []
    for byte in (0x00, 0x01, 0x08, 0x38, 0x39, 0x7E, 0x7F, 0x80, 0xFE, 0xFF):
        values = (
            float(np.array([byte], np.uint8).view(kind).astype(np.float32)[0])
            for kind in kinds.values()
        )
        rows.append((f"`0x{byte:02X}`", *(f"{value:.6g}" for value in values)))
    yield from table(("byte", *kinds), rows)


def dialects() -> Iterator[str]:
    """List the tensors that stand for one matrix in every dialect."""
    rows: list[tuple[object, ...]] = []
    for name in DIALECTS:
        dialect = dialect_named(name)
        for fmt in (fmt for fmt in dialect.TRAITS.writes if fmt in FORMATS.values()):
            stem = STEMS.get(name, "M")
            shape = (EXPERTS, ROWS, COLUMNS) if name in STACKED else (ROWS, COLUMNS)
            specs = dialect.outputs(stem, shape, module_form(Target(fmt.name, name), fmt.name))
            tensors = "<br>".join(
                f"`{spec.name.removeprefix(stem)}` {spec.dtype} {list(spec.shape)}"
                for spec in specs
            )
            order, layouts = dialect.TRAITS.nibble_order, ", ".join(dialect.TRAITS.layouts)
            kind = (fmt is NVFP4 and dialect.TRAITS.global_scale_kind) or "none"
            rows.append((name, fmt.name, tensors, order, layouts, kind))
    headings = ("dialect", "format", "tensors", "nibbles", "scale layouts", "global scale")
    yield from table(headings, rows)


def gpu_bars() -> Iterator[str]:
    """List the bars of GPUs, and whether the committed results meet them."""
    sys.path.append(str(RESULTS.parent))
    from gpu.bars import rows_of

    head, *rows = rows_of(RESULTS)
    yield from table(head, rows)


def offsets(layout: Layout) -> np.ndarray:
    """Return where the byte of every scale lies, (rows, blocks)."""
    rows, columns = TILE
    count = rows * columns
    halves = [
        layout.arrange(memoryview((np.arange(count) >> shift & 255).astype(np.uint8).data), TILE)
        for shift in (0, 8)
    ]
    low, high = (np.frombuffer(half, np.uint8).astype(np.int64) for half in halves)
    places = np.empty(count, np.int64)
    places[low | high << 8] = np.arange(count)
    return places.reshape(TILE)


def layouts() -> Iterator[str]:
    """Show where the scale of a block lies, in bytes from the first one."""
    for name, layout in LAYOUTS.items():
        places = offsets(layout)
        rows, blocks = layout.padding
        padding = f", rows padded to {rows}, blocks to {blocks}" if rows * blocks > 1 else ""
        yield f"**{name}**{padding}"
        yield ""
        shown: list[tuple[object, ...]] = [
            (f"row {row}", *(places[row, block] for block in SHOWN_BLOCKS)) for row in SHOWN_ROWS
        ]
        yield from table(("", *(f"block {block}" for block in SHOWN_BLOCKS)), shown)
        yield ""


def left_behind() -> Iterator[str]:
    """List the files of a source that no result has."""

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    yield f"- weights in another form, in any folder: {named(OTHER_WEIGHTS)}"
    yield f"- `*{WEIGHTS}` and their indexes in `{ORIGINAL}`, and those beside the shards that the"
    yield "  index does not name: of another variant, or Mistral's `consolidated*`"
    yield f"- records of how the source was quantized: {named(ENGINE_RECORDS)}"
    yield f"- `{SIGNATURE}`, and the `{CARD}` of an artifact where fp4convert wrote it"
    yield "- hidden files and folders"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    part.__name__: part
    for part in (
        *(blocks, formats, codes, scales, dialects, carried, layouts),
        *(left_behind, serve, chosen, cards, gpu_bars),
    )
}


def measured(results: str, heading: str) -> Iterator[str]:
    """Take the tables below a heading of a page, and the line with their place.

    Raises  KeyError where there is no table
    """
    lines = results.splitlines()
    titles = [line.lstrip("#").strip() if line.startswith("#") else None for line in lines]
    after = lines[titles.index(heading) + 1 :] if heading in titles else []
    last = next((at for at, line in enumerate(after) if line.startswith("#")), len(after))
    rows = [line for line in after[:last] if line.startswith("|")]
    if not rows:
        raise KeyError(heading)
    yield from rows
    yield ""
    # Of a page of several parts each was measured on a day of its own.
    part = next((line for line in after if line.startswith("Part ")), None)
    yield part or next(line for line in lines if line and not line.startswith("#"))


def figure(place: str) -> str:
    """Take one figure of a table: "cpu.md, Memory, 8 GB + mse, seconds" -> "10.5".

    Raises  KeyError where there is no such row; ValueError where there is no such column
    """
    file, heading, row, column = place.split(", ")
    lines = measured((RESULTS / file).read_text(encoding="utf-8"), heading)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    first = row.split(" + ")
    for cells in table:
        if all(map(str.startswith, cells, first)):
            return cells[table[0].index(column)]
    raise KeyError(place)


def filled(text: str) -> str:
    """Return a page with every part made anew.

    Raises  KeyError for a part that nothing makes, or that was not measured
    """

    def made(found: re.Match[str]) -> str:
        return "".join((found[1], found[2], *(f"{line}\n" for line in PARTS[found[1]]())))

    def taken(found: re.Match[str]) -> str:
        lines = measured((RESULTS / found[1]).read_text(encoding="utf-8"), found[2])
        return "".join((found[1], ", ", found[2], found[3], *(f"{line}\n" for line in lines)))

    text = "\n".join(map(renewed, text.split("\n")))
    return MEASURED.sub(taken, MADE.sub(made, text))


def renewed(line: str) -> str:
    """Return a line with the figures that the markers at its end name.

    Raises  ValueError where the line does not hold the figure of a marker
    """
    for old, place in FIGURE.findall(line):
        words, new = line.partition("<!--")[0], figure(place)
        pattern = rf"(?<![\w.,]){re.escape(old)}(?![\w]|[.,]\d)"
        changed, count = re.subn(pattern, lambda _, new=new: new, words, count=1)
        if not count:
            raise ValueError(f"{words}: expected {old} of {place}")
        markers = line[len(words) :].replace(
            f"<!-- {old} is {place} -->", f"<!-- {new} is {place} -->"
        )
        line = changed + markers
    return line


def families() -> str:
    """Write the index of recipes: which file names a model_type or class name."""
    kinds = {
        kind: name
        for name in known_names()
        for kind in (*known_file(name).model_types, *known_file(name).class_names)
    }
    head = "# Which file of configs/ a model_type or class name belongs to; made by `make docs`."
    return "\n".join([head, *(f'{kind} = "{kinds[kind]}"' for kind in sorted(kinds)), ""])


def write_stale(made: dict[Path, str], arguments: list[str]) -> int:
    """Print the pages that differ, or write them; return the exit code."""
    stale = [
        page
        for page, text in made.items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    for page in stale:
        print(page.name)
        if "--write" in arguments:
            page.write_text(made[page], encoding="utf-8")
    return int(bool(stale) and "--write" not in arguments)


def main(arguments: list[str]) -> int:
    """Make the tables of every page, and the index of recipes."""
    made = {page: filled(page.read_text(encoding="utf-8")) for page in PAGES}
    return write_stale(made | {FAMILIES: families()}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
