"""Run fp4convert with a GPU that takes no time and moves nothing.

What is left is the host's.

    python benchmarks/gpu/null_gpu.py COSTS.json WORD ...    quantize ... --device cuda

The bytes that it writes mean nothing. COSTS.json gets the CPU-seconds from the first shard to
the last, and of these what is inside of calls that let other threads run: to read, write, hash,
flush, and to make pinned memory, once for each lane.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class Device:
    mem_info = (100 << 30, 139 << 30)

    def __init__(self, number: int) -> None: ...
    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...


class Stream:
    def synchronize(self) -> None: ...
    def wait_event(self, event: object) -> None: ...


class Event:
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...


class Memory:
    ptr = 1 << 40

    def __init__(self, nbytes: int) -> None:
        self.mem = SimpleNamespace(size=nbytes)

    def copy_from_host_async(self, address: int, nbytes: int, stream: object) -> None: ...
    def copy_to_host_async(self, address: int, nbytes: int, stream: object) -> None: ...
    def memset_async(self, value: int, nbytes: int, stream: object) -> None: ...


class Pinned(np.ndarray):
    def __new__(cls, nbytes: int) -> Pinned:
        made = np.empty(nbytes, np.uint8).view(cls)
        made[:] = 0
        made.ptr = made.ctypes.data
        return made


def null_cupy() -> ModuleType:
    """What stands in sys.modules for cupy."""
    cupy = ModuleType("cupy")
    cupy.__version__, cupy.__spec__ = "0.0", importlib.machinery.ModuleSpec("cupy", None)
    kernel = SimpleNamespace(get_function=lambda name: lambda *_, **__: None)
    cupy.RawModule = lambda path: kernel
    errors = {name: type(name, (Exception,), {}) for name in ("Driver", "Memory", "Runtime")}
    properties = {"name": b"Null GPU", "major": 9, "minor": 0, "totalGlobalMem": 139 << 30}
    cupy.cuda = SimpleNamespace(
        Device=Device,
        Stream=lambda non_blocking: Stream(),
        Event=lambda block, disable_timing: Event(),
        alloc=Memory,
        alloc_pinned_memory=Pinned,
        driver=SimpleNamespace(CUDADriverError=errors["Driver"]),
        memory=SimpleNamespace(OutOfMemoryError=errors["Memory"]),
        runtime=SimpleNamespace(
            CUDARuntimeError=errors["Runtime"],
            getDevice=lambda: 0,
            getDeviceProperties=lambda number: properties,
        ),
    )
    return cupy


class Counted:
    """CPU-seconds of calls that let other threads run, by what they are for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def within(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, whose time counts."""

        def counted(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                taken = time.thread_time() - begun
                with self._lock:
                    self.seconds[name] = self.seconds.get(name, 0.0) + taken

        return counted


def main(arguments: list[str]) -> None:
    from fp4convert.__main__ import main as command
    from fp4convert.execution import workers
    from fp4convert.numerics.backends import cubins, cuda_kernels, gpus, self_check
    from fp4convert.storage.shard_writer import ShardWriter

    costs, *sys.argv[1:] = arguments
    sys.modules["cupy"] = cupy = null_cupy()
    cuda = cupy.cuda
    gpu = gpus.Gpu(0, "Null GPU", (9, 0), 139 << 30, cubins.Target("sm_90", has_cvt=False))
    self_check.usable_gpus = lambda device: [gpu]
    cuda_kernels.cubins = SimpleNamespace(
        kernels_folder=cubins.kernels_folder, cubin_path=lambda *_: ""
    )
    # Each of these calls works outside of the interpreter's lock.
    counted = Counted()
    os.preadv = counted.within("read", os.preadv)
    os.pwrite = counted.within("write", os.pwrite)
    os.fsync = counted.within("flush", os.fsync)
    os.posix_fallocate = counted.within("write", os.posix_fallocate)
    ShardWriter._hash_until = counted.within("hash", ShardWriter._hash_until)
    cuda.alloc_pinned_memory = counted.within("pin", cuda.alloc_pinned_memory)
    write = workers.Crew.write

    def timed(*arguments: Any) -> None:
        begun = time.process_time()
        write(*arguments)
        counted.seconds["shards"] = time.process_time() - begun

    workers.Crew.write = timed
    try:
        command()
    finally:
        with open(costs, "w", encoding="utf-8") as out:
            json.dump(counted.seconds, out)


if __name__ == "__main__":
    main(sys.argv[1:])
