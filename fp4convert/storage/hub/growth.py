"""Find how many requests at once a piece of a file is worth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GAIN = 1.3  # times the rate that twice the requests have to bring
ROUND = 2  # pieces of each place that are timed
PAUSE = 16  # rounds until what brought nothing is tried again


class Growth:
    """The parts of a piece that are requested at once.

    A storage limits each connection, a line all of them together.  Rounds of pieces are timed:
    after each the number of parts doubles; where a round then brings no more, it halves again.
    Memory stays as it is, for the pieces at once do.

    parts   of each piece at the time
    places  pieces at once
    most    parts
    clock   gives seconds
    """

    def __init__(self, places: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.parts, self._places, self._most, self._clock = 1, places, most, clock
        self._rate = 0.0  # bytes a second with half of the parts; 0 if none are tried
        self._rest = 0  # rounds until the next trial
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Begin a round; pieces on their way when the number changed do not count."""
        self._unsettled, self._pieces, self._nbytes, self._since = self._places, 0, 0, 0.0

    def note(self, nbytes: int) -> None:
        """Count a piece that has come."""
        with self._lock:
            if self._unsettled:
                self._unsettled -= 1
                self._since = self._clock()
                return
            self._pieces += 1
            self._nbytes += nbytes
            if self._pieces >= ROUND * self._places:
                self._end(self._nbytes / max(self._clock() - self._since, 1e-9))

    def _end(self, rate: float) -> None:
        """End a round: go back, stay, or try twice as many."""
        if self._rate and rate < GAIN * self._rate:
            self.parts //= 2
            self._rate, self._rest = 0.0, PAUSE
        elif self._rest:
            self._rest -= 1
        elif self.parts * 2 <= self._most:
            self.parts *= 2
            self._rate = rate
        else:
            self._rate = 0.0
        self._begin()
