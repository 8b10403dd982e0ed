"""What whole modules of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakehub import TOKEN, FakeHub
from tiny_models import offline

from fp4convert.ranges import Patience


@pytest.fixture(scope="module", autouse=True)
def _offline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines are kept from asking a hub."""
    if request.node.get_closest_marker("engine"):
        with offline():
            yield
    else:
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub on the loopback device that this process asks, and soon gives up on; its storage must never see a token."""
    from huggingface_hub import constants

    fake = FakeHub()
    template = fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    known = {"ENDPOINT": fake.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in {**known, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    for name, value in (("HF_ENDPOINT", fake.endpoint), ("HF_HOME", str(tmp_path / "home")), ("HF_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fp4convert.sources.hub.Patience", lambda: Patience(1.0, first_seconds=0.01))
    yield fake
    fake.close()
    assert {seen.token for seen in fake.seen if seen.where == "storage"} <= {None}
