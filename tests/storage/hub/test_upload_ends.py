"""Uploads that get nowhere end, and people are told when."""

import time

import pytest
from fakehub_uploads import OWNED
from pushing import MANY, refusal, requests

from fp4convert.errors import OutputError
from fp4convert.storage.hub.retry import Patience

SOON = 30.0  # seconds that a busy machine may take
TRIES = 2 * 6  # ours, of each of which huggingface_hub makes six


@pytest.fixture
def hasty(hub, monkeypatch):
    monkeypatch.setattr("fp4convert.storage.hub.api.TELL_SECONDS", 0.1)
    patience = Patience(0.05, first_seconds=0.01)
    monkeypatch.setattr("fp4convert.storage.hub.upload.Patience", lambda: patience)


def test_a_hub_that_always_makes_the_repository_otherwise_is_given_up(hasty, hub, made, told):
    """huggingface_hub asks again without an end or a pause."""
    words = b'{"error": "Cannot create repo: another conflicting operation is in progress"}'
    create = {"where": "hub", "method": "POST", "match": "repos/create", "times": 1 << 30}
    hub.fault("status", status=409, body=words, **create)
    began = time.monotonic()
    error = refusal(OutputError, made, told)
    hub.faults.clear()  # the thread that asks ends
    assert time.monotonic() - began < SOON
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert "did not end its answer in 1.20 s" in error.message
    assert any("given up after 1.20 s" in line for line in told)
    assert requests(hub, "POST", "repos/create") <= 3  # pauses of 0.5 s, then 1 s


@pytest.mark.parametrize("kind", ["status", "cut-before"])
def test_a_storage_that_takes_nothing_is_given_up(kind, hub, made, told):
    hub.fault(kind, status=500, where="storage", method="PUT", times=MANY)
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert "2 tries at 127.0.0.1" in error.message
    # The first file while it is made, and once more at the end: the second waits for that.
    assert requests(hub, "PUT", "") == 2 * TRIES
    assert sum("not uploaded yet" in line for line in told) == 1, "for both files"
    assert sum("try 2 of 2" in line for line in told) == 2
    assert list(hub.repos) == [f"{OWNED}/q"]


@pytest.mark.parametrize("status", [413, 507])
def test_a_storage_that_refuses_for_good_is_asked_once(status, hub, made, told):
    hub.fault("status", status=status, where="storage", method="PUT", times=MANY)
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "push-refused")
    assert f"{hub.storage.removeprefix('http://')} answers HTTP {status}" in error.message
    assert not any("try 2" in line for line in told)


def test_a_storage_that_swallows_without_a_word_is_given_up(hasty, hub, made, told, monkeypatch):
    monkeypatch.setattr("fp4convert.storage.hub.api.ANSWER_FACTOR", 1)
    monkeypatch.setattr("fp4convert.storage.hub.api.LEAST_RATE", 1 << 30)
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", get_patient_session)
    hub.fault("stall", where="storage", method="PUT", seconds=60, times=MANY)
    began = time.monotonic()
    error = refusal(OutputError, made, told)
    hub.release()
    assert time.monotonic() - began < SOON
    assert "did not end its answer in 0.20 s" in error.message


def get_patient_session():
    """A client that waits as long as anything comes, as for bytes that drip."""
    import httpx2

    return httpx2.Client(timeout=60.0)
