"""Whatever a command waits for: when it is told to stop, it ends."""

import signal
import socket
import time

import pytest
from checkpoints import run, start, write_llama
from test_hub import NVFP4

EVERY = 10_000
SLOW = {"Retry-After": "600"}


@pytest.fixture
def repositories(hub, tmp_path):
    folder = write_llama(tmp_path / "m")
    assert run("quantize", folder, *NVFP4, "-o", tmp_path / "q").code == 0
    hub.add("org/m", folder)
    hub.add("org/q", tmp_path / "q")
    return hub


QUANTIZE = ("quantize", "org/m", "--format", "nvfp4", "-o", "OUT")
INSPECT, VERIFY = ("inspect", "org/q"), ("verify", "org/q", "--source", "org/m")
LISTING, HEADERS = {"where": "hub", "match": "api/models"}, {"match": "safetensors"}
SCALES = {"match": "safetensors", "after": 4}  # headers come twice
WEIGHTS = {"match": "/m/.*safetensors", "after": 4}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["stall", "status"])
@pytest.mark.parametrize(
    ("command", "where"),
    [
        (QUANTIZE, LISTING),
        (QUANTIZE, {"where": "hub", "match": "config.json"}),
        (QUANTIZE, HEADERS),
        (QUANTIZE, WEIGHTS),
        (INSPECT, LISTING),
        (INSPECT, HEADERS),
        (INSPECT, SCALES),
        (VERIFY, SCALES),
        (VERIFY, WEIGHTS),
    ],
)
def test_a_command_that_waits_ends_within_two_seconds(command, where, kind, number, repositories, tmp_path):
    options = {"at": 0, "seconds": 30.0} if kind == "stall" else {"status": 429, "headers": SLOW}
    if kind == "stall" and where is LISTING:
        pytest.skip("the list is no file; see the test of a Hub that says nothing")
    fault = repositories.fault(kind, times=EVERY, **where, **options)
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    with start(*words) as process:
        _wait_for(lambda: fault.times < EVERY)
        _end(process, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hub_that_takes_a_connection_and_says_nothing(number, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with start("inspect", "org/q") as process:
            connection, _ = listener.accept()
            with connection:
                _end(process, number)


def _wait_for(happened) -> None:
    for _ in range(3000):
        if happened():
            time.sleep(0.3)
            return
        time.sleep(0.01)
    raise TimeoutError


def _end(process, number: int) -> None:
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, time.monotonic() - began < 2) == (143 if number == signal.SIGTERM else 130, True), err
    assert "interrupted" in err
    assert "Traceback" not in err
