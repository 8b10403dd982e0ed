"""Lease tasks in a folder that several processes work in.

A lease is a file that only its maker creates: it names host and process, and its time is renewed
while the process lives.  A dead process of the same host loses its leases at once; one of another
host, or one that hangs, when nobody has seen its time change for a minute.  Clocks are never
compared: each process watches with its own.  Leases save work, and nothing else: should two
processes hold one lease, both write the same bytes.

A lease that is nobody's any more is unlinked and made anew, because every file system can do that:
exchanging two names, which other libraries take a lease over with, NFS and FUSE refuse.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from fp4convert.process import is_running
from fp4convert.storage.disk import boot_id, write_errors_at
from fp4convert.storage.system import AS_BYTES, open_no_link

LEASE_SECONDS = 60.0  # without a sign of life
SILENT_SECONDS = 5.0  # of an empty one: its maker fills it at once, or is dead
BEAT_SECONDS = 15.0
WAIT_SECONDS = 0.1  # between looks at a process of which nobody knows yet whether it lives
# Between looks at what others do: many wait, and a shared disk has to answer all.
FIRST_SECONDS, LONGEST_SECONDS = 0.1, 3.0
MOST_NBYTES = 4096  # of a lease; ours have some 300
T = TypeVar("T")
Owner = dict[str, object]
UNKNOWN_START = ""  # when a process was started that is there, but hides it
WORKER = "worker-"  # of the lease that a process holds as long as it works here


class Leases:
    """The leases in a folder, as this process sees and holds them.

    From beginning to end the process holds one that is named `worker-NAME`.

    name  of this process: host, process number, and a word that no other has
    work  what it does there, in a word that those who do the same have too
    tell  gets a line where it has to wait for long
    """

    def __init__(
        self,
        folder: Path,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        work: str = "",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder = folder
        self._work = work
        self._tell = tell
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._me = _describe_self()
        host = "".join(letter if letter.isalnum() else "_" for letter in platform.node())[:40]
        self.name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # Of leases of others: their time, and since when, by our own clock, nobody renewed them.
        self._seen: dict[str, tuple[int, float]] = {}
        self._renewed: set[str] = set()  # of these, those that were renewed while we looked
        self._held: set[str] = set()
        self._made: set[str] = set()  # files that may be empty yet: an interrupt comes at any time
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        with write_errors_at(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self.take(WORKER + self.name)
        self._heart.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        for lease in self._held | self._made:
            self.drop(lease)

    def take(self, lease: str, is_fencing: bool = False) -> bool:
        """Hold a lease from now on; False where another holds it, or may.

        is_fencing  whoever held it without a sign of life works here no more
        """
        path = self._folder / lease
        with write_errors_at(path):
            self._made.add(lease)
            began = time.monotonic()
            try:
                made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | AS_BYTES, 0o666)
            except FileExistsError:
                self._made.discard(lease)
                is_alive, owner = self._judge(lease)
                if is_alive or not self._remove_dead(lease, owner, is_fencing):
                    return False
                return self.take(lease, is_fencing)
            with os.fdopen(made, "w") as out:
                json.dump(self._me | {"worker": self.name, "work": self._work}, out)
            is_late = time.monotonic() - began > SILENT_SECONDS / 2
        self._made.discard(lease)
        # As long as it was empty, others may have taken it for one of a dead process.
        if is_late and (_read(path) or {}).get("worker") != self.name:
            return False
        with self._lock:
            self._held.add(lease)
        return True

    def take_undone(self, tasks: Iterable[str], is_done: Callable[[str], bool]) -> Iterator[str]:
        """Take the leases of tasks that nobody has done or is at work on."""
        for task in tasks:
            if is_done(task) or not self.take(task):
                continue
            if is_done(task):  # somebody did it before we took it
                self.drop(task)
            else:
                yield task

    def drop(self, lease: str) -> None:
        """Hold a lease no longer; one that was taken from us stays."""
        with self._lock:
            self._held.discard(lease)
        path = self._folder / lease
        with suppress(OSError):
            owner = _read(path)
            is_empty = owner is None and lease in self._made
            if is_empty or (owner is not None and owner.get("worker") == self.name):
                path.unlink()
        self._made.discard(lease)

    @contextmanager
    def hold_when_free(self, lease: str, why: str, is_fencing: bool = False) -> Iterator[None]:
        """Hold a lease as soon as nobody else does.

        why         is told when that takes long: what the other process does
        is_fencing  as in take
        """
        pauses, is_told = _pauses(), False
        while not self.take(lease, is_fencing):
            seconds = next(pauses)
            if seconds == LONGEST_SECONDS and not is_told:
                most = f"{self._lease_seconds:.0f} s without a sign of life"
                self._tell(
                    f"waiting for another process, which {why}; after {most} it counts as gone"
                )
                is_told = True
            time.sleep(seconds)
        try:
            yield
        finally:
            self.drop(lease)

    def others(self) -> list[str]:
        """List the other living processes here; remove leases of dead ones."""
        with write_errors_at(self._folder):
            foreign = sorted(set(os.listdir(self._folder)) - self._held)
            judged = {lease: self._judge(lease) for lease in foreign}
            for lease, (is_alive, owner) in judged.items():
                if not is_alive:
                    self._remove_dead(lease, owner)
        return [
            lease.removeprefix(WORKER)
            for lease, (is_alive, _) in judged.items()
            if is_alive and lease.startswith(WORKER)
        ]

    def wait_for_other_work(self) -> list[str]:
        """List the living processes that carry out another plan; may wait.

        Of another host's process nobody knows at first whether it lives: it is watched until that
        shows, for the seconds that a lease lasts at most.
        """
        is_told = False
        while True:
            strangers, sure = [], []
            for name in self.others():
                owner = _read(self._folder / f"{WORKER}{name}") or {}
                if owner.get("work") != self._work:
                    strangers.append(name)
                    if self._is_here(owner) or WORKER + name in self._renewed:
                        sure.append(name)
            if sure or not strangers:
                return sure
            if not is_told:
                words = "works here for another plan, or is dead: waiting up to"
                self._tell(f"{strangers[0]} {words} {self._lease_seconds:.0f} s to see")
                is_told = True
            time.sleep(WAIT_SECONDS)

    def _judge(self, lease: str) -> tuple[bool, Owner | None]:
        """Tell whether the owner of a lease may be at work, and who it is."""
        path = self._folder / lease
        # The owner is read before the time: of a lease that is replaced meanwhile the time is new.
        owner = _read(path)
        try:
            status = path.lstat()
        except FileNotFoundError:  # nobody holds it any more: nothing of it is there to remove
            self._seen.pop(lease, None)
            return False, None
        # Not renewed for long enough, by our own clock: whoever held it is away.
        is_empty = not status.st_size or not stat.S_ISREG(status.st_mode)
        most_seconds = min(self._lease_seconds, SILENT_SECONDS) if is_empty else self._lease_seconds
        now, (renewed_ns, since) = time.monotonic(), self._seen.get(lease, (None, 0.0))
        if renewed_ns != status.st_mtime_ns:
            if renewed_ns is not None:
                self._renewed.add(lease)
            since = now
            self._seen[lease] = status.st_mtime_ns, since
        if now - since > most_seconds:
            return False, owner
        # Of this machine: the process itself is looked for. Of another, nobody knows more.
        if owner is None or not self._is_here(owner):
            return True, owner
        started = _start_of(owner.get("process"))
        return started in (owner.get("started"), UNKNOWN_START), owner

    def _is_here(self, owner: Owner) -> bool:
        """Tell whether a process is one of this machine.

        Where the machine has no word of its own (boot_id), nobody knows: a name is not enough.
        """
        keys = ("host", "boot", "processes")
        return bool(self._me["boot"]) and all(owner.get(key) == self._me[key] for key in keys)

    def _remove_dead(self, lease: str, owner: Owner | None, is_fencing: bool = False) -> bool:
        """Remove the lease of a dead process; False where that is not sure.

        With `is_fencing` its worker's lease goes before: whoever looks from now on takes the
        process for dead, though it may only sleep. To remove a lease, a process first takes a
        second one, named by a hash of the dead one. So nobody removes the lease that follows.
        """
        path, seen = self._folder / lease, self._seen.get(lease)
        text = json.dumps([lease, owner], sort_keys=True)
        removal = f".{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        if seen is None or not self.take(removal):
            return False
        try:
            if _read(path) != owner or path.lstat().st_mtime_ns != seen[0]:
                return False
            if is_fencing and owner is not None:
                with suppress(FileNotFoundError):
                    (self._folder / f"{WORKER}{Path(str(owner.get('worker'))).name}").unlink()
            path.unlink()
            self._seen.pop(lease, None)
            return True
        except FileNotFoundError:
            return False
        finally:
            self.drop(removal)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._lock:
                for lease in list(self._held):
                    # Where the disk is away, the work itself will tell.
                    with suppress(OSError):
                        owner = _read(self._folder / lease)
                        if owner is not None and owner.get("worker") != self.name:
                            self._held.discard(lease)  # it was taken from us, who slept
                        else:
                            os.utime(self._folder / lease)


def do_together(
    find_left: Callable[[], list[T]],
    do_free: Callable[[list[T]], bool],
    tell: Callable[[list[T]], None] = lambda left: None,
) -> None:
    """Do what nobody else does and wait for the rest, until nothing is left.

    do_free  does what is free of what is left; returns False where others have all of it
    tell     is called once, when there is nothing but to wait
    """
    pauses, is_told = _pauses(), False
    while left := find_left():
        if do_free(left):
            pauses = _pauses()
            continue
        if not is_told:
            tell(left)
        is_told = True
        time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    seconds = FIRST_SECONDS
    while True:
        yield seconds
        seconds = min(1.5 * seconds, LONGEST_SECONDS)


def _read(path: Path) -> Owner | None:
    """Read what a lease says; None where it is gone, or says nothing yet.

    A link is not followed and a pipe is not waited for: nobody of ours makes one.
    """
    try:
        fd = open_no_link(path, os.O_RDONLY)
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            entry = json.loads(os.read(fd, MOST_NBYTES)) if is_file else None
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _describe_self() -> Owner:
    """Describe this process so that no other fits.

    That is the machine since it was started, its table of processes, and the process.
    """
    process, processes = os.getpid(), 0
    if os.path.exists("/proc/self/ns/pid"):
        processes = os.stat("/proc/self/ns/pid").st_ino
    return {
        "host": platform.node(),
        "boot": boot_id(),
        "processes": processes,
        "process": process,
        "started": _start_of(process),
    }


def _start_of(process: object) -> str | None:
    """Tell when a process of this machine was started; None where it is not.

    UNKNOWN_START where it is there, and the system does not say since when: no /proc, or one that
    hides other users' processes.
    """
    if not isinstance(process, int):
        return None
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except PermissionError:
        return UNKNOWN_START
    except (OSError, OverflowError):
        return None if is_running(process) is False else UNKNOWN_START
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
