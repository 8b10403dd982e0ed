"""Read and write plan.json and records; refuse foreign folders."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert.errors import OutputError
from fp4convert.makers.maker import Fact
from fp4convert.numerics.error_sums import Account, Sums
from fp4convert.planning.steps import Task
from fp4convert.storage.checkpoint_files import (
    GGUF,
    HUB_FILE,
    PLAN_FILE,
    RECORD,
    REPORT,
    UNDIGESTED,
    WEIGHTS,
    recorded_hashes,
)
from fp4convert.storage.disk import Mark, write_errors_at
from fp4convert.storage.json_text import MISSHAPEN, parse_json_object, read_text_file
from fp4convert.storage.source import Source, read_whole

STATE, PLAN = PLAN_FILE.split("/")
HUB = HUB_FILE.split("/")[1]
ENDED = "ended.json"
LARGE_NBYTES = 16 << 20  # of a file copied by itself: after an interruption little is done again
DONE = "done"  # the folder of records


class TaskFiles(NamedTuple):
    """A task of plan.json: its key, and the sizes of the files that it writes."""

    key: str
    files: dict[str, int]

    @staticmethod
    def of(task: Task) -> TaskFiles:
        return TaskFiles(task.key, task.files)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    @property
    def may_leave(self) -> bool:
        """Return whether all files are weights or large copies."""
        return all(
            nbytes >= LARGE_NBYTES or file.endswith((WEIGHTS, GGUF))
            for file, nbytes in self.files.items()
        )


@dataclass(frozen=True, slots=True)
class Done:
    """A finished task.

    files          name -> sha256
    global_scales  scale group of several shards -> the float32 multiplier of its members here
    accounts       rounded module -> its losses
    taken_over     number of modules whose codes were taken over
    saturated      number of modules with weights beyond their given global scales
    erased_rows    number of rows that large global scales turned into zeros
    norms          norm that stays -> whether it holds zeros alone
    seals          of the files under their final names
    is_gone        the files have left the folder
    """

    files: dict[str, str]
    global_scales: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    taken_over: int = 0
    saturated: int = 0
    erased_rows: int = 0
    norms: dict[str, bool] = field(default_factory=dict)
    seals: dict[str, str] = field(default_factory=dict)
    is_gone: bool = False

    @staticmethod
    def of(files: dict[str, str], facts: Iterable[Fact]) -> Done:
        """Make the record of a task from the facts of its makers."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for fact in facts:
            found[fact.kind][fact.about] = fact.value
        erased_rows = sum(found["erased"].values())
        counts = len(found["taken_over"]), len(found["saturated"]), erased_rows
        return Done(files, found["global_scale"], found["account"], *counts, found["norm"])

    def as_json(self) -> str:
        # asdict copies each count of each histogram: 0.15 ms for each matrix.
        return json.dumps(self, default=_fields_of, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Done:
        entry = json.loads(text)
        files, accounts = dict(entry["files"]), dict(entry.get("accounts", {}))
        done = Done(
            files,
            dict(entry.get("global_scales", {})),
            {module: Account.from_json(account) for module, account in accounts.items()},
            int(entry.get("taken_over", 0)),
            int(entry.get("saturated", 0)),
            int(entry.get("erased_rows", 0)),
            dict(entry.get("norms", {})),
            dict(entry.get("seals", {})),
            entry.get("is_gone", False) is True,
        )
        types = {*map(type, done.files.values())}, {*map(type, done.global_scales.values())}
        if not types[0] <= {str} or not types[1] <= {float}:
            raise TypeError("a record of other types")
        return done


def _fields_of(value: Done | Account | Sums) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def nbytes_written(tasks: Iterable[TaskFiles], texts: Mapping[str, str]) -> int:
    """Count the bytes of tasks' files and of small files of ours."""
    small = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts.values())
    return small + sum(task.nbytes for task in tasks)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of plan.json.

    identity  source, format and dialect: a folder begun for another identity is refused
    traits    everything else that decides the output's bytes, by the words that messages use
    tasks     all tasks, with those that copy files
    texts     small files of ours, in the order in which they are written after all tasks
    record    our own record without the hashes, written last; None where the last text is the last
              file
    last      the file written last; while it is absent the folder is unfinished
    origin    repository and commit that a re-run goes on with
    root      the folder's path when it was begun
    next      commands to run once it is finished
    parts     folder of a component -> the id of its plan, which ends before this one
    """

    identity: dict[str, str | None]
    traits: dict[str, str]
    tasks: tuple[TaskFiles, ...]
    texts: dict[str, str]
    record: dict[str, object] | None
    last: str
    origin: dict[str, str | None] = field(default_factory=dict)
    root: str = ""
    next: tuple[str, ...] = ()
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """List every file except the last record."""
        return (*(file for task in self.tasks for file in task.files), *self.texts)

    @property
    def nbytes(self) -> int:
        """Count the bytes of every file except the last record."""
        return nbytes_written(self.tasks, self.texts)

    @property
    def shards(self) -> list[str]:
        """List the files of weights."""
        files = (file for task in self.tasks for file in task.files)
        return [file for file in files if "/" not in file and file.endswith((WEIGHTS, GGUF))]

    @property
    def plan_id(self) -> str:
        traits = json.dumps([self.identity, self.traits], sort_keys=True)
        return hashlib.sha256(traits.encode()).hexdigest()

    def as_json(self) -> dict[str, object]:
        """Return the document of plan.json.

        The order of texts and of the record's keys counts.
        """
        document: dict[str, object] = {
            "plan": self.plan_id,
            "identity": self.identity,
            "traits": self.traits,
            "tasks": [task._asdict() for task in self.tasks],
            "texts": self.texts,
            "record": self.record,
            "last": self.last,
            "source": self.origin,
            "root": self.root,
            "next": self.next,
            "parts": self.parts,
        }
        return {**document, "sha256": _hash(document)}

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parse plan.json.

        Raises  one of MISSHAPEN where it is damaged
        """
        entry = dict(json.loads(text))
        if entry.pop("sha256") != _hash(entry):
            raise ValueError("changed since it was written")
        manifest = Manifest(
            identity=_words(entry["identity"]),
            traits=_words(entry["traits"]),
            tasks=tuple(
                TaskFiles(str(task["key"]), dict(task["files"])) for task in entry["tasks"]
            ),
            texts=_words(entry["texts"]),
            record=None if entry["record"] is None else dict(entry["record"]),
            last=str(entry["last"]),
            origin=_words(entry["source"]),
            root=str(entry.get("root", "")),
            next=tuple(map(str, entry.get("next", ()))),
            parts=_words(entry.get("parts", {})),
        )
        keys = (task.key for task in manifest.tasks)
        names = [manifest.last, *manifest.files, *keys, *manifest.parts]
        for name in names:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} is no file in the folder")
            os.fsencode(name)
        _words({"format": (manifest.record or {}).get("format")})
        for small in manifest.texts.values():
            small.encode("utf-8")
        json.dumps(manifest.record, ensure_ascii=False).encode("utf-8")
        if not all(task.files for task in manifest.tasks):
            raise ValueError("a task without files")
        sizes = [size for task in manifest.tasks for size in task.files.values()]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("sizes that no files have")
        return manifest


