"""The site of docs/ (make site): every page is in its contents; what is built fetches nothing, and
its search finds words without a server.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from browser import browser
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import reference

SITE = ROOT / "build" / "site"


def entries(nav: object) -> list[str]:
    """The pages of a part of the contents."""
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in entries(part)
    ]


def test_every_page_is_in_the_contents_once() -> None:
    listed = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    elsewhere = {"contributing.md"} | {
        f"results/{page.name}" for page in (ROOT / "benchmarks" / "results").glob("*.md")
    }
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted(pages | elsewhere | {*reference.PAGES})


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built anew; a link that leads nowhere fails it."""
    subprocess.run(["make", "site"], cwd=ROOT, check=True)
    return SITE


@pytest.mark.system
def test_no_page_fetches_anything(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]*src=.?https?:|<link[^>]*stylesheet[^>]*https?:"
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"url\(.?https?:|@import", text), style


@pytest.mark.system
def test_search_finds_a_word_without_a_server(site: Path) -> None:
    with browser() as tab:
        tab.size(1400, 900)
        tab.call("Page.navigate", url=(site / "index.html").as_uri())
        tab.wait("document.readyState === 'complete'")
        tab.value("document.querySelector('.md-search__input').focus()")
        time.sleep(0.5)  # the index is read when the field is looked at
        tab.call("Input.insertText", text="swizzl")
        for kind in ("keyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key="e", text="e")
        tab.wait("document.querySelector('.md-search-result__link')")
        links = tab.value(
            "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        )
        assert any("glossary.html" in link for link in links)
        assert tab.said == []
        assert [
            address for address in tab.asked if not address.startswith(("file:", "data:"))
        ] == []
