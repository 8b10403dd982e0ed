"""Pages for people stay short: words typed by hand are counted, code included, what is made left
out; each says for whom it is; the paths of docs/index.md can be read in half an hour.
"""

import re
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from sessions import BLOCK, COMMAND
from tables import FIGURE, MADE, MEASURED, PAGES

MOST_WORDS = 32_000  # of all pages, README.md and CONTRIBUTING.md
MOST_PAGES = 18
MOST_OF_A_PATH = 5_000
MOST_OF_THE_CHANGELOG = 300  # for a release
PATHS = ("One card at home", "Thirty models a month", "Kernels of your own")


def by_hand(text: str) -> str:
    """A page without tables, figures and output that commands write."""
    text = BLOCK.sub(lambda block: COMMAND.sub(r"$ \1\n", block[0]), text)
    text = FIGURE.sub("", MEASURED.sub("", MADE.sub("", text)))
    return re.sub(r"<!--.*?-->", "", text)


def words(text: str) -> int:
    return len(by_hand(text).split())


def section(text: str, anchor: str) -> str:
    """A heading's part of a page, to the next one of its level; the page without an anchor."""
    if not anchor:
        return text
    parts = re.split(
        r"^(?=#+ )",
        re.sub(
            r"^(```.*?^```)", lambda one: one[0].replace("\n#", "\n\0#"), text, flags=re.S | re.M
        ),
        flags=re.M,
    )
    names = [
        re.sub(r"[^\w\s-]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-")
        for part in parts
    ]
    first = names.index(anchor)
    level = re.match("#*", parts[first])[0]
    rest = iter(parts[first + 1 :])
    more = []
    for part in rest:
        if len(re.match("#*", part)[0]) <= len(level):
            break
        more.append(part)
    return parts[first] + "".join(more)


def test_all_pages_together_are_short() -> None:
    pages = {
        page.name: words(page.read_text("utf-8")) for page in (*PAGES, ROOT / "CONTRIBUTING.md")
    }
    assert sum(pages.values()) <= MOST_WORDS, pages
    assert len(PAGES) - 1 <= MOST_PAGES


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_says_for_whom_it_is(page: Path) -> None:
    assert re.match(r"# .+\n\n\*For (everyone|who)[^*]+\*\n", page.read_text("utf-8"))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_short(path: str) -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    steps = re.findall(
        r"\]\(([^)#]+)(?:#([^)]+))?\)", section(index, path.lower().replace(" ", "-"))
    )
    read = {
        step: words(section((ROOT / "docs" / step[0]).read_text("utf-8"), step[1]))
        for step in steps
    }
    assert len(read) > 3
    assert sum(read.values()) <= MOST_OF_A_PATH, read


def test_the_changelog_is_short() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.M)
    assert [
        len(each.split()) for each in releases if len(each.split()) > MOST_OF_THE_CHANGELOG
    ] == []
