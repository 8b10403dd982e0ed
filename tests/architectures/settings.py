"""The few settings by hand, without which a class makes no model or hides what it may have."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "settings.toml").read_text(encoding="utf-8")
)
