"""Claim tasks in a folder that several processes work in.

A claim is a file that only its maker creates: it names host and process, and its time is renewed while the process lives.
A dead process of the same host loses its claims at once; one of another host, or one that hangs, when nobody has seen its time
change for a minute.  Clocks are never compared: each process watches with its own.  Claims save work, and nothing else: should
two processes hold one claim, both write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fp4convert.storage.disk import boot_id, told

LEASE_SECONDS = 60.0  # without a sign of life
SILENT_SECONDS = 5.0  # of an empty one: its maker fills it at once, or is dead
BEAT_SECONDS = 15.0
WAIT_SECONDS = 0.1
Owner = dict[str, object]
WORKER = "worker-"  # of the claim that a process holds as long as it works here


class Seen(NamedTuple):
    """A claim of another process: its time, since when, by our own clock, nobody renewed it, and whether we saw that done."""

    renewed_ns: int
    since: float
    is_renewed: bool


class Claims:
    """The claims in a folder, as this process sees and holds them; a claim `worker-NAME` is held from beginning to end.

    name  of this process: host, process number, and a word that no other has
    work  what it does there, in a word that those who do the same have too
    """

    def __init__(
        self,
        folder: Path,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        work: str = "",
    ) -> None:
        self._folder = folder
        self._work = work
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._me = _describe_self()
        host = "".join(letter if letter.isalnum() else "_" for letter in platform.node())[:40]
        self.name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._seen: dict[str, Seen] = {}
        self._held: set[str] = set()
        self._made: set[str] = (
            set()
        )  # of these, what may say nothing yet: an interrupt comes at any time
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        with told(self._folder):
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
        for claim in self._held | self._made:
            self.drop(claim)

    def take(self, claim: str) -> bool:
        """True where this process holds the claim from now on; False where a living one does."""
        path = self._folder / claim
        with told(path):
            self._made.add(claim)
            try:
                made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                self._made.discard(claim)
                is_alive, owner = self._judge(claim)
                return not is_alive and self._remove_dead(claim, owner) and self.take(claim)
            with os.fdopen(made, "w") as out:
                json.dump(self._me | {"worker": self.name, "work": self._work}, out)
        with self._lock:
            self._held.add(claim)
        self._made.discard(claim)
        return True

    def drop(self, claim: str) -> None:
        """Hold it no longer; one that was taken from us stays with its new owner."""
        with self._lock:
            self._held.discard(claim)
        path = self._folder / claim
        with suppress(OSError):
            owner = _read(path)
            if (owner is None and claim in self._made) or (
                owner is not None and owner.get("worker") == self.name
            ):
                path.unlink()
        self._made.discard(claim)

    @contextmanager
    def waited_for(self, claim: str) -> Iterator[None]:
        """Holds a claim that others hold only for moments."""
        while not self.take(claim):
            time.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            self.drop(claim)

    def others(self) -> list[str]:
        """Names of the other living processes that work in this folder; claims of dead ones are removed."""
        with told(self._folder):
            foreign = sorted(set(os.listdir(self._folder)) - self._held)
            judged = {claim: self._judge(claim) for claim in foreign}
            for claim, (is_alive, owner) in judged.items():
                if not is_alive:
                    self._remove_dead(claim, owner)
        return [
            claim.removeprefix(WORKER)
            for claim, (is_alive, _) in judged.items()
            if is_alive and claim.startswith(WORKER)
        ]

    def others_at_other_work(self) -> list[str]:
        """Of these others, those that do not do what this process does.

        Of another host's process nobody knows at first whether it lives: it is watched until that shows.
        """
        while True:
            owners = {name: _read(self._folder / f"{WORKER}{name}") or {} for name in self.others()}
            strangers = [name for name, owner in owners.items() if owner.get("work") != self._work]
            sure = [
                name for name in strangers if self._is_here(owners[name]) or self._is_renewed(name)
            ]
            if sure or not strangers:
                return sure
            time.sleep(WAIT_SECONDS)

    def _judge(self, claim: str) -> tuple[bool, Owner | None]:
        """Whether its owner, in another process, may be at work; and what the claim says of it."""
        path = self._folder / claim
        owner = _read(
            path
        )  # before its time: of one that is replaced meanwhile the time is a new one
        try:
            status = path.stat()
        except FileNotFoundError:
            return False, owner
        renewed_ns, lease_seconds = status.st_mtime_ns, self._lease_seconds
        if not status.st_size:
            lease_seconds = min(lease_seconds, SILENT_SECONDS)
        seen = self._seen.get(claim)
        if seen is None or seen.renewed_ns != renewed_ns:
            seen = self._seen[claim] = Seen(renewed_ns, time.monotonic(), seen is not None)
        if time.monotonic() - seen.since > lease_seconds:
            return False, owner
        return owner is None or not self._is_here(owner) or _started(
            owner.get("process")
        ) == owner.get("started"), owner

    def _is_renewed(self, name: str) -> bool:
        seen = self._seen.get(WORKER + name)
        return seen is not None and seen.is_renewed

    def _is_here(self, owner: Owner) -> bool:
        """True for a process of this machine."""
        return all(owner.get(key) == self._me[key] for key in ("host", "boot", "processes"))

    def _remove_dead(self, claim: str, owner: Owner | None) -> bool:
        """True where the claim of that dead process is gone; one process at a time removes it, lest one removes its successor."""
        path, right, seen = self._folder / claim, f".{_hash([claim, owner])}", self._seen.get(claim)
        if seen is None or not self.take(right):
            return False
        try:
            if _read(path) != owner or path.stat().st_mtime_ns != seen.renewed_ns:
                return False
            path.unlink()
            self._seen.pop(claim, None)
            return True
        except FileNotFoundError:
            return False
        finally:
            self.drop(right)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._lock:
                for claim in self._held:
                    with suppress(
                        OSError
                    ):  # taken from us, or the disk is away: the work itself will tell
                        os.utime(self._folder / claim)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path) -> Owner | None:
    """What a claim says; None where it is gone, or is just being written."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _describe_self() -> Owner:
    """What tells this process from all others: the machine since it was started, its table of processes, and the process."""
    boot, processes = boot_id(), 0
    if os.path.exists("/proc/self/ns/pid"):
        processes = os.stat("/proc/self/ns/pid").st_ino
    process = os.getpid()
    return {
        "host": platform.node(),
        "boot": boot,
        "processes": processes,
        "process": process,
        "started": _started(process),
    }


def _started(process: object) -> str | None:
    """When a process of this machine was started, in a word; None where there is none of that number."""
    if not isinstance(process, int):
        return None
    try:
        if not os.path.exists("/proc/self/stat"):
            os.kill(process, 0)
            return ""
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except PermissionError:  # somebody else's process
        return ""
    except (OSError, OverflowError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
