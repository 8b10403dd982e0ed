"""What a person reads when the network fails: what happened, at which host, after how many tries,
and what to do.
"""

import http.client
import json
import socket
import ssl

import pytest
from hub_cases import ask

from fp4convert.errors import SourceError
from fp4convert.storage.hub.api import plain_words
from fp4convert.storage.hub.http import AGAIN, RangeReader, RemoteFile
from fp4convert.storage.hub.retry import Patience, Retry

REFUSED, UNKNOWN, LATE = "refuses the connection", "no such host", "did not answer in time"


@pytest.fixture
def closed_port():
    """A port of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return port


@pytest.fixture
def silent_port():
    """One that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def check_listing(monkeypatch, endpoint: str, words: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    outcome = ask("inspect", "org/m", "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"], error["next"]) == (3, "source-unreachable", AGAIN)
    assert (
        f"cannot be listed by {endpoint.partition('//')[2]}: 6 tries, the last: "
        in error["message"]
    )
    assert words in error["message"]


def test_a_list_that_nobody_gives(hub, closed_port, silent_port, monkeypatch):
    monkeypatch.setattr(
        "fp4convert.storage.hub.source.Patience", lambda: Patience(0.1, first_seconds=0.01)
    )
    check_listing(monkeypatch, f"http://127.0.0.1:{closed_port}", REFUSED)
    check_listing(monkeypatch, "https://hub.invalid", UNKNOWN)
    check_listing(monkeypatch, f"http://127.0.0.1:{silent_port}", LATE)
    check_listing(monkeypatch, f"https://127.0.0.1:{hub.endpoint.rpartition(':')[2]}", "TLS")


def check_range(place: str, words: str) -> None:
    reader = RangeReader({}, Patience(0.1, first_seconds=0.01), print)
    file = RemoteFile("f", f"{place}/m/resolve/c/f", 100, "0" * 40, "c")
    with pytest.raises(SourceError, match=words) as caught:
        reader.read_into(file, 0, memoryview(bytearray(10)))
    assert f"from {place.partition('//')[2]}: 6 tries without progress" in str(caught.value)
    assert caught.value.next_step == AGAIN


def test_a_range_that_nobody_gives(hub, closed_port, silent_port):
    check_range(f"http://127.0.0.1:{closed_port}", REFUSED)
    check_range("http://hub.invalid", UNKNOWN)
    check_range(f"http://127.0.0.1:{silent_port}", LATE)
    check_range(f"https://127.0.0.1:{hub.endpoint.rpartition(':')[2]}", "TLS")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ssl.SSLCertVerificationError("x"), "certificate is not trusted"),
        (ConnectionResetError(104, "x"), "broke the connection off"),
        (http.client.RemoteDisconnected("x"), "broke the connection off"),
        (http.client.IncompleteRead(b""), "ended early"),
        (http.client.BadStatusLine("x"), "does not speak HTTP"),
        (OSError(113, "No route to host"), "No route to host"),
        (ValueError("x"), "ValueError"),
        (json.JSONDecodeError("x", "", 0), "no JSON"),
        (type("ReadTimeout", (Exception,), {})("x"), "did not answer in time"),
        (type("RemoteProtocolError", (Exception,), {})("x"), "broke the connection off"),
    ],
)
def test_words_of_other_failures(error, words):
    assert words in plain_words(error)


def test_a_hub_that_does_not_answer_is_told_after_the_first_failure():
    told: list[str] = []
    retry = Retry(Patience(tries=4, first_seconds=0.25), told.append)
    trouble = "huggingface.co: HTTP 503"
    assert [retry.wait(failures, trouble) for failures in (1, 2, 3, 4)] == [True] * 3 + [False]
    assert [line.partition(" in ")[0] for line in told] == [
        f"{trouble}; try 3 of 4",
        f"{trouble}; try 4 of 4",
    ]
    retry.wait(3, trouble)
    other = len(told)
    retry._news_at += 60  # another thread has just told as much
    retry.wait(2, trouble)
    assert len(told) == other
