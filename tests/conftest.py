"""What whole modules of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_models import offline


@pytest.fixture(scope="module", autouse=True)
def _offline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines are kept from asking a hub."""
    if request.node.get_closest_marker("engine"):
        with offline():
            yield
    else:
        yield
