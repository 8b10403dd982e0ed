"""What a network does to a long download: either the bytes are right, or the command says what is
wrong.
"""

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from checkpoints import (
    FIRST,
    SECOND,
    WAIT_SECONDS,
    start,
    wait_until,
    weight,
    write_llama,
    write_single,
    write_zeros,
)
from fakehub import SIGNATURE, TOKEN, Storage
from hub_cases import NVFP4, ask, expect
from pushing import check_secrets
from urllib3.connection import HTTPConnection

from fp4convert.errors import Fp4Error, SourceError
from fp4convert.storage.hub.api import Patience, no_access, pause_of
from fp4convert.storage.hub.http import (
    AgainError,
    RangeReader,
    RemoteFile,
    _follow,
)
from fp4convert.storage.hub.source import HubSource
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access

TOO_MUCH_NBYTES = 64 << 20
LONG, SOON = 90.0, 30.0  # seconds: what nobody waits for, and what a busy machine may take instead
DROP = {"kind": "drop", "at": 700}


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000})
    hub.add("org/m", folder)
    return folder


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "faults",
    [
        [{**DROP, "times": 25}],
        [{**DROP, "times": 4, "is_reset": True}],
        [{"kind": "stall", "at": 700, "times": 2}],
        [{"kind": "status", "status": 503, "times": 5}],
        [
            {"kind": "status", "status": 500},
            {"kind": "status", "status": 504, "where": "hub", "match": "resolve", "method": "HEAD"},
        ],
        [{"kind": "status", "status": 502, "where": "hub", "match": "api/models", "times": 3}],
        [{"kind": "status", "status": 403, "times": 2}],
        [{"kind": "status", "status": 404}],
        [{"kind": "status", "status": 400}],
        [{"kind": "ignore-range", "times": 2}],
        [{"kind": "gzip"}],
        [{"kind": "status", "status": 429, "headers": {"Retry-After": "1"}}],
        [
            {
                "kind": "status",
                "status": 429,
                "where": "hub",
                "match": "api/models",
                "headers": {"RateLimit": '"api";r=0;t=1'},
            }
        ],
        [
            {**DROP, "times": 3},
            {"kind": "status", "status": 403},
            {"kind": "ignore-range"},
            {"kind": "status"},
        ],
    ],
    ids=lambda faults: "+".join(f"{fault['kind']}{fault.get('status', '')}" for fault in faults),
)
def test_what_passes_changes_no_byte(faults, hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    made = [hub.fault(**fault) for fault in faults]
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert outcome.code == 0
    told = re.compile(
        r"quantize: .+|rate limited by the Hub: waiting 1 s|.+; try [3-6] of 6 in [\d.]+ s"
    )
    assert all(told.fullmatch(line) for line in outcome.err.splitlines()), outcome.err
    assert outcome.json["digest"] == expected
    assert [fault.times for fault in made] == [0] * len(made)


def test_a_reply_that_broke_off_goes_on_where_it_broke(hub, folder, tmp_path):
    hub.fault(**DROP, match="bytes=0-")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").code == 0
    assert [
        seen.range
        for seen in hub.seen
        if seen.range and seen.range.startswith(f"bytes={DROP['at']}-")
    ] != []


def test_links_that_expire_are_resolved_again(hub, folder, tmp_path):
    hub.link_uses = 1
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert len(hub.signed) > 4


MANY = 1000


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ({"kind": "status", "status": 503, "times": MANY}, "source-unreachable", "HTTP 503"),
        ({"kind": "status", "status": 403, "times": MANY}, "source-unreachable", "HTTP 403"),
        ({"kind": "ignore-range", "times": MANY}, "source-unreachable", "HTTP 200 where 206"),
        ({"kind": "gzip", "times": MANY}, "source-unreachable", "compressed"),
        ({"kind": "drop", "at": 0, "times": MANY}, "source-unreachable", "ended early"),
        ({"kind": "etag", "after": 2}, "source-changed", "ETag"),
        ({"kind": "status", "status": 416, "after": 2}, "source-changed", "no such range"),
        (
            {"kind": "commit", "where": "hub", "method": "HEAD", "match": SECOND},
            "source-changed",
            "commit ffff",
        ),
        (
            {"kind": "size", "where": "hub", "method": "HEAD", "match": SECOND},
            "source-changed",
            "bytes and now has",
        ),
        (
            {"kind": "oid", "where": "hub", "method": "HEAD", "match": SECOND},
            "source-changed",
            "another hash",
        ),
        (
            {"kind": "status", "status": 404, "where": "hub", "method": "HEAD", "match": SECOND},
            "source-changed",
            "any more",
        ),
        (
            {"kind": "status", "status": 501, "where": "hub", "method": "HEAD", "match": SECOND},
            "source-unreachable",
            "HTTP 501",
        ),
        (
            {"kind": "status", "status": 503, "where": "hub", "match": "api/models", "times": MANY},
            "source-unreachable",
            "503",
        ),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_what_does_not_pass_is_exit_3(fault, code, word, hub, folder, tmp_path):
    hub.fault(**fault)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, code)
    assert word in outcome.json["error"]["message"]
    assert not (tmp_path / "q" / "quantization_config.json").exists()


