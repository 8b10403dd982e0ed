"""Say what a repository holds, and what an artifact may remove."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from fp4convert.storage.checkpoint_files import (
    ENGINE_RECORD,
    INDEX,
    OTHER_WEIGHTS,
    RECORD,
    REPORT,
    SIGNATURE,
    WEIGHTS,
    recorded_hashes,
)
from fp4convert.storage.hub.api import cannot_read
from fp4convert.storage.hub.hashes import hasher
from fp4convert.storage.hub.uploaded_file import UploadedFile
from fp4convert.storage.json_text import MISSHAPEN

# Of an earlier artifact, in another dialect, rounded or signed: they would contradict ours.
STALE = frozenset({ENGINE_RECORD, REPORT, SIGNATURE})


class Head(NamedTuple):
    """A commit of the repository.

    files       name -> size and oid: the sha256 of a large file, git's hash of another
    is_private  the repository is not public
    """

    commit: str
    files: dict[str, tuple[int, str]]
    is_private: bool

    def holds_other(self, name: str, sha256: str) -> bool:
        """Tell whether a large file has another sha256."""
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
        found = hasher(len(data), oid)
        found.update(data)
        return oid == found.hexdigest()


def read_head(api: Any, repo: str, revision: str) -> Head:
    """Ask for the newest commit of a branch, or for that commit."""
    info = api.model_info(repo, revision=revision, files_metadata=True)
    listed: dict[str, Any] = {item.rfilename: item for item in info.siblings or []}
    # Some mirrors list names alone, and tell the rest where they are asked for paths.
    if bare := [name for name, item in listed.items() if not item.lfs and item.size is None]:
        found = api.get_paths_info(repo, bare, revision=info.sha)
        listed |= {item.path: item for item in found}
    files = {}
    for name, item in listed.items():
        nbytes, oid = (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, item.blob_id)
        files[name] = (-1 if nbytes is None else nbytes, str(oid))
    return Head(str(info.sha or ""), files, bool(info.private))


def files_in_record(data: bytes | bytearray, record: str) -> dict[str, str]:
    """Return the sha256 of the files that a record of fp4convert names.

    And its own name, without one; nothing for a record of somebody else.

    record  where it lies in the repository
    """
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
    """Where the records and the weights of an artifact, or of a pipeline, lie.

    names  of all its files
    """

    def __init__(self, names: Iterable[str]) -> None:
        records = [name for name in names if PurePosixPath(name).name == RECORD]
        self.records = records or [RECORD]
        # Where weights are ours, or in the way of ours.
        self._folders = {"", *map(_folder_of, self.records)}

    def foreign_weights(self, head: Head, ours: set[str], changed: set[str]) -> list[str]:
        """Name the weights of somebody else, which engines would find beside ours.

        ours     files of an artifact that is there; where nothing is, weights in any form are
                 others'
        changed  files that its record names, and that are not what it says
        """
        return sorted(
            name
            for name in head.files.keys() - ours
            if self._is_weights(name)
            or (self._holds_weights(name) and (not ours or name in changed))
        )

    def stale_files(self, head: Head, ours: set[str], kept: set[str]) -> list[str]:
        """Name what goes with an earlier artifact of ours.

        ours  files of that artifact; without any, nothing goes
        kept  files of the artifact that takes its place
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
        """Tell whether engines take a file for weights or their index."""
        endings = (WEIGHTS, f"{WEIGHTS}{INDEX}")
        return _folder_of(name) in self._folders and name.endswith(endings)

    def _holds_weights(self, name: str) -> bool:
        """Tell whether a file holds weights of ours, or in another form.

        .safetensors of other folders are those of a pipeline's components, which stay.
        """
        return self._is_weights(name) or PurePosixPath(name).suffix in OTHER_WEIGHTS


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]
