"""Make the parts of README.md and docs/*.md that come from the code: `make docs`.

Such a part stands between `<!-- made: NAME -->` and `<!-- end -->`; the function of that name
writes it.  After `<!-- measured: FILE, HEADING -->` stand the tables below that heading of
benchmarks/results/FILE, and where they were measured.  After `<!-- figure: FILE, HEADING, ROW,
COLUMN -->` stands one figure of such a table; ROW is how its first cells begin, `A + B` of two.
The index of recipes is made here, too.

python docs/tables.py            # prints the files that differ, exits 1 where one does
python docs/tables.py --write    # replaces them
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from carried_tables import carried
from engine_tables import chosen, engines, failures, serve, table
from judge_tables import classes, judged, whole_engine

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.dialects.target_forms import module_form
from fp4convert.cli.draw_quality import draw_block
from fp4convert.conversion.artifact_job import ENGINE_RECORDS
from fp4convert.engines.files import known_engines
from fp4convert.errors import read_catalogue
from fp4convert.numerics.formats import FORMATS, FP4_FORMATS, NVFP4, Format
from fp4convert.numerics.scale_layouts import LAYOUTS, Layout
from fp4convert.recipes.options import help_with_words, is_required
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.toml_files import FAMILIES, known_file, known_names
from fp4convert.storage.checkpoint_files import CARD, ORIGINAL, OTHER_WEIGHTS, SIGNATURE, WEIGHTS

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
MADE = re.compile(r"(?<=<!-- made: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
MEASURED = re.compile(
    r"(?<=<!-- measured: )([\w.-]+), ([^\n]+?)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL
)
FIGURE = re.compile(r"(?<=<!-- figure: )([^\n]+?) -->(.*?)(?=<!-- end -->)")
RESULTS = DOCS.parent / "benchmarks" / "results"
PACKAGE = DOCS.parent / "fp4convert"
FLOORS = DOCS.parent / "tests" / "repository" / "test_architecture.py"  # has the table of floors
NAME_WIDTH = 28  # of a module in the tree
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


def tree() -> Iterator[str]:
    """Draw every package and module, floor by floor from the top.

    Beside each stands the first line of its docstring.
    """
    yield "```"
    yield leaf(PACKAGE, 0)
    for number, names in reversed(list(enumerate(floors(), 1))):
        yield f"\nfloor {number}"
        for name in sorted(names):
            folder = PACKAGE / name
            yield from branch(folder, 1) if folder.is_dir() else [leaf(PACKAGE / f"{name}.py", 1)]
    yield "```"


def floors() -> list[set[str]]:
    """Read the packages and modules of every floor, from the ground.

    The test that holds imports to them has the table.
    """
    nodes = ast.parse(FLOORS.read_text(encoding="utf-8")).body
    (table,) = (
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    return list(ast.literal_eval(table))


def branch(folder: Path, depth: int) -> Iterator[str]:
    """Draw a package: modules, tables, packages and the page in it."""
    yield leaf(folder, depth)
    yield from (
        leaf(file, depth + 1) for file in sorted(folder.glob("*.py")) if file.stem != "__init__"
    )
    yield from (leaf(file, depth + 1) for file in sorted(folder.glob("*.toml")))
    yield from (
        line
        for inner in sorted(folder.glob("*/__init__.py"))
        for line in branch(inner.parent, depth + 1)
    )
    if (page := folder / "page").is_dir():
        held = ", ".join(sorted(file.name for file in page.iterdir()))
        yield f"{'  ' * (depth + 1) + 'page/':<{NAME_WIDTH}}{held}"


def leaf(path: Path, depth: int) -> str:
    """Name a module, package or table, with the first line that it has."""
    file, name = (path / "__init__.py", f"{path.name}/") if path.is_dir() else (path, path.name)
    text = file.read_text(encoding="utf-8")
    words = (
        text.removeprefix("# ") if path.suffix == ".toml" else ast.get_docstring(ast.parse(text))
    )
    return f"{'  ' * depth + name:<{NAME_WIDTH}}{(words or '').partition(chr(10))[0]}"


def options() -> Iterator[str]:
    """Every command with its help and its options, as they are declared."""
    from fp4convert.cli.commands import COMMANDS

    for name, command in COMMANDS.items():
        yield f"### {name}"
        yield ""
        text = inspect.cleandoc(command.options.__doc__ or "")
        yield text.partition("\n\n")[0].replace("\n", " ")
        rows: list[tuple[object, ...]] = []
        for each in command.declared():
            flags = each.option.flags or (f"--{each.name.replace('_', '-')}",)
            spelled = each.name.upper() if each.option.is_argument else ", ".join(flags)
            default = "required" if is_required(each) else each.default
            told = "" if default in (None, False, ()) else default
            hidden = " (Python only)" if each.name in command.hidden else ""
            row = (f"`{spelled}`{hidden}", told, help_with_words(each.option).replace("|", "\\|"))
            rows.append(row)
        yield ""
        yield from table(("option", "default", "meaning"), rows)
        yield ""


def errors() -> Iterator[str]:
    """List every error, what it means and what to do."""
    headings = ("code", "exit", "what it means", "where it comes from", "what to do")
    yield from topics("errors", headings, "exits")


def findings() -> Iterator[str]:
    """List every finding, what it means and what to do."""
    headings = ("code", "level", "what it means", "seen", "what to do")
    yield from topics("findings", headings, "levels")


def topics(kind: str, headings: tuple[str, ...], listed: str) -> Iterator[str]:
    """Write a table for each topic of the catalogue; the key `listed` has a list."""
    for topic in read_catalogue()[kind]:
        rows: list[tuple[object, ...]] = []
        for code, row in topic["codes"].items():
            others = [text for key, text in row.items() if key != listed]
            rows.append((f"`{code}`", ", ".join(map(str, row[listed])), *others))
        yield f"\n## {topic['heading']}\n"
        yield from table(headings, rows)
    yield ""


def chained() -> Iterator[str]:
    """List the models that are run a layer at a time in tests."""
    sys.path.append(str(DOCS.parent / "tests" / "support"))
    from chained_families import CHAINED

    yield ", ".join(f"`{name}`" for name in sorted({family.model for family in CHAINED})) + "."


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
        *(blocks, formats, codes, scales, dialects, carried, layouts, options, tree),
        left_behind,
        *(
            errors,
            findings,
            engines,
            serve,
            chosen,
            judged,
            classes,
            whole_engine,
            gpu_bars,
            chained,
        ),
    )
} | {
    f"traps-{engine.key.replace('.', '')}": partial(failures, engine) for engine in known_engines()
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

    text = FIGURE.sub(lambda found: f"{found[1]} -->{figure(found[1])}", text)
    return MEASURED.sub(taken, MADE.sub(made, text))


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
