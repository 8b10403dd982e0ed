"""Ranges over HTTP: redirects, pauses, stops, and replies that go on too long."""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
from checkpoints import SECOND, wait_until, write_llama
from fakehub import Storage
from hub_cases import remote_file
from pushing import check_secrets
from urllib3.connection import HTTPConnection

from fp4convert.errors import Fp4Error, SourceError
from fp4convert.storage.hub.http import AgainError, RangeReader, RemoteFile, _follow
from fp4convert.storage.hub.retry import Patience, pause_of
from fp4convert.storage.hub.source import HubSource
from fp4convert.storage.source import Access

MANY = 1000
TOO_MUCH_NBYTES = 64 << 20
LONG, SOON = 90.0, 30.0  # seconds: what nobody waits for, and what a busy machine may take instead


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m")
    hub.add("org/m", folder)
    return folder


@pytest.mark.parametrize(
    "location", ["https://зеркало/f", "https://[::/f", "https://host:port/f", "https://host/a b"]
)
def test_a_redirect_to_no_address_is_tried_again_and_told(location):
    with pytest.raises(AgainError, match="not an address"):
        _follow("https://hub.example/m/resolve/c/f", location)


def test_a_server_that_asks_for_no_wait_does_not_use_up_the_tries(hub, folder):
    reader = RangeReader({}, Patience(5.0, first_seconds=0.2), lambda line: None)
    hub.fault("status", status=429, headers={"Retry-After": "0"}, match=SECOND, times=3)
    began = time.monotonic()
    reader.read_into(remote_file(hub, SECOND), 0, memoryview(bytearray(10)))
    # The least that three waits take: half of 0.2, 0.4 and 0.8 s.
    assert time.monotonic() - began > 0.7


def test_what_follows_the_bytes_asked_for_is_not_read():
    sent: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_send_too_much, args=(listener, sent), daemon=True)
        server.start()
        reader = RangeReader({}, Patience(2.0, first_seconds=0.01), print)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/m/resolve/c/f"
        buffer = bytearray(10)
        reader.read_into(RemoteFile("f", address, 100, "0" * 40, "c"), 0, memoryview(buffer))
        server.join(5)
    assert bytes(buffer) == b"x" * 10
    assert sum(sent) < TOO_MUCH_NBYTES / 2  # what buffers between the two may hold


def _send_too_much(listener: socket.socket, sent: list[int]) -> None:
    """Answers a HEAD, then a range of ten bytes with a reply of chunks that goes on."""
    with suppress(OSError):
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        connection.recv(65536)
        head = (
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes "
            "0-9/100\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode() + b"a\r\nxxxxxxxxxx\r\n")
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        while sum(sent) < TOO_MUCH_NBYTES:
            connection.sendall(chunk)
            sent.append(len(chunk))
        connection.sendall(b"0\r\n\r\n")


def test_a_limit_of_the_rate_pauses_every_thread(hub, folder):
    told, remote = [], remote_file(hub, SECOND)
    reader = RangeReader({}, Patience(5.0, first_seconds=0.01), told.append)
    reader.read_into(remote, 0, memoryview(bytearray(10)))
    hub.fault("status", status=429, headers={"Retry-After": "1"})
    hub.seen.clear()

    def read(_: int) -> None:
        for at in range(100):
            reader.read_into(remote, at, memoryview(bytearray(10)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    times = sorted(seen.at for seen in hub.seen)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) > 0.9
    assert gaps.index(max(gaps)) < len(times) // 2  # most requests come after the pause
    assert told == ["rate limited by the Hub: waiting 1 s"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "86400"}, 86400),
        ({"Retry-After": "9" * 400}, 1e12),
        ({"Retry-After": "soon"}, None),
        ({"RateLimit": '"resolvers";r=0;t=55', "Retry-After": "7"}, 55),
        ({"RateLimit": '"resolvers";r=12;t=55'}, None),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
    ],
)
def test_how_long_a_server_asks_to_wait(headers, seconds):
    assert pause_of(headers.get) == seconds


def test_a_reader_that_is_stopped_fails_at_once(hub, folder):
    source = HubSource("org/m", Access(), Patience(LONG))
    hub.fault("stall", at=10, seconds=LONG, times=MANY)
    ref = next(iter(source.checkpoint.tensors))
    threading.Timer(0.2, source.stop).start()
    began = time.monotonic()
    with pytest.raises(Fp4Error) as caught:
        source.read(ref)
    assert isinstance(caught.value, SourceError)
    assert time.monotonic() - began < SOON


@pytest.fixture
def reading(hub, folder):
    """A reader with much patience, and what it reads."""
    return RangeReader({}, Patience(LONG), print), remote_file(hub, SECOND)


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_a_stop_reaches_a_reply_that_hangs(version, reading, hub, monkeypatch):
    """Of a reply that ends with its connection, the socket is let go before the body comes."""
    monkeypatch.setattr("fakehub.Storage.protocol_version", version)
    stalled = hub.fault("stall", at=10, seconds=LONG)
    reader, file = reading

    def stop() -> None:
        wait_until(lambda: not stalled.times)
        time.sleep(0.2)
        reader.stop()

    threading.Thread(target=stop).start()
    began = time.monotonic()
    with pytest.raises(SourceError, match="stopped"):
        reader.read_into(file, 0, memoryview(bytearray(100)))
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize(("number", "asked"), [(1, ["HEAD"]), (2, ["HEAD", "GET"])])
def test_a_stop_while_a_connection_opens_has_no_byte_read(number, asked, reading, hub, monkeypatch):
    """The connection to the Hub, or that to its storage: the reply is there after the stop."""
    reader, file = reading
    connect, opened, buffer = HTTPConnection.connect, [], bytearray(100)

    def stop_and_connect(connection):
        opened.append(connection)
        if len(opened) == number:
            reader.stop()
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", stop_and_connect)
    hub.fault("stall", at=10, seconds=LONG)
    began = time.monotonic()
    with pytest.raises(SourceError, match="stopped"):
        reader.read_into(file, 0, memoryview(buffer))
    assert time.monotonic() - began < SOON
    assert not any(buffer)
    assert [seen.method for seen in hub.seen] == asked


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING])
def test_no_log_of_the_transport_tells_a_link(level, reading, hub, caplog, monkeypatch):
    """urllib3 logs the address of every request, and of a reply with a damaged header."""
    end = Storage.end_headers

    def damage(handler):
        handler._headers_buffer.append(b"damaged header: x\r\n")
        end(handler)

    monkeypatch.setattr(Storage, "end_headers", damage)
    reader, file = reading
    with caplog.at_level(level):
        reader.read_into(file, 0, memoryview(bytearray(100)))
    assert f"/{SECOND}?... " in caplog.text
    check_secrets(caplog.text)


def test_a_redirect_from_https_to_http_is_not_followed():
    with pytest.raises(AgainError, match="from https to http"):
        _follow("https://hub.example/m/resolve/c/f", "http://hub.example/f")
    assert _follow("http://127.0.0.1/f", "http://localhost/f") == "http://localhost/f"
