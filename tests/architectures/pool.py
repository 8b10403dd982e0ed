"""Jobs in processes of their own, each with a limit of time and of memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MEMORY = 6 << 30
SECONDS_A_JOB = 600  # of the processor, so that a busy machine makes the same table
PATIENCE = 3600  # seconds by the clock


def run_all(
    job: Callable[[Any], Iterable[Any]], arguments: Iterable[Any], processes: int = 2
) -> Iterator[tuple[Any, list[Any], str | None]]:
    """Yield (argument, what the job yielded, how it died), in the order in which jobs end."""
    gc.freeze()  # or each process copies what it looks through
    context = multiprocessing.get_context("fork")  # what was imported is there already
    waiting = list(arguments)[::-1]
    running: dict[Connection, tuple[Any, Any, float, list[Any]]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            argument = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, argument, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (argument, process, time.monotonic(), [])
        for receiver in wait(list(running), timeout=1):
            argument, process, _, lines = running[receiver]
            try:
                lines.append(receiver.recv())
            except EOFError:
                del running[receiver]
                process.join()
                death = None if process.exitcode == 0 else f"ended with {process.exitcode}"
                yield argument, lines, death
        for _, process, began, _ in running.values():
            if time.monotonic() - began > PATIENCE:
                process.kill()


def _work(job: Callable[[Any], Iterable[Any]], argument: Any, sender: Connection) -> None:
    limit = _mapped() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_A_JOB, SECONDS_A_JOB))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for line in job(argument):
        sender.send(line)
    sender.close()
    os._exit(0)  # nothing of the parent's is to be cleaned up here


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class TooSlowError(Exception):
    """A single model took too long."""


def limited(seconds: int, made: Callable[[], Any]) -> Any:
    """Return what is made, or raise TooSlowError after seconds of the processor."""

    def stop(*_: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return made()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
