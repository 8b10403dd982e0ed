"""Files of simulated processes, as Python opens them, lists them and maps them."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simulation.disk import refuse
from simulation.machines import Process

if TYPE_CHECKING:
    from simulation.system import Files

PROC = "/proc/"


def open_stream(  # noqa: PLR0917
    files: Files,
    process: Process,
    path: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: None = None,
) -> Any:
    """Open a file of a simulated process, as io.open does."""
    if isinstance(path, int):
        raw = _Raw(files, process, path)
    elif path.startswith(PROC):
        raw = io.BytesIO(process.world.proc_text(process, path).encode())
    else:
        kinds = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL}
        flags = next(kinds[letter] for letter in mode if letter in kinds)
        access = os.O_RDWR if "+" in mode else os.O_WRONLY if flags else os.O_RDONLY
        raw = _Raw(files, process, files.open(process, path, flags | access))
        if files.handle(process, raw.fileno()).node.is_folder:
            raise refuse(errno.EISDIR, path)
    if buffering == 0:
        return raw
    is_read = "r" in mode and "+" not in mode
    stream = io.BufferedReader(raw) if is_read else io.BufferedWriter(raw)
    if "b" in mode:
        return stream
    return io.TextIOWrapper(stream, encoding or "utf-8", errors, newline)


class Mapped(bytes):
    """A file that was mapped into memory."""

    def madvise(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class _Raw(io.RawIOBase):
    """A file of a simulated process."""

    def __init__(self, files: Files, process: Process, fd: int) -> None:
        self._files, self._process, self._fd = files, process, fd

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        nbytes = self._files.some(self._process, len(buffer))
        data = self._files.read(self._process, self._fd, nbytes)
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        if self._process.is_over:
            return len(data)
        return self._files.write(self._process, self._fd, bytes(data))

    def seek(self, place: int, whence: int = 0) -> int:
        return self._files.lseek(self._process, self._fd, place, whence)

    def tell(self) -> int:
        return self._files.lseek(self._process, self._fd, 0, 1)

    def close(self) -> None:
        if not self.closed and not self._process.is_over:
            self._files.close(self._process, self._fd)
        super().close()


class Listed:
    """What os.scandir gives of one name."""

    def __init__(self, files: Files, process: Process, folder: str, name: str) -> None:
        self.name, self.path = name, f"{folder}/{name}"
        self._look = lambda: files.stat(process, self.path)

    def is_dir(self, follow_symlinks: bool = True) -> bool:
        try:
            return stat.S_ISDIR(self._look().st_mode)
        except FileNotFoundError:
            return False

    def is_file(self, follow_symlinks: bool = True) -> bool:
        return not self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def stat(self, follow_symlinks: bool = True) -> os.stat_result:
        return self._look()


class Listing:
    def __init__(self, items: list[Listed]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Listed]:
        return self._items

    def __next__(self) -> Listed:
        return next(self._items)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass
