"""A Hub that simulated processes push to: what huggingface_hub asks it, answered from memory.

Bytes of large files lie there before a commit names them, replies are lost, and others commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError

from simulation.machines import Process, Trouble
from simulation.scheduler import GreenThread

if TYPE_CHECKING:
    from simulation.world import World

REPO, TOKEN = "me/q", "hf_simulated"
ADDRESS = "https://huggingface.co/api/models/me/q"
LARGE = ".safetensors"  # what git LFS keeps, by the repository's .gitattributes
FIRST = {".gitattributes": b"*.safetensors filter=lfs\n"}
CALLS = ("create_repo", "auth_check", "model_info", "preupload_lfs_files", "create_commit")


@dataclass(frozen=True)
class Commit:
    """All files of the repository at one time."""

    oid: str
    files: dict[str, bytes]


class Hub:
    """One repository, and the bytes that its storage holds.

    objects  by their sha256, whether a commit names them or not
    ever     the sha256 of all that it has ever said to hold
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.commits: list[Commit] = []
        self.objects: dict[str, bytes] = {}
        self.ever: set[str] = set()
        self.troubles: list[Trouble] = []

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def has_had(self, data: bytes) -> bool:
        return _sha256(data) in self.ever

    # What happens to it.

    def fail(self) -> None:
        chance = self._world.chance
        status = chance.choice((0, 0, 0, 500, 503, 429, 408, 403))
        left, is_done = chance.choice((1, 1, 2, 10)), chance.random() < 0.5
        self.troubles.append(Trouble("request", status, left, is_done))

    def lose(self) -> None:
        """Remove bytes that no commit names, as a Hub may at any time."""
        named = {_sha256(data) for commit in self.commits for data in commit.files.values()}
        for sha256 in [each for each in self.objects if each not in named]:
            if self._world.chance.random() < 0.5:
                del self.objects[sha256]

    def let_others_commit(self) -> None:
        if self.commits:
            self._put(self.head.files | {"notes.md": self._world.chance.randbytes(8)})

    def _put(self, files: dict[str, bytes]) -> Commit:
        number = len(self.commits)
        self.commits.append(Commit(_sha1(f"{number}".encode()), files))
        return self.head

    # What it is asked.

    def ask(self, thread: GreenThread, call: str, *arguments: Any, **options: Any) -> Any:
        """Answer a call of huggingface_hub that a simulated thread makes."""
        step = self._world.scheduler.step
        step(thread.process, "hub", call, 20.0)
        trouble = next((each for each in self.troubles if each.left), None)
        if trouble is not None:
            trouble.left -= 1
            if not trouble.is_done:
                raise _error(trouble.number)
        answer = getattr(self, call)(thread.process, *arguments, **options)
        step(thread.process, "hub", "answers", 20.0)
        if trouble is not None:
            raise _error(trouble.number)
        return answer

    def create_repo(self, process: Process, repo: str, **_: object) -> None:
        if not self.commits:
            self._put(dict(FIRST))

    def auth_check(self, process: Process, repo: str, **_: object) -> None:
        pass

    def model_info(self, process: Process, repo: str, revision: str, **_: object) -> Any:
        commits = {commit.oid: commit for commit in self.commits} | {"main": self.head}
        found = commits[revision]
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(data),
                blob_id=_sha1(b"blob %d\0" % len(data) + data),
                lfs=SimpleNamespace(size=len(data), sha256=_sha256(data))
                if name.endswith(LARGE)
                else None,
            )
            for name, data in found.files.items()
        ]
        return SimpleNamespace(sha=found.oid, private=False, siblings=siblings)

    def preupload_lfs_files(
        self, process: Process, repo: str, operations: Any, **_: object
    ) -> None:
        for operation in operations:
            declared = operation.upload_info.sha256.hex()
            if not operation.path_in_repo.endswith(LARGE):
                operation._upload_mode = "regular"
                continue
            operation._upload_mode = "lfs"
            if declared not in self.objects:
                with operation.as_file() as stream:
                    data = stream.read()
                self._world.scheduler.step(process, "hub", "receives", 20.0)
                if _sha256(data) != declared:
                    raise _error(422)
                self.objects[declared] = data
                self.ever.add(declared)
            operation._is_uploaded = True

    def post_lfs_batch_info(self, process: Process, infos: Any, **_: object) -> Any:
        asked = [info.sha256.hex() for info in infos]
        return (
            [
                {"oid": sha256, **({} if sha256 in self.objects else {"actions": {"upload": {}}})}
                for sha256 in asked
            ],
            [],
            None,
        )

    def create_commit(
        self,
        process: Process,
        repo: str,
        operations: Any,
        parent_commit: str | None = None,
        **_: object,
    ) -> Any:
        files = dict(self.head.files)
        for operation in operations:
            name = operation.path_in_repo
            if isinstance(operation, CommitOperationDelete):
                del files[name]
            elif operation._upload_mode == "lfs":
                sha256 = operation.upload_info.sha256.hex()
                if sha256 not in self.objects:
                    raise _error(400)
                files[name] = self.objects[sha256]
            else:
                with operation.as_file() as stream:
                    files[name] = stream.read()
        if parent_commit != self.head.oid:
            raise _error(412)
        self._world.rules.committed(process, self.head.files, files)
        return SimpleNamespace(oid=self._put(files).oid)

    def read(self, process: Process, name: str, commit: str) -> bytes:
        return next(each for each in self.commits if each.oid == commit).files[name]


class Ranges:
    """What reads files of the repository, for simulated threads."""

    def __init__(self, thread: GreenThread, *_: object) -> None:
        self._thread = thread

    def read_into(self, remote: Any, start: int, place: memoryview) -> None:
        hub = self._thread.process.world.hub
        data = hub.read(self._thread.process, remote.name, remote.commit)
        place[:] = data[start : start + len(place)]


def answered(call: str) -> Callable[..., Any]:
    """Return what stands in for a method of huggingface_hub's HfApi, or a function of it."""
    own = 0 if call == "post_lfs_batch_info" else 1  # self

    def answer(thread: GreenThread, *arguments: Any, **options: Any) -> Any:
        return thread.process.world.hub.ask(thread, call, *arguments[own:], **options)

    return answer


def _error(status: int) -> Exception:
    if not status:
        return ConnectionResetError()
    response = SimpleNamespace(status_code=status, headers={}, url=ADDRESS, request=None)
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, f"HTTP {status}")
    error.response = response
    return error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
