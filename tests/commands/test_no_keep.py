"""`quantize --push-to-hub --no-keep`: shards leave the disk when the Hub has them, and the commit
is the one that a run makes which keeps them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import (
    FIRST,
    SECOND,
    disk_nbytes,
    run,
    start,
    wait_until,
    write_llama,
    write_zeros,
)
from diffusion import write_wan
from gguf_donors import model, write_donor
from pushing import FastTime, check_secrets

NVFP4 = ("--format", "nvfp4", "--json")
PUSH = ("--push-to-hub", "me/q")
AWAY = (*PUSH, "--no-keep")
STATE, RECORD, MANY = ".fp4convert", "quantization_config.json", 1000


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # of commands of their own process


@pytest.fixture
def source(tmp_path):
    card = b"---\nlicense: mit\n---\n# Theirs\n"
    return write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000, "README.md": card})


def quantize(*arguments: object):
    outcome = run("quantize", *arguments, *NVFP4)
    check_secrets(outcome.out + outcome.err)
    return outcome


def kept(source: Path, out: Path, hub) -> tuple[str, dict]:
    """The digest and the files, but for the card, of a run that keeps its shards."""
    outcome = quantize(source, "-o", out, "--push-to-hub", "me/kept")
    assert outcome.code == 0, outcome.err
    return outcome.json["digest"], oids(hub, "me/kept")


def oids(hub, repo: str = "me/q") -> dict[str, tuple[int, str]]:
    head = hub.head(repo).items()
    return {name: (file.nbytes, file.oid) for name, file in head if name != "README.md"}


def leave_free(nbytes: int, monkeypatch) -> None:
    """Let every disk have as little room."""
    real = os.statvfs

    def tight(path):
        found = list(real(path))
        found[4] = nbytes // found[1]  # blocks that a user may take
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", tight)


def weights(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.suffix in (".safetensors", ".gguf"))
    return sorted(str(path.relative_to(folder)) for path in found)


class Size:
    """The largest size that a folder has while it is looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Size":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, disk_nbytes(self.folder))


def test_the_commit_is_that_of_a_run_that_keeps_its_shards(hub, source, tmp_path):
    digest, files = kept(source, tmp_path / "kept", hub)
    out = tmp_path / "q"
    outcome = quantize(source, "-o", out, *AWAY)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert oids(hub) == files
    assert len(hub.repos["me/q"].commits) == 2  # the first came with the repository
    assert outcome.json["pushed"].endswith(hub.repos["me/q"].branches["main"])
    assert outcome.json["next"] == [f"fp4convert verify me/q --source {source}"]
    assert not weights(out)
    assert outcome.json["hub_bytes"] == sum(files[name][0] for name in (FIRST, SECOND))
    assert (out / RECORD).is_file()
    report = run("verify", "me/q", "--source", source, "--json").json
    assert (report["passed"], report["findings"]) == (True, [])


def test_again_it_changes_nothing(hub, source, tmp_path):
    first = quantize(source, "-o", tmp_path / "q", *AWAY)
    sent = hub.sent_nbytes()
    again = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (again.code, again.json["pushed"]) == (0, first.json["pushed"]), again.err
    assert again.json["digest"] == first.json["digest"]
    assert len(hub.repos["me/q"].commits) == 2
    assert hub.sent_nbytes() - sent < 20_000
    assert not weights(tmp_path / "q")


