"""Make README.md what the package index shows, which has that file and no clone.

python deploy/package_readme.py https://github.com/OWNER/NAME TAG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
RELATIVE = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\]\()(?!https?:|#|mailto:)(?P<path>[^)\s]+)")
CLONE = re.compile(r"(?<=## Install\n\n).*?(?=is a light install)", re.DOTALL)
INDEX = """With Python 3.11 or newer, on Linux or macOS:

```
pip install fp4convert
```

`uvx fp4convert` runs it without that. It """


def package_readme(text: str, repository: str, tag: str) -> str:
    """Return the text for the index: its own install line, links to the tag's files."""
    text, count = CLONE.subn(INDEX, text)
    if count != 1:
        raise ValueError("README.md has no section Install of a clone")
    return RELATIVE.sub(
        lambda link: (
            f"{link['image']}{link['text']}{repository}/"
            f"{'raw' if link['image'] else 'blob'}/{tag}/{link['path']}"
        ),
        text,
    )


if __name__ == "__main__":
    README.write_text(package_readme(README.read_text("utf-8"), *sys.argv[1:3]), "utf-8")
