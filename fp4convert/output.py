"""The folder being written: whose it is, what is finished in it, and no final name that ever holds partial bytes.

  OUT/.fp4convert/plan.json         the plan being carried out: its identity, and every file it writes
  OUT/.fp4convert/done/<task>.json  {"files": {file: sha256}} of a finished task; its key names it
  OUT/.fp4convert/tmp/              files on their way: written, fsynced, renamed into OUT, folder fsynced
  OUT/.fp4convert/lock              held while a run writes; the system frees it when the process ends

A re-run adopts every finished shard whose bytes still have their hash.  Nothing foreign is ever removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fp4convert.errors import OutputError
from fp4convert.shard import ShardWriter, TensorRef, hash_file, told
from fp4convert.sources import PLAN_FILE
from fp4convert.tasks import Task

STATE, _, PLAN = PLAN_FILE.partition("/")
READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a run is for.

    identity  source, format and dialect: a folder begun for another identity is refused
    traits    everything else that decides the output's bytes, by the words in which a message names it
    files     every file the run will write, relative to the folder
    last      the file written last; while it is absent the folder is unfinished
    origin    repository and commit that a re-run goes on with
    """

    identity: dict[str, object]
    traits: dict[str, str]
    files: tuple[str, ...]
    last: str
    origin: dict[str, str | None] = field(default_factory=dict)

    @property
    def plan_id(self) -> str:
        return hashlib.sha256(json.dumps([self.identity, self.traits], sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, object]:
        named = {"identity": self.identity, "traits": self.traits, "last": self.last, "files": list(self.files)}
        return {"plan": self.plan_id, **named, "source": self.origin}

    @staticmethod
    def from_json(text: str) -> Purpose:
        entry = json.loads(text)
        for file in (entry["last"], *entry["files"]):
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise ValueError(f"{file} is outside the folder")
        return Purpose(dict(entry["identity"]), dict(entry["traits"]), tuple(entry["files"]), entry["last"])


class TaskWriter:
    """The shards of one task on their way, filled together."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder = folder
        self._writers: dict[str, ShardWriter] = {}
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
        for writer in self._writers.values():
            writer.begin_again()

    def finish(self) -> dict[str, str]:
        """Flush and close every shard: file -> sha256."""
        return {file: writer.finish() for file, writer in self._writers.items()}

    def discard(self) -> None:
        """Close, and leave nothing behind."""
        for writer in self._writers.values():
            writer.discard()


class OutputFolder:
    """The output while this process holds its lock."""

    def __init__(self, root: Path, purpose: Purpose) -> None:
        self.root = root
        self._state = root / STATE
        self._purpose = purpose
        self.hashes: dict[str, str] = {}

    def adopt(self, task: Task) -> bool:
        """True where the task's shards are finished and still have their hashes; they then count as written."""
        record = self._state / "done" / f"{task.key}.json"
        try:
            files = dict(json.loads(record.read_text(encoding="utf-8"))["files"])
            for shard in task.shards:
                path = self.root / shard.file
                if path.stat().st_size != shard.nbytes or hash_file(path) != files[shard.file]:
                    return False
        except (ValueError, KeyError, TypeError, RecursionError, OSError):
            return False  # not there, or damaged: it proves nothing, and the shards are written again
        self.hashes |= {shard.file: str(files[shard.file]) for shard in task.shards}
        return True

    def write_shards(self, tasks: Iterable[Task], fill: Callable[[Task, TaskWriter], bool]) -> None:
        """Create the shards of each task, let `fill` append every tensor, then put them under their final names.

        fill  returns whether the shards are whole; those that are not, are discarded
        While one task's shards are flushed, hashed and named, the next ones are filled.
        """
        with ThreadPoolExecutor(1) as finisher:
            last: Future[None] | None = None
            for task in tasks:
                writer = TaskWriter(self._state / "tmp", task)
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
            if last is not None:
                last.result()

    def _name_shards(self, task: Task, writer: TaskWriter) -> None:
        try:
            hashes = writer.finish()
        except BaseException:
            writer.discard()
            raise
        for file, sha256 in hashes.items():
            self._publish(writer.path(file), file, sha256)
        self._put(f"done/{task.key}.json", json.dumps({"files": hashes}, sort_keys=True))

    def write_text(self, file: str, text: str) -> None:
        """A small file of ours, under its final name at once."""
        self.write_stream(file, lambda out: out.write(text.encode("utf-8")))

    def write_copy(self, file: str, stream: BinaryIO) -> None:
        """A file of the source, as it is."""
        self.write_stream(file, lambda out: shutil.copyfileobj(stream, out, READ_NBYTES))

    def write_stream(self, file: str, fill: Callable[[BinaryIO], object]) -> None:
        temp = self._state / "tmp" / "file"
        with told(self.root / file):
            with temp.open("wb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        self._publish(temp, file, hash_file(temp))

    def digest(self) -> str:
        """sha256 over the lines "sha256  name" of all files, sorted by name: `sha256sum FILES | sha256sum`."""
        lines = (f"{sha256}  {file}\n" for file, sha256 in sorted(self.hashes.items()))
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def nbytes(self) -> int:
        """Size of everything written."""
        return sum((self.root / file).stat().st_size for file in self.hashes)

    def _publish(self, temp: Path, file: str, sha256: str) -> None:
        final = self.root / file
        with told(final):
            os.replace(temp, final)
            _fsync_folder(final.parent)
        self.hashes[file] = sha256

    def _put(self, name: str, text: str) -> None:
        temp = self._state / "tmp" / "state"
        with told(self._state / name):
            with temp.open("w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temp, self._state / name)
            _fsync_folder((self._state / name).parent)

    def begin(self, is_forced: bool) -> None:
        """Make the folder this run's own, or refuse; called with the lock held."""
        old = self._read_plan()
        if old is not None and old.plan_id != self._purpose.plan_id:
            self._replace(old, is_forced)
        for name in ("tmp", "done"):
            (self._state / name).mkdir(exist_ok=True)
        self.sweep()
        if old is None or old.plan_id != self._purpose.plan_id:
            self._put(PLAN, json.dumps(self._purpose.as_json(), indent=1, sort_keys=True))

    def sweep(self) -> None:
        """Remove files on their way, ours or those of a run that died."""
        temps = self._state / "tmp"
        for leftover in temps.iterdir() if temps.exists() else ():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()

    def _read_plan(self) -> Purpose | None:
        path = self._state / PLAN
        if not path.exists():
            refuse_foreign(self.root)
            return None
        try:
            return Purpose.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, RecursionError):
            detail = f"{path} is damaged; expected the plan that began {self.root}"
            raise OutputError("other-plan", detail, "Remove the folder yourself, or choose another: -o FOLDER.") from None

    def _replace(self, old: Purpose, is_forced: bool) -> None:
        next_step = "Choose another folder with -o, or discard its files with --force."
        if old.identity != self._purpose.identity and not is_forced:
            detail = f"{self.root} holds another plan: another source, format or dialect"
            raise OutputError("other-plan", detail, next_step)
        if (self.root / old.last).exists() and not is_forced:
            changed = [words for words, trait in self._purpose.traits.items() if old.traits.get(words) != trait]
            detail = f"{self.root} holds a finished result, and since then {' and '.join(changed)} changed"
            raise OutputError("other-plan", detail, next_step)
        forgotten = old.files if is_forced else set(old.files) - set(self._purpose.files)
        for file in (old.last, *sorted(forgotten)):
            (self.root / file).unlink(missing_ok=True)


def refuse_foreign(root: Path) -> None:
    """OutputError where a folder holds anything that fp4convert did not begin."""
    if others := sorted(set(os.listdir(root)) - {STATE}):
        detail = f"{root} is not empty (it holds {others[0]!r}) and was not begun by fp4convert"
        raise OutputError("foreign-output", f"{detail}; expected a new or empty folder", "Choose another: -o FOLDER.")


@contextmanager
def open_output(root: Path, purpose: Purpose, needed_nbytes: int, is_forced: bool) -> Iterator[OutputFolder]:
    """The output folder, created and locked.

    Raises OutputError where it is foreign, holds another plan, is being written, cannot be written, or where the disk has
    fewer than `needed_nbytes` free (finished shards counted as there)
    """
    state = root / STATE
    with told(root):
        is_there, is_ours = root.exists(), (state / PLAN).exists()
    if is_there and not root.is_dir():
        raise OutputError("foreign-output", f"{root} is a file; expected a folder to write to", "Choose another: -o FOLDER.")
    if is_there and not is_ours:
        refuse_foreign(root)
    if not is_ours:
        _check_space(root, purpose, needed_nbytes)
    with told(root):
        state.mkdir(parents=True, exist_ok=True)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(root, lock)
        folder = OutputFolder(root, purpose)
        try:
            with told(root):
                folder.begin(is_forced)
            if is_ours:  # only now are a dead run's temporary files gone
                _check_space(root, purpose, needed_nbytes)
            yield folder
        finally:
            folder.sweep()
    finally:
        os.close(lock)


def _lock(root: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        detail = f"{root} is being written by another run of fp4convert"
        raise OutputError("locked", detail, "Wait for it, or choose another folder: -o FOLDER.") from None


def _check_space(root: Path, purpose: Purpose, needed_nbytes: int) -> None:
    existing = next(place for place in (root, *root.absolute().parents) if place.exists())
    present = sum((root / file).stat().st_size for file in purpose.files if (root / file).is_file())
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    if needed_nbytes - present > free:
        detail = f"{root} needs {needed_nbytes - present:,} bytes, its disk has {free:,} free"
        raise OutputError("disk-full", detail, "Free some space, or choose another disk: -o FOLDER.")


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
