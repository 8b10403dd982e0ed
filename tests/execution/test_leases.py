"""Leases: one process at a time holds one, the dead lose theirs, and no clock is believed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fp4convert.execution import leases
from fp4convert.execution.folder import entered
from fp4convert.execution.leases import Leases, _describe_self
from fp4convert.execution.plan_file import STATE, Manifest
from fp4convert.process import Stopped

FOREIGN = {
    "host": "elsewhere",
    "boot": "x",
    "processes": 1,
    "process": 1,
    "started": "1",
    "worker": "elsewhere-1-00000000",
}
HOLD = """
import sys, time
from pathlib import Path
from fp4convert.execution.leases import Leases
with Leases(Path(sys.argv[1])) as claims:
    claims.take("a")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "claims"


def write(folder, claim, entry):
    folder.mkdir(exist_ok=True)
    (folder / claim).write_text(json.dumps(entry))
    return folder / claim


def test_one_of_two_gets_it_and_the_other_when_it_is_dropped(folder):
    with Leases(folder) as one, Leases(folder) as two:
        assert one.take("a")
        assert not two.take("a")
        one.drop("a")
        assert two.take("a")
        assert two.others() == [one.name]
    assert list(folder.iterdir()) == []


def test_a_claim_made_while_one_that_went_is_judged_stays(folder, monkeypatch):
    path, read, steps = folder / "a", leases._read, []

    def change_before_reading(asked):
        if asked == path:
            steps.append(asked)
            if len(steps) == 1:  # who held it drops it
                path.unlink()
            elif len(steps) == 2:  # another makes it; of an old time, as a shared disk's cache says
                path.touch()
                os.utime(path, ns=(0, 0))
        return read(asked)

    with Leases(folder) as late:
        os.utime(write(folder, "a", FOREIGN), ns=(0, 0))
        assert not late.take("a")
        monkeypatch.setattr(leases, "_read", change_before_reading)
        assert not late.take("a")
        assert len(steps) == 1 or path.exists()


def test_of_many_at_once_one_gets_it(folder):
    with Leases(folder) as first:
        crowd = [Leases(folder) for _ in range(8)]
        for number in range(20):
            taken, gate = [], threading.Barrier(len(crowd))

            def grab(claims, number=number, taken=taken, gate=gate):
                gate.wait()
                if claims.take(f"a{number}"):
                    taken.append(claims)

            threads = [threading.Thread(target=grab, args=(claims,)) for claims in crowd]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(taken) == 1
        assert first.others() == []


@pytest.mark.parametrize("end", ["killed", "stopped", "alive"])
def test_what_a_dead_process_of_this_host_held_is_free_at_once(end, folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        if end == "killed":
            process.kill()
            process.wait()
        elif end == "stopped":
            process.send_signal(signal.SIGSTOP)
        with Leases(folder) as claims:
            assert claims.take("a") == (end == "killed")
            assert len(claims.others()) == (end != "killed")
        process.kill()


def test_a_process_whose_number_another_has_now_is_dead(folder):
    with Leases(folder) as claims:
        own = json.loads((folder / f"worker-{claims.name}").read_text())
        write(folder, "a", {**own, "started": "12345", "worker": "before"})
        assert claims.take("a")


@pytest.mark.parametrize("skew_seconds", [-1e6, 0.0, 1e6])
def test_one_of_another_host_is_given_up_after_the_lease_whatever_its_clock_says(
    skew_seconds, folder
):
    claim = write(folder, "a", FOREIGN)
    worker = write(folder, f"worker-{FOREIGN['worker']}", FOREIGN)
    for path in (claim, worker):
        os.utime(path, (time.time() + skew_seconds,) * 2)
    with Leases(folder, lease_seconds=0.3) as claims:
        assert not claims.take("a")
        assert claims.others() == [FOREIGN["worker"]]
        time.sleep(0.2)
        os.utime(claim, (time.time() + skew_seconds + 1,) * 2)  # a sign of life
        assert not claims.take("a")
        time.sleep(0.2)
        assert not claims.take("a")
        time.sleep(0.2)
        assert claims.take("a")
        assert claims.others() == []


def test_a_claim_is_renewed_while_it_is_held(folder):
    with Leases(folder, beat_seconds=0.05) as claims:
        claims.take("a")
        os.utime(folder / "a", (0, 0))
        time.sleep(0.3)
        assert (folder / "a").stat().st_mtime > 0


def test_a_claim_that_was_taken_while_its_maker_slept_is_not_renewed_by_it(folder):
    """Its successor may be dead: everybody would wait as long as the first works."""
    with Leases(folder, beat_seconds=0.05) as claims:
        assert claims.take("a")
        write(folder, "a", FOREIGN)
        os.utime(folder / "a", (5, 5))
        time.sleep(0.3)
        assert (folder / "a").stat().st_mtime == 5


def test_who_slept_before_it_said_whose_claim_it_is_does_not_hold_it(folder, monkeypatch):
    """Another took the empty file for one of a dead process, and made its own."""
    monkeypatch.setattr(leases, "SILENT_SECONDS", 0.2)
    dump = json.dump

    def sleep(*arguments: object) -> None:
        monkeypatch.setattr(leases.json, "dump", dump)
        with Leases(folder) as other:
            while not other.take("a"):
                time.sleep(0.05)
            dump(*arguments)
            told.append(other.name)

    told: list[str] = []
    with Leases(folder) as claims:
        monkeypatch.setattr(leases.json, "dump", sleep)
        assert not claims.take("a")
    assert told


def test_without_a_word_of_the_machine_a_name_tells_nothing_of_who_lives(folder, monkeypatch):
    """Two machines of one name on a shared disk would take each other for dead."""
    monkeypatch.setattr(leases, "boot_id", lambda: "")
    dead = {**leases._describe_self(), "process": 1 << 22, "started": "1", "worker": "other"}
    write(folder, "a", dead)
    with Leases(folder, lease_seconds=0.3) as claims:
        assert not claims.take("a")
        time.sleep(0.4)
        assert claims.take("a")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"host": 1}'])