def test_it_goes_on_after_kill_9_and_its_folder_stays_small(hub, tmp_path):
    hub.keeps_bytes = False
    source, out = write_zeros(tmp_path / "m", count=6, rows=1024), tmp_path / "q"
    digest, files = kept(source, tmp_path / "kept", hub)
    hub.stored.clear()
    hub.seen.clear()
    command = ("quantize", source, *NVFP4, "-q", "-o", out, *AWAY, "--disk", "0.007")
    with Size(out) as size:
        process = start(*command)
        wait_until(lambda: len(list((out / STATE / "done").glob("*"))) >= 3, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        outcome = run(*command)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert oids(hub) == files
    assert len(hub.repos["me/q"].commits) == 2
    assert 4_000_000 < size.most <= 7_000_000
    shards = {oid for name, (_, oid) in files.items() if name.endswith(".safetensors")}
    # What went before it was killed did not go again.
    assert sorted(set(puts(hub)) & shards) == sorted(oid for oid in puts(hub) if oid in shards)


def puts(hub) -> list[str]:
    """The hashes of what was sent to the storage, in order."""
    paths = [seen.path for seen in hub.seen if seen.method == "PUT"]
    return [path.partition("?")[0].rpartition("/")[2] for path in paths]


def test_what_the_hub_has_lost_is_made_again(hub, source, tmp_path):
    """It keeps what no commit names only for a while."""
    digest, files = kept(source, tmp_path / "kept", hub)
    hub.stored.clear()
    hub.fault("status", where="hub", match="/commit/", method="POST", status=413, times=MANY)
    assert quantize(source, "-o", tmp_path / "q", *AWAY).code == 5
    hub.faults.clear()
    assert not weights(tmp_path / "q")
    lost = files[FIRST][1]
    del hub.stored[lost]
    hub.seen.clear()
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert oids(hub) == files
    assert lost in hub.stored
    # What is made again was not there already.
    assert f"made again, the first {FIRST}: 1 files; me/q does not hold them any more" in (
        " ".join(outcome.err.split())
    )
    assert outcome.json["adopted_bytes"] == (source / SECOND).stat().st_size
    assert [oid for oid in puts(hub) if oid in (lost, files[SECOND][1])] == [lost]


def test_what_is_lost_just_before_the_commit_is_exit_5(hub, source, tmp_path, monkeypatch):
    from fp4convert.report import model_card

    def late(*arguments):
        hub.stored.clear()
        return card(*arguments)

    card = model_card.make_card
    with monkeypatch.context() as patched:
        patched.setattr(model_card, "make_card", late)
        outcome = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "push-lost")
    assert len(hub.repos["me/q"].commits) == 1
    assert quantize(source, "-o", tmp_path / "q", *AWAY).code == 0
    assert oids(hub) == kept(source, tmp_path / "kept", hub)[1]


def test_another_repository_gets_every_shard(hub, source, tmp_path):
    """What went to the first is not in the second."""
    assert quantize(source, "-o", tmp_path / "q", *AWAY).code == 0
    hub.stored.clear()
    other = ("--push-to-hub", "me/other", "--no-keep")
    assert quantize(source, "-o", tmp_path / "q", *other).code == 0
    assert oids(hub, "me/other") == oids(hub)


def test_an_upload_that_fails_ends_the_run_and_the_next_goes_on(hub, source, tmp_path):
    digest, files = kept(source, tmp_path / "kept", hub)
    hub.stored.clear()
    hub.fault("status", match=files[SECOND][1], method="PUT", status=503, times=MANY)
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY, "--workers", 1)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "hub-unreachable")
    assert "tried again at the end" not in outcome.err
    assert not weights(tmp_path / "q")
    assert not list((tmp_path / "q" / STATE / "tmp").iterdir())
    assert len(hub.repos["me/q"].commits) == 1
    hub.faults.clear()
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert oids(hub) == files


def test_a_hub_that_takes_shards_for_small_files_is_refused(hub, source, tmp_path, monkeypatch):
    """Then their bytes come with the commit, and would be lost."""
    from fakehub_uploads import _UploadHub

    def small(self, name, asked):
        mode = {"uploadMode": "regular", "shouldIgnore": False}
        files = [{"path": file["path"], **mode} for file in asked["files"]]
        return 200, {"files": files}, {}

    monkeypatch.setattr(_UploadHub, "_modes", small)
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "push-small")
    assert ".gitattributes" in outcome.json["error"]["next"]
    assert len(hub.repos["me/q"].commits) == 1
    done = (tmp_path / "q" / STATE / "done").iterdir()
    assert not any(json.loads(record.read_text())["is_gone"] for record in done)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_no_upload(how, hub, source, tmp_path):
    hub.fault("stall", method="PUT", seconds=60, times=MANY)
    process = start("quantize", source, *NVFP4, "-o", tmp_path / "q", *AWAY)
    wait_until(lambda: requests_asked(hub), process)
    process.send_signal(how)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 128 + how
    assert time.monotonic() - began < 10
    hub.release()


