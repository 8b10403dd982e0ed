"""Upload an artifact while it is made, as one commit.

Decides which repository may be written to, which of its files the commit removes, and whether a
commit whose reply was lost exists.  Its parent is the head at the begin of the run; huggingface_hub
sends the bytes.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fp4convert.errors import AccessError, Fp4Error, InputError, OutputError
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.hub.api import (
    AGAIN,
    POLL_SECONDS,
    Asker,
    cannot_read,
    hub_headers,
    replies_seen_by,
)
from fp4convert.storage.hub.http import RangeReader, check_endpoint, check_token
from fp4convert.storage.hub.repository import (
    Head,
    Places,
    UploadedFile,
    check_name,
    file_on_disk,
    operation_of,
    read_head,
    read_record,
)
from fp4convert.storage.hub.retry import Patience
from fp4convert.storage.source import BRANCH
from fp4convert.version import __version__

TAKEN = 409  # the repository is there; or another request makes it at this moment
LONGEST_CONFLICT = 60.0  # seconds between two requests
ASKED_AT_ONCE = 256  # objects a request, as in huggingface_hub
Progress = Callable[[str, int], None]


class Pusher:
    """Puts one artifact into one repository.

    Call `begin`, `add` for each file, then `commit`; or `stop`.  Construction sends no request.

    repo        ORG/NAME on the Hub
    is_private  the repository must not be public; a new one is made private
    token       None is the login's
    tell        gets a line for people about waits and removed files
    names       of the files to come
    Raises      InputError for impossible names, AccessError without a usable token
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
        self._places = Places(named)
        self._headers = self._check_request(named, token)
        self._patience = Patience()
        self._asker = Asker(repo, token, self._patience, tell)
        self._begun: Head  # the head when the run began
        self._ours: set[str] = set()  # files in the records of artifacts in the repository
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None], bool] | None] = (
            queue.SimpleQueue()
        )
        self._started: dict[str, Future[None]] = {}
        self._worker: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failure: OutputError | None = None  # ends all tries before `commit`
        self._reported: BaseException | None = None  # the error that people know already
        # Name -> sha256, huggingface_hub's operation.
        self._uploaded: dict[str, tuple[str, Any]] = {}

    def _check_request(self, names: Iterable[str], token: str | None) -> dict[str, str]:
        """Check names, address and token; return the headers of requests."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils._validators import validate_repo_id

        check_endpoint(constants.ENDPOINT)
        try:
            validate_repo_id(self.repo if "/" in self.repo else "")
        except ValueError:
            detail = f"{self.repo}: not a name of a repository; expected ORG/NAME"
            raise InputError("repo-name", detail) from None
        if constants.HF_HUB_OFFLINE:
            detail = "HF_HUB_OFFLINE is set, and a push needs the network"
            raise InputError(
                "offline", detail, "Type: unset HF_HUB_OFFLINE; then the same command."
            )
        for name in names:
            check_name(name)
        if not (token or get_token()):
            detail = f"{self.repo}: nothing is pushed without a token"
            raise AccessError("no-token", detail, "hf auth login, or set HF_TOKEN.")
        headers = hub_headers(token)
        check_token(headers)
        return headers

    def begin(self) -> None:
        """Create the repository if needed, and check that it may be written to.

        Raises  AccessError for a token without write access; OutputError for a silent Hub, a public
                repository that must be private, or foreign weights in it
        """
        self._asker.begin()
        self._asker.ask("it cannot be made", self._create_once)
        self._asker.ask(
            "it cannot be written to", lambda: self._asker.api.auth_check(self.repo, write=True)
        )
        self._asker.may_write = True
        head = self._asker.ask("it cannot be listed", lambda: self._look_once(BRANCH))
        if not head.commit:
            found = f"{self.repo}: the Hub does not say which commit is the newest"
            detail = f"{found}; expected one, against which ours is made"
            raise OutputError("hub-unreachable", detail, AGAIN)
        if self._is_private and not head.is_private:
            detail = f"{self.repo} is a public repository; --private expects one that is not"
            next_step = "Make it private in its settings, or name another."
            raise OutputError("public-repo", detail, next_step)
        self._begun = head
        recorded: dict[str, str] = {}
        reader = RangeReader(self._headers, self._patience, self._tell)
        for record in self._places.records:
            recorded |= read_record(reader, self.repo, head, record)
        changed = {name for name, sha256 in recorded.items() if head.holds_other(name, sha256)}
        self._ours = recorded.keys() - changed
        if weights := self._places.foreign_weights(head, self._ours, changed):
            found = f"{self.repo} holds weights that fp4convert did not write"
            detail = f"{found}, the first {weights[0]!r}; expected a repository without, or its own"
            next_step = "Name another."
            if weights[0] in changed:
                detail = f"{self.repo}: {weights[0]!r} is not what the record there says of it"
                next_step = "Name another; or delete it there, if it may go."
            raise OutputError("foreign-repo", detail, next_step)

    def add(self, path: Path, name: str, sha256: str) -> None:
        """Upload a finished file in the background; safe for several threads.

        A failure is reported, and `commit` tries again; until then the file must stay.
        """
        future = self._start(
            name, lambda: self._upload(file_on_disk(path, name, sha256)), is_early=True
        )
        future.add_done_callback(self._tell_failure)

    def send(self, path: Path, name: str, sha256: str) -> Future[None]:
        """Upload a finished file before its removal; safe for several threads.

        Returns  a future that ends when the Hub confirms the file; its error ends the run, and is
                 not reported here
        """
        future = self._start(
            name, lambda: self._give_away(file_on_disk(path, name, sha256)), is_early=True
        )
        future.add_done_callback(self._remember_error)
        return future

    def find_lost(self, files: Mapping[str, tuple[int, str]]) -> set[str]:
        """Return the names of files that the Hub does not hold.

        A file lies there before a commit names it, but the Hub may drop it again.

        files  name -> size and sha256
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
            # git LFS answers without an action for objects that the server has.
            objects, _, _ = self._asker.ask("it does not say what it holds", call)
            held |= {item["oid"] for item in objects if not item.get("actions")}
        return {name for name, (_, oid) in asked.items() if oid not in held}

    def commit(
        self,
        folder: Path,
        files: Mapping[str, str],
        card: str | None,
        report: Progress = lambda name, nbytes: None,
        gone: Mapping[str, int] | None = None,
    ) -> str:
        """Upload all missing files, and name all files in one commit.

        files    name in the folder -> sha256; the card replaces a README.md among them
        card     the text of README.md; None for the folder's own, if any
        report   gets the name and the bytes of each uploaded file
        gone     sizes of sent files that left the folder
        Returns  the address of the commit
        Raises   AccessError for a lost write access; OutputError for another commit since `begin`,
                 a refusal, or a silent Hub
        """
        from huggingface_hub import constants

        uploads, gone = [], gone or {}
        for name, sha256 in sorted(files.items()):
            if name in gone:
                uploads.append(UploadedFile(name, None, sha256, gone[name]))
            elif name != CARD or card is None:
                uploads.append(file_on_disk(folder / name, name, sha256))
        if card is not None:
            data = card.encode("utf-8", "replace")
            uploads.append(UploadedFile(CARD, data, hashlib.sha256(data).hexdigest(), len(data)))
        try:
            for upload in uploads:
                # Wait for a file on its way; send it where it did not arrive.
                with suppress(Fp4Error):
                    if started := self._started.get(upload.name):
                        self._wait(started)
                if upload.content is not None:
                    self._wait(self._start(upload.name, partial(self._upload, upload)))
                report(upload.name, upload.nbytes)
            self._name_absent([upload for upload in uploads if upload.content is None])
            head = self._asker.ask("the commit cannot be made", lambda: self._commit_once(uploads))
        finally:
            self.stop()
        if head.commit == self._begun.commit:
            self._tell(f"{self.repo} held all of it already: nothing was sent")
        if unsaid := [
            upload.name for upload in uploads if head.files.get(upload.name, (0, ""))[0] < 0
        ]:
            found = f"{self.repo} at commit {head.commit}: the Hub does not say what it holds of"
            detail = f"{found} {len(unsaid)} files, the first {unsaid[0]!r}; expected hashes"
            raise OutputError("push-unproven", detail)
        if lost := [upload.name for upload in uploads if not head.holds(upload)]:
            found = f"{self.repo} at commit {head.commit} lacks {len(lost)} files of this artifact"
            detail = f"{found}, the first {lost[0]!r}; expected all of them"
            raise OutputError("push-incomplete", detail, AGAIN)
        return f"{constants.ENDPOINT}/{self.repo}/commit/{head.commit}"

    def stop(self) -> None:
        """End soon: begin nothing, and wait for nothing."""
        self._asker.stop()
        self._queue.put(None)
        if self._worker is not None:
            self._worker.join(timeout=0.5)

    def _start(self, name: str, do: Callable[[], None], is_early: bool = False) -> Future[None]:
        """Queue work on a file for the one thread that uploads.

        is_early  `commit` tries again: skip it once the Hub was given up
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
            except OSError as error:  # of this disk: those of the Hub are Fp4Errors by now
                future.set_exception(error if error.filename is None else cannot_read(error))
            except Exception as error:  # also our bugs: `commit` raises them
                if isinstance(error, OutputError) and error.code == "hub-unreachable":
                    self._failure = error
                future.set_exception(error)

    def _remember_error(self, future: Future[None]) -> None:
        self._reported = future.exception() or self._reported

    def _tell_failure(self, future: Future[None]) -> None:
        """Report an error once: all files after a given-up Hub have the same."""
        error, reported = future.exception(), self._reported
        self._remember_error(future)
        if isinstance(error, Fp4Error) and error is not reported and not self._asker.is_stopped:
            self._tell(f"not uploaded yet, and tried again at the end: {error.message}")

    def _wait(self, future: Future[None]) -> None:
        while not wait([future], POLL_SECONDS).done:
            self._asker.check()
        future.result()

    def _upload(self, file: UploadedFile) -> None:
        """Upload a file, unless the Hub has it."""
        if self._begun.holds(file) or self._uploaded.get(file.name, ("", None))[0] == file.sha256:
            return
        operation = operation_of(file)
        self._asker.ask(
            f"{file.name} cannot be uploaded", partial(self._preupload, operation), file.nbytes
        )
        self._uploaded[file.name] = file.sha256, operation

    def _preupload(self, *operations: Any) -> None:
        """Send large files; the bytes of small ones come with the commit.

        The Hub decides which are small.
        """
        # An empty .gitignore: the repository's own would drop files in silence.
        self._asker.api.preupload_lfs_files(
            self.repo, operations, revision=BRANCH, free_memory=False, gitignore_content=""
        )

    def _give_away(self, file: UploadedFile) -> None:
        """Upload a file that will be removed; require the Hub's confirmation.

        It goes to git LFS even if hf_xet is installed: only git LFS confirms a file before a commit
        names it.
        """
        if self._begun.holds(file):
            return

        def send() -> None:
            operation = operation_of(file)
            with open(operation.path_or_fileobj, "rb") as stream:
                operation.path_or_fileobj = stream
                self._preupload(operation)

        self._asker.ask(f"{file.name} cannot be uploaded", send, file.nbytes)
        if self.find_lost({file.name: (file.nbytes, file.sha256)}):
            found = f"{self.repo}: the Hub takes {file.name} for a small file, which only a commit"
            detail = f"{found} brings there; --no-keep expects one of its storage of large files"
            next_step = (
                "Add *.safetensors and *.gguf to .gitattributes there; or leave --no-keep out."
            )
            raise OutputError("push-small", detail, next_step)

    def _name_absent(self, files: list[UploadedFile]) -> None:
        """Prepare the commit for files that left this disk.

        Raises  OutputError for a file that the Hub lost
        """
        if lost := self.find_lost({file.name: (file.nbytes, file.sha256) for file in files}):
            found = f"{self.repo}: the Hub does not hold {len(lost)} files any more"
            detail = f"{found}, the first {min(lost)}; expected what was sent"
            raise OutputError(
                "push-lost", detail, "Run the same command again: it makes them again."
            )
        operations = [(file, operation_of(file)) for file in files if not self._begun.holds(file)]
        if operations:
            call = partial(self._preupload, *(operation for _, operation in operations))
            self._asker.ask("the Hub does not say how it takes files", call)
        self._uploaded |= {file.name: (file.sha256, operation) for file, operation in operations}

    def _commit_once(self, files: list[UploadedFile]) -> Head:
        """Return a commit that holds every file; make it unless it exists.

        An earlier call or another worker may have made it.
        """
        from huggingface_hub import CommitOperationDelete

        # The caller repeats it: tries inside of tries would outlast its time.
        head, parent = self._look_once(BRANCH), self._begun
        missing = [file for file in files if not head.holds(file)]
        stale = self._places.stale_files(head, self._ours, {file.name for file in files})
        if not missing and not stale:
            if head.commit == parent.commit:
                self._tell(f"{self.repo}: every file is there already, and nothing is committed")
            return head
        if head.commit != parent.commit:
            found = f"{self.repo}: somebody else committed {head.commit[:8]} since this run began"
            detail = f"{found} at {parent.commit[:8]}; nothing of this run is committed"
            raise OutputError("repo-moved", detail, AGAIN)
        if stale:
            self._tell(f"{self.repo}: what an earlier artifact left is removed: {', '.join(stale)}")
        kept = [
            file.name
            for file in missing
            if file.name in head.files and (file.name == CARD or not self._ours)
        ]
        if kept:  # people's own files, or files older than our artifacts
            found = f"as commit {head.commit[:8]} has them: {', '.join(kept)}"
            self._tell(f"{self.repo}: other contents are replaced, {found}")
        operations = [
            *(self._uploaded[file.name][1] for file in missing),
            *map(CommitOperationDelete, stale),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the server's own texts
            made = self._asker.api.create_commit(
                self.repo,
                operations,
                commit_message=f"Upload with fp4convert {__version__}",
                revision=BRANCH,
                parent_commit=parent.commit,
            )
        return self._look_once(made.oid)

    def _create_once(self) -> None:
        """Create the repository unless it is there.

        huggingface_hub asks again without an end while another request is under way; here each of
        these replies is a pause, twice as long as the last.
        """
        pauses = iter(2.0**number for number in range(-1, 6))

        def slow_down(reply: Any) -> None:
            if reply.status_code == TAKEN and b"conflicting operation" in reply.read():
                self._asker.pause(next(pauses, LONGEST_CONFLICT))

        visibility = True if self._is_private else None
        with replies_seen_by(slow_down):
            self._asker.api.create_repo(self.repo, private=visibility, exist_ok=True)

    def _look_once(self, revision: str) -> Head:
        return read_head(self._asker.api, self.repo, revision)
