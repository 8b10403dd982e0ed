"""The browser of this folder's pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Tab, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(chromium: Tab) -> Iterator[Tab]:
    """A page in whose console nothing is said, and which asks for nothing but itself."""
    chromium.said.clear()
    chromium.asked.clear()
    yield chromium
    assert chromium.said == []
    assert {address.partition(":")[0] for address in chromium.asked} <= {"file", "data"}
    files = [address for address in chromium.asked if address.startswith("file:")]
    assert all(address.endswith(".html") for address in files)
