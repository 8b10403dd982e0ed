"""Make the links of README.md absolute, for the package index, which has that file alone.

python deploy/absolute_links.py https://github.com/OWNER/NAME TAG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
RELATIVE = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\]\()(?!https?:|#|mailto:)(?P<path>[^)\s]+)")


def absolute(text: str, repository: str, tag: str) -> str:
    """Return the text with links to files of the repository at a tag."""
    return RELATIVE.sub(
        lambda link: (
            f"{link['image']}{link['text']}{repository}/"
            f"{'raw' if link['image'] else 'blob'}/{tag}/{link['path']}"
        ),
        text,
    )


if __name__ == "__main__":
    README.write_text(absolute(README.read_text("utf-8"), *sys.argv[1:3]), "utf-8")
