"""Wait between tries at a server: pauses, patience, rate limits."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from fp4convert.progress import duration_text

NEWS_SECONDS = 0.2  # failures of other threads in this time are no news
LONGEST_PAUSE = 900.0  # seconds that a server may ask for; a longer pause ends the run
FOR_EVER = 1e12  # seconds
_RATE_LIMIT = re.compile(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_SECONDS = re.compile(r"\s*[0-9]+\s*")  # other digits, such as a raised 2, are no number


class Patience(NamedTuple):
    """Limits of waiting for the network.

    tries         without progress
    least_nbytes  progress; a connection that brings less in `least_seconds` is closed
    """

    timeout_seconds: float = 20.0
    tries: int = 6
    least_nbytes: int = 16 << 10
    least_seconds: float = 60.0
    first_seconds: float = 0.5
    longest_seconds: float = 60.0


class Retry:
    """Waits between tries; the threads that ask one server share it.

    tell  gets a line for people about a pause or a silent server
    """

    def __init__(self, patience: Patience, tell: Callable[[str], None]) -> None:
        self.patience = patience
        self.stopped = threading.Event()  # ends all waits
        self._tell = tell
        self._paused_until = 0.0
        self._news_at = 0.0
        self._lock = threading.Lock()

    def wait(
        self,
        failures: int,
        trouble: str,
        asked_seconds: float | None = None,
        tries: int | None = None,
    ) -> bool:
        """Wait before the next try; return False after the last one.

        failures       in a row without progress; the first is not reported
        trouble        host and reason, for people
        asked_seconds  pause that the server asks for; it holds for every thread, and one that is
                       longer than LONGEST_PAUSE ends the tries
        tries          at most; None for those of the patience
        """
        tries = tries or self.patience.tries
        if failures >= tries or (asked_seconds or 0.0) > LONGEST_PAUSE:
            return False
        # Doubled each time, and spread, lest threads return at the same moment.
        doubled = self.patience.first_seconds * 2 ** max(0, failures - 1)
        seconds = min(self.patience.longest_seconds, doubled) * random.uniform(0.5, 1.5)
        if asked_seconds is None:
            with self._lock:
                is_news = failures > 1 and time.monotonic() > self._news_at + NEWS_SECONDS
                self._news_at = time.monotonic() if is_news else self._news_at
            if is_news:
                again = f"try {failures + 1} of {tries} in {duration_text(seconds)}"
                self._tell(f"{trouble}; {again}")
            self.stopped.wait(seconds)
            return True
        seconds = max(seconds, asked_seconds)
        with self._lock:
            until = time.monotonic() + seconds
            is_news = until > self._paused_until + 1
            self._paused_until = max(self._paused_until, until)
        if is_news:
            self._tell(f"rate limited by the Hub: waiting {seconds:.0f} s")
        self.wait_while_paused()
        return True

    def wait_while_paused(self) -> None:
        """Wait until the pause of all threads ends."""
        while (left := self._paused_until - time.monotonic()) > 0 and not self.stopped.is_set():
            self.stopped.wait(left)


def pause_of(header: Callable[[str], str | None]) -> float | None:
    """Return the pause in seconds that reply headers ask for, if any."""
    asked = header("Retry-After") or ""
    if match := _RATE_LIMIT.search(header("RateLimit") or ""):
        asked = match[1]
    if _SECONDS.fullmatch(asked):
        return min(float(asked), FOR_EVER)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def status_words(status: int, seconds: float | None) -> str:
    """Describe a status, and a pause that is too long to be kept."""
    is_long = (seconds or 0.0) > LONGEST_PAUSE
    return f"HTTP {status}{f', to wait {duration_text(seconds or 0.0)}' if is_long else ''}"
