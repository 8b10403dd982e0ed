"""Whatever a command waits for: when it is told to stop, it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
from checkpoints import (
    llama_shards,
    run,
    start,
    wait_until,
    write_checkpoint,
    write_zeros,
)
from hub_cases import NVFP4

from fp4convert import process
from fp4convert.execution.plan_file import TaskFiles, read_manifest
from fp4convert.process import Stopped

EVERY = 10_000
SOON = 15.0  # seconds, on a busy machine; whoever is not stopped waits for 20 at least
SLOW = {"Retry-After": "600"}


@pytest.fixture
def repositories(hub, tmp_path):
    shards = llama_shards()  # and a vector, for a small shard is fetched whole, at once
    next(iter(shards.values()))["model.filler"] = "BF16", (1 << 20,), bytes(2 << 20)
    folder = write_checkpoint(tmp_path / "m", shards, None)
    assert run("quantize", folder, *NVFP4, "-o", tmp_path / "q").code == 0
    hub.add("org/m", folder)
    hub.add("org/q", tmp_path / "q")
    return hub


QUANTIZE = ("quantize", "org/m", "--format", "nvfp4", "-o", "OUT")
INSPECT, VERIFY = ("inspect", "org/q"), ("verify", "org/q", "--source", "org/m")
LISTING, HEADERS = {"where": "hub", "match": "api/models"}, {"match": "safetensors"}
SCALES = {"match": "safetensors", "after": 4}  # headers come twice
WEIGHTS = {"match": "/m/.*safetensors", "after": 4}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["stall", "status"])
@pytest.mark.parametrize(
    ("command", "where"),
    [
        (QUANTIZE, LISTING),
        (QUANTIZE, {"where": "hub", "match": "config.json"}),
        (QUANTIZE, HEADERS),
        (QUANTIZE, {**WEIGHTS, "after": 3}),  # what both shards need comes once
        (INSPECT, LISTING),
        (INSPECT, HEADERS),
        (INSPECT, SCALES),
        (VERIFY, SCALES),
        (VERIFY, WEIGHTS),
    ],
)
def test_a_command_that_waits_ends_soon(command, where, kind, number, repositories, tmp_path):
    options = {"at": 0, "seconds": 600.0} if kind == "stall" else {"status": 429, "headers": SLOW}
    if kind == "stall" and where is LISTING:
        pytest.skip("the list is no file; see the test of a Hub that says nothing")
    fault = repositories.fault(kind, times=EVERY, **where, **options)
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    with start(*words) as process:
        wait_until(lambda: fault.times < EVERY, process)
        time.sleep(0.3)
        err = _end(process, number)
    told = (
        "Continue with: fp4convert quantize"
        if command is QUANTIZE
        else f"Begin again with: fp4convert {command[0]}"
    )
    assert told in err
    assert ("finished shards are kept" in err) == (command is QUANTIZE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hub_that_takes_a_connection_and_says_nothing(number, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with start("inspect", "org/q") as process:
            connection, _ = listener.accept()
            with connection:
                _end(process, number)


UNHEARD = """
import signal, threading, time
import fp4convert.__main__
from fp4convert.cli import app as cli
def app(args, standalone_mode):
    # It gets the signals that the main thread does not.
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    print("waiting", flush=True)
    threading.Event().wait()
cli.make_app = lambda called, is_list: app
fp4convert.__main__.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_does_not_reach_the_main_thread_ends_its_wait(number):
    """As one does that comes just before the wait begins."""
    with subprocess.Popen(
        [sys.executable, "-c", UNHEARD, "doctor"], stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        _end(process, number)


def _end(process, number: int) -> str:
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=SOON)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == (143 if number == signal.SIGTERM else 130), err
    assert "interrupted" in err
    assert "Traceback" not in err
    return err


def test_a_long_check_of_what_is_written(tmp_path):
    """24 GB of holes, which take half a minute to be hashed."""
    source, out = write_zeros(tmp_path / "m", count=2, rows=1024), tmp_path / "q"
    assert run("quantize", source, "--format", "nvfp4", "-o", out, "-q").code == 0
    grow(out, 24 << 30)
    with start("merge", out) as process:
        wait_until(lambda: is_reading(process.pid, out), process)
        _end(process, signal.SIGINT)
    assert not list((out / ".fp4convert" / "claims").iterdir())


