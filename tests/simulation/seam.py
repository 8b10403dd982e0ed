"""Put the simulated system in the place of Python's own calls: the one seam between both.

It lies below every function of fp4convert, so that these may change as they like.  Threads that are
not simulated, and paths and files of the real disk, keep the real calls.
"""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import importlib.metadata
import io
import logging
import mmap
import os
import platform
import queue
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import huggingface_hub.lfs
import safetensors
from greenlet import getcurrent
from huggingface_hub import HfApi

import fp4convert.storage.hub.http
from simulation import hub, scheduler
from simulation.machines import FIRST_FD
from simulation.scheduler import GreenThread
from simulation.streams import PROC, open_stream
from simulation.system import ROOT

BY_PATH = (
    *("stat", "lstat", "listdir", "scandir", "access", "statvfs", "open", "unlink", "remove"),
    *("rename", "replace", "mkdir", "rmdir", "utime", "readlink"),
)
BY_FD = (
    *("fstat", "close", "read", "pread", "preadv", "write", "pwrite", "lseek", "ftruncate"),
    *("posix_fallocate", "fsync", "fdatasync"),
)
PROCESSORS = {0, 1}


def _is_ours(path: Any) -> bool:
    if isinstance(path, int):
        return path >= FIRST_FD
    text = path if isinstance(path, str) else os.fspath(path)
    return isinstance(text, str) and (
        text == ROOT
        or text.startswith((f"{ROOT}/", "/proc/self/ns/", "/proc/sys/kernel/random"))
        or (text.startswith(PROC) and text.endswith("/stat"))
    )


