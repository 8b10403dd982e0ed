"""The folder being written: whose it is, what is finished in it, and no final name that ever holds partial bytes.

  OUT/.fp4convert/plan.json         the plan being carried out: its identity, every task with its files, the texts written last
  OUT/.fp4convert/done/<task>.json  {"files": {file: sha256}, "global_scales": {...}} of a finished task; its key names it
  OUT/.fp4convert/claims/           which process does which task, and which processes are at work
  OUT/.fp4convert/tmp/<process>/    files on their way: written, fsynced, renamed into OUT, folder fsynced
  OUT/.fp4convert/ended.json        {"plan": id, "files": {file: sha256}} of everything, written when the last file was

Any number of processes may carry out the same plan at once.  Nothing foreign is ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fp4convert.artifact import CARD
from fp4convert.claims import Claims
from fp4convert.errors import OutputError
from fp4convert.purpose import Done, Listed, Purpose
from fp4convert.shard import ShardWriter, TensorRef, hash_file, told
from fp4convert.sources import PLAN_FILE
from fp4convert.tasks import Task

STATE, _, PLAN = PLAN_FILE.partition("/")
ENDED = "ended.json"
PLANNING = "plan"  # the claim of whoever writes plan.json
READ_NBYTES = 1 << 20
Published = Callable[[Path, str, str], None]


class TaskWriter:
    """The shards of one task on their way, filled together.

    global_scales  of scale groups that other shards have members of, too: group -> what this task found
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder = folder
        self._writers: dict[str, ShardWriter] = {}
        self.global_scales: dict[str, float] = {}
        try:
            for shard in task.shards:
                self._writers[shard.file] = ShardWriter(self.path(shard.file), shard.header, shard.outputs, shard.nbytes)
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
        self.global_scales.clear()
        for writer in self._writers.values():
            writer.begin_again()

    def finish(self) -> dict[str, str]:
        """Flush and close every shard: file -> sha256."""
        return {file: writer.finish() for file, writer in self._writers.items()}

    def discard(self) -> None:
        """Close, and leave nothing behind."""
        for writer in self._writers.values():
            writer.discard()


@dataclass(frozen=True, slots=True)
class Terms:
    """How a folder is entered.

    needed_nbytes  everything that the plan writes
    is_forced      files of another, finished plan may go
    is_joining     only if the folder is new, or holds the same plan
    """

    needed_nbytes: int
    is_forced: bool = False
    is_joining: bool = False


