"""Phases and rates of the work; sizes and seconds as text.

Numbers and words; others decide where they are shown.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_SECONDS = 30.0  # of work, by which a rate is told: what comes next is like what came last
SAMPLE_SECONDS = 0.1
SHORTEST_SECONDS = 1.0  # in less, a rate means nothing
LINE_SECONDS = 5.0  # between two lines of a log
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


class Sample(NamedTuple):
    """How many bytes had been worked on at a time."""

    seconds: float
    nbytes: int


class Meter:
    """One phase; threads may report to it at once.

    What is skipped is done, and nobody worked on it: neither its bytes nor the time that it took to find out count for a rate.

    amount  how much is said, where it is not bytes that are counted
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
        self._clock = clock
        self._lock = threading.Lock()
        self._worked_nbytes = 0
        self._begun = self._latest = clock()
        self._ended: float | None = None
        self._idle_seconds = 0.0
        self._samples = deque([Sample(self._begun, 0)])

    def report(self, tensor: str, nbytes: int) -> None:
        """So many bytes more are done, of that tensor."""
        with self._lock:
            self.tensor = tensor
            self.done_nbytes += nbytes
            self._worked_nbytes += nbytes
            self._latest = self._clock()
            if self._latest - self._samples[-1].seconds >= SAMPLE_SECONDS:
                self._samples.append(Sample(self._latest, self._worked_nbytes))
            while (
                len(self._samples) > 2 and self._samples[1].seconds < self._latest - WINDOW_SECONDS
            ):
                self._samples.popleft()

    def skip(self, nbytes: int) -> None:
        """So many bytes more are done already."""
        with self._lock:
            now = self._clock()
            self.done_nbytes += nbytes
            self._idle_seconds += now - self._latest
            self._latest = now
            self._samples = deque([Sample(now, self._worked_nbytes)])

    def end(self) -> None:
        """The phase is over."""
        with self._lock:
            self._ended = self._ended or self._clock()

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def status(self) -> str:
        """How far it is, how fast and how long still; of a phase that is over, what there was to do."""
        with self._lock:
            return ", ".join(self._conclusion() if self._ended else self._advance())

    def _advance(self) -> list[str]:
        now = self._clock()
        if not self.total_nbytes:
            return [
                *([self._amount(self.done_nbytes)] if self.done_nbytes else []),
                duration_text(now - self._begun),
            ]
        share = 100 * self.done_nbytes // self.total_nbytes
        words = [
            f"{self._amount(self.done_nbytes)} of {self._amount(self.total_nbytes)} ({share} %)"
        ]
        seconds, nbytes = (
            now - self._samples[0].seconds,
            self._worked_nbytes - self._samples[0].nbytes,
        )
        if seconds >= SHORTEST_SECONDS and nbytes:
            left = max(0, self.total_nbytes - self.done_nbytes) * seconds / nbytes
            words += [self._rate(nbytes / seconds), f"{_whole_seconds(left)} left"]
        return words

    def _conclusion(self) -> list[str]:
        seconds = (self._ended or 0.0) - self._begun
        words = [
            f"{self._amount(self.done_nbytes)} in {duration_text(seconds)}"
            if self.done_nbytes
            else duration_text(seconds)
        ]
        worked = seconds - self._idle_seconds
        if self._worked_nbytes and worked > 0:
            words.append(self._rate(self._worked_nbytes / worked))
        if skipped := self.done_nbytes - self._worked_nbytes:
            words.append(f"{self._amount(skipped)} were there already")
        return words

    def _rate(self, per_second: float) -> str:
        return f"{self._amount(per_second)}/s"


class Phases:
    """What is being done, phase after phase; threads report to the one that was begun last.

    say  gets a line and a tensor every few seconds, and a line at the end of a phase that it got one of; None: nobody listens
    """

    def __init__(
        self,
        say: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meters: list[Meter] = []
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = 0.0
        self._is_told = False

    def begin(
        self, verb: str, total_nbytes: int = 0, amount: Callable[[float], str] | None = None
    ) -> None:
        """End the phase before, and begin one of so many bytes, or of what `amount` says; 0 where nobody knows."""
        self.end()
        self._latest, self._is_told = self._clock(), False
        self.meters.append(Meter(verb, total_nbytes, self._clock, amount))

    def report(self, tensor: str, nbytes: int) -> None:
        """So many bytes more of the phase are done, of that tensor or file."""
        self.meters[-1].report(tensor, nbytes)
        self._tell(self.meters[-1])

    def skip(self, nbytes: int) -> None:
        """So many bytes of the phase are done already."""
        self.meters[-1].skip(nbytes)
        self._tell(self.meters[-1])

    def end(self) -> None:
        """The phase is over, if there is one."""
        if self.meters and not self.meters[-1].is_over:
            meter = self.meters[-1]
            meter.end()
            if self._say and self._is_told:
                self._say(f"{meter.verb}: {meter.status()}", "")

    def _tell(self, meter: Meter) -> None:
        with self._lock:
            now = self._clock()
            if self._say is None or now - self._latest < LINE_SECONDS:
                return
            self._latest, self._is_told = now, True
        self._say(f"{meter.verb}: {meter.status()}", meter.tensor)


def size_text(nbytes: float) -> str:
    """A number of bytes in kB, MB, GB or TB, as decimal as disks are sold, with three digits."""
    divisor, unit = next(
        ((divisor, unit) for divisor, unit in UNITS if nbytes >= 0.9995 * divisor), (1e3, "kB")
    )
    value = nbytes / divisor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def tokens_text(tokens: float) -> str:
    """A number of tokens; of few in a second, with a digit behind the point."""
    return f"{tokens:,.{0 if tokens >= 10 or tokens == int(tokens) else 1}f} tokens"


def rate_text(nbytes_per_second: float) -> str:
    return f"{size_text(nbytes_per_second)}/s"


def duration_text(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds:.2f} s" if seconds < 9.995 else _whole_seconds(seconds)


def _whole_seconds(seconds: float) -> str:
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
