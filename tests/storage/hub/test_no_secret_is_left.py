"""What is left after a fault of the Hub or its network: no secret anywhere, nothing half done, and
the next run completes.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import FIRST, SECOND, WAIT_SECONDS, weight, write_llama, write_single
from fakehub import TOKEN
from hub_cases import NVFP4, ask, expect
from pushing import check_secrets

from fp4convert.options.access import AccessOptions
from fp4convert.storage.hub.api import Patience
from fp4convert.storage.source import Access

MANY = 1000
STATE, RECORD = ".fp4convert", "quantization_config.json"
LATE = {"match": SECOND, "after": 4}  # headers, and what the first shard measures, came before
HEAD = {"where": "hub", "method": "HEAD"}


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000})
    hub.add("org/m", folder)
    return folder


def files(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file()]


def check_aftermath(out: Path, expected: str, hub) -> None:
    """Neither files on their way nor claims nor secrets; finished shards are kept, and a re-run
    ends like a clean one.
    """
    for path in files(out):
        check_secrets(path.read_bytes().decode("latin-1"))
    assert not (out / RECORD).exists()
    if out.exists():
        assert [path for name in ("tmp", "claims") for path in (out / STATE / name).iterdir()] == []
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    hub.faults.clear()
    assert ask("quantize", "org/m", *NVFP4, "-o", out).json["digest"] == expected
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


BEFORE, MIDWAY = [], [FIRST]  # shards that are finished when it happens
FAULTS = {
    "503": ({"kind": "status", "status": 503, "times": MANY, **LATE}, "source-unreachable", MIDWAY),
    "403": ({"kind": "status", "status": 403, "times": MANY, **LATE}, "source-unreachable", MIDWAY),
    "ignored-range": (
        {"kind": "ignore-range", "times": MANY, **LATE},
        "source-unreachable",
        MIDWAY,
    ),
    "dropped": ({"kind": "drop", "at": 0, "times": MANY, **LATE}, "source-unreachable", MIDWAY),
    "reset": (
        {"kind": "drop", "at": 0, "is_reset": True, "times": MANY, **LATE},
        "source-unreachable",
        MIDWAY,
    ),
    "stalled": (
        {"kind": "stall", "at": 0, "times": MANY, "seconds": 0.5, **LATE},
        "source-unreachable",
        MIDWAY,
    ),
    "flipped": ({"kind": "flip", "at": 50_000, "times": 2, **LATE}, "source-corrupt", MIDWAY),
    "weights-etag": ({"kind": "etag", **LATE}, "source-changed", MIDWAY),
    "weights-416": ({"kind": "status", "status": 416, **LATE}, "source-changed", MIDWAY),
    "header-etag": ({"kind": "etag", "match": SECOND, "after": 1}, "source-changed", BEFORE),
    "header-size": ({"kind": "size", **HEAD, "match": SECOND}, "source-changed", BEFORE),
    "header-commit": ({"kind": "commit", **HEAD, "match": SECOND}, "source-changed", BEFORE),
    "header-oid": ({"kind": "oid", **HEAD, "match": SECOND}, "source-changed", BEFORE),
    "sidecar-size": (
        {"kind": "size", **HEAD, "match": "tokenizer.json"},
        "source-changed",
        [FIRST, SECOND],
    ),
    "sidecar-commit": (
        {"kind": "commit", **HEAD, "match": "tokenizer.json"},
        "source-changed",
        [FIRST, SECOND],
    ),
    "sidecar-flipped": (
        {"kind": "flip", "match": "tokenizer.json", "at": 3},
        "source-corrupt",
        [FIRST, SECOND],
    ),
    "gone": (
        {"kind": "status", "status": 404, **HEAD, "match": "tokenizer.json"},
        "source-changed",
        [FIRST, SECOND],
    ),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", FAULTS)
def test_after_exit_3_finished_shards_stay_and_the_next_run_completes(
    name, hub, folder, tmp_path, monkeypatch
):
    fault, code, finished = FAULTS[name]
    if name == "stalled":
        monkeypatch.setattr(
            "fp4convert.storage.hub.source.Patience", lambda: Patience(0.2, first_seconds=0.01)
        )
    expected, out = expect(hub, folder, tmp_path / "a"), tmp_path / "q"
    hub.fault(**fault)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", out, "--workers", 1)
    assert (outcome.code, outcome.json["error"]["exit"], outcome.json["error"]["code"]) == (
        3,
        3,
        code,
    )
    assert sorted(path.name for path in out.glob("*.safetensors")) == finished
    check_aftermath(out, expected, hub)


@pytest.mark.parametrize("status", [401, 403])
def test_a_right_that_is_lost_midway_is_exit_4_and_no_secret_is_told(status, hub, folder, tmp_path):
    expected, out = expect(hub, folder, tmp_path / "a"), tmp_path / "q"
    gated = {"X-Error-Code": "GatedRepo"}
    hub.fault("status", **HEAD, match="tokenizer.json", status=status, headers=gated, times=MANY)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", out)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "gated")
    assert outcome.json["error"]["next"].startswith(
        f"Accept the licence at {hub.endpoint}/org/m, then: hf auth login"
    )
    check_aftermath(out, expected, hub)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ["503", "flipped", "weights-etag", "sidecar-commit", None])
def test_not_even_the_log_of_the_hubs_client_tells_a_secret(
    name, hub, folder, tmp_path, monkeypatch
):
    """HF_DEBUG prints every request; the process ends with what the fault makes of it."""
    for variable in ("HF_DEBUG", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(variable, "debug")
    if name:
        fault = {**FAULTS[name][0], "times": 200}
        hub.fault(**{**fault, "after": min(fault.get("after", 0), 1)})  # else how many ask decides
    command = [
        sys.executable,
        "-c",
        IMPATIENT,
        "quantize",
        "org/m",
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "q",
    ]
    command = [*map(str, command), "--token", TOKEN]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert ended.returncode == (3 if name else 0)
    assert "/api/models/org/m" in ended.stderr  # it does print
    check_secrets(ended.stdout + ended.stderr)
    for path in files(tmp_path / "q"):
        check_secrets(path.read_bytes().decode("latin-1"))


IMPATIENT = """
import fp4convert.storage.hub.source as hub
from fp4convert.__main__ import main
from fp4convert.storage.hub.api import Patience
hub.Patience = lambda: Patience(1.0, first_seconds=0.01)
hub.WHOLE_NBYTES = 0
main()
"""
BUG = IMPATIENT.replace(
    "main()",
    """