def grow(out, nbytes: int) -> None:
    """Make a finished shard long, and the plan and the record of its task say so."""
    manifest = read_manifest(out)
    tasks = tuple(TaskFiles(task.key, dict.fromkeys(task.files, nbytes)) for task in manifest.tasks)
    for file in manifest.shards:
        os.truncate(out / file, nbytes)
    (out / ".fp4convert" / "plan.json").write_text(
        json.dumps(replace(manifest, tasks=tasks).as_json())
    )


def is_reading(process: int, out: Path) -> bool:
    with suppress(OSError):
        return any(
            str(out / "part-") in os.readlink(place)
            for place in Path(f"/proc/{process}/fd").iterdir()
        )
    return False


STOPPING = """
import os, sys
import fp4convert.__main__

def stop(*_):
    os.kill(os.getpid(), {number})

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "{place}":
            sys.meta_path.remove(self)
            stop()

sys.meta_path.insert(0, Stop())
{more}
fp4convert.__main__.main()
"""


def stopped_at(number: int, *words: str, place: str = "", more: str = ""):
    """A command that is told to stop when it loads a module, or calls what `more` replaces."""
    code = STOPPING.format(number=int(number), place=place, more=more)
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["fp4convert.cli.app", "typer", "fp4convert.cli.screen"])
@pytest.mark.sweep(2)
def test_while_the_command_line_is_still_loaded(place, number):
    ended = stopped_at(number, "doctor", "--json", place=place)
    assert ended.returncode == 128 + number
    error = json.loads(ended.stdout)["error"]
    assert (error["code"], error["exit"]) == ("interrupted", 128 + number)
    assert error["next"].endswith(" with: fp4convert doctor --json")
    assert "interrupted" in ended.stderr
    assert "Traceback" not in ended.stderr
    bare = stopped_at(number, "doctor", place=place)
    assert (bare.returncode, bare.stdout) == (128 + number, "")
    assert bare.stderr.startswith("error[interrupted]: ")


def test_a_stop_waits_for_no_thread_of_another_package():
    """As one that transformers had just begun to load a layer with, of which its pool knows not."""
    more = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
    ended = stopped_at(signal.SIGTERM, "doctor", place="typer", more=more)
    assert (ended.returncode, ended.stderr.split()[0]) == (143, "error[interrupted]:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_after_the_last_word_adds_none(number):
    more = "from fp4convert.cli.screen import Screen; Screen.{} = stop"
    done = stopped_at(number, "doctor", "--json", more=more.format("end"))
    assert (done.returncode, "fp4convert" in json.loads(done.stdout)) == (0, True)
    failed = stopped_at(number, "inspect", "a-b-c", "--json", more=more.format("print_error"))
    assert failed.returncode == 2
    assert json.loads(failed.stdout)["error"]["code"] != "interrupted"


def test_a_stop_that_other_code_made_an_error_of_its_own_comes_out_again(monkeypatch):
    """As C code does that imports a module: what it was told becomes an ImportError."""
    stopped = Stopped(signal.SIGTERM)
    monkeypatch.setattr(process, "_raised", [stopped])
    with pytest.raises(Stopped) as caught, process.uncovered():
        raise ImportError
    assert caught.value is stopped
    monkeypatch.setattr(process, "_raised", [])
    with pytest.raises(ImportError), process.uncovered():
        raise ImportError


def test_a_signal_is_remembered_until_somebody_listens_anew():
    script = """
import os, signal
from fp4convert import process
for number in (signal.SIGINT, signal.SIGTERM):
    process.listen()
    assert process._raised == []
    try:
        with process.uncovered():
            try:
                os.kill(os.getpid(), number)
                signal.sigtimedwait([], 1)
            except BaseException:
                raise ImportError
    except process.Stopped as stopped:
        assert stopped.number == number
        print(stopped.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["130", "143"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_large_blocks_that_are_freed_are_used_again():
    """A second block of 64 MB brings no page faults: the first was not given back."""
    code = """
import resource, sys
from fp4convert.process import reuse_freed_memory
if sys.argv[1] == "yes":
    reuse_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)[:: 4096] = b"x" * (64 << 8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), print(faults())
"""
    words = [sys.executable, "-c", code]
    found = {word: int(subprocess.check_output([*words, word])) for word in ("yes", "no")}
    assert found["yes"] < found["no"] / 10