def requests_asked(hub) -> bool:
    return any(seen.path.endswith("/objects/batch") for seen in hub.seen)


def test_what_a_run_has_kept_leaves_with_the_next(hub, source, tmp_path):
    out = tmp_path / "q"
    digest = quantize(source, "-o", out).json["digest"]
    (out / SECOND).write_bytes((out / SECOND).read_bytes()[:-1] + b"!")  # of the same size
    outcome = quantize(source, "-o", out, *AWAY)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert not weights(out)
    assert oids(hub) == kept(source, tmp_path / "kept", hub)[1]


def test_without_the_option_every_shard_is_made_again_and_kept(hub, source, tmp_path):
    digest = quantize(source, "-o", tmp_path / "q", *AWAY).json["digest"]
    outcome = quantize(source, "-o", tmp_path / "q", *PUSH)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.err
    assert weights(tmp_path / "q") == [FIRST, SECOND]
    assert len(hub.repos["me/q"].commits) == 2


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("--no-keep",), "repo-name", "--push-to-hub"),
        ((*AWAY, "--join"), "no-keep", "--join"),
        ((*AWAY, "--ray", "auto"), "no-keep", "--ray"),
        ((*AWAY, "--shard-index", 0, "--num-shards", 2), "share", "cannot be pushed"),
        ((*AWAY, "--report", "page.html"), "report", "--report"),
        ((*PUSH, "--disk", 1), "no-keep", "--no-keep"),
        (("--disk", 1), "no-keep", "--no-keep"),
        ((*AWAY, "--disk", 0), "no-keep", "above 0"),
        ((*AWAY, "--disk", "inf"), "no-keep", "above 0"),
        ((*AWAY, "--disk", 0.00001), "no-keep", "bytes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything(options, code, word, hub, source, tmp_path):
    for dry in ((), ("--dry-run",)):
        outcome = quantize(source, "-o", tmp_path / "q", *options, *dry)
        assert (outcome.code, outcome.json["error"]["code"]) == (2, code), outcome.json
        assert word in outcome.json["error"]["message"]
    assert not (tmp_path / "q").exists()
    assert hub.repos == {}


def test_the_disk_that_is_asked_for_is_enough_and_less_is_not(hub, source, tmp_path):
    error = quantize(source, "-o", tmp_path / "q", *AWAY, "--disk", 0.00001).json["error"]
    least = error["next"].rpartition(" ")[2].rstrip(".")
    assert quantize(source, "-o", tmp_path / "q", *AWAY, "--disk", least).code == 0
    less = float(least) - 0.001
    assert quantize(source, "-o", tmp_path / "p", *AWAY, "--disk", less).code == 2


def test_no_more_disk_is_asked_for_than_is_used(hub, tmp_path):
    """The largest shard has 4.7 MB; some 0.1 MB are a margin for what people's disks round up."""
    source, out = write_zeros(tmp_path / "m", count=3, rows=1024), tmp_path / "q"
    error = quantize(source, "-o", out, *AWAY, "--disk", 0.00001).json["error"]
    least = error["next"].rpartition(" ")[2].rstrip(".")
    needed = int(re.search(r"need ([\d,]+) bytes", error["message"])[1].replace(",", ""))
    with Size(out) as size:
        assert quantize(source, "-o", out, *AWAY, "--disk", least, "--workers", 1).code == 0
    assert 4_718_592 <= size.most <= needed <= size.most + 150_000
    assert needed <= float(least) * 1e9 < needed + 1_000_000


def test_a_dry_run_says_what_the_disk_must_have(hub, tmp_path):
    source = write_zeros(tmp_path / "m", count=6, rows=1024)
    words = (source, "-o", tmp_path / "q", "--dry-run")
    whole = quantize(*words).json["peak_disk_bytes"]
    bounded = quantize(*words, *AWAY, "--disk", "0.007").json["peak_disk_bytes"]
    assert whole > 28_000_000
    assert 4_718_592 < bounded <= 7_000_000


def test_shards_that_are_there_are_among_those_at_once(hub, tmp_path, monkeypatch):
    """A disk that has room for two, and holds two, is large enough for the rest."""
    hub.keeps_bytes = False
    source, out = write_zeros(tmp_path / "m", count=6, rows=1024), tmp_path / "q"
    digest, files = kept(source, tmp_path / "kept", hub)
    assert quantize(source, "-o", out, "--shard-index", 0, "--num-shards", 3).code == 0
    assert len(weights(out)) == 2
    leave_free(1_000_000, monkeypatch)
    with Size(out) as size:
        outcome = quantize(source, "-o", out, *AWAY, "--disk", "0.01")
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.out
    assert oids(hub) == files
    assert size.most <= 10_000_000


def test_shards_that_have_left_want_no_room(hub, tmp_path, monkeypatch):
    source, out = write_zeros(tmp_path / "m", count=6, rows=1024), tmp_path / "q"
    first = quantize(source, "-o", out, *AWAY, "--disk", "0.02")
    leave_free(1_000_000, monkeypatch)
    again = quantize(source, "-o", out, *AWAY, "--disk", "0.02")
    assert (again.code, again.json["digest"]) == (0, first.json["digest"]), again.out
    assert quantize(source, "-o", out).json["error"]["code"] == "disk-full"  # it would keep them


def test_a_folder_whose_shards_have_left_says_where_they_are(hub, source, tmp_path):
    quantize(source, "-o", tmp_path / "q", *AWAY)
    for command in (("inspect",), ("verify", "--source", source), ("dequantize", "-o", "x")):
        outcome = run(command[0], tmp_path / "q", *command[1:], "--json")
        error = outcome.json["error"]
        assert (outcome.code, error["code"]) == (2, "shards-gone"), outcome.json
        assert "me/q" in error["message"]
        assert error["next"].startswith("Name the repository: me/q;")
    error = run("merge", tmp_path / "q", "--json").json["error"]
    assert (error["code"], error["exit"]) == ("shards-gone", 2)
    assert error["next"].startswith("Run the command that began it again: it ends it on the Hub")


def test_one_gguf_file_leaves_too(hub, source, tmp_path):
    source = write_donor(tmp_path / "m-BF16.gguf", model(), "BF16")
    words = ("--dialect", "gguf")
    kept_outcome = quantize(source, "-o", tmp_path / "kept", *words)
    outcome = quantize(source, "-o", tmp_path / "q", *words, *AWAY)
    assert (outcome.code, kept_outcome.code) == (0, 0), outcome.out
    assert outcome.json["digest"] == kept_outcome.json["digest"]
    assert not weights(tmp_path / "q")
    assert [name for name in oids(hub) if name.endswith(".gguf")] == weights(tmp_path / "kept")


def test_a_pipeline_leaves_but_for_its_small_files(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("fp4convert.execution.job.LARGE_NBYTES", 1 << 10)
    monkeypatch.setattr("fp4convert.execution.plan_file.LARGE_NBYTES", 1 << 10)
    source = write_wan(tmp_path / "wan")
    digest, files = kept(source, tmp_path / "kept", hub)
    hub.stored.clear()
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY, "--disk", 0.1)
    assert (outcome.code, outcome.json["digest"]) == (0, digest), outcome.out
    assert oids(hub) == files
    assert not weights(tmp_path / "q")
    assert quantize(source, "-o", tmp_path / "q", *AWAY).json["pushed"] == outcome.json["pushed"]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("rows", "megabytes"), [(1600, 30), pytest.param(65536, 6000, marks=pytest.mark.slow)]
)
def test_a_disk_that_is_smaller_than_the_result_and_ten_kills(rows, megabytes, hub, tmp_path):
    """1 GB of weights become 300 MB through a tmpfs of 30 MB, or 43 GB 12 GB through 6 GB."""
    hub.keeps_bytes = False
    source = write_zeros(tmp_path / "m", count=40, rows=rows)
    disk = tmp_path / "disk"
    disk.mkdir()
    digest, files = kept(source, tmp_path / "kept", hub)
    shutil.rmtree(tmp_path / "kept")
    assert sum(nbytes for nbytes, _ in files.values()) > 180_000 * rows
    hub.stored.clear()
    hub.seen.clear()
    words = [*map(str, ("quantize", source, *NVFP4, "-q", "-o", disk / "out", *AWAY))]
    asked = json.dumps([*words, "--disk", str(megabytes / 1000)])
    script = [sys.executable, "-c", KILLING, asked, str(disk), f"{megabytes}m", "10"]
    ended = subprocess.run(
        ["unshare", "--mount", *script], capture_output=True, text=True, check=False, timeout=3600
    )
    assert ended.returncode == 0, ended.stderr
    outcome, most, done = json.loads(ended.stdout)
    print(f"{most:,} bytes at most; shards after each kill: {done}")
    assert outcome["digest"] == digest
    assert oids(hub) == files
    assert len(hub.repos["me/q"].commits) == 2
    assert len(done) == 10
    assert len(set(done)) > 4  # most of the kills came in the middle of the work
    assert most <= 1_000_000 * megabytes
    assert megabytes > 30 or most > 15_000_000
    shards = {oid for name, (_, oid) in files.items() if name.endswith(".safetensors")}
    again = [oid for oid in puts(hub) if oid in shards]
    assert set(again) == shards
    assert len(again) <= 40 + 10 * 3  # what each of the kills found on its way


