"""Ask the system for what not every system offers alike.

Reads and writes at a place, flags of files, free room, open files; process.py has the rest.

Elsewhere these are the system's own calls.  Windows has no pread, preadv and pwrite, so there a
file's place is moved under a lock; it opens files as text unless it is told not to; and it knows no
flag that refuses links, so that a link is looked for before.  tests/storage/test_system.py runs
conversions without all that Windows lacks; on Windows itself nothing was run.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

AS_BYTES: int = getattr(os, "O_BINARY", 0)  # Windows alone: no line ends are turned
_NOT_A_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)  # a pipe is not waited for
_LINK_ERROR = "is a link"
_WRITE_NOW = 2  # Linux: SYNC_FILE_RANGE_WRITE
_FEW_FILES = 512  # that C's functions open on Windows at most
_place = threading.Lock()  # of a file whose place is moved


def open_no_link(path: Path, flags: int) -> int:
    """Open a file that is no link, without waiting for a pipe.

    Raises  OSError
    """
    if not _NOT_A_LINK and os.path.islink(path):
        raise OSError(_LINK_ERROR)
    return os.open(path, flags | _NOT_A_LINK | _AT_ONCE | AS_BYTES, 0o666)


def check_writable(folder: Path) -> None:
    """Check that files can be made in a folder.

    Raises  OSError that says whether the whole disk, or the folder, is closed to us
    """
    if os.access(folder, os.W_OK | os.X_OK):
        return
    is_closed = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    number = errno.EROFS if is_closed else errno.EACCES
    raise OSError(number, os.strerror(number), str(folder))


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a place; return the bytes that were there."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = read_at(fd, buffer.nbytes, offset)
    buffer[: len(data)] = data
    return len(data)


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read so many bytes from a place, or what is there of them."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _place:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write to a place; return how many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _place:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def begin_flush(fd: int, start: int, nbytes: int) -> None:
    """Have the disk begin with these bytes, where it can be told.

    Nothing waits for them, unless the disk has more to do than it can note down; a later fsync
    tells what failed.
    """
    if begin := _sync_file_range():
        begin(fd, start, nbytes, _WRITE_NOW)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """Return Linux's function; None elsewhere."""
    import ctypes

    begin = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None
    if begin is not None:
        begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], object] | None", begin)


def free_nbytes(folder: Path) -> int:
    """Count the bytes that a disk has for this user.

    Raises  OSError
    """
    return shutil.disk_usage(folder).free


def most_files() -> int:
    """Count the files that this process may have open; 0 for any number."""
    try:
        import resource
    except ImportError:
        return _FEW_FILES
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0)
