"""Stop a process by signals; describe its streams, memory and library.

Ctrl-C and SIGTERM raise one exception, and streams never fail.

Python raises the exception between two steps of the main thread.  A signal that comes just before
that thread begins to wait for a lock, or that another thread gets, does not end the wait.  So a
thread hears of every signal and interrupts the main one until the exception is raised.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ctypes import CDLL

# The copies of the CPU library's kernels.
LEVELS = {2: "x86-64-v2 (SSE4.2)", 3: "x86-64-v3 (AVX2)", 4: "x86-64-v4 (AVX-512)", 0: "baseline"}
# malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD.
MALLOC_OPTIONS = ((-4, 0), (-1, (1 << 31) - 1), (-2, 64 << 20))
WAKE_SECONDS = 0.05
# Ends a wait and does nothing else; ignored where nobody listens to it. None on Windows, which has
# no signal for a thread: there a stop may wait until the main thread waits no more.
NUDGE = getattr(signal, "SIGURG", None) if hasattr(signal, "pthread_kill") else None


_raised: list[Stopped] = []  # since somebody listens


class Stopped(BaseException):
    """The process was told to stop.

    exit_code  130 for Ctrl-C, 143 for SIGTERM
    kept       the part of the work that stays, in words; None for nothing; handlers may change it
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.exit_code = 128 + number
        self.kept: str | None = "finished shards are kept"


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Mark a stop in here: there is nothing to continue from."""
    try:
        yield
    except Stopped as stopped:
        stopped.kept = None
        raise


@contextmanager
def uncovered() -> Iterator[None]:
    """Raise a stop again that other code, as C imports, made an error."""
    try:
        yield
    except Exception:
        if _raised:
            raise _raised[-1] from None
        raise


def listen() -> None:
    """Raise Stopped at Ctrl-C and SIGTERM from now on, once.

    Asked a second time, the process ends at once.
    """
    _raised.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sys.unraisablehook = _send_again
    _watch()


def stop_listening() -> None:
    """Ignore stops from now on, if anybody listens: the run is ending."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


def end_if_stopped(exit_code: int) -> None:
    """End the process here if it was told to stop; wait for no thread.

    Python would wait, also for threads of other packages; a thread that a stop caught before its
    package noted it is never told to end.
    """
    if _raised:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(exit_code)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    _raised.append(Stopped(number))
    raise _raised[-1]


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a stop that was raised in __del__, where Python drops exceptions."""
    if isinstance(lost.exc_value, Stopped):
        number = lost.exc_value.number
        signal.signal(number, _stop)
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(lost)


@cache
def _watch() -> None:
    """Begin to hear of signals as they come; once in a process."""
    if NUDGE is None:
        return
    signal.signal(NUDGE, lambda number, frame: None)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wake, args=(reading,), name="stops", daemon=True).start()


def _wake(reading: int) -> None:
    """Interrupt the main thread until a signal has been raised there."""
    main = threading.main_thread().ident
    while (number := os.read(reading, 1)) and main is not None and NUDGE is not None:
        while signal.getsignal(number[0]) is _stop:  # it has not been raised
            signal.pthread_kill(main, NUDGE)
            time.sleep(WAKE_SECONDS)


class _Indifferent(io.FileIO):
    """A file whose writes always end well."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def sturdy_streams() -> Iterator[None]:
    """Make stdout and stderr print every character in some way.

    Both exist even if the process was given none, and stderr never fails.
    """
    before = sys.stdout, sys.stderr
    out, err = (stream or _open_text(io.FileIO(os.devnull, "w")) for stream in before)
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.__stderr__ is not None and err is sys.__stderr__:
        err = _open_text(_Indifferent(err.fileno(), "w", closefd=False), err.encoding)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_text(file: io.FileIO, encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=True
    )


@cache
def cpu_library() -> CDLL:
    """Load the library that lies beside the package.

    Raises  RuntimeError where the package was installed without it
    """
    from ctypes import CDLL
    from importlib.resources import files

    for item in files("fp4convert").iterdir():
        if item.name.startswith("libcpu."):
            return CDLL(str(item))
    raise RuntimeError("the CPU library is not installed with the package; reinstall fp4convert")


def reuse_freed_memory() -> None:
    """Let malloc keep large blocks that are freed, for torch's temporaries.

    glibc would map each from the system and give it back: a fifth of the time of calibrate.
    """
    import ctypes

    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, value in MALLOC_OPTIONS:
            mallopt(option, value)


def instruction_set() -> str:
    """Name the copy of the library's kernels that fits this processor."""
    return LEVELS[cpu_library().fp4_level(0)]


@cache
def outlive_bus_errors() -> None:
    """Read lost pages of mapped files as zeros instead of dying."""
    cpu_library().outlive_bus_errors()


def bus_errors() -> int:
    """Count lost pages; data read since the first is worthless."""
    return int(cpu_library().bus_errors()) if outlive_bus_errors.cache_info().currsize else 0


def processors() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_nbytes() -> int:
    """Count the bytes of memory of this machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import ctypes

    # MEMORYSTATUSEX: its own length, the load in percent, then 8-byte counts, the total first.
    status = (ctypes.c_uint64 * 8)(64)
    getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(status)  # noqa: B009
    return status[1]


def is_running(process: int) -> bool | None:
    """Tell whether a process is there; None on Windows.

    There signal 0 is Ctrl-C to whole groups of processes.
    """
    if not hasattr(os, "getuid"):
        return None
    try:
        os.kill(process, 0)  # only asks
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def peak_nbytes() -> int | None:
    """Return the peak memory of this process; None on Windows."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:
        return None
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