def test_a_flipped_bit_is_found_and_the_shard_is_fetched_once_more(hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    fault = hub.fault(
        "flip", match=SECOND, at=50_000, after=4
    )  # the header came before, and what the first shard measures
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--workers", 1)
    assert outcome.json["digest"] == expected
    assert fault.times == 0


def test_what_only_came_as_nan_is_not_told_as_such(hub, tmp_path):
    folder = write_single(
        tmp_path / "nan", {"a.o_proj.weight": ("BF16", (1, 16), b"\x80\x7e" * 16)}
    )  # one bit below Inf
    hub.add("org/nan", folder)
    size = (folder / "model.safetensors").stat().st_size
    fault = hub.fault("flip", where="hub", match="model.safetensors", at=size - 1, after=2)
    assert ask("quantize", "org/nan", *NVFP4, "-o", tmp_path / "q").code == 0
    assert fault.times == 0


def test_a_shard_that_comes_damaged_twice_is_not_written_and_another_run_completes(
    hub, folder, tmp_path
):
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("flip", match=SECOND, at=50_000, after=2, times=MANY)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert SECOND in outcome.json["error"]["message"]
    assert (tmp_path / "q" / FIRST).exists()
    assert not (tmp_path / "q" / SECOND).exists()
    hub.faults.clear()
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected


def test_a_run_that_was_broken_off_goes_on_with_its_commit_though_the_branch_moved(
    hub, folder, tmp_path
):
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("status", match=SECOND, after=2, times=MANY)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 3
    hub.faults.clear()
    commit = hub.repos["org/m"].branches["main"]
    hub.add("org/m", write_single(tmp_path / "other", {"a.o_proj.weight": weight()}))
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected
    assert json.loads((tmp_path / "q" / ".fp4convert" / "plan.json").read_text())["source"] == {
        "repo": "org/m",
        "revision": commit,
    }
    assert (
        ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected
    )  # finished, too
    moved = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--revision", "main")
    assert (moved.code, moved.json["error"]["code"]) == (5, "other-plan")


def test_tries_are_counted_only_without_progress(hub, folder):
    hub.fault("drop", at=100, times=40)
    source = open_source("org/m")
    for ref in source.checkpoint.tensors:
        source.read(ref)
    assert len([seen for seen in hub.seen if seen.where == "storage"]) > 40


@pytest.mark.parametrize(
    "case",
    [
        ("org/gated", (), "", (4, "gated", "Accept the licence at")),
        ("org/private", (), "", (4, "no-access", "HF_TOKEN")),
        ("org/absent", (), "", (4, "no-access", "HF_TOKEN")),
        ("org/absent", (), TOKEN, (2, "no-source", None)),
        ("org/m", (), "hf_wrong", (4, "no-access", "HF_TOKEN")),
        ("org/m", ("--token", "hf_wrong"), TOKEN, (4, "no-access", "HF_TOKEN")),
        ("org/m", ("--revision", "v9"), TOKEN, (2, "no-revision", "--revision")),
        ("org/m", ("--subfolder", "nowhere"), TOKEN, (2, "no-subfolder", None)),
    ],
)
def test_no_access_says_what_to_do(case, hub, folder, monkeypatch):
    repo, arguments, token, expected = case
    hub.add("org/gated", folder, is_gated=True)
    hub.add("org/private", folder, is_private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    outcome = ask("quantize", repo, *NVFP4, *arguments)
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == expected[:2]
    assert (expected[2] or "") in (error["next"] or "")
    assert "hf_wrong" not in outcome.out + outcome.err
    assert len(hub.seen) < 8  # nobody tries again


@pytest.mark.parametrize(
    ("fault", "code"),
    [("", "no-source"), ("token", "no-access"), ("http", "source-unreachable")],
)
def test_what_is_not_here_and_not_there_may_be_a_mistyped_path(
    fault, code, hub, tmp_path, monkeypatch
):
    """The first part of the name is a folder; a repository is asked for all the same."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "" if fault == "token" else TOKEN)
    if fault == "http":
        hub.fault("status", where="hub", status=418, times=99)
    for name, is_told in (("out/absent", True), ("org/absent", False)):
        error = ask("verify", name, "--json").json["error"]
        assert error["code"] == code
        assert ("out is here, and out/absent is not" in error["message"]) == is_told
        assert error["next"].startswith("Look for a typing error, where a path is") == is_told


@pytest.mark.parametrize("token", ["hf_ключ", "hf_a\nb", "hf_\x7f"])
def test_a_token_that_no_request_can_carry_is_refused_without_showing_it(token, hub, folder):
    outcome = ask("quantize", "org/m", *NVFP4, "--token", token)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "bad-token")
    assert token not in outcome.out + outcome.err
    assert hub.seen == []


def test_no_message_holds_the_password_of_an_address(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://user:SECRET@hub.example")
    outcome = ask("quantize", "org/m", *NVFP4)
    assert "http://hub.example" in outcome.json["error"]["message"]
    assert "SECRET" not in outcome.out + outcome.err
    error = no_access(
        "m",
        "https://user:SECRET@hub.example:8/org/m/resolve/main/f?Signature=SECRET",
        403,
        "GatedRepo",
    )
    assert "https://hub.example:8/org/m," in (error.next_step or "")
    assert "SECRET" not in f"{error} {error.next_step}"


@pytest.mark.parametrize(
    "location", ["https://зеркало/f", "https://[::/f", "https://host:port/f", "https://host/a b"]
)
def test_a_redirect_to_no_address_is_tried_again_and_told(location):
    with pytest.raises(AgainError, match="not an address"):
        _follow("https://hub.example/m/resolve/c/f", location)


def test_a_server_that_asks_for_no_wait_does_not_use_up_the_tries(hub, folder):
    reader = RangeReader({}, Patience(5.0, first_seconds=0.2), lambda line: None)
    commit = hub.repos["org/m"].branches["main"]
    file = hub.repos["org/m"].commits[commit][SECOND]
    hub.fault("status", status=429, headers={"Retry-After": "0"}, match=SECOND, times=3)
    began = time.monotonic()
    url = f"{hub.endpoint}/org/m/resolve/{commit}/{SECOND}"
    reader.read_into(
        RemoteFile(SECOND, url, file.nbytes, file.oid, commit), 0, memoryview(bytearray(10))
    )
    assert (
        time.monotonic() - began > 0.7
    )  # the least that three waits take: half of 0.2, 0.4 and 0.8 s


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


def test_a_token_given_reads_what_is_gated(hub, folder, tmp_path, monkeypatch):
    hub.add("org/gated", folder, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", "")
    assert ask("quantize", "org/gated", *NVFP4, "-o", tmp_path / "q", "--token", TOKEN).code == 0


def test_a_token_never_goes_over_plain_http(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    outcome = ask("quantize", "org/m", *NVFP4)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "plain-http")
    assert hub.seen == []


def test_a_limit_of_the_rate_pauses_every_thread(hub, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "f").write_bytes(bytes(1 << 20))
    commit = hub.add("org/f", tmp_path / "r")
    file = hub.repos["org/f"].commits[commit]["f"]
    told = []
    reader = RangeReader({}, Patience(5.0, first_seconds=0.01), told.append)
    remote = RemoteFile(
        "f", f"{hub.endpoint}/org/f/resolve/{commit}/f", file.nbytes, file.oid, commit
    )
    reader.read_into(remote, 0, memoryview(bytearray(10)))
    hub.fault("status", status=429, headers={"Retry-After": "1"})
    hub.seen.clear()
    threads = [
        threading.Thread(
            target=lambda: [
                reader.read_into(remote, at, memoryview(bytearray(10))) for at in range(100)
            ]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = sorted(seen.at for seen in hub.seen)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) > 0.9
    assert (
        times.index(times[gaps.index(max(gaps))]) < len(times) // 2
    )  # most requests come after the pause
    assert told == ["rate limited by the Hub: waiting 1 s"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "86400"}, 900),
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
    commit = hub.repos["org/m"].branches["main"]
    file, url = (
        hub.repos["org/m"].commits[commit][SECOND],
        f"{hub.endpoint}/org/m/resolve/{commit}/{SECOND}",
    )
    return RangeReader({}, Patience(LONG), print), RemoteFile(
        SECOND, url, file.nbytes, file.oid, commit
    )


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_a_stop_reaches_a_reply_that_hangs(version, reading, hub, monkeypatch):
    """Of a reply that ends with its connection, the socket is let go before the body comes."""
    monkeypatch.setattr("fakehub.Storage.protocol_version", version)
    stalled = hub.fault("stall", at=10, seconds=LONG)
    reader, file = reading
    stopper = threading.Thread(
        target=lambda: (wait_until(lambda: not stalled.times), time.sleep(0.2), reader.stop())
    )
    stopper.start()
    began = time.monotonic()
    with pytest.raises(SourceError, match="stopped"):
        reader.read_into(file, 0, memoryview(bytearray(100)))
    assert time.monotonic() - began < SOON
    stopper.join()


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


def test_an_interrupted_download_ends_soon_and_names_no_token(hub, tmp_path):
    hub.add("org/zeros", write_zeros(tmp_path / "z", count=1))
    hub.nbytes_per_second = 1e5  # which takes more than a minute
    with start(
        "quantize", "org/zeros", "--format", "mxfp4", "-o", tmp_path / "q", "--token", TOKEN
    ) as process:
        wait_until(lambda: len(hub.seen) > 5, process)
        process.terminate()
        out, err = process.communicate(timeout=SOON)
    assert process.returncode == 143
    assert "interrupted" in err
    assert TOKEN not in out + err
    assert SIGNATURE not in out + err


def test_help_and_local_runs_load_no_client_of_the_hub(folder, tmp_path):
    code = (
        "import sys; from fp4convert.__main__ import main\ntry: main()\nexcept SystemExit: "
        "print(sorted(sys.modules))"
    )
    for arguments in (("--help",), ("quantize", folder, "--format", "nvfp4", "--dry-run")):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        loaded = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
        ).stdout
        assert "huggingface_hub" not in loaded
        assert "http.client" not in loaded
        assert "urllib3" not in loaded
