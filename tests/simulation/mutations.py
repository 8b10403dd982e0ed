"""Faults of the code that the seeds must find: each is a change of one place.

A mutation is a file, text in it, and what stands there instead. The package is loaded from its
own files, but for that one, which is compiled from the changed text: nothing on the disk changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Mutation:
    """A change of the code.

    file    below fp4convert
    why     what is wrong then
    within  seeds, from 0 on, in which it is found
    """

    file: str
    old: str
    new: str
    why: str
    within: int = 1500


FOLDER, LEASES = "execution/folder.py", "execution/leases.py"
TAKEOVER = "execution/takeover.py"
DISK, FINISH, WRITER = "storage/disk.py", "execution/finish.py", "storage/shard_writer.py"
UPLOAD, REPOSITORY = "storage/hub/upload.py", "storage/hub/repository.py"
PUBLISH = "commands/publish.py"
JOB, PLAN = "execution/carry_out.py", "execution/plan_file.py"

MUTATIONS: dict[str, Mutation] = {
    "no-fsync-of-shards": Mutation(
        WRITER,
        "pool.submit(os.fsync, self._fd)",
        "pool.submit(int, self._fd)",
        "a shard gets its name before its bytes are on the disk",
    ),
    "failed-fsync-is-ignored": Mutation(
        WRITER,
        "flushed.result()",
        "flushed.exception()",
        "a shard whose flush failed counts as written",
    ),
    "no-fsync-of-small-files": Mutation(
        FOLDER,
        "os.fsync(out.fileno())",
        "out.fileno()",
        "records and copies get their names before their bytes are on the disk",
    ),
    "small-files-flushed-late": Mutation(
        FOLDER,
        "            out.flush()\n            os.fsync(out.fileno())",
        "            os.fsync(out.fileno())",
        "fsync comes before the last bytes leave the buffer",
    ),
    "no-fsync-of-names": Mutation(
        FOLDER,
        "                fsync_folder(place)\n                if place == self.root:",
        "                if place == self.root:",
        "done records stand for shards whose names are not on the disk",
    ),
    "no-fsync-of-folders-above": Mutation(
        FOLDER,
        "                if place == self.root:\n",
        "                if True:\n",
        "the folder of a file in a folder may be gone after a power cut",
    ),
    "no-fsync-of-parents": Mutation(
        TAKEOVER,
        "            fsync_parents(folder.state)",
        "            pass",
        "the whole output may be gone after a power cut",
    ),
    "no-fsync-of-done": Mutation(
        FOLDER,
        "            os.replace(temp, final)\n            fsync_folder(final.parent)",
        "            os.replace(temp, final)",
        "finished tasks are forgotten after a power cut",
    ),
    "fsync-of-a-folder-fails-silently": Mutation(
        DISK,
        "UNKNOWN_HERE = (errno.EINVAL,",
        "UNKNOWN_HERE = (errno.EIO, errno.ENOSPC, errno.EINVAL,",
        "names count as being on the disk when that failed",
    ),
    "done-before-names": Mutation(
        FOLDER,
        "        elif is_first:\n",
        '        elif is_first:\n            self.put(f"{DONE}/{task.key}.json", done.as_json())\n',
        "a task is recorded before its files have their names",
    ),
    "shards-in-place": Mutation(
        "execution/fill.py",
        "                    folder / shard.file, shard.header, shard.outputs, shard.nbytes",
        "                    folder.parents[2] / shard.file,"
        " shard.header, shard.outputs, shard.nbytes",
        "shards are written under their final names",
    ),
    "record-first": Mutation(
        FINISH,
        "    folder.write_texts(manifest.texts)\n",
        "    if record is not None:\n"
        "        known = {f: folder.hashes[f] for f in manifest.files if f in folder.hashes}\n"
        "        folder.write_texts({manifest.last: _record_text(record, known)})\n"
        "    folder.write_texts(manifest.texts)\n",
        "the record stands before the files that it names",
    ),
    "nothing-is-checked-at-the-end": Mutation(
        JOB,
        '        why = "not all of them are what was written"\n',
        '        again, why = [], "not all of them are what was written"\n',
        "a shard that was damaged since stays",
    ),
    "seals-without-times": Mutation(
        DISK,
        "json.dumps([machine, status.st_dev, *mark, sha256])",
        "json.dumps([machine, status.st_dev, status.st_size, sha256])",
        "a shard that was damaged since counts as sealed",
    ),
    "short-writes": Mutation(
        WRITER,
        "data, offset = data[written:], offset + written",
        "data, offset = data[WRITE_NBYTES:], offset + WRITE_NBYTES",
        "what the system left over of a write is never written",
    ),
    "short-hash": Mutation(
        DISK,
        "        yield block[:count]\n",
        "        yield block[:count]\n        return\n",
        "a hash ends with the first short read",
    ),
    "claims-of-the-dead-stay": Mutation(
        LEASES,
        '        return started in (owner.get("started"), UNKNOWN_START), owner',
        "        return True, owner",
        "a dead process of the same machine keeps its claims for a minute",
    ),
    "claims-never-end": Mutation(
        LEASES,
        "        if now - since > most_seconds:\n            return False, owner\n",
        "",
        "a dead process of another machine keeps its claims for ever",
    ),
    "any-number-is-alive": Mutation(
        LEASES,
        '        return started in (owner.get("started"), UNKNOWN_START), owner',
        "        return started is not None, owner",
        "the number of a dead process, given to another, keeps its claims",
    ),
    "host-is-the-machine": Mutation(
        LEASES,
        'keys = ("host", "boot", "processes")',
        'keys = ("host",)',
        "machines of one name take each other's processes for dead",
    ),
    "the-heart-fails": Mutation(
        LEASES,
        "                for lease in list(self._held):\n",
        "                for lease in self._held[0]:\n",
        "a thread ends with a traceback, and nobody hears of it",
    ),
    "merge-finds-damage": Mutation(
        FINISH,
        "    for task in find_harmed(folder, phases):\n",
        "    for task in find_harmed(folder, phases) or folder.manifest.tasks:\n",
        "merge calls whole shards damaged",
    ),
    "no-heartbeat": Mutation(
        LEASES,
        "                            os.utime(self._folder / lease)",
        "                            pass",
        "a process that works for longer than a minute loses its claims",
    ),
    "clocks-are-compared": Mutation(
        LEASES,
        "        if now - since > most_seconds:\n",
        "        if time.time() - status.st_mtime_ns / 1e9 > most_seconds:\n",
        "machines whose clocks disagree take each other's claims",
    ),
    "empty-claims-are-dead": Mutation(
        LEASES,
        "SILENT_SECONDS = 5.0",
        "SILENT_SECONDS = -1.0",
        "a claim that is being made is taken away",
    ),
    "sweeps-all": Mutation(
        FOLDER,
        "living = {self.leases.name, *self.leases.others()}",
        "living = {self.leases.name}",
        "the files of others on their way are removed",
    ),
    "sweeps-by-an-old-list": Mutation(
        FOLDER,
        '        leftovers = list((self.state / "tmp").iterdir())\n'
        "        # Asked last: whoever has a folder there had a lease before.\n"
        "        living = {self.leases.name, *self.leases.others()}\n",
        "        living = {self.leases.name, *self.leases.others()}\n"
        '        leftovers = list((self.state / "tmp").iterdir())\n',
        "the files of a process that has just come are removed",
        within=4000,
    ),
    "drops-what-others-hold": Mutation(
        LEASES,
        '        if is_empty or (owner is not None and owner.get("worker") == self.name):',
        "        if True:",
        "a process that slept takes the claim of the one that follows it",
    ),
    "not-looked-at-again": Mutation(
        LEASES,
        "            if is_done(task):  # somebody did it before we took it\n"
        "                self.drop(task)\n"
        "            else:\n"
        "                yield task",
        "            yield task",
        "a shard that another has just finished is made again",
    ),
    "a-sleeper-goes-on": Mutation(
        TAKEOVER,
        'hold_when_free(PLANNING, "begins here", is_fencing=True)',
        'hold_when_free(PLANNING, "begins here")',
        "who slept while it began writes its plan over another's",
        within=4000,
    ),
    "sent-without-a-wait": Mutation(
        FOLDER,
        "            future.result()\n        self.put(",
        "            pass\n        self.put(",
        "a shard leaves the disk though the Hub has not taken it",
    ),
    "believes-that-the-hub-keeps": Mutation(
        UPLOAD,
        "        return {name for name, (_, oid) in asked.items() if oid not in held}",
        "        return set()",
        "what the Hub has lost is never made again",
        within=4000,
    ),
    "forgets-what-was-sent": Mutation(
        PUBLISH,
        "        sizes |= gone\n",
        "        gone = {}\n",
        "files that left the disk are not in the commit",
    ),
    "takes-its-own-for-stale": Mutation(
        REPOSITORY,
        "            and name not in kept\n",
        "",
        "a second push removes the weights of the first",
        within=4000,
    ),
}


def mutated(name: str, root: Path) -> str:
    """Return the changed text of the mutation's file; it changes exactly one place."""
    mutation = MUTATIONS[name]
    text = (root / mutation.file).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{name}: {mutation.file} has its text {text.count(mutation.old)} times")
    return text.replace(mutation.old, mutation.new)


class _Mutant(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Loads one module from its changed text."""

    def __init__(self, module: str, path: Path, text: str) -> None:
        self._module, self._path, self._text = module, path, text

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def get_source(self, name: str) -> str:
        return self._text


def apply(name: str) -> None:
    """Have the package imported with the mutation from now on."""
    found = importlib.util.find_spec("fp4convert")
    if found is None or found.origin is None or "fp4convert.execution" in sys.modules:
        raise RuntimeError("a mutation comes before the package is imported")
    root, file = Path(found.origin).parent, MUTATIONS[name].file
    module = "fp4convert." + file.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, _Mutant(module, root / file, mutated(name, root)))