def test_a_claim_that_says_nothing_is_given_up_after_the_lease(text, folder):
    folder.mkdir()
    (folder / "a").write_text(text)
    with Leases(folder, lease_seconds=0.1) as claims:
        assert not claims.take("a")
        time.sleep(0.2)
        assert claims.take("a")


def test_an_empty_claim_is_given_up_soon_and_one_that_cannot_be_read_is_not(folder, monkeypatch):
    monkeypatch.setattr(leases, "SILENT_SECONDS", 0.1)
    folder.mkdir()
    (folder / "a").touch()
    (folder / "b").write_text("{")
    with Leases(folder) as claims:
        assert not claims.take("a")
        assert not claims.take("b")
        time.sleep(0.2)
        assert claims.take("a")
        assert not claims.take("b")


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a pipe"])
def test_what_is_no_file_keeps_nobody_waiting(kind, folder, monkeypatch):
    """A pipe is not read, a link is not followed; both go as soon as an empty lease does."""
    monkeypatch.setattr(leases, "SILENT_SECONDS", 0.1)
    folder.mkdir()
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_text("kept")
    if kind == "link":
        (folder / "a").symlink_to(elsewhere)
    else:
        os.mkfifo(folder / "a" if kind == "pipe" else folder.parent / "pipe")
    if kind == "link to a pipe":
        (folder / "a").symlink_to(folder.parent / "pipe")
    answers = []

    def work():
        with Leases(folder) as claims:
            answers.extend([claims.others(), claims.take("a")])
            time.sleep(0.2)
            answers.append(claims.take("a"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert answers == [[], False, True]
    assert elsewhere.read_text() == "kept"


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_a_claim_is_made_leaves_none(number, folder, monkeypatch):
    """The file is there, and nothing in it yet: of the process itself, and of a task."""
    real, made = os.open, []

    def opened(path, flags, *arguments, **options):
        fd = real(path, flags, *arguments, **options)
        if flags & os.O_EXCL:
            made.append(path)
            if len(made) == number:
                os.close(fd)
                raise Stopped(signal.SIGINT)
        return fd

    monkeypatch.setattr(os, "open", opened)
    with (
        pytest.raises(Stopped),
        entered(folder.parent / "out", Manifest({}, {}, (), {}, None, "last")) as output,
    ):
        output.leases.take("a")
    assert len(made) == number
    assert list((folder.parent / "out" / STATE / "claims").iterdir()) == []


def test_an_empty_claim_of_another_is_not_dropped(folder):
    with Leases(folder) as claims:
        (folder / "a").touch()
        assert not claims.take("a")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_what_was_taken_from_us_is_not_dropped(folder):
    with Leases(folder) as claims:
        claims.take("a")
        write(folder, "a", FOREIGN)
        claims.drop("a")
        assert json.loads((folder / "a").read_text()) == FOREIGN


@pytest.mark.sweep(2)
@pytest.mark.parametrize("is_here", [True, False])
def test_of_many_at_once_exactly_one_takes_what_a_dead_process_held(is_here, folder, monkeypatch):
    """Each is slowed down by chance wherever it asks the system, so that it acts on what is true no
    longer.
    """
    own = json.loads(write(folder, "own", _describe_self()).read_text())
    dead = {**own, "started": "12345", "worker": "before"} if is_here else FOREIGN
    for name in ("stat", "open", "rename", "unlink"):
        monkeypatch.setattr(os, name, slowed(getattr(os, name)))
    lease = 60.0 if is_here else 0.05
    for number in range(15):
        write(folder, f"a{number}", dead)
        crowd, taken, gate = [Leases(folder, lease) for _ in range(8)], [], threading.Barrier(8)

        def grab(claims, number=number, taken=taken, gate=gate):
            if not is_here:
                assert not claims.take(f"a{number}")
                time.sleep(2 * lease)
            gate.wait()
            if claims.take(f"a{number}"):
                taken.append(claims.name)

        threads = [threading.Thread(target=grab, args=(claims,)) for claims in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        assert json.loads((folder / f"a{number}").read_text())["worker"] == taken[0]


def slowed(real):
    def wait_and_call(*arguments, **options):
        if random.random() < 0.5:
            time.sleep(random.expovariate(500))
        return real(*arguments, **options)

    return wait_and_call


def test_whoever_waits_long_for_one_lease_says_so_once(folder, monkeypatch):
    monkeypatch.setattr(leases, "LONGEST_SECONDS", 0.2)
    told: list[str] = []
    with (
        Leases(folder, tell=told.append) as one,
        Leases(folder, tell=told.append) as two,
        one.hold_when_free("end", "checks"),
    ):
        threading.Timer(1.5, one.drop, ("end",)).start()
        with two.hold_when_free("end", "checks"):
            pass
    words = "waiting for another process, which checks; after 60 s without a sign of life"
    assert told == [f"{words} it counts as gone"]


def test_those_who_do_the_same_are_no_strangers(folder):
    with (
        Leases(folder, work="a") as one,
        Leases(folder, work="a"),
        Leases(folder, work="b") as other,
    ):
        assert len(one.others()) == 2
        assert one.wait_for_other_work() == [other.name]


def test_a_stranger_on_another_host_is_watched_until_it_shows_whether_it_lives(folder):
    worker = write(folder, f"worker-{FOREIGN['worker']}", FOREIGN)
    began = time.monotonic()
    told: list[str] = []
    with Leases(folder, lease_seconds=60, work="a", tell=told.append) as claims:
        threading.Timer(0.3, os.utime, (worker, (1, 1))).start()
        assert claims.wait_for_other_work() == [FOREIGN["worker"]]
    assert [line.endswith("waiting up to 60 s to see") for line in told] == [True]
    assert 0.3 < time.monotonic() - began < 30
    with Leases(folder, lease_seconds=0.3, work="a") as claims:
        assert claims.wait_for_other_work() == []
    assert not worker.exists()


def test_a_task_that_another_did_before_we_took_it_is_not_done_again(folder):
    with Leases(folder) as one, Leases(folder) as two:
        assert two.take("held")
        done = {"done"}
        asked = []

        def is_done(task):
            """Somebody finishes `late` after we have looked, and before we have its lease."""
            asked.append(task)
            if asked.count("late") == 1 and task == "late":
                done.add("late")
                return False
            return task in done

        assert list(one.take_undone(["done", "held", "late", "free"], is_done)) == ["free"]
        assert two.take("late")
        assert not two.take("free")


def test_who_waits_for_others_waits_longer_each_time_and_says_so_once(monkeypatch):
    pauses, told = [], []
    monkeypatch.setattr(leases.time, "sleep", pauses.append)
    rounds = iter([False] * 12 + [True] + [False] * 2)  # what is done in a round
    left = iter([["a"]] * 15 + [[]])
    leases.do_together(lambda: next(left), lambda tasks: next(rounds), told.append)
    assert told == [["a"]]
    assert pauses[:3] == pytest.approx([0.1, 0.15, 0.225])
    assert max(pauses) == pauses[11] == 3.0
    assert pauses[12:] == pytest.approx([0.1, 0.15])


@pytest.mark.parametrize("refusal", [PermissionError, FileNotFoundError])
def test_a_living_process_whose_start_is_hidden_keeps_its_lease(refusal, tmp_path, monkeypatch):
    """Where /proc hides the processes of other users, or does not let them be looked into."""
    read = Path.read_text

    def hide(path: Path, *arguments: object, **words: object) -> str:
        if str(path).startswith("/proc/") and path.name == "stat":
            raise refusal
        return read(path, *arguments, **words)

    with Leases(tmp_path) as one:
        assert one.take("task")
        monkeypatch.setattr(Path, "read_text", hide)
        if refusal is FileNotFoundError:
            monkeypatch.setattr("os.kill", lambda *words: (_ for _ in ()).throw(PermissionError))
        with Leases(tmp_path) as other:
            assert other.others() == [one.name]
            assert not other.take("task")
    if refusal is FileNotFoundError:
        monkeypatch.setattr("os.kill", lambda *words: (_ for _ in ()).throw(ProcessLookupError))
        assert leases._start_of(1 << 22) is None
