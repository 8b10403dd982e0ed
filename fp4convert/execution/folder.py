"""Write the output folder: temporary files, final names, records of tasks.

  OUT/.fp4convert/plan.json         the plan being carried out: its identity, every task with its
                                    files, the texts written last
  OUT/.fp4convert/done/<task>.json  files with sha256 and seal, global scales and accounts of a
                                    finished task; its key names it
  OUT/.fp4convert/claims/           which process does which task, and which are at work
  OUT/.fp4convert/tmp/<process>/    files on their way: written, fsynced, renamed into OUT, folder
                                    fsynced
  OUT/.fp4convert/ended.json        {"plan": id, "files": {file: sha256}} of everything, written
                                    when the last file was
  OUT/.fp4convert/measured/         what --target-size measured of each shard: weight_losses.py
  OUT/.fp4convert/hub.json          the repository to which shards have gone, instead of staying

A shard that goes elsewhere is sent as a temporary file and never gets a name in OUT. It is removed
after its record says that it has gone; `sweep` removes the files of a process that died before.
Any number of processes may carry out the same plan at once.  Nothing foreign is ever removed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from fp4convert.errors import OutputError, SourceError
from fp4convert.execution.fill import TaskWriter
from fp4convert.execution.leases import Leases
from fp4convert.execution.output_check import refuse_all_links
from fp4convert.execution.plan_file import DONE, STATE, Done, Manifest, TaskFiles, refuse_links
from fp4convert.execution.settings import Elsewhere, OnNamed
from fp4convert.makers.maker import Fact
from fp4convert.planning.steps import Shard, Task
from fp4convert.storage.checkpoint_files import CARD, GGUF
from fp4convert.storage.disk import (
    Mark,
    fsync_folder,
    hash_file,
    is_sealed,
    nbytes_there,
    seal,
    write_errors_at,
)
from fp4convert.storage.json_text import MISSHAPEN, TEXT_LIMIT
from fp4convert.storage.shard_writer import difference_from_package
from fp4convert.storage.system import open_no_link

READ_NBYTES = 1 << 20
POLL_SECONDS = 0.1  # in which an interrupt ends a wait


@dataclass(slots=True)
class OutputFolder:
    """The output folder while this process works in it.

    hashes     sha256 of every file that this process wrote, read again, or found sealed by another
    on_named   called with path, name and sha256 of every file that got its final name; several
               threads may call it
    elsewhere  where shards go; None where they stay
    """

    root: Path
    manifest: Manifest
    leases: Leases
    hashes: dict[str, str] = field(default_factory=dict)
    on_named: OnNamed = lambda path, file, sha256: None
    elsewhere: Elsewhere | None = None
    # Records of finished tasks, by key: who waits for others looks often.
    _parsed: dict[str, tuple[Mark, Done]] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.root / STATE

    @property
    def temps(self) -> Path:
        """Return the folder of this process's temporary files."""
        return self.state / "tmp" / self.leases.name

    def record_of(self, task: TaskFiles) -> Done | None:
        """Return the record of a finished task; None otherwise.

        A task whose files are gone or have other sizes is not finished, except for the model card,
        which people edit. A damaged record proves nothing. A record is parsed once as long as it
        stays the same file.
        """
        try:
            fd = open_no_link(self._record_path(task), os.O_RDONLY)
            with os.fdopen(fd, encoding="utf-8") as stream:
                mark = Mark.of(os.fstat(stream.fileno()))
                known = self._parsed.get(task.key)
                if known is None or known[0] != mark:
                    known = self._parsed[task.key] = mark, Done.from_json(stream.read(TEXT_LIMIT))
        except (OSError, *MISSHAPEN):
            return None
        done = known[1]
        if done.files.keys() != task.files.keys():
            return None
        if done.is_gone:
            return None if self.elsewhere is None else done
        for file, nbytes in task.files.items():
            found = nbytes_there(self.root / file)
            if found is None or (found != nbytes and file != CARD):
                return None
        return done

    def _record_path(self, task: TaskFiles) -> Path:
        return self.state / DONE / f"{task.key}.json"

    def nbytes_of(self, file: str) -> int:
        """Return the size of a finished file, or of one that has left."""
        if (nbytes := nbytes_there(self.root / file)) is not None:
            return nbytes
        return next((task.files[file] for task in self.manifest.tasks if file in task.files), 0)

    def missing(self) -> list[TaskFiles]:
        """List the tasks of the plan that are not finished."""
        return [task for task in self.manifest.tasks if self.record_of(task) is None]

    def forget(self, task: TaskFiles) -> None:
        """Remove the record of a task, so that it is done again."""
        with write_errors_at(self.root):
            self._record_path(task).unlink(missing_ok=True)
        for file in task.files:
            self.hashes.pop(file, None)

    def take_tasks(self, tasks: Iterable[TaskFiles]) -> Iterator[TaskFiles]:
        """Claim tasks that nobody has finished or works on, one by one."""
        named = {task.key: task for task in tasks}
        for key in self.leases.take_undone(
            named, lambda key: self.record_of(named[key]) is not None
        ):
            if self.is_given_up():
                raise self.make_given_up_error()
            self.remove(self.manifest.last)
            yield named[key]

    def remove(self, file: str) -> None:
        """Remove a file, if it is there.

        The file is moved to the temporary files of this process first. Where these are gone,
        another plan may have taken the folder over, and the move fails.
        """
        path, removed = self.root / file, self.temps / f"removed-{Path(file).name}"
        with write_errors_at(path):
            if not os.path.lexists(path):
                return
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            try:
                removed.write_bytes(b"")  # a file: no folder can take its place
                os.replace(path, removed)
            except FileNotFoundError:
                if self.is_given_up():
                    raise self.make_given_up_error() from None
            removed.unlink(missing_ok=True)

    def is_given_up(self) -> bool:
        """Return whether the temporary files of this process are gone."""
        try:
            self.temps.lstat()
        except OSError as error:  # of a disk that does not answer the work itself will tell
            return isinstance(error, FileNotFoundError)
        return False

    def make_given_up_error(self) -> OutputError:
        """Return the error of a process whose temporary files are gone.

        The folder may hold another plan by now.
        """
        detail = (
            f"{self.temps} was removed by another process, which saw no sign of life of this one, "
            "or by hand"
        )
        return OutputError(
            "given-up", detail, "Run the same command again: what is finished is kept."
        )

    def write_task(
        self,
        task: Task,
        fill: Callable[[Task, TaskWriter], tuple[Fact, ...] | None],
        check: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fill the shards of a task, flush and close them, and name them.

        The package safetensors opens each shard before it gets its name.

        fill   appends every tensor and returns the facts; None for unfinished shards, which are
               discarded, and the task is given back
        check  called with the size of every block that is hashed; what it raises ends the hashing
        """
        writer = TaskWriter(self.temps, task)
        try:
            if (facts := fill(task, writer)) is None:
                writer.discard()
                self.leases.drop(task.key)
                return
            files = {file: shard.finish(check) for file, shard in writer.shards.items()}
            for shard in task.shards:
                if not shard.file.endswith(GGUF):
                    _check_header(writer.shards[shard.file].path, shard)
        except BaseException:
            writer.discard()
            raise
        done = Done.of(files, facts)
        self.settle(TaskFiles.of(task), done, lambda file: writer.shards[file].path, check)

    def settle(
        self,
        task: TaskFiles,
        done: Done,
        place: Callable[[str], Path],
        check: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Give a task's files their final names and record that it is done.

        Files that go elsewhere are sent, recorded and removed. Where another process finished the
        task first, our files are removed.

        place  returns the path of a file
        check  called while a file is sent; what it raises ends the wait
        """
        is_first = self.record_of(task) is None
        if is_first and self.elsewhere and task.may_leave:
            self._send_away(self.elsewhere, task, done, place, check)
        elif is_first:
            for file, sha256 in done.files.items():
                self._give_name(place(file), file, sha256)
            seals = {
                file: seal(self.root / file, sha256, self.temps)
                for file, sha256 in done.files.items()
            }
            self.put(f"{DONE}/{task.key}.json", replace(done, seals=seals).as_json())
        else:
            for file in done.files:
                with write_errors_at(place(file)):
                    place(file).unlink()
        self.leases.drop(task.key)

    def _send_away(
        self,
        elsewhere: Elsewhere,
        task: TaskFiles,
        done: Done,
        place: Callable[[str], Path],
        check: Callable[[int], None],
    ) -> None:
        """Send a task's files elsewhere, record that, and remove them."""
        sent = [elsewhere.send(place(file), file, sha256) for file, sha256 in done.files.items()]
        for future in filter(None, sent):
            while not wait([future], POLL_SECONDS).done:
                check(0)
            future.result()
        self.put(f"{DONE}/{task.key}.json", replace(done, seals={}, is_gone=True).as_json())
        self.hashes |= done.files
        for file in done.files:
            with write_errors_at(place(file)):
                place(file).unlink(missing_ok=True)

    def send_kept(self) -> None:
        """Send away the files of an earlier run that kept them.

        Files that are unfinished, or not what that run wrote, are removed.
        """
        if self.elsewhere is None or self.leases.others():
            return
        for task in filter(lambda task: task.may_leave, self.manifest.tasks):
            done = self.record_of(task)
            if done and not done.is_gone and self._is_as_written(done):
                self._send_away(self.elsewhere, task, done, self.root.joinpath, lambda nbytes: None)
            elif done is None or not done.is_gone:
                self.forget(task)
            for file in task.files:
                self.remove(file)

    def _is_as_written(self, done: Done) -> bool:
        """Return whether the files of a task are what it wrote."""
        try:
            return all(
                is_sealed(self.root / file, sha256, done.seals.get(file))
                or hash_file(self.root / file) == sha256
                for file, sha256 in done.files.items()
            )
        except OSError:
            return False

    def write_texts(self, texts: dict[str, str]) -> None:
        """Write small files of ours under their final names."""
        for file, text in texts.items():
            temp = self.write_temp(file, (text.encode("utf-8"),))
            self._give_name(temp, file, _hash_temp(temp))

    def write_copies(
        self,
        task: TaskFiles,
        open_file: Callable[[str], BinaryIO],
        report: Callable[[str, int], None],
    ) -> None:
        """Copy files of the source; this process holds the task's lease.

        report  called with a file and the number of bytes copied since the last call
        """
        temps = {
            file: self.write_temp(f"{number}", _read_blocks(file, open_file, report))
            for number, file in enumerate(task.files)
        }
        done = Done({file: _hash_temp(temp) for file, temp in temps.items()})
        self.settle(task, done, temps.__getitem__)

    def write_temp(self, name: str, blocks: Iterable[bytes]) -> Path:
        """Write a whole temporary file, flushed to the disk."""
        temp = self.temps / f"small-{name}"
        with write_errors_at(temp), temp.open("wb") as out:
            for block in blocks:
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return temp

    def _give_name(self, temp: Path, file: str, sha256: str) -> None:
        final = self.root / file
        with write_errors_at(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temp, final)
            for place in final.parents:
                fsync_folder(place)
                if place == self.root:
                    break
        self.hashes[file] = sha256
        self.on_named(final, file, sha256)

    def put(self, name: str, text: str) -> None:
        """Write a file of ours beside plan.json, atomically."""
        final = self.state / name
        temp = self.write_temp(f"state-{final.name}", (text.encode("utf-8"),))
        refuse_links(self.root, DONE)  # as one that is planted meanwhile
        with write_errors_at(final):
            os.replace(temp, final)
            fsync_folder(final.parent)

    def sweep(self) -> None:
        """Remove temporary files of processes that are gone."""
        leftovers = list((self.state / "tmp").iterdir())
        # Asked last: whoever has a folder there had a lease before.
        living = {self.leases.name, *self.leases.others()}
        for leftover in leftovers:
            if leftover.name not in living:
                with suppress(FileNotFoundError):  # its process was just leaving
                    # Moved first, for its process may only sleep: it finds no place to go on.
                    swept = self.temps / f"swept-{leftover.name}"
                    os.replace(leftover, swept)
                    if swept.is_dir() and not swept.is_symlink():
                        shutil.rmtree(swept)
                    else:
                        swept.unlink()


def _check_header(path: Path, shard: Shard) -> None:
    """Raise RuntimeError where the package safetensors reads another header."""
    with write_errors_at(path):
        difference = difference_from_package(path, shard.outputs)
    if difference:
        raise RuntimeError(f"{shard.file} {difference}")


def _hash_temp(temp: Path) -> str:
    """Hash a temporary file, which another process may have removed."""
    with write_errors_at(temp):
        return hash_file(temp)


def _read_blocks(
    file: str, open_file: Callable[[str], BinaryIO], report: Callable[[str, int], None]
) -> Iterator[bytes]:
    """Read a file of the source block by block, and report each."""
    with open_file(file) as stream:
        while True:
            try:
                block = stream.read(READ_NBYTES)
            except OSError as error:  # not of the disk that is written to
                detail = f"{file} cannot be read: {error.strerror}"
                raise SourceError("source-unreadable", detail, "Run it again.") from error
            if not block:
                return
            yield block
            report(file, len(block))


@contextmanager
def entered(
    root: Path, manifest: Manifest, tell: Callable[[str], None] = lambda line: None
) -> Iterator[OutputFolder]:
    """Enter a folder of ours, among other processes that work in it.

    tell  gets a line where another process is waited for
    """
    refuse_all_links(root, manifest)
    leases = Leases(root / STATE / "claims", work=manifest.plan_id, tell=tell)
    folder = OutputFolder(root, manifest, leases)
    try:  # whatever stops the process from here on, its leases are given back
        leases.__enter__()
        with write_errors_at(root):
            for place in (folder.state / DONE, folder.temps):
                place.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        except OutputError as error:
            if folder.is_given_up():
                raise folder.make_given_up_error() from error
            raise
    finally:
        shutil.rmtree(folder.temps, ignore_errors=True)
        leases.__exit__(None, None, None)
