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
from pushing import MANY, at_hub, check_secrets

from fp4convert.options.access import AccessOptions
from fp4convert.storage.hub.retry import Patience
from fp4convert.storage.source import Access

STATE, RECORD = ".fp4convert", "quantization_config.json"
LATE = {"match": SECOND, "after": 4}  # headers, and what the first shard measures, came before
DROP, STALL = {"kind": "drop", "at": 0}, {"kind": "stall", "at": 0, "seconds": 0.5}


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000})
    hub.add("org/m", folder)
    return folder


def files(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file()]


def run_code(code: str, out: Path) -> subprocess.CompletedProcess:
    """Run code that ends with the command in a process of its own."""
    words = ("quantize", "org/m", "--format", "nvfp4", "-o", str(out), "--token", TOKEN)
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


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


BEFORE, MIDWAY, AFTER = [], [FIRST], [FIRST, SECOND]  # shards that are finished when it happens
UNREACHABLE, CHANGED, CORRUPT = "source-unreachable", "source-changed", "source-corrupt"
TOKENIZER = "tokenizer.json"
FAULTS = {
    "503": ({"kind": "status", "status": 503, "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "403": ({"kind": "status", "status": 403, "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "ignored-range": ({"kind": "ignore-range", "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "dropped": ({**DROP, "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "reset": ({**DROP, "is_reset": True, "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "stalled": ({**STALL, "times": MANY, **LATE}, UNREACHABLE, MIDWAY),
    "flipped": ({"kind": "flip", "at": 50_000, "times": 2, **LATE}, CORRUPT, MIDWAY),
    "weights-etag": ({"kind": "etag", **LATE}, CHANGED, MIDWAY),
    "weights-416": ({"kind": "status", "status": 416, **LATE}, CHANGED, MIDWAY),
    "header-etag": ({"kind": "etag", "match": SECOND, "after": 1}, CHANGED, BEFORE),
    "header-size": (at_hub("HEAD", SECOND, kind="size"), CHANGED, BEFORE),
    "header-commit": (at_hub("HEAD", SECOND, kind="commit"), CHANGED, BEFORE),
    "header-oid": (at_hub("HEAD", SECOND, kind="oid"), CHANGED, BEFORE),
    "sidecar-size": (at_hub("HEAD", TOKENIZER, kind="size"), CHANGED, AFTER),
    "sidecar-commit": (at_hub("HEAD", TOKENIZER, kind="commit"), CHANGED, AFTER),
    "sidecar-flipped": ({"kind": "flip", "match": TOKENIZER, "at": 3}, CORRUPT, AFTER),
    "gone": (at_hub("HEAD", TOKENIZER, 404), CHANGED, AFTER),
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
    error = outcome.json["error"]
    assert (outcome.code, error["exit"], error["code"]) == (3, 3, code)
    assert sorted(path.name for path in out.glob("*.safetensors")) == finished
    check_aftermath(out, expected, hub)


@pytest.mark.parametrize("status", [401, 403])
def test_a_right_that_is_lost_midway_is_exit_4_and_no_secret_is_told(status, hub, folder, tmp_path):
    expected, out = expect(hub, folder, tmp_path / "a"), tmp_path / "q"
    gated = {"X-Error-Code": "GatedRepo"}
    hub.fault(**at_hub("HEAD", TOKENIZER, status, headers=gated, times=MANY))
    outcome = ask("quantize", "org/m", *NVFP4, "-o", out)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "gated")
    accept = f"Accept the licence at {hub.endpoint}/org/m, then: hf auth login"
    assert outcome.json["error"]["next"].startswith(accept)
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
    ended = run_code(IMPATIENT, tmp_path / "q")
    assert ended.returncode == (3 if name else 0)
    assert "/api/models/org/m" in ended.stderr  # it does print
    check_secrets(ended.stdout + ended.stderr)
    for path in files(tmp_path / "q"):
        check_secrets(path.read_bytes().decode("latin-1"))


IMPATIENT = """
import fp4convert.storage.hub.source as hub
from fp4convert.__main__ import main
from fp4convert.storage.hub.retry import Patience
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
    ended = run_code(BUG, tmp_path / "q")
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
            other = write_single(tmp_path / "other", {"a.o_proj.weight": weight()})
            moved.append(hub.add("org/m", other))
        return take(handler, kinds)

    hub.take = move_and_note
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected
    assert moved
    commits = {part for seen in hub.seen for part in re.findall(r"[0-9a-f]{40}", seen.path)}
    assert commits == {commit}


def test_a_disk_too_small_is_known_before_the_first_weight_is_fetched(
    hub, folder, tmp_path, monkeypatch
):
    real = os.statvfs

    def statvfs(path):
        return os.statvfs_result((real(path).f_bsize, 1, 4, 4, 4, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", statvfs)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "disk-full")
    assert re.search(r"needs [\d,]+ bytes, its disk has 4 free", outcome.json["error"]["message"])
    assert not (tmp_path / "q").exists()
    asked = [seen for seen in hub.seen if seen.where == "storage"]
    ranges = {seen.range for seen in asked if ".safetensors" in seen.path}
    assert ranges <= {"bytes=0-32767", f"bytes=0-{(folder / FIRST).stat().st_size - 1}"}
    assert not [seen for seen in asked if "tokenizer" in seen.path]


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
