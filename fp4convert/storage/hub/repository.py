"""Files of a repository: those there, those to upload, those to remove."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert.errors import InputError, OutputError, SourceError
from fp4convert.storage.checkpoint_files import (
    ATTESTED,
    ENGINE_RECORD,
    INDEX,
    OTHER_WEIGHTS,
    PAGE,
    RECORD,
    REPORT,
    WEIGHTS,
    recorded_hashes,
)
from fp4convert.storage.hub.api import AGAIN, cannot_read
from fp4convert.storage.hub.http import RangeReader, RemoteFile
from fp4convert.storage.json_text import MISSHAPEN

RECORD_LIMIT = 64 << 20  # bytes of an earlier artifact's record; a longer one is not read
# Files of an earlier artifact that would contradict ours.
STALE = frozenset({ENGINE_RECORD, REPORT, PAGE, *ATTESTED})


class UploadedFile(NamedTuple):
    """A file for the repository; content is None once it left this disk."""

    name: str
    content: Path | bytes | None
    sha256: str
    nbytes: int


def file_on_disk(path: Path, name: str, sha256: str) -> UploadedFile:
    """Describe a file on this disk, under its name in the repository."""
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
    """A file that left this disk; reading it raises OSError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tell(self) -> int:
        raise OSError(errno.ENOENT, "it is not on this disk any more", self._name)


def operation_of(file: UploadedFile) -> Any:
    """Return huggingface_hub's operation; the file is not hashed again."""
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
    except ValueError:  # no file at that path: names are checked already
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(content)) from None
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation


def check_name(name: str) -> None:
    """Raise InputError for an impossible file name on the Hub."""
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


class Head(NamedTuple):
    """A commit of the repository.

    files  name -> size and oid: sha256 of a large file, git's hash of a small one
    """

    commit: str
    files: dict[str, tuple[int, str]]
    is_private: bool

    def holds_other(self, name: str, sha256: str) -> bool:
        """Return whether a large file there has another sha256."""
        oid = self.files.get(name, (0, ""))[1]
        return len(oid) == len(sha256) and oid != sha256

    def holds(self, file: UploadedFile) -> bool:
        nbytes, oid = self.files.get(file.name, (-1, ""))
        if nbytes < 0 or nbytes != file.nbytes:
            return False
        if len(oid) == len(file.sha256) or file.content is None:
            return oid == file.sha256
        try:
            data = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        except OSError as error:
            raise cannot_read(error) from None
        from huggingface_hub.utils.sha import git_hash

        return oid == git_hash(data)


def read_head(api: Any, repo: str, revision: str) -> Head:
    """Read the newest commit of a branch, or the commit of that hash."""
    info = api.model_info(repo, revision=revision, files_metadata=True)
    listed: dict[str, Any] = {item.rfilename: item for item in info.siblings or []}
    # Some mirrors list only names, and give sizes and hashes by path.
    if bare := [name for name, item in listed.items() if not item.lfs and item.size is None]:
        listed |= {item.path: item for item in api.get_paths_info(repo, bare, revision=info.sha)}
    files = {}
    for name, item in listed.items():
        nbytes, oid = (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, item.blob_id)
        files[name] = (-1 if nbytes is None else nbytes, str(oid))
    return Head(str(info.sha or ""), files, bool(info.private))


def read_record(reader: RangeReader, repo: str, head: Head, record: str) -> dict[str, str]:
    """Return name -> sha256 of the files in a record of fp4convert.

    The record itself has "" for a sha256; a foreign record, or none, gives {}.

    record  its name in the repository
    """
    from huggingface_hub import constants, hf_hub_url

    nbytes, oid = head.files.get(record, (0, ""))
    if not 0 < nbytes < RECORD_LIMIT:
        return {}
    url = hf_hub_url(repo, record, revision=head.commit, endpoint=constants.ENDPOINT)
    data = bytearray(nbytes)
    try:
        reader.read_into(RemoteFile(record, url, nbytes, oid, head.commit), 0, memoryview(data))
    except SourceError as error:
        raise OutputError("hub-unreachable", f"{repo}: {error.message}", AGAIN) from None
    try:
        document = json.loads(data)
        if document["producer"]["name"] != "fp4convert":
            return {}
        begin = record.removesuffix(PurePosixPath(record).name)
        hashes = recorded_hashes(document)
        return {record: "", **{f"{begin}{name}": sha256 for name, sha256 in hashes.items()}}
    except MISSHAPEN:
        return {}


class Places:
    """Places of records and weights of an artifact or a pipeline.

    names  of all its files
    """

    def __init__(self, names: Iterable[str]) -> None:
        records = [name for name in names if PurePosixPath(name).name == RECORD]
        self.records = records or [RECORD]
        # Folders of our weights: foreign ones would be in their way.
        self._folders = {"", *map(_folder_of, self.records)}

    def foreign_weights(self, head: Head, ours: set[str], changed: set[str]) -> list[str]:
        """Return foreign weights that engines would find beside ours.

        ours     files of our artifact there; without one, weights in any form are foreign
        changed  files that differ from its record
        """
        return sorted(
            name
            for name in head.files.keys() - ours
            if self._is_weights(name)
            or (self._holds_weights(name) and (not ours or name in changed))
        )

    def stale_files(self, head: Head, ours: set[str], kept: set[str]) -> list[str]:
        """Return the files that the commit removes with an earlier artifact.

        ours  files of that artifact; without any, nothing is removed
        kept  files of the new artifact
        """
        return sorted(
            name
            for name in head.files
            if ours
            and name not in kept
            and (
                (name in ours and self._holds_weights(name))
                or (PurePosixPath(name).name in STALE and _folder_of(name) in self._folders)
            )
        )

    def _is_weights(self, name: str) -> bool:
        """Return whether engines take a file for weights or an index."""
        endings = (WEIGHTS, f"{WEIGHTS}{INDEX}")
        return _folder_of(name) in self._folders and name.endswith(endings)

    def _holds_weights(self, name: str) -> bool:
        """Return whether a file holds our weights, or weights in another form.

        .safetensors in other folders are components of a pipeline, and stay.
        """
        return self._is_weights(name) or PurePosixPath(name).suffix in OTHER_WEIGHTS


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]
