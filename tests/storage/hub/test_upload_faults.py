"""What goes wrong on the way to the Hub passes or is told; it never makes a second commit, or half
of one.
"""

import os
import subprocess
import sys
import threading
import time

import pytest
from checkpoints import FIRST, SECOND, wait_until
from fakehub import Repo
from fakehub_uploads import UploadHub
from pushing import CARD, MANY, REPO, at_hub, begun, push, refusal, requests

from fp4convert.errors import OutputError
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.hub.retry import Patience

LONG, SOON = 90.0, 30.0  # seconds: what nobody waits for, and what a busy machine may take instead


def test_a_hub_that_is_not_there(hub, made, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert "6 tries at 127.0.0.1:1, the last: it refuses the connection" in error.message


NO_PAUSE = {"Retry-After": "0"}
AT_STORAGE = {"where": "storage", "method": "PUT"}
PASSING = [
    at_hub("POST", "repos/create", times=2),
    at_hub("GET", "auth-check", 429, headers=NO_PAUSE),
    at_hub("GET", "api/models/me/q/revision", 500),
    at_hub("POST", "preupload", times=8),
    at_hub("POST", "batch", 429, headers={"RateLimit": "r=0;t=1"}),
    {"kind": "status", "status": 503, **AT_STORAGE, "times": 8},
    {"kind": "status", "status": 403, **AT_STORAGE, "times": 2},
    {"kind": "cut-before", **AT_STORAGE, "times": 3},
    {"kind": "cut-after", **AT_STORAGE, "times": 3},
    at_hub("POST", "verify", 502),
    at_hub("POST", "validate-yaml"),
    at_hub("POST", "commit", times=3),
    at_hub("POST", "commit", 429, headers=NO_PAUSE),
    at_hub("POST", "commit", kind="cut-before"),
]


@pytest.mark.parametrize(
    "fault",
    PASSING,
    ids=lambda fault: f"{fault['kind']}-{fault.get('status', '')}-{fault.get('match', '')}",
)
@pytest.mark.sweep(3)
def test_what_passes_is_waited_for(fault, hub, made, told):
    expected = hub.fault(**fault)
    push(made, told)
    assert expected.times == 0
    assert len(hub.repos[REPO].commits) == 2
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


ENDPOINTS = {
    "repos/create": "POST",
    "auth-check": "GET",
    "revision": "GET",
    "preupload": "POST",
    "batch": "POST",
    "validate-yaml": "POST",
    "commit": "POST",
}


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"{}", b'{"objects": [1], "files": [1]}'])
@pytest.mark.parametrize("match", ENDPOINTS)
@pytest.mark.sweep(5)
def test_json_of_another_shape_passes_or_is_told(match, body, hub, made, told):
    hub.fault(**at_hub(ENDPOINTS[match], match, 200, body=body, times=MANY))
    caught: list[OutputError] = []
    try:
        push(made, told)
    except OutputError as error:
        caught.append(error)
    for error in caught:
        assert error.code in ("hub-unreachable", "push-refused")
        assert "Error" not in error.message
    hub.faults.clear()
    push(made, told)
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


def test_a_call_that_huggingface_hub_does_not_take_is_a_bug_of_ours(hub, made, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, repo: None)
    with pytest.raises(TypeError, match="unexpected keyword"):
        push(made, told)


