"""Run fp4convert where Python lacks what it lacks on Windows: python like_windows.py WORD...

Functions and flags of os, signal and mmap are gone, and so are whole modules; folders cannot be
opened, and files are opened as text unless O_BINARY is given, which here writes a mark into the
flags and is looked for.  It is Linux's file system all the same: names, locks of mapped files and
signals of Windows itself are not simulated.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.abc
import mmap
import os
import shutil
import signal
import sys
from types import SimpleNamespace
from typing import NoReturn

GONE = {
    os: (
        *("pread", "preadv", "pwrite", "posix_fallocate", "sched_getaffinity"),
        *("sysconf", "getuid", "geteuid", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"),
    ),
    signal: ("pthread_kill", "SIGURG", "SIGKILL", "SIGHUP", "pthread_sigmask"),
    mmap: ("MADV_SEQUENTIAL",),
}
MODULES = ("fcntl", "resource", "pwd", "grp")
BINARY = 1 << 30  # no flag of Linux
OURS = f"{os.sep}fp4convert{os.sep}"


class _Refuser(importlib.abc.MetaPathFinder):
    """Finds no module that Windows does not have, for files of ours."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(name, name=name)


def _open(path, flags, mode=0o777, *, dir_fd=None) -> int:
    caller = sys._getframe(1).f_code.co_filename
    if OURS in caller and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    if OURS in caller and not flags & BINARY:
        raise AssertionError(f"{caller} opens {path} as text")
    return real_open(path, flags & ~BINARY, mode, dir_fd=dir_fd)


def _kill(process: int, number: int) -> NoReturn:
    raise AssertionError(f"signal {number} to {process}: on Windows that ends it")


class _Kernel32:
    @staticmethod
    def GlobalMemoryStatusEx(status) -> None:  # noqa: N802
        status[1] = 16 << 30


real_open = os.open
if __name__ == "__main__":
    import filelock  # noqa: F401  # and others that ask for modules once, and know Windows themselves
    import huggingface_hub  # noqa: F401

    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Refuser())
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: usage
    for module, names in GONE.items():
        for name in names:
            delattr(module, name)
    del os.statvfs
    os.O_BINARY = BINARY
    ctypes.windll = SimpleNamespace(kernel32=_Kernel32)
    os.open, os.kill = _open, _kill
    from fp4convert.cli.app import main

    sys.argv = ["fp4convert", *sys.argv[1:]]
    sys.exit(main())
