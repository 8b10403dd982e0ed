"""Servers that send a byte now and then, of whatever they send: nobody waits for them forever."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from checkpoints import FIRST, run, write_llama
from paths import ROOT

from fp4convert.errors import SourceError
from fp4convert.storage.hub.http import RangeReader, RemoteFile
from fp4convert.storage.hub.listing import LIST_FACTOR
from fp4convert.storage.hub.retry import Patience

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
RANGE = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-99999/100000\r\n"
SECONDS = 0.4  # that a reply has for LEAST bytes
LEAST = 200
PATIENCE = Patience(5.0, 3, first_seconds=0.01, least_nbytes=LEAST, least_seconds=SECONDS)
Send = Callable[[socket.socket, int], None]
SOON = 20.0  # for three tries on a busy machine; what is sent takes 1000 s and more


def slowly(connection: socket.socket, data: bytes) -> None:
    for at in range(len(data)):
        connection.sendall(data[at : at + 1])
        time.sleep(0.01)


def drip_head(connection: socket.socket, start: int) -> None:
    slowly(connection, RANGE % start + b"X-Long: " + b"x" * 60000)


def drip_body(connection: socket.socket, start: int) -> None:
    connection.sendall(RANGE % start + b"Content-Length: %d\r\n\r\n" % (100000 - start))
    slowly(connection, b"x" * (100000 - start))


def drip_chunks(connection: socket.socket, start: int) -> None:
    connection.sendall(RANGE % start + b"Transfer-Encoding: chunked\r\n\r\n")
    slowly(connection, b"1\r\nx\r\n" * (100000 - start))


def drip_the_length_of_a_chunk(connection: socket.socket, start: int) -> None:
    connection.sendall(RANGE % start + b"Transfer-Encoding: chunked\r\n\r\n")
    slowly(connection, b"0" * 60000)


def end_after_a_byte(connection: socket.socket, start: int) -> None:
    connection.sendall(RANGE % start + b"Content-Length: %d\r\n\r\nx" % (100000 - start))
    connection.shutdown(socket.SHUT_WR)


@contextmanager
def serving(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that talks over each connection in a thread of its own; gives its address."""

    def talk_on(connection: socket.socket) -> None:
        with suppress(OSError):
            talk(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=talk_on, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def read(send: Send, patience: Patience, start: int, nbytes: int, told: list[str]) -> bytes:
    """Read a range from a server that answers a HEAD at once, and a range as `send` does."""

    def talk(connection: socket.socket) -> None:
        while asked := connection.recv(65536):
            if asked.startswith(b"HEAD"):
                connection.sendall(HEAD)
            else:
                send(connection, int(asked.partition(b"bytes=")[2].partition(b"-")[0]))

    buffer = bytearray(nbytes)
    with serving(talk) as address:
        file = RemoteFile("f", f"{address}/m/resolve/c/f", 100000, "0" * 40, "c")
        RangeReader({}, patience, told.append).read_into(file, start, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (drip_head, "did not answer in time"),
        (drip_body, "it sent less than 0.20 kB in 0.40 s"),
        (drip_chunks, "it sent less than 0.20 kB in 0.40 s"),
        (drip_the_length_of_a_chunk, "it sent less than 0.20 kB in 0.40 s"),
        (end_after_a_byte, "the reply ended early"),
    ],
)
@pytest.mark.sweep(2)
def test_a_server_that_gets_nowhere_is_given_up(send, words):
    told: list[str] = []
    began = time.monotonic()
    with pytest.raises(SourceError) as caught:
        read(send, PATIENCE, 0, 100000, told)
    assert time.monotonic() - began < SOON
    assert caught.value.code == "source-unreachable"
    assert words in caught.value.message
    assert "3 tries without progress (expected 0.20 kB in 0.40 s)" in caught.value.message
    assert any("try 3 of 3" in line for line in told)


def test_a_line_that_is_slow_but_goes_on_is_waited_for():
    """2,000 bytes in 0.4 s are more than the 200 that must come: 4 KB take twice that time."""

    def trickle(connection: socket.socket, start: int) -> None:
        connection.sendall(RANGE % start + b"Content-Length: %d\r\n\r\n" % (100000 - start))
        for _ in range(80):
            connection.sendall(b"x" * 50)
            time.sleep(0.01)

    # What was asked for is there, whatever the header says of the rest.
    assert read(trickle, PATIENCE._replace(tries=1), 96000, 4000, []) == b"x" * 4000


def test_a_list_of_files_that_drips_is_given_up(monkeypatch):
    def drip_list(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{")
        slowly(connection, b" " * 99999)

    patience = Patience(0.1, 2, first_seconds=0.01)
    monkeypatch.setattr("fp4convert.storage.hub.source.Patience", lambda: patience)
    with serving(drip_list) as endpoint:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        began = time.monotonic()
        outcome = run("inspect", "org/m", "--json")
    assert time.monotonic() - began < SOON
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-unreachable")
    assert "cannot be listed by 127.0.0.1" in outcome.json["error"]["message"]
    assert "its answer did not end in 0.90 s" in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    ("where", "method", "after"),
    [("storage", "GET", 0), ("storage", "GET", 2), ("hub", "HEAD", 0)],
    ids=["a header", "a shard", "the head of a reply"],
)
@pytest.mark.sweep(3)
def test_a_byte_now_and_then_ends_the_command_with_exit_3(
    where, method, after, hub, tmp_path, monkeypatch
):
    """With the tries and the bytes that the command has, on a clock that is much faster."""
    usual = Patience()
    patience = usual._replace(least_seconds=0.2, first_seconds=0.01, longest_seconds=0.1)
    monkeypatch.setattr("fp4convert.storage.hub.source.Patience", lambda: patience)
    hub.add("org/m", write_llama(tmp_path / "m"))
    hub.fault(
        "trickle", where=where, match=FIRST, method=method, after=after, times=99, seconds=0.01
    )
    began = time.monotonic()
    outcome = run("quantize", "org/m", "--format", "nvfp4", "--json", "-o", tmp_path / "out")
    assert time.monotonic() - began < SOON
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-unreachable")
    assert f"{usual.tries} tries without progress" in outcome.json["error"]["message"]
    assert outcome.json["error"]["next"].startswith("Check that this host can be reached")


def test_the_patience_is_what_the_docs_say():
    """16 kB in a minute, six tries; a list of files three minutes each."""
    text = (ROOT / "docs" / "publish.md").read_text()
    patience = Patience()
    least = f"{patience.least_nbytes >> 10} KiB in {patience.least_seconds:.0f} seconds"
    assert least in text
    assert f"after {patience.tries} tries" in text
    assert f"{LIST_FACTOR * patience.timeout_seconds / 60:.0f} minutes" in text
