"""Take the pictures of docs/report.md, wide and light, narrow and dark.

python docs/pictures.py REPORT.html
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {  # width, scheme, height
    "report.png": (1280, "light", 1480),
    "report-narrow.png": (390, "dark", 1480),
}


def main(report: Path) -> None:
    """Write every picture, and print its place."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from browser import browser

    with browser() as tab:
        for name, (width, scheme, height) in PICTURES.items():
            tab.scheme(scheme)
            tab.open(report, width)
            print(tab.picture(ROOT / "docs" / "pictures" / name, height).relative_to(ROOT))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
