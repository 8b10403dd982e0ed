"""The folder being written: whose it is, enough room, what is done.

  OUT/.fp4convert/plan.json         the plan being carried out: its identity, every task with its files, the texts written last
  OUT/.fp4convert/done/<task>.json  files with sha256 and seal, global scales and accounts of a finished task; its key names it
  OUT/.fp4convert/claims/           which process does which task, and which processes are at work
  OUT/.fp4convert/tmp/<process>/    files on their way: written, fsynced, renamed into OUT, folder fsynced
  OUT/.fp4convert/ended.json        {"plan": id, "files": {file: sha256}} of everything, written when the last file was

Any number of processes may carry out the same plan at once.  Nothing foreign is ever removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from fp4convert.errors import OutputError
from fp4convert.execution.leases import Claims
from fp4convert.execution.plan_file import (
    ENDED,
    PLAN,
    STATE,
    Done,
    Manifest,
    Records,
    TaskFiles,
    read_manifest,
    refuse_foreign,
    refuse_linked_folders,
    refuse_links,
)
from fp4convert.execution.settings import OnNamed
from fp4convert.numerics.error_sums import Account
from fp4convert.planning.steps import Task
from fp4convert.storage.checkpoint_files import PLAN_FILE
from fp4convert.storage.disk import fsync_folder, hash_file, nbytes_there, seal, told
from fp4convert.storage.safetensors import ShardWriter, TensorRef

DONE = "done"  # the folder of records
PLANNING = "plan"  # the claim of whoever writes plan.json
READ_NBYTES = 1 << 20


class TaskWriter:
    """The shards of one task on their way, filled together.

    global_scales  of scale groups that other shards have members of, too: group -> what this task found
    accounts       module -> what it lost
    taken_over     modules that came with codes of their own
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder = folder
        self._writers: dict[str, ShardWriter] = {}
        self.global_scales: dict[str, float] = {}
        self.accounts: dict[str, Account] = {}
        self.taken_over: set[str] = set()
        try:
            for shard in task.shards:
                self._writers[shard.file] = ShardWriter(
                    self.path(shard.file), shard.header, shard.outputs, shard.nbytes
                )
        except BaseException:
            self.discard()
            raise

    def path(self, file: str) -> Path:
        """Where a shard is until it is whole."""
        return self._folder / file

    def append(self, ref: TensorRef, data: memoryview) -> None:
        """Write the next bytes of that output."""
        self._writers[ref.file].append(ref, data)

    def begin_again(self) -> None:
        """Write everything anew, from the first byte of every output."""
        for found in (self.global_scales, self.accounts, self.taken_over):
            found.clear()
        for writer in self._writers.values():
            writer.begin_again()

    def finish(self) -> dict[str, str]:
        """Flush and close every shard: file -> sha256."""
        return {file: writer.finish() for file, writer in self._writers.items()}

    def stop(self) -> None:
        """Make `finish`, in another thread, end soon with an OutputError."""
        for writer in self._writers.values():
            writer.stop()

    def discard(self) -> None:
        """Close, and leave nothing behind."""
        for writer in self._writers.values():
            writer.discard()


@dataclass(frozen=True, slots=True)
class Terms:
    """How a folder is entered.

    more_nbytes  written to the same disk beside what the plan writes
    is_forced    files of another, finished plan may go
    is_joining   only if the folder is new, or holds the same plan
    """

    more_nbytes: int = 0
    is_forced: bool = False
    is_joining: bool = False