# Kills a command so often, a random time after some shards are done; looks at its disk.
KILLING = """
import json, os, random, shutil, subprocess, sys, threading, time
words, disk, size, kills = json.loads(sys.argv[1]), *sys.argv[2:]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], check=True)
command = [os.path.join(os.path.dirname(sys.executable), "fp4convert"), *words]
chance, most, is_over, done = random.Random(5), 0, False, []
def count():
    records = os.path.join(disk, "out", ".fp4convert", "done")
    return len(os.listdir(records)) if os.path.exists(records) else 0
def look():
    global most
    while not is_over:
        most = max(most, shutil.disk_usage(disk).used)
        time.sleep(0.002)
looking = threading.Thread(target=look)
looking.start()
killed = 0
try:
    while killed < int(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        new = chance.randint(0, 2)
        while process.poll() is None and count() < (done or [0])[-1] + new:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        if process.poll() is not None:
            sys.exit(f"it ended before kill {killed + 1}: {process.stderr.read().decode()}")
        process.kill()
        process.communicate()
        killed += 1
        done.append(count())
    ended = subprocess.run(command, capture_output=True, text=True)
finally:
    is_over = True
    looking.join()
if ended.returncode:
    sys.exit(ended.stdout + ended.stderr)
print(json.dumps([json.loads(ended.stdout), most, done]))
"""


