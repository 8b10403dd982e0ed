"""Commands run, and what they cost: seconds by the clock, seconds of all processors, memory.

Their own bytecode is kept, as it is of an installed program: PYTHONDONTWRITEBYTECODE does not reach
them.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMMAND = Path(sys.executable).with_name("fp4convert")
LOOK_SECONDS = 0.005  # between looks at a process's memory
TOLD_CHARACTERS = 2000  # of the end of what a failed command said


@dataclass(frozen=True, slots=True)
class Cost:
    """What some work took; children count.

    anonymous_nbytes, peak_nbytes  of memory at its highest: RssAnon, as often as it was looked at,
    and VmHWM
    """

    seconds: float
    cpu_seconds: float
    anonymous_nbytes: int = 0
    peak_nbytes: int = 0


class TimeIsUpError(Exception):
    """A command that was ended because it took too long."""


class FailedError(Exception):
    """A command that did not end with 0; the end of what it said."""


def clean_environment() -> dict[str, str]:
    """What commands run in."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(words: Iterable[object], is_watched: bool = False, limit: float | None = None) -> Cost:
    """Run a command to its end.

    is_watched  look at its memory, which takes time from it on few cores
    limit       seconds after which it is ended with TimeIsUpError
    """
    return run_together([words], is_watched, limit)[0]


def run_together(
    commands: Sequence[Iterable[object]], is_watched: bool = False, limit: float | None = None
) -> list[Cost]:
    """Start all of them, wait for all; the clock of each begins with the first."""
    with tempfile.TemporaryFile() as said:
        begun = time.perf_counter()
        started = [
            subprocess.Popen(
                [str(word) for word in words],
                stdout=said,
                stderr=said,
                env=clean_environment(),
                start_new_session=True,
            )
            for words in commands
        ]
        late = threading.Event()
        timer = threading.Timer(limit or 0, _end, (started, late))
        if limit:
            timer.start()
        try:
            costs = [_wait(process, begun, is_watched) for process in started]
        except BaseException:
            _end(started, late)
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeIsUpError(f"more than {limit:.0f} s")
        if any(process.returncode for process in started):
            said.seek(0)
            text = said.read().decode(errors="replace")[-TOLD_CHARACTERS:]
            ended = [
                f"\nended by signal {-code}"
                for process in started
                if (code := process.returncode) < 0
            ]
            raise FailedError("".join([text, *ended[:1]]))
    return costs


def _end(started: list[subprocess.Popen[bytes]], late: threading.Event) -> None:
    late.set()
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], begun: float, is_watched: bool) -> Cost:
    over, peaks = threading.Event(), {"RssAnon": 0, "VmHWM": 0}
    watcher = threading.Thread(target=_watch, args=(process.pid, over, peaks))
    if is_watched:
        watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    over.set()
    process.returncode = os.waitstatus_to_exitcode(status)
    if is_watched:
        watcher.join()
    return Cost(seconds, usage.ru_utime + usage.ru_stime, peaks["RssAnon"], peaks["VmHWM"])


def _watch(pid: int, over: threading.Event, peaks: dict[str, int]) -> None:
    while not over.wait(LOOK_SECONDS):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)


def cost_here(work: Callable[[], object]) -> Cost:
    """What a call in this process takes, with the children that it waits for."""
    begun, before = time.perf_counter(), os.times()
    work()
    seconds, after = time.perf_counter() - begun, os.times()
    return Cost(seconds, sum(after[:4]) - sum(before[:4]))


def take_turns(works: dict[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """What each took in each round, all of them one after the other in every round; a first round
    does not count.
    """
    done = [{name: work() for name, work in works.items()} for _ in range(rounds + 1)]
    return {name: [each[name] for each in done[1:]] for name in works}


def median_of(costs: Iterable[Cost], what: str = "seconds") -> float:
    return statistics.median(getattr(cost, what) for cost in costs)


def ratio_of(work: Sequence[Cost], reference: Sequence[Cost], what: str = "seconds") -> float:
    """The median of the ratios of pairs."""
    return statistics.median(
        getattr(a, what) / getattr(b, what) for a, b in zip(work, reference, strict=True)
    )
