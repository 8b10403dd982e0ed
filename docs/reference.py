"""Write the pages of the site that come from the code alone: options, errors, findings, engines,
modules, gallery.  `make site` puts them into build/reference; git has none of them.

python docs/reference.py build/reference
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs"), str(ROOT / "tests" / "support")]
from engine_tables import engines, failures, table  # noqa: E402
from judge_tables import classes, judged, whole_engine  # noqa: E402

from fp4convert.cli.commands import COMMANDS  # noqa: E402
from fp4convert.engines.files import OTHERS, known_engines  # noqa: E402
from fp4convert.errors import read_catalogue  # noqa: E402
from fp4convert.recipes.options import help_with_words, is_required  # noqa: E402

PACKAGE = ROOT / "fp4convert"
FLOORS = ROOT / "tests" / "repository" / "test_architecture.py"  # has the table of floors
NAME_WIDTH = 28  # of a module in the tree


def options() -> Iterator[str]:
    """List every command with its help and its options, as they are declared."""
    yield "# Options\n"
    yield "An option without a default is off, or its meaning names the default. In Python every"
    yield "option is a parameter of the same name ([Python](python.md)).\n"
    for name, command in COMMANDS.items():
        yield f"## {name}\n"
        text = inspect.cleandoc(command.options.__doc__ or "")
        yield text.partition("\n\n")[0].replace("\n", " ") + "\n"
        rows: list[tuple[object, ...]] = []
        for each in command.declared():
            flags = each.option.flags or (f"--{each.name.replace('_', '-')}",)
            spelled = each.name.upper() if each.option.is_argument else ", ".join(flags)
            default = "required" if is_required(each) else each.default
            shown = "" if default in (None, False, ()) else default
            hidden = " (Python only)" if each.name in command.hidden else ""
            row = (f"`{spelled}`{hidden}", shown, help_with_words(each.option).replace("|", "\\|"))
            rows.append(row)
        yield from table(("option", "default", "meaning"), rows)
        yield ""


def errors() -> Iterator[str]:
    """List every error, what it means and what to do."""
    yield "# Errors\n"
    yield "`fp4convert explain CODE` prints a row. [Exit codes](start.md#exit-codes) say what is"
    yield "on the disk.\n"
    headings = ("code", "exit", "what it means", "where it comes from", "what to do")
    yield from _topics("errors", headings, "exits")


def findings() -> Iterator[str]:
    """List every finding, what it means and what to do."""
    yield "# Findings\n"
    yield "`fp4convert explain CODE` prints a row; [Is it good?](quality.md) says what they mean."
    yield "*Seen*: alone, by `inspect`; with `--source`; by `verify`, which sees all others, too.\n"
    headings = ("code", "level", "what it means", "seen", "what to do")
    yield from _topics("findings", headings, "levels")


def _topics(kind: str, headings: tuple[str, ...], listed: str) -> Iterator[str]:
    """Write a table for each topic of the catalogue; the key `listed` has a list."""
    for topic in read_catalogue()[kind]:
        rows: list[tuple[object, ...]] = []
        for code, row in topic["codes"].items():
            others = [text for key, text in row.items() if key != listed]
            rows.append((f"`{code}`", ", ".join(map(str, row[listed])), *others))
        yield f"## {topic['heading']}\n"
        yield from table(headings, rows)
        yield ""


def engine_tables() -> Iterator[str]:
    """List what engines load and fail at, and what their own code made of artifacts."""
    yield "# Engines: tables\n"
    yield "Made from `configs/engines` and from what `make engines` saw; [Engines](engines.md) says"
    yield "what the words mean.\n\n## What loads\n"
    yield from engines()
    yield "\n## What fails\n"
    for engine in known_engines(OTHERS):
        yield f"### {engine.name}\n"
        yield from failures(engine)
        yield ""
    yield "## Judged by the engines' own code\n"
    yield "How many families are held byte for byte; numbers are reasons, below the table.\n"
    yield from judged()
    yield "\n## Classes\n"
    yield from classes()
    yield "\n## A prompt in vLLM's whole engine\n"
    yield "Against what `fp4convert dequantize` makes of the same artifact, on a CPU.\n"
    yield from whole_engine()
    yield "\n## Classes that `calibrate` was compared with\n"
    from chained_families import CHAINED

    yield ", ".join(f"`{name}`" for name in sorted({family.model for family in CHAINED})) + "."


def modules() -> Iterator[str]:
    """Draw the package, floor after floor, with the first line of every docstring."""
    yield "# Modules\n"
    yield "A package imports from lower floors only ([how it is built](architecture.md)).\n\n```"
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


def gallery() -> Iterator[str]:
    """Show each family's commands and plan."""
    from gallery import text

    yield text()


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "options.md": options,
    "errors.md": errors,
    "findings.md": findings,
    "engine-tables.md": engine_tables,
    "modules.md": modules,
    "gallery.md": gallery,
}


def main(arguments: list[str]) -> int:
    """Write every page."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in PAGES.items():
        (folder / name).write_text("\n".join([*lines(), ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
