"""The tables in docs/*.md are those that the code makes, the pages of the site alone can be made;
links between pages lead somewhere.
"""

import re
import sys
from pathlib import Path

import pytest
from paths import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import functions  # noqa: E402
import reference  # noqa: E402
from tables import MADE, PAGES, PARTS, families, figure, filled, measured, offsets  # noqa: E402

from fp4convert.numerics.scale_layouts import LAYOUTS  # noqa: E402
from fp4convert.recipes.toml_files import FAMILIES  # noqa: E402


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    """After a change on purpose: make docs."""
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text
    # A figure's marker stands at the end of its line: nobody reads it within a sentence.
    assert not re.search(r"<!-- [^\n]* is [\w.-]+\.md, [^\n]*-->[^\n<]*\w", text)


def test_functions_of_python_are_those_that_options_declare() -> None:
    """After a change of an option, or of a command's docstring: make docs."""
    assert functions.text() == functions.FILE.read_text(encoding="utf-8")


def test_the_index_of_recipes_names_what_they_name() -> None:
    """After a new recipe: make docs."""
    assert families() == FAMILIES.read_text(encoding="utf-8")


def test_tables_of_options_have_what_help_has() -> None:
    text = "\n".join(reference.options())
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    for page in sorted((ROOT / "tests" / "golden" / "help").glob("*.txt")):
        if page.stem in sections:
            rows = re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", page.read_text("utf-8"), re.MULTILINE)
            assert "--json" in rows
            section = sections[page.stem]
            lacking = {flag for flag in rows if not re.search(f"[` ]{flag}[`,]", section)}
            assert (page.stem, lacking) == (page.stem, {"--help"})


def test_every_table_is_used_once() -> None:
    used = [found[1] for page in PAGES for found in MADE.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(used) == sorted(PARTS)


RESULTS = """# Speed

Some processor, 2 cores.

## First

Words.

| a | b |
| --- | --- |
| 1 | 2 |

## Second

| c |
| --- |
| 3 |
"""


def test_measured_tables_are_those_below_their_heading() -> None:
    assert list(measured(RESULTS, "First")) == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
        "",
        "Some processor, 2 cores.",
    ]
    assert list(measured(RESULTS, "Second"))[:3] == ["| c |", "| --- |", "| 3 |"]
    assert (
        list(measured(RESULTS + "\nPart `b`: elsewhere.\n", "First"))[-1] == "Part `b`: elsewhere."
    )
    with pytest.raises(KeyError):
        list(measured(RESULTS, "Third"))


FIGURES = """# Speed

Some processor.

## Whole

| cache | rule | s |
| --- | --- | --- |
| warm | amax | 2.96 |
| warm | mse | 1,234.5 |
| cold | mse (squares) | 61.2 |
"""


def test_a_figure_is_that_of_its_row_and_column(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    (tmp_path / "a.md").write_text(FIGURES)
    assert figure("a.md, Whole, warm, s") == "2.96"
    assert figure("a.md, Whole, warm + mse, s") == "1,234.5"
    assert figure("a.md, Whole, cold + mse, s") == "61.2"
    marker = "<!-- {} is a.md, Whole, cold, s -->"
    assert filled(f"In 9 s, 39 times. {marker.format(9)}") == (
        f"In 61.2 s, 39 times. {marker.format(61.2)}"
    )
    with pytest.raises(ValueError, match="expected 9 of"):
        filled(f"In 39 s, or 9.5. {marker.format(9)}")
    for nowhere in ("a.md, Part, warm, s", "a.md, Whole, hot, s"):
        with pytest.raises(KeyError):
            figure(nowhere)
    with pytest.raises(ValueError, match="ms"):
        figure("a.md, Whole, warm, ms")


def test_a_page_with_another_figure_than_the_results_is_found() -> None:
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    changed = page.replace("| warm | amax |", "| lukewarm | amax |")
    assert changed != page == filled(changed)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))],
    ids=lambda page: page.name,
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"(?:\]\(|src=\")(?!https?:)([^)#\"]*)(?:#([^)]+))?[)\"]", text)
    for file, heading in links:
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not heading or heading in anchors(target.read_text("utf-8")), f"{file}#{heading}"


def test_pages_that_the_program_names_exist() -> None:
    parts = ("fp4convert", "configs", "deploy", "benchmarks")
    files = [file for part in parts for file in (ROOT / part).rglob("*.*") if file.is_file()]
    texts = (file.read_text("utf-8", "ignore") for file in files if file.suffix in (".py", ".toml"))
    named = {name for text in texts for name in re.findall(r"(?<![\w/])docs/[\w-]+\.md", text)}
    assert "docs/recipes.md" in named
    assert {
        name for name in named - {"docs/a.md", "docs/gguf.md"} if not (ROOT / name).exists()
    } == set()


@pytest.mark.parametrize("name", [name for name in reference.PAGES if name != "gallery.md"])
def test_pages_of_the_site_alone_are_made_and_link_to_pages(name: str) -> None:
    text = "\n".join(reference.PAGES[name]())
    assert text.startswith("# ")
    for file, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        assert (
            heading is None or not heading or heading in anchors((DOCS / file).read_text("utf-8"))
        )
        assert (DOCS / file).exists() or file in reference.PAGES


def test_the_places_of_128x4_are_those_of_its_formula() -> None:
    """cuBLAS documentation, 1D block scaling factors layout: 32 rows of 16 bytes to a tile of 128
    rows and 4 blocks.
    """
    places = offsets(LAYOUTS["128x4"])
    for row in (0, 1, 31, 32, 97, 127, 128, 255):
        for block in range(8):
            tile = (row // 128) * 2 + block // 4
            assert (
                places[row, block]
                == tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
            )