def test_everybody_is_told_of_a_rate_limit(hub, made, told):
    hub.fault(**at_hub("POST", "commit", 429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    push(made, told)
    assert time.monotonic() - began >= 1
    assert told == ["rate limited by the Hub: waiting 1 s"]


def test_a_rate_limit_that_huggingface_hub_obeys_itself_is_told_too(hub, made, told):
    hub.fault(**at_hub("POST", "batch", 429, headers={"Retry-After": "3"}))
    push(made, told)
    assert told == ["the Hub: Rate limited. Waiting 4.0s before retry [Retry 1/5]."]


@pytest.mark.parametrize("asked", ["86400", "9" * 30])
@pytest.mark.parametrize("match", ["preupload", "batch", "commit"])
def test_a_pause_that_nobody_waits_for_ends_the_push_and_is_told(match, asked, hub, made, told):
    """huggingface_hub sleeps for it, or fails with an OverflowError; nothing is asked again."""
    hub.fault(**at_hub("POST", match, 429, headers={"Retry-After": asked}, times=MANY))
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert " to wait " in error.message
    assert requests(hub, "POST", match) <= 6  # huggingface_hub's own, whose sleep is cut short here
    hub.faults.clear()
    push(made, told)
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


def test_errors_inside_the_package_are_the_hubs_fault(hub, made, told, monkeypatch):
    """A name that it never set: UnboundLocalError, where the Hub answers another object."""
    code = "def preupload_lfs_files(*words, **named):\n    return unset_name"
    home = {"__name__": "huggingface_hub.hf_api"}
    exec(code, home)
    monkeypatch.setattr("huggingface_hub.HfApi.preupload_lfs_files", home["preupload_lfs_files"])
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert "its answer is not a Hub's" in error.message


def test_what_does_not_pass_is_exit_5_and_goes_on_later(hub, made, told):
    down = hub.fault("status", method="PUT", status=503, times=MANY)
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert "HTTP 503" in error.message
    assert len(hub.repos[REPO].commits) == 1
    down.times = 0
    push(made, told)
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


def test_an_upload_that_fails_is_told_and_tried_again(hub, made, told):
    down = hub.fault("status", method="PUT", status=503, times=MANY)
    pusher = begun(told)
    pusher.add(made.folder / FIRST, FIRST, made.files[FIRST])
    assert isinstance(pusher._started[FIRST].exception(), OutputError)
    down.times = 0
    pusher.commit(made.folder, made.files, CARD)
    *tries, line = told
    assert line.startswith("not uploaded yet, and tried again at the end")
    assert FIRST in line
    assert tries
    assert all("HTTP 503 of " in one and "; try " in one for one in tries)
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


def test_a_bug_in_the_background_does_not_stay_there(hub, made, told):
    pusher = begun(told)
    pusher.add(made.folder / FIRST, FIRST, 7)
    with pytest.raises(TypeError):
        pusher.commit(made.folder, made.files, CARD)


def test_a_reply_lost_after_the_commit_was_made(hub, made, told):
    lost = hub.fault("cut-after", where="hub", method="POST", match="/commit/")
    address = push(made, told)
    assert lost.times == 0
    repo = hub.repos[REPO]
    assert len(repo.commits) == 2
    assert address.endswith(repo.branches["main"])
    assert requests(hub, "POST", "/commit/") == 1


def test_a_commit_that_comes_to_light_only_when_it_is_made_again(hub, made, told):
    """The head still looks old when the other worker has committed; the Hub answers 412."""
    pusher, twin = begun(told), begun(told)
    for name, sha256 in made.files.items():
        pusher.add(made.folder / name, name, sha256)
        pusher._started[name].result()
    twin.commit(made.folder, made.files, CARD)
    looks, look = iter([pusher._begun]), pusher._look_once
    pusher._look_once = lambda revision: next(looks, None) or look(revision)
    assert pusher.commit(made.folder, made.files, CARD).endswith(hub.repos[REPO].branches["main"])
    assert requests(hub, "POST", "/commit/") == 2
    assert len(hub.repos[REPO].commits) == 2


def test_two_workers_that_both_finish_make_one_commit(hub, made, told):
    pushers = [begun(told), begun(told)]
    addresses = {pusher.commit(made.folder, made.files, CARD) for pusher in pushers}
    assert len(addresses) == 1
    assert len(hub.repos[REPO].commits) == 2


def test_a_head_that_moved_is_left_alone(hub, made, told, tmp_path):
    pusher = begun(told)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    theirs = hub.add(REPO, tmp_path / "theirs")
    with pytest.raises(OutputError) as caught:
        pusher.commit(made.folder, made.files, CARD)
    assert (caught.value.exit_code, caught.value.code) == (5, "repo-moved")
    assert "somebody else committed" in caught.value.message
    assert "Run the same command again" in caught.value.next_step
    assert hub.repos[REPO].branches["main"] == theirs
    sent = requests(hub, "PUT", "upload")
    push(made, told)  # as the message says
    assert requests(hub, "PUT", "upload") == sent
    assert hub.read(REPO)["config.json"] == (made.folder / "config.json").read_bytes()


def test_the_commit_names_its_parent(hub, made, told, tmp_path):
    """Somebody commits between our look at the head and our commit: the Hub, not we,
    must notice.
    """
    pusher = begun(told)
    (tmp_path / "theirs").mkdir()
    look = pusher._look_once

    def look_and_lose(revision):
        head = look(revision)
        pusher._look_once = look
        hub.add(REPO, tmp_path / "theirs")
        return head

    pusher._look_once = look_and_lose
    with pytest.raises(OutputError, match="somebody else committed"):
        pusher.commit(made.folder, made.files, CARD)
    assert len(hub.repos[REPO].commits) == 2


def test_a_run_after_the_commit_does_nothing(hub, made, told):
    first = push(made, told)
    hub.seen.clear()
    assert push(made, told) == first
    asked = {(seen.method, seen.path.partition("?")[0]) for seen in hub.seen}
    assert {each for each in asked if each[0] != "GET"} == {
        ("POST", "/api/repos/create"),
        ("HEAD", f"/{REPO}/resolve/{first[-40:]}/{RECORD}"),
    }


def test_after_a_crash_only_the_rest_is_uploaded(hub, made, told):
    pusher = begun(told)
    pusher.add(made.folder / FIRST, FIRST, made.files[FIRST])
    pusher._started[FIRST].result()
    pusher.stop()
    hub.seen.clear()
    push(made, told)
    sent = {seen.path.partition("?")[0][-64:] for seen in hub.seen if seen.method == "PUT"}
    assert made.files[FIRST] not in sent
    assert made.files[SECOND] in sent
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()


def test_a_commit_without_one_of_the_files_is_noticed(hub, made, told, monkeypatch):
    commit = Repo.commit
    forget = lambda files: {name: file for name, file in files.items() if name != SECOND}  # noqa: E731
    monkeypatch.setattr("fakehub.Repo.commit", lambda repo, files: commit(repo, forget(files)))
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "push-incomplete")
    assert SECOND in error.message


def test_a_hub_that_never_answers_is_not_waited_for(hub, made, told, monkeypatch):
    monkeypatch.setattr(
        "fp4convert.storage.hub.upload.Patience", lambda: Patience(0.2, first_seconds=0.01)
    )
    stalled = hub.fault("stall", where="hub", method="POST", match="/commit/", seconds=LONG)
    began = time.monotonic()
    push(made, told)
    assert stalled.times == 0
    assert time.monotonic() - began < SOON
    assert len(hub.repos[REPO].commits) == 2


def test_a_file_that_is_gone(hub, made, told):
    pusher = begun(told)
    with pytest.raises(OutputError, match="is not there any more"):
        pusher.commit(made.folder, {**made.files, "gone.json": "0" * 64}, CARD)


@pytest.mark.parametrize("status", [400, 403])
def test_why_a_storage_refuses_is_told(status, hub, made, told):
    words = "The bucket takes no more than 50 GB; see https://s3.example/?X-Amz-Signature=abc"
    body = f"<?xml version='1.0'?><Error><Code>EntityTooLarge</Code><Message>{words}</Message>"
    fault = {"method": "PUT", "where": "storage", "status": status, "body": body.encode()}
    hub.fault("status", times=MANY, **fault)
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "hub-unreachable")
    assert f"HTTP {status} of " in error.message
    assert error.message.endswith(": The bucket takes no more than 50 GB; see ...")