def _by_path(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        thread = getcurrent()
        if type(thread) is GreenThread and _is_ours(path):
            place = path if isinstance(path, int) else _clean(os.fspath(path))
            files = thread.process.world.files
            return getattr(files, name)(thread.process, place, *arguments, **options)
        return real(path, *arguments, **options)

    return call


def _by_fd(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(fd: int, *arguments: Any) -> Any:
        thread = getcurrent()
        if fd >= FIRST_FD and type(thread) is GreenThread:
            return getattr(thread.process.world.files, name)(thread.process, fd, *arguments)
        return real(fd, *arguments)

    return call


@cache
def _clean(path: str) -> str:
    return os.path.normpath(path)


def _simulated(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Call the one in simulated threads, with the thread first, and the other elsewhere."""

    def call(*arguments: Any, **options: Any) -> Any:
        thread = getcurrent()
        if type(thread) is GreenThread:
            return simulated(thread, *arguments, **options)
        return real(*arguments, **options)

    return call


def _kill(thread: GreenThread, process: int, number: int) -> None:
    if process not in thread.process.world.living(thread.process.machine):
        raise ProcessLookupError


def _monotonic(thread: GreenThread) -> float:
    thread.scheduler.step(thread.process, "clock", "", 0)
    return _now(thread)


def _now(thread: GreenThread) -> float:
    world, machine = thread.process.world, thread.process.machine
    return machine.start_seconds + machine.tick * world.scheduler.now


def _wall(thread: GreenThread) -> float:
    return thread.process.world.wall_seconds(thread.process.machine)


def _sleep(thread: GreenThread, seconds: float) -> None:
    thread.scheduler.note(thread.process, "sleeps", f"{seconds:.4f}")
    thread.scheduler.block(seconds / thread.process.machine.tick)


def _safe_open(real: Callable[..., Any], path: Any, *arguments: Any, **options: Any) -> Any:
    """Have the package safetensors read a copy of a simulated file in memory."""
    thread = getcurrent()
    if type(thread) is not GreenThread or not _is_ours(path):
        return real(path, *arguments, **options)
    with open(path, "rb") as stream:
        data = stream.read()
    fd = os.memfd_create("simulated")
    try:
        os.write(fd, data)
        return real(f"/proc/self/fd/{fd}", *arguments, **options)
    finally:
        os.close(fd)


def _map(thread: GreenThread, fd: int, *_: object, **__: object) -> bytes:
    return thread.process.world.files.map(thread.process, fd)


def _open(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        thread = getcurrent()
        if type(thread) is GreenThread and _is_ours(path):
            place = path if isinstance(path, int) else _clean(os.fspath(path))
            return open_stream(
                thread.process.world.files, thread.process, place, *arguments, **options
            )
        return real(path, *arguments, **options)

    return call


def _rmtree(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, ignore_errors: bool = False, **options: Any) -> Any:
        thread = getcurrent()
        if type(thread) is GreenThread and _is_ours(path):
            files = thread.process.world.files
            return files.rmtree(thread.process, _clean(os.fspath(path)), ignore_errors)
        return real(path, ignore_errors, **options)

    return call


def _realpath(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, **options: Any) -> Any:
        if type(getcurrent()) is GreenThread and _is_ours(path):  # there are no links
            return _clean(os.fspath(path))
        return real(path, **options)

    return call


def _substitutes() -> Iterator[tuple[Any, str, Any]]:
    for name in BY_PATH:
        yield os, name, _by_path(name, getattr(os, name))
    for name in BY_FD:
        yield os, name, _by_fd(name, getattr(os, name))
    of_process: dict[str, Callable[[GreenThread], Any]] = {
        "getpid": lambda thread: thread.process.number,
        "urandom": lambda thread, count: thread.process.world.chance.randbytes(count),
        "kill": _kill,
        "sched_getaffinity": lambda thread, _: PROCESSORS,
    }
    for name, simulated in of_process.items():
        yield os, name, _simulated(simulated, getattr(os, name))
    clocks = {"monotonic": _monotonic, "perf_counter": _monotonic, "time": _wall, "sleep": _sleep}
    for name, simulated in clocks.items():
        yield time, name, _simulated(simulated, getattr(time, name))
    # Threads that wait look at the clock with locks in their hands: nobody else gets his turn.
    yield threading, "_time", _simulated(_now, time.monotonic)
    # One for all pools of a real process; simulated ones do not share it.
    yield concurrent.futures.thread, "_global_shutdown_lock", nullcontext()
    for place, name in (
        (threading, "Lock"),
        (threading, "RLock"),
        (threading, "Thread"),
        (queue, "SimpleQueue"),
    ):
        made = getattr(scheduler, name)
        if name == "Thread":
            yield (
                place,
                name,
                _simulated(lambda thread, *a, made=made, **k: made(*a, **k), getattr(place, name)),
            )
        else:
            yield (
                place,
                name,
                _simulated(lambda thread, made=made: made(thread.scheduler), getattr(place, name)),
            )
    yield (
        threading,
        "_allocate_lock",
        _simulated(lambda thread: scheduler.Lock(thread.scheduler), threading._allocate_lock),
    )
    yield concurrent.futures.Future, "__hash__", _hash_of
    yield io, "open", _open(io.open)
    yield builtins, "open", _open(builtins.open)
    yield shutil, "rmtree", _rmtree(shutil.rmtree)
    yield os.path, "realpath", _realpath(os.path.realpath)
    yield mmap, "mmap", _simulated(_map, mmap.mmap)
    yield platform, "node", _simulated(lambda thread: thread.process.machine.host, platform.node)
    for name in hub.CALLS:
        yield HfApi, name, _simulated(hub.answered(name), getattr(HfApi, name))
    name = "post_lfs_batch_info"
    yield (
        huggingface_hub.lfs,
        name,
        _simulated(hub.answered(name), getattr(huggingface_hub.lfs, name)),
    )
    reader = fp4convert.storage.hub.http.RangeReader
    yield fp4convert.storage.hub.http, "RangeReader", _simulated(hub.Ranges, reader)
    real_open = safetensors.safe_open
    yield safetensors, "safe_open", lambda *a, **k: _safe_open(real_open, *a, **k)
    real_version = cache(importlib.metadata.version)
    yield importlib.metadata, "version", real_version


def _hash_of(future: Any) -> int:
    """Return a number of a future that does not depend on where it lies in memory."""
    thread = getcurrent()
    if type(thread) is not GreenThread:
        return object.__hash__(future)
    number: int = vars(future).setdefault("_number", thread.scheduler.next_number())
    return number


@contextmanager
def installed() -> Iterator[None]:
    """Answer the calls of simulated threads from their world, in here."""
    huggingface_hub.get_session()  # one for all, with locks of the real system
    substitutes = list(_substitutes())
    before: list[tuple[Any, str, Any]] = []
    by_real: dict[int, Any] = {}
    for place, name, call in substitutes:
        real = getattr(place, name)
        before.append((place, name, real))
        by_real[id(real)] = call
        setattr(place, name, call)
    # Names that modules have taken for themselves.
    for module in [each for key, each in sys.modules.items() if key.startswith("fp4convert")]:
        for name, value in list(vars(module).items()):
            if id(value) in by_real:
                before.append((module, name, value))
                setattr(module, name, by_real[id(value)])
    logger = logging.getLogger("concurrent.futures")
    was_disabled, logger.disabled = logger.disabled, True  # threads that are unwound
    try:
        yield
    finally:
        logger.disabled = was_disabled
        for place, name, real in reversed(before):
            setattr(place, name, real)


def seed_random(seed: int) -> None:
    random.seed(seed)
