"""Describe a file for a repository, to us and to huggingface_hub."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from fp4convert.errors import InputError, OutputError
from fp4convert.storage.hub.api import AGAIN, cannot_read


class UploadedFile(NamedTuple):
    """One file for the repository; without content one that left this disk."""

    name: str
    content: Path | bytes | None
    sha256: str
    nbytes: int


def file_on_disk(path: Path, name: str, sha256: str) -> UploadedFile:
    """Describe a file on this disk, under its name in the repository.

    Raises  OutputError where it is not there any more, or its disk fails
    """
    try:
        status = path.stat()
        is_there = stat.S_ISREG(status.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except OSError as error:
        raise cannot_read(error) from None
    if not is_there:
        detail = f"{path} is not there any more; expected what was written"
        raise OutputError("file-gone", detail, AGAIN)
    return UploadedFile(name, path, sha256, status.st_size)


class _Absent(io.BufferedIOBase):
    """A file whose bytes are not on this disk: nobody may ask for them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tell(self) -> int:
        raise OSError(errno.ENOENT, "it is not on this disk any more", self._name)


def operation_of(file: UploadedFile) -> Any:
    """Return huggingface_hub's operation, without hashing the file again."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    check_name(file.name)
    if file.content is None:
        operation = CommitOperationAdd(file.name, b"")
        operation.upload_info = UploadInfo(file.nbytes, b"", bytes.fromhex(file.sha256))
        absent: Any = _Absent(file.name)
        operation.path_or_fileobj = absent
        return operation
    content = file.content if isinstance(file.content, bytes) else file.content.absolute()
    try:
        operation = CommitOperationAdd(file.name, content)
    except ValueError:  # of names, which are good, or of a path that leads to no file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(content)) from None
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation


def check_name(name: str) -> None:
    """Raise InputError for a name that no file on the Hub can have."""
    from huggingface_hub import CommitOperationDelete

    try:
        name.encode("utf-8")
        CommitOperationDelete(name)
        is_sound = not {"", ".", ".."} & set(name.split("/"))
    except ValueError:
        is_sound = False
    if not is_sound:
        detail = f"{name!r}: the Hub has no place for a file of that name"
        raise InputError("file-name", detail, "Rename it.")
