"""Files on a disk: sizes, hashes, fsync, unchanged since when."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from fp4convert.errors import Fp4Error, OutputError, SourceError
from fp4convert.storage.system import AS_BYTES

SHA256_DIGITS = 64  # in hex
HASH_NBYTES = 512 << 10  # read and hashed at once; fits into a core's own cache
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNKNOWN_HERE = (errno.EINVAL, errno.EOPNOTSUPP)  # the file system lacks the call
TEMPORARY = "Point TMPDIR to a folder on a disk with room, and run it again."
LOOKS, LOOK_SECONDS = 12, 0.001  # at the file system's clock; most go on every 1 to 10 ms


class Mark(NamedTuple):
    """Facts that change with a file, also for another of equal size and time.

    written_ns, changed_ns  times of its data and of its inode
    """

    inode: int
    nbytes: int
    written_ns: int
    changed_ns: int

    @staticmethod
    def of(status: os.stat_result) -> Mark:
        return Mark(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def write_errors_at(path: Path, needed_nbytes: int | None = None) -> Iterator[None]:
    """Turn OSErrors into an OutputError that names the path."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error, needed_nbytes) from error


def write_error(path: Path, error: OSError, needed_nbytes: int | None = None) -> Fp4Error:
    """Return the error for a refusal of the system."""
    if error.errno == errno.EFAULT:
        return lost_pages()  # the data to write lies in a mapped file
    need = "" if needed_nbytes is None else f" ({needed_nbytes:,} bytes)"
    message = f"{path}: cannot be written{need}: {error.strerror}"
    if error.errno in FULL:
        next_step = "Make room and run the same command again: what is finished is kept."
        return OutputError("disk-full", message, next_step)
    step = "Choose a shorter name." if error.errno == errno.ENAMETOOLONG else ""
    return OutputError("cannot-write", message, step)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in TMPDIR, and remove it with its content.

    Raises  OutputError for an unusable TMPDIR (Python would take another folder in silence), and
            for a full disk
    """
    import tempfile

    try:
        place = os.environ.get("TMPDIR") or tempfile.gettempdir()
        made = tempfile.TemporaryDirectory(prefix="fp4convert-", dir=place)
    except OSError as error:
        given = os.environ.get("TMPDIR")
        detail = f"TMPDIR is {given}" if given else "TMPDIR is not set"
        detail = f"{detail}: no temporary folder can be made ({error.strerror})"
        raise OutputError("cannot-write", detail, TEMPORARY) from error
    with made as name:
        try:
            yield Path(name)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OutputError(
                "disk-full", write_error(Path(name), error).message, TEMPORARY
            ) from error
        except OutputError as error:
            if error.code != "disk-full":
                raise
            raise OutputError(error.code, error.message, TEMPORARY) from error


def lost_pages() -> SourceError:
    """Return the error for a mapped file that shrank or cannot be read."""
    detail = "a file of the source could not be read: it became shorter, or its disk fails"
    next_step = "Run the command again once nothing writes to it."
    return SourceError("source-changed", f"{detail}; expected one that stays as it is", next_step)


def nbytes_there(path: Path) -> int | None:
    """Return the size of a file; None for no file, or none any more."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: an impossible name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def reserve(fd: int, nbytes: int) -> None:
    """Reserve room on the disk, if it can, before the first byte."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in UNKNOWN_HERE:
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file, whole or not at all; replace a link of that name."""
    replace_files({path: data})


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Write small files as replace_file does; rename them after all writes."""
    temps = {path: temp_beside(path) for path in files}
    try:
        for path, temp in temps.items():
            with write_errors_at(path), temp.open("wb") as out:
                out.write(files[path])
                out.flush()
                os.fsync(out.fileno())
        for path, temp in temps.items():
            with write_errors_at(path):
                os.replace(temp, path)
                fsync_folder(path.parent)
    finally:
        for temp in temps.values():
            with suppress(OSError):
                temp.unlink(missing_ok=True)


def temp_beside(path: Path) -> Path:
    """Return the path of a file before its rename."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if it can."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if hasattr(os, "O_DIRECTORY"):
            raise
        return  # Windows opens no folders; there a rename flushes the name
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNKNOWN_HERE:
            raise
    finally:
        os.close(fd)


def fsync_parents(folder: Path) -> None:
    """Flush the names of a folder and of its parents on the same disk.

    Another process may have made them, but not those that this user may not read.
    """
    device = folder.stat().st_dev
    for place in folder.absolute().parents:
        if place.stat().st_dev != device:
            return
        with suppress(PermissionError):
            fsync_folder(place)


def open_regular(path: Path, buffering: int = 0) -> BinaryIO:
    """Open a regular file to read; raise OSError for a pipe, which might hang."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.open("rb", buffering=buffering)


def hash_file(path: Path, each: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of a file, as hex.

    each  called with the size of every block; its exceptions end the reading
    """
    with open_regular(path) as stream:
        return hash_stream(stream, each)


def hash_stream(stream: BinaryIO, each: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of the rest of a stream, as hash_file does."""
    import hashlib

    digest = hashlib.sha256()
    for block in read_blocks(stream):
        digest.update(block)
        each(block.nbytes)
    return digest.hexdigest()


def read_blocks(stream: BinaryIO, nbytes: int | None = None) -> Iterator[memoryview]:
    """Read the next bytes of a stream; a block is valid until the next one.

    nbytes  None for all; OSError if the stream has fewer
    """
    room = memoryview(bytearray(HASH_NBYTES if nbytes is None else min(HASH_NBYTES, nbytes)))
    while nbytes != 0:
        block = room if nbytes is None else room[:nbytes]
        count = cast(RawIOBase, stream).readinto(block)
        if not count:
            if nbytes is None:
                return
            raise OSError(errno.EIO, f"it ends {nbytes:,} bytes too early")
        yield block[:count]
        nbytes = None if nbytes is None else nbytes - count


def boot_id() -> str:
    """Return a word that is unique to this machine since its start, or ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def seal(path: Path, sha256: str, clock: Path) -> str:
    """Return the seal of a file; "" if later changes might not show.

    clock  a folder on the same file system: its time is set to learn the time there, for a change
           within the tick of the last one would leave the file's times unchanged
    """
    try:
        for _ in range(LOOKS):
            os.utime(clock)
            now = clock.stat().st_mtime_ns  # before the look: later changes are later
            sealed, changed_ns = _look(path, sha256)
            if changed_ns < now:
                return sealed
            time.sleep(LOOK_SECONDS)
    except OSError:  # the file or the folder is gone: the work itself will fail
        pass
    return ""


def is_sealed(path: Path, sha256: str, found: str | None) -> bool:
    """Return whether a file is unchanged since it was sealed with that sha256."""
    try:
        return bool(found) and _look(path, sha256)[0] == found
    except OSError:
        return False


def _look(path: Path, sha256: str) -> tuple[str, int]:
    """Return a file's seal now, and its last change in its file system's ns."""
    fd = os.open(path, os.O_RDONLY | AS_BYTES)  # a network file system asks its server on open
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    machine, mark = boot_id(), Mark.of(status)
    sealed = ""
    if machine:
        import hashlib

        text = json.dumps([machine, status.st_dev, *mark, sha256])
        sealed = hashlib.sha256(text.encode()).hexdigest()
    return sealed, max(mark.written_ns, mark.changed_ns)