@dataclass(slots=True)
class OutputFolder:
    """The output, as long as this process works in it.

    hashes     sha256 of every file that this process has written or read again
    published  called with the path, the name and the sha256 of every file that has got its final name
    """

    root: Path
    purpose: Purpose
    claims: Claims
    hashes: dict[str, str] = field(default_factory=dict)
    published: Published = lambda path, file, sha256: None

    @property
    def state(self) -> Path:
        return self.root / STATE

    @property
    def temps(self) -> Path:
        """Where this process has its files on their way."""
        return self.state / "tmp" / self.claims.name

    def record_of(self, task: Listed) -> Done | None:
        """What a finished task wrote; None where it is not finished, or where its files are gone or have other sizes."""
        try:
            done = Done.from_json((self.state / "done" / f"{task.key}.json").read_text(encoding="utf-8"))
            is_there = done.files.keys() == task.files.keys() and all(
                (self.root / file).stat().st_size == nbytes for file, nbytes in task.files.items()
            )
        except (ValueError, KeyError, TypeError, RecursionError, OSError):
            return None  # not there, or damaged: it proves nothing, and the task is done again
        return done if is_there else None

    def missing(self) -> list[Listed]:
        """The tasks of the plan that are not finished."""
        return [task for task in self.purpose.tasks if self.record_of(task) is None]

    def forget(self, task: Listed) -> None:
        """Have a task done again."""
        with told(self.root):
            (self.state / "done" / f"{task.key}.json").unlink(missing_ok=True)
        for file in task.files:
            self.hashes.pop(file, None)

    def claimed(self, tasks: Iterable[Listed]) -> Iterator[Listed]:
        """Of these tasks, one after the other, those that nobody has finished or is at work on; this process claims them."""
        for task in tasks:
            if self.record_of(task) is not None:
                continue
            if not self.claims.take(task.key):
                continue
            if self.record_of(task) is not None:  # somebody finished it meanwhile
                self.claims.drop(task.key)
                continue
            with told(self.root):
                (self.root / self.purpose.last).unlink(missing_ok=True)
            yield task

    def write_shards(self, tasks: Iterable[Task], fill: Callable[[Task, TaskWriter], bool]) -> None:
        """Create the shards of each claimed task, let `fill` append every tensor, then put them under their final names.

        fill  returns whether the shards are whole; those that are not, are discarded
        While one task's shards are flushed, hashed and named, the next ones are filled.
        """
        with ThreadPoolExecutor(1) as finisher:
            last: Future[None] | None = None
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
                    last = finisher.submit(self._name_shards, task, writer)
                else:
                    writer.discard()
                    self.claims.drop(task.key)
            if last is not None:
                last.result()

    def _name_shards(self, task: Task, writer: TaskWriter) -> None:
        try:
            done = Done(writer.finish(), dict(writer.global_scales))
        except BaseException:
            writer.discard()
            raise
        self.settle(Listed.of(task), done, writer.path)

    def settle(self, task: Listed, done: Done, path: Callable[[str], Path]) -> None:
        """Put a task's files under their final names and say that it is done; where another process did so first, ours go.

        path  where each file is
        """
        first = self.record_of(task)
        for file, sha256 in done.files.items():
            if first is None:
                self._publish(path(file), file, sha256)
            else:
                path(file).unlink()
        if first is None:
            self._put(f"done/{task.key}.json", done.as_json())
        self.claims.drop(task.key)

    def write_texts(self, texts: dict[str, str]) -> None:
        """Small files of ours, each under its final name at once."""
        for file, text in texts.items():
            temp = self.write_temp(file, lambda out, text=text: out.write(text.encode("utf-8")))  # type: ignore[misc]
            self._publish(temp, file, hash_file(temp))

    def write_copies(self, task: Listed, open_file: Callable[[str], BinaryIO]) -> None:
        """Files of the source as they are: the task of whoever holds its claim."""
        temps = {}
        for number, file in enumerate(task.files):
            with open_file(file) as stream:
                temps[file] = self.write_temp(f"{number}", lambda out: shutil.copyfileobj(stream, out, READ_NBYTES))
        self.settle(task, Done({file: hash_file(temp) for file, temp in temps.items()}), temps.__getitem__)

    def write_temp(self, name: str, fill: Callable[[BinaryIO], object]) -> Path:
        """A file on its way, whole and on the disk."""
        temp = self.temps / f"small-{name}"
        with told(self.root / name), temp.open("wb") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
        return temp

    def _publish(self, temp: Path, file: str, sha256: str) -> None:
        final = self.root / file
        with told(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temp, final)
            _fsync_folder(final.parent)
        self.hashes[file] = sha256
        self.published(final, file, sha256)

    def _put(self, name: str, text: str) -> None:
        final = self.state / name
        temp = self.write_temp("state", lambda out: out.write(text.encode("utf-8")))
        with told(final):
            os.replace(temp, final)
            _fsync_folder(final.parent)

    def put_ended(self, files: dict[str, str]) -> None:
        """Say that everything is written."""
        self._put(ENDED, json.dumps({"plan": self.purpose.plan_id, "files": files}, sort_keys=True))

    def begin(self, terms: Terms) -> None:
        """Make the folder this plan's own, or refuse."""
        with told(self.root), self.claims.waited_for(PLANNING):
            others = self.claims.others()
            old = read_plan(self.root)
            if old is not None and old.plan_id != self.purpose.plan_id:
                self._replace(old, others, terms)
            self.sweep(others)
            _check_space(self.root, self.purpose, terms.needed_nbytes)
            if old is None or old.plan_id != self.purpose.plan_id:
                self._put(PLAN, json.dumps(self.purpose.as_json(), indent=1))

    def sweep(self, others: list[str]) -> None:
        """Remove files on their way that neither this process nor these others fill."""
        for leftover in (self.state / "tmp").iterdir():
            if leftover.name not in (self.claims.name, *others):
                shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()

    def _replace(self, old: Purpose, others: list[str], terms: Terms) -> None:
        next_step = "Choose another folder with -o, or discard its files with --force."
        changed = [words for words, trait in self.purpose.traits.items() if old.traits.get(words) != trait]
        differs = f"{' and '.join(changed) or 'its files'} changed"
        if others:
            detail = f"{self.root} is being written by {others[0]} for another plan"
            raise OutputError("locked", detail, "Wait for it, or choose another folder: -o FOLDER.")
        if old.identity != self.purpose.identity and (terms.is_joining or not terms.is_forced):
            detail = f"{self.root} holds another plan: another source, format or dialect"
            raise OutputError("other-plan", detail, next_step)
        if terms.is_joining:
            detail = f"{self.root} holds another plan: {differs}; a worker that joins never replaces one"
            raise OutputError("other-plan", detail, "Give every worker the same source and options.")
        if (self.root / old.last).exists() and not terms.is_forced:
            raise OutputError("other-plan", f"{self.root} holds a finished result, and since then {differs}", next_step)
        forgotten = old.files if terms.is_forced else set(old.files) - set(self.purpose.files)
        for file in (old.last, *sorted(forgotten)):
            (self.root / file).unlink(missing_ok=True)


