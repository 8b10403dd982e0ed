"""Call the system for files where systems differ; process.py has the rest.

Windows has no pread, preadv and pwrite: there a lock guards the file's position.  It opens files as
text by default, and has no flag against links: there a check precedes the open.
tests/storage/test_system.py runs conversions without the calls that Windows lacks; nothing was run
on Windows itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

from fp4convert.process import cpu_library

AS_BYTES: int = getattr(os, "O_BINARY", 0)  # Windows: keep line ends
_NOT_A_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)  # do not wait for a pipe
_LINK_ERROR = "is a link"
_WRITE_NOW = 2  # Linux: SYNC_FILE_RANGE_WRITE
_FEW_FILES = 512  # limit of C's functions on Windows
_place = threading.Lock()  # guards the position of a file


def open_no_link(path: Path, flags: int) -> int:
    """Open a file, but no link; do not wait for a pipe."""
    if not _NOT_A_LINK and os.path.islink(path):
        raise OSError(_LINK_ERROR)
    return os.open(path, flags | _NOT_A_LINK | _AT_ONCE | AS_BYTES, 0o666)


def check_writable(folder: Path) -> None:
    """Raise OSError for a folder without write access or a read-only disk."""
    if os.access(folder, os.W_OK | os.X_OK):
        return
    is_closed = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    number = errno.EROFS if is_closed else errno.EACCES
    raise OSError(number, os.strerror(number), str(folder))


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an offset; return the count of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = read_at(fd, buffer.nbytes, offset)
    buffer[: len(data)] = data
    return len(data)


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read at most so many bytes from an offset."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _place:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write at an offset; return the count of bytes written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _place:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def begin_flush(fd: int, start: int, nbytes: int) -> None:
    """Start writing bytes to the disk without waiting, if the system can.

    A later fsync reports failures.
    """
    if begin := _sync_file_range():
        begin(fd, start, nbytes, _WRITE_NOW)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """Return Linux's function, or None."""
    import ctypes

    begin = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None
    if begin is not None:
        begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], object] | None", begin)


def free_nbytes(folder: Path) -> int:
    """Return the free bytes of a disk for this user."""
    return shutil.disk_usage(folder).free


def most_files() -> int:
    """Return the limit of open files of this process; 0 for none."""
    try:
        import resource
    except ImportError:
        return _FEW_FILES
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0)


def hash_blocks(addresses: Sequence[int], blocks: int) -> None:
    """Hash blocks of one stream or of two by kernels/sha256.c.

    addresses  of the state and of the bytes of each stream
    """
    import ctypes

    pointers = [*map(ctypes.c_void_p, addresses), None, None][:4]
    cpu_library().sha256_blocks(*pointers, ctypes.c_int64(blocks))
