"""Add the pages of the site that lie outside docs/, and lead links to them.

mkdocs.yml names this file as a hook.  Links in docs/ are those that work on GitHub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "build" / "reference"  # what docs/reference.py wrote
PAGES = {  # file of the repository -> page of the site
    "CONTRIBUTING.md": "contributing.md",
    **{
        str(path.relative_to(ROOT)): f"results/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for file, page in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        if page == "contributing.md":
            text = re.sub(r"\]\(docs/", "](", text)
            text = re.sub(r"\[([^\]]+)\]\(tests/[^)]*\)", r"`\1`", text)
        files.append(File.generated(config, page, content=text))
    for made in sorted(REFERENCE.glob("*.md")):
        files.append(File.generated(config, made.name, content=made.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links that go out of docs/ to the pages."""
    for file, page in PAGES.items():
        markdown = markdown.replace(f"](../{file}", f"]({page}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Keep options, codes and names of tensors on one line."""
    word = re.compile(r"(?<![\w.-])[\w.-]*[-_][\w.-]+")

    def span(word: re.Match[str]) -> str:
        return f'<span class="whole">{word[0]}</span>' if len(word[0]) < 30 else word[0]

    def whole(found: re.Match[str]) -> str:
        return word.sub(span, found[0])

    return re.sub(r"(?<=<code>)[^<]{1,60}(?=</code>)", whole, html)


def on_post_build(config: Any, **_: Any) -> None:
    """Take the frame that stands for a worker from docs/; the plugin names an address."""
    site = Path(config["site_dir"])
    for page in site.rglob("*.html"):
        shim = "../" * (len(page.relative_to(site).parts) - 1) + "offline_search.js"
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("https://unpkg.com/iframe-worker/shim", shim), "utf-8")
