"""What an output folder remembers of its plan and of finished tasks: enough to go on, and to end it without the source."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from fp4convert.gguf_shard import GGUF
from fp4convert.sources import WEIGHTS
from fp4convert.tasks import Task


class Listed(NamedTuple):
    """A task as a plan lists it: its key, and the size of every file that it writes."""

    key: str
    files: dict[str, int]

    @staticmethod
    def of(task: Task) -> Listed:
        return Listed(task.key, {shard.file: shard.nbytes for shard in task.shards})


@dataclass(frozen=True, slots=True)
class Done:
    """A finished task.

    files          name -> sha256
    global_scales  scale group -> the float32 multiplier that its members in this shard got; groups of several shards alone
    """

    files: dict[str, str]
    global_scales: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Done:
        entry = json.loads(text)
        done = Done(dict(entry["files"]), dict(entry.get("global_scales", {})))
        if not {*map(type, done.files.values())} <= {str} or not {*map(type, done.global_scales.values())} <= {float}:
            raise TypeError("a record of other types")
        return done


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a run is for.

    identity  source, format and dialect: a folder begun for another identity is refused
    traits    everything else that decides the output's bytes, by the words in which a message names it
    tasks     what is to be done, the copies of small files included
    texts     small files of ours, in the order in which they are written after all tasks
    record    our own record, written last, but for the hashes of all other files; None where the last text is the last file
    last      the file written last; while it is absent the folder is unfinished
    origin    repository and commit that a re-run goes on with
    """

    identity: dict[str, object]
    traits: dict[str, str]
    tasks: tuple[Listed, ...]
    texts: dict[str, str]
    record: dict[str, object] | None
    last: str
    origin: dict[str, str | None] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Every file the run will write but the last record, relative to the folder."""
        return (*(file for task in self.tasks for file in task.files), *self.texts)

    @property
    def shards(self) -> list[str]:
        """The files of weights."""
        return [file for task in self.tasks for file in task.files if "/" not in file and file.endswith((WEIGHTS, GGUF))]

    @property
    def plan_id(self) -> str:
        return hashlib.sha256(json.dumps([self.identity, self.traits], sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, object]:
        """The document of plan.json; the order of texts and of the record's keys counts."""
        tasks = [task._asdict() for task in self.tasks]
        named = {"identity": self.identity, "traits": self.traits, "tasks": tasks, "texts": self.texts, "record": self.record}
        document = {"plan": self.plan_id, **named, "last": self.last, "source": self.origin}
        return {**document, "sha256": _hash(document)}

    @staticmethod
    def from_json(text: str) -> Purpose:
        """The plan that was written; ValueError, KeyError, TypeError or AttributeError where it is damaged."""
        entry = dict(json.loads(text))
        if entry.pop("sha256") != _hash(entry):
            raise ValueError("changed since it was written")
        purpose = Purpose(
            identity=dict(entry["identity"]),
            traits=dict(entry["traits"]),
            tasks=tuple(Listed(str(task["key"]), dict(task["files"])) for task in entry["tasks"]),
            texts=dict(entry["texts"]),
            record=None if entry["record"] is None else dict(entry["record"]),
            last=str(entry["last"]),
            origin=dict(entry["source"]),
        )
        for name in (purpose.last, *purpose.files, *(task.key for task in purpose.tasks)):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name} is outside the folder")
        return purpose


def _hash(document: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()