@dataclass(slots=True)
class OutputFolder:
    """The output, as long as this process works in it.

    hashes   sha256 of every file that this process has written, has read again, or found as another had sealed it
    named    called with the path, the name and the sha256 of every file that has got its final name, by two threads at times
    records  of finished tasks
    """

    root: Path
    manifest: Manifest
    claims: Claims
    hashes: dict[str, str] = field(default_factory=dict)
    named: OnNamed = lambda path, file, sha256: None
    records: Records = field(init=False)

    def __post_init__(self) -> None:
        self.records = Records(self.state / DONE)

    @property
    def state(self) -> Path:
        return self.root / STATE

    @property
    def temps(self) -> Path:
        """Where this process has its files on their way."""
        return self.state / "tmp" / self.claims.name

    def record_of(self, task: TaskFiles) -> Done | None:
        """What a finished task wrote; None where it is not finished, or where its files are gone or have other sizes."""
        done = self.records.of(task)
        if done is None or done.files.keys() != task.files.keys():
            return None
        return (
            done
            if all(nbytes_there(self.root / file) == nbytes for file, nbytes in task.files.items())
            else None
        )

    def missing(self) -> list[TaskFiles]:
        """The tasks of the plan that are not finished."""
        return [task for task in self.manifest.tasks if self.record_of(task) is None]

    def forget(self, task: TaskFiles) -> None:
        """Have a task done again."""
        with told(self.root):
            self.records.path(task).unlink(missing_ok=True)
        for file in task.files:
            self.hashes.pop(file, None)

    def claimed(self, tasks: Iterable[TaskFiles]) -> Iterator[TaskFiles]:
        """Of these tasks, one after the other, those that nobody has finished or is at work on; this process claims them."""
        for task in tasks:
            if self.record_of(task) is not None:
                continue
            if not self.claims.take(task.key):
                continue
            if self.record_of(task) is not None:  # somebody finished it meanwhile
                self.claims.drop(task.key)
                continue
            if not self.temps.is_dir():
                raise self.given_up()
            with told(self.root):
                (self.root / self.manifest.last).unlink(missing_ok=True)
            yield task

    def given_up(self) -> OutputError:
        """The error of a process whose files on their way were removed: what is in the folder now need not be its plan's."""
        detail = f"{self.temps} was removed by another process, which saw no sign of life of this one, or by hand"
        return OutputError(
            "given-up", detail, "Run the same command again: what is finished stays."
        )

    def write_shards(
        self,
        tasks: Iterable[Task],
        fill: Callable[[Task, TaskWriter], bool],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the shards of each claimed task, let `fill` append every tensor, then put them under their final names.

        fill   returns whether the shards are whole; those that are not, are discarded
        after  what is to be done when all are filled; where it fails, the last shards are finished all the same
        While one task's shards are flushed, hashed and named, the next ones are filled, or what comes after them is done.
        """
        finishing: TaskWriter | None = None
        with ThreadPoolExecutor(1) as finisher:
            last: Future[None] | None = None
            try:
                for task in tasks:
                    writer = TaskWriter(self.temps, task)
                    try:
                        is_whole = fill(task, writer)
                        if last is not None:
                            last.result()
                    except BaseException:
                        writer.discard()
                        raise
                    if is_whole:
                        finishing = writer  # before it begins: an interrupt may come while it does
                        last = finisher.submit(self._name_shards, task, writer)
                    else:
                        writer.discard()
                        self.claims.drop(task.key)
                after()
                if last is not None:
                    last.result()
            except BaseException as error:
                if finishing and not isinstance(
                    error, Exception
                ):  # an interrupt: nobody wants to wait for a hash
                    finishing.stop()
                raise

    def _name_shards(self, task: Task, writer: TaskWriter) -> None:
        try:
            done = Done(
                writer.finish(),
                dict(writer.global_scales),
                dict(writer.accounts),
                len(writer.taken_over),
            )
        except BaseException:
            writer.discard()
            raise
        self.settle(TaskFiles.of(task), done, writer.path)

    def settle(self, task: TaskFiles, done: Done, path: Callable[[str], Path]) -> None:
        """Put a task's files under their final names and say that it is done; where another process did so first, ours go.

        path  where each file is
        """
        first = self.record_of(task)
        for file, sha256 in done.files.items():
            if first is None:
                self._give_name(path(file), file, sha256)
            else:
                path(file).unlink()
        if first is None:
            seals = {
                file: seal(self.root / file, sha256, self.temps)
                for file, sha256 in done.files.items()
            }
            self._put(f"{DONE}/{task.key}.json", replace(done, seals=seals).as_json())
        self.claims.drop(task.key)

    def write_texts(self, texts: dict[str, str]) -> None:
        """Small files of ours, each under its final name at once."""
        for file, text in texts.items():
            temp = self.write_temp(file, lambda out, text=text: out.write(text.encode("utf-8")))  # type: ignore[misc]
            self._give_name(temp, file, hash_file(temp))

    def write_copies(
        self,
        task: TaskFiles,
        open_file: Callable[[str], BinaryIO],
        report: Callable[[str, int], None],
    ) -> None:
        """Files of the source as they are: the task of whoever holds its claim.

        report  is called with a file and how many bytes more of it were copied
        """
        temps = {}
        for number, file in enumerate(task.files):

            def copy(out: BinaryIO, file: str = file) -> None:
                with open_file(file) as stream:
                    while data := stream.read(READ_NBYTES):
                        out.write(data)
                        report(file, len(data))

            temps[file] = self.write_temp(f"{number}", copy)
        self.settle(
            task, Done({file: hash_file(temp) for file, temp in temps.items()}), temps.__getitem__
        )

    def write_temp(self, name: str, fill: Callable[[BinaryIO], object]) -> Path:
        """A file on its way, whole and on the disk."""
        temp = self.temps / f"small-{name}"
        with told(temp), temp.open("wb") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
        return temp

    def _give_name(self, temp: Path, file: str, sha256: str) -> None:
        final = self.root / file
        with told(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temp, final)
            fsync_folder(final.parent)
        self.hashes[file] = sha256
        self.named(final, file, sha256)

    def _put(self, name: str, text: str) -> None:
        final = self.state / name
        temp = self.write_temp(f"state-{final.name}", lambda out: out.write(text.encode("utf-8")))
        with told(final):
            os.replace(temp, final)
            fsync_folder(final.parent)

    def put_ended(self, files: dict[str, str]) -> None:
        """Say that everything is written."""
        self._put(
            ENDED, json.dumps({"plan": self.manifest.plan_id, "files": files}, sort_keys=True)
        )

    def begin(self, terms: Terms) -> None:
        """Make the folder this plan's own, or refuse."""
        with told(self.root), self.claims.waited_for(PLANNING):
            old = read_manifest(self.root)
            if old is not None and old.plan_id != self.manifest.plan_id:
                self._replace(old, terms)
            self.sweep()
            _check_space(self.root, self.manifest, terms.more_nbytes)
            if old is None or old.plan_id != self.manifest.plan_id:
                self._put(PLAN, json.dumps(self.manifest.as_json(), indent=1))

    def sweep(self) -> None:
        """Remove files on their way that no living process fills."""
        leftovers = list((self.state / "tmp").iterdir())
        living = {
            self.claims.name,
            *self.claims.others(),
        }  # asked last: who has a folder there had a claim before
        for leftover in leftovers:
            if leftover.name not in living:
                with suppress(FileNotFoundError):  # its process was just leaving
                    shutil.rmtree(
                        leftover
                    ) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()

    def _replace(self, old: Manifest, terms: Terms) -> None:
        discard = "" if terms.is_joining else ", or discard its files with --force"
        next_step = f"Choose another folder with -o{discard}."
        changed = [
            words for words, trait in self.manifest.traits.items() if old.traits.get(words) != trait
        ]
        differs = f"{' and '.join(changed) or 'its files'} changed"
        if others := self.claims.others_at_other_work():
            detail = f"{self.root} is being written by {others[0]} for another plan"
            raise OutputError("locked", detail, "Wait for it, or choose another folder: -o FOLDER.")
        if old.identity != self.manifest.identity and (terms.is_joining or not terms.is_forced):
            detail = f"{self.root} holds another plan: another source, format or dialect"
            raise OutputError("other-plan", detail, next_step)
        if terms.is_joining:
            detail = (
                f"{self.root} holds another plan: {differs}; a worker that joins never replaces one"
            )
            raise OutputError(
                "other-plan", detail, "Give every worker the same source and options."
            )
        if (self.root / old.last).exists() and not terms.is_forced:
            raise OutputError(
                "other-plan",
                f"{self.root} holds a finished result, and since then {differs}",
                next_step,
            )
        forgotten = old.files if terms.is_forced else set(old.files) - set(self.manifest.files)
        refuse_linked_folders(self.root, forgotten)
        for file in (old.last, *sorted(forgotten)):
            with told(self.root / file):
                (self.root / file).unlink(missing_ok=True)


@contextmanager
def open_output(root: Path, manifest: Manifest, terms: Terms) -> Iterator[OutputFolder]:
    """The output folder, created, with this process among those that work in it.

    Raises OutputError where it is foreign, holds another plan, cannot be written, or where the disk has too little room
    (finished shards counted as there)
    """
    with told(root):
        is_there, is_ours = root.exists(), (root / PLAN_FILE).exists()
        if is_there and not root.is_dir():
            raise OutputError(
                "foreign-output",
                f"{root} is a file; expected a folder to write to",
                "Choose another: -o FOLDER.",
            )
        if is_there and not is_ours:
            refuse_foreign(root)
        if not is_ours:
            _check_space(root, manifest, terms.more_nbytes)
    with entered(root, manifest) as folder:
        folder.begin(terms)
        yield folder


@contextmanager
def entered(root: Path, manifest: Manifest) -> Iterator[OutputFolder]:
    """A folder of ours, with this process among those that work in it."""
    refuse_links(root, "claims", "tmp", DONE)
    refuse_linked_folders(root, manifest.files)
    claims = Claims(root / STATE / "claims", work=manifest.plan_id)
    folder = OutputFolder(root, manifest, claims)
    try:
        claims.__enter__()
        with told(root):
            for place in (folder.state / DONE, folder.temps):
                place.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        except OutputError as error:
            if folder.temps.is_dir():
                raise
            raise folder.given_up() from error
    finally:
        shutil.rmtree(folder.temps, ignore_errors=True)
        claims.__exit__(None, None, None)


def missing_nbytes(root: Path, manifest: Manifest) -> int:
    """What is still to be written of a plan; all of it where its folder is not there."""
    coming = [
        Path(folder, file) for folder, _, files in os.walk(root / STATE / "tmp") for file in files
    ]
    return manifest.nbytes - sum(
        nbytes_there(path) or 0 for path in (*(root / file for file in manifest.files), *coming)
    )


def _check_space(root: Path, manifest: Manifest, more_nbytes: int) -> None:
    existing = next(place for place in (root, *root.absolute().parents) if place.exists())
    needed = missing_nbytes(root, manifest) + more_nbytes
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        detail = f"{root} needs {needed:,} bytes, its disk has {free:,} free"
        raise OutputError(
            "disk-full", detail, "Free some space, or choose another disk: -o FOLDER."
        )