def test_the_pinned_huggingface_hub_has_what_is_used_of_it():
    """UploadInfo and post_lfs_batch_info are no part of its documented interface."""
    from inspect import signature

    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

    known = signature(post_lfs_batch_info).parameters
    assert {"token", "repo_type", "repo_id", "revision", "endpoint", "headers"} <= set(known)
    assert list(signature(UploadInfo).parameters)[:3] == ["size", "sample", "sha256"]
    operation = CommitOperationAdd("a", b"")
    assert isinstance(operation.upload_info, UploadInfo)
    assert operation.path_or_fileobj == b""


def test_a_missed_gate_leaves_shards_unreferenced(source, tmp_path, hub):
    """They were judged before they left; the same command without the gate names them."""
    digest, files = kept(source, tmp_path / "kept", hub)
    outcome = quantize(source, "-o", tmp_path / "q", *AWAY, "--min-sqnr", 60)
    assert (outcome.code, outcome.json["error"]["code"]) == (6, "gate-missed")
    assert (len(hub.repos["me/q"].commits), weights(tmp_path / "q")) == (1, [])
    sent = hub.sent_nbytes()
    again = quantize(source, "-o", tmp_path / "q", *AWAY)
    assert (again.code, again.json["digest"], oids(hub)) == (0, digest, files)
    assert hub.sent_nbytes() - sent < 40_000