from fp4convert.execution.crew import Crew
def fail(*a): raise KeyError('a bug')
Crew.fill = fail
main()
""",
)


def test_the_traceback_of_a_bug_tells_no_secret_either(hub, folder, tmp_path):
    command = [
        sys.executable,
        "-c",
        BUG,
        "quantize",
        "org/m",
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "q",
        "--token",
        TOKEN,
    ]
    ended = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert ended.returncode == 1
    assert "KeyError: 'a bug'" in ended.stderr
    check_secrets(ended.stdout + ended.stderr)


@pytest.mark.parametrize("value", [Access(token=TOKEN), AccessOptions(token=TOKEN)], ids=type)
def test_what_holds_a_token_does_not_print_it(value):
    """Whatever prints a value by accident: a traceback with locals, a log, a debugger."""
    assert value.token == TOKEN
    check_secrets(f"{value!r} {value}")


def test_the_branch_moves_while_shards_are_read(hub, folder, tmp_path):
    expected, commit = expect(hub, folder, tmp_path / "a"), hub.repos["org/m"].branches["main"]
    moved = []

    def move_and_note(handler, kinds, take=hub.take):
        if FIRST in handler.path and handler.where == "storage" and len(hub.seen) > 8 and not moved:
            moved.append(
                hub.add("org/m", write_single(tmp_path / "other", {"a.o_proj.weight": weight()}))
            )
        return take(handler, kinds)

    hub.take = move_and_note
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected
    assert moved
    assert {part for seen in hub.seen for part in re.findall(r"[0-9a-f]{40}", seen.path)} == {
        commit
    }


def test_a_disk_too_small_is_known_before_the_first_weight_is_fetched(
    hub, folder, tmp_path, monkeypatch
):
    real = os.statvfs
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: os.statvfs_result((real(path).f_bsize, 1, 4, 4, 4, *real(path)[5:])),
    )
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "disk-full")
    assert re.search(r"needs [\d,]+ bytes, its disk has 4 free", outcome.json["error"]["message"])
    assert not (tmp_path / "q").exists()
    asked = [seen for seen in hub.seen if seen.where == "storage"]
    assert {seen.range for seen in asked if ".safetensors" in seen.path} <= {
        "bytes=0-32767",
        f"bytes=0-{size(folder, FIRST)}",
    }
    assert not [seen for seen in asked if "tokenizer" in seen.path]


def size(folder: Path, file: str) -> int:
    return (folder / file).stat().st_size - 1


@pytest.mark.slow
def test_nobody_asks_while_the_hub_makes_everybody_wait(hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    limit = hub.fault("status", status=429, headers={"Retry-After": "5"}, match=SECOND, after=2)
    noted = []
    note = hub.take

    def take(handler, kinds):
        fault = note(handler, kinds)
        if fault is limit:
            noted.append(time.monotonic())
        return fault

    hub.take = take
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert outcome.json["digest"] == expected
    assert outcome.err.count("rate limited by the Hub: waiting 5 s") == 1
    (limited,) = noted
    assert [seen for seen in hub.seen if limited + 2 < seen.at < limited + 4.9] == []
    assert [seen for seen in hub.seen if seen.at > limited + 4.9]