def read_plan(root: Path) -> Purpose | None:
    """The plan that a folder holds; None where it is new.  OutputError where it is foreign, or the plan damaged."""
    path = root / STATE / PLAN
    if not path.exists():
        refuse_foreign(root)
        return None
    try:
        return Purpose.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        detail = f"{path} is damaged; expected the plan that began {root}"
        raise OutputError("other-plan", detail, "Remove the folder yourself, or choose another: -o FOLDER.") from None


def read_ended(root: Path) -> tuple[object, dict[str, str]]:
    """(what changes whenever a folder is finished once more, the sha256 of every file in it then)."""
    path = root / STATE / ENDED
    try:
        status = path.stat()
        entry = json.loads(path.read_text(encoding="utf-8"))
        return (status.st_mtime_ns, status.st_ino), dict(entry["files"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        return None, {}


def refuse_foreign(root: Path) -> None:
    """OutputError where a folder holds anything that fp4convert did not begin."""
    if others := sorted(set(os.listdir(root)) - {STATE}):
        detail = f"{root} is not empty (it holds {others[0]!r}) and was not begun by fp4convert"
        raise OutputError("foreign-output", f"{detail}; expected a new or empty folder", "Choose another: -o FOLDER.")


@contextmanager
def open_output(root: Path, purpose: Purpose, terms: Terms) -> Iterator[OutputFolder]:
    """The output folder, created, with this process among those that work in it.

    Raises OutputError where it is foreign, holds another plan, cannot be written, or where the disk has too little room
    (finished shards counted as there)
    """
    with told(root):
        is_there, is_ours = root.exists(), (root / PLAN_FILE).exists()
    if is_there and not root.is_dir():
        raise OutputError("foreign-output", f"{root} is a file; expected a folder to write to", "Choose another: -o FOLDER.")
    if is_there and not is_ours:
        refuse_foreign(root)
    if not is_ours:
        with told(root):
            _check_space(root, purpose, terms.needed_nbytes)
    with entered(root, purpose) as folder:
        folder.begin(terms)
        yield folder


@contextmanager
def entered(root: Path, purpose: Purpose) -> Iterator[OutputFolder]:
    """A folder of ours, with this process among those that work in it."""
    claims = Claims(root / STATE / "claims")
    claims.__enter__()
    folder = OutputFolder(root, purpose, claims)
    try:
        with told(root):
            for place in (folder.state / "done", folder.temps):
                place.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder.temps, ignore_errors=True)
        claims.__exit__(None, None, None)


def _check_space(root: Path, purpose: Purpose, needed_nbytes: int) -> None:
    existing = next(place for place in (root, *root.absolute().parents) if place.exists())
    present = sum((root / file).stat().st_size for file in purpose.files if (root / file).is_file())
    coming = sum(path.stat().st_size for path in (root / STATE / "tmp").glob("*/*"))
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    if needed_nbytes - present - coming > free:
        detail = f"{root} needs {needed_nbytes - present - coming:,} bytes, its disk has {free:,} free"
        raise OutputError("disk-full", detail, "Free some space, or choose another disk: -o FOLDER.")


def digest_of(hashes: dict[str, str]) -> str:
    """sha256 over the lines "sha256  name" of all files but the model card, sorted by name: `sha256sum FILES | sha256sum`."""
    lines = (f"{sha256}  {file}\n" for file, sha256 in sorted(hashes.items()) if file != CARD)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
