"""Upload an artifact while it is made, as one commit.

Decides which repository may be written to, which of its files leave with the commit, and whether a commit whose reply was lost
was made.  It is made against the commit that was the head when the run began; bytes travel by huggingface_hub.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert.errors import AccessError, Fp4Error, InputError, OutputError, SourceError
from fp4convert.storage.checkpoint_files import CARD, OTHER_WEIGHTS, RECORD, WEIGHTS
from fp4convert.storage.hub.api import AGAIN, Asker, Patience
from fp4convert.storage.hub.http import (
    RangeReader,
    RemoteFile,
    check_endpoint,
    check_token,
)

BRANCH = "main"
ENGINE_RECORD = (
    "hf_quant_config.json"  # of an earlier artifact in another dialect: it would contradict ours
)
RECORD_LIMIT = 64 << 20  # bytes of an earlier artifact's record that are read
POLL_SECONDS = 0.2
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Ware:
    """One file for the repository."""

    name: str
    content: Path | bytes
    sha256: str

    @property
    def nbytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def git_oid(self) -> str:
        """What git calls it."""
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Head(NamedTuple):
    """A commit of the repository.

    files  name -> size and oid: the sha256 of a large file, git's hash of another
    """

    commit: str
    files: dict[str, tuple[int, str]]
    is_private: bool

    def holds(self, ware: Ware) -> bool:
        if ware.name not in self.files:
            return False
        nbytes, oid = self.files[ware.name]
        return nbytes == ware.nbytes and oid == (
            ware.sha256 if len(oid) == len(ware.sha256) else ware.git_oid()
        )


class Pusher:
    """Puts one artifact into one repository: `begin`, `add` while files are made, then `commit`; or `stop`.

    repo        ORG/NAME on the Hub
    is_private  the repository must not be public; a new one is made private
    token       the one that is logged in where it is None
    tell        gets a line for people when something has to wait, or leaves the repository
    names       of the files to come
    Raises      InputError for names that cannot be, AccessError without a token that can be sent; nobody was asked yet
    """

    def __init__(
        self,
        repo: str,
        is_private: bool,
        token: str | None,
        tell: Callable[[str], None],
        names: Iterable[str] = (),
    ) -> None:
        self.repo = repo
        self._is_private = is_private
        self._token = token
        self._tell = tell
        named = list(names)
        self._records = [name for name in named if PurePosixPath(name).name == RECORD] or [RECORD]
        self._folders = {
            "",
            *map(_folder_of, self._records),
        }  # where weights are ours, or in the way of ours
        self._headers = self._check_request(named)
        self._patience = Patience()
        self._asker = Asker(repo, token, self._patience, tell)
        self._parent: Head | None = None
        self._was_ours = False
        self._queue: queue.SimpleQueue[tuple[Ware, Future[None]] | None] = queue.SimpleQueue()
        self._started: dict[str, Future[None]] = {}
        self._worker: threading.Thread | None = None
        self._starting = threading.Lock()
        self._uploaded: dict[
            str, tuple[str, Any]
        ] = {}  # name -> sha256, huggingface_hub's operation

    def begin(self) -> None:
        """Make sure that the repository is there and may be written to, before anything is converted.

        Raises  AccessError where the token may not write; OutputError where the Hub does not answer, where the repository is
                public and must not be, or holds weights that fp4convert did not write
        """
        self._asker.begin()
        self._parent = self._prepare()
        self._was_ours = self._is_ours(self._parent, self._headers)
        self._check_weights(self._parent)

    def _prepare(self) -> Head:
        """The head of a repository that is there, may be written to, and is as private as it must be."""
        api, visibility = self._asker.api, True if self._is_private else None
        self._asker.ask(
            "it cannot be made",
            lambda: api.create_repo(self.repo, private=visibility, exist_ok=True),
        )
        self._asker.ask("it cannot be written to", lambda: api.auth_check(self.repo, write=True))
        head = self._look(BRANCH)
        if self._is_private and not head.is_private:
            detail = f"{self.repo} is a public repository; --private expects one that is not"
            raise OutputError(
                "public-repo", detail, "Make it private in its settings, or name another."
            )
        return head

    def _check_weights(self, head: Head) -> None:
        """OutputError where engines would find weights of somebody else beside ours."""
        if not self._was_ours and (weights := sorted(filter(self._is_any_weights, head.files))):
            detail = (
                f"{self.repo} holds weights that fp4convert did not write, the first {weights[0]!r}"
            )
            raise OutputError(
                "foreign-repo",
                f"{detail}; expected a repository without, or its own",
                "Name another.",
            )

    def _check_request(self, names: Iterable[str]) -> dict[str, str]:
        """The headers of requests, once it is clear that they can be made."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._validators import validate_repo_id

        check_endpoint(constants.ENDPOINT)
        try:
            validate_repo_id(self.repo if "/" in self.repo else "")
        except ValueError:
            raise InputError(
                "repo-name",
                f"--push-to-hub {self.repo}: no name of a repository; expected ORG/NAME",
            ) from None
        if constants.HF_HUB_OFFLINE:
            raise InputError(
                "offline",
                "HF_HUB_OFFLINE is set, which --push-to-hub cannot obey",
                "Unset one of them.",
            )
        for name in names:
            _check_name(name)
        if not (self._token or get_token()):
            raise AccessError(
                "no-token",
                f"{self.repo}: nothing is pushed without a token",
                "hf auth login, or set HF_TOKEN.",
            )
        headers = build_hf_headers(token=self._token, library_name="fp4convert")
        check_token(headers)
        return headers

    def add(self, path: Path, name: str, sha256: str) -> None:
        """Upload a finished file in the background; what goes wrong is told, and tried once more by `commit`.  Any thread may.

        path  stays as it is until then
        """
        self._start(Ware(name, path, sha256)).add_done_callback(self._tell_failure)

    def commit(
        self,
        folder: Path,
        files: Mapping[str, str],
        card: str,
        report: Progress = lambda name, nbytes: None,
    ) -> str:
        """Make sure that every file is up, and name them all in one commit; its address.

        files   name in the folder -> sha256; a README.md among them gives way to the card
        report  is called with the name and the bytes of each file that is up
        Raises  AccessError where the token may not write any more; OutputError where somebody else has committed since `begin`,
                where the Hub refuses the card or a file, or does not answer
        """
        data = card.encode("utf-8", "replace")
        wares = [
            Ware(name, folder / name, sha256)
            for name, sha256 in sorted(files.items())
            if name != CARD
        ]
        wares.append(Ware(CARD, data, hashlib.sha256(data).hexdigest()))
        if gone := [
            ware.name
            for ware in wares
            if isinstance(ware.content, Path) and not ware.content.is_file()
        ]:
            raise OutputError(
                "file-gone",
                f"{folder}: {gone[0]!r} is not there any more; expected what was written",
                AGAIN,
            )
        try:
            for ware in wares:
                self._finish(ware)
                report(ware.name, ware.nbytes)
            head = self._asker.ask("the commit cannot be made", lambda: self._commit_once(wares))
        finally:
            self.stop()
        if lost := [ware.name for ware in wares if not head.holds(ware)]:
            detail = f"{self.repo} at commit {head.commit} lacks {len(lost)} files of this artifact, the first {lost[0]!r}"
            raise OutputError("push-incomplete", f"{detail}; expected all of them", AGAIN)
        return self._address(head.commit)

    def stop(self) -> None:
        """End soon: what waits is not begun, and what is under way is not waited for."""
        self._asker.stop()
        self._queue.put(None)
        if self._worker is not None:
            self._worker.join(timeout=0.5)

    def _start(self, ware: Ware) -> Future[None]:
        """Hand a file to the one thread that uploads: the others stay free for signals and for work."""
        with self._starting:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="push", daemon=True)
                self._worker.start()
        future = self._started[ware.name] = Future()
        self._queue.put((ware, future))
        return future

    def _work(self) -> None:
        for ware, future in iter(self._queue.get, None):
            try:
                self._upload(ware)
                future.set_result(None)
            except Exception as error:  # a bug of ours, too, comes to light in `commit`
                future.set_exception(error)

    def _tell_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, Fp4Error) and not self._asker.is_stopped:
            self._tell(f"not uploaded yet, and tried again at the end: {error.message}")

    def _finish(self, ware: Ware) -> None:
        """Wait for a file that is on its way, and send it where it did not arrive."""
        with suppress(Fp4Error):
            if started := self._started.get(ware.name):
                self._wait(started)
        self._wait(self._start(ware))

    def _wait(self, future: Future[None]) -> None:
        while not wait([future], POLL_SECONDS).done:
            self._asker.check()
        future.result()

    def _upload(self, ware: Ware) -> None:
        if self._begun.holds(ware) or self._uploaded.get(ware.name, ("", None))[0] == ware.sha256:
            return
        api, operation = self._asker.api, _addition(ware)
        self._asker.ask(  # an empty list of what git ignores: a repository's own would leave files out in silence
            f"{ware.name} cannot be uploaded",
            lambda: api.preupload_lfs_files(
                self.repo, [operation], revision=BRANCH, free_memory=False, gitignore_content=""
            ),
        )
        self._uploaded[ware.name] = ware.sha256, operation

    def _commit_once(self, wares: list[Ware]) -> Head:
        """A commit that holds every file, whether this call, an earlier one or another worker made it."""
        from huggingface_hub import CommitOperationDelete

        head, parent = self._look(BRANCH), self._begun
        missing = [ware for ware in wares if not head.holds(ware)]
        stale = sorted(
            name for name in head.files if self._is_stale(name, {ware.name for ware in wares})
        )
        if not missing and not stale:
            return head
        if head.commit != parent.commit:
            detail = f"{self.repo}: somebody else committed {head.commit[:8]} since this run began at {parent.commit[:8]}"
            raise OutputError("repo-moved", f"{detail}; nothing of this run is committed", AGAIN)
        if stale:
            self._tell(f"{self.repo}: what an earlier artifact left is removed: {', '.join(stale)}")
        operations = [
            *(self._uploaded[ware.name][1] for ware in missing),
            *map(CommitOperationDelete, stale),
        ]
        what = {
            "commit_message": f"Upload with fp4convert {version('fp4convert')}",
            "revision": BRANCH,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # words of the server's own
            made = self._asker.api.create_commit(
                self.repo, operations, parent_commit=parent.commit or None, **what
            )
        return self._look(made.oid)

    def _is_stale(self, name: str, ours: Collection[str]) -> bool:
        is_record = name.rpartition("/")[2] == ENGINE_RECORD and _folder_of(name) in self._folders
        return self._was_ours and name not in ours and (self._is_weights(name) or is_record)

    def _is_weights(self, name: str) -> bool:
        """True for what engines take for weights, or for their index."""
        return _folder_of(name) in self._folders and name.endswith(
            (WEIGHTS, f"{WEIGHTS}.index.json")
        )

    def _is_any_weights(self, name: str) -> bool:
        """True for what engines may take for weights, in any form."""
        return self._is_weights(name) or PurePosixPath(name).suffix in OTHER_WEIGHTS

    def _is_ours(self, head: Head, headers: Mapping[str, str]) -> bool:
        """True where the head holds what fp4convert wrote."""
        return any(self._is_our_record(head, record, headers) for record in self._records)

    def _is_our_record(self, head: Head, record: str, headers: Mapping[str, str]) -> bool:
        from huggingface_hub import constants, hf_hub_url

        nbytes, oid = head.files.get(record, (0, ""))
        if not 0 < nbytes < RECORD_LIMIT:
            return False
        url = hf_hub_url(self.repo, record, revision=head.commit, endpoint=constants.ENDPOINT)
        data = bytearray(nbytes)
        try:
            reader = RangeReader(headers, self._patience, self._tell)
            reader.read_into(RemoteFile(record, url, nbytes, oid, head.commit), 0, memoryview(data))
            return bool(json.loads(data)["producer"]["name"] == "fp4convert")
        except SourceError as error:
            raise OutputError("hub-unreachable", f"{self.repo}: {error.message}", AGAIN) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def _look(self, revision: str) -> Head:
        """The newest commit of a branch, or that commit."""
        api = self._asker.api
        info = self._asker.ask(
            "it cannot be listed",
            lambda: api.model_info(self.repo, revision=revision, files_metadata=True),
        )
        files = {}
        for item in info.siblings or []:
            nbytes, oid = (
                (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, item.blob_id)
            )
            files[item.rfilename] = (-1 if nbytes is None else nbytes, str(oid))
        return Head(str(info.sha or ""), files, bool(info.private))

    def _address(self, commit: str) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}/commit/{commit}"

    @property
    def _begun(self) -> Head:
        if self._parent is None:
            raise RuntimeError("begin comes first")
        return self._parent


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _check_name(name: str) -> None:
    """InputError for a name that no file on the Hub can have."""
    from huggingface_hub import CommitOperationDelete

    try:
        name.encode("utf-8")
        CommitOperationDelete(name)
        is_sound = not {"", ".", ".."} & set(name.split("/"))
    except ValueError:
        is_sound = False
    if not is_sound:
        raise InputError(
            "file-name", f"{name!r}: the Hub has no place for a file of that name", "Rename it."
        )


def _addition(ware: Ware) -> Any:
    """huggingface_hub's word for a file that is to be uploaded; it need not hash it again."""
    from huggingface_hub import CommitOperationAdd

    _check_name(ware.name)
    addition = CommitOperationAdd(
        ware.name, ware.content if isinstance(ware.content, bytes) else ware.content.absolute()
    )
    addition.upload_info.sha256 = bytes.fromhex(ware.sha256)
    return addition