@pytest.fixture
def patient(hub, monkeypatch):
    """Whatever ends soon does not end because the Hub was given up."""
    monkeypatch.setattr(
        "fp4convert.storage.hub.upload.Patience", lambda: Patience(LONG, first_seconds=0.01)
    )


def test_a_stop_ends_soon(patient, hub, made, told):
    pusher = begun(told)
    stalled = hub.fault("stall", method="PUT", seconds=LONG, times=MANY)
    for name, sha256 in made.files.items():
        pusher.add(made.folder / name, name, sha256)
    wait_until(lambda: stalled.times < MANY)
    began = time.monotonic()
    pusher.stop()
    assert time.monotonic() - began < SOON
    hub.release()
    pusher._worker.join()
    assert told == []
    with pytest.raises(OutputError, match="stopped"):
        pusher.commit(made.folder, made.files, CARD)


WAITS = at_hub("POST", "/commit/", 429, headers={"Retry-After": "90"}, times=MANY)
HANGS = {"kind": "stall", "method": "PUT", "seconds": LONG}


@pytest.mark.parametrize(
    ("fault", "said"), [(WAITS, ["rate limited by the Hub: waiting 90 s"]), (HANGS, [])]
)
def test_a_stop_ends_a_commit(fault, said, patient, hub, made, told):
    pusher, met = begun(told), hub.fault(**fault)
    times = met.times

    def stop() -> None:
        wait_until(lambda: told if said else met.times < times)
        pusher.stop()

    threading.Thread(target=stop).start()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(OutputError, match="stopped"):
            pusher.commit(made.folder, made.files, CARD)
    assert time.monotonic() - began < SOON
    assert told == said


