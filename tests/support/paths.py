"""Where the repository and its parts are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
GOLDEN = ROOT / "tests" / "golden"
