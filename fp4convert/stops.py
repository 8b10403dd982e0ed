"""Ctrl-C, and SIGTERM as Slurm and Kubernetes send it before they take the machine away: one exception, wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


class Stopped(BaseException):
    """The process was told to stop.

    kept  what stays of its work, in words; whoever knows better says so
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.kept = "finished shards stay"

    @property
    def is_terminated(self) -> bool:
        return self.number == signal.SIGTERM


def listen() -> None:
    """From now on either signal raises Stopped, once; asked a second time, the process ends at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.unraisablehook = _send_again


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Stopped(number)


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """A stop that came while an object was cleared away, where Python drops exceptions, comes once more."""
    if isinstance(lost.exc_value, Stopped):
        number = lost.exc_value.number
        signal.signal(number, _stop)
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(lost)