LEFT = """
import sys
from pathlib import Path
from fp4convert.storage.hub.upload import Pusher
pusher = Pusher("me/q", False, None, print)
pusher.begin()
pusher.add(Path(sys.argv[1]), "model.safetensors", sys.argv[2])
sys.stdin.readline()
pusher.stop()
"""


def test_a_process_ends_though_an_upload_is_under_way(hub, made):
    stalled = hub.fault("stall", method="PUT", seconds=LONG)
    command = [sys.executable, "-c", LEFT, str(made.folder / FIRST), made.files[FIRST]]
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
        wait_until(lambda: not stalled.times, process)
        out, _ = process.communicate("\n", timeout=SOON)
    assert (process.returncode, out) == (0, "")


@pytest.fixture
def chunks(hub, monkeypatch, tmp_path) -> UploadHub:
    """Large files go to the Hub's Xet storage, as they do where nothing is said."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    hub.chunks, hub.takes_unsent = f"local://{tmp_path / 'chunks'}", True
    return hub


def test_through_the_xet_storage(chunks, made, told, tmp_path):
    push(made, told)
    head = chunks.head(REPO)
    large = {name: head[name].oid for name in made.files if head[name].is_large}
    assert large.items() <= made.files.items()
    assert not requests(chunks, "PUT", "upload")
    stored = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in stored) > 50_000
    assert told == []


def test_a_token_of_the_xet_storage_that_comes_late(chunks, made, told):
    late = chunks.fault("status", where="hub", match="xet-write-token", status=503)
    push(made, told)
    assert late.times == 0


def test_an_xet_storage_that_is_closed(chunks, made, told):
    chunks.fault("status", where="hub", match="xet-write-token", status=403, times=MANY)
    assert refusal(OutputError, made, told).code == "hub-unreachable"


def test_a_client_that_another_thread_has_just_closed_is_made_again(hub, made, told, monkeypatch):
    """huggingface_hub closes it where a connection fails, between another's look and its use."""
    import huggingface_hub

    get, taken = huggingface_hub.get_session, iter([None, None])
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: next(taken, get()))
    assert push(made, told)
    assert next(taken, "all") == "all"
