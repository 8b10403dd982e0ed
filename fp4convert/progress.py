"""Phases and rates of the work; sizes and seconds as text."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30.0  # of the latest work, which gives the rate
SAMPLE_SECONDS = 0.1
SHORTEST_SECONDS = 1.0  # in less, a rate means nothing
LINE_SECONDS = 5.0  # between two lines of a log
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


class Meter:
    """One phase; threads may report to it at once.

    Skipped bytes are done without work: neither they nor the time to skip them count for a rate.

    amount  writes an amount as text; None for bytes
    """

    def __init__(
        self,
        verb: str,
        total_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
        amount: Callable[[float], str] | None = None,
    ) -> None:
        self.verb = verb
        self._amount = amount or size_text
        self.total_nbytes = total_nbytes
        self.done_nbytes = 0
        self.tensor = ""
        self.is_over = False
        self._clock = clock
        self._lock = threading.Lock()
        self._worked_nbytes = 0
        self._begun = self._latest = clock()
        self._seconds = 0.0  # from its beginning to its end
        self._idle_seconds = 0.0
        self._samples = deque([(self._begun, 0)])  # second, bytes worked on until then

    def report(self, tensor: str, nbytes: int) -> None:
        """Count bytes of a tensor that are done now."""
        with self._lock:
            self.tensor = tensor
            self.done_nbytes += nbytes
            self._worked_nbytes += nbytes
            self._latest = self._clock()
            if self._latest - self._samples[-1][0] >= SAMPLE_SECONDS:
                self._samples.append((self._latest, self._worked_nbytes))
            oldest = self._latest - WINDOW_SECONDS
            while len(self._samples) > 2 and self._samples[1][0] < oldest:
                self._samples.popleft()

    def skip(self, nbytes: int) -> None:
        """Count bytes that were done before."""
        with self._lock:
            now = self._clock()
            self.done_nbytes += nbytes
            self._idle_seconds += now - self._latest
            self._latest = now
            self._samples = deque([(now, self._worked_nbytes)])

    def end(self) -> None:
        """Note that the phase is over."""
        with self._lock:
            if not self.is_over:
                self._seconds = self._clock() - self._begun
                self.is_over = True

    def status(self) -> str:
        """Return progress, rate and time left; totals once the phase is over."""
        with self._lock:
            done, total, amount = self.done_nbytes, self.total_nbytes, self._amount
            if self.is_over:
                duration = duration_text(self._seconds)
                words = [f"{amount(done)} in {duration}" if done else duration]
                worked = self._seconds - self._idle_seconds
                if self._worked_nbytes and worked > 0:
                    words.append(f"{amount(self._worked_nbytes / worked)}/s")
                if skipped := done - self._worked_nbytes:
                    words.append(f"{amount(skipped)} were there already")
                return ", ".join(words)

            now = self._clock()
            if not total:
                duration = duration_text(now - self._begun)
                return f"{amount(done)}, {duration}" if done else duration
            words = [f"{amount(done)} of {amount(total)} ({100 * done // total} %)"]
            first_second, first_nbytes = self._samples[0]
            seconds, nbytes = now - first_second, self._worked_nbytes - first_nbytes
            if seconds >= SHORTEST_SECONDS and nbytes:
                left = max(0, total - done) * seconds / nbytes
                words += [f"{amount(nbytes / seconds)}/s", f"{_whole_seconds(left)} left"]
            return ", ".join(words)


class Phases:
    """Phases of the work, one after another; threads report to the latest.

    say       gets a line and a tensor every few seconds, and a line at the end of such a phase
    says_all  gives `say` a line at the end of every phase
    """

    def __init__(
        self,
        say: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        says_all: bool = False,
    ) -> None:
        self.meters: list[Meter] = []
        self._say = say
        self._says_all = says_all
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = 0.0
        self._has_said = False

    def begin(
        self, verb: str, total_nbytes: int = 0, amount: Callable[[float], str] | None = None
    ) -> None:
        """End the phase before, and begin one.

        total_nbytes  or the total of another amount; 0 for unknown
        """
        self.end()
        self._latest, self._has_said = self._clock(), False
        self.meters.append(Meter(verb, total_nbytes, self._clock, amount))

    def report(self, tensor: str, nbytes: int) -> None:
        """Count bytes of a tensor or file that are done now."""
        self.meters[-1].report(tensor, nbytes)
        self._say_sometimes(self.meters[-1])

    def skip(self, nbytes: int) -> None:
        """Count bytes that were done before."""
        self.meters[-1].skip(nbytes)
        self._say_sometimes(self.meters[-1])

    def end(self) -> None:
        """End the phase, if there is one."""
        if self.meters and not self.meters[-1].is_over:
            meter = self.meters[-1]
            meter.end()
            if self._say and (self._has_said or self._says_all):
                self._say(f"{meter.verb}: {meter.status()}", "")

    def _say_sometimes(self, meter: Meter) -> None:
        with self._lock:
            now = self._clock()
            if self._say is None or now - self._latest < LINE_SECONDS:
                return
            self._latest, self._has_said = now, True
        self._say(f"{meter.verb}: {meter.status()}", meter.tensor)


def size_text(nbytes: float) -> str:
    """Write a number of bytes in decimal kB, MB, GB or TB, with three digits."""
    divisor, unit = next(
        ((divisor, unit) for divisor, unit in UNITS if nbytes >= 0.9995 * divisor), (1e3, "kB")
    )
    value = nbytes / divisor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def count_text(number: int, what: str) -> str:
    """Write a number of things: 1 module, 2,000 modules."""
    several = f"{what[:-1]}ces" if what.endswith("ix") else f"{what}s"
    return f"{number:,} {what if number == 1 else several}"


def are_text(number: int, what: str) -> str:
    """Write a number of things with its verb: 1 module is, 2,000 modules are."""
    return f"{count_text(number, what)} {'is' if number == 1 else 'are'}"


def tokens_text(tokens: float) -> str:
    """Write a number of tokens; below 10 with a decimal."""
    return f"{tokens:,.{0 if tokens >= 10 or tokens == int(tokens) else 1}f} tokens"


def duration_text(seconds: float) -> str:
    """Write seconds as people say them."""
    return f"{seconds:.2f} s" if seconds < 9.995 else _whole_seconds(seconds)


def _whole_seconds(seconds: float) -> str:
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
