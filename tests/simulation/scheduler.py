"""Threads of simulated processes: one runs at a time, and the seed says which.

A thread is a greenlet. It gives way at every call of the system (Scheduler.step), and where it
waits. The clock goes on by what calls take, and to the next timer when nobody can run.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

MOST_STEPS = 60_000  # of a world: ten times what the longest takes
MOST_SECONDS = 40_000.0  # of virtual time
NAPS = (20.0, 200.0, 2000.0)  # steps for which a thread may get no turn at all
LONGEST_NAP = 5.0  # seconds


class Violation(Exception):  # noqa: N818
    """What must never be was seen."""


class GreenThread(greenlet):
    """One thread of a simulated process."""

    def __init__(self, scheduler: Scheduler, process: Any, run: Callable[[], None]) -> None:
        super().__init__(run, parent=scheduler.loop)
        self.scheduler = scheduler
        self.process = process
        self.token = 0  # of the wait that a timer would end
        self.is_woken = False
        self.is_due = False  # its wait is over, and it has not had its turn yet


class Scheduler:
    """Who runs, and what time it is.

    now      seconds since the world began
    steps    calls of the system so far, by which faults are planned
    hasty    how often a thread goes on after a call, from 0 to 1
    naps     how often a thread gets no turn for long before a call, from 0 to 1
    on_step  is called at each step with the process, the name of the call and its subject
    """

    def __init__(self, chance: Random, hasty: float, naps: float, step_seconds: float) -> None:
        self.chance = chance
        self.now = 1.0
        self.steps = 0
        self.hasty = hasty
        self.naps = naps
        self.step_seconds = step_seconds
        self.loop = getcurrent()
        self.on_step: Callable[[Any, str, str], None] = lambda process, call, subject: None
        self.is_noted = False
        self.trace: list[str] = []
        self.living = 0  # processes
        self.broken = ""  # the first promise that was
        self._hash = hashlib.blake2b(digest_size=16)
        self._random = chance.random
        self._ready: list[GreenThread] = []
        self._timers: list[tuple[float, int, GreenThread, int]] = []
        self._count = 0

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def begin(self, thread: GreenThread) -> None:
        self._ready.append(thread)

    def note(self, process: Any, call: str, subject: str) -> None:
        """Add a line to the trace, where it is wanted."""
        if not self.is_noted:
            return
        line = f"{self.now:.6f} {process} {call} {subject}\n"
        self._hash.update(line.encode("utf-8", "surrogateescape"))
        self.trace.append(line)

    def step(self, process: Any, call: str, subject: str = "", takes: float = 1.0) -> None:
        """Let others run, perhaps, before a call of the current thread.

        takes  how much longer than others such a call takes; 0 for none
        """
        if process.is_over:
            raise GreenletExit
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.broken = self.broken or f"no end after {MOST_STEPS} steps"
            raise Violation(self.broken)
        if self.is_noted:
            self.note(process, call, subject)
        if takes:
            self.now += self.step_seconds * takes * process.machine.slowness * self._random()
        self.on_step(process, call, subject)
        if self.naps and self._random() < self.naps:
            self.block(min(LONGEST_NAP, self.chance.choice(NAPS) * self.step_seconds))
        if process.is_over or process.frozen_until > self.now or self._random() >= self.hasty:
            self._ready.append(getcurrent())
            self.loop.switch()
            if process.is_over:
                raise GreenletExit

    def block(self, seconds: float | None = None) -> bool:
        """Wait for `wake`; False where the seconds passed before."""
        thread = getcurrent()
        if thread.process.is_over:
            raise GreenletExit
        thread.token += 1
        thread.is_woken = thread.is_due = False
        if seconds is not None:
            self.wake_at(self.now + max(0.0, seconds), thread, thread.token)
        self.loop.switch()
        if thread.process.is_over:
            raise GreenletExit
        return thread.is_woken

    def wake(self, thread: GreenThread) -> None:
        thread.is_woken = True
        if not thread.is_due:  # else its seconds have just passed, and it goes on anyway
            thread.token += 1
            thread.is_due = True
            self._ready.append(thread)

    def wake_at(self, when: float, thread: GreenThread, token: int) -> None:
        """Wake a thread then, unless the wait of that token has ended before."""
        self._count += 1
        heappush(self._timers, (when, self._count, thread, token))

    def run(self) -> None:
        """Run threads until every process is over."""
        while self.living:
            while self._timers and self._timers[0][0] <= self.now:
                _, _, thread, token = heappop(self._timers)
                if thread.token == token:
                    thread.token += 1
                    thread.is_due = True
                    self._ready.append(thread)
            if not self._ready:
                if not self._timers or self._timers[0][0] > MOST_SECONDS:
                    raise Violation("everything waits, and nothing will end it")
                self.now = max(self.now, self._timers[0][0])
                continue
            # The last takes the place of the one that runs.
            place = int(self._random() * len(self._ready))
            thread = self._ready[place]
            self._ready[place] = self._ready[-1]
            self._ready.pop()
            process = thread.process
            if thread.dead or process.is_over:
                continue
            if process.frozen_until > self.now:
                thread.token += 1
                process.parked.append((thread, thread.token))
                self.wake_at(process.frozen_until, thread, thread.token)
                continue
            thread.switch()
            if self.broken:
                raise Violation(self.broken)

    def forget(self, threads: list[GreenThread]) -> None:
        """Unwind threads that never run again; whatever they call ends them."""
        for thread in threads:
            while not thread.dead:
                thread.throw(GreenletExit)


class Lock:
    """threading.Lock between simulated threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._waiting: deque[GreenThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_held:
            self._is_held = True
            return True
        if not blocking or timeout == 0:
            return False
        thread = getcurrent()
        self._waiting.append(thread)
        # Whoever releases it hands it on: it stays held.
        is_handed = self._scheduler.block(None if timeout < 0 else timeout)
        if not is_handed:
            self._waiting.remove(thread)
        return is_handed

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())
        else:
            self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """threading.RLock between simulated threads, with what Condition asks of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._lock = Lock(scheduler)
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is getcurrent():
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = getcurrent(), 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def _is_owned(self) -> bool:
        return self._owner is getcurrent()

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = getcurrent(), count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue:
    """queue.SimpleQueue between simulated threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiting: deque[GreenThread] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        from queue import Empty

        while not self._items:
            if not block:
                raise Empty
            self._waiting.append(getcurrent())
            if not self._scheduler.block(timeout):
                self._waiting.remove(getcurrent())
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread:
    """threading.Thread of a simulated process."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", bool(daemon)
        self._call = target, args, kwargs or {}
        self._number = getcurrent().scheduler.next_number()
        self._over = False
        self._green: GreenThread | None = None
        self._waiting: list[GreenThread] = []

    def __hash__(self) -> int:
        return self._number  # pools keep sets of threads, in the order of their addresses else

    def start(self) -> None:
        parent = getcurrent()
        self._green = GreenThread(parent.scheduler, parent.process, self._run)
        parent.process.threads.append(self._green)
        parent.scheduler.begin(self._green)

    def _run(self) -> None:
        target, args, kwargs = self._call
        scheduler = getcurrent().scheduler
        try:
            if target is not None:
                target(*args, **kwargs)
        except GreenletExit:
            raise
        except BaseException as error:
            getcurrent().process.note_crash(error)
        finally:
            self._over = True
            self._call = None, (), {}
            for thread in self._waiting:
                scheduler.wake(thread)
            self._waiting.clear()

    def join(self, timeout: float | None = None) -> None:
        thread = getcurrent()
        if self._green is None or self._over or not isinstance(thread, GreenThread):
            return
        self._waiting.append(thread)
        if not thread.scheduler.block(timeout):
            self._waiting.remove(thread)

    def is_alive(self) -> bool:
        return self._green is not None and not self._over

    @property
    def ident(self) -> int | None:
        return id(self._green) if self._green else None
