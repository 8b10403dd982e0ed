"""Machines with clocks and caches of their own, and the processes on them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp4convert.errors import Fp4Error
from simulation.disk import Node
from simulation.scheduler import GreenThread

if TYPE_CHECKING:
    from simulation.world import World

LEASE_SECONDS = 60.0  # as docs/machines.md says it
BEAT_SECONDS = 15.0  # between two signs of life
SLACK_SECONDS = 7.0  # until a thread that is awake gets its turn
FIRST_FD = 1 << 20  # of files of simulated processes: no real one is as large


@dataclass(eq=False)
class Machine:
    """One machine.

    boot           its boot id, another one after each start
    wall_seconds   how far its clock is from the true time
    tick           how many of its seconds pass in one
    slowness       of its calls
    cache_seconds  for which it believes what it knows of names and times; 0 on a disk of its own
    namespace      its table of processes
    """

    name: str
    host: str
    boot: str
    wall_seconds: float
    start_seconds: float
    tick: float
    slowness: float
    cache_seconds: float
    namespace: int
    names: dict[int, dict[str, tuple[Node | None, float]]] = field(default_factory=dict)
    times: dict[int, tuple[int, int, int, float]] = field(default_factory=dict)

    def forget(self) -> None:
        self.names.clear()
        self.times.clear()


@dataclass
class Trouble:
    """Calls that fail, all of one kind.

    number   the error's number; of requests their status, 0 for a connection that breaks
    left     how many more will
    is_done  it is done all the same: the reply was lost
    """

    kind: str
    number: int
    left: int
    is_done: bool


@dataclass
class Handle:
    """An open file.

    known  what was in it when it was opened, on a machine that may believe so for long
    """

    node: Node
    path: str
    can_write: bool
    known: bytes | None
    place: int = 0


class Process:
    """One process: its number, its open files, its threads, and how it ended.

    outcome  "" while it runs; "ok", a code of an error, "killed", or "crash"
    """

    def __init__(
        self, world: World, machine: Machine, number: int, what: str, run: Callable[[], Any]
    ) -> None:
        self.world = world
        self.machine = machine
        self.boot = machine.boot
        self.number = number
        self.what = what
        self.is_over = False
        self.is_torn = False  # its last write is
        self.was_troubled = False  # a call of it failed
        self.frozen_until = 0.0
        self.parked: list[
            tuple[GreenThread, int]
        ] = []  # its threads meanwhile, each with its token
        self.frozen_seconds = 0.0
        self.last_frozen = -1e9
        self.asleep_since = 0.0  # it last stood still; with less than a beat between, all along
        self.is_fenced = False  # another took its worker's claim: whoever looks takes it for dead
        self.last_missed = -1e9  # when it woke from a sleep in which claims may have ended
        self.started = world.scheduler.now
        self.plan = ""  # that it carries out; "" for any
        self.began_whole = False  # the output had its record then
        self.outcome = ""
        self.result: Any = None
        self.words = ""
        self.fds: dict[int, Handle] = {}
        self.next_fd = FIRST_FD
        self.looks: dict[int, float] = {}  # claims of the dead: since when it knows them
        self.opened: dict[str, float] = {}  # files: when it opened them last
        self.late: dict[str, set[str]] = {}  # by the task: its files, done before it was claimed
        self._run = run
        thread = GreenThread(world.scheduler, self, self._main)
        self.threads = [thread]
        world.scheduler.begin(thread)
        world.scheduler.living += 1

    def __str__(self) -> str:
        return f"{self.machine.name}/{self.number}"

    def _main(self) -> None:
        try:
            self.result = self._run()
            self.outcome = self.outcome or "ok"  # a thread of it may have ended by a traceback
        except Fp4Error as error:
            if error.exit_code == 1 or not error.next_step:
                self.note_crash(error)
            if not self.outcome:
                self.outcome, self.words = error.code, error.message
        except Exception as error:
            self.note_crash(error)
        self.end(self.outcome)

    def note_crash(self, error: BaseException) -> None:
        self.outcome = "crash"
        self.words = "".join(traceback.format_exception(error))

    def end(self, outcome: str) -> None:
        """Stop for good, as after the last step or a SIGKILL."""
        if self.is_over:
            return
        self.is_over = True
        self.world.scheduler.living -= 1
        self.outcome = outcome
        self.world.scheduler.note(self, "ends", outcome)
        self.fds.clear()

    def freeze(self, seconds: float) -> None:
        now = self.world.scheduler.now
        until = max(self.frozen_until, now + seconds)
        if now > self.last_frozen + BEAT_SECONDS:
            self.asleep_since = now
        self.frozen_seconds += until - max(self.frozen_until, now)
        self._sleep_until(until)

    def _sleep_until(self, until: float) -> None:
        self.frozen_until = self.last_frozen = until
        if until - self.asleep_since > LEASE_SECONDS - BEAT_SECONDS - SLACK_SECONDS:
            self.last_missed = until

    def thaw(self, seconds: float) -> None:
        """Go on within so many seconds, where it would stand still for longer."""
        scheduler = self.world.scheduler
        until = scheduler.now + seconds
        if self.is_over or self.frozen_until <= until:
            return
        self.frozen_seconds -= self.frozen_until - until
        self._sleep_until(until)
        for thread, token in self.parked:
            scheduler.wake_at(until, thread, token)
        self.parked.clear()

    def open(self, node: Node, path: str, can_write: bool) -> int:
        fd = self.next_fd
        self.next_fd += 1
        known = bytes(node.data) if self.machine.cache_seconds else None
        self.fds[fd] = Handle(node, path, can_write, known)
        return fd