def _words(value: Any) -> dict[str, Any]:
    """Return an object whose values are texts or null; TypeError for others."""
    words = dict(value)
    if not {*map(type, words.values())} <= {str, type(None)}:
        raise TypeError("no words")
    return words


def _hash(document: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def read_manifest(root: Path) -> Manifest | None:
    """Read the plan of a folder; None where it is new.

    Raises  OutputError where the folder is foreign, or its plan damaged
    """
    path = root / STATE / PLAN
    if not path.exists():
        refuse_foreign(root)
        return None
    try:
        return Manifest.from_json(read_text_file(path))
    except (OSError, *MISSHAPEN):
        detail = f"{path} is damaged; expected the plan that began {root}"
        next_step = "Remove the folder yourself, or choose another: -o FOLDER."
        raise OutputError("other-plan", detail, next_step) from None


def read_ended(root: Path) -> tuple[Mark | None, str, dict[str, str]]:
    """Read ended.json of a folder.

    Returns  a mark that is new each time, None where the folder was never finished; the id of the
             plan; and the sha256 of every file
    """
    try:
        with (root / STATE / ENDED).open("rb") as stream:
            mark = Mark.of(os.fstat(stream.fileno()))
        entry = json.loads(read_text_file(root / STATE / ENDED))
        return mark, str(entry["plan"]), _words(entry["files"])
    except (OSError, *MISSHAPEN):
        return None, "", {}


def read_ended_files(root: Path) -> dict[str, str]:
    """Return the sha256 of every file of a finished folder.

    Raises  OutputError where the list cannot be read: it must not pass for an empty one
    """
    mark, _, files = read_ended(root)
    if mark is None:
        detail = f"{root / STATE / ENDED} cannot be read; expected the list of all files"
        raise OutputError("cannot-read", detail, "Run the same command again.")
    return files


def refuse_foreign(root: Path, is_forced: bool = False) -> None:
    """Raise OutputError where a folder holds foreign files."""
    others = sorted(set(os.listdir(root)) - {STATE})
    if others and not (root / PLAN_FILE).exists():  # looked for last: it comes before all others
        detail = f"{root} is not empty (it holds {others[0]!r}) and was not begun by fp4convert"
        next_step = "Choose another: -o FOLDER."
        if is_forced:
            next_step = f"--force discards only what fp4convert wrote. {next_step}"
        raise OutputError("foreign-output", f"{detail}; expected a new or empty folder", next_step)


def digest_of(hashes: dict[str, str]) -> str:
    """Hash the hashes of all files but UNDIGESTED, sorted by name.

    The sha256 is over lines "sha256  name": `sha256sum FILES | sha256sum`.  Reports of components
    are left out too.
    """
    lines = [
        f"{hashes[file]}  {file}\n"
        for file in sorted(hashes)
        if file not in UNDIGESTED and not file.endswith(f"/{REPORT}")
    ]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def recorded_digest(source: Source) -> str | None:
    """Return the digest of a finished artifact; None without a record."""
    if not source.has_file(RECORD):
        return None
    text = read_whole(source, RECORD)
    hashes = recorded_hashes(parse_json_object(text, RECORD))
    return digest_of({**hashes, RECORD: hashlib.sha256(text).hexdigest()}) if hashes else None


def refuse_links(root: Path, *names: str) -> None:
    """Raise OutputError for a link: leftovers are removed in our folders."""
    refuse_linked_folders(root, (f"{STATE}/{name}/any" for name in names))


def refuse_linked_folders(root: Path, files: Iterable[str]) -> None:
    """Raise OutputError where a folder above a file is a link.

    files  below root, which itself may be a link
    """
    folders = {root / parent for file in files for parent in Path(file).parents if parent.parts}
    for folder in sorted(folders):
        with write_errors_at(folder):
            is_link = folder.is_symlink()
        if is_link:
            detail = f"{folder} is a link; expected a folder made by fp4convert"
            detail += ", in which it may write and remove files"
            next_step = "Remove the link, or choose another folder: -o FOLDER."
            raise OutputError("foreign-output", detail, next_step)
