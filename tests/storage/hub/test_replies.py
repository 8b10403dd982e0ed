"""Replies that no Hub should give: each ends as an error that says so, or is asked for again."""

import json

import pytest
from checkpoints import run, write_llama
from fakehub import Storage
from fakehub_uploads import _UploadHub
from hub_cases import NVFP4, ask

TOO_MANY = "9" * 5000  # digits, of which Python makes no number
NO_LIST = "its reply is not a list of files"
SECOND_SUPERSCRIPT = "\xb2"  # a digit to Python, and no number


@pytest.fixture
def repository(hub, tmp_path):
    hub.add("org/m", write_llama(tmp_path / "m"))
    return hub


def refusal(tmp_path) -> dict:
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert outcome.code == 3
    return outcome.json["error"]


def send(handler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})
    handler.close_connection = True


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "body",
    [
        b"<html>Log in</html>",
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"id": "m", "siblings": [1]}',
        b"[" * 100_000,
    ],
)
def test_a_list_that_is_none(body, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(_UploadHub, "do_GET", lambda handler: send(handler, 200, body))
    error = refusal(tmp_path)
    assert error["code"] == "source-unreachable"
    assert NO_LIST in error["message"]


@pytest.mark.parametrize(
    "lie",
    [
        {"size": "5"},
        {"size": -5},
        {"size": 1 << 70},
        {"size": 5.5},
        {"blobId": 5},
        {"blobId": "zz"},
        {"rfilename": None},
    ],
)
def test_a_file_that_cannot_be(lie, repository, tmp_path, monkeypatch):
    check_listing(
        lambda listed: listed["siblings"].append(
            {"rfilename": "x", "size": 5, "blobId": "0" * 40, **lie}
        ),
        monkeypatch,
    )
    assert refusal(tmp_path)["code"] == "bad-listing"


@pytest.mark.parametrize("commit", [None, 5, "../../x", "\x1b[31m"])
def test_a_commit_that_cannot_be(commit, repository, tmp_path, monkeypatch):
    check_listing(lambda listed: listed.update(sha=commit), monkeypatch)
    assert refusal(tmp_path)["code"] == "bad-listing"


def check_listing(change, monkeypatch) -> None:
    """From now on the Hub lists what `change` makes of its lists."""
    answer = _UploadHub.answer

    def answer_otherwise(handler, status, body=b"", headers=None):
        if handler.path.startswith("/api/models/org/m") and status == 200:
            listed = json.loads(body)
            change(listed)
            body = json.dumps(listed).encode()
        answer(handler, status, body, headers)

    monkeypatch.setattr(_UploadHub, "answer", answer_otherwise)


@pytest.mark.parametrize(
    "found", [f"bytes 0-9/{TOO_MANY}", f"bytes {TOO_MANY}-9/10", "bytes */10", "\x1b[31m"]
)
def test_a_range_that_cannot_be(found, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Storage, "do_GET", lambda handler: send(handler, 206, b"x", Content_Range=found)
    )
    assert "Content-Range" in refusal(tmp_path)["message"]


@pytest.mark.parametrize(
    "asked",
    [
        SECOND_SUPERSCRIPT,
        f"Mon, 01 Jan {TOO_MANY} 00:00:00 GMT",
        "Mon, 01 Jan 2020 00:00:00 +99999999999",
    ],
)
def test_a_time_to_wait_that_cannot_be(asked, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(Storage, "do_GET", lambda handler: send(handler, 429, Retry_After=asked))
    assert "HTTP 429" in refusal(tmp_path)["message"]


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".com", ".com"])
def test_a_redirect_to_a_host_that_cannot_be(host, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(
        _UploadHub,
        "_resolve",
        lambda handler, *what: send(handler, 302, Location=f"http://{host}/x"),
    )
    assert "no host can have that name" in refusal(tmp_path)["message"]


def test_a_list_that_comes_at_the_second_try(repository, tmp_path):
    repository.fault("status", where="hub", match="api/models", status=200)
    assert run("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 0
