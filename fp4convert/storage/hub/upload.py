"""Upload an artifact while it is made, as one commit.

Decides which repository may be written to, which of its files leave with the commit, and whether a
commit whose reply was lost was made.  It is made against the commit that was the head when the run
began; bytes travel by huggingface_hub.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert import __version__
from fp4convert.errors import AccessError, Fp4Error, InputError, OutputError, SourceError
from fp4convert.storage.checkpoint_files import (
    CARD,
    OTHER_WEIGHTS,
    RECORD,
    REPORT,
    SIGNATURE,
    WEIGHTS,
    recorded_hashes,
)
from fp4convert.storage.hub.api import (
    AGAIN,
    POLL_SECONDS,
    Asker,
    Patience,
    cannot_read,
    hub_headers,
)
from fp4convert.storage.hub.hashes import hasher
from fp4convert.storage.hub.http import RangeReader, RemoteFile, check_endpoint, check_token
from fp4convert.storage.json_text import MISSHAPEN
from fp4convert.storage.source import BRANCH

# Of an earlier artifact, in another dialect, rounded or signed: they would contradict ours.
STALE = frozenset({"hf_quant_config.json", REPORT, SIGNATURE})
RECORD_LIMIT = 64 << 20  # bytes of an earlier artifact's record that are read
ASKED_AT_ONCE = 256  # objects, as huggingface_hub asks
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Ware:
    """One file for the repository; without content one that left this disk."""

    name: str
    content: Path | bytes | None
    sha256: str
    nbytes: int


class Head(NamedTuple):
    """A commit of the repository.

    files       name -> size and oid: the sha256 of a large file, git's hash of another
    is_private  the repository is not public
    """

    commit: str
    files: dict[str, tuple[int, str]]
    is_private: bool

    def holds(self, ware: Ware) -> bool:
        nbytes, oid = self.files.get(ware.name, (-1, ""))
        if nbytes < 0 or nbytes != ware.nbytes:
            return False
        if len(oid) == len(ware.sha256) or ware.content is None:
            return oid == ware.sha256
        try:
            data = ware.content if isinstance(ware.content, bytes) else ware.content.read_bytes()
        except OSError as error:
            raise cannot_read(error) from None
        found = hasher(len(data), oid)
        found.update(data)
        return oid == found.hexdigest()


class Pusher:
    """Puts one artifact into one repository.

    `begin`, `add` while files are made, then `commit`; or `stop`.

    repo        ORG/NAME on the Hub
    is_private  the repository must not be public; a new one is made private
    token       the one that is logged in where it is None
    tell        gets a line for people when something has to wait, or leaves the repository
    names       of the files to come
    Raises      InputError for names that cannot be, AccessError without a token that can be sent;
                nobody was asked yet
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
        self._tell = tell
        named = list(names)
        self._records = [name for name in named if PurePosixPath(name).name == RECORD] or [RECORD]
        # Where weights are ours, or in the way of ours.
        self._folders = {"", *map(_folder_of, self._records)}
        self._headers = self._check_request(named, token)
        self._patience = Patience()
        self._asker = Asker(repo, token, self._patience, tell)
        self._parent: Head | None = None
        self._ours: set[str] = set()  # files of the artifacts that are there, by their records
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None], bool] | None] = (
            queue.SimpleQueue()
        )
        self._started: dict[str, Future[None]] = {}
        self._worker: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failure: OutputError | None = None  # why nothing more is tried before the end
        self._told: BaseException | None = None  # what people know already
        # Name -> sha256, huggingface_hub's operation.
        self._uploaded: dict[str, tuple[str, Any]] = {}

    def _check_request(self, names: Iterable[str], token: str | None) -> dict[str, str]:
        """Check that requests can be made, and return their headers."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils._validators import validate_repo_id

        check_endpoint(constants.ENDPOINT)
        try:
            validate_repo_id(self.repo if "/" in self.repo else "")
        except ValueError:
            detail = f"--push-to-hub {self.repo}: not a name of a repository; expected ORG/NAME"
            raise InputError("repo-name", detail) from None
        if constants.HF_HUB_OFFLINE:
            detail = "HF_HUB_OFFLINE is set, and --push-to-hub needs the network"
            raise InputError("offline", detail, "Unset one of them.")
        for name in names:
            _check_name(name)
        if not (token or get_token()):
            detail = f"{self.repo}: nothing is pushed without a token"
            raise AccessError("no-token", detail, "hf auth login, or set HF_TOKEN.")
        headers = hub_headers(token)
        check_token(headers)
        return headers

    def begin(self) -> None:
        """Make sure that the repository is there and may be written to.

        Before anything is converted.

        Raises  AccessError where the token may not write; OutputError where the Hub does not
                answer, where the repository is public and must not be, or holds weights that
                fp4convert did not write
        """
        self._asker.begin()
        api, visibility = self._asker.api, True if self._is_private else None
        self._asker.ask(
            "it cannot be made",
            lambda: api.create_repo(self.repo, private=visibility, exist_ok=True),
        )
        self._asker.ask("it cannot be written to", lambda: api.auth_check(self.repo, write=True))
        self._asker.may_write = True
        head = self._look(BRANCH)
        if not head.commit:
            found = f"{self.repo}: the Hub does not say which commit is the newest"
            detail = f"{found}; expected one, against which ours is made"
            raise OutputError("hub-unreachable", detail, AGAIN)
        if self._is_private and not head.is_private:
            detail = f"{self.repo} is a public repository; --private expects one that is not"
            next_step = "Make it private in its settings, or name another."
            raise OutputError("public-repo", detail, next_step)
        self._parent = head
        self._ours = {
            name for record in self._records for name in self._recorded_files(head, record)
        }

        # Engines would find weights of somebody else beside ours; where nothing is ours, in
        # whatever form.
        weights = sorted(
            name
            for name in head.files.keys() - self._ours
            if self._is_weights(name) or (self._holds_weights(name) and not self._ours)
        )
        if weights:
            found = f"{self.repo} holds weights that fp4convert did not write"
            detail = f"{found}, the first {weights[0]!r}; expected a repository without, or its own"
            raise OutputError("foreign-repo", detail, "Name another.")

    def add(self, path: Path, name: str, sha256: str) -> None:
        """Upload a finished file in the background; any thread may.

        What goes wrong is told, and tried once more by `commit`.

        path  stays as it is until then
        """
        future = self._start(name, lambda: self._upload(_ware(path, name, sha256)), is_early=True)
        future.add_done_callback(self._tell_failure)

    def send(self, path: Path, name: str, sha256: str) -> Future[None]:
        """Upload a finished file that is removed then; any thread may.

        Returns  what ends once the Hub says that it holds the file, or fails: its error ends the
                 run, and is told there alone
        """
        future = self._start(
            name, lambda: self._give_away(_ware(path, name, sha256)), is_early=True
        )
        future.add_done_callback(self._note_told)
        return future

    def find_lost(self, files: Mapping[str, tuple[int, str]]) -> set[str]:
        """Return those of the files that the Hub does not hold.

        A file that was sent lies there before a commit names it, but need not for ever.

        files   name -> size and sha256
        Raises  as `begin` does
        """
        from huggingface_hub import constants
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        asked = {
            name: known for name, known in files.items() if self._begun.files.get(name) != known
        }
        infos = [UploadInfo(nbytes, b"", bytes.fromhex(oid)) for nbytes, oid in asked.values()]
        held: set[str] = set()
        for start in range(0, len(infos), ASKED_AT_ONCE):
            call = partial(
                post_lfs_batch_info,
                infos[start : start + ASKED_AT_ONCE],
                token=None,
                repo_type="model",
                repo_id=self.repo,
                revision=BRANCH,
                endpoint=constants.ENDPOINT,
                headers=self._headers,
            )
            # By git LFS: what the server has comes back without an action.
            objects, _, _ = self._asker.ask("it does not say what it holds", call)
            held |= {found["oid"] for found in objects if not found.get("actions")}
        return {name for name, (_, oid) in asked.items() if oid not in held}

    def commit(
        self,
        folder: Path,
        files: Mapping[str, str],
        card: str | None,
        report: Progress = lambda name, nbytes: None,
        gone: Mapping[str, int] | None = None,
    ) -> str:
        """Make sure that every file is up, and name them in one commit.

        Returns its address.

        files   name in the folder -> sha256; a README.md among them gives way to the card
        card    the text of README.md; None for the folder's own, if any
        report  is called with the name and the bytes of each file that is up
        gone    bytes of the files that were sent and are not in the folder any more
        Raises  AccessError where the token may not write any more; OutputError where somebody else
                has committed since `begin`, where the Hub refuses the card or a file, or does not
                answer
        """
        from huggingface_hub import constants

        wares, gone = [], gone or {}
        for name, sha256 in sorted(files.items()):
            if name in gone:
                wares.append(Ware(name, None, sha256, gone[name]))
            elif name != CARD or card is None:
                if not (folder / name).is_file():
                    detail = f"{folder}: {name!r} is not there any more; expected what was written"
                    raise OutputError("file-gone", detail, AGAIN)
                wares.append(_ware(folder / name, name, sha256))
        if card is not None:
            data = card.encode("utf-8", "replace")
            wares.append(Ware(CARD, data, hashlib.sha256(data).hexdigest(), len(data)))
        try:
            for ware in wares:
                # Wait for a file on its way; send it where it did not arrive.
                with suppress(Fp4Error):
                    if started := self._started.get(ware.name):
                        self._wait(started)
                if ware.content is not None:
                    self._wait(self._start(ware.name, partial(self._upload, ware)))
                report(ware.name, ware.nbytes)
            self._name_absent([ware for ware in wares if ware.content is None])
            head = self._asker.ask("the commit cannot be made", lambda: self._commit_once(wares))
        finally:
            self.stop()
        if unsaid := [ware.name for ware in wares if head.files.get(ware.name, (0, ""))[0] < 0]:
            found = f"{self.repo} at commit {head.commit}: the Hub does not say what it holds of"
            detail = f"{found} {len(unsaid)} files, the first {unsaid[0]!r}; expected hashes"
            raise OutputError("push-unproven", detail)
        if lost := [ware.name for ware in wares if not head.holds(ware)]:
            found = f"{self.repo} at commit {head.commit} lacks {len(lost)} files of this artifact"
            detail = f"{found}, the first {lost[0]!r}; expected all of them"
            raise OutputError("push-incomplete", detail, AGAIN)
        return f"{constants.ENDPOINT}/{self.repo}/commit/{head.commit}"

    def stop(self) -> None:
        """End soon: begin nothing more, and wait for nothing."""
        self._asker.stop()
        self._queue.put(None)
        if self._worker is not None:
            self._worker.join(timeout=0.5)

    def _start(self, name: str, do: Callable[[], None], is_early: bool = False) -> Future[None]:
        """Hand a file to the one thread that uploads.

        The others stay free for signals and for work.

        do        what becomes of it
        is_early  there is another time for it: it is not tried once the Hub was given up
        """
        with self._starting:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="push", daemon=True)
                self._worker.start()
        future = self._started[name] = Future()
        self._queue.put((do, future, is_early))
        return future

    def _work(self) -> None:
        for do, future, is_early in iter(self._queue.get, None):
            try:
                if self._failure is not None and is_early:
                    raise self._failure
                do()
                future.set_result(None)
            except OSError as error:  # of the Hub, these have been judged
                future.set_exception(error if error.filename is None else cannot_read(error))
            except Exception as error:  # a bug of ours, too, comes to light in `commit`
                if isinstance(error, OutputError) and error.code == "hub-unreachable":
                    self._failure = error
                future.set_exception(error)

    def _note_told(self, future: Future[None]) -> None:
        self._told = future.exception() or self._told

    def _tell_failure(self, future: Future[None]) -> None:
        """Tell an error once; all later files of a Hub that was given up have it."""
        error, told = future.exception(), self._told
        self._note_told(future)
        if isinstance(error, Fp4Error) and error is not told and not self._asker.is_stopped:
            self._tell(f"not uploaded yet, and tried again at the end: {error.message}")

    def _wait(self, future: Future[None]) -> None:
        while not wait([future], POLL_SECONDS).done:
            self._asker.check()
        future.result()

    def _upload(self, ware: Ware) -> None:
        """Upload a file, unless the Hub has it."""
        if self._begun.holds(ware) or self._uploaded.get(ware.name, ("", None))[0] == ware.sha256:
            return
        operation = _operation(ware)
        self._asker.ask(
            f"{ware.name} cannot be uploaded", partial(self._preupload, operation), ware.nbytes
        )
        self._uploaded[ware.name] = ware.sha256, operation

    def _preupload(self, *operations: Any) -> None:
        """Send files as huggingface_hub does; small ones wait.

        The Hub decides which are small: their bytes come with the commit.
        """
        # An empty list of what git ignores: a repository's own would leave files out in silence.
        self._asker.api.preupload_lfs_files(
            self.repo, operations, revision=BRANCH, free_memory=False, gitignore_content=""
        )

    def _give_away(self, ware: Ware) -> None:
        """Upload a file that will not stay; the Hub must say that it has it.

        By the Hub's plain storage of large files, whatever else is installed: what it has of
        these, it says before a commit names them.
        """
        if self._begun.holds(ware):
            return

        def send() -> None:
            operation = _operation(ware)
            with open(operation.path_or_fileobj, "rb") as stream:
                operation.path_or_fileobj = stream
                self._preupload(operation)

        self._asker.ask(f"{ware.name} cannot be uploaded", send, ware.nbytes)
        if self.find_lost({ware.name: (ware.nbytes, ware.sha256)}):
            found = f"{self.repo}: the Hub takes {ware.name} for a small file, which only a commit"
            detail = f"{found} brings there; --no-keep expects one of its storage of large files"
            next_step = (
                "Add *.safetensors and *.gguf to .gitattributes there; or leave --no-keep out."
            )
            raise OutputError("push-small", detail, next_step)

    def _name_absent(self, wares: list[Ware]) -> None:
        """Prepare the commit to name files that left this disk.

        Raises  OutputError where the Hub does not hold one
        """
        if lost := self.find_lost({ware.name: (ware.nbytes, ware.sha256) for ware in wares}):
            found = f"{self.repo}: the Hub does not hold {len(lost)} files any more"
            detail = f"{found}, the first {min(lost)}; expected what was sent"
            raise OutputError(
                "push-lost", detail, "Run the same command again: it makes them again."
            )
        operations = [(ware, _operation(ware)) for ware in wares if not self._begun.holds(ware)]
        if operations:
            call = partial(self._preupload, *(operation for _, operation in operations))
            self._asker.ask("the Hub does not say how it takes files", call)
        self._uploaded |= {ware.name: (ware.sha256, operation) for ware, operation in operations}

    def _commit_once(self, wares: list[Ware]) -> Head:
        """Return a commit that holds every file; make it if need be.

        This call, an earlier one or another worker may have made it.
        """
        from huggingface_hub import CommitOperationDelete

        # Whoever calls it asks again: twice as many tries would outlast its time.
        head, parent = self._look_once(BRANCH), self._begun
        missing = [ware for ware in wares if not head.holds(ware)]
        ours = {ware.name for ware in wares}
        stale = sorted(
            name
            for name in head.files
            if self._ours
            and name not in ours
            and (
                (self._holds_weights(name) and name in self._ours)
                or (PurePosixPath(name).name in STALE and _folder_of(name) in self._folders)
            )
        )
        if not missing and not stale:
            return head
        if head.commit != parent.commit:
            found = f"{self.repo}: somebody else committed {head.commit[:8]} since this run began"
            detail = f"{found} at {parent.commit[:8]}; nothing of this run is committed"
            raise OutputError("repo-moved", detail, AGAIN)
        if stale:
            self._tell(f"{self.repo}: what an earlier artifact left is removed: {', '.join(stale)}")
        kept = [
            ware.name
            for ware in missing
            if ware.name in head.files and (ware.name == CARD or not self._ours)
        ]
        if kept:  # what people write, or what was there before anything of ours
            found = f"as commit {head.commit[:8]} has them: {', '.join(kept)}"
            self._tell(f"{self.repo}: other contents are replaced, {found}")
        operations = [
            *(self._uploaded[ware.name][1] for ware in missing),
            *map(CommitOperationDelete, stale),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # words of the server's own
            made = self._asker.api.create_commit(
                self.repo,
                operations,
                commit_message=f"Upload with fp4convert {__version__}",
                revision=BRANCH,
                parent_commit=parent.commit,
            )
        return self._look_once(made.oid)

    def _is_weights(self, name: str) -> bool:
        """Tell whether engines take a file for weights or their index."""
        endings = (WEIGHTS, f"{WEIGHTS}.index.json")
        return _folder_of(name) in self._folders and name.endswith(endings)

    def _holds_weights(self, name: str) -> bool:
        """Tell whether a file holds weights of ours, or in another form.

        .safetensors of other folders are those of a pipeline's components, which stay.
        """
        return self._is_weights(name) or PurePosixPath(name).suffix in OTHER_WEIGHTS

    def _recorded_files(self, head: Head, record: str) -> set[str]:
        """Return the files that a record of fp4convert names.

        An empty set where there is no record, or one of somebody else.
        """
        from huggingface_hub import constants, hf_hub_url

        nbytes, oid = head.files.get(record, (0, ""))
        if not 0 < nbytes < RECORD_LIMIT:
            return set()
        url = hf_hub_url(self.repo, record, revision=head.commit, endpoint=constants.ENDPOINT)
        data = bytearray(nbytes)
        try:
            reader = RangeReader(self._headers, self._patience, self._tell)
            reader.read_into(RemoteFile(record, url, nbytes, oid, head.commit), 0, memoryview(data))
            document = json.loads(data)
            is_ours = document["producer"]["name"] == "fp4convert"
            begin = record.removesuffix(PurePosixPath(record).name)
            names = {f"{begin}{name}" for name in recorded_hashes(document)} if is_ours else set()
            return names | {record} if is_ours else names
        except SourceError as error:
            raise OutputError("hub-unreachable", f"{self.repo}: {error.message}", AGAIN) from None
        except MISSHAPEN:
            return set()

    def _look(self, revision: str) -> Head:
        """Return the newest commit of a branch, or that commit."""
        return self._asker.ask("it cannot be listed", lambda: self._look_once(revision))

    def _look_once(self, revision: str) -> Head:
        api = self._asker.api
        info = api.model_info(self.repo, revision=revision, files_metadata=True)
        listed: dict[str, Any] = {item.rfilename: item for item in info.siblings or []}
        # Some mirrors list names alone, and tell the rest where they are asked for paths.
        if bare := [name for name, item in listed.items() if not item.lfs and item.size is None]:
            found = api.get_paths_info(self.repo, bare, revision=info.sha)
            listed |= {item.path: item for item in found}
        files = {}
        for name, item in listed.items():
            nbytes, oid = (
                (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, item.blob_id)
            )
            files[name] = (-1 if nbytes is None else nbytes, str(oid))
        return Head(str(info.sha or ""), files, bool(info.private))

    @property
    def _begun(self) -> Head:
        if self._parent is None:
            raise RuntimeError("begin comes first")
        return self._parent


class _Absent(io.BufferedIOBase):
    """A file whose bytes are not on this disk: nobody may ask for them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tell(self) -> int:
        raise OSError(errno.ENOENT, "it is not on this disk any more", self._name)


def _ware(path: Path, name: str, sha256: str) -> Ware:
    try:
        return Ware(name, path, sha256, path.stat().st_size)
    except OSError as error:
        raise cannot_read(error) from None


def _operation(ware: Ware) -> Any:
    """Return huggingface_hub's operation, without hashing the file again."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    _check_name(ware.name)
    if ware.content is None:
        operation = CommitOperationAdd(ware.name, b"")
        operation.upload_info = UploadInfo(ware.nbytes, b"", bytes.fromhex(ware.sha256))
        absent: Any = _Absent(ware.name)
        operation.path_or_fileobj = absent
        return operation
    content = ware.content if isinstance(ware.content, bytes) else ware.content.absolute()
    try:
        operation = CommitOperationAdd(ware.name, content)
    except ValueError:  # of names, which are good, or of a path that leads to no file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(content)) from None
    operation.upload_info.sha256 = bytes.fromhex(ware.sha256)
    return operation


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _check_name(name: str) -> None:
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
