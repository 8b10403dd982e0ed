"""Standard streams that can always be written to: words for people that have nowhere to go never end the work.

What a command says on stderr is told and lost where stderr is closed, full, or a pipe or terminal that nobody reads any more.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Indifferent(io.FileIO):
    """A file whose writes always end well."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def sturdy_streams() -> Iterator[None]:
    """Meanwhile stdout and stderr are there, print every character in some way, and stderr never fails."""
    before = sys.stdout, sys.stderr
    out, err = (stream or _opened(io.FileIO(os.devnull, "w")) for stream in before)
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.__stderr__ is not None and err is sys.__stderr__:
        err = _opened(_Indifferent(err.fileno(), "w", closefd=False), err.encoding)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _opened(file: io.FileIO, encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=True)
